// Which tiles of a mask are empty, partial or full, by evaluating the mask.
#pragma once
#include "tiles.h"

constexpr i64 SINGLE_THREAD_TILES = 64;  // up to so many, waking other threads costs more than it gains
enum TileState : uint8_t { EMPTY, PARTIAL, FULL };  // as in tiles/geometry.py

// Applied to zeros, a mask leaves 0 where it allows and -inf where it does not. Lanes past the last query repeat it, which changes neither answer. The first and
// the last key are tried before all: most tiles that bounds leave undecided are partial, and most of these by an edge that crosses one of the two.
template <typename E> void classify_tile(void* context, i64 item) {
    typedef typename compute_type<E>::type T;
    const Classify& c = *(const Classify*)context;
    const i64 tile = c.tiles[item], kv0 = tile % c.kv_tiles * KEYS, q0 = tile / c.kv_tiles % c.q_tiles * LANES, head = tile / c.kv_tiles / c.q_tiles;
    const i64 n = at_most(KEYS, c.n_kv - kv0), tries[3][2] = {{kv0, 1}, {kv0 + n - 1, 1}, {kv0, n}};  // first key and number of keys
    scratch.reserve(KEYS * LANES * sizeof(T));
    T* scores = scratch.take<T>(KEYS * LANES);
    i32 allows = 0, forbids = 0;
    for (int k = 0; k < 3 && !(allows && forbids); k++) {
        const i64 elements = tries[k][1] * LANES;
        __builtin_memset(scores, 0, (size_t)elements * sizeof(T));
        apply(c.mask.by_query, c.mask, head / c.heads, head % c.heads, tries[k][0], tries[k][1], q0, at_most(q0 + LANES, c.n_q) - 1, scores);
#pragma omp simd reduction(| : allows, forbids)
        for (i64 x = 0; x < elements; x++) {
            allows |= scores[x] == 0;
            forbids |= scores[x] != 0;
        }
    }
    c.states[item] = !allows ? EMPTY : forbids ? PARTIAL : FULL;
}

template <typename E> void classify(const Classify& c) { c.run(classify_tile<E>, (void*)&c, c.count, c.count <= SINGLE_THREAD_TILES ? 1 : c.threads); }
