// Square matrices transposed in registers, and horizontal sums.
#pragma once
#include "vectors.h"

constexpr int SIDE = WIDTH<float>;  // of a square of 32-bit words
typedef u32 words __attribute__((vector_size(VECTOR_BYTES)));

#ifndef __clang__
// The shuffles of one butterfly step, which swaps blocks of `s` lanes between two rows.
struct Exchange {
    words low, high;
};
INLINE Exchange exchange(u32 s) {
    Exchange e;
    for (u32 l = 0; l < (u32)SIDE; l++) {
        e.low[l] = l & s ? SIDE + l - s : l;
        e.high[l] = l & s ? SIDE + l : l + s;
    }
    return e;
}

template <int S> INLINE void exchange_rows(words* row) {
    const Exchange e = exchange(S);
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++)
        if (!(i & S)) {
            const words a = row[i], b = row[i + S];
            row[i] = __builtin_shuffle(a, b, e.low);
            row[i + S] = __builtin_shuffle(a, b, e.high);
        }
}

// to[x][i] = from[i][x], SIDE by SIDE
inline void transpose_square(const u32* from, i64 from_row, u32* to, i64 to_row) {
    words row[SIDE];
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) __builtin_memcpy(&row[i], from + i * from_row, sizeof(words));
    exchange_rows<1>(row);
    exchange_rows<2>(row);
    if constexpr (SIDE > 4) exchange_rows<4>(row);
    if constexpr (SIDE > 8) exchange_rows<8>(row);
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) __builtin_memcpy(to + i * to_row, &row[i], sizeof(words));
}

template <int S> INLINE void add_halves(vec<float>* row) {
    const Exchange e = exchange(S);
#pragma GCC unroll 16
    for (int i = 0; i < S; i++) row[i] = __builtin_shuffle(row[i], row[i + S], e.low) + __builtin_shuffle(row[i], row[i + S], e.high);
}

// to[i] = the sum of vector i, for SIDE vectors, by repeatedly adding halves.
INLINE void horizontal_sums(vec<float>* row, float* to) {
    if constexpr (SIDE > 8) add_halves<8>(row);
    if constexpr (SIDE > 4) add_halves<4>(row);
    add_halves<2>(row);
    add_halves<1>(row);
    store(to, row[0]);
}
#else
INLINE void horizontal_sums(vec<float>* row, float* to) {
    for (int i = 0; i < SIDE; i++) {
        float sum = 0;
        for (int l = 0; l < SIDE; l++) sum += row[i][l];
        to[i] = sum;
    }
}
inline void transpose_square(const u32* from, i64 from_row, u32* to, i64 to_row) {
    for (int i = 0; i < SIDE; i++)
        for (int x = 0; x < SIDE; x++) to[x * to_row + i] = from[i * from_row + x];
}
#endif

INLINE void horizontal_sums(vec<double>* row, double* to) {
    for (int i = 0; i < WIDTH<double>; i++) {
        double sum = 0;
        for (int l = 0; l < WIDTH<double>; l++) sum += row[i][l];
        to[i] = sum;
    }
}

// to[x][i] = from[i][x] for any multiples of SIDE
inline void transpose_words(const u32* from, i64 from_row, u32* to, i64 to_row, i64 rows, i64 columns) {
    for (i64 i = 0; i < rows; i += SIDE)
        for (i64 x = 0; x < columns; x += SIDE) transpose_square(from + i * from_row + x, from_row, to + x * to_row + i, to_row);
}
