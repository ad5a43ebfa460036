// Hopper's instructions as functions: barriers, copies by TMA, products by wgmma, and a few numbers.
//
// Addresses of shared memory are 32-bit numbers (u32). A phase is the parity that an mbarrier waits for: it changes whenever the barrier completes.

typedef unsigned int u32;
typedef unsigned long long u64;

#define DEV __device__ __forceinline__
#define INF __int_as_float(0x7f800000)
#define QUIET_NAN __int_as_float(0x7fffffff)
#define LN2 0.6931471805599453f
#define LOG2E 1.4426950408889634f

struct bfloat { unsigned short bits; };
struct half { unsigned short bits; };
struct alignas(64) TensorMap { u64 opaque[16]; };                // CUtensorMap of a tensor [batch, heads, tokens, head dim]

// ---- barriers ----------------------------------------------------------------------------------------------------------
DEV void bar_init(u32 bar, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals)); }
DEV void bar_wait(u32 bar, u32 phase) {
    asm volatile("{\n.reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar), "r"(phase)
                 : "memory");
}
DEV void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEV void bar_arrive_at(u32 bar, u32 program) {                   // of the cluster
    asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [a];\n}" ::"r"(bar), "r"(program) : "memory");
}
DEV void bar_expect(u32 bar, u32 bytes) {                        // arrives, and completes when so many bytes have come
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEV void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory"); }

// Named barriers of two warpgroups: who waits goes on when the other has arrived.
DEV void turn_wait(u32 id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
DEV void turn_give(u32 id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }

DEV u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
DEV void cluster_sync() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }

// ---- copies ------------------------------------------------------------------------------------------------------------
// 64 columns of some rows: [rows][64] in shared memory, rows of 128 bytes, swizzled; zeros past the tensor's end.
DEV void tma_load(u32 to, const TensorMap& t, u32 bar, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to), "l"(&t),
                 "r"(column), "r"(row), "r"(head), "r"(batch), "r"(bar) : "memory");
}
DEV void tma_load_both(u32 to, const TensorMap& t, u32 bar, int column, int row, int head, int batch) {   // to both programs of a cluster
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::
                 "r"(to), "l"(&t), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(bar), "h"((unsigned short)3) : "memory");
}
DEV void store_16(char* to, const u32 (&x)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
DEV void store_pair(float* to, float x, float y) { asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory"); }
DEV void put_shared(u32 to, int x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }
DEV int get_shared(u32 from) {
    int x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

// ---- products ----------------------------------------------------------------------------------------------------------
// An operand in shared memory, [columns / 64][rows][64] with 128-byte swizzle: 8 rows are 1024 bytes, `lead` is the distance of chunks of 64 columns (for
// operands whose rows are summed over). Only the low word of its descriptor varies, so that an instruction costs one addition.
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

// ---- numbers -----------------------------------------------------------------------------------------------------------
DEV float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEV float log2_of(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// base + log2 x, of a normal x > 0. Sums begin near 2^-64, so the two nearly cancel: the exponent, which is exact, goes first.
DEV float plus_log2(float base, float x) {
    u32 bits = __float_as_uint(x);
    return base + (float)((int)(bits >> 23) - 127) + log2_of(__uint_as_float((bits & 0x7fffff) | 0x3f800000));
}
DEV u32 pack(float low, float high) {                            // two numbers in 16 bits each
    u32 y;
#if FP16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#endif
    return y;
}
DEV float widen(bfloat x) { return __uint_as_float((u32)x.bits << 16); }
DEV float widen(half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEV float widen(float x) { return x; }
DEV float widen(double x) { return (float)x; }
DEV int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }   // the same in all threads of a warp, and known to be
DEV float quad_max(float x) {                                    // over the four threads that share a row
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
DEV float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Philox-4x32-10: four words of a counter's four, by a key of two.
DEV void philox(u32 (&c)[4], u32 key0, u32 key1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 x = (u64)c[0] * 0xd2511f53u, y = (u64)c[2] * 0xcd9e8d57u;
        c[0] = (u32)(y >> 32) ^ c[1] ^ (key0 + round * 0x9e3779b9u);
        c[2] = (u32)(x >> 32) ^ c[3] ^ (key1 + round * 0xbb67ae85u);
        c[1] = (u32)y, c[3] = (u32)x;
    }
}
