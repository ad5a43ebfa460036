"""Attention backward for Hopper (sm_90) in Gluon, head dims 129 to 256; the formulas are in backward.py.

One program owns 64 keys of one key head: the sums dK and dV of 64 x 256 fill half of the registers. Its roles:
  two consumer warpgroups   S = Q K^T and dP = dO V^T for 64 queries and 32 keys each; P and dS meet in shared memory, and from there
                            the first computes dV += P^T dO, the second dK += dS^T Q, and each half of the columns of dQ = dS K
  one store warp            adds dQ to memory (TMA reduction), and hands the stage of queries back
  one load warp             that of backward.py
No shared memory is left to stage dQ in. It goes where the step's dO (read last by the first warpgroup's dV) and Q (by the second's dK) were.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilewise.engines.gluon import named_barriers
from tilewise.engines.gluon.kernels.backward import RING, STAGE_FREE, STEP_WORDS, fragment_order, loader, read_step, received, tma_reduce_add
from tilewise.engines.gluon.kernels.primitives import (
    ONE_WARP,
    apply_mask_bits,
    column_index,
    load_mask_bits,
    mailbox_read,
    named_barrier_arrive,
    named_barrier_sync,
    nonfinite_rows,
    reinterpret,
    row_index,
    scored,
    tma_store,
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
    s_tiles,  # the map by key tiles, as in the forward
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
    """n_bh: batches times key heads; n_padded: rows of lse, delta and dQ's sums that a head has."""
    M: gl.constexpr = C.value.block_m
    N: gl.constexpr = C.value.block_n
    bufs, bars, mailbox = received(q_desc, k_desc, do_desc, lse_desc, delta_desc, C)
    dtype: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, M], dtype)
    # Two each: the second warpgroup may be a step ahead of the first's dV and dQ, until both meet again.
    p_bufs = gl.allocate_shared_memory(dtype, [2, N, M], TILE)
    ds_bufs = gl.allocate_shared_memory(dtype, [2, N, M], TILE)
    # Where dQ is staged: 64 x 256 of dO, or of Q, in 16 bits are as large as 64 x 128 of dQ in 32.
    dq_in_do = reinterpret(bufs[2], gl.float32, [C.value.stages, 256, 32], dq_desc.layout)
    dq_in_q = reinterpret(bufs[0], gl.float32, [C.value.stages, 256, 32], dq_desc.layout)
    dq_bufs = (dq_in_do, dq_in_q)
    load = (
        q_desc,
        k_desc,
        v_desc,
        do_desc,
        lse_desc,
        delta_desc,
        bufs,
        bars,
        mailbox,
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
    )
    work = (
        p_nonfinite,
        p_seed,
        bufs,
        p_bufs,
        ds_bufs,
        dq_bufs,
        bars,
        mailbox,
        tiles[7],
        n_heads,
        ratio,
        n_q,
        n_kv,
        n_tiles,
        scale,
        keep_scale,
        threshold,
        score,
    )
    gl.warp_specialize(
        [
            (consumer, (dv_desc, work, SCORE, DSCORE, MAPPED, DROPOUT, 0, C)),
            (consumer, (dk_desc, work, SCORE, DSCORE, MAPPED, DROPOUT, 1, C)),
            (store_dq, (dq_desc, dq_bufs, bars, mailbox, n_heads, ratio, n_padded, C)),
            (loader, (load, MAPPED, PATCHED, C)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


@gluon.jit
def store_dq(dq_desc, dq_bufs, bars, mailbox, n_heads, ratio, n_padded, C: gl.constexpr):
    """dQ's sums lie in memory as parts of 64 x 64, each 128 x 32 floats, four for 64 rows: two of the first warpgroup, two of the second."""
    tile_mailbox, step_mailbox = mailbox
    kv_full, _, _ = bars
    STAGES: gl.constexpr = C.value.stages
    mbarrier.wait(kv_full.index(0), 0)
    i_b = mailbox_read(tile_mailbox, 0, ONE_WARP) // (n_heads // ratio)
    count = mailbox_read(tile_mailbox, 2, ONE_WARP)
    for i in range(count):
        s = i % STAGES
        named_barrier_sync(DQ_STAGED + s, 160)
        i_h = mailbox_read(step_mailbox, i % RING * STEP_WORDS, ONE_WARP)
        m0 = mailbox_read(step_mailbox, i % RING * STEP_WORDS + 1, ONE_WARP) // 2
        part = ((i_b * n_heads + i_h) * n_padded + m0) // 64 * 4
        tma_reduce_add(dq_desc, [part * 128, 0], dq_bufs[0].index(s))
        named_barrier_sync(DQ_STAGED + 2 + s, 160)
        tma_reduce_add(dq_desc, [(part + 2) * 128, 0], dq_bufs[1].index(s))
        tma.store_wait(0)
        named_barrier_arrive(STAGE_FREE + s, C.value.release_threads + 32)


@gluon.jit
def allowed(b_x, b_words, o_kv, n_kv, WG: gl.constexpr, other: gl.constexpr):
    """`other` where the mask or the end forbids. A word's bits are those of all keys."""
    return gl.where(o_kv < n_kv, apply_mask_bits(b_x, b_words >> (WG * KEYS // 4), other), other)


@gluon.jit
def consumer(sum_desc, args, SCORE: gl.constexpr, DSCORE: gl.constexpr, MAPPED: gl.constexpr, DROPOUT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    (p_nonfinite, p_seed, bufs, p_bufs, ds_bufs, dq_bufs, bars, mailbox, p_bits, n_heads, ratio, n_q, n_kv, n_tiles, scale, keep_scale, threshold, score) = args
    q_bufs, kv_bufs, do_bufs, lse_bufs, delta_bufs = bufs
    dq_buf = dq_bufs[WG]
    kv_full, q_full, do_full = bars
    tile_mailbox, step_mailbox = mailbox
    M: gl.constexpr = C.value.block_m
    N: gl.constexpr = C.value.block_n
    D: gl.constexpr = C.value.d
    STAGES: gl.constexpr = C.value.stages
    HALF: gl.constexpr = C.value.dq_columns
    dtype: gl.constexpr = q_bufs.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    D_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    all_k = kv_bufs.index(0).reshape([N, D])
    k = all_k.slice(WG * KEYS, KEYS, dim=0).permute((1, 0))
    v = kv_bufs.index(1).reshape([N, D]).slice(WG * KEYS, KEYS, dim=0).permute((1, 0))
    k_half = all_k.slice(WG * HALF, HALF, dim=1)
    no_s = gl.zeros([M, KEYS], gl.float32, S_L)
    no_dq = gl.zeros([M, HALF], gl.float32, Q_L)
    b_sum = gl.zeros([N, D], gl.float32, D_L)  # dV, or dK
    c = scale[1]

    mbarrier.wait(kv_full.index(0), 0)
    i_bh = mailbox_read(tile_mailbox, 0)
    i_kv = mailbox_read(tile_mailbox, 1)
    count = mailbox_read(tile_mailbox, 2)
    i_b = i_bh // (n_heads // ratio)
    n0 = i_kv * N
    if count > 0:
        mbarrier.wait(q_full.index(0), 0)
        s_token = warpgroup_mma(q_bufs.index(0).reshape([M, D]), k, no_s, use_acc=False, is_async=True)
        i_h, note, bits = read_step(step_mailbox, 0)
        b_words = load_mask_bits(p_bits, bits * M, bits >= 0, M, no_s, MAPPED)
        mbarrier.wait(kv_full.index(1), 0)
        for i in range(count):
            zero = note >> 31  # but no compiler knows: places of keys are made where they are used, and not dropout_keep in registers
            stage = i % STAGES
            q = q_bufs.index(stage).reshape([M, D])
            do = do_bufs.index(stage).reshape([M, D])
            p_buf = p_bufs.index(i % 2)
            ds_buf = ds_bufs.index(i % 2)

            # S and P. dP is under way meanwhile. S is waited for in full, before dP: see backward.py.
            b_raw = warpgroup_mma_wait(0, deps=[s_token])
            mbarrier.wait(do_full.index(stage), (i // STAGES) & 1)
            dp_token = warpgroup_mma(do, v, no_s, use_acc=False, is_async=True)
            o_q = gl.expand_dims(note // 2 + gl.arange(0, M, ROW), 1)
            o_column = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(0, S_L)), 0)
            o_kv = n0 + zero + WG * KEYS + o_column
            queries = row_index(o_q, note // 2 + M <= n_q)
            keys = column_index(n0 + zero + WG * KEYS, o_column, n0 + N <= n_kv)
            b_lse = lse_bufs.index(stage).load(ROW)
            b_s = scored(b_raw, scale, i_b, i_h, queries, keys, score, SCORE)
            if note % 2 != 0:
                b_s = allowed(b_s, b_words, o_kv, n_kv, WG, float("-inf"))
            b_p = gl.exp2(b_s * c - gl.expand_dims(b_lse, 1))
            b_pd = b_p
            if DROPOUT:
                keep = dropout_keep(p_seed, threshold, i_b, i_h, o_q, o_kv)
                b_pd = gl.where(keep, b_p * keep_scale, 0.0)
            p_buf.slice(WG * KEYS, KEYS, dim=0).store(b_pd.to(dtype).permute((1, 0)))
            fence_async_shared()
            if WG == 0:
                named_barrier_sync(P_READY, 256)
                sum_token = warpgroup_mma(p_buf, do, b_sum, is_async=True)
            else:
                named_barrier_arrive(P_READY, 256)
            b_slope = b_p
            if DSCORE is not None:  # early, so that the raw scores' registers are free again
                b_slope = b_p * DSCORE(b_raw * scale[0], i_b, i_h, queries, keys, score[0], score[1], score[2], score[3])
                if note % 2 != 0:  # where the mask forbids, a score may well have no derivative
                    b_slope = allowed(b_slope, b_words, o_kv, n_kv, WG, 0.0)

            # dS, under dV
            b_dp = warpgroup_mma_wait(1 if WG == 0 else 0, deps=[dp_token])
            if DROPOUT:
                b_dp = gl.where(keep, b_dp * keep_scale, 0.0)
            b_delta = delta_bufs.index(stage).load(ROW)
            b_ds16 = (b_slope * (b_dp - gl.expand_dims(b_delta, 1))).to(dtype)
            ds_buf.slice(WG * KEYS, KEYS, dim=0).store(b_ds16.permute((1, 0)))
            fence_async_shared()
            named_barrier_sync(CONSUMERS, 256)  # both halves of dS are there, and nobody computes S or dP of this step any more
            if WG == 1:
                sum_token = warpgroup_mma(ds_buf, q, b_sum, is_async=True)
            dq_token = warpgroup_mma(ds_buf.permute((1, 0)), k_half, no_dq, use_acc=False, is_async=True)

            # S of the next tile, under the staging of dQ
            after = (i + 1) % STAGES
            mbarrier.wait(q_full.index(after), ((i + 1) // STAGES) & 1, pred=i + 1 < count)
            i_h, note, bits = read_step(step_mailbox, i + 1)
            note = gl.where(i + 1 < count, note, 0)  # nobody wrote the one behind the last
            k_again = kv_bufs.index(note >> 31).reshape([N, D]).slice(WG * KEYS, KEYS, dim=0).permute((1, 0))
            s_token = warpgroup_mma(q_bufs.index(after).reshape([M, D]), k_again, no_s, use_acc=False, is_async=True)
            b_words = load_mask_bits(p_bits, bits * M, (bits >= 0) & (i + 1 < count), M, no_s, MAPPED)
            b_sum, b_dq = warpgroup_mma_wait(1, deps=[sum_token, dq_token])
            named_barrier_sync(WARPGROUP_ONLY + WG, 128)  # our other warps have read dO, or Q, too
            dq_buf.index(stage).store(fragment_order(b_dq, HALF // 64))
            fence_async_shared()
            named_barrier_arrive(DQ_STAGED + 2 * WG + stage, 160)
        warpgroup_mma_wait(0, deps=[s_token])  # the product ahead of the last tile is not used
    named_barrier_sync(CONSUMERS, 256)  # the other warpgroup may still read our K or V for its last products
    has_nonfinite = gl.max(nonfinite_rows(b_sum), 0)
    gl.store(p_nonfinite + (i_bh * n_tiles + i_kv) * 2 + WG, has_nonfinite)
    if WG == 1:
        b_sum *= scale[2]
    out = kv_bufs.index(1 - WG)
    out.reshape([N, D]).store(b_sum.to(dtype))
    fence_async_shared()
    tma_store(sum_desc, [i_b, i_bh % (n_heads // ratio), n0, 0], out)
    tma.store_wait(0)
