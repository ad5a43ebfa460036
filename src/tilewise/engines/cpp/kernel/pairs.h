// bfloat16 products by instructions that take pairs of numbers: C[i][x] = sum over k of A[i][k] B[k][x]  (+ C[i][x] if `add`).
//
// A is row-major; B is stored in pairs of rows: word [k / 2][x] holds rows k and k + 1 of column x. Everything is padded to 32 by 32.
#pragma once
#include <immintrin.h>
#include "tiles.h"

constexpr i64 STEP = 32;  // rows, columns and depth come in multiples of this

#ifdef MATRIX_UNIT
#include "amx.h"
#else
struct PairUnit {  // what products need, until the end of the scope: nothing
    PairUnit() {}
};

// Sums of R rows by X vectors: s += a[0] * b[0] + a[1] * b[1] for every word of B.
template <int R, int X> __attribute__((noinline)) void pair_block(const bfloat* a, i64 a_row, const u32* b, i64 b_row, float* c, i64 c_row, i64 n_k, bool add) {
    __m512 sum[R][X] = {};
    for (i64 k = 0; k < n_k; k += 2, b += b_row) {
        __m512bh column[X];
#pragma GCC unroll 8
        for (int x = 0; x < X; x++) column[x] = (__m512bh)_mm512_loadu_si512(b + x * WIDTH<float>);
#pragma GCC unroll 8
        for (int i = 0; i < R; i++) {
            i32 pair;
            __builtin_memcpy(&pair, a + i * a_row + k, sizeof pair);
            const __m512bh one = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
            for (int x = 0; x < X; x++) sum[i][x] = _mm512_dpbf16_ps(sum[i][x], one, column[x]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
        for (int x = 0; x < X; x++) {
            float* target = c + i * c_row + x * WIDTH<float>;
            _mm512_storeu_ps(target, add ? _mm512_add_ps(sum[i][x], _mm512_loadu_ps(target)) : sum[i][x]);
        }
}

inline void pair_product(const bfloat* a, i64 a_row, const u32* b, i64 b_row, float* c, i64 c_row, i64 n_rows, i64 n_columns, i64 n_k, bool add) {
    in_column_blocks<float>(n_columns, [&](auto vectors, i64 x) {
        in_blocks(n_rows, [&](auto rows, i64 i) {
            constexpr int R = decltype(rows)::value, X = decltype(vectors)::value;
            pair_block<R, X>(a + i * a_row, a_row, b + x, b_row, c + i * c_row + x, c_row, n_k, add);
        });
    });
}
#endif

// -- layouts -----------------------------------------------------------------------------------------------------------

// Copies `count` rows of n features into [64][width], zero-padded. Returns whether all are finite.
inline bool pack_rows(const bfloat* from, i64 row, i64 step, i64 count, i64 n, bfloat* to, i64 width) {
    for (i64 i = 0; i < count; i++) {
        if (step == 1)
            __builtin_memcpy(to + i * width, from + i * row, (size_t)n * sizeof(bfloat));
        else
            for (i64 k = 0; k < n; k++) to[i * width + k] = from[i * row + k * step];
        for (i64 k = n; k < width; k++) to[i * width + k].bits = 0;
    }
    __builtin_memset(to + count * width, 0, (size_t)((LANES - count) * width) * sizeof(bfloat));
    u16 nonfinite = 0;
    for (i64 k = 0; k < count * width; k++) nonfinite |= (to[k].bits & 0x7f80) == 0x7f80;
    return !nonfinite;
}

inline void clear_nonfinite(bfloat* x, i64 count) {
    for (i64 k = 0; k < count; k++) x[k].bits = (x[k].bits & 0x7f80) == 0x7f80 ? (u16)0 : x[k].bits;
}

// Packed rows [64][width] as pairs of neighbouring rows [32][width]. (Read as 32-bit words, packed rows are pairs of neighbouring features, whose
// transpose is [width / 2][64]; the transpose of pairs of rows is the columns [width][64].)
inline void pairs_of_rows(const bfloat* rows, i64 width, u32* to) {
    for (i64 i = 0; i < LANES / 2; i++)
        for (i64 k = 0; k < width; k++) to[i * width + k] = rows[2 * i * width + k].bits | (u32)rows[(2 * i + 1) * width + k].bits << 16;
}

INLINE words rounded_bits(vec<float> x) {  // to nearest, ties to even, in the upper half
    const words b = (words)x;
    return b + 0x7fff + (b >> 16 & 1);
}

// Two rows of a tile in bfloat16: in one register, stored as two rows, stored as pairs.
INLINE __m512i narrowed(vec<float> row, vec<float> next) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)next, (__m512)row); }
INLINE void store_rows(__m512i both, bfloat* row, bfloat* next) {
    _mm256_storeu_si256((__m256i*)row, _mm512_castsi512_si256(both));
    _mm256_storeu_si256((__m256i*)next, _mm512_extracti64x4_epi64(both, 1));
}
INLINE void store_pairs(__m512i both, u32* to) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
}

// The computed lanes of a tile [n][LANES] in bfloat16: as pairs of rows [32][LANES], zero beyond n; as rows [64][LANES], zero beyond n.
inline void pairs_of_tile(const float* tile, i64 n, i64 lanes, u32* to) {
    for (i64 j = 0; j < KEYS; j += 2)
        for (i64 x = 0; x < lanes; x += WIDTH<float>) {
            const words even = j < n ? rounded_bits(load(tile + j * LANES + x)) : words{};
            const words odd = j + 1 < n ? rounded_bits(load(tile + (j + 1) * LANES + x)) : words{};
            const words both = (even >> 16) | (odd & 0xffff0000u);
            __builtin_memcpy(to + j / 2 * LANES + x, &both, sizeof both);
        }
}
inline void rows_of_tile(const float* tile, i64 n, i64 lanes, bfloat* to) {
    for (i64 j = 0; j < n; j++)
        for (i64 l = 0; l < lanes; l++) {
            const u32 b = bits_as<u32>(tile[j * LANES + l]);
            to[j * LANES + l].bits = (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
        }
    __builtin_memset(to + n * LANES, 0, (size_t)((KEYS - n) * LANES) * sizeof(bfloat));
}
