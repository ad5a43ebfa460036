// Square matrices transposed in registers, and horizontal sums.
#pragma once
#include <utility>
#include "vectors.h"

constexpr int SIDE = WIDTH<float>;  // of a square of 32-bit words
typedef u32 words __attribute__((vector_size(VECTOR_BYTES)));

// Lanes of two vectors: 0 .. SIDE - 1 are a's, from SIDE on b's. GCC before 12 and clang have no shuffle in common.
template <int... L, typename V> INLINE V shuffled(V a, V b) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, L...);
#else
    return __builtin_shuffle(a, b, words{(u32)L...});
#endif
}

// The two results of a butterfly step, which swaps blocks of S lanes between two rows.
template <int S, typename V, int... L> INLINE V low_lanes(V a, V b, std::integer_sequence<int, L...>) { return shuffled<(L & S ? SIDE + L - S : L)...>(a, b); }
template <int S, typename V, int... L> INLINE V high_lanes(V a, V b, std::integer_sequence<int, L...>) { return shuffled<(L & S ? SIDE + L : L + S)...>(a, b); }
typedef std::make_integer_sequence<int, SIDE> Lanes;

// The lanes of two vectors by turns: the first half, the second half.
template <typename V, int... L> INLINE V first_by_turns(V a, V b, std::integer_sequence<int, L...>) { return shuffled<(L % 2 * SIDE + L / 2)...>(a, b); }
template <typename V, int... L> INLINE V last_by_turns(V a, V b, std::integer_sequence<int, L...>) { return shuffled<(L % 2 * SIDE + SIDE / 2 + L / 2)...>(a, b); }

template <int S> INLINE void exchange_rows(words* row) {
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++)
        if (!(i & S)) {
            const words a = row[i], b = row[i + S];
            row[i] = low_lanes<S>(a, b, Lanes{});
            row[i + S] = high_lanes<S>(a, b, Lanes{});
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
#pragma GCC unroll 16
    for (int i = 0; i < S; i++) row[i] = low_lanes<S>(row[i], row[i + S], Lanes{}) + high_lanes<S>(row[i], row[i + S], Lanes{});
}

// to[i] = the sum of vector i, for SIDE vectors, by repeatedly adding halves.
INLINE void horizontal_sums(vec<float>* row, float* to) {
    if constexpr (SIDE > 8) add_halves<8>(row);
    if constexpr (SIDE > 4) add_halves<4>(row);
    add_halves<2>(row);
    add_halves<1>(row);
    store(to, row[0]);
}

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
