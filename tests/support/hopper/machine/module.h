// Instructions of whole PTX modules as functions (ptx_module.py writes the calls): their names with _ for . and ::, and operands one after the other. Those of
// numbers and memory have the type they end with as template argument. Registers are integers of their size, and numbers in the text are long long.
#pragma once
#include <type_traits>

#include "instructions.h"
#include "language.h"

namespace module {
using namespace ptx;

using s8 = int8_t;
using u8 = uint8_t;
using u32 = ::u32;
using u64 = ::u64;
using s16 = int16_t;
using u16 = uint16_t;
using s32 = int;
using s64 = long long;
using f32 = float;
using b8 = uint8_t;
using b16 = uint16_t;
using b32 = u32;
using b64 = u64;
struct bf16 {  // computed with in float32 and rounded once more, which changes no sum or product
    uint16_t bits;
    bf16() = default;
    explicit bf16(float x) : bits(to_bfloat16(x)) {}
    operator float() const { return from_bfloat16(bits); }
};
struct f16 {
    uint16_t bits;
    f16() = default;
    explicit f16(float x) : bits(to_float16(x)) {}
    operator float() const { return from_float16(bits); }
};
template <typename T> struct Pair {  // of 16-bit numbers in a register
    using Half = T;
    uint32_t bits;
};
using bf16x2 = Pair<bf16>;
using f16x2 = Pair<f16>;
using s16x2 = Pair<s16>;
using u16x2 = Pair<u16>;
template <typename T> constexpr bool is_pair = false;
template <typename T> constexpr bool is_pair<Pair<T>> = true;

template <typename T, typename R> inline T as(R x) {
    if constexpr (std::is_same_v<T, bool>) return x != 0;
    T y;
    memcpy(&y, &x, sizeof(y));
    return y;
}
template <typename R, typename T> inline void put(R& to, T x) {
    static_assert(sizeof(R) >= sizeof(T));
    R y = 0;
    if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) y = (R)(s64)x;  // bytes are read into larger registers
    else memcpy(&y, &x, sizeof(x));
    to = y;
}

inline void pack(u32& to, u64 low, u64 high) { to = (u32)high << 16 | (u16)low; }
inline void pack(u64& to, u64 low, u64 high) { to = high << 32 | (u32)low; }

// ---- numbers ---------------------------------------------------------------------------------------------------------
#define UNARY(name, value)                                                       \
    template <typename T, typename R, typename X> inline void name(R& to, X a) { \
        if constexpr (is_pair<T>) {                                              \
            u16 low, high;                                                       \
            name<typename T::Half>(low, (u16)a);                                 \
            name<typename T::Half>(high, (u16)(a >> 16));                        \
            pack(to, low, high);                                                 \
        } else {                                                                 \
            const T x = as<T>(a);                                                \
            put(to, (T)(value));                                                 \
        }                                                                        \
    }
#define BINARY(name, value)                                                                       \
    template <typename T, typename R, typename X, typename Y> inline void name(R& to, X a, Y b) { \
        if constexpr (is_pair<T>) {                                                               \
            u16 low, high;                                                                        \
            name<typename T::Half>(low, (u16)a, (u16)b);                                          \
            name<typename T::Half>(high, (u16)(a >> 16), (u16)(b >> 16));                         \
            pack(to, low, high);                                                                  \
        } else {                                                                                  \
            const T x = as<T>(a), y = as<T>(b);                                                   \
            put(to, (T)(value));                                                                  \
        }                                                                                         \
    }
#define COMPARE(name, value)                                                                   \
    template <typename T, typename X, typename Y> inline void setp_##name(bool& to, X a, Y b) { \
        const T x = as<T>(a), y = as<T>(b);                                                    \
        to = value;                                                                            \
    }
BINARY(add, x + y)
BINARY(add_rn, x + y)
BINARY(sub, x - y)
BINARY(sub_rn, x - y)
BINARY(mul, x * y)
BINARY(mul_rn, x * y)
BINARY(mul_lo, x * y)
BINARY(div, y ? x / y : (T)-1)
BINARY(rem, y ? x % y : x)
BINARY(div_full, x / y)
BINARY(div_rn, x / y)
BINARY(min, y < x || x != x ? y : x)
BINARY(max, x < y || x != x ? y : x)
BINARY(max_NaN, x != x || y != y ? (T)NAN : x < y ? y : x)
BINARY(and, x & y)
BINARY(or, x | y)
BINARY(xor, x ^ y)
UNARY(mov, x)
UNARY(cvta_param, x)
UNARY(cvta_to_global, x)
UNARY(neg, -x)
UNARY(ex2_approx, exp2f(x))
UNARY(ex2_approx_ftz, exp2_approx(flushed(x)))
UNARY(lg2_approx_ftz, log2_approx(x))
UNARY(lg2_approx, log2_approx(x))
UNARY(tanh_approx, tanhf(x))
UNARY(rcp_approx_ftz, 1.0f / flushed(x))
COMPARE(eq, x == y)
COMPARE(ne, x < y || y < x)
COMPARE(lt, x < y)
COMPARE(le, x <= y)
COMPARE(gt, x > y)
COMPARE(ge, x >= y)
COMPARE(neu, !(x == y))
COMPARE(equ, !(x < y || y < x))
COMPARE(ltu, !(x >= y))
COMPARE(leu, !(x > y))
COMPARE(gtu, !(x <= y))
COMPARE(geu, !(x < y))
COMPARE(nan, x != x || y != y)
COMPARE(num, x == x && y == y)

template <typename T, typename R, typename X> inline void not(R& to, X a) {
    if constexpr (std::is_same_v<T, bool>) to = !a;
    else put(to, (T)~as<T>(a));
}
template <typename T, typename R, typename X> inline void abs(R& to, X a) {
    const T x = as<T>(a);
    if constexpr (std::is_same_v<T, float>) put(to, fabsf(x));
    else put(to, x < 0 ? (T)-x : x);
}
template <typename T, typename R, typename X, typename Y, typename Z> inline void fma_rn(R& to, X a, Y b, Z c) {
    if constexpr (is_pair<T>) {
        u16 low, high;
        fma_rn<typename T::Half>(low, (u16)a, (u16)b, (u16)c);
        fma_rn<typename T::Half>(high, (u16)(a >> 16), (u16)(b >> 16), (u16)(c >> 16));
        pack(to, low, high);
    } else put(to, (T)fmaf(as<T>(a), as<T>(b), as<T>(c)));
}
template <typename T, typename R, typename X, typename Y, typename Z> inline void fma_rn_ftz(R& to, X a, Y b, Z c) {
    put(to, flushed(fmaf(flushed(as<T>(a)), flushed(as<T>(b)), flushed(as<T>(c)))));
}
inline void popc_b32(u32& to, u32 x) { to = __builtin_popcount(x); }
template <typename T> using Wide = std::conditional_t<std::is_signed_v<T>, s64, u64>;
template <typename T, typename R, typename X, typename Y> inline void mul_wide(R& to, X a, Y b) { to = (R)((Wide<T>)as<T>(a) * (Wide<T>)as<T>(b)); }
template <typename T, typename R, typename X, typename Y, typename Z> inline void mad_wide(R& to, X a, Y b, Z c) {
    to = (R)((Wide<T>)as<T>(a) * (Wide<T>)as<T>(b) + (Wide<T>)c);
}
template <typename T, typename R, typename X, typename Y, typename Z> inline void mad_lo(R& to, X a, Y b, Z c) { put(to, (T)(as<T>(a) * as<T>(b) + as<T>(c))); }
template <typename T, typename R, typename X, typename Y> inline void mul_hi(R& to, X a, Y b) { put(to, (T)((Wide<T>)as<T>(a) * (Wide<T>)as<T>(b) >> 32)); }
template <typename T, typename R, typename X, typename Y> inline void shl(R& to, X a, Y b) {
    const u32 by = as<u32>((u64)b);
    put(to, by < 8 * sizeof(T) ? (T)(as<T>(a) << by) : (T)0);
}
template <typename T, typename R, typename X, typename Y> inline void shr(R& to, X a, Y b) {
    const u32 by = as<u32>((u64)b), most = 8 * sizeof(T);
    const T x = as<T>(a);
    put(to, by < most ? (T)(x >> by) : std::is_signed_v<T> ? (T)(x >> (most - 1)) : (T)0);
}
template <typename T, typename R, typename X, typename Y> inline void selp(R& to, X a, Y b, bool p) { put(to, p ? as<T>(a) : as<T>(b)); }
template <typename T, typename R, typename X, typename Y, typename Z> inline void bfe(R& to, X a, Y at, Z count) {
    const u32 unused = 8 * sizeof(T) - count;
    put(to, (T)((T)(as<T>(a) << (unused - at)) >> unused));  // of signed numbers with the field's sign
}
template <typename T, typename X, typename Y, typename Z> inline void prmt(u32& to, X a, Y b, Z chosen) {
    const u64 both = (u64)as<u32>((u64)b) << 32 | as<u32>((u64)a);
    to = 0;
    for (u32 i = 0; i < 4; i++) {
        const u32 which = (u64)chosen >> 4 * i & 15, byte = both >> 8 * (which & 7) & 255;
        to |= (which & 8 ? (byte >> 7) * 255 : byte) << 8 * i;
    }
}
inline void unpack_low(u16& low, u32 x) { low = x; }
inline void unpack_low(u32& low, u64 x) { low = x; }
inline void unpack_high(u16& high, u32 x) { high = x >> 16; }
inline void unpack_high(u32& high, u64 x) { high = x >> 32; }
template <typename R, typename X> inline void unpack(R& low, R& high, X x) { unpack_low(low, x), unpack_high(high, x); }

#define CONVERT(name, To) \
    template <typename T, typename R, typename X> inline void cvt_##name(R& to, X a) { put(to, (To)as<T>(a)); }
CONVERT(u16, u16)
CONVERT(s16, s16)
CONVERT(u32, u32)
CONVERT(s32, s32)
CONVERT(u64, u64)
CONVERT(s64, s64)
CONVERT(f32, float)
CONVERT(rn_f32, float)
CONVERT(rzi_s32, s32)
template <typename T, typename X> inline void cvt_rn_bf16(u16& to, X a) { to = to_bfloat16(as<T>(a)); }
template <typename T, typename X> inline void cvt_rn_f16(u16& to, X a) { to = to_float16(as<T>(a)); }
template <typename T, typename X, typename Y> inline void cvt_rn_bf16x2(u32& to, X high, Y low) { cvt_rn_bf16x2_f32(to, as<float>(high), as<float>(low)); }
template <typename T, typename X, typename Y> inline void cvt_rn_f16x2(u32& to, X high, Y low) { cvt_rn_f16x2_f32(to, as<float>(high), as<float>(low)); }

// ---- threads of a warp -----------------------------------------------------------------------------------------------
template <typename T, typename X, typename Y> inline void shfl_sync_bfly(u32& to, X a, Y lanes, s64, s64) { to = shuffle(as<u32>(a), place->thread.x % 32 ^ (u32)lanes); }
template <typename T, typename X, typename Y> inline void shfl_sync_up(u32& to, X a, Y by, s64, s64) {
    const u32 lane = place->thread.x % 32;
    to = shuffle(as<u32>(a), lane < by ? lane : lane - by);
}
template <typename T, typename X, typename Y> inline void shfl_sync_idx(u32& to, X a, Y lane, s64, s64) { to = shuffle(as<u32>(a), lane); }
template <typename T> inline void redux_sync_or(u32& to, u32 x, s64) { to = any_bits(x); }
template <typename T, typename Combine> inline void reduce(u32& to, u32 x, Combine combine) {
    T all = as<T>(x);
    for (u32 other = 1; other < 32; other *= 2) all = combine(all, as<T>(shuffle(as<u32>(all), place->thread.x % 32 ^ other)));
    put(to, all);
}
template <typename T> inline void redux_sync_add(u32& to, u32 x, s64) { reduce<T>(to, x, [](T a, T b) { return a + b; }); }
template <typename T> inline void redux_sync_max(u32& to, u32 x, s64) { reduce<T>(to, x, [](T a, T b) { return a < b ? b : a; }); }
template <typename T> inline void redux_sync_min(u32& to, u32 x, s64) { reduce<T>(to, x, [](T a, T b) { return b < a ? b : a; }); }
inline void vote_sync_any_pred(bool& some, bool x, s64) { some = any(x); }
inline void bar_warp_sync(s64) { meet(); }
inline void elect_sync(u32& lane, bool& is_first, s64) {
    lane = 0;
    is_first = place->thread.x % 32 == 0;
}
inline void barrier_sync(u32 id) { barrier_of_all(id); }
inline void barrier_sync(u32 id, u32 threads) { hopper::barrier_sync(id, threads); }
inline void bar_sync(u32 id) { barrier_of_all(id); }
inline void bar_sync(u32 id, u32 threads) { hopper::barrier_sync(id, threads); }

// ---- memory ----------------------------------------------------------------------------------------------------------
template <typename T, typename R> inline void ld_param(R& to, u64 at) { put(to, *(const T*)at); }

template <typename T, typename R> inline void ld_shared(R& to, u64 from) {
    T x;
    read_shared(from, &x, sizeof(x));
    put(to, x);
}
template <typename T, typename R> inline void st_shared(u64 to, R x) {
    const T value = as<T>(x);
    write_shared(to, &value, sizeof(value));
}
template <typename T, typename R> inline void ld_global(R& to, u64 from) {
    check_aligned((const void*)from, sizeof(T));
    put(to, *(const T*)from);
}
template <typename T, typename R> inline void st_global(u64 to, R x) {
    check_aligned((const void*)to, sizeof(T));
    *(T*)to = as<T>(x);
}
template <typename T, typename R> inline void ld_global_nc(R& to, u64 from) { ld_global<T>(to, from); }
template <typename T> inline void atom_global_inc(u32& before, u64 at, u32 most) { before = count_up((u32*)at, most); }
template <typename T> inline void atom_global_gpu_relaxed_add(u32& before, u64 at, u32 x) {
    ld_global<T>(before, at);
    add<T>(x, x, before);
    st_global<T>(at, x);
}
#define VECTORS(space)                                                                                                                    \
    template <typename T, typename R> inline void ld_##space##_v2(R& a, R& b, u64 from) {                                                 \
        check_aligned((const void*)from, 2 * sizeof(T));                                                                                  \
        ld_##space<T>(a, from), ld_##space<T>(b, from + sizeof(T));                                                                       \
    }                                                                                                                                     \
    template <typename T, typename R> inline void ld_##space##_v4(R& a, R& b, R& c, R& d, u64 from) {                                     \
        check_aligned((const void*)from, 4 * sizeof(T));                                                                                  \
        ld_##space<T>(a, from), ld_##space<T>(b, from + sizeof(T)), ld_##space<T>(c, from + 2 * sizeof(T)), ld_##space<T>(d, from + 3 * sizeof(T)); \
    }                                                                                                                                     \
    template <typename T, typename A, typename B> inline void st_##space##_v2(u64 to, A a, B b) {                                         \
        check_aligned((const void*)to, 2 * sizeof(T));                                                                                    \
        st_##space<T>(to, a), st_##space<T>(to + sizeof(T), b);                                                                           \
    }                                                                                                                                     \
    template <typename T, typename A, typename B, typename C, typename D> inline void st_##space##_v4(u64 to, A a, B b, C c, D d) {       \
        check_aligned((const void*)to, 4 * sizeof(T));                                                                                    \
        st_##space<T>(to, a), st_##space<T>(to + sizeof(T), b), st_##space<T>(to + 2 * sizeof(T), c), st_##space<T>(to + 3 * sizeof(T), d); \
    }
VECTORS(shared)
VECTORS(global)

// Copies that a thread waits for, here made at once; beyond the bytes that are taken come zeros.
inline void copy_bytes(u32 to, u64 from, u32 bytes, u32 taken) {
    unsigned char value[16] = {};
    check_aligned((const void*)from, bytes);
    memcpy(value, (const void*)from, taken);
    for (u32 i = 0; i < bytes; i += 4) write_shared(to + i, value + i, 4);
}
inline void cp_async_cg_shared_global(u32 to, u64 from, u32 bytes, u32 taken) { copy_bytes(to, from, bytes, taken); }
inline void cp_async_ca_shared_global(u32 to, u64 from, u32 bytes, u32 taken) { copy_bytes(to, from, bytes, taken); }
inline void cp_async_cg_shared_global(u32 to, u64 from, u32 bytes) { copy_bytes(to, from, bytes, bytes); }
inline void cp_async_ca_shared_global(u32 to, u64 from, u32 bytes) { copy_bytes(to, from, bytes, bytes); }
inline void cp_async_commit_group() {}
inline void cp_async_wait_group(u32) {}

// Matrices of 8 x 8 16-bit numbers: a thread has two neighbours of a row (of a column, if transposed), and every 8 threads the addresses of one matrix' rows.
inline void store_matrix(u64 address, u32 value, u32 which) {
    const u32 lane = place->thread.x % 32, to = shuffle(address, 8 * which + lane / 4);
    write_shared(to + lane % 4 * 4, &value, 4);
}
inline void store_transposed(u64 address, u32 value, u32 which) {
    const u32 lane = place->thread.x % 32;
    for (u32 i = 0; i < 2; i++) {
        const u32 to = shuffle(address, 8 * which + lane % 4 * 2 + i);
        const u16 half = value >> 16 * i;
        write_shared(to + lane / 4 * 2, &half, 2);
    }
}
inline void stmatrix_sync_aligned_m8n8_x1_shared_b16(u64 at, u32 a) { store_matrix(at, a, 0); }
inline void stmatrix_sync_aligned_m8n8_x2_shared_b16(u64 at, u32 a, u32 b) { store_matrix(at, a, 0), store_matrix(at, b, 1); }
inline void stmatrix_sync_aligned_m8n8_x4_shared_b16(u64 at, u32 a, u32 b, u32 c, u32 d) {
    store_matrix(at, a, 0), store_matrix(at, b, 1), store_matrix(at, c, 2), store_matrix(at, d, 3);
}
inline void stmatrix_sync_aligned_m8n8_x1_trans_shared_b16(u64 at, u32 a) { store_transposed(at, a, 0); }
inline void stmatrix_sync_aligned_m8n8_x2_trans_shared_b16(u64 at, u32 a, u32 b) { store_transposed(at, a, 0), store_transposed(at, b, 1); }
inline void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u64 at, u32 a, u32 b, u32 c, u32 d) {
    store_transposed(at, a, 0), store_transposed(at, b, 1), store_transposed(at, c, 2), store_transposed(at, d, 3);
}
inline void load_matrix(u32& value, u64 address, u32 which) {
    const u32 lane = place->thread.x % 32, from = shuffle(address, 8 * which + lane / 4);
    read_shared(from + lane % 4 * 4, &value, 4);
}
inline void ldmatrix_sync_aligned_m8n8_x1_shared_b16(u32& a, u64 at) { load_matrix(a, at, 0); }
inline void ldmatrix_sync_aligned_m8n8_x2_shared_b16(u32& a, u32& b, u64 at) { load_matrix(a, at, 0), load_matrix(b, at, 1); }
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(u32& a, u32& b, u32& c, u32& d, u64 at) {
    load_matrix(a, at, 0), load_matrix(b, at, 1), load_matrix(c, at, 2), load_matrix(d, at, 3);
}
inline void load_transposed(u32& value, u64 address, u32 which) {
    const u32 lane = place->thread.x % 32;
    u16 halves[2];
    for (u32 i = 0; i < 2; i++) read_shared(shuffle(address, 8 * which + lane % 4 * 2 + i) + lane / 4 * 2, &halves[i], 2);
    pack(value, halves[0], halves[1]);
}
inline void ldmatrix_sync_aligned_m8n8_x1_trans_shared_b16(u32& a, u64 at) { load_transposed(a, at, 0); }
inline void ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16(u32& a, u32& b, u64 at) { load_transposed(a, at, 0), load_transposed(b, at, 1); }
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32& a, u32& b, u32& c, u32& d, u64 at) {
    load_transposed(a, at, 0), load_transposed(b, at, 1), load_transposed(c, at, 2), load_transposed(d, at, 3);
}

// ---- mbarriers, copies -----------------------------------------------------------------------------------------------
inline void mbarrier_init_shared_cta_b64(u32 bar, u32 arrivals) {
    mbarrier_init(bar, arrivals);
    mbarriers_publish();  // Triton has no fence behind it
}
inline void mbarrier_try_wait_parity_shared_b64(bool& done, u32 bar, u32 parity) { mbarrier_try_wait_parity_shared_cta_b64(done, bar, parity); }
inline void mbarrier_arrive_expect_tx_shared_b64(u32 bar, u32 bytes) {
    let_others_come();  // Triton has no barrier of the warp between its writes and one lane's arrival
    mbarrier_arrive(bar, bytes);
}
inline void mbarrier_arrive_shared_cta_b64(u32 bar) { mbarrier_arrive_expect_tx_shared_b64(bar, 0); }
template <typename... At> inline void load_at(u32 to, u64 map, u32 bar, At... at) {
    const int all[] = {(int)at...};
    load_tile(to, (const void*)map, bar, all, 0);
}
template <typename... At> inline void store_at(u64 map, u32 from, bool add, At... at) {
    const int all[] = {(int)at...};
    store_tile(from, (const void*)map, all, add);
}
inline void cp_async_bulk_tensor_1d_shared_cluster_global_mbarrier_complete_tx_bytes(u32 to, u64 map, u32 a, u32 bar) { load_at(to, map, bar, a); }
inline void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes(u32 to, u64 map, u32 a, u32 b, u32 bar) { load_at(to, map, bar, a, b); }
inline void cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes(u32 to, u64 map, u32 a, u32 b, u32 c, u32 d, u32 bar) {
    load_at(to, map, bar, a, b, c, d);
}
inline void cp_async_bulk_tensor_5d_shared_cluster_global_mbarrier_complete_tx_bytes(u32 to, u64 map, u32 a, u32 b, u32 c, u32 d, u32 e, u32 bar) {
    load_at(to, map, bar, a, b, c, d, e);
}
inline void cp_async_bulk_tensor_2d_global_shared_cta_bulk_group(u64 map, u32 a, u32 b, u32 from) { store_at(map, from, false, a, b); }
inline void cp_async_bulk_tensor_4d_global_shared_cta_bulk_group(u64 map, u32 a, u32 b, u32 c, u32 d, u32 from) { store_at(map, from, false, a, b, c, d); }
inline void cp_async_bulk_tensor_5d_global_shared_cta_bulk_group(u64 map, u32 a, u32 b, u32 c, u32 d, u32 e, u32 from) {
    store_at(map, from, false, a, b, c, d, e);
}
inline void cp_reduce_async_bulk_tensor_2d_global_shared_cta_add_bulk_group(u64 map, u32 a, u32 b, u32 from) { store_at(map, from, true, a, b); }
inline void cp_async_bulk_commit_group() { stores_commit(); }
inline void cp_async_bulk_wait_group_read(u32 left) { stores_wait(left); }
inline void cp_async_bulk_wait_group(u32 left) { stores_wait(left); }

}  // namespace module
