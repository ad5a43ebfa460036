// wgmma: issued by all threads of a warpgroup, computed some time later, each warp's 16 rows on their own, known after a wait.
#pragma once
#include "numbers.h"
#include "shared_memory.h"

namespace hopper {

inline Warpgroup& group_of(const Warp& w) { return w.program->groups[w.group]; }
inline Product& product(Warpgroup& g, u64 number) { return g.products[number - g.first]; }

// ---- operands in shared memory ---------------------------------------------------------------------------------------
// Of 16-bit numbers, in lines of 32, 64 or 128 bytes, 8 of which lie side by side. Rows are what is summed over, or columns are.
struct Operand {
    u32 start, lead, stride;           // stride: between groups of 8 lines; lead: between chunks of columns, where rows are what is summed over
    u32 mode, line;                    // of the swizzle: CU_TENSOR_MAP_SWIZZLE_*; bytes

    // Where 16 bytes lie: `piece` of a line, 8 of the 16 summed over; or line k of the 16, of whose columns `piece` are 8.
    u32 in_row(u32 row, u32 piece) const { return start + row / 8 * stride + row % 8 * line + piece * 16; }
    u32 in_column(u32 k, u32 piece) const { return start + piece / (line / 16) * lead + k / 8 * stride + k % 8 * line + piece % (line / 16) * 16; }
};
inline Operand operand_of(u64 x) {
    const u32 layout = x >> 62;
    if (layout == 0) fail("a product's operand without swizzle: not emulated");
    if (x >> 49 & 7) fail("a product's operand with base offset %u: not emulated", (u32)(x >> 49 & 7));
    return {(u32)(x & 0x3fff) << 4, (u32)(x >> 16 & 0x3fff) << 4, (u32)(x >> 32 & 0x3fff) << 4, 4 - layout, 16u << (4 - layout)};
}

// The stretches of shared memory that a product reads for a warp, A and B: groups of 8 lines.
template <typename Use> inline void for_groups(const Operand& x, bool transposed, u32 first, u32 count, Use use) {
    const auto group = [&](u32 address) { use(address / (8 * x.line) * (8 * x.line), (address / (8 * x.line) + 1) * (8 * x.line)); };
    if (transposed) {
        for (u32 k = 0; k < 16; k += 8)
            for (u32 piece = first / 8; piece < (first + count) / 8; piece += x.line / 16) group(x.in_column(k, piece));
    } else {
        for (u32 row = first; row < first + count; row += 8) group(x.in_row(row, 0));
    }
}
template <typename Use> inline void for_stretches(const Product& x, u32 warp, Use use) {
    for_groups(operand_of(x.b), x.shape.transposed, 0, x.shape.n, use);
    if (!x.from_registers) for_groups(operand_of(x.a), x.shape.a_transposed, 16 * warp, 16, use);
}

bool is_in_flight(const Program& p, u32 from, u32 to, std::string& who) {
    for (const Warp& w : p.warps) {
        const Warpgroup& g = p.groups[w.group];
        for (u64 number = w.delivered; number < g.first + g.products.size(); number++) {
            const Product& x = g.products[number - g.first];
            bool is = false;
            for_stretches(x, w.index % (GROUP / WARP), [&](u32 begin, u32 end) { is |= begin < to && from < end; });
            if (is && x.sums[w.index % (GROUP / WARP)] != nullptr) {
                who = "warp " + std::to_string(w.index);
                return true;
            }
        }
    }
    return false;
}

// ---- issuing ---------------------------------------------------------------------------------------------------------
inline Sums& sums_in_flight(Warp& w, u32 lane, float* registers) {
    for (auto& s : w.sums)
        if (s->n > 0 && s->registers[lane] == registers) return *s;
    for (auto& s : w.sums)
        if (s->n == 0) return *s;
    w.sums.push_back(std::make_unique<Sums>());
    return *w.sums.back();
}

// Where a thread's register i of the sums lies among 16 rows.
inline float& sum_at(Sums& s, u32 lane, u32 i) { return s.values[lane / 4 + 8 * (i / 2 % 2)][i / 4 * 8 + lane % 4 * 2 + i % 2]; }

void product_issue(Shape shape, float* registers, const u32* from, bool watched, u64 a, u64 b, bool add) {
    Thread& t = *current;
    Warp& w = *t.warp;
    Warpgroup& g = group_of(w);
    if (!t.fenced) fail("warp %u issues a product without a fence after registers may have changed", w.index);
    const u64 number = t.issued++;
    if (number == g.first + g.products.size()) {
        Product& x = g.products.emplace_back();
        x.shape = shape, x.a = a, x.b = b, x.add = add, x.from_registers = from != nullptr;
    }
    Product& x = product(g, number);
    if (x.shape.n != shape.n || x.shape.transposed != shape.transposed || x.a != a || x.b != b || x.add != add)
        fail("threads of a warpgroup issue different products: thread %u", t.thread.x);
    const u32 warp = w.index % (GROUP / WARP), in_group = t.thread.x % GROUP;
    if (x.sums[warp] == nullptr) {
        x.sums[warp] = &sums_in_flight(w, t.lane, registers);
        for_stretches(x, warp, [&](u32 begin, u32 end) { for_uses(*t.program, begin, end, [&](Uses& uses, u32 at) { x.is_there[warp] &= check_read(*t.program, uses, w, at); }); });
    }
    Sums& s = *x.sums[warp];
    if (s.n != 0 && s.n != shape.n) fail("warp %u issues a product of %u columns for sums of %u that are in flight", w.index, shape.n, s.n);
    s.n = shape.n;
    s.last = number + 1;
    if (s.registers[t.lane] == nullptr) {
        s.registers[t.lane] = registers;
        for (u32 i = 0; i < shape.n / 2; i++) {
            sum_at(s, t.lane, i) = registers[i];
            memcpy(&registers[i], &IN_FLIGHT, 4);
        }
    } else if (s.registers[t.lane] != registers) {
        fail("thread %u: sums of one product in other registers", t.thread.x);
    }
    if (from != nullptr) {
        x.from[in_group] = watched ? from : nullptr;
        memcpy(x.words[in_group], from, 16);
    }
    if (++x.issued == GROUP) changed(*t.program);
}
void product_fence() { current->fenced = true; }
void product_commit() {
    Thread& t = *current;
    Warpgroup& g = group_of(*t.warp);
    const u64 number = t.groups++;
    if (number == g.ends.size()) g.ends.push_back(t.issued);
    if (g.ends[number] != t.issued) fail("threads of a warpgroup commit different groups of products: thread %u", t.thread.x);
    preempt();
}

// ---- computing -------------------------------------------------------------------------------------------------------
inline const uint16_t* eight(Program& p, const Operand& x, u32 address) {
    check_range(p, address, 16);
    return (const uint16_t*)shared_at(p, swizzled(address, x.mode));
}
inline float widened(uint16_t x, bool fp16) { return fp16 ? from_float16(x) : from_bfloat16(x); }

inline void read_a(Program& p, const Product& x, u32 warp, float (&a)[16][16]) {
    if (!x.from_registers) {
        const Operand at = operand_of(x.a);
        for (u32 row = 0; row < 16; row++)
            for (u32 k = 0; k < 16; k++) {
                const u32 m = 16 * warp + row;
                a[row][k] = widened(x.shape.a_transposed ? eight(p, at, at.in_column(k, m / 8))[m % 8] : eight(p, at, at.in_row(m, k / 8))[k % 8], x.shape.fp16);
            }
        return;
    }
    for (u32 lane = 0; lane < WARP; lane++)
        for (u32 i = 0; i < 4; i++) {
            const u32 word = x.words[WARP * warp + lane][i], row = lane / 4 + 8 * (i % 2), k = lane % 4 * 2 + 8 * (i / 2);
            a[row][k] = widened(word, x.shape.fp16), a[row][k + 1] = widened(word >> 16, x.shape.fp16);
        }
}
inline void read_b(Program& p, const Product& x, float (&b)[16][256]) {
    const Operand at = operand_of(x.b);
    const bool fp16 = x.shape.fp16;
    if (x.shape.transposed) {
        for (u32 k = 0; k < 16; k++)
            for (u32 piece = 0; piece < x.shape.n / 8; piece++) {
                const uint16_t* from = eight(p, at, at.in_column(k, piece));
                for (u32 i = 0; i < 8; i++) b[k][8 * piece + i] = widened(from[i], fp16);
            }
        return;
    }
    for (u32 row = 0; row < x.shape.n; row++)
        for (u32 piece = 0; piece < 2; piece++) {
            const uint16_t* from = eight(p, at, at.in_row(row, piece));
            for (u32 i = 0; i < 8; i++) b[8 * piece + i][row] = widened(from[i], fp16);
        }
}

inline void compute(Warp& w, Product& x) {
    alignas(64) float a[16][16], b[16][256];
    const u32 warp = w.index % (GROUP / WARP), n = x.shape.n;
    Sums& s = *x.sums[warp];
    if (!x.is_there[warp]) {
        for (auto& row : s.values)
            for (float& sum : row) sum = NAN;
        return;
    }
    read_a(*w.program, x, warp, a);
    read_b(*w.program, x, b);
    for (u32 row = 0; row < 16; row++) {
        float* __restrict sums = s.values[row];
        if (!x.add) memset(sums, 0, 4 * n);
        for (u32 k = 0; k < 16; k += 4)
            for (u32 i = 0; i < n; i++)  // four at a time: sums are loaded and stored a quarter as often
                sums[i] += a[row][k] * b[k][i] + a[row][k + 1] * b[k + 1][i] + a[row][k + 2] * b[k + 2][i] + a[row][k + 3] * b[k + 3][i];
    }
}
inline bool can_compute(Warp& w) {
    Warpgroup& g = group_of(w);
    return w.executed < g.first + g.products.size() && product(g, w.executed).issued == GROUP;
}
inline void compute_some(Warp& w, u32 most) {
    for (u32 i = 0; i < most && can_compute(w); i++) compute(w, product(group_of(w), w.executed++));
    changed(*w.program);
}

// ---- waiting ---------------------------------------------------------------------------------------------------------
// To all threads of a warp, which have come to the wait together.
inline void check_operands(const Warp& w, const Product& x) {
    for (u32 lane = 0; lane < WARP && x.from_registers; lane++) {
        const u32 in_group = w.threads[lane]->thread.x % GROUP;
        if (x.from[in_group] != nullptr && memcmp(x.words[in_group], x.from[in_group], 16) != 0)
            fail("thread %u changes registers that a product in flight reads", w.threads[lane]->thread.x);
    }
    for_stretches(x, w.index % (GROUP / WARP), [&](u32 begin, u32 end) { read_until_now(*w.program, w, begin, end); });
}
inline void deliver(const Warp& w, Sums& s) {
    for (u32 lane = 0; lane < WARP; lane++) {
        float* registers = s.registers[lane];
        for (u32 i = 0; i < s.n / 2; i++) {
            if (memcmp(&registers[i], &IN_FLIGHT, 4) != 0) fail("thread %u changes sums of a product in flight", w.threads[lane]->thread.x);
            registers[i] = sum_at(s, lane, i);
        }
        s.registers[lane] = nullptr;
    }
    s.n = 0;
}
inline void forget_delivered(Program& p, Warpgroup& g) {
    u64 delivered = ~0ull;
    for (const Warp& w : p.warps)
        if (&p.groups[w.group] == &g && w.delivered < delivered) delivered = w.delivered;
    for (; g.first < delivered; g.first++) g.products.pop_front();
}
void product_wait(u32 left) {
    preempt();
    Thread& t = *current;
    Warp& w = *t.warp;
    Warpgroup& g = group_of(w);
    meet();
    const u64 until = t.groups > left ? g.ends[t.groups - left - 1] : 0;
    t.generation = until;
    t.fenced = false;
    if (w.executed < until) wait_for(FOR_PRODUCTS);
    if (w.delivered >= until) return;
    for (; w.delivered < until; w.delivered++) check_operands(w, product(g, w.delivered));
    for (auto& s : w.sums)
        if (s->n > 0 && s->last <= until) deliver(w, *s);
    forget_delivered(*t.program, g);
}

}  // namespace hopper
