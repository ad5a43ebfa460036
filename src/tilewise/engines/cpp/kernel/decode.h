// Decoding: a few queries over many keys. Vectors run along the features, so nothing is transposed. The keys are split (split-KV); the splits are
// computed independently and combined in order.
#pragma once
#include "tiles.h"

INLINE float scalar_exp(float x) { return __builtin_expf(x); }
INLINE double scalar_exp(double x) { return __builtin_exp(x); }
INLINE float scalar_log(float x) { return __builtin_logf(x); }
INLINE double scalar_log(double x) { return __builtin_log(x); }

// The end of a row, where weights are exp(score - from) and total is their sum.
template <typename T> struct RowEpilogue {
    T factor;  // out = factor * acc
    T lse;
};

template <typename T> RowEpilogue<T> row_epilogue(T from, T total, const T* sink, T keep_scale) {
    const T ceiling = sink && *sink > from ? *sink : from;
    const T base = ceiling == -INFINITE<T> ? 0 : ceiling;
    const T decay = scalar_exp(from - base);
    total *= decay;
    if (sink) total += scalar_exp(*sink - base);
    if (total == 0) return {0, -INFINITE<T>};
    return {decay * keep_scale / total, base + scalar_log(total)};
}

template <typename T> INLINE T horizontal_sum(vec<T> v) {
    T lane[WIDTH<T>], sum = 0;
    store(lane, v);
#pragma omp simd reduction(+ : sum)
    for (int l = 0; l < WIDTH<T>; l++) sum += lane[l];
    return sum;
}

template <typename E> INLINE void prefetch_row(const E* row, i64 n) {
    for (i64 at = 0; at < n * (i64)sizeof(E); at += 64) __builtin_prefetch((const char*)row + at, 0, 2);  // into the L2 cache
}

// Whether dots() reads keys two vectors at a time, the even features and the odd ones: then the query lies in that order, too.
template <typename E> bool in_pairs(i64 d) { return std::is_same<E, bfloat>::value && d % (2 * WIDTH<float>) == 0; }

template <typename T> void order_in_pairs(T* query, i64 d) {
    for (T* at = query; at < query + d; at += 2 * WIDTH<T>) {
        T pairs[2 * WIDTH<T>];
        __builtin_memcpy(pairs, at, sizeof pairs);
        for (int l = 0; l < 2 * WIDTH<T>; l++) at[l % 2 * WIDTH<T> + l / 2] = pairs[l];
    }
}

// part[i] += query * key[i], lane by lane
template <int N, typename T, typename E> INLINE void add_products(const T* query, const E* const* key, i64 d, vec<T>* part) {
    for (i64 x = 0; x < d; x += WIDTH<T>) {
        const vec<T> q = load(query + x);
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) part[i] += q * load_widened(key[i] + x);
    }
}
template <int N> INLINE void add_products(const float* query, const bfloat* const* key, i64 d, vec<float>* part) {
    if (!in_pairs<bfloat>(d)) return add_products<N, float, bfloat>(query, key, d, part);
    for (i64 x = 0; x < d; x += 2 * WIDTH<float>) {
        const vec<float> even = load(query + x), odd = load(query + x + WIDTH<float>);
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            const EvenOdd k = load_even_odd(key[i] + x);
            part[i] += even * k.even;
            part[i] += odd * k.odd;
        }
    }
}

// s[j] = scale * query . keys[j] for up to KEYS keys: one vector of keys at a time, up to four keys per load of the query. `next`, unless null: as many rows of
// the same size, needed after these; memory delivers them meanwhile.
template <typename T, typename E> void dots(const T* query, Rows<E> keys, Rows<E> next, i64 n, i64 d, T scale, T* s) {
    constexpr int GROUP = WIDTH<T> < 4 ? WIDTH<T> : 4;  // a vector may have as few as two doubles
    for (i64 j = 0; j < n; j += WIDTH<T>) {
        vec<T> sum[WIDTH<T>];
        for (i64 g = 0; g < WIDTH<T>; g += GROUP) {
            const E* key[GROUP];
            for (int i = 0; i < GROUP; i++) key[i] = keys.data + at_most(j + g + i, n - 1) * keys.stride;
            if (next.data)
                for (int i = 0; i < GROUP; i++) prefetch_row(next.data + at_most(j + g + i, n - 1) * next.stride, d);
            vec<T> part[GROUP] = {};
            add_products<GROUP>(query, key, d, part);
#pragma GCC unroll 4
            for (int i = 0; i < GROUP; i++) sum[g + i] = part[i];
        }
        horizontal_sums(sum, s + j);
    }
    for (i64 j = 0; j < n; j++) s[j] *= scale;
}

// One online softmax step of a row: scores become weights. Returns the factor by which acc has to be rescaled.
template <typename T> T online_softmax(T* s, T& row_max, T& total) {
    T new_max = row_max;
#pragma omp simd reduction(max : new_max)
    for (i64 j = 0; j < KEYS; j++) new_max = s[j] > new_max ? s[j] : new_max;
    const T base = new_max == -INFINITE<T> ? 0 : new_max, decay = scalar_exp(row_max - base);
    vec<T> sum{};
    for (i64 j = 0; j < KEYS; j += WIDTH<T>) {
        const vec<T> weight = exponential(load(s + j) - base);
        store(s + j, weight);
        sum += weight;
    }
    total = total * decay + horizontal_sum<T>(sum);
    row_max = new_max;
    return decay;
}

template <typename E> bool rows_are_finite(Rows<E> rows, i64 count, i64 n) {
    typename compute_type<E>::type off = 0;
    for (i64 j = 0; j < count; j++) {
        const E* row = rows.data + j * rows.stride;
        typename compute_type<E>::type here = 0;
#pragma omp simd reduction(+ : here)
        for (i64 d = 0; d < n; d++) here += widen(row[d]) - widen(row[d]);
        off += here;
    }
    return off == 0;
}

template <typename E> struct Piece {  // keys and values from `first` on, of a block of KEYS: as many as lie evenly spaced
    Rows<E> keys, values;
    i64 first, count;
};

// A block of n keys from kv0 on: in one piece, or page by page.
template <typename E> i64 pieces_of(const Problem& p, i64 b, i64 hk, i64 kv0, i64 n, Piece<E>* pieces) {
    i64 found = 0;
    for (i64 i = 0; i < n; found++) {
        const Location at = locate(p, b, kv0 + i);
        const i64 count = p.pages.table ? at_most(n - i, p.pages.size - at.row) : n;
        pieces[found] = {{row_ptr<E>(p.key, at.b, hk, at.row), p.key.stride[2]}, {row_ptr<E>(p.value, at.b, hk, at.row), p.value.stride[2]}, i, count};
        i += count;
    }
    return found;
}

// One split of the keys, for all rows (the query heads of one key head, times queries): acc, max score and sum of weights.
template <typename E> void decode_split(void* context, i64 item) {
    typedef typename compute_type<E>::type T;
    const Forward& f = *(const Forward*)context;
    const Problem& p = f.problem;
    const i64 split = item % f.splits, hk = item / f.splits % p.kv_heads, b = item / f.splits / p.kv_heads;
    const i64 n_kv = keys_of(p, b), split_keys = padded((n_kv + f.splits - 1) / f.splits, KEYS);
    const i64 ratio = p.heads / p.kv_heads, rows = ratio * p.n_q;
    const i64 dp = padded(p.d, WIDTH<T>), dvp = padded(p.dv, WIDTH<T>);
    scratch.reserve((size_t)(rows * (dp + dvp + 2 + 2 * KEYS) + KEYS * (dp + 2 * dvp)) * sizeof(T) + 16 * 64 + LANES * KEYS);
    T* query = scratch.take<T>(rows * dp);
    T* acc = scratch.take<T>(rows * dvp);
    T* row_max = scratch.take<T>(rows);
    T* total = scratch.take<T>(rows);
    T* keys = scratch.take<T>(KEYS * dp);
    T* values = scratch.take<T>(KEYS * dvp);
    T* clean = scratch.take<T>(KEYS * dvp);       // values with NaN and Inf as 0
    T* weights = scratch.take<T>(rows * KEYS);    // scores, then weights
    T* final = scratch.take<T>(rows * KEYS);      // a copy of the scores, if values are not finite
    uint8_t* dropout_keep = scratch.take<uint8_t>(LANES * KEYS);
    for (i64 r = 0; r < rows; r++) {
        widen_rows(row_ptr<E>(p.query, b, hk * ratio + r / p.n_q, r % p.n_q), 0, p.query.stride[3], 1, p.d, query + r * dp, dp);
        row_max[r] = -INFINITE<T>, total[r] = 0;
    }
    __builtin_memset(acc, 0, (size_t)(rows * dvp) * sizeof(T));
    const i64 end = at_most((split + 1) * split_keys, n_kv);
    const bool selective = p.mask.by_key || p.score.by_key;
    const bool in_place = std::is_same<E, STORED>::value && (!p.pages.table || p.pages.size % WIDTH<T> == 0);  // pieces are made of whole vectors of keys
    const bool values_whole = in_place && dvp == p.dv && p.value.stride[3] == 1;  // rows are read in place
    const bool keys_whole = in_place && dp == p.d && p.key.stride[3] == 1 && (sizeof(E) == sizeof(T) || rows == 1);  // else widened once for several rows
    if (keys_whole && in_pairs<E>(dp))
        for (i64 r = 0; r < rows; r++) order_in_pairs(query + r * dp, dp);
    // Fetching early pays once most comes from memory: 10 to 20 % less time for 16 MiB, 5 % more for 2 MiB (measured with 1 MiB of L2).
    const bool far = values_whole && p.d == p.dv && p.batch * p.kv_heads * p.n_kv * (p.d + p.dv) * (i64)sizeof(E) > 4 * l2_bytes();
    for (i64 kv0 = split * split_keys; kv0 < end; kv0 += KEYS) {
        const i64 n = at_most(KEYS, end - kv0);
        Piece<E> pieces[KEYS];
        const i64 n_pieces = in_place ? pieces_of(p, b, hk, kv0, n, pieces) : 0;
        bool copied = !values_whole;
        for (i64 i = 0; i < n_pieces && selective && !copied; i++) copied = !rows_are_finite(pieces[i].values, pieces[i].count, p.dv);
        const Rows<T> v = copied ? stored_rows(p, p.value, b, hk, kv0, n, p.dv, values, dvp) : Rows<T>{};
        const bool has_nonfinite = copied && selective && !all_finite(v, n, p.dv);
        const Rows<T> k = keys_whole ? Rows<T>{} : stored_rows(p, p.key, b, hk, kv0, n, p.d, keys, dp);
        for (i64 r = 0; r < rows; r++) {
            const i64 h = hk * ratio + r / p.n_q, q = r % p.n_q;
            T* s = weights + r * KEYS;
            if (!keys_whole) dots(query + r * dp, k, Rows<T>{}, n, dp, (T)p.scale, s);
            for (i64 i = 0; i < n_pieces && keys_whole; i++)
                dots(query + r * dp, pieces[i].keys, far && r == 0 ? pieces[i].values : Rows<E>{}, pieces[i].count, dp, (T)p.scale, s + pieces[i].first);
            if (p.score.by_key) apply(p.score.by_key, p.score, b, h, q, 1, kv0, kv0 + n - 1, s);
            if (p.mask.by_key) apply(p.mask.by_key, p.mask, b, h, q, 1, kv0, kv0 + n - 1, s);
            for (i64 j = n; j < KEYS; j++) s[j] = -INFINITE<T>;
            if (has_nonfinite) __builtin_memcpy(final + r * KEYS, s, KEYS * sizeof(T));
            const T decay = online_softmax(s, row_max[r], total[r]);
            if (decay != 1)
                for (i64 d = 0; d < dvp; d++) acc[r * dvp + d] *= decay;
            if (p.dropout_threshold) {
                dropout_keep_tile(p, b, h, q, kv0, n, dropout_keep);
                for (i64 j = 0; j < n; j++) s[j] = dropout_keep[j * LANES] ? s[j] : 0;
            }
        }
        if (copied) {
            const Rows<T> finite = has_nonfinite ? zero_nonfinite(v, n, p.dv, clean, dvp) : v;
            product<T>(weights, KEYS, 1, columns_of_rows(finite.data, finite.stride), acc, dvp, rows, dvp, n, 1, true);
        }
        for (i64 i = 0; i < n_pieces && !copied; i++) {
            const Rows<E> own = pieces[i].values;
            product<T>(weights + pieces[i].first, KEYS, 1, columns_of_rows(own.data, own.stride), acc, dvp, rows, dvp, pieces[i].count, 1, true);
        }
        if (has_nonfinite) add_attended_nonfinite<T>(final, KEYS, 1, v, acc, dvp, 1, rows, p.dv, n);
    }
    T* result = (T*)f.split_results + item * rows * (p.dv + 2);
    for (i64 r = 0; r < rows; r++, result += p.dv + 2) {
        __builtin_memcpy(result, acc + r * dvp, (size_t)p.dv * sizeof(T));
        result[p.dv] = row_max[r];
        result[p.dv + 1] = total[r];
    }
}

template <typename E, typename R> void combine_splits(void* context, i64 item) {
    typedef typename compute_type<E>::type T;
    const Forward& f = *(const Forward*)context;
    const Problem& p = f.problem;
    const i64 hk = item % p.kv_heads, b = item / p.kv_heads, ratio = p.heads / p.kv_heads, rows = ratio * p.n_q, size = p.dv + 2;
    const T* results = (const T*)f.split_results + item * f.splits * rows * size;
    T sums[512];
    for (i64 r = 0; r < rows; r++) {
        const i64 h = hk * ratio + r / p.n_q, q = r % p.n_q, at = (b * p.heads + h) * p.n_q + q;
        T row_max = -INFINITE<T>, total = 0;
        for (i64 k = 0; k < f.splits; k++) {
            const T there = results[(k * rows + r) * size + p.dv];
            row_max = there > row_max ? there : row_max;
        }
        const T base = row_max == -INFINITE<T> ? 0 : row_max;
        for (i64 d = 0; d < p.dv; d++) sums[d] = 0;
        for (i64 k = 0; k < f.splits; k++) {
            const T* result = results + (k * rows + r) * size;
            const T weight = scalar_exp(result[p.dv] - base);
            if (result[p.dv] == -INFINITE<T> && result[p.dv + 1] == 0) continue;  // attended to nothing
            total += result[p.dv + 1] * weight;
            for (i64 d = 0; d < p.dv; d++) sums[d] += result[d] * weight;
        }
        const RowEpilogue<T> end = row_epilogue<T>(row_max, total, p.sinks ? (const T*)p.sinks + h : nullptr, (T)p.keep_scale);
        if (f.lse) ((T*)f.lse)[at] = end.lse;
        if (f.max_score) ((T*)f.max_score)[at] = row_max;
        R* out = (R*)row_ptr<R>(f.out, b, h, q);
        for (i64 d = 0; d < p.dv; d++) narrow(sums[d] * end.factor, out[d * f.out.stride[3]]);
    }
}

template <typename E, typename R> void decode(const Forward& f) {
    const Problem& p = f.problem;
    const i64 threads = p.batch * p.heads * p.n_q * p.n_kv * (p.d + p.dv) < SINGLE_THREAD_WORK ? 1 : p.threads;
    p.run(decode_split<E>, (void*)&f, p.batch * p.kv_heads * f.splits, threads);
    p.run(combine_splits<E, R>, (void*)&f, p.batch * p.kv_heads, 1);
}
