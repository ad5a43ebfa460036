// Shared memory: who may read and write it when, words that threads write, and tiles that TMA brings.
//
// A use must come after whatever it may not overlap: what happened before is known from clocks (state.h), whatever the order in which this run does things.
#pragma once
#include "barriers.h"

namespace hopper {

inline void check_read(Program& p, const Uses& uses, const Warp& by, u32 address) {
    if (!uses.written) fail("program %u: warp %u reads shared memory at %u that nobody has written", p.index, by.index, address);
    if (uses.time > clock_of(by).at[uses.slot])
        fail("program %u: warp %u reads shared memory at %u that may not have arrived yet", p.index, by.index, address);
}
inline void check_write(Program& p, Uses& uses, const Warp& by, u32 slot, u32 time, u32 address) {
    const Clock& clock = clock_of(by);
    if (uses.written && uses.time > clock.at[uses.slot])
        fail("program %u: warp %u writes shared memory at %u beside another", p.index, by.index, address);
    for (u32 i = 0; i < MOST_WARPS; i++)
        if (uses.reads[i] > clock.at[i])
            fail("program %u: warp %u overwrites shared memory at %u that warp %u may not have read yet", p.index, by.index, address, i);
    uses = Uses();
    uses.written = true, uses.slot = slot, uses.time = time;
}

// ---- words -----------------------------------------------------------------------------------------------------------
void write_word(u32 to, u32 value) {
    preempt();
    Program& p = *current->program;
    check_range(p, to, 4);
    check_aligned((void*)(size_t)to, 4);
    const Warp& w = *current->warp;
    check_write(p, p.words[to], w, w.slot, clock_of(w).at[w.slot], to);
    memcpy(&p.shared[to - WINDOW], &value, 4);
}
u32 read_word(u32 from) {
    Program& p = *current->program;
    check_range(p, from, 4);
    check_aligned((void*)(size_t)from, 4);
    const Warp& w = *current->warp;
    Uses& uses = p.words[from];
    check_read(p, uses, w, from);
    uses.reads[w.slot] = clock_of(w).at[w.slot];
    u32 value;
    memcpy(&value, &p.shared[from - WINDOW], 4);
    return value;
}

// ---- tiles -----------------------------------------------------------------------------------------------------------
inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }  // 128 bytes: pieces of 16 change places within a row, otherwise in each of 8

bool is_in_flight(const Program& p, u32 from, u32 to, std::string& who);  // products.h

void copy_tile(u32 to, const void* map, u32 bar, int column, int row, int head, int batch, u32 programs) {
    preempt();
    Program& own = *current->program;
    Copy copy{&own, *(const TensorMap*)map, to, bar, {column, row, head, batch}, 0};
    const TensorMap& m = copy.map;
    const u32 rows = m.box[1], bytes = rows * 128;
    if (m.box[0] * m.element != 128 || m.swizzle != 3 || m.box[2] != 1 || m.box[3] != 1)
        fail("a box of %u x %u is copied with swizzle %u: not emulated", m.box[0], rows, m.swizzle);
    if (to % BLOCK || rows % 8) fail("%u rows are copied to %u: tiles lie on 1024 bytes", rows, to);
    for (u32 rank = 0; rank < own.cluster->programs.size(); rank++) {
        if (programs ? !(programs >> rank & 1) : rank != own.rank) continue;
        Program& p = *own.cluster->programs[rank];
        check_range(p, to, bytes);
        std::string who;
        if (is_in_flight(p, to, to + bytes, who)) fail("program %u: a copy to %u overwrites what a product of %s is reading", p.index, to, who.c_str());
        const Mbarrier& b = bar_at(p, bar, true);
        for (u32 at = to; at < to + bytes; at += BLOCK) check_write(p, p.blocks[at / BLOCK], *current->warp, b.slot, b.phases + 1, at);
        for (u32 i = 0; i < bytes; i += 4) memcpy(&p.shared[to - WINDOW + i], &IN_FLIGHT, 4);
        copy.to_program = &p;
        copy.priority = draw();
        machine->copies.push_back(copy);
    }
    preempt();
}

inline void deliver(const Copy& c) {
    Program& p = *c.to_program;
    const TensorMap& m = c.map;
    const bool exists = c.at[2] >= 0 && (u64)c.at[2] < m.sizes[2] && c.at[3] >= 0 && (u64)c.at[3] < m.sizes[3];
    for (u32 r = 0; r < m.box[1]; r++) {
        const int row = c.at[1] + (int)r;
        unsigned char line[128] = {};
        if (exists && row >= 0 && (u64)row < m.sizes[1]) {
            const unsigned char* from = m.address + row * m.strides[0] + c.at[2] * m.strides[1] + c.at[3] * m.strides[2];
            for (u32 i = 0; i < m.box[0]; i++) {
                const int column = c.at[0] + (int)i;
                if (column >= 0 && (u64)column < m.sizes[0]) memcpy(line + i * m.element, from + (u64)column * m.element, m.element);
            }
        }
        for (u32 i = 0; i < 128; i += 16) memcpy(&p.shared[swizzled(c.to + 128 * r + i) - WINDOW], line + i, 16);
    }
    Mbarrier& b = p.bars.at(c.bar);
    b.bytes -= m.box[1] * 128;
    complete_if_done(p, b);
}

}  // namespace hopper
