"""Attention backward for Hopper (sm_90) in Gluon, head dims 129 to 256; the formulas are in backward.py.

One program owns 64 keys of one key head: the accumulators dK and dV, [64, 256] each, fill half of the registers. Its roles:
  two consumer warpgroups   S = Q K^T and dP = dO V^T for 64 queries and 32 keys each; P and dS are joined in shared memory, from where the
                            first computes dV += P^T dO, the second dK += dS^T Q, and each of them half of the columns of dQ = dS K
  one store warp            adds dQ to global memory (TMA reduction) and releases the stage of Q and dO
  one load warp             that of backward.py
No shared memory is left to stage dQ in. It is staged in the step's own buffers of dO (read last by the first warpgroup, for dV) and Q (by the second, for dK).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilewise.engines.gluon import named_barriers
from tilewise.engines.gluon.kernels.backward import (
    KV_HEAD,
    KV_TILE,
    RING,
    STAGE_FREE,
    STEP_WORDS,
    STEPS,
    allocate_inputs,
    fragment_order,
    load_warp,
    opaque_zero,
    read_step,
    tma_reduce_add,
)
from tilewise.engines.gluon.kernels.primitives import (
    MASK_BITS,
    ONE_WARP,
    TWO_WARPGROUPS,
    WARP_THREADS,
    WARPGROUP_AND_WARP,
    WARPGROUP_THREADS,
    apply_mask_bits,
    apply_score,
    column_index,
    load_mask_bits,
    mailbox_read,
    named_barrier_arrive,
    named_barrier_sync,
    nonfinite_rows,
    phase,
    reinterpret,
    row_index,
    tma_store,
    wgmma_layout,
)
from tilewise.engines.gpu.kernels.primitives import dropout_keep

KEYS = gl.constexpr(32)  # keys of a warpgroup in S and dP
DQ_STAGED = gl.constexpr(named_barriers.WIDE_DQ_STAGED)
P_READY = gl.constexpr(named_barriers.WIDE_P_READY)
CONSUMERS = gl.constexpr(named_barriers.WIDE_CONSUMERS)
WARPGROUP_ONLY = gl.constexpr(named_barriers.WIDE_WARPGROUP)


@gluon.jit
def bwd(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dk_desc,
    dv_desc,
    dq_desc,
    lse_desc,
    delta_desc,
    p_nonfinite,
    p_seed,
    tiles,
    s_tiles,
    n_heads,
    ratio,
    n_q,
    n_kv,
    n_tiles,
    n_bh,
    n_group,
    n_padded,
    grid_width,
    scale,
    keep_scale,
    threshold,
    score,
    SCORE: gl.constexpr,
    DSCORE: gl.constexpr,
    MAPPED: gl.constexpr,
    PATCHED: gl.constexpr,
    DROPOUT: gl.constexpr,
    C: gl.constexpr,
):
    """Allocates shared memory and starts the four roles for one key tile, as backward.py does; parameters are those of its bwd.

    A warpgroup has dV or dK of all 64 keys, not both of half of them, because wgmma has 64 rows."""
    BM: gl.constexpr = C.value.block_m
    BN: gl.constexpr = C.value.block_n
    bufs, full, mailboxes = allocate_inputs(q_desc, k_desc, do_desc, lse_desc, delta_desc, C)
    dtype: gl.constexpr = q_desc.dtype
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], dtype)
    # P^T and dS^T, double-buffered: the second warpgroup may be a step ahead of the first one's dV and dQ, until they synchronize again.
    p_bufs = gl.allocate_shared_memory(dtype, [2, BN, BM], P_LAYOUT)
    ds_bufs = gl.allocate_shared_memory(dtype, [2, BN, BM], P_LAYOUT)
    # dQ is staged here: [64, 256] of dO, or of Q, in 16 bits is as large as [64, 128] of dQ in 32.
    dq_in_do = reinterpret(bufs[2], gl.float32, [C.value.stages, 256, 32], dq_desc.layout)
    dq_in_q = reinterpret(bufs[0], gl.float32, [C.value.stages, 256, 32], dq_desc.layout)
    dq_bufs = (dq_in_do, dq_in_q)
    descs = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc)
    load_shape = (n_heads, ratio, n_q, n_kv, n_tiles, n_bh, n_group, n_padded, grid_width)
    load = (descs, bufs, full, mailboxes, tiles, s_tiles, load_shape)
    work_bufs = (bufs, p_bufs, ds_bufs, dq_bufs)
    work_shape = (n_heads, ratio, n_q, n_kv, n_tiles)
    work = (p_nonfinite, p_seed, work_bufs, full, mailboxes, tiles[MASK_BITS], work_shape, scale, keep_scale, threshold, score)
    gl.warp_specialize(
        [
            (consumer, (dv_desc, work, SCORE, DSCORE, MAPPED, DROPOUT, 0, C)),
            (consumer, (dk_desc, work, SCORE, DSCORE, MAPPED, DROPOUT, 1, C)),
            (store_warp, (dq_desc, dq_bufs, full, mailboxes, n_heads, ratio, n_padded, C)),
            (load_warp, (load, MAPPED, PATCHED, C)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


@gluon.jit
def store_warp(dq_desc, dq_bufs, full, mailboxes, n_heads, ratio, n_padded, C: gl.constexpr):
    """The store warp adds what the consumers have staged of dQ to global memory. It, and not the consumers, releases the stage of Q and dO: dQ is staged there,
    and only it knows when TMA has read it.

    dQ's accumulator consists of parts of 64 x 64, each stored as [128, 32] floats (fragment_order), four for 64 rows: two of the first warpgroup,
    then two of the second."""
    tile_mailbox, step_mailbox = mailboxes
    kv_full, _, _ = full
    STAGES: gl.constexpr = C.value.stages
    mbarrier.wait(kv_full.index(0), 0)
    i_b = mailbox_read(tile_mailbox, KV_HEAD, ONE_WARP) // (n_heads // ratio)
    n_steps = mailbox_read(tile_mailbox, STEPS, ONE_WARP)
    for i in range(n_steps):
        stage = i % STAGES
        named_barrier_sync(DQ_STAGED + stage, WARPGROUP_AND_WARP)
        i_h = mailbox_read(step_mailbox, i % RING * STEP_WORDS, ONE_WARP)
        m0 = mailbox_read(step_mailbox, i % RING * STEP_WORDS + 1, ONE_WARP) // 2
        part = ((i_b * n_heads + i_h) * n_padded + m0) // 64 * 4
        tma_reduce_add(dq_desc, [part * 128, 0], dq_bufs[0].index(stage))
        named_barrier_sync(DQ_STAGED + 2 + stage, WARPGROUP_AND_WARP)
        tma_reduce_add(dq_desc, [(part + 2) * 128, 0], dq_bufs[1].index(stage))
        tma.store_wait(0)
        named_barrier_arrive(STAGE_FREE + stage, C.value.release_threads + WARP_THREADS)


@gluon.jit
def apply_mask(b_x, b_words, o_kv, n_kv, WG: gl.constexpr, other: gl.constexpr):
    """`other` where the mask forbids and past the last key. Words hold the bits of all 64 keys; those of our 32 begin at bit WG * KEYS / 4."""
    return gl.where(o_kv < n_kv, apply_mask_bits(b_x, b_words >> (WG * KEYS // 4), other), other)


@gluon.jit
def consumer(acc_desc, work, SCORE: gl.constexpr, DSCORE: gl.constexpr, MAPPED: gl.constexpr, DROPOUT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """Consumer warpgroup WG computes P and dS of keys [32 WG, 32 WG + 32) of the key tile, accumulates dV (WG = 0) or dK (WG = 1) of all 64 keys, and computes
    half of the columns of each query tile's dQ.

    Scores are not transposed here: wgmma has 64 rows, and a warpgroup only 32 keys. P and dS are transposed when they are stored to shared memory.
    Products overlap other work: dP the softmax, dV the computation of dS, and S of the next step the staging of dQ."""
    p_nonfinite, p_seed, work_bufs, full, mailboxes, p_bits, shape, scale, keep_scale, threshold, score = work
    bufs, p_bufs, ds_bufs, dq_bufs = work_bufs
    q_bufs, kv_bufs, do_bufs, lse_bufs, delta_bufs = bufs
    dq_buf = dq_bufs[WG]  # [STAGES, 256, 32]
    kv_full, q_full, do_full = full
    tile_mailbox, step_mailbox = mailboxes
    n_heads, ratio, n_q, n_kv, n_tiles = shape
    BM: gl.constexpr = C.value.block_m
    BN: gl.constexpr = C.value.block_n
    D: gl.constexpr = C.value.d
    STAGES: gl.constexpr = C.value.stages
    HALF: gl.constexpr = C.value.dq_columns
    dtype: gl.constexpr = q_bufs.dtype
    S_L: gl.constexpr = wgmma_layout(KEYS)  # of S and dP
    D_L: gl.constexpr = wgmma_layout(D)  # of dV or dK
    DQ_L: gl.constexpr = wgmma_layout(HALF)
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    all_k = kv_bufs.index(0).reshape([BN, D])
    k = all_k.slice(WG * KEYS, KEYS, dim=0).permute((1, 0))  # our keys, [D, 32]
    v = kv_bufs.index(1).reshape([BN, D]).slice(WG * KEYS, KEYS, dim=0).permute((1, 0))  # [D, 32]
    k_half = all_k.slice(WG * HALF, HALF, dim=1)  # all keys, our columns of dQ, [64, 128]
    zero_s = gl.zeros([BM, KEYS], gl.float32, S_L)
    zero_dq = gl.zeros([BM, HALF], gl.float32, DQ_L)
    b_acc = gl.zeros([BN, D], gl.float32, D_L)  # dV, or dK
    c = scale[1]

    mbarrier.wait(kv_full.index(0), 0)
    i_bh = mailbox_read(tile_mailbox, KV_HEAD)
    i_kv = mailbox_read(tile_mailbox, KV_TILE)
    n_steps = mailbox_read(tile_mailbox, STEPS)
    i_b = i_bh // (n_heads // ratio)
    n0 = i_kv * BN
    if n_steps > 0:
        mbarrier.wait(q_full.index(0), 0)
        s_token = warpgroup_mma(q_bufs.index(0).reshape([BM, D]), k, zero_s, use_acc=False, is_async=True)  # Q K^T  [64, 32]
        i_h, m0_masked, i_bits = read_step(step_mailbox, 0)
        b_words = load_mask_bits(p_bits, i_bits * BM, i_bits >= 0, BM, zero_s, MAPPED)
        mbarrier.wait(kv_full.index(1), 0)
        for i in range(n_steps):
            zero = opaque_zero(m0_masked)  # key indices that depend on it are computed where they are used
            stage = i % STAGES
            q = q_bufs.index(stage).reshape([BM, D])
            do = do_bufs.index(stage).reshape([BM, D])
            p_buf = p_bufs.index(i % 2)  # P^T  [64, 64]
            ds_buf = ds_bufs.index(i % 2)  # dS^T  [64, 64]

            # P = 2^(S c - lse), while dP is under way. S is awaited in full before dP is issued: see backward.py.
            b_qk = warpgroup_mma_wait(0, deps=[s_token])  # Q K^T  [64, 32]
            mbarrier.wait(do_full.index(stage), phase(i, STAGES))
            dp_token = warpgroup_mma(do, v, zero_s, use_acc=False, is_async=True)  # dP = dO V^T  [64, 32]
            m0 = m0_masked // 2
            o_q = gl.expand_dims(m0 + gl.arange(0, BM, ROW), 1)
            o_column = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(0, S_L)), 0)
            o_kv = n0 + zero + WG * KEYS + o_column
            q_index = row_index(o_q, m0 + BM <= n_q)
            kv_index = column_index(n0 + zero + WG * KEYS, o_column, n0 + BN <= n_kv)
            b_lse = lse_bufs.index(stage).load(ROW)
            b_s = apply_score(b_qk, scale, i_b, i_h, q_index, kv_index, score, SCORE)
            if m0_masked % 2 != 0:
                b_s = apply_mask(b_s, b_words, o_kv, n_kv, WG, float("-inf"))
            b_p = gl.exp2(b_s * c - gl.expand_dims(b_lse, 1))
            b_p_dropped = b_p
            if DROPOUT:
                keep = dropout_keep(p_seed, threshold, i_b, i_h, o_q, o_kv)
                b_p_dropped = gl.where(keep, b_p * keep_scale, 0.0)
            p_buf.slice(WG * KEYS, KEYS, dim=0).store(b_p_dropped.to(dtype).permute((1, 0)))
            fence_async_shared()
            if WG == 0:
                named_barrier_sync(P_READY, TWO_WARPGROUPS)
                acc_token = warpgroup_mma(p_buf, do, b_acc, is_async=True)  # dV += P^T dO  [64, D]
            else:
                named_barrier_arrive(P_READY, TWO_WARPGROUPS)
            b_p_dscore = b_p
            if DSCORE is not None:  # here, so that the registers of q.k are free before dP is awaited
                b_p_dscore = b_p * DSCORE(b_qk * scale[0], i_b, i_h, q_index, kv_index, score[0], score[1], score[2], score[3])
                if m0_masked % 2 != 0:  # P is 0 where the mask forbids, but the score's derivative may be NaN or Inf there
                    b_p_dscore = apply_mask(b_p_dscore, b_words, o_kv, n_kv, WG, 0.0)

            # dS = P (dP - delta) score', under dV
            b_dp = warpgroup_mma_wait(1 if WG == 0 else 0, deps=[dp_token])
            if DROPOUT:
                b_dp = gl.where(keep, b_dp * keep_scale, 0.0)
            b_delta = delta_bufs.index(stage).load(ROW)
            b_ds16 = (b_p_dscore * (b_dp - gl.expand_dims(b_delta, 1))).to(dtype)  # [64, 32]
            ds_buf.slice(WG * KEYS, KEYS, dim=0).store(b_ds16.permute((1, 0)))
            fence_async_shared()
            named_barrier_sync(CONSUMERS, TWO_WARPGROUPS)  # both halves of dS^T are stored, and both warpgroups are done with this step's S and dP
            if WG == 1:
                acc_token = warpgroup_mma(ds_buf, q, b_acc, is_async=True)  # dK += dS^T Q  [64, D]
            dq_token = warpgroup_mma(ds_buf.permute((1, 0)), k_half, zero_dq, use_acc=False, is_async=True)  # dQ = dS K  [64, 128]

            # S of the next step, under the staging of dQ. After the last step it is issued as well, on whatever the stage holds, and not used.
            next_stage = (i + 1) % STAGES
            mbarrier.wait(q_full.index(next_stage), phase(i + 1, STAGES), pred=i + 1 < n_steps)
            i_h, m0_masked, i_bits = read_step(step_mailbox, i + 1)
            m0_masked = gl.where(i + 1 < n_steps, m0_masked, 0)  # there is no message after the last step's
            k_next = kv_bufs.index(opaque_zero(m0_masked)).reshape([BN, D]).slice(WG * KEYS, KEYS, dim=0).permute((1, 0))
            s_token = warpgroup_mma(q_bufs.index(next_stage).reshape([BM, D]), k_next, zero_s, use_acc=False, is_async=True)  # Q K^T  [64, 32]
            b_words = load_mask_bits(p_bits, i_bits * BM, (i_bits >= 0) & (i + 1 < n_steps), BM, zero_s, MAPPED)
            b_acc, b_dq = warpgroup_mma_wait(1, deps=[acc_token, dq_token])
            named_barrier_sync(WARPGROUP_ONLY + WG, WARPGROUP_THREADS)  # all our warps have read dO, or Q: dQ may overwrite it
            dq_buf.index(stage).store(fragment_order(b_dq, HALF // 64))
            fence_async_shared()
            named_barrier_arrive(DQ_STAGED + 2 * WG + stage, WARPGROUP_AND_WARP)
        warpgroup_mma_wait(0, deps=[s_token])

    # Epilogue: dV leaves through V's buffer, dK through K's. What is not finite bwd_postprocess recomputes row by row (nonfinite_rows.py).
    named_barrier_sync(CONSUMERS, TWO_WARPGROUPS)  # the other warpgroup has read K and V for its last products
    if WG == 1:
        b_acc *= scale[2]
    has_nonfinite = gl.max(nonfinite_rows(b_acc), 0)
    gl.store(p_nonfinite + (i_bh * n_tiles + i_kv) * 2 + WG, has_nonfinite)
    acc_buf = kv_bufs.index(1 - WG)
    acc_buf.reshape([BN, D]).store(b_acc.to(dtype))
    fence_async_shared()
    tma_store(acc_desc, [i_b, i_bh % (n_heads // ratio), n0, 0], acc_buf)
    tma.store_wait(0)
