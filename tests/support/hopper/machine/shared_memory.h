// Shared memory: who may read and write it when, what threads read and write, and tiles that TMA brings and takes.
//
// A use must come after whatever it may not overlap: what happened before is known from clocks (state.h), whatever the order in which this run does things.
#pragma once
#include "barriers.h"
#include "numbers.h"

namespace hopper {

constexpr u32 PENDING = ~0u;           // the time of a read that nobody has waited for

// Whether a read finds what was written. A kernel may read what it then does not use (machine->reads_early): it finds NaNs.
inline bool check_read(Program& p, const Uses& uses, const Warp& by, u32 address) {
    const bool is_there = uses.written && uses.time <= clock_of(by).at[uses.slot];
    if (is_there || machine->reads_early) return is_there;
    if (!uses.written) fail("program %u: warp %u reads shared memory at %u that nobody has written", p.index, by.index, address);
    fail("program %u: warp %u reads shared memory at %u that may not have arrived yet", p.index, by.index, address);
}
inline void check_write(Program& p, const Uses& uses, const Warp& by, u32 address) {
    const Clock& clock = clock_of(by);
    if (uses.written && uses.time > clock.at[uses.slot])
        fail("program %u: warp %u writes shared memory at %u beside another", p.index, by.index, address);
    for (u32 i = 0; i < MOST_WARPS; i++)
        if (uses.reads[i] > clock.at[i])
            fail("program %u: warp %u overwrites shared memory at %u that warp %u may not have read yet", p.index, by.index, address, i);
}

// The uses of all that lies in [from, to): of whole blocks where nobody used less, of words elsewhere.
template <typename Use> inline void for_uses(Program& p, u32 from, u32 to, Use use) {
    for (u32 at = from / 4 * 4; at < to;) {
        Block& block = p.blocks.at(at / BLOCK);
        const bool is_whole = at % BLOCK == 0 && at + BLOCK <= to;
        if (is_whole && block.words.empty()) {
            use(block.whole, at);
            at += BLOCK;
            continue;
        }
        if (block.words.empty()) block.words.assign(BLOCK / 4, block.whole);
        const u32 end = is_whole ? at + BLOCK : (at / BLOCK + 1) * BLOCK < to ? (at / BLOCK + 1) * BLOCK : to;
        for (; at < end; at += 4) use(block.words[at % BLOCK / 4], at);
    }
}
inline bool read_uses(Program& p, const Warp& by, u32 from, u32 to, u32 time) {
    bool is_there = true;
    for_uses(p, from, to, [&](Uses& uses, u32 at) {
        is_there &= check_read(p, uses, by, at);
        if (uses.reads[by.slot] != PENDING) uses.reads[by.slot] = time;
    });
    return is_there;
}
inline void read_until_now(Program& p, const Warp& by, u32 from, u32 to) {
    for_uses(p, from, to, [&](Uses& uses, u32) { uses.reads[by.slot] = clock_of(by).at[by.slot]; });
}
inline void write_uses(Program& p, const Warp& by, u32 from, u32 to, u32 slot, u32 time) {
    Uses after;
    after.written = true, after.slot = slot, after.time = time;
    for_uses(p, from, to, [&](Uses& uses, u32 at) {
        check_write(p, uses, by, at);
        uses = after;
    });
    for (u32 at = (from + BLOCK - 1) / BLOCK * BLOCK; at + BLOCK <= to; at += BLOCK) {
        p.blocks[at / BLOCK].words.clear();
        p.blocks[at / BLOCK].whole = after;
    }
}
inline unsigned char* shared_at(Program& p, u32 address) { return &p.shared[address - machine->window]; }

inline bool is_beside_another(Program& p, const Warp& by, u32 to) {
    bool is = false;
    for_uses(p, to, to + 1, [&](Uses& uses, u32) { is = uses.written && uses.time > clock_of(by).at[uses.slot]; });
    return is;
}

// ---- threads ---------------------------------------------------------------------------------------------------------
void write_shared(u32 to, const void* value, u32 bytes) {
    preempt();
    Program& p = *current->program;
    check_range(p, to, bytes);
    check_aligned((void*)(size_t)to, bytes);
    const Warp& w = *current->warp;
    const bool may_meet = bytes < 4 || memcmp(shared_at(p, to), value, bytes) == 0;  // halves of a word, or the same word
    if (!may_meet || !is_beside_another(p, w, to)) write_uses(p, w, to, to + bytes, w.slot, clock_of(w).at[w.slot]);
    memcpy(shared_at(p, to), value, bytes);
}
void read_shared(u32 from, void* value, u32 bytes) {
    Program& p = *current->program;
    check_range(p, from, bytes);
    check_aligned((void*)(size_t)from, bytes);
    const Warp& w = *current->warp;
    const bool is_there = read_uses(p, w, from, from + bytes, clock_of(w).at[w.slot]);
    memcpy(value, is_there ? (const void*)shared_at(p, from) : &IN_FLIGHT, bytes);
}

// ---- tiles -----------------------------------------------------------------------------------------------------------
// Pieces of 16 bytes change places within 32, 64 or 128 bytes, otherwise in each of 2, 4 or 8 lines of 128. `mode` is CU_TENSOR_MAP_SWIZZLE_*.
inline u32 swizzled(u32 address, u32 mode) { return address ^ (address >> 7 & ((1u << mode) - 1)) << 4; }

bool is_in_flight(const Program& p, u32 from, u32 to, std::string& who);  // products.h

inline Copy copy_of(Program& p, u32 shared, const void* map, const int* at, Direction direction) {
    Copy copy{&p, *(const TensorMap*)map, shared, 0, {}, draw(), direction};
    const TensorMap& m = copy.map;
    const u32 line = m.box[0] * m.element;
    if (m.swizzle > 0 && line != 16u << m.swizzle) fail("a box of lines of %u bytes is copied with swizzle %u: not emulated", line, m.swizzle);
    if (shared % (m.swizzle > 0 ? 8u * line : 128u)) fail("a tile lies at %u", shared);
    for (u32 i = 0; i < m.rank; i++) copy.at[i] = at[i];
    check_range(p, shared, m.bytes());
    return copy;
}

void load_tile(u32 to, const void* map, u32 bar, const int* at, u32 programs) {
    preempt();
    Program& own = *current->program;
    const u32 bytes = ((const TensorMap*)map)->bytes();
    for (u32 rank = 0; rank < own.cluster->programs.size(); rank++) {
        if (programs ? !(programs >> rank & 1) : rank != own.rank) continue;
        Program& p = *own.cluster->programs[rank];
        Copy copy = copy_of(p, to, map, at, LOAD);
        copy.bar = bar;
        std::string who;
        if (is_in_flight(p, to, to + bytes, who)) fail("program %u: a copy to %u overwrites what a product of %s is reading", p.index, to, who.c_str());
        const Mbarrier& b = bar_at(p, bar, true);
        write_uses(p, *current->warp, to, to + bytes, b.slot, b.phases + 1);
        for (u32 i = 0; i < bytes; i += 4) memcpy(shared_at(p, to + i), &IN_FLIGHT, 4);
        machine->copies.push_back(copy);
    }
    preempt();
}
void store_tile(u32 from, const void* map, const int* at, bool add) {
    preempt();
    Program& p = *current->program;
    Copy copy = copy_of(p, from, map, at, add ? ADD : STORE);
    copy.by = current, copy.group = current->store_groups;
    read_uses(p, *current->warp, from, from + copy.map.bytes(), PENDING);
    current->stores.push_back({from, from + copy.map.bytes(), copy.group});
    machine->copies.push_back(copy);
    preempt();
}
void stores_commit() { current->store_groups++; }

inline void add_floats(unsigned char* to, const unsigned char* from, u32 bytes) {
    for (u32 i = 0; i < bytes; i += 4) {
        float x, y;
        memcpy(&x, to + i, 4), memcpy(&y, from + i, 4);
        x += y;
        memcpy(to + i, &x, 4);
    }
}
inline void deliver(const Copy& c) {
    Program& p = *c.program;
    const TensorMap& m = c.map;
    const u32 line = m.box[0] * m.element, piece = line < 16 ? line : 16, lines = m.bytes() / line;
    for (u32 n = 0; n < lines; n++) {
        const unsigned char* start = m.address;
        bool exists = true;
        for (u32 i = 1, rest = n; i < m.rank; rest /= m.box[i], i++) {
            const long long at = (long long)c.at[i] + rest % m.box[i];
            exists &= at >= 0 && (u64)at < m.sizes[i];
            start += at * (long long)m.strides[i - 1];
        }
        const u32 to = c.shared + n * line;
        unsigned char bytes[1024] = {};
        long long first = c.at[0] < 0 ? -c.at[0] : 0, last = (long long)m.sizes[0] - c.at[0];  // columns that exist
        if (last > m.box[0]) last = m.box[0];
        if (!exists || last < first) last = first;
        unsigned char* memory = (unsigned char*)start + ((long long)c.at[0] + first) * m.element;
        const u32 begin = first * m.element, count = (last - first) * m.element;
        if (c.direction == LOAD && count > 0) memcpy(bytes + begin, memory, count);
        for (u32 i = 0; i < line; i += piece) {
            unsigned char* there = shared_at(p, swizzled(to + i, m.swizzle));
            c.direction == LOAD ? memcpy(there, bytes + i, piece) : memcpy(bytes + i, there, piece);
        }
        if (c.direction == STORE && count > 0) memcpy(memory, bytes + begin, count);
        if (c.direction == ADD) add_floats(memory, bytes + begin, count);
    }
    if (c.direction != LOAD) return;
    Mbarrier& b = p.bars.at(c.bar);
    b.bytes -= m.bytes();
    complete_if_done(p, b);
}
void stores_wait(u32 left) {
    preempt();
    Thread& t = *current;
    for (auto c = machine->copies.begin(); c != machine->copies.end();) {
        const bool awaited = c->by == &t && c->group + left < t.store_groups;
        if (awaited) deliver(*c);
        c = awaited ? machine->copies.erase(c) : c + 1;
    }
    std::vector<Stored> rest;
    for (const Stored& s : t.stores)
        if (s.group + left < t.store_groups)
            read_until_now(*t.program, *t.warp, s.from, s.to);  // whoever comes after this wait may overwrite it
        else
            rest.push_back(s);
    t.stores = rest;
}

}  // namespace hopper
