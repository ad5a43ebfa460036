"""Attention backward for Hopper (sm_90) in Gluon, head dims up to 128.

S = score(scale Q K^T), P = exp(S - lse), dP = dropout(dO V^T), delta = rowsum(dO * O) - dlse, dS = P (dP - delta) score'(scale Q K^T)
dV = dropout(P)^T dO, dK = scale dS^T Q, dQ = scale dS K

One program owns 128 keys of one key head and visits the query tiles of its row of the map, for all query heads that share the key head. Its roles:
  two consumer warpgroups   64 keys each: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, both accumulators in registers;
                            dS is exchanged through shared memory, and each of them computes half of dQ = dS K over all 128 keys
  one store warp            adds the staged fp32 parts of dQ to global memory by TMA reduction, so that no consumer waits for it
  one load warp             walks the tile schedule; loads K and V once, and Q, dO, lse and delta of each query tile, two stages deep
Two small kernels run before and after it (bwd_pre_post.py): the first computes delta and clears dQ's accumulator, the second converts dQ to 16 bits.
dQ is accumulated in the order in which programs finish, so repeated runs differ in the last bits.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilewise.engines.gluon import named_barriers
from tilewise.engines.gluon.kernels.primitives import (
    MASK_BITS,
    N_TILES,
    ONE_WARP,
    ORDER,
    START,
    STOP,
    TWO_WARPGROUPS,
    WARP_THREADS,
    WARPGROUP_AND_WARP,
    apply_mask_bits,
    apply_score,
    buffers_for,
    column_index,
    load_mask_bits,
    mailbox_read,
    mailbox_write,
    named_barrier_arrive,
    named_barrier_sync,
    new_mailbox,
    nonfinite_rows,
    phase,
    row_index,
    runs_of,
    tma_coords,
    tma_load,
    tma_store,
    uniform,
    wgmma_layout,
)
from tilewise.engines.gpu.kernels.primitives import dropout_keep

KEYS = gl.constexpr(64)  # keys of a warpgroup
STAGE_FREE = gl.constexpr(named_barriers.BWD_STAGE_FREE)
DQ_STAGED = gl.constexpr(named_barriers.BWD_DQ_STAGED)
DQ_SENT = gl.constexpr(named_barriers.BWD_DQ_SENT)
LOOP_DONE = gl.constexpr(named_barriers.BWD_LOOP_DONE)
DS_READY = gl.constexpr(named_barriers.BWD_DS_READY)

# Slots of the tile mailbox
KV_HEAD = gl.constexpr(0)  # i_b * key heads + i_hk
KV_TILE = gl.constexpr(1)  # which key tile
STEPS = gl.constexpr(2)  # query tiles to visit, of all query heads

# The step mailbox is a ring of the latest RING steps' messages, three words each: the query head; 2 * m0 + is_masked, where m0 is the first query; and the
# index of the tile's block of mask bits, or -1. The store warp reads them up to three steps late.
STEP_WORDS = gl.constexpr(3)
RING = gl.constexpr(8)


@builtin
def tma_reduce_add(desc, coord, src, _semantic=None):
    """desc[coord] += src, by TMA. Not exposed in Triton 3.6; tma.async_atomic_add in newer versions."""
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
    """Allocates shared memory and starts the four roles for one key tile; the grid has one program per key tile of each key head. The consumers need
    nearly all registers; the store and load warps get by with few.

    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc: TMA descriptors, as in forward.py. dq_desc: dQ's fp32 accumulator (see store_warp).
    lse_desc (in base 2), delta_desc: [batch * heads * n_padded]. p_nonfinite: [key tiles, 2], see the end of consumer. tiles, s_tiles: a
    HopperSchedule by key tiles. n_tiles: key tiles per head. n_bh: batch * key heads. n_group: key heads whose tiles are mixed because their tensors fit
    into the L2 cache together. n_padded: rows that a head has in lse, delta and dQ's accumulator. C: a BackwardConfig."""
    BM: gl.constexpr = C.value.block_m
    bufs, full, mailboxes = allocate_inputs(q_desc, k_desc, do_desc, lse_desc, delta_desc, C)
    dtype: gl.constexpr = q_desc.dtype
    # dS^T, double-buffered: a warpgroup may store a step's half while the other still reads the step before
    ds_bufs = gl.allocate_shared_memory(dtype, [2, 2 * KEYS, BM], gl.NVMMASharedLayout.get_default_for([2 * KEYS, BM], dtype))
    dq_bufs = gl.allocate_shared_memory(gl.float32, [2, 128, 32], dq_desc.layout)  # a part of dQ for each warpgroup
    descs = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc)
    load_shape = (n_heads, ratio, n_q, n_kv, n_tiles, n_bh, n_group, n_padded, grid_width)
    load = (descs, bufs, full, mailboxes, tiles, s_tiles, load_shape)
    work_bufs = (bufs, ds_bufs, dq_bufs)
    work_shape = (n_heads, ratio, n_q, n_kv, n_tiles, grid_width)
    work = (dk_desc, dv_desc, p_nonfinite, p_seed, work_bufs, full, mailboxes, tiles[MASK_BITS], work_shape, scale, keep_scale, threshold, score)
    gl.warp_specialize(
        [
            (consumer, (work, SCORE, DSCORE, MAPPED, PATCHED, DROPOUT, 0, C)),
            (consumer, (work, SCORE, DSCORE, MAPPED, PATCHED, DROPOUT, 1, C)),
            (store_warp, (dq_desc, dq_bufs, full, mailboxes, n_heads, ratio, n_padded, C)),
            (load_warp, (load, MAPPED, PATCHED, C)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


# -- load warp -------------------------------------------------------------------------------------------------------


@gluon.jit
def allocate_inputs(q_desc, k_desc, do_desc, lse_desc, delta_desc, C: gl.constexpr):
    """Shared memory for what the load warp loads, the mbarriers that complete when it has arrived, and the load warp's mailboxes."""
    BM: gl.constexpr = C.value.block_m
    STAGES: gl.constexpr = C.value.stages
    MBARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_bufs = buffers_for(q_desc, STAGES)  # [STAGES, BM, D]
    do_bufs = buffers_for(do_desc, STAGES)  # [STAGES, BM, D]
    kv_bufs = buffers_for(k_desc, 2)  # K and V, [2, BN, D]
    lse_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse_desc.layout)
    delta_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BM], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MBARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MBARRIER)
    for j in gl.static_range(2):
        mbarrier.init(kv_full.index(j), count=1)
    for j in gl.static_range(STAGES):
        mbarrier.init(q_full.index(j), count=1)
        mbarrier.init(do_full.index(j), count=1)
    tile_mailbox = new_mailbox(3)  # KV_HEAD, KV_TILE, STEPS
    step_mailbox = new_mailbox(STEP_WORDS * RING)
    return (q_bufs, kv_bufs, do_bufs, lse_bufs, delta_bufs), (kv_full, q_full, do_full), (tile_mailbox, step_mailbox)


@gluon.jit
def load_warp(load, MAPPED: gl.constexpr, PATCHED: gl.constexpr, C: gl.constexpr):
    """The load warp picks the program's key tile, loads its K and V, and then Q, dO, lse and delta of one query tile after the other, as soon as a stage is
    free. Everything is ordered by when the consumers need it: K, Q and lse, V, dO and delta."""
    descs, bufs, full, mailboxes, tiles, s_tiles, shape = load
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = descs
    n_heads, ratio, n_q, n_kv, n_tiles, n_bh, n_group, n_padded, grid_width = shape
    BM: gl.constexpr = C.value.block_m
    BN: gl.constexpr = C.value.block_n
    STAGES: gl.constexpr = C.value.stages
    tile_mailbox, _ = mailboxes
    kv_full, _, _ = full
    kv_bufs = bufs[1]
    # Programs are ordered by group of key heads, then by length of the row, longest first, then by key head.
    pid = gl.program_id(0)
    first_head = pid // (n_tiles * n_group) * n_group
    in_group = pid - first_head * n_tiles
    heads = gl.minimum(n_group, n_bh - first_head)  # the last group may be smaller
    i_bh = first_head + in_group % heads
    i_kv = in_group // heads
    n_kv_heads = n_heads // ratio
    i_b = i_bh // n_kv_heads
    i_hk = i_bh % n_kv_heads
    row = i_b * s_tiles[0] + i_hk * ratio * s_tiles[1]
    if MAPPED:
        i_kv = uniform(gl.load(tiles[ORDER] + row + i_kv))
        row += i_kv
    # K loads while the schedule is read. Its mbarrier does not complete before the `expect` below, which comes after the mailbox is written.
    tma_load(k_desc, tma_coords(i_b, i_hk, i_kv * BN, grid_width, PATCHED), kv_full.index(0), kv_bufs.index(0))  # [BN, D]
    q_tiles = gl.cdiv(n_q, BM)
    n_steps = q_tiles * ratio
    if MAPPED:
        n_steps = 0
        for g in range(ratio):
            n_steps += uniform(gl.load(tiles[N_TILES] + row + g * s_tiles[1]))
    mailbox_write(tile_mailbox, KV_HEAD, i_bh)
    mailbox_write(tile_mailbox, KV_TILE, i_kv)
    mailbox_write(tile_mailbox, STEPS, n_steps)
    mbarrier.expect(kv_full.index(0), k_desc.block_type.nbytes)
    q_pipe = (q_desc, v_desc, do_desc, lse_desc, delta_desc, bufs, full, mailboxes, i_b, i_hk, i_kv, n_heads, n_padded, grid_width)
    past_end = ((i_kv + 1) * BN > n_kv).to(gl.int32)  # 1 if the key tile reaches past the last key: then every step is masked
    i_step = 0
    for g in range(ratio):
        i_h = i_hk * ratio + g
        if MAPPED:
            # The runs are read here, not one iteration ahead: Triton 3.6 takes a loop-carried scalar for constant if it is used only to bound an inner loop.
            i_bits, full_run, masked_run, end = runs_of(tiles, row + g * s_tiles[1])
            for run in range(masked_run, end):
                start = uniform(gl.load(tiles[START] + run))
                for i_q in range(start, uniform(gl.load(tiles[STOP] + run))):
                    send_q(q_pipe, i_step, i_h, i_q, 1, i_bits, PATCHED, C)
                    i_step += 1
                    i_bits += 1
            for run in range(full_run, masked_run):
                start = uniform(gl.load(tiles[START] + run))
                for i_q in range(start, uniform(gl.load(tiles[STOP] + run))):
                    send_q(q_pipe, i_step, i_h, i_q, past_end, -1, PATCHED, C)
                    i_step += 1
        else:
            for i in range(q_tiles):  # programs start at different query tiles, so that they do not all add to the same rows of dQ
                i_q = i_kv * BN // BM + i
                i_q = i_q % q_tiles
                send_q(q_pipe, i_step, i_h, i_q, past_end, -1, PATCHED, C)
                i_step += 1
    for i in range(gl.maximum(i_step - STAGES, 0), i_step):
        named_barrier_sync(STAGE_FREE + i % STAGES, C.value.release_threads + WARP_THREADS)  # the last arrivals: no named barrier may be left half complete


@gluon.jit
def send_q(q_pipe, i_step, i_h, i_q, is_masked, i_bits, PATCHED: gl.constexpr, C: gl.constexpr):
    """Loads a tile of Q with its lse, then of dO with its delta, and writes the step's message; the first step loads V in between."""
    q_desc, v_desc, do_desc, lse_desc, delta_desc, bufs, full, mailboxes, i_b, i_hk, i_kv, n_heads, n_padded, grid_width = q_pipe
    q_bufs, kv_bufs, do_bufs, lse_bufs, delta_bufs = bufs
    kv_full, q_full, do_full = full
    BM: gl.constexpr = C.value.block_m
    BN: gl.constexpr = C.value.block_n
    STAGES: gl.constexpr = C.value.stages
    stage = i_step % STAGES
    m0 = i_q * BM
    row = (i_b * n_heads + i_h) * n_padded + m0
    if i_step >= STAGES:
        named_barrier_sync(STAGE_FREE + stage, C.value.release_threads + WARP_THREADS)
    mailbox_write(mailboxes[1], i_step % RING * STEP_WORDS, i_h)
    mailbox_write(mailboxes[1], i_step % RING * STEP_WORDS + 1, 2 * m0 + is_masked)
    mailbox_write(mailboxes[1], i_step % RING * STEP_WORDS + 2, i_bits)
    mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + BM * 4)
    tma_load(q_desc, tma_coords(i_b, i_h, m0, grid_width, PATCHED), q_full.index(stage), q_bufs.index(stage))  # [BM, D]
    tma_load(lse_desc, [row], q_full.index(stage), lse_bufs.index(stage))  # [BM]
    if i_step == 0:
        mbarrier.expect(kv_full.index(1), v_desc.block_type.nbytes)
        tma_load(v_desc, tma_coords(i_b, i_hk, i_kv * BN, grid_width, PATCHED), kv_full.index(1), kv_bufs.index(1))  # [BN, D]
    mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes + BM * 4)
    tma_load(do_desc, tma_coords(i_b, i_h, m0, grid_width, PATCHED), do_full.index(stage), do_bufs.index(stage))  # [BM, D]
    tma_load(delta_desc, [row], do_full.index(stage), delta_bufs.index(stage))  # [BM]


# -- store warp ------------------------------------------------------------------------------------------------------


@gluon.jit
def store_warp(dq_desc, dq_bufs, full, mailboxes, n_heads, ratio, n_padded, C: gl.constexpr):
    """The store warp adds what the consumers have staged of dQ to global memory. A consumer waits for it only a step later, when it wants to stage again.

    dQ's accumulator consists of parts of 64 x 64, each stored as [128, 32] floats (fragment_order), D / 64 of them for 64 rows. Warpgroup w has
    the w-th 64 rows of the query tile (D = 64) or the w-th 64 columns (D = 128): either way the parts of a step are neighbours."""
    tile_mailbox, step_mailbox = mailboxes
    kv_full, _, _ = full
    mbarrier.wait(kv_full.index(0), 0)
    i_b = mailbox_read(tile_mailbox, KV_HEAD, ONE_WARP) // (n_heads // ratio)
    n_steps = mailbox_read(tile_mailbox, STEPS, ONE_WARP)
    if n_steps > 0:
        for w in gl.static_range(2):
            named_barrier_arrive(DQ_SENT + w, WARPGROUP_AND_WARP)
    for i in range(n_steps):
        named_barrier_sync(DQ_STAGED, WARPGROUP_AND_WARP)
        i_h = mailbox_read(step_mailbox, i % RING * STEP_WORDS, ONE_WARP)
        m0 = mailbox_read(step_mailbox, i % RING * STEP_WORDS + 1, ONE_WARP) // 2
        row = (i_b * n_heads + i_h) * n_padded + m0
        part = row // 64 * (C.value.d // 64)
        tma_reduce_add(dq_desc, [part * 128, 0], dq_bufs.index(0))
        named_barrier_sync(DQ_STAGED + 1, WARPGROUP_AND_WARP)
        tma_reduce_add(dq_desc, [(part + 1) * 128, 0], dq_bufs.index(1))
        tma.store_wait(1)
        if i + 1 < n_steps:
            named_barrier_arrive(DQ_SENT, WARPGROUP_AND_WARP)
        tma.store_wait(0)
        if i + 1 < n_steps:
            named_barrier_arrive(DQ_SENT + 1, WARPGROUP_AND_WARP)


@gluon.jit
def fragment_order(b_x, PARTS: gl.constexpr):
    """A [64, PARTS * 64] accumulator as [PARTS * 128, 32] in the order (part, warp, 8-column group, lane, register): the four elements that a thread holds of
    a group lie side by side, so that it stages them by 16-byte stores without bank conflicts. bwd_postprocess (bwd_pre_post.py) undoes it."""
    b_x = b_x.reshape([4, 2, 8, PARTS, 8, 4, 2])  # row = (warp, half, lane / 4), column = (part, group, lane % 4, pair)
    return b_x.permute((3, 0, 4, 2, 5, 1, 6)).reshape([PARTS * 128, 32])


# -- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def read_step(step_mailbox, i):
    """Of step i: the query head; 2 * m0 + is_masked; the index of its block of mask bits, or -1."""
    slot = i % RING * STEP_WORDS
    return mailbox_read(step_mailbox, slot), mailbox_read(step_mailbox, slot + 1), mailbox_read(step_mailbox, slot + 2)


@gluon.jit
def opaque_zero(m0_masked):
    """0, because m0_masked is never negative; but no compiler knows that. Addresses that depend on it are computed in each step, where they are used,
    instead of once before the loop and then kept in registers, of which none are left."""
    return m0_masked >> 31


@gluon.jit
def own_keys(kv_bufs, WHICH: gl.constexpr, m0_masked, WG: gl.constexpr, C: gl.constexpr):
    """The warpgroup's rows of K (0) or V (1), [64, D]; see opaque_zero."""
    D: gl.constexpr = C.value.d
    return kv_bufs.index(WHICH + opaque_zero(m0_masked)).reshape([2 * KEYS, D]).slice(WG * KEYS, KEYS, dim=0)


@gluon.jit
def consumer(
    work, SCORE: gl.constexpr, DSCORE: gl.constexpr, MAPPED: gl.constexpr, PATCHED: gl.constexpr, DROPOUT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr
):
    """Consumer warpgroup WG accumulates dK and dV of keys [64 WG, 64 WG + 64) of the key tile, and computes half of each query tile's dQ.

    Scores are transposed, so that P^T and dS^T in registers are left operands of dV and dK as they are; only dQ needs dS from shared memory. Products
    overlap other work: dP^T the softmax, dV the computation of dS, dK its exchange, and S^T of the next step the staging of dQ."""
    dk_desc, dv_desc, p_nonfinite, p_seed, work_bufs, full, mailboxes, p_bits, shape, scale, keep_scale, threshold, score = work
    bufs, ds_bufs, dq_bufs = work_bufs
    q_bufs, kv_bufs, do_bufs, lse_bufs, delta_bufs = bufs
    kv_full, q_full, do_full = full
    tile_mailbox, step_mailbox = mailboxes
    n_heads, ratio, n_q, n_kv, n_tiles, grid_width = shape
    BM: gl.constexpr = C.value.block_m
    D: gl.constexpr = C.value.d
    STAGES: gl.constexpr = C.value.stages
    dtype: gl.constexpr = q_bufs.dtype
    S_L: gl.constexpr = wgmma_layout(BM)  # of S^T and dP^T
    D_L: gl.constexpr = wgmma_layout(D)  # of dK and dV
    DQ_L: gl.constexpr = wgmma_layout(64)
    A_L: gl.constexpr = gl.DotOperandLayout(0, D_L, 2)  # an S^T accumulator is already a left operand: no data moves
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_L)
    dq_buf = dq_bufs.index(WG)  # [128, 32]
    zero_s = gl.zeros([KEYS, BM], gl.float32, S_L)
    zero_dq = gl.zeros([64, 64], gl.float32, DQ_L)
    b_dk = gl.zeros([KEYS, D], gl.float32, D_L)
    b_dv = gl.zeros([KEYS, D], gl.float32, D_L)
    c = scale[1]

    mbarrier.wait(kv_full.index(0), 0)
    i_bh = mailbox_read(tile_mailbox, KV_HEAD)
    i_kv = mailbox_read(tile_mailbox, KV_TILE)
    n_steps = mailbox_read(tile_mailbox, STEPS)
    i_b = i_bh // (n_heads // ratio)
    n0 = (i_kv * 2 + WG) * KEYS
    o_kv = gl.expand_dims(n0 + gl.arange(0, KEYS, gl.SliceLayout(1, S_L)), 1)
    if n_steps > 0:
        mbarrier.wait(q_full.index(0), 0)
        k = own_keys(kv_bufs, 0, 0, WG, C)
        s_token = warpgroup_mma(k, q_bufs.index(0).reshape([BM, D]).permute((1, 0)), zero_s, use_acc=False, is_async=True)  # K Q^T  [64, BM]
        i_h, m0_masked, i_bits = read_step(step_mailbox, 0)
        b_words = load_mask_bits(p_bits, i_bits * 2 * KEYS + WG * KEYS, i_bits >= 0, n_kv - n0, zero_s, MAPPED)
        mbarrier.wait(kv_full.index(1), 0)
        for i in range(n_steps):
            stage = i % STAGES
            q = q_bufs.index(stage).reshape([BM, D])
            do = do_bufs.index(stage).reshape([BM, D])
            ds_buf = ds_bufs.index(i % 2)  # dS^T  [128, BM]

            # P^T = 2^(S^T c - lse), while dP^T is under way. S^T is awaited in full before dP^T is issued: ptxas cannot follow a partial wait across
            # the loop's back edge and would serialize all products.
            b_qk = warpgroup_mma_wait(0, deps=[s_token])  # K Q^T  [64, BM]
            mbarrier.wait(do_full.index(stage), phase(i, STAGES))
            v = own_keys(kv_bufs, 1, m0_masked, WG, C)
            dp_token = warpgroup_mma(v, do.permute((1, 0)), zero_s, use_acc=False, is_async=True)  # dP^T = V dO^T  [64, BM]
            o_column = gl.expand_dims(gl.arange(0, BM, COLUMN), 0)
            m0 = m0_masked // 2
            o_q = m0 + o_column
            q_index = column_index(m0, o_column, m0 + BM <= n_q)
            kv_index = row_index(o_kv, n0 + KEYS <= n_kv)
            b_lse = lse_bufs.index(stage).load(COLUMN)
            b_s = apply_score(b_qk, scale, i_b, i_h, q_index, kv_index, score, SCORE)
            if m0_masked % 2 != 0:
                b_s = apply_mask_bits(b_s, b_words)
            b_p = gl.exp2(b_s * c - gl.expand_dims(b_lse, 0))
            b_p_dropped = b_p
            if DROPOUT:
                keep = dropout_keep(p_seed, threshold, i_b, i_h, o_q, o_kv)
                b_p_dropped = gl.where(keep, b_p * keep_scale, 0.0)
            # dV is issued before the wait for dP^T: this keeps the wait below the exp2s, and dS is then computed under dV.
            dv_token = warpgroup_mma(gl.convert_layout(b_p_dropped.to(dtype), A_L, assert_trivial=True), do, b_dv, is_async=True)  # dV += P^T dO  [64, D]
            b_p_dscore = b_p
            if DSCORE is not None:  # here, so that the registers of q.k are free before dP^T is awaited
                b_p_dscore = b_p * DSCORE(b_qk * scale[0], i_b, i_h, q_index, kv_index, score[0], score[1], score[2], score[3])
                if m0_masked % 2 != 0:  # P is 0 where the mask forbids, but the score's derivative may be NaN or Inf there
                    b_p_dscore = apply_mask_bits(b_p_dscore, b_words, 0.0)

            # dS^T = P^T (dP^T - delta) score', from registers into dK and through shared memory into dQ
            b_dp = warpgroup_mma_wait(1, deps=[dp_token])
            if DROPOUT:
                b_dp = gl.where(keep, b_dp * keep_scale, 0.0)
            b_delta = delta_bufs.index(stage).load(COLUMN)
            b_ds16 = (b_p_dscore * (b_dp - gl.expand_dims(b_delta, 0))).to(dtype)  # [64, BM]
            ds_buf.slice(WG * KEYS, KEYS, dim=0).store(b_ds16)
            fence_async_shared()
            dk_token = warpgroup_mma(gl.convert_layout(b_ds16, A_L, assert_trivial=True), q, b_dk, is_async=True)  # dK += dS^T Q  [64, D]
            named_barrier_sync(DS_READY, TWO_WARPGROUPS)  # both warpgroups have stored their half of dS^T
            ds_half = ds_buf
            k_half = kv_bufs.index(opaque_zero(m0_masked)).reshape([2 * KEYS, D])
            if D == 64:  # half of dQ's 128 rows
                ds_half = ds_buf.slice(WG * 64, 64, dim=1)
            else:  # half of its 128 columns
                k_half = k_half.slice(WG * 64, 64, dim=1)
            dq_token = warpgroup_mma(ds_half.permute((1, 0)), k_half, zero_dq, use_acc=False, is_async=True)  # dQ = dS K  [64, 64]
            b_dv, b_dk = warpgroup_mma_wait(1, deps=[dv_token, dk_token])
            named_barrier_arrive(STAGE_FREE + stage, C.value.release_threads + WARP_THREADS)

            # S^T of the next step, under the staging of dQ. After the last step it is issued as well, on whatever the stage holds, and not used.
            next_stage = (i + 1) % STAGES
            mbarrier.wait(q_full.index(next_stage), phase(i + 1, STAGES), pred=i + 1 < n_steps)
            i_h, m0_masked, i_bits = read_step(step_mailbox, i + 1)
            m0_masked = gl.where(i + 1 < n_steps, m0_masked, 0)  # there is no message after the last step's
            q_next = q_bufs.index(next_stage).reshape([BM, D])
            k_next = own_keys(kv_bufs, 0, m0_masked, WG, C)
            s_token = warpgroup_mma(k_next, q_next.permute((1, 0)), zero_s, use_acc=False, is_async=True)  # K Q^T  [64, BM]
            wanted = (i_bits >= 0) & (i + 1 < n_steps)
            b_words = load_mask_bits(p_bits, i_bits * 2 * KEYS + WG * KEYS, wanted, n_kv - n0, zero_s, MAPPED)
            b_dq = warpgroup_mma_wait(1, deps=[dq_token])
            named_barrier_sync(DQ_SENT + WG, WARPGROUP_AND_WARP)
            dq_buf.store(fragment_order(b_dq, 1))
            fence_async_shared()
            named_barrier_arrive(DQ_STAGED + WG, WARPGROUP_AND_WARP)
        warpgroup_mma_wait(0, deps=[s_token])

    # Epilogue: dK and dV leave through the buffers of K and V. Where they are not finite, bwd_postprocess recomputes them row by row (nonfinite_rows.py).
    named_barrier_sync(LOOP_DONE, TWO_WARPGROUPS)  # the other warpgroup has read our keys for its last dQ
    b_dk *= scale[2]
    has_nonfinite = gl.max(nonfinite_rows(b_dk) | nonfinite_rows(b_dv), 0)
    gl.store(p_nonfinite + (i_bh * n_tiles + i_kv) * 2 + WG, has_nonfinite)
    own_keys(kv_bufs, 0, 0, WG, C).store(b_dk.to(dtype))
    own_keys(kv_bufs, 1, 0, WG, C).store(b_dv.to(dtype))
    fence_async_shared()
    i_hk = i_bh % (n_heads // ratio)
    BOX: gl.constexpr = dk_desc.block_type.shape[2]  # of the warpgroup's 64 keys: 64 tokens, or 8 columns of a grid
    tma_store(dk_desc, tma_coords(i_b, i_hk, n0, grid_width, PATCHED), kv_bufs.index(0).slice(WG * BOX, BOX, dim=2))
    tma_store(dv_desc, tma_coords(i_b, i_hk, n0, grid_width, PATCHED), kv_bufs.index(1).slice(WG * BOX, BOX, dim=2))
    tma.store_wait(0)
