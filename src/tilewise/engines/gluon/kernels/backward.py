"""Attention backward for Hopper (sm_90) in Gluon, head dims up to 128.

P = exp(s - lse), dP = dropout(dO V^T), delta = dO . O - dlse, dS = P (dP - delta) score'
dV = dropout(P)^T dO, dK = scale dS^T Q, dQ = scale dS K

One program owns 128 keys of one key head and walks over the query tiles of the map, of all heads that share the keys. Its roles:
  two consumer warpgroups   64 keys each: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, all sums in registers;
                            dS goes through shared memory, and each of them computes half of dQ = dS K over all 128 keys
  one store warp            adds the staged fp32 parts of dQ to memory (TMA reduction), so that no consumer waits for it
  one load warp             walks the map; TMA loads of K, V once, of Q, dO, lse, delta per query tile, two stages deep
Two small kernels stand around it (around.py): delta and a cleared sum for dQ before, dQ in 16 bits after.
dQ is summed in the order in which programs finish: repeated runs differ in the last bits.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilewise.engines.gluon import named_barriers
from tilewise.engines.gluon.kernels.primitives import (
    ONE_WARP,
    apply_mask_bits,
    buffers_for,
    column_index,
    load_mask_bits,
    mailbox_read,
    mailbox_write,
    named_barrier_arrive,
    named_barrier_sync,
    new_mailbox,
    nonfinite_rows,
    row_index,
    runs_of,
    scored,
    tma_coords,
    tma_load,
    tma_store,
    uniform,
)
from tilewise.engines.gpu.kernels.primitives import dropout_keep

KEYS = gl.constexpr(64)  # keys of a warpgroup
STAGE_FREE = gl.constexpr(named_barriers.BWD_STAGE_FREE)
DQ_STAGED = gl.constexpr(named_barriers.BWD_DQ_STAGED)
DQ_SENT = gl.constexpr(named_barriers.BWD_DQ_SENT)
LOOP_DONE = gl.constexpr(named_barriers.BWD_LOOP_DONE)
DS_READY = gl.constexpr(named_barriers.BWD_DS_READY)
STEP_WORDS = gl.constexpr(3)
RING = gl.constexpr(8)  # mailbox of the latest steps: the store warp reads them up to three steps late


@builtin
def tma_reduce_add(desc, coord, src, _semantic=None):
    """Not exposed in Triton 3.6; tma.async_atomic_add in newer versions."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


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
    bufs, bars, mailbox = received(q_desc, k_desc, do_desc, lse_desc, delta_desc, C)
    dtype: gl.constexpr = q_desc.dtype
    ds_bufs = gl.allocate_shared_memory(dtype, [2, 2 * KEYS, M], gl.NVMMASharedLayout.get_default_for([2 * KEYS, M], dtype))
    dq_bufs = gl.allocate_shared_memory(gl.float32, [2, 128, 32], dq_desc.layout)
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
        dk_desc,
        dv_desc,
        p_nonfinite,
        p_seed,
        bufs,
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
        grid_width,
        scale,
        keep_scale,
        threshold,
        score,
    )
    gl.warp_specialize(
        [
            (consumer, (work, SCORE, DSCORE, MAPPED, PATCHED, DROPOUT, 0, C)),
            (consumer, (work, SCORE, DSCORE, MAPPED, PATCHED, DROPOUT, 1, C)),
            (store_dq, (dq_desc, dq_bufs, bars, mailbox, n_heads, ratio, n_padded, C)),
            (loader, (load, MAPPED, PATCHED, C)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


# -- loading ---------------------------------------------------------------------------------------------------------


@gluon.jit
def received(q_desc, k_desc, do_desc, lse_desc, delta_desc, C: gl.constexpr):
    """Shared memory for what the load warp brings, the barriers that complete when it is there, and the load warp's mailbox."""
    M: gl.constexpr = C.value.block_m
    STAGES: gl.constexpr = C.value.stages
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_bufs = buffers_for(q_desc, STAGES)
    do_bufs = buffers_for(do_desc, STAGES)
    kv_bufs = buffers_for(k_desc, 2)
    lse_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, M], lse_desc.layout)
    delta_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, M], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for j in gl.static_range(2):
        mbarrier.init(kv_full.index(j), count=1)
    for j in gl.static_range(STAGES):
        mbarrier.init(q_full.index(j), count=1)
        mbarrier.init(do_full.index(j), count=1)
    tile_mailbox = new_mailbox(3)  # key head, key tile, steps
    step_mailbox = new_mailbox(STEP_WORDS * RING)  # head; first query, and whether the step is masked; its bits, or -1
    return (q_bufs, kv_bufs, do_bufs, lse_bufs, delta_bufs), (kv_full, q_full, do_full), (tile_mailbox, step_mailbox)


@gluon.jit
def loader(args, MAPPED: gl.constexpr, PATCHED: gl.constexpr, C: gl.constexpr):
    (
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
    ) = args
    M: gl.constexpr = C.value.block_m
    N: gl.constexpr = C.value.block_n
    STAGES: gl.constexpr = C.value.stages
    tile_mailbox, _ = mailbox
    kv_full, _, _ = bars
    kv_bufs = bufs[1]
    # Key heads that share the L2 cache at a time; within them the key tiles with most work first.
    pid = gl.program_id(0)
    first = pid // (n_tiles * n_group) * n_group
    rest = pid - first * n_tiles
    heads = gl.minimum(n_group, n_bh - first)
    i_bh = first + rest % heads
    i_kv = rest // heads
    n_kv_heads = n_heads // ratio
    i_b = i_bh // n_kv_heads
    i_hk = i_bh % n_kv_heads
    row = i_b * s_tiles[0] + i_hk * ratio * s_tiles[1]
    if MAPPED:
        i_kv = uniform(gl.load(tiles[0] + row + i_kv))
        row += i_kv
    # K is under way while memory answers what to do with it: its barrier awaits the arrival below too.
    tma_load(k_desc, tma_coords(i_b, i_hk, i_kv * N, grid_width, PATCHED), kv_full.index(0), kv_bufs.index(0))
    q_tiles = gl.cdiv(n_q, M)
    count = q_tiles * ratio
    if MAPPED:
        count = 0
        for g in range(ratio):
            count += uniform(gl.load(tiles[1] + row + g * s_tiles[1]))
    mailbox_write(tile_mailbox, 0, i_bh)
    mailbox_write(tile_mailbox, 1, i_kv)
    mailbox_write(tile_mailbox, 2, count)
    mbarrier.expect(kv_full.index(0), k_desc.block_type.nbytes)
    queries = (q_desc, v_desc, do_desc, lse_desc, delta_desc, bufs, bars, mailbox, i_b, i_hk, i_kv, n_heads, n_padded, grid_width)
    cut = ((i_kv + 1) * N > n_kv).to(gl.int32)
    it = 0
    for g in range(ratio):
        i_h = i_hk * ratio + g
        if MAPPED:
            # Read here, not a round ahead: Triton 3.6 takes a number for constant that a loop hands to its next round only for bounds of loops inside.
            bits, full_run, masked_run, end = runs_of(tiles, row + g * s_tiles[1])
            for run in range(masked_run, end):
                start = uniform(gl.load(tiles[4] + run))
                for i_q in range(start, start + uniform(gl.load(tiles[5] + run))):
                    send_queries(queries, it, i_h, i_q, 1, bits, PATCHED, C)
                    it += 1
                    bits += 1
            for run in range(full_run, masked_run):
                start = uniform(gl.load(tiles[4] + run))
                for i_q in range(start, start + uniform(gl.load(tiles[5] + run))):
                    send_queries(queries, it, i_h, i_q, cut, -1, PATCHED, C)
                    it += 1
        else:
            for i in range(q_tiles):  # programs start at different tiles, so that they do not all add to the same rows of dQ
                i_q = i_kv * N // M + i
                i_q = i_q % q_tiles
                send_queries(queries, it, i_h, i_q, cut, -1, PATCHED, C)
                it += 1
    for i in range(gl.maximum(it - STAGES, 0), it):
        named_barrier_sync(STAGE_FREE + i % STAGES, C.value.release_threads + 32)  # take the last arrivals: nothing may be left pending


@gluon.jit
def send_queries(queries, it, i_h, i_q, masked, bits, PATCHED: gl.constexpr, C: gl.constexpr):
    """A tile of Q with its lse, and of dO with its delta; the first one brings V along."""
    q_desc, v_desc, do_desc, lse_desc, delta_desc, bufs, bars, mailbox, i_b, i_hk, i_kv, n_heads, n_padded, grid_width = queries
    q_bufs, kv_bufs, do_bufs, lse_bufs, delta_bufs = bufs
    kv_full, q_full, do_full = bars
    M: gl.constexpr = C.value.block_m
    N: gl.constexpr = C.value.block_n
    STAGES: gl.constexpr = C.value.stages
    s = it % STAGES
    m0 = i_q * M
    row = (i_b * n_heads + i_h) * n_padded + m0
    if it >= STAGES:
        named_barrier_sync(STAGE_FREE + s, C.value.release_threads + 32)
    mailbox_write(mailbox[1], it % RING * STEP_WORDS, i_h)
    mailbox_write(mailbox[1], it % RING * STEP_WORDS + 1, 2 * m0 + masked)
    mailbox_write(mailbox[1], it % RING * STEP_WORDS + 2, bits)
    mbarrier.expect(q_full.index(s), q_desc.block_type.nbytes + M * 4)
    tma_load(q_desc, tma_coords(i_b, i_h, m0, grid_width, PATCHED), q_full.index(s), q_bufs.index(s))
    tma_load(lse_desc, [row], q_full.index(s), lse_bufs.index(s))
    if it == 0:
        mbarrier.expect(kv_full.index(1), v_desc.block_type.nbytes)
        tma_load(v_desc, tma_coords(i_b, i_hk, i_kv * N, grid_width, PATCHED), kv_full.index(1), kv_bufs.index(1))
    mbarrier.expect(do_full.index(s), do_desc.block_type.nbytes + M * 4)
    tma_load(do_desc, tma_coords(i_b, i_h, m0, grid_width, PATCHED), do_full.index(s), do_bufs.index(s))
    tma_load(delta_desc, [row], do_full.index(s), delta_bufs.index(s))


# -- dQ --------------------------------------------------------------------------------------------------------------


@gluon.jit
def store_dq(dq_desc, dq_bufs, bars, mailbox, n_heads, ratio, n_padded, C: gl.constexpr):
    """dQ's sums lie in memory as parts of 64 x 64, each 128 x 32 floats. Warpgroup w has the w-th 64 rows (D = 64) or columns (D = 128)."""
    tile_mailbox, step_mailbox = mailbox
    kv_full, _, _ = bars
    mbarrier.wait(kv_full.index(0), 0)
    i_b = mailbox_read(tile_mailbox, 0, ONE_WARP) // (n_heads // ratio)
    count = mailbox_read(tile_mailbox, 2, ONE_WARP)
    if count > 0:
        for w in gl.static_range(2):
            named_barrier_arrive(DQ_SENT + w, 160)
    for i in range(count):
        named_barrier_sync(DQ_STAGED, 160)
        i_h = mailbox_read(step_mailbox, i % RING * STEP_WORDS, ONE_WARP)
        m0 = mailbox_read(step_mailbox, i % RING * STEP_WORDS + 1, ONE_WARP) // 2
        row = (i_b * n_heads + i_h) * n_padded + m0
        part = row // 64 * (C.value.d // 64)
        tma_reduce_add(dq_desc, [part * 128, 0], dq_bufs.index(0))
        named_barrier_sync(DQ_STAGED + 1, 160)
        tma_reduce_add(dq_desc, [(part + 1) * 128, 0], dq_bufs.index(1))
        tma.store_wait(1)
        if i + 1 < count:
            named_barrier_arrive(DQ_SENT, 160)
        tma.store_wait(0)
        if i + 1 < count:
            named_barrier_arrive(DQ_SENT + 1, 160)


@gluon.jit
def fragment_order(b_x, PARTS: gl.constexpr):
    """A [64, PARTS * 64] accumulator as [PARTS * 128, 32] in the order (part, warp, 8-column group, lane, register): a thread's four
    neighbours side by side, so that it is staged by 16-byte stores without bank conflicts. around.finish undoes it."""
    b_x = b_x.reshape([4, 2, 8, PARTS, 8, 4, 2])  # row = (warp, half, lane / 4), column = (part, group, lane % 4, pair)
    return b_x.permute((3, 0, 4, 2, 5, 1, 6)).reshape([PARTS * 128, 32])


# -- computing -------------------------------------------------------------------------------------------------------


@gluon.jit
def read_step(step_mailbox, i):
    """The head of a step's queries; the first of them, twice, plus 1 if the step is masked; its bits, or -1."""
    at = i % RING * STEP_WORDS
    return mailbox_read(step_mailbox, at), mailbox_read(step_mailbox, at + 1), mailbox_read(step_mailbox, at + 2)


@gluon.jit
def own_keys(kv_bufs, WHICH: gl.constexpr, note, WG: gl.constexpr, C: gl.constexpr):
    """A warpgroup's rows of K (0) or V (1). A note is never negative, which compilers do not know: so they cannot compute the products'
    descriptors before the loop and keep them in registers, of which there are none left."""
    D: gl.constexpr = C.value.d
    return kv_bufs.index(WHICH + (note >> 31)).reshape([2 * KEYS, D]).slice(WG * KEYS, KEYS, dim=0)


@gluon.jit
def consumer(
    args, SCORE: gl.constexpr, DSCORE: gl.constexpr, MAPPED: gl.constexpr, PATCHED: gl.constexpr, DROPOUT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr
):
    (
        dk_desc,
        dv_desc,
        p_nonfinite,
        p_seed,
        bufs,
        ds_bufs,
        dq_bufs,
        bars,
        mailbox,
        p_bits,
        n_heads,
        ratio,
        n_q,
        n_kv,
        n_tiles,
        grid_width,
        scale,
        keep_scale,
        threshold,
        score,
    ) = args
    q_bufs, kv_bufs, do_bufs, lse_bufs, delta_bufs = bufs
    kv_full, q_full, do_full = bars
    tile_mailbox, step_mailbox = mailbox
    M: gl.constexpr = C.value.block_m
    D: gl.constexpr = C.value.d
    STAGES: gl.constexpr = C.value.stages
    dtype: gl.constexpr = q_bufs.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    D_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A_L: gl.constexpr = gl.DotOperandLayout(0, D_L, 2)  # an S^T accumulator is already a left operand: no data moves
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_L)
    dq_buf = dq_bufs.index(WG)
    no_s = gl.zeros([KEYS, M], gl.float32, S_L)
    no_dq = gl.zeros([64, 64], gl.float32, Q_L)
    b_dk = gl.zeros([KEYS, D], gl.float32, D_L)
    b_dv = gl.zeros([KEYS, D], gl.float32, D_L)
    c = scale[1]

    mbarrier.wait(kv_full.index(0), 0)
    i_bh = mailbox_read(tile_mailbox, 0)
    i_kv = mailbox_read(tile_mailbox, 1)
    count = mailbox_read(tile_mailbox, 2)
    i_b = i_bh // (n_heads // ratio)
    n0 = (i_kv * 2 + WG) * KEYS
    o_kv = gl.expand_dims(n0 + gl.arange(0, KEYS, gl.SliceLayout(1, S_L)), 1)
    if count > 0:
        mbarrier.wait(q_full.index(0), 0)
        s_token = warpgroup_mma(own_keys(kv_bufs, 0, 0, WG, C), q_bufs.index(0).reshape([M, D]).permute((1, 0)), no_s, use_acc=False, is_async=True)
        i_h, note, bits = read_step(step_mailbox, 0)
        b_words = load_mask_bits(p_bits, bits * 2 * KEYS + WG * KEYS, bits >= 0, n_kv - n0, no_s, MAPPED)
        mbarrier.wait(kv_full.index(1), 0)
        for i in range(count):
            stage = i % STAGES
            q = q_bufs.index(stage).reshape([M, D])
            do = do_bufs.index(stage).reshape([M, D])
            ds_buf = ds_bufs.index(i % 2)

            # S^T and P. dP is under way meanwhile. S^T is awaited in full before dP is issued: ptxas cannot follow a partial wait over the
            # loop's back edge (all products serialized).
            b_raw = warpgroup_mma_wait(0, deps=[s_token])
            mbarrier.wait(do_full.index(stage), (i // STAGES) & 1)
            dp_token = warpgroup_mma(own_keys(kv_bufs, 1, note, WG, C), do.permute((1, 0)), no_s, use_acc=False, is_async=True)
            o_column = gl.expand_dims(gl.arange(0, M, COLUMN), 0)
            o_q = note // 2 + o_column
            queries = column_index(note // 2, o_column, note // 2 + M <= n_q)
            keys = row_index(o_kv, n0 + KEYS <= n_kv)
            b_lse = lse_bufs.index(stage).load(COLUMN)
            b_s = scored(b_raw, scale, i_b, i_h, queries, keys, score, SCORE)
            if note % 2 != 0:
                b_s = apply_mask_bits(b_s, b_words)
            b_p = gl.exp2(b_s * c - gl.expand_dims(b_lse, 0))
            b_pd = b_p
            if DROPOUT:
                keep = dropout_keep(p_seed, threshold, i_b, i_h, o_q, o_kv)
                b_pd = gl.where(keep, b_p * keep_scale, 0.0)
            # Issued before the wait for dP: it is what keeps that wait below the exp2s, and dS then overlaps dV.
            dv_token = warpgroup_mma(gl.convert_layout(b_pd.to(dtype), A_L, assert_trivial=True), do, b_dv, is_async=True)
            b_slope = b_p
            if DSCORE is not None:  # early, so that the raw scores' registers are free again
                b_slope = b_p * DSCORE(b_raw * scale[0], i_b, i_h, queries, keys, score[0], score[1], score[2], score[3])
                if note % 2 != 0:  # where the mask forbids, a score may well have no derivative
                    b_slope = apply_mask_bits(b_slope, b_words, 0.0)

            # dS^T, to registers for dK and to shared memory for dQ
            b_dp = warpgroup_mma_wait(1, deps=[dp_token])
            if DROPOUT:
                b_dp = gl.where(keep, b_dp * keep_scale, 0.0)
            b_delta = delta_bufs.index(stage).load(COLUMN)
            b_ds16 = (b_slope * (b_dp - gl.expand_dims(b_delta, 0))).to(dtype)
            ds_buf.slice(WG * KEYS, KEYS, dim=0).store(b_ds16)
            fence_async_shared()
            dk_token = warpgroup_mma(gl.convert_layout(b_ds16, A_L, assert_trivial=True), q, b_dk, is_async=True)
            named_barrier_sync(DS_READY, 256)  # both halves are there
            ds_dq = ds_buf
            k_dq = kv_bufs.index(note >> 31).reshape([2 * KEYS, D])
            if D == 64:
                ds_dq = ds_buf.slice(WG * 64, 64, dim=1)
            else:
                k_dq = k_dq.slice(WG * 64, 64, dim=1)
            dq_token = warpgroup_mma(ds_dq.permute((1, 0)), k_dq, no_dq, use_acc=False, is_async=True)
            b_dv, b_dk = warpgroup_mma_wait(1, deps=[dv_token, dk_token])
            named_barrier_arrive(STAGE_FREE + stage, 288)

            # S^T of the next tile, under the staging of dQ
            after = (i + 1) % STAGES
            mbarrier.wait(q_full.index(after), ((i + 1) // STAGES) & 1, pred=i + 1 < count)
            i_h, note, bits = read_step(step_mailbox, i + 1)
            note = gl.where(i + 1 < count, note, 0)  # nobody wrote the one behind the last
            q_after = q_bufs.index(after).reshape([M, D])
            s_token = warpgroup_mma(own_keys(kv_bufs, 0, note, WG, C), q_after.permute((1, 0)), no_s, use_acc=False, is_async=True)
            wanted = (bits >= 0) & (i + 1 < count)
            b_words = load_mask_bits(p_bits, bits * 2 * KEYS + WG * KEYS, wanted, n_kv - n0, no_s, MAPPED)
            b_dq = warpgroup_mma_wait(1, deps=[dq_token])
            named_barrier_sync(DQ_SENT + WG, 160)
            dq_buf.store(fragment_order(b_dq, 1))
            fence_async_shared()
            named_barrier_arrive(DQ_STAGED + WG, 160)
        warpgroup_mma_wait(0, deps=[s_token])  # the product ahead of the last tile is not used
    named_barrier_sync(LOOP_DONE, 256)  # the other warpgroup may still read our keys for its last dQ
    has_nonfinite = gl.max(nonfinite_rows(b_dk) | nonfinite_rows(b_dv), 0)
    gl.store(p_nonfinite + (i_bh * n_tiles + i_kv) * 2 + WG, has_nonfinite)
    own_keys(kv_bufs, 0, 0, WG, C).store((b_dk * scale[2]).to(dtype))
    own_keys(kv_bufs, 1, 0, WG, C).store(b_dv.to(dtype))
    fence_async_shared()
    i_hk = i_bh % (n_heads // ratio)
    OWN: gl.constexpr = dk_desc.block_type.shape[2]
    tma_store(dk_desc, tma_coords(i_b, i_hk, n0, grid_width, PATCHED), kv_bufs.index(0).slice(WG * OWN, OWN, dim=2))
    tma_store(dv_desc, tma_coords(i_b, i_hk, n0, grid_width, PATCHED), kv_bufs.index(1).slice(WG * OWN, OWN, dim=2))
    tma.store_wait(0)
