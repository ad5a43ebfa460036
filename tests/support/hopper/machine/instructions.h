// PTX instructions as functions: their names with _ for . and ::, their operands one after the other (ptx.py writes the calls).
#pragma once
#include "machine.h"
#include "numbers.h"

namespace ptx {
using namespace hopper;

inline u32 cluster_ctarank() { return cluster_rank(); }

// ---- barriers --------------------------------------------------------------------------------------------------------
inline void mbarrier_init_shared_cta_b64(u32 bar, u32 arrivals) { mbarrier_init(bar, arrivals); }
inline void mbarrier_try_wait_parity_shared_cta_b64(bool& done, u32 bar, u32 parity) {
    mbarrier_wait(bar, parity);
    done = true;
}
inline void mbarrier_arrive_shared_cta_b64(u32 bar) { mbarrier_arrive(bar, 0); }
inline void mbarrier_arrive_shared_cluster_b64(u32 bar) { mbarrier_arrive(bar, 0); }
inline void mbarrier_arrive_expect_tx_shared_cta_b64(u32 bar, u32 bytes) { mbarrier_arrive(bar, bytes); }
inline void mapa_shared_cluster_u32(u32& to, u32 address, u32 rank) { to = of_program(address, rank); }
inline void fence_mbarrier_init_release_cluster() { mbarriers_publish(); }
inline void fence_proxy_async_shared_cta() {}
inline void bar_sync(u32 id, u32 threads) { barrier_sync(id, threads); }
inline void bar_arrive(u32 id, u32 threads) { barrier_arrive(id, threads); }
inline void barrier_cluster_arrive_aligned() { cluster_arrive(); }
inline void barrier_cluster_wait_aligned() { cluster_wait(); }
inline void setmaxnreg_dec_sync_aligned_u32(u32 count) { registers_give(count); }
inline void setmaxnreg_inc_sync_aligned_u32(u32 count) { registers_take(count); }

// ---- copies ----------------------------------------------------------------------------------------------------------
inline void cp_async_bulk_tensor_4d_shared_cluster_global_tile_mbarrier_complete_tx_bytes(
    u32 to, const void* map, int column, int row, int head, int batch, u32 bar) {
    const int at[4] = {column, row, head, batch};
    load_tile(to, map, bar, at, 0);
}
inline void cp_async_bulk_tensor_4d_shared_cluster_global_tile_mbarrier_complete_tx_bytes_multicast_cluster(
    u32 to, const void* map, int column, int row, int head, int batch, u32 bar, u32 programs) {
    const int at[4] = {column, row, head, batch};
    load_tile(to, map, bar, at, programs);
}
inline void st_shared_b32(u32 to, int x) { write_shared(to, &x, 4); }
inline void ld_shared_b32(int& x, u32 from) { read_shared(from, &x, 4); }
inline void st_global_v4_b32(char* to, u32 a, u32 b, u32 c, u32 d) {
    const u32 all[4] = {a, b, c, d};
    check_aligned(to, 16);
    memcpy(to, all, 16);
}
inline void st_global_v2_f32(float* to, float x, float y) {
    check_aligned(to, 8);
    to[0] = x, to[1] = y;
}

// ---- products --------------------------------------------------------------------------------------------------------
inline void wgmma_fence_sync_aligned() { product_fence(); }
inline void wgmma_commit_group_sync_aligned() { product_commit(); }
inline void wgmma_wait_group_sync_aligned(u32 left) { product_wait(left); }
// With both operands in shared memory, and with A in registers. Factors of A and B (1 or -1) are 1.
inline void wgmma_shared(Shape shape, float* sums, u64 a, u64 b, bool add) { product_issue(shape, sums, nullptr, true, a, b, add); }
inline void wgmma_registers(Shape shape, float* sums, const u32* a, u64 b, bool add) { product_issue(shape, sums, a, true, 0, b, add); }

// ---- numbers ---------------------------------------------------------------------------------------------------------
inline void setp_ne_b32(bool& p, int a, int b) { p = a != b; }
inline void mov_u32(u32& to, u32 x) { to = x; }
inline void mov_b64(u64& to, u32 low, u32 high) { to = (u64)high << 32 | low; }
inline void ex2_approx_ftz_f32(float& y, float x) { y = exp2_approx(flushed(x)); }
inline void lg2_approx_ftz_f32(float& y, float x) { y = log2_approx(x); }
inline void tanh_approx_f32(float& y, float x) { y = tanhf(x); }
inline void cvt_rn_bf16x2_f32(u32& y, float high, float low) { y = (u32)to_bfloat16(high) << 16 | to_bfloat16(low); }
inline void cvt_rn_f16x2_f32(u32& y, float high, float low) { y = (u32)to_float16(high) << 16 | to_float16(low); }
inline void cvt_rn_bf16_f32(unsigned short& y, float x) { y = to_bfloat16(x); }
inline void cvt_rn_f16_f32(unsigned short& y, float x) { y = to_float16(x); }
inline void cvt_f32_f16(float& y, unsigned short x) { y = from_float16(x); }

}  // namespace ptx
