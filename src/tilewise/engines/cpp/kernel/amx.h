// bfloat16 matrix products on AMX, the processor's matrix unit: C[16 x 16] += A[16 x 32] B[32 x 16] in one instruction.
//
// A is row-major; B is stored in pairs of rows: word [k / 2][x] holds rows k and k + 1 of column x. Everything is padded to 32 by 32.
#pragma once
#include <immintrin.h>
#include "tiles.h"

constexpr i64 STEP = 32;  // rows, columns and depth come in multiples of this

#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, from, bytes) asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"(bytes) : "memory")
#define TILE_STORE(t, to, bytes) asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"(bytes) : "memory")
#define TILE_MULTIPLY(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

// Configures eight tile registers of 16 rows of 64 bytes, until the end of the scope.
class MatrixUnit {
  public:
    MatrixUnit() {
        struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            u16 bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shape;
        asm volatile("ldtilecfg %0" ::"m"(shape));
    }
    ~MatrixUnit() { asm volatile("tilerelease" ::); }
};

// C[i][x] = sum over k of A[i][k] B[k][x]  (+ C if `add`)
//
// Two sums at a time, and every register is cleared after its last use: a cleared register needs no physical one, of which there are few more than
// eight, and fewer while the sibling hyperthread holds tiles too. When they run out, loads wait for earlier products.
inline void matrix_product(const bfloat* a, i64 a_row, const u32* b, i64 b_row, float* c, i64 c_row, i64 n_rows, i64 n_columns, i64 n_k, bool add) {
    const i64 a_bytes = a_row * 2, b_bytes = b_row * 4, c_bytes = c_row * 4;
    for (i64 i = 0; i < n_rows; i += 16)
        for (i64 x = 0; x < n_columns; x += STEP) {
            float* target = c + i * c_row + x;
            if (add) {
                TILE_LOAD(0, target, c_bytes);
                TILE_LOAD(1, target + 16, c_bytes);
            } else {
                TILE_ZERO(0);
                TILE_ZERO(1);
            }
            for (i64 k = 0; k < n_k; k += STEP) {
                TILE_LOAD(2, a + i * a_row + k, a_bytes);
                TILE_LOAD(3, b + k / 2 * b_row + x, b_bytes);
                TILE_MULTIPLY(0, 2, 3);
                TILE_ZERO(3);
                TILE_LOAD(4, b + k / 2 * b_row + x + 16, b_bytes);
                TILE_MULTIPLY(1, 2, 4);
                TILE_ZERO(4);
                TILE_ZERO(2);
            }
            TILE_STORE(0, target, c_bytes);
            TILE_ZERO(0);
            TILE_STORE(1, target + 16, c_bytes);
            TILE_ZERO(1);
        }
}

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

// A tile [n][LANES] in bfloat16: as pairs of rows [32][LANES], zero beyond n; as rows [64][LANES], zero beyond n.
inline void pairs_of_tile(const float* tile, i64 n, u32* to) {
    for (i64 j = 0; j < KEYS; j += 2)
        for (i64 x = 0; x < LANES; x += WIDTH<float>) {
            const words even = j < n ? rounded_bits(load(tile + j * LANES + x)) : words{};
            const words odd = j + 1 < n ? rounded_bits(load(tile + (j + 1) * LANES + x)) : words{};
            const words both = (even >> 16) | (odd & 0xffff0000u);
            __builtin_memcpy(to + j / 2 * LANES + x, &both, sizeof both);
        }
}
inline void rows_of_tile(const float* tile, i64 n, bfloat* to) {
    for (i64 j = 0; j < n; j++)
        for (i64 l = 0; l < LANES; l++) {
            const u32 b = bits_as<u32>(tile[j * LANES + l]);
            to[j * LANES + l].bits = (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
        }
    __builtin_memset(to + n * LANES, 0, (size_t)((KEYS - n) * LANES) * sizeof(bfloat));
}
