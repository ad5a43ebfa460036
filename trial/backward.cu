// Attention backward for Hopper (sm_90a), bf16, head dim 128; a trial. The host (backward.py) puts in front of this file the constants
//   BM (queries a step: 64 or 80), CAUSAL, CLUSTER (1 or 2), MULTICAST, ADDS, SLOTS, DEBUG_SPIN
// and three functions around wgmma,
//   s_mma (float (&d)[BM / 2], u64 a, u64 b, bool add)          64 x BM x 16, both in shared memory, summed over contiguous columns
//   dq_mma(float (&d)[BM / 2], u64 a, u64 b, bool add)          64 x BM x 16, A is k x m as it lies (m contiguous)
//   kv_mma(float (&d)[64], const u32* a, u64 b, bool add)       64 x 128 x 16, A in registers, B is k x n as it lies
//
//   S^T = K Q^T [keys, queries], P^T = 2^(S^T c - lse2), dP^T = V dO^T, dS^T = P^T (dP^T - delta)
//   dV += P^T dO, dK += dS^T Q (A in registers), dQ^T = K^T dS^T [head dim, queries]; c = scale log2 e; dK and dQ are scaled at the end
//
// A program has 128 keys and visits query tiles of BM. Warpgroup 0: warp 0 loads, warps 2 and 3 add dQ's halves (of consumer 0 and 1) to memory.
// Warpgroups 1 and 2, consumers: 64 keys each for S^T, dP^T, dV, dK; 64 columns of the head dim each for dQ^T over all 128 keys.
//
// CLUSTER == 2: two programs hold neighbouring key tiles and walk the same query tiles. Program r owns half r of a tile's queries: the other half of its dQ
// goes to the partner's shared memory by st.async, and only sums of both go to memory: half as many adds.
//
// A consumer's step i, its products (in flight) above, its registers' work below:
//   | dP(i)          | dV(i)        | dK(i) dQ(i)        | dQ(i) S(i+1)      | S(i+1)     |
//   | 2^.., P packed | dS, stmatrix | other's dS awaited | stage released    | dQ(i) -> staging |

#pragma nv_diag_suppress 177                                    // variables that only some variants use
#define DEV __device__ __forceinline__
typedef unsigned short u16;

#define BN 128
#define NS (BM / 2)                                             // a thread's scores
#define NJ (BM / 8)                                             // groups of 8 queries
#define OWN (NJ / CLUSTER)                                      // of which so many are added by this program
#define INF __int_as_float(0x7f800000)
#define LOG2E 1.4426950408889634f

#define ADD_NONE 0                                              // nothing goes to memory (for a ceiling; dQ is wrong)
#define ADD_BULK 1                                              // cp.reduce.async.bulk from staging
#define ADD_RED 2                                               // red.global.add.v4.f32: in clusters by the store warps, else by consumers from registers
#define DIRECT (CLUSTER == 1 && ADDS == ADD_RED)                // no staging, no store warps
#define ADD_STORE 3                                             // plain bulk stores instead (what do adds cost more than bytes? dQ is wrong)
#define ADD_LOCAL 4                                             // bulk adds, but each program always to the same place of its own (dQ is wrong)

struct alignas(64) TensorMap { u64 opaque[16]; };               // of [batch * heads, tokens, 128]

struct Shared {                                                 // offsets from a base aligned to 1024; tiles are [columns / 64][rows][64], swizzled
    static const u32 tile_kv = BN * 256, tile_q = BM * 256;
    static const u32 part = OWN * 2048;                         // a consumer's share of staged dQ: [OWN][128 threads][4] floats
    static const u32 k = 0, v = k + tile_kv, q = v + tile_kv, d_o = q + 2 * tile_q, ds = d_o + 2 * tile_q;   // dS: [2][keys / 64][BM][64]
    static const u32 staging = ds + 2 * tile_q, incoming = staging + SLOTS * 2 * part;                      // [SLOTS][2]; [2]
    static const u32 lse = incoming + (CLUSTER == 2 ? 2 * part : 0), delta = lse + 2 * BM * 4;               // [2][BM] floats
    static const u32 bars = delta + 2 * BM * 4;
    static const u32 k_full = bars, v_full = bars + 8;
    static const u32 q_full = bars + 16, do_full = bars + 32, empty = bars + 48;                             // + 8 * stage
    static const u32 staged = bars + 64, sent = bars + 96;                                                   // + 16 * consumer + 8 * slot
    static const u32 in_full = bars + 128, in_free = bars + 144;                                             // + 8 * consumer
    static const u32 end = bars + 160;
};

// ---- barriers ----------------------------------------------------------------------------------------------------------
// Where a wait stands, for the debug build's records.
enum Place { LOAD_EMPTY = 1, STORE_STAGED, STORE_IN_FULL, K_FULL, V_FULL, Q_FULL, DO_FULL, SENT, IN_FREE };

DEV void bar_init(u32 bar, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals)); }
#if DEBUG_SPIN
DEV bool bar_try(u32 bar, u32 phase) {
    u32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(phase) : "memory");
    return done;
}
DEV u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
// Gives up after a second: writes down who waited where, and lets everybody run to the end (all other waits give up then, too). dbg[0]: how many records.
DEV void bar_spin(u32 bar, u32 phase, int place, int it, u32* dbg) {
    u64 begin = now();
    while (!bar_try(bar, phase)) {
        u64 waited = now() - begin;
        bool given_up = *(volatile u32*)dbg != 0;
        if (waited < 1000000000ull && !given_up) continue;
        if (threadIdx.x % 32 == 0 && (!given_up || waited > 1000000ull)) {
            u32 n = atomicAdd(dbg, 1u);
            if (n < 255) {
                u32* at = dbg + 8 + 8 * n;
                at[0] = place, at[1] = blockIdx.x, at[2] = threadIdx.x, at[3] = phase, at[4] = it, at[5] = bar;
            }
            __threadfence();
        }
        return;
    }
}
#define bar_wait(bar, phase, place, it, dbg) bar_spin(bar, phase, place, it, dbg)
#else
DEV void bar_block(u32 bar, u32 phase) {
    asm volatile("{\n.reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar), "r"(phase) : "memory");
}
#define bar_wait(bar, phase, place, it, dbg) bar_block(bar, phase)
#endif
DEV void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEV u32 at_program(u32 address, u32 rank) {                      // the same place in a program of the cluster
    u32 a;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(address), "r"(rank));
    return a;
}
// Without .release.cluster, which ptxas makes a MEMBAR.ALL.GPU (it would wait for all adds to memory); waits without .acquire.cluster, which invalidates the L1
// cache. What it guards are loads that have returned, or products that are complete.
DEV void bar_arrive_at(u32 bar, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(at_program(bar, rank)) : "memory");
}
DEV void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
DEV void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory"); }
DEV void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
DEV void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEV u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
DEV void cluster_sync() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }
DEV int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

// ---- copies ------------------------------------------------------------------------------------------------------------
DEV void tma_load(u32 to, const TensorMap& t, u32 bar, int column, int row, int head) {   // 64 columns of some rows; zeros past the end
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to), "l"(&t),
                 "r"(column), "r"(row), "r"(head), "r"(0), "r"(bar) : "memory");
}
DEV void tma_load_both(u32 to, const TensorMap& t, u32 bar, int column, int row, int head) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::
                 "r"(to), "l"(&t), "r"(column), "r"(row), "r"(head), "r"(0), "r"(bar), "h"((u16)3) : "memory");
}
DEV void bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
DEV void bulk_add(float* to, u32 from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
DEV void bulk_store(float* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
DEV void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEV void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEV void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
DEV void red_4(float* to, const float (&x)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
DEV void put_4(u32 to, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
DEV void get_4(float (&x)[4], u32 from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(from) : "memory");
}
DEV void get_2(float (&x)[2], u32 from) { asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(from)); }
DEV void send_4(u32 to, u32 bar, float a, float b, float c, float d) {   // both in the other program; counts 16 bytes at its barrier
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"(bar)
                 : "memory");
}
// Four 8 x 8 matrices, each transposed: lane 8 m + i says where column i of matrix m goes.
DEV void put_transposed(u32 to, const u32* x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
DEV void store_16(char* to, const u32 (&x)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// ---- products ----------------------------------------------------------------------------------------------------------
// An operand in shared memory (as in engines/cuda/kernels/primitives.cuh): 8 rows are 1024 bytes, `lead` is the distance of chunks of 64 columns.
DEV u32 operand(u32 address, u32 lead) { return (address & 0x3ffff) >> 4 | (lead >> 4) << 16; }
DEV u64 operand_at(u32 low, u32 bytes) {
    u64 x;
    asm("mov.b64 %0, {%1, %2};" : "=l"(x) : "r"(low + (bytes >> 4)), "n"(1 << 30 | 64));
    return x;
}
DEV void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> DEV void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
template <int N> DEV void pin(float (&x)[N]) {                   // no use of x moves across this
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
DEV float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV u32 pack(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEV float low_of(u32 x) { return __uint_as_float(x << 16); }
DEV float high_of(u32 x) { return __uint_as_float(x & 0xffff0000u); }

// ---- work --------------------------------------------------------------------------------------------------------------
struct Args {
    TensorMap q, k, v, d_o;
    float *lse2, *delta, *dq;                                    // [heads, q_tiles * BM]; dq: see postprocess
    char *dk, *dv;
    u32* dbg;
    int S, heads, units, q_tiles, group;                         // units: key tiles (pairs of them in clusters) a head; group: heads that are mixed
    float c, scale;
};

struct Work {                                                   // a program's key tile and the query tiles it visits
    int head, tile, begin, steps;
    DEV Work(const Args& a) {
        int t = blockIdx.x / CLUSTER, first = t / (a.units * a.group) * a.group, in = t - first * a.units, heads = min(a.group, a.heads - first);
        head = first + in % heads;
        int unit = in / heads;                                  // causal: the first are the longest
        tile = unit * CLUSTER + (CLUSTER == 2 ? (int)cluster_rank() : 0);
        begin = unit * (CLUSTER * BN) / BM;
        if (CAUSAL) {
            steps = a.q_tiles - begin;
        } else {                                                // programs begin at different query tiles: they do not all add to the same rows
            steps = a.q_tiles;
            begin %= a.q_tiles;
        }
    }
    DEV int m(int it, const Args& a) const {                    // query tile of a step
        int x = begin + it;
        return !CAUSAL && x >= a.q_tiles ? x - a.q_tiles : x;
    }
};

DEV void load_tile(u32 to, const TensorMap& map, u32 bar, int row, int head) {
#if CLUSTER == 2 && MULTICAST                                   // each program loads 64 columns, for both
    u32 c = cluster_rank();
    tma_load_both(to + c * (BM * 128), map, bar, 64 * c, row, head);
#else
    tma_load(to, map, bar, 0, row, head);
    tma_load(to + BM * 128, map, bar, 64, row, head);
#endif
}

DEV void load_keys(u32 to, const TensorMap& map, u32 bar, int row, int head) {
    bar_expect(bar, Shared::tile_kv);
    tma_load(to, map, bar, 0, row, head);
    tma_load(to + BN * 128, map, bar, 64, row, head);
}

// One thread.
DEV void load(const Args& a, u32 base) {
    Work w(a);
    load_keys(base + Shared::k, a.k, base + Shared::k_full, w.tile * BN, w.head);
#pragma unroll 1
    for (int it = 0; it < w.steps; it++) {
        u32 s = it & 1;
        int m = w.m(it, a);
        size_t row = ((size_t)w.head * a.q_tiles + m) * BM;
        bar_wait(base + Shared::empty + 8 * s, (it >> 1 & 1) ^ 1, LOAD_EMPTY, it, a.dbg);
        u32 bar = base + Shared::q_full + 8 * s;
        bar_expect(bar, Shared::tile_q + BM * 4);
        load_tile(base + Shared::q + s * Shared::tile_q, a.q, bar, m * BM, w.head);
        bulk_load(base + Shared::lse + s * (BM * 4), a.lse2 + row, BM * 4, bar);
        if (it == 0) load_keys(base + Shared::v, a.v, base + Shared::v_full, w.tile * BN, w.head);
        bar = base + Shared::do_full + 8 * s;
        bar_expect(bar, Shared::tile_q + BM * 4);
        load_tile(base + Shared::d_o + s * Shared::tile_q, a.d_o, bar, m * BM, w.head);
        bulk_load(base + Shared::delta + s * (BM * 4), a.delta + row, BM * 4, bar);
    }
}

// One warp for each consumer: its staged part of dQ goes to memory, [head][q_tile][consumer][NJ][128 threads][4] floats.
DEV void store(const Args& a, u32 base, u32 wg) {
    Work w(a);
    u32 lane = threadIdx.x % 32, rank = CLUSTER == 2 ? cluster_rank() : 0;
#pragma unroll 1
    for (int it = 0; it < w.steps; it++) {
        u32 slot = it % SLOTS, phase = it / SLOTS & 1;
        u32 staging = base + Shared::staging + (2 * slot + wg) * Shared::part;
        float* to = a.dq + (((size_t)w.head * a.q_tiles + w.m(it, a)) * 2 + wg) * (BM * 64) + rank * (OWN * 512);
        if (ADDS == ADD_LOCAL) to = a.dq + ((size_t)blockIdx.x * 2 + wg) * (BM * 64);
        bar_wait(base + Shared::staged + 16 * wg + 8 * slot, phase, STORE_STAGED, it, a.dbg);
#if CLUSTER == 2
        u32 in = base + Shared::in_full + 8 * wg, incoming = base + Shared::incoming + wg * Shared::part;
        if (lane == 0) bar_expect(in, Shared::part);
        bar_wait(in, it & 1, STORE_IN_FULL, it, a.dbg);
#pragma unroll 1
        for (int j = 0; j < OWN * 4; j += 2) {                  // 32 lanes x 4 floats, twice
            float x[2][4], y[2][4];
            u32 at = (32 * j + lane) * 16;
            get_4(x[0], staging + at), get_4(x[1], staging + at + 512), get_4(y[0], incoming + at), get_4(y[1], incoming + at + 512);
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) x[n][i] += y[n][i];
                if (ADDS == ADD_RED) red_4(to + 4 * (32 * j + lane) + 128 * n, x[n]);
                else put_4(staging + at + 512 * n, x[n][0], x[n][1], x[n][2], x[n][3]);
            }
        }
        if (ADDS != ADD_RED) fence_async();
        __syncwarp();
        if (lane == 0) bar_arrive_at(base + Shared::in_free + 8 * wg, rank ^ 1);
#endif
        if (lane == 0) {
            if (ADDS == ADD_BULK || ADDS == ADD_LOCAL) bulk_add(to, staging, Shared::part);
            if (ADDS == ADD_STORE) bulk_store(to, staging, Shared::part);
            if (ADDS != ADD_NONE && ADDS != ADD_RED) bulk_commit(), bulk_wait_read();
            bar_arrive(base + Shared::sent + 16 * wg + 8 * slot);
        }
        __syncwarp();
    }
    if (lane == 0) bulk_wait();
}

// ---- consumer ----------------------------------------------------------------------------------------------------------
// S^T or dP^T: keys (64 rows of K or V) x queries, summed over the head dim.
DEV void issue_scores(float (&s)[NS], u32 keys, u32 queries) {
    u32 a = operand(keys, 16), b = operand(queries, 16);
    mma_fence();
#pragma unroll
    for (int i = 0; i < 8; i++) s_mma(s, operand_at(a, i / 4 * (BN * 128) + i % 4 * 32), operand_at(b, i / 4 * (BM * 128) + i % 4 * 32), i > 0);
    mma_commit();
}
// dV or dK: 64 keys x head dim, summed over queries; P^T or dS^T in registers.
DEV void issue_sums(float (&d)[64], const u32 (&p)[NS / 2], u32 queries) {
    u32 b = operand(queries, BM * 128);
    mma_fence();
#pragma unroll
    for (int i = 0; i < BM / 16; i++) kv_mma(d, p + 4 * i, operand_at(b, i * 2048), true);
    mma_commit();
}
// dQ^T: 64 columns of the head dim x queries, summed over 128 keys. k: chunk of K, [128][64]; ds: [2][BM][64].
DEV void issue_dq(float (&d)[NS], u32 k, u32 ds) {
    u32 a = operand(k, BN * 128), b = operand(ds, 16);
    mma_fence();
#pragma unroll
    for (int i = 0; i < 8; i++) dq_mma(d, operand_at(a, i * 2048), operand_at(b, i / 4 * (BM * 128) + i % 4 * 32), i > 0);
    mma_commit();
}

// The four threads of a row trade 4-byte pieces so that each holds 16 bytes of it.
DEV void trade(u32 (&w)[4]) {
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    u32 x = __shfl_xor_sync(0xffffffff, odd ? w[0] : w[1], 1), y = __shfl_xor_sync(0xffffffff, odd ? w[2] : w[3], 1);
    w[0] = odd ? x : w[0], w[1] = odd ? w[1] : x, w[2] = odd ? y : w[2], w[3] = odd ? w[3] : y;
    x = __shfl_xor_sync(0xffffffff, high ? w[0] : w[2], 2), y = __shfl_xor_sync(0xffffffff, high ? w[1] : w[3], 2);
    w[0] = high ? x : w[0], w[2] = high ? w[2] : x, w[1] = high ? y : w[1], w[3] = high ? w[3] : y;
}
// 64 x 128 accumulators as bf16 rows; this thread's first row is `row`.
DEV void write_rows(char* to, const float (&d)[64], float factor, int row, int S) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int at = row + 8 * h;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 w[4];
#pragma unroll
            for (int j = 0; j < 4; j++) w[j] = pack(d[16 * i + 4 * j + 2 * h] * factor, d[16 * i + 4 * j + 2 * h + 1] * factor);
            trade(w);
            if (at < S) store_16(to + (size_t)at * 256 + 64 * i + 16 * (threadIdx.x & 3), w);
        }
    }
}

// A thread has two keys, h = 0, 1, 8 apart: s[4 j + 2 h + e] is query 8 j + 2 c + e, c = lane % 4. Packed in pairs these are left operands of wgmma as they are.
DEV void consume(const Args& a, u32 base, u32 wg) {
    Work w(a);
    const u32 thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32, rank = CLUSTER == 2 ? cluster_rank() : 0;
    const int first_key = w.tile * BN + wg * 64;
    const float c = a.c;
    const u32 columns = base + Shared::lse + 8 * (lane & 3);    // of lse; delta lies 2 BM floats behind
    // dS [query][key]: row 16 i + 8 (lane / 16) + lane % 8, its 16-byte unit 2 warp + lane / 8 % 2
    const u32 ds_row = (lane >> 4) * 8 + (lane & 7), ds_unit = 2 * warp + (lane >> 3 & 1);
    const u32 ds_to = base + Shared::ds + wg * (BM * 128) + ds_row * 128 + ((ds_unit ^ (lane & 7)) << 4);
    const u32 k_rows = base + Shared::k + wg * (64 * 128), v_rows = base + Shared::v + wg * (64 * 128), k_columns = base + Shared::k + wg * (BN * 128);
    const u32 stage_to = base + Shared::staging + wg * Shared::part + thread * 16;

    float dk[64], dv[64], s[NS];
#pragma unroll
    for (int i = 0; i < 64; i++) dk[i] = dv[i] = 0.0f;
    bar_wait(base + Shared::k_full, 0, K_FULL, 0, a.dbg);
    bar_wait(base + Shared::q_full, 0, Q_FULL, 0, a.dbg);
    issue_scores(s, k_rows, base + Shared::q);
    bar_wait(base + Shared::v_full, 0, V_FULL, 0, a.dbg);
#pragma unroll 1
    for (int it = 0; it < w.steps; it++) {
        const u32 st = it & 1, phase = it >> 1 & 1;
        const u32 q = base + Shared::q + st * Shared::tile_q, d_o = base + Shared::d_o + st * Shared::tile_q;
        float dp[NS];
        u32 p[NS / 2], t[NS / 2];

        // P^T beside dP^T
        bar_wait(base + Shared::do_full + 8 * st, phase, DO_FULL, it, a.dbg);
        mma_wait<0>();                                          // S^T(it)
        pin(s);
        issue_scores(dp, v_rows, d_o);
#if CAUSAL
        int m0 = w.m(it, a) * BM;
        if (m0 < first_key + 63) {                              // a query may only see keys up to itself
            int limit = first_key + (int)(16 * warp + lane / 4 - 2 * (lane & 3)) - m0;
#pragma unroll
            for (int i = 0; i < NS; i++) s[i] = 8 * (i / 4) + i % 2 < limit + 8 * (i / 2 % 2) ? -INF : s[i];
        }
#endif
#pragma unroll
        for (int j = 0; j < NJ; j++) {
            float lse[2];
            get_2(lse, columns + st * (BM * 4) + 32 * j);
#pragma unroll
            for (int i = 0; i < 4; i++) s[4 * j + i] = exp2_of(fmaf(s[4 * j + i], c, -lse[i % 2]));
            p[2 * j] = pack(s[4 * j], s[4 * j + 1]);
            p[2 * j + 1] = pack(s[4 * j + 2], s[4 * j + 3]);
        }
        issue_sums(dv, p, d_o);                                 // dV += P^T dO

        // dS^T beside dV, from P as it was rounded
        mma_wait<1>();                                          // dP^T
        pin(dp);
#pragma unroll
        for (int j = 0; j < NJ; j++) {
            float delta[2];
            get_2(delta, columns + (2 + st) * (BM * 4) + 32 * j);
#pragma unroll
            for (int h = 0; h < 2; h++)
                t[2 * j + h] = pack(low_of(p[2 * j + h]) * (dp[4 * j + 2 * h] - delta[0]), high_of(p[2 * j + h]) * (dp[4 * j + 2 * h + 1] - delta[1]));
        }
        const u32 buffer = st * Shared::tile_q;
#pragma unroll
        for (int i = 0; i < BM / 16; i++) put_transposed(ds_to + buffer + 2048 * i, t + 4 * i);
        fence_async();
        issue_sums(dk, t, q);                                   // dK += dS^T Q
        consumers_sync();                                       // both have stored their keys' dS
        float dq[NS];
        issue_dq(dq, k_columns, base + Shared::ds + buffer);
        mma_wait<1>();                                          // dV, dK
        pin(dk);
        pin(dv);
#if CLUSTER == 2 && MULTICAST
        if (lane < 2) bar_arrive_at(base + Shared::empty + 8 * st, lane);
#else
        if (lane == 0) bar_arrive(base + Shared::empty + 8 * st);
#endif
        // S^T of the next step under the staging of dQ; after the last one on whatever lies there, and not used
        if (it + 1 < w.steps) bar_wait(base + Shared::q_full + 8 * (st ^ 1), (it + 1) >> 1 & 1, Q_FULL, it + 1, a.dbg);
        issue_scores(s, k_rows, base + Shared::q + (st ^ 1) * Shared::tile_q);
        const u32 slot = it % SLOTS;
        if (!DIRECT) bar_wait(base + Shared::sent + 16 * wg + 8 * slot, (it / SLOTS & 1) ^ 1, SENT, it, a.dbg);
        mma_wait<1>();                                          // dQ^T
        pin(dq);
#if CLUSTER == 2
        if (rank == 0) {
#pragma unroll
            for (int j = 0; j < OWN; j++) put_4(stage_to + slot * (2 * Shared::part) + 2048 * j, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
        } else {
#pragma unroll
            for (int j = 0; j < OWN; j++) {
                const float* x = dq + 4 * (OWN + j);
                put_4(stage_to + slot * (2 * Shared::part) + 2048 * j, x[0], x[1], x[2], x[3]);
            }
        }
        __syncwarp();
        if (lane == 0) bar_arrive(base + Shared::staged + 16 * wg + 8 * slot);
        bar_wait(base + Shared::in_free + 8 * wg, (it & 1) ^ 1, IN_FREE, it, a.dbg);
        u32 to = at_program(base + Shared::incoming + wg * Shared::part + thread * 16, rank ^ 1), bar = at_program(base + Shared::in_full + 8 * wg, rank ^ 1);
        if (rank == 0) {                                        // the other half is the partner's
#pragma unroll
            for (int j = 0; j < OWN; j++) {
                const float* x = dq + 4 * (OWN + j);
                send_4(to + 2048 * j, bar, x[0], x[1], x[2], x[3]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < OWN; j++) send_4(to + 2048 * j, bar, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
        }
#elif DIRECT
        float* to = a.dq + (((size_t)w.head * a.q_tiles + w.m(it, a)) * 2 + wg) * (BM * 64) + 4 * thread;
#pragma unroll
        for (int j = 0; j < NJ; j++) {
            float x[4] = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]};
            red_4(to + 512 * j, x);
        }
#else
#pragma unroll
        for (int j = 0; j < NJ; j++) put_4(stage_to + slot * (2 * Shared::part) + 2048 * j, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
        fence_async();
        __syncwarp();
        if (lane == 0) bar_arrive(base + Shared::staged + 16 * wg + 8 * slot);
#endif
    }
    mma_wait<0>();
    pin(s);
    int row = first_key + 16 * warp + lane / 4;
    write_rows(a.dv + (size_t)w.head * a.S * 256, dv, 1.0f, row, a.S);
    write_rows(a.dk + (size_t)w.head * a.S * 256, dk, a.scale, row, a.S);
}

extern "C" __global__ void __launch_bounds__(384, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
backward(const __grid_constant__ Args args) {
    extern __shared__ char raw[];
    u32 base = ((u32)__cvta_generic_to_shared(raw) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        bar_init(base + Shared::k_full, 1), bar_init(base + Shared::v_full, 1);
        for (int s = 0; s < 2; s++) {                           // stage, slot, consumer
            bar_init(base + Shared::q_full + 8 * s, 1), bar_init(base + Shared::do_full + 8 * s, 1);
            bar_init(base + Shared::empty + 8 * s, MULTICAST ? 16 : 8);          // one arrival a consumer's warp (of both programs)
            for (int wg = 0; wg < 2; wg++) bar_init(base + Shared::staged + 16 * wg + 8 * s, 4), bar_init(base + Shared::sent + 16 * wg + 8 * s, 1);
            bar_init(base + Shared::in_full + 8 * s, 1), bar_init(base + Shared::in_free + 8 * s, 1);
        }
        publish_barriers();
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();
    int role = uniform(threadIdx.x / 128);
    if (role == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        int warp = uniform(threadIdx.x / 32);
        if (threadIdx.x == 0) load(args, base);
        if (warp >= 2 && !DIRECT) store(args, base, warp - 2);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume(args, base, role - 1);
    }
    if (CLUSTER > 1) {
        __syncwarp();
        cluster_sync();                                         // the other program may still write here
    }
}

// ---- before and after --------------------------------------------------------------------------------------------------
// A warp a row of [heads, rows], rows = q_tiles * BM: delta = sum dO O, lse in base 2 (+inf past the end: P is 0 there), and zeros for dQ's sums.
extern "C" __global__ void preprocess(const char* out, const char* d_o, const float* lse, float* lse2, float* delta, float* dq, int S, int rows, int total) {
    int r = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (r >= total) return;
    int head = r / rows, q = r % rows;
    float sum = 0.0f;
    if (q < S) {
        size_t at = ((size_t)head * S + q) * 256 + 8 * lane;
        uint2 x = *(const uint2*)(out + at), y = *(const uint2*)(d_o + at);
        sum = low_of(x.x) * low_of(y.x) + high_of(x.x) * high_of(y.x) + low_of(x.y) * low_of(y.y) + high_of(x.y) * high_of(y.y);
#pragma unroll
        for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffff, sum, i);
    }
    *(float4*)(dq + (size_t)r * 128 + 4 * lane) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (lane == 0) {
        delta[r] = sum;
        lse2[r] = q < S ? lse[(size_t)head * S + q] * LOG2E : INF;
    }
}

// dQ's sums of a query tile, [2][NJ][128][4]: consumer wg's thread t has of group j queries 8 j + 2 (t % 4) + e and columns 64 wg + 16 (t / 32) + t % 32 / 4 + 8 h
// at 2 h + e. Scaled, to bf16 [heads, S, 128].
extern "C" __global__ void postprocess(const float* sums, char* dq, int S, int q_tiles, float scale) {
    __shared__ __align__(16) u16 tile[BM][136];
    int head = blockIdx.x / q_tiles, m = blockIdx.x % q_tiles;
    const float4* from = (const float4*)(sums + (size_t)blockIdx.x * (BM * 128));
    for (int i = threadIdx.x; i < BM * 32; i += blockDim.x) {
        int wg = i / (BM * 16), j = i % (BM * 16) / 128, t = i % 128;
        int q = 8 * j + 2 * (t & 3), d = 64 * wg + 16 * (t / 32) + t % 32 / 4;
        float4 x = from[i];
        u32 a = pack(x.x * scale, x.y * scale), b = pack(x.z * scale, x.w * scale);
        tile[q][d] = (u16)a, tile[q + 1][d] = (u16)(a >> 16), tile[q][d + 8] = (u16)b, tile[q + 1][d + 8] = (u16)(b >> 16);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BM * 16; i += blockDim.x) {
        int q = i / 16, u = i % 16;
        if (m * BM + q < S) *(uint4*)(dq + ((size_t)head * S + m * BM + q) * 256 + 16 * u) = *(const uint4*)&tile[q][8 * u];
    }
}
