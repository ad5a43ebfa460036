// Attention forward for Hopper (sm_90a): one producer warpgroup, of which one thread drives TMA, and WGS consumer warpgroups of 64 query rows each.
//
//   S = score(Q K^T), P = 2^(S c - shift), 0 where the mask forbids, O = P V / rowsum(P), lse = ln 2 (shift + log2 rowsum(P)); c = scale * log2 e.
//   Dropout makes some of P 0 after they were summed. A sink is one more weight in the sum, 2^(sink log2 e - shift).
//
// The host (source.py) puts in front of this file the constants D, DV, BN, WGS, K_STAGES, V_STAGES, CLUSTER, MAPPED, BANDED, FP16, SINKS, SCORED,
// ANCHORED, DROPOUT, PARTIAL, REPAIRS and what follows from them, the struct Args, band.cuh if BANDED, repair.cuh if REPAIRS, a struct Score (emit.py) if
// SCORED, and two functions,
//   qk_mma(float (&s)[BN / 2], u64 q, u64 k, bool add)        64 x BN x 16, both operands in shared memory as they lie
//   pv_mma(float (&o)[DV / 2], const u32* p, u64 v, bool add)  64 x DV x 16, P in registers, V as it lies
//
// A query tile's steps, one for each key tile, in a consumer warpgroup; its products run beside the softmax of the step before:
//
//   products   | S0 |          | S1   | O += P0 V0  | S2   | O += P1 V1  |      | O += P V |
//   registers       | softmax0 |      | softmax1    |      | softmax2    | ...             | O / sum -> memory
//
// Why it is as it is (docs/kernels/hopper_trials.md has the measurements):
//  - Anchored softmax. A row's maximum is looked for in its first key tile alone (and in masked ones). Later tiles keep that shift: their weights may exceed
//    those of the first, for which there is room, since weights begin at 2^-ROOM; the sums, which are needed anyway, tell when a row gets out of hand, and
//    it is brought back (`recenter`). That spares a maximum an element, its exchange among threads and the rescaling of O: a quarter of a step's instructions.
//    Scores may rise as they like, so with them (unless they cannot, or are not expected to) every step looks for maxima: ANCHORED is 0.
//  - P is packed to 16 bits after the wait for P V: its registers are read until then.
//  - Warpgroups take turns at issuing products, so that the softmax of one runs under the products of another.
//  - A wait for an mbarrier ends a basic block. One stands between the softmax and the wait for P V, or ptxas hoists that wait above the exponentials.
//  - O leaves from registers, so Q's buffer is free as soon as the last scores are computed.
//
// A row that is not finite in the end (a NaN at a masked key, weights beyond float32) is computed again: by its warp (repair.cuh, if REPAIRS), or by the fix-up
// that follows, for which it gets an lse of NaN.

#define BM (64 * WGS)
#define PLACED (SCORED || DROPOUT || BANDED)                    // consumers have to know which keys they see
#define MASKED (MAPPED || BANDED)                               // some key tiles are not visited, and some are masked
#define NO (DV / 2)                                             // a thread's outputs
#if FP16
#define ROOM 0.0f                                               // fp16 has no room below: weights begin at 1 ...
#define BIG 0x1p14f                                             // ... and a row is brought back before one could pass 2^15 ...
#define BACK 10.0f                                              // ... not far, since a long row's many weights are small beside their sum
#else
#define ROOM (ANCHORED ? 64.0f : 0.0f)                          // what is lost below 2^-126 is lost below 2^-62 of the largest weight
#define BIG 0x1p-24f                                            // one step may add a factor of 2^150
#define BACK -ROOM                                              // a row's sum is brought back to 2^BACK
#endif
#define UNSET -0x1.fffffep127f                                   // the shift of a row that has seen no key

struct Shared {                                                 // offsets from a base aligned to 1024; tiles are [columns / 64][rows][64]
    static const u32 tile_q = K_CHUNKS * BM * 128, tile_k = K_CHUNKS * BN * 128, tile_v = V_CHUNKS * BN * 128;
    static const u32 q = 0, k = tile_q, v = k + K_STAGES * tile_k, bars = v + V_STAGES * tile_v;
    static const u32 k_full = bars, v_full = bars + 32, k_empty = bars + 64, v_empty = bars + 96, q_full = bars + 128, q_empty = bars + 136;
    static const u32 message = bars + 144;                      // what q_full announces: an Item's first five numbers
    static const u32 first_key = bars + 176;                    // what k_full announces, by stage
};

// ---- tiles -------------------------------------------------------------------------------------------------------------
struct Item {                                                   // a query tile
    int bh, tile, steps, masked, bits;                          // batch * heads + head; key tiles, how many of them are masked (they come first), their first bits
    int batch, head, kv_head;
#if MAPPED
    int run, first_run, last_run, i, stop;
#elif BANDED
    BandTiles band;
#endif
};

DEV int item_count(const Args& a) { return a.n_bh * ((a.n_tiles + CLUSTER - 1) / CLUSTER); }

#if MASKED
// Items are ordered by group of heads, then by length of the row (bands: the last row first), then by head. The heads from n_body on are one group.
DEV Item find_item(const Args& a, int t) {
    Item x;
    int first = min(t / (a.n_tiles * a.n_group) * a.n_group, a.n_body), in_group = t - first * a.n_tiles, heads = first < a.n_body ? a.n_group : a.n_bh - first;
    x.bh = first + in_group % heads;
    x.batch = x.bh / a.n_heads;
    x.head = x.bh % a.n_heads;
    x.kv_head = x.head / a.ratio;
#if BANDED
    x.tile = a.n_tiles - 1 - in_group / heads;                  // causal: the longest first
    x.band = BandTiles(x.tile * BM, min(BM, a.n_q - x.tile * BM), a.n_kv, a.low, a.high);
    x.steps = x.band.steps();
    x.masked = x.band.masked();
    x.bits = 0;
#else
    int row = x.batch * a.s_batch + x.head * a.s_head;
    x.tile = a.order[row + in_group / heads];
    row += x.tile;
    x.steps = a.visited[row];
    x.masked = a.masked[row];
    x.bits = a.first_bits[row];
    x.first_run = a.offsets[4 * row];                           // of full tiles; then come masked ones
    x.run = a.offsets[4 * row + 1] - 1;
    x.last_run = a.offsets[4 * row + 3];
    x.i = x.stop = 0;
#endif
    return x;
}

// The key tile of step j: those of masked runs come first, then those of full ones.
DEV int next_key_tile(const Args& a, Item& x, int j) {
#if BANDED
    return x.band.tile(j);
#else
    while (x.i == x.stop) {
        x.run = x.run + 1 == x.last_run ? x.first_run : x.run + 1;
        x.i = a.starts[x.run];
        x.stop = a.stops[x.run];
    }
    return x.i++;
#endif
}

DEV int next_item(const Args& a, int t) { return gridDim.x + atomicInc((u32*)a.counter, item_count(a) - 1); }   // wraps to 0 by itself with the last draw
#else
DEV Item find_item(const Args& a, int t) {
    Item x;
    int rows = (a.n_tiles + CLUSTER - 1) / CLUSTER;
    x.bh = t / rows;
    x.tile = t % rows * CLUSTER + (CLUSTER == 2 ? cluster_rank() : 0);
    x.batch = x.bh / a.n_heads;
    x.head = x.bh % a.n_heads;
    x.kv_head = x.head / a.ratio;
    x.steps = (a.n_kv + BN - 1) / BN;
    x.masked = x.bits = 0;
    return x;
}

DEV int next_item(const Args& a, int t) { return t + gridDim.x / CLUSTER; }
#endif

// ---- producer ----------------------------------------------------------------------------------------------------------
// A tile of K or V. In a cluster each program loads every other chunk of 64 columns, for both.
template <int CHUNKS> DEV void load_keys(u32 to, const TensorMap& map, u32 bar, int key, const Item& x) {
    bar_expect(bar, CHUNKS * BN * 128);
#pragma unroll
    for (int c = 0; c < CHUNKS; c += CLUSTER) {
#if CLUSTER == 2
        u32 mine = c + cluster_rank();
        if (CHUNKS % 2 == 0 || mine < CHUNKS) tma_load_both(to + mine * (BN * 128), map, bar, 64 * mine, key, x.kv_head, x.batch);
#else
        tma_load(to + c * (BN * 128), map, bar, 64 * c, key, x.kv_head, x.batch);
#endif
    }
}

// Tells consumers of a query tile (steps < 0: there are no more) and loads its Q.
DEV void announce(const Args& a, u32 base, u32 round, const Item& x) {
    u32 bar = base + Shared::q_full, to = base + Shared::message;
    bar_wait(base + Shared::q_empty, (round & 1) ^ 1);
    put_shared(to, x.bh), put_shared(to + 4, x.tile), put_shared(to + 8, x.steps), put_shared(to + 12, x.masked), put_shared(to + 16, x.bits);
    if (x.steps <= 0) {
        bar_arrive(bar);
    } else {
        bar_expect(bar, Shared::tile_q);
#pragma unroll
        for (int c = 0; c < K_CHUNKS; c++) tma_load(base + Shared::q + c * (BM * 128), a.q, bar, 64 * c, x.tile * BM, x.head, x.batch);
    }
}

DEV void produce(const Args& a, u32 base) {
    u32 sent = 0, round = 0;                                    // key tiles; query tiles
    int count = item_count(a);
    for (int t = blockIdx.x / CLUSTER, next; t < count; t = next, round++) {
        Item x = find_item(a, t);
        next = t;
        int before = 0;
#if MASKED
        if (x.steps == 0) announce(a, base, round, x), next = next_item(a, t);
#endif
        for (int j = 0; j <= x.steps && x.steps > 0; j++) {     // K0 Q | K1 V0 | K2 V1 ... | V
            int key = 0;
            if (j < x.steps) {
                u32 i = sent + j, s = i % K_STAGES;
#if MASKED
                key = next_key_tile(a, x, j) * BN;
#else
                key = (x.steps - 1 - j) * BN;                   // from the last: only that one can be cut by the end
#endif
                bar_wait(base + Shared::k_empty + 8 * s, (i / K_STAGES & 1) ^ 1);
                if (PLACED) put_shared(base + Shared::first_key + 4 * s, key);
                load_keys<K_CHUNKS>(base + Shared::k + s * Shared::tile_k, a.k, base + Shared::k_full + 8 * s, key, x);
            }
            if (j == 0) announce(a, base, round, x);
            if (j == x.steps - 1) next = next_item(a, t);       // a little ahead: the counter answers late
            if (j > 0) {
                u32 i = sent + j - 1, s = i % V_STAGES;
                bar_wait(base + Shared::v_empty + 8 * s, (i / V_STAGES & 1) ^ 1);
                load_keys<V_CHUNKS>(base + Shared::v + s * Shared::tile_v, a.v, base + Shared::v_full + 8 * s, before, x);
            }
            before = key;
        }
        sent += x.steps;
    }
    Item end;
    end.bh = end.tile = end.masked = end.bits = 0;
    end.steps = -1;
    announce(a, base, round, end);
}

// ---- consumer ----------------------------------------------------------------------------------------------------------
DEV void release(u32 bar) {                                     // one arrival a warp, and program of the cluster
#if CLUSTER == 2
    if (threadIdx.x % 32 < 2) bar_arrive_at(bar, threadIdx.x % 32);
#else
    if (threadIdx.x % 32 == 0) bar_arrive(bar);
#endif
}

// S of 64 rows: rows of Q begin at q, keys at k.
DEV void issue_qk(float (&s)[NS], u32 q, u32 k) {
    u32 a = operand(q, 16), b = operand(k, 16);
    mma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; i++) qk_mma(s, operand_at(a, i / 4 * (BM * 128) + i % 4 * 32), operand_at(b, i / 4 * (BN * 128) + i % 4 * 32), i > 0);
    mma_commit();
}

DEV void issue_pv(float (&o)[NO], const u32 (&p)[NS / 2], u32 v) {
    u32 b = operand(v, BN * 128);
    mma_fence();
#pragma unroll
    for (int i = 0; i < BN / 16; i++) pv_mma(o, p + 4 * i, operand_at(b, i * 2048), true);
    mma_commit();
}

// A warpgroup's 64 rows of a query tile. A thread has two of them, h = 0, 1, 8 apart: s[4 j + 2 h + e] is column 8 j + 2 c + e, o likewise; c is its place
// among the four threads that share these rows.
struct Rows {
    u32 base, wg, round;                                        // round: query tiles of this program so far
    float scale;                                                // into base 2
    int row;                                                    // this thread's first row in the tile
    float s[NS], o[NO];
    u32 p[NS / 2];                                              // P of the key tile before
    float shift[2], sum[2];                                     // of each row; of this thread's columns
    bool anchored;                                              // all rows of this warp have seen a key: their shifts are set
#if SCORED
    Score score;
#endif
#if DROPOUT
    u32 seed[2], counter[3];                                    // of Philox: key; row, head and batch
#endif

    DEV u32 q() const { return base + Shared::q + wg * (64 * 128); }
    DEV void wait_k(u32 it) const { bar_wait(base + Shared::k_full + 8 * (it % K_STAGES), it / K_STAGES & 1); }
    DEV void wait_v(u32 it) const { bar_wait(base + Shared::v_full + 8 * (it % V_STAGES), it / V_STAGES & 1); }
    DEV void begin_turn() const { turn_wait(1 + wg); }
    DEV void end_turn() const { turn_give(wg == WGS - 1 ? 1 : 2 + wg); }
    DEV int first_key(u32 it) const { return PLACED ? uniform(get_shared(base + Shared::first_key + 4 * (it % K_STAGES))) : 0; }
    DEV void release_q() const { if (threadIdx.x % 32 == 0) bar_arrive(base + Shared::q_empty); }

    DEV void pack_p() {
#pragma unroll
        for (int i = 0; i < NS / 2; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
    }

    DEV void apply_score(const Args& a, int tile, int key) {
#if SCORED
        score.apply(a, s, key + 2 * (int)(threadIdx.x & 3), key + BN <= a.n_kv && tile * BM + BM <= a.n_q);
#endif
    }

    // Weights that dropout drops become 0 (engines/dropout.py). A counter gives 16 bits for each of the eight elements that a thread has of a 16 x 16 square.
    DEV void drop(const Args& a, int key) {
#if DROPOUT
#pragma unroll
        for (int j = 0; j < BN / 16; j++) {
            u32 w[4] = {(u32)(key / 16 + j) * 4 + (threadIdx.x & 3), counter[0], counter[1], counter[2]};
            philox(w, seed[0], seed[1]);
#pragma unroll
            for (int i = 0; i < 8; i++) {                       // s[8 j + i]: column 16 j + 8 (i / 4) + 2 c + i % 2, row i / 2 % 2
                u32 word = w[i / 2 % 2 * 2 + i / 4], half_word = i % 2 ? word >> 16 : word & 0xffff;
                s[8 * j + i] = (int)half_word >= a.threshold ? s[8 * j + i] : 0.0f;
            }
        }
        pin(s);                                                 // or all this is done after the wait for P V (ptxas moves some of it there all the same)
#endif
    }

    // Scores become weights; their sums, in two chains a row, so that additions need not wait for one another.
    DEV void weigh(float (&total)[2]) {
        float part[2][2];
#pragma unroll
        for (int j = 0; j < BN / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& y = s[4 * j + i];
                y = exp2_of(y * scale - shift[i / 2]);
                part[i / 2][i % 2] = j ? part[i / 2][i % 2] + y : y;
            }
        total[0] = part[0][0] + part[0][1];
        total[1] = part[1][0] + part[1][1];
    }

    // The careful softmax: shifts follow the rows' maxima. decay: the factor for what was summed before.
    DEV void weigh_carefully(float (&decay)[2]) {
        float top[2][2], total[2];
#pragma unroll
        for (int j = 0; j < BN / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) top[i / 2][i % 2] = j ? fmaxf(top[i / 2][i % 2], s[4 * j + i]) : s[i];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float now = fmaxf(shift[h], quad_max(fmaxf(top[h][0], top[h][1])) * scale + ROOM);
            decay[h] = exp2_of(shift[h] - now);
            shift[h] = now;
        }
        weigh(total);
        sum[0] = sum[0] * decay[0] + total[0];
        sum[1] = sum[1] * decay[1] + total[1];
        if (MASKED && ANCHORED) anchored = !__any_sync(0xffffffff, fminf(shift[0], shift[1]) == UNSET);
    }

#if MAPPED
    // Bits 2 j + e of a word say which of a row's columns 8 j + 2 c + e are allowed (gluon/kernels/mask_bits.py). All of them unless the tile is masked.
    DEV void load_bits(u32 (&words)[2], const Args& a, int block, bool is_masked) const {
        const int* at = a.bits + (size_t)block * (BM * 4) + row * 4 + (threadIdx.x & 3);
        words[0] = is_masked ? __ldg(at) : 0xffffffff;
        words[1] = is_masked ? __ldg(at + 32) : 0xffffffff;
    }
    DEV void apply_bits(const u32 (&words)[2]) {
#pragma unroll
        for (int j = 0; j < BN / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[4 * j + i] = words[i / 2] & (1u << (2 * j + i % 2)) ? s[4 * j + i] : -INF;
    }
#endif
#if BANDED
    // What lies outside the band, and past the last key, in a key tile: constants are compared with a number of each row.
    DEV void apply_band(const Args& a, int tile, int key) {
        int first = tile * BM, last = min(first + BM, a.n_q) - 1, q = first + row, at = key + 2 * (int)(threadIdx.x & 3);
        if (key + BN - 1 > min(first + a.high, a.n_kv - 1)) {   // some row does not see the last key
            int most[2] = {min(q + a.high, a.n_kv - 1) - at, min(q + 8 + a.high, a.n_kv - 1) - at};
#pragma unroll
            for (int j = 0; j < BN / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[4 * j + i] = 8 * j + i % 2 <= most[i / 2] ? s[4 * j + i] : -INF;
        }
        if (key < last + a.low) {                               // or the first
            int least[2] = {q + a.low - at, q + 8 + a.low - at};
#pragma unroll
            for (int j = 0; j < BN / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[4 * j + i] = 8 * j + i % 2 >= least[i / 2] ? s[4 * j + i] : -INF;
        }
    }
#endif
    DEV void cut_keys(int left) {                               // keys from `left` on do not exist
#pragma unroll
        for (int j = 0; j < BN / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[4 * j + i] = 8 * j + i % 2 < left - 2 * (int)(threadIdx.x & 3) ? s[4 * j + i] : -INF;
    }

    // S and softmax of a query tile's first key tile.
    DEV void first_step(const Args& a, u32 it, int steps, bool is_masked, int tile, const u32 (&words)[2]) {
        u32 ks = it % K_STAGES;
        float decay[2];
        wait_k(it);
        issue_qk(s, q(), base + Shared::k + ks * Shared::tile_k);
        int key = first_key(it);
        mma_wait<0>();
        pin(s);
        release(base + Shared::k_empty + 8 * ks);
        if (steps == 1) release_q();
        shift[0] = shift[1] = UNSET;
        sum[0] = sum[1] = 0.0f;
        apply_score(a, tile, key);
#if MAPPED
        apply_bits(words);
#elif BANDED
        if (is_masked) apply_band(a, tile, key);
#else
        if (a.n_kv % BN) cut_keys(a.n_kv % BN);
#endif
        weigh_carefully(decay);
        drop(a, key);
        pack_p();
#pragma unroll
        for (int i = 0; i < NO; i++) o[i] = 0.0f;
        if (steps > 1) wait_k(it + 1);
    }

    // S and softmax of key tile `it`, which has arrived, and P V of the one before.
    DEV void step(u32 it, bool is_masked, bool is_last, u32 (&words)[2], const Args& a, int tile, int next_block, bool next_masked) {
        u32 ks = it % K_STAGES, vs = (it - 1) % V_STAGES;
        begin_turn();
        issue_qk(s, q(), base + Shared::k + ks * Shared::tile_k);
        wait_v(it - 1);
        issue_pv(o, p, base + Shared::v + vs * Shared::tile_v);
        end_turn();
        int key = first_key(it);
        mma_wait<1>();
        pin(s);
        release(base + Shared::k_empty + 8 * ks);
        if (is_last) release_q();                               // the next Q loads under the last softmax
        apply_score(a, tile, key);
        bool careful = !ANCHORED || (MASKED && (is_masked || !anchored));
        float decay[2], total[2];
        if (careful) {
#if MAPPED
            if (!SCORED || is_masked) {
                apply_bits(words);
                load_bits(words, a, next_block, next_masked);   // a step ahead: memory may take longer to answer than products take
            }
#elif BANDED
            if (is_masked) apply_band(a, tile, key);
#endif
            weigh_carefully(decay);
        } else {
            weigh(total);
        }
        drop(a, key);
        if (!is_last) wait_k(it + 1);
        mma_wait<0>();
        pin(o);
        pin(s);
        release(base + Shared::v_empty + 8 * vs);
        pack_p();
        if (careful) {
#pragma unroll
            for (int i = 0; i < NO; i++) o[i] *= decay[i / 2 % 2];
        } else {
            sum[0] += total[0];
            sum[1] += total[1];
            if (__builtin_expect(__any_sync(0xffffffff, fmaxf(sum[0], sum[1]) > BIG), 0)) recenter();
        }
    }

    // Rare: a row's weights have grown beyond BIG. Where they pass 2^127 in one step, the row becomes NaN, and is computed again.
    DEV void recenter() {
        float root[2];                                          // of the factor, which may lie below 2^-126
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float up = fmaxf(log2_of(quad_max(sum[h])) - (BACK), 0.0f);
            root[h] = exp2_of(-0.5f * up);
            shift[h] += up;
            sum[h] = sum[h] * root[h] * root[h];
        }
#pragma unroll
        for (int i = 0; i < NS; i++) s[i] = s[i] * root[i / 2 % 2] * root[i / 2 % 2];
#pragma unroll
        for (int i = 0; i < NO; i++) o[i] = o[i] * root[i / 2 % 2] * root[i / 2 % 2];
        pack_p();
    }

    DEV void last_product(u32 it) {
        u32 vs = it % V_STAGES;
        wait_v(it);
        issue_pv(o, p, base + Shared::v + vs * Shared::tile_v);
        mma_wait<0>();
        pin(o);
        release(base + Shared::v_empty + 8 * vs);
    }

    // The four threads of a row trade 4-byte pieces so that each holds 16 bytes of it.
    DEV void trade(u32 (&w)[4]) const {
        bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
        u32 x = __shfl_xor_sync(0xffffffff, odd ? w[0] : w[1], 1), y = __shfl_xor_sync(0xffffffff, odd ? w[2] : w[3], 1);
        w[0] = odd ? x : w[0], w[1] = odd ? w[1] : x, w[2] = odd ? y : w[2], w[3] = odd ? w[3] : y;
        x = __shfl_xor_sync(0xffffffff, high ? w[0] : w[2], 2), y = __shfl_xor_sync(0xffffffff, high ? w[1] : w[3], 2);
        w[0] = high ? x : w[0], w[2] = high ? w[2] : x, w[1] = high ? y : w[1], w[3] = high ? w[3] : y;
    }

    DEV float sink_of(const Args& a, int bh) const {            // in base 2
#if SINKS
        return widen(a.sinks[bh % a.n_heads]) * LOG2E;
#else
        return -INF;
#endif
    }

    // O / sum and lse. A row that attends nothing gets 0 and -inf; one that is not finite gets an lse of NaN, and this thread's bit of it is returned.
    DEV u32 store(const Args& a, int bh, int tile, float sink) {
        u32 lost = 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float zero = 0.0f;                                  // or NaN
#pragma unroll
            for (int i = 0; i < NO / 2; i++) zero = fmaf(o[i / 2 * 4 + 2 * h + i % 2], 0.0f, zero);
            float total = quad_sum(sum[h] + zero);
            bool unset = shift[h] == UNSET;                     // no key
            float decay = 1.0f;
            if (SINKS) {
                float now = fmaxf(shift[h], sink);
                decay = exp2_of(shift[h] - now);
                shift[h] = now;
                total = total * decay + exp2_of(sink - (now - ROOM)) * exp2_of(-ROOM);  // ROOM goes apart: sink - now is near -ROOM, and loses digits
            }
            float nothing = unset && total == 0.0f ? -INF : QUIET_NAN;  // a sink may not be finite
            bool sound = total > 0.0f && total < INF;
            float factor = sound ? decay / total : 0.0f;
#if DROPOUT
            factor *= a.keep_scale;
#endif
            int at = tile * BM + row + 8 * h;
            lost |= (at < a.n_q && !sound && nothing != -INF) << h;
            if ((threadIdx.x & 3) == 0 && at < a.n_q) a.lse[(size_t)bh * a.n_q + at] = sound ? plus_log2(shift[h], total) * LN2 : nothing;
#if PARTIAL                                                     // in fp32: the four threads of a row write 32 bytes of it together as they are
            float* line = a.out + (bh / a.n_heads * a.s_out_0 + bh % a.n_heads * a.s_out_1 + at * a.s_out_2);
#pragma unroll
            for (int i = 0; i < DV / 8; i++) {
                int column = 8 * i + 2 * (threadIdx.x & 3), n = 4 * i + 2 * h;
                if (at < a.n_q && column < a.v_sizes[3]) store_pair(line + column, o[n] * factor, o[n + 1] * factor);
            }
#else
            char* line = (char*)a.out + 2 * (bh / a.n_heads * a.s_out_0 + bh % a.n_heads * a.s_out_1 + at * a.s_out_2);
#pragma unroll
            for (int i = 0; i < (DV + 31) / 32; i++) {
                u32 w[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    int n = 16 * i + 4 * j + 2 * h;             // of columns 32 i + 8 j + 2 c + e
                    w[j] = n < NO ? pack(o[n] * factor, o[n + 1] * factor) : 0;
                }
                trade(w);
                int column = 32 * i + 8 * (threadIdx.x & 3);
                if (at < a.n_q && column < a.v_sizes[3]) store_16(line + 2 * column, w);
            }
#endif
        }
        return lost;
    }

    DEV void finish(const Args& a, int bh, int tile, float sink) {
        u32 lost = store(a, bh, tile, sink);
#if REPAIRS
        if (__builtin_expect(__any_sync(0xffffffff, lost != 0), 0)) repair(a, bh, tile * BM + row - threadIdx.x % 32 / 4, lost, scale, sink);
#endif
    }

    DEV void run(const Args& a) {
        if (wg == WGS - 1) end_turn();                          // warpgroup 0 begins
#if DROPOUT
        seed[0] = uniform((int)*a.seed), seed[1] = uniform((int)(*a.seed >> 32));
#endif
        u32 it = 0;                                             // key tiles so far
        for (round = 0;; round++) {
            bar_wait(base + Shared::q_full, round & 1);
            u32 from = base + Shared::message;
            int steps = uniform(get_shared(from + 8));
            if (steps < 0) break;
            int bh = uniform(get_shared(from)), tile = uniform(get_shared(from + 4)), masked = 0, block = 0;
            u32 words[2] = {0, 0};
#if SCORED
            score.begin(a, bh / a.n_heads, bh % a.n_heads, tile * BM + row);
#endif
#if DROPOUT
            counter[0] = (tile * BM + row) / 16 * 8 + row % 8, counter[1] = bh % a.n_heads, counter[2] = bh / a.n_heads;
#endif
#if MASKED
            masked = uniform(get_shared(from + 12));
            block = uniform(get_shared(from + 16));
            if (steps == 0) {                                   // its rows attend nothing
                release_q();
                shift[0] = shift[1] = UNSET;
                sum[0] = sum[1] = 0.0f;
#pragma unroll
                for (int i = 0; i < NO; i++) o[i] = 0.0f;
                finish(a, bh, tile, sink_of(a, bh));
                continue;
            }
#endif
#if MAPPED
            load_bits(words, a, block, masked > 0);
#endif
            first_step(a, it, steps, masked > 0, tile, words);
#if MAPPED
            load_bits(words, a, block + 1, masked > 1);
#endif
            it++;
            for (int i = 1; i < steps; i++, it++) step(it, i < masked, i + 1 == steps, words, a, tile, block + i + 1, i + 1 < masked);
            float sink = sink_of(a, bh);
            last_product(it - 1);
            finish(a, bh, tile, sink);
        }
        if (wg == 0) begin_turn();                              // meet the last turn
    }
};

extern "C" __global__ void __launch_bounds__(128 + 128 * WGS, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
forward(const __grid_constant__ Args args) {
    extern __shared__ char raw[];
    u32 base = ((u32)__cvta_generic_to_shared(raw) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (int s = 0; s < K_STAGES; s++) bar_init(base + Shared::k_full + 8 * s, 1), bar_init(base + Shared::k_empty + 8 * s, 4 * WGS * CLUSTER);
        for (int s = 0; s < V_STAGES; s++) bar_init(base + Shared::v_full + 8 * s, 1), bar_init(base + Shared::v_empty + 8 * s, 4 * WGS * CLUSTER);
        bar_init(base + Shared::q_full, 1);
        bar_init(base + Shared::q_empty, 4 * WGS);
        publish_barriers();
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();
    int role = uniform(threadIdx.x / 128);
    if (role == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(WGS == 2 ? 24 : 32));
        if (threadIdx.x == 0) produce(args, base);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WGS == 2 ? 240 : 160));
        Rows rows;
        rows.base = base;
        rows.wg = role - 1;
        rows.scale = args.scale;
        rows.row = rows.wg * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        rows.run(args);
    }
    if (CLUSTER > 1) {
        __syncwarp();
        cluster_sync();                                         // the other program may still write here
    }
}
