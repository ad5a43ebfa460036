// What forward and backward share: scratch memory, tiles of queries and keys in the compute type, scores, dropout.
//
// Score tiles are transposed, S^T [keys][LANES queries], with one query per vector lane: maxima and sums over keys need no shuffles, a query tile is
// transposed once for all its keys, and keys and values are read as stored.
#pragma once
#include <stdlib.h>
#include <unistd.h>
#include "arguments.h"
#include "elements.h"
#include "exponential.h"
#include "products.h"
#include "transpose.h"

#ifndef RESULT  // the type of out and gradients
#define RESULT ELEMENT
#endif
#ifndef STORED  // the type of keys and values
#define STORED ELEMENT
#endif

constexpr int LANES = 64;  // queries in a tile
constexpr int KEYS = 64;   // keys in a tile, at most
constexpr i64 SINGLE_THREAD_WORK = 1 << 20;  // multiply-adds: below this, waking other threads costs more than it gains

template <typename T> constexpr T INFINITE = std::numeric_limits<T>::infinity();

INLINE i64 at_most(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 at_least(i64 a, i64 b) { return a > b ? a : b; }
INLINE i64 padded(i64 n, i64 to) { return (n + to - 1) / to * to; }

// Of LANES, those that are computed for a tile of so many queries: whole pairs of vectors. What the others hold is not looked at.
template <typename T> INLINE i64 lanes_of(i64 queries) { return padded(queries, 2 * WIDTH<T>); }

// Bytes of a core's L2 cache.
inline i64 l2_bytes() {
#ifdef _SC_LEVEL2_CACHE_SIZE
    static const i64 size = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (size > 0) return size;
#endif
    return 1 << 20;
}

// Per-thread scratch memory, reused across tiles and calls.
class Scratch {
  public:
    ~Scratch() { free(memory); }
    void reserve(size_t bytes) {
        used = 0;
        if (bytes <= size) return;
        free(memory);
        size = (bytes + 4095) / 4096 * 4096;
        memory = (char*)aligned_alloc(4096, size);
        if (memory == nullptr) abort();
    }
    template <typename T> T* take(i64 count) {
        T* found = (T*)(memory + used);
        used += (size_t)padded(count * (i64)sizeof(T), 64);
        return found;
    }

  private:
    char* memory = nullptr;
    size_t size = 0, used = 0;
};
inline thread_local Scratch scratch;

template <typename E> INLINE const E* row_ptr(const Tensor& t, i64 b, i64 h, i64 row) {
    return (const E*)t.data + b * t.stride[0] + h * t.stride[1] + row * t.stride[2];
}

// -- rows in the compute type -----------------------------------------------------------------------------------------

template <typename T> struct Rows {  // row i at data + i * stride, features contiguous
    const T* data;
    i64 stride;
};

// Widens `count` rows of n features into `to` [count][width], zero-padded beyond n.
template <typename E, typename T> void widen_rows(const E* from, i64 row, i64 step, i64 count, i64 n, T* to, i64 width) {
    for (i64 i = 0; i < count; i++) {
        const E* source = from + i * row;
        T* target = to + i * width;
        if (step == 1)
            for (i64 d = 0; d < n; d++) target[d] = widen(source[d]);
        else
            for (i64 d = 0; d < n; d++) target[d] = widen(source[d * step]);
        for (i64 d = n; d < width; d++) target[d] = 0;
    }
}

// Rows of a tensor in the compute type: in place if the tensor already has that type and width, else a copy in `to`.
template <typename E, typename T> Rows<T> rows_of(const Tensor& t, i64 b, i64 h, i64 first, i64 count, i64 n, T* to, i64 width) {
    const E* from = row_ptr<E>(t, b, h, first);
    if constexpr (sizeof(E) == sizeof(T))
        if (t.stride[3] == 1 && width == n) return {(const T*)from, t.stride[2]};
    widen_rows(from, t.stride[2], t.stride[3], count, n, to, width);
    return {to, width};
}

// -- keys and values ---------------------------------------------------------------------------------------------------

struct Location {  // a row of keys or values: which (batch element or page, row) it is in their Tensors
    i64 b, row;
};

INLINE Location locate(const Problem& p, i64 b, i64 row) {
    if (!p.pages.table) return {b, row};
    const i64 page = p.pages.table[b * p.pages.stride + row / p.pages.size];
    return {at_least(at_most(page, p.pages.count - 1), 0), row % p.pages.size};
}

// Whether the rows from `first` on are at equal distances: within one page, if there are pages.
INLINE bool evenly_spaced(const Problem& p, i64 first, i64 count) { return !p.pages.table || first % p.pages.size + count <= p.pages.size; }

// Keys that batch element b may attend to, at most.
INLINE i64 keys_of(const Problem& p, i64 b) { return p.pages.lengths ? at_least(at_most(p.pages.lengths[b], p.n_kv), 0) : p.n_kv; }

// Rows of keys or values in the compute type: in place where that is possible, else a copy in `to` [count][width].
template <typename T> Rows<T> stored_rows(const Problem& p, const Tensor& t, i64 b, i64 h, i64 first, i64 count, i64 n, T* to, i64 width) {
    const Location start = locate(p, b, first);
    if (evenly_spaced(p, first, count)) return rows_of<STORED>(t, start.b, h, start.row, count, n, to, width);
    for (i64 i = 0; i < count;) {
        const Location at = locate(p, b, first + i);
        const i64 here = at_most(count - i, p.pages.size - at.row);
        widen_rows(row_ptr<STORED>(t, at.b, h, at.row), t.stride[2], t.stride[3], here, n, to + i * width, width);
        i += here;
    }
    return {to, width};
}

// to[d][lane] = row `lane`, feature d; zero in lanes without a row. In panels of C lanes: [LANES / C][n][C].
template <i64 C, typename E, typename T> void transpose_rows(const E* from, i64 row, i64 step, i64 count, i64 n, T* to) {
    static_assert(LANES % C == 0 && C % SIDE == 0);
    for (i64 l0 = 0; l0 < LANES; l0 += SIDE)
        for (i64 d0 = 0; d0 < n; d0 += SIDE) {
            const i64 rows = at_most(at_least(count - l0, 0), SIDE), columns = at_most(n - d0, SIDE);
            T* target = to + l0 / C * n * C + d0 * C + l0 % C;
            T square[SIDE * SIDE];
            if (rows == SIDE && columns == SIDE && step == 1) {
                for (i64 l = 0; l < SIDE; l++)
                    for (i64 d = 0; d < SIDE; d++) square[l * SIDE + d] = widen(from[(l0 + l) * row + d0 + d]);
                if constexpr (sizeof(T) == sizeof(u32)) {
                    transpose_square((const u32*)square, SIDE, (u32*)target, C);
                    continue;
                }
            } else {
                for (i64 l = 0; l < rows; l++)
                    for (i64 d = 0; d < columns; d++) square[l * SIDE + d] = widen(from[(l0 + l) * row + (d0 + d) * step]);
            }
            for (i64 d = 0; d < columns; d++)
                for (i64 l = 0; l < SIDE; l++) target[d * C + l] = l < rows ? square[l * SIDE + d] : (T)0;
        }
}

// The inverse, with each lane multiplied by its factor. `from` is padded to whole SIDE x SIDE squares.
template <typename E, typename T> void store_transposed(const T* from, const T* factor, E* to, i64 row, i64 step, i64 count, i64 n) {
    for (i64 l0 = 0; l0 < count; l0 += SIDE)
        for (i64 d0 = 0; d0 < n; d0 += SIDE) {
            T square[SIDE * SIDE];
            if constexpr (sizeof(T) == sizeof(u32))
                transpose_square((const u32*)from + d0 * LANES + l0, LANES, (u32*)square, SIDE);
            else
                for (i64 d = 0; d < SIDE; d++)
                    for (i64 l = 0; l < SIDE; l++) square[l * SIDE + d] = from[(d0 + d) * LANES + l0 + l];
            const i64 rows = at_most(count - l0, SIDE), columns = at_most(n - d0, SIDE);
            for (i64 l = 0; l < rows; l++) {
                E* target = to + (l0 + l) * row + d0 * step;
                const T times = factor[l0 + l];
                if (step == 1 && columns == SIDE)
                    for (i64 d = 0; d < SIDE; d++) narrow(square[l * SIDE + d] * times, target[d]);
                else
                    for (i64 d = 0; d < columns; d++) narrow(square[l * SIDE + d] * times, target[d * step]);
            }
        }
}

// -- NaN and Inf in masked positions --------------------------------------------------------------------------------

template <typename T> bool all_finite(Rows<T> rows, i64 count, i64 n) {
    T off = 0;  // x - x is 0 or NaN
    for (i64 i = 0; i < count; i++) {
        const T* row = rows.data + i * rows.stride;
        T here = 0;
#pragma omp simd reduction(+ : here)
        for (i64 d = 0; d < n; d++) here += row[d] - row[d];
        off += here;
    }
    return off == 0;
}

// A masked position has weight 0, but 0 * NaN is NaN: NaN and Inf must stay out of the products. Where a tile has any, the product runs on a copy in
// which they are 0 (zero_nonfinite), and add_attended_nonfinite then adds those at attended positions, whatever their weight.
template <typename T> Rows<T> zero_nonfinite(Rows<T> rows, i64 count, i64 n, T* to, i64 width) {
    for (i64 i = 0; i < count; i++)
        for (i64 d = 0; d < width; d++) {
            const T x = d < n ? rows.data[i * rows.stride + d] : 0;
            to[i * width + d] = x - x == 0 ? x : 0;
        }
    return {to, width};
}

// c[i * c_row + x * c_step] += values[k][x], for every non-finite value whose score final[i * by_i + k * by_k] is not -inf (attended)
template <typename T>
void add_attended_nonfinite(const T* final, i64 by_i, i64 by_k, Rows<T> values, T* c, i64 c_row, i64 c_step, i64 n_rows, i64 n_columns, i64 n_k) {
    for (i64 k = 0; k < n_k; k++)
        for (i64 x = 0; x < n_columns; x++) {
            const T value = values.data[k * values.stride + x];
            if (value - value == 0) continue;
            for (i64 i = 0; i < n_rows; i++)
                if (final[i * by_i + k * by_k] != -INFINITE<T>) c[i * c_row + x * c_step] += value;
        }
}

// -- programs ----------------------------------------------------------------------------------------------------------

// A generated function, applied to a tile: `rows` indices from `first` along one axis, lanes from `first_lane` along the other; lanes past
// `last_lane` repeat it.
template <typename T> using TileFunction = void (*)(const Program*, i64 b, i64 h, i64 first, i64 rows, i64 first_lane, i64 last_lane, T* scores);

template <typename T> INLINE void apply(void* function, const Program& program, i64 b, i64 h, i64 first, i64 rows, i64 first_lane, i64 last_lane, T* scores) {
    ((TileFunction<T>)function)(&program, b, h, first, rows, first_lane, last_lane, scores);
}

// -- dropout -----------------------------------------------------------------------------------------------------------

// Philox-4x32-10 of the counter (column, row, h, b): 16 bits for each of eight elements of an aligned 16 x 16 square, laid out as in engines/dropout.py.
INLINE void philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1, u32* words, i64 stride) {
    for (int round = 0; round < 10; round++) {
        const uint64_t first = (uint64_t)0xD2511F53u * c0, second = (uint64_t)0xCD9E8D57u * c2;
        c0 = (u32)(second >> 32) ^ c1 ^ k0;
        c1 = (u32)second;
        c2 = (u32)(first >> 32) ^ c3 ^ k1;
        c3 = (u32)first;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = c0;
    words[stride] = c1;
    words[2 * stride] = c2;
    words[3 * stride] = c3;
}

// Which square of the whole problem a part's square is; past its end, the last.
INLINE i64 square_in_whole(const i32* squares, i64 square, i64 length) { return squares ? squares[at_most(square, (length - 1) / 16)] : square; }

// keep[j][lane]: whether dropout keeps key kv0 + j for query q0 + lane
inline void dropout_keep_tile(const Problem& p, i64 b, i64 h, i64 q0, i64 kv0, i64 n, uint8_t* keep) {
    constexpr i64 MOST = (LANES / 16 + 1) * 8;
    const i64 first_row = q0 / 16 * 8, rows = (q0 + LANES - 1) / 16 * 8 + 8 - first_row;
    u32 counter[MOST];  // Philox's of each row
    for (i64 r = 0; r < rows; r++) counter[r] = (u32)(square_in_whole(p.places.query_squares, (first_row + r) / 8, p.n_q) * 8 + r % 8);
    i32 index[LANES];  // of each lane's word in words[4][MOST], for the lower keys of a square
    for (i64 l = 0; l < LANES; l++) {
        const i64 i = q0 + l;
        index[l] = (i32)((i >> 3 & 1) * 2 * MOST + (i >> 4) * 8 + (i & 7) - first_row);
    }
    u32 words[4 * MOST];
    const u32 c2 = (u32)(p.places.head + h), c3 = (u32)(p.places.batch + b), k0 = (u32)p.seed, k1 = (u32)(p.seed >> 32);
    for (i64 square = kv0 / 16 * 16; square < kv0 + n; square += 16) {
        const i64 first_column = square_in_whole(p.places.key_squares, square / 16, p.n_kv) * 4;
        for (i64 c = 0; c < 4; c++) {
            for (i64 r = 0; r < rows; r++) philox((u32)(first_column + c), counter[r], c2, c3, k0, k1, words + r, MOST);
            for (i64 upper = 0; upper < 2; upper++)
                for (i64 odd = 0; odd < 2; odd++) {
                    const i64 j = square + 2 * c + 8 * upper + odd - kv0;
                    if (j < 0 || j >= n) continue;
                    for (i64 l = 0; l < LANES; l++) keep[j * LANES + l] = (i64)(words[index[l] + upper * MOST] >> (16 * odd) & 0xffff) >= p.dropout_threshold;
                }
        }
    }
}
