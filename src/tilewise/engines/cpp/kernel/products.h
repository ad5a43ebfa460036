// Products of small matrices, blocked in registers. (Kernels are compiled with -ffp-contract=fast: a * b + c is an FMA where the machine has one.)
#pragma once
#include <type_traits>
#include "elements.h"
#include "transpose.h"

// C[i][x] = alpha * sum over k of A[i * a_row + k * a_step] * B[k * b_row + x]  (+ C[i][x] if `add`)
// for R rows i and X vectors of columns x. B may have a narrower type E.
template <typename T, int R, int X, typename E>
__attribute__((noinline)) void product_block(const T* a, i64 a_row, i64 a_step, const E* b, i64 b_row, T* c, i64 c_row, i64 n_k, T alpha, bool add) {
    constexpr bool in_pairs = std::is_same<E, bfloat>::value && X % 2 == 0;  // two vectors of columns at a time: the even ones, the odd ones
    vec<T> sum[R][X] = {};
    for (i64 k = 0; k < n_k; k++, a += a_step, b += b_row) {
        vec<T> column[X];
        if constexpr (in_pairs) {
#pragma GCC unroll 8
            for (int x = 0; x < X; x += 2) {
                const EvenOdd both = load_even_odd(b + x * WIDTH<T>);
                column[x] = both.even;
                column[x + 1] = both.odd;
            }
        } else {
#pragma GCC unroll 8
            for (int x = 0; x < X; x++) column[x] = load_widened(b + x * WIDTH<T>);
        }
#pragma GCC unroll 8
        for (int i = 0; i < R; i++) {
            const vec<T> one = broadcast(a[i * a_row]);
#pragma GCC unroll 8
            for (int x = 0; x < X; x++) sum[i][x] += one * column[x];
        }
    }
    if constexpr (in_pairs)
#pragma GCC unroll 8
        for (int i = 0; i < R; i++)
#pragma GCC unroll 8
            for (int x = 0; x < X; x += 2) {
                const vec<T> even = sum[i][x], odd = sum[i][x + 1];
                sum[i][x] = first_by_turns(even, odd, Lanes{});
                sum[i][x + 1] = last_by_turns(even, odd, Lanes{});
            }
    const vec<T> factor = broadcast(alpha);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
        for (int x = 0; x < X; x++) {
            T* target = c + i * c_row + x * WIDTH<T>;
            store(target, add ? factor * sum[i][x] + load(target) : factor * sum[i][x]);
        }
}

template <int N> struct Count { static constexpr int value = N; };

// Cuts n_rows into blocks and calls do_block(Count<R>, i) for each: R rows from row i on.
template <typename F> INLINE void in_blocks(i64 n_rows, F do_block) {
    i64 i = 0;
    const auto next = [&](auto rows) {  // all blocks of this size that still fit
        for (; i + rows.value <= n_rows; i += rows.value) do_block(rows, i);
    };
    next(Count<BLOCK_ROWS>{});
    next(Count<4>{});
    next(Count<2>{});
    next(Count<1>{});
}

template <typename T> constexpr i64 BLOCK_COLUMNS = BLOCK_VECTORS * WIDTH<T>;

// B of a product: row k of the columns from x on lies at from(x) + k * row.
template <typename E> struct Columns {
    const E* data;
    i64 row, step;  // step: from one block of columns to the next, for each of its columns
    INLINE const E* from(i64 x, i64 block) const { return data + x / block * block * step + x % block; }
};
template <typename E> INLINE Columns<E> columns_of_rows(const E* data, i64 row) { return {data, row, 1}; }
// In panels, [columns / BLOCK_COLUMNS][n_k][BLOCK_COLUMNS]: what a block reads is one contiguous stream. In whole rows, 16 columns of 64 rows that are 256
// bytes apart share a quarter of the first cache's sets.
template <typename T> INLINE Columns<T> columns_of_panels(const T* data, i64 n_k) { return {data, BLOCK_COLUMNS<T>, n_k}; }

// Cuts n_columns, a multiple of the vector width, into blocks and calls do_block(Count<X>, x) for each: X vectors from column x on.
template <typename T, typename F> INLINE void in_column_blocks(i64 n_columns, F do_block) {
    i64 x = 0;
    const auto next = [&](auto vectors) {
        for (; x + vectors.value * WIDTH<T> <= n_columns; x += vectors.value * WIDTH<T>) do_block(vectors, x);
    };
    next(Count<BLOCK_VECTORS>{});
    next(Count<2>{});
    next(Count<1>{});
}

// product_block for any number of rows, and n_columns columns, a multiple of the vector width.
template <typename T, typename E = T>
void product(const T* a, i64 a_row, i64 a_step, Columns<E> b, T* c, i64 c_row, i64 n_rows, i64 n_columns, i64 n_k, T alpha, bool add) {
    in_column_blocks<T>(n_columns, [&](auto vectors, i64 x) {
        in_blocks(n_rows, [&](auto rows, i64 i) {
            constexpr int R = decltype(rows)::value, X = decltype(vectors)::value;
            product_block<T, R, X>(a + i * a_row, a_row, a_step, b.from(x, BLOCK_COLUMNS<T>), b.row, c + i * c_row + x, c_row, n_k, alpha, add);
        });
    });
}

// -- panels of A -------------------------------------------------------------------------------------------------------

// Packs A[i][k] = from[k * step + i] in the order in which product_block reads it, [k][R] per block: one contiguous stream instead of R rows that are
// far apart.
template <typename T> void pack_panels(const T* from, i64 step, i64 n_rows, i64 n_k, T* to) {
    in_blocks(n_rows, [&](auto rows, i64 i) {
        constexpr int R = decltype(rows)::value;
        for (i64 k = 0; k < n_k; k++) __builtin_memcpy(to + i * n_k + k * R, from + k * step + i, R * sizeof(T));
    });
}

// A product whose A is packed in panels.
template <typename T> void product_of_panels(const T* a, Columns<T> b, T* c, i64 c_row, i64 n_rows, i64 n_columns, i64 n_k, T alpha, bool add) {
    in_column_blocks<T>(n_columns, [&](auto vectors, i64 x) {
        in_blocks(n_rows, [&](auto rows, i64 i) {
            constexpr int R = decltype(rows)::value, X = decltype(vectors)::value;
            product_block<T, R, X>(a + i * n_k, 1, R, b.from(x, BLOCK_COLUMNS<T>), b.row, c + i * c_row + x, c_row, n_k, alpha, add);
        });
    });
}
