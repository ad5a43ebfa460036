"""Attention forward for Hopper (sm_90) in Gluon: one TMA producer warp and two or three consumer warpgroups.

Programs stay and take one query tile after the other from a common counter, longest rows of the tile map first. The producer walks
the map: empty tiles are never loaded. A warpgroup owns 64 query rows. Step i of a consumer, with P dropout_keep in registers:

    issue S(i) = Q K(i)^T, then O += P(i-1) V(i-1); softmax(i) runs while the second product is under way.

Why the schedule is as it is (docs/kernels/hopper.md has the measurements):
 - P is packed to 16 bits after the wait for P V. Packed before it, the new P needs registers of its own beside the old P and
   beside the scores.
 - Maxima and sums first fold over the registers of a thread, even and odd columns apart: four independent chains instead of one,
   and the sums cross lanes only once, at the end of a tile.
 - O is rescaled after Q K^T was issued, not in front of it.
 - A wait for an mbarrier ends a basic block. One stands between softmax and the wait for P V, or ptxas hoists that wait over the exp2s.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilewise.engines.gluon import named_barriers
from tilewise.engines.gluon.kernels.primitives import (
    LN2,
    LOG2E,
    apply_mask_bits,
    buffers_for,
    by_thread,
    column_index,
    load_mask_bits,
    mailbox_read,
    mailbox_write,
    named_barrier_arrive,
    named_barrier_sync,
    new_mailbox,
    next_item,
    nonfinite_rows,
    overflowed,
    row_index,
    runs_of,
    scored,
    tma_coords,
    tma_load,
    tma_store,
    uniform,
    unpermuted_row,
)
from tilewise.engines.gpu.kernels.primitives import dropout_keep

ROWS = gl.constexpr(64)  # query rows of a warpgroup
TURN = gl.constexpr(named_barriers.FWD_TURN)
K_FREE = gl.constexpr(named_barriers.FWD_K_FREE)
V_FREE = gl.constexpr(named_barriers.FWD_V_FREE)


@gluon.jit
def fwd(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    p_lse,
    p_max,
    p_counter,
    p_sinks,
    p_seed,
    tiles,
    s_tiles,  # a Walk's tensors (maps.py), (batch, head) strides in rows
    n_heads,
    ratio,
    n_q,
    n_kv,
    n_tiles,
    n_bh,
    n_group,
    grid_width,
    scale,
    keep_scale,
    threshold,
    score,
    SCORE: gl.constexpr,
    MAPPED: gl.constexpr,
    PATCHED: gl.constexpr,
    SINKS: gl.constexpr,
    DROPOUT: gl.constexpr,
    C: gl.constexpr,
):
    """n_group heads at a time share the L2 cache."""
    NWG: gl.constexpr = C.value.warpgroups
    KS: gl.constexpr = C.value.k_stages
    VS: gl.constexpr = C.value.v_stages
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_bufs = buffers_for(q_desc, NWG)
    k_bufs = buffers_for(k_desc, KS)
    v_bufs = buffers_for(v_desc, VS)
    o_bufs = q_bufs
    if C.value.own_o_buffer:
        o_bufs = buffers_for(o_desc, NWG)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [KS, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [VS, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    for s in gl.static_range(KS):
        mbarrier.init(k_full.index(s), count=1)
    for s in gl.static_range(VS):
        mbarrier.init(v_full.index(s), count=1)
    tile_mailbox = new_mailbox(5)  # head, query tile, steps, masked steps, the first one's bits
    step_mailbox = new_mailbox(KS)
    bars = (q_full, k_full, v_full)
    load = (
        q_desc,
        k_desc,
        v_desc,
        q_bufs,
        k_bufs,
        v_bufs,
        bars,
        tile_mailbox,
        step_mailbox,
        p_counter,
        tiles,
        s_tiles,
        n_heads,
        ratio,
        n_kv,
        n_tiles,
        n_bh,
        n_group,
        grid_width,
    )
    work = (
        o_desc,
        p_lse,
        p_max,
        p_sinks,
        p_seed,
        q_bufs,
        k_bufs,
        v_bufs,
        o_bufs,
        bars,
        tile_mailbox,
        step_mailbox,
        tiles[7],
        n_heads,
        n_q,
        n_kv,
        grid_width,
        scale,
        keep_scale,
        threshold,
        score,
    )
    MANY: gl.constexpr = C.value.registers[0]
    FEW: gl.constexpr = C.value.registers[1]
    if NWG == 2:
        gl.warp_specialize(
            [
                (consumer, (work, SCORE, MAPPED, PATCHED, SINKS, DROPOUT, 0, C)),
                (consumer, (work, SCORE, MAPPED, PATCHED, SINKS, DROPOUT, 1, C)),
                (producer, (load, MAPPED, PATCHED, C)),
            ],
            [4, 1],
            [MANY, FEW],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (work, SCORE, MAPPED, PATCHED, SINKS, DROPOUT, 0, C)),
                (consumer, (work, SCORE, MAPPED, PATCHED, SINKS, DROPOUT, 1, C)),
                (consumer, (work, SCORE, MAPPED, PATCHED, SINKS, DROPOUT, 2, C)),
                (producer, (load, MAPPED, PATCHED, C)),
            ],
            [4, 4, 1],
            [MANY, MANY, FEW],
        )


# -- producer --------------------------------------------------------------------------------------------------------


@gluon.jit
def producer(args, MAPPED: gl.constexpr, PATCHED: gl.constexpr, C: gl.constexpr):
    (
        q_desc,
        k_desc,
        v_desc,
        q_bufs,
        k_bufs,
        v_bufs,
        bars,
        tile_mailbox,
        step_mailbox,
        p_counter,
        tiles,
        s_tiles,
        n_heads,
        ratio,
        n_kv,
        n_tiles,
        n_bh,
        n_group,
        grid_width,
    ) = args
    NWG: gl.constexpr = C.value.warpgroups
    BN: gl.constexpr = C.value.block_n
    KS: gl.constexpr = C.value.k_stages
    VS: gl.constexpr = C.value.v_stages
    ALL: gl.constexpr = 32 + 128 * NWG
    q_full, k_full, v_full = bars
    queries = (q_desc, q_bufs, q_full, tile_mailbox, grid_width)
    keys = (k_desc, v_desc, k_bufs, v_bufs, k_full, v_full, step_mailbox, grid_width)
    n_items = n_tiles * n_bh
    turn = 0  # query tiles sent
    it = 0  # key tiles sent
    item = next_item(p_counter, n_items)
    while item < n_items:
        # Longest first inside a group of heads that fits the L2 cache.
        first = item // (n_tiles * n_group) * n_group
        rest = item - first * n_tiles
        heads = gl.minimum(n_group, n_bh - first)
        i_bh = first + rest % heads
        i_tile = rest // heads
        i_b = i_bh // n_heads
        i_h = i_bh % n_heads
        i_hk = i_h // ratio
        if MAPPED:
            row = i_b * s_tiles[0] + i_h * s_tiles[1]
            i_tile = uniform(gl.load(tiles[0] + row + i_tile))
            row += i_tile
            steps = uniform(gl.load(tiles[1] + row))
            masked = uniform(gl.load(tiles[2] + row))
            bits, full_run, masked_run, end = runs_of(tiles, row)
            if steps == 0:
                send_queries(queries, turn, i_b, i_h, (i_bh, i_tile, 0, 0, 0), PATCHED, C)
            tile = (i_bh, i_tile, steps, masked, bits)
            started = it
            for run in range(masked_run, end):
                start = uniform(gl.load(tiles[4] + run))
                for i_kv in range(start, start + uniform(gl.load(tiles[5] + run))):
                    send_keys(keys, queries, it, i_kv, i_hk, it == started, turn, i_b, i_h, tile, PATCHED, C)
                    it += 1
            for run in range(full_run, masked_run):
                start = uniform(gl.load(tiles[4] + run))
                for i_kv in range(start, start + uniform(gl.load(tiles[5] + run))):
                    send_keys(keys, queries, it, i_kv, i_hk, it == started, turn, i_b, i_h, tile, PATCHED, C)
                    it += 1
        else:
            steps = gl.cdiv(n_kv, BN)
            tile = (i_bh, i_tile, steps, (n_kv % BN != 0).to(gl.int32), 0)
            for i in range(steps):
                send_keys(keys, queries, it, steps - 1 - i, i_hk, i == 0, turn, i_b, i_h, tile, PATCHED, C)
                it += 1
        turn += 1
        item = next_item(p_counter, n_items)
    send_queries(queries, turn, 0, 0, (0, 0, -1, 0, 0), PATCHED, C)
    for j in range(gl.maximum(it - KS, 0), it):  # meet the last arrivals: no barrier stays half full
        named_barrier_sync(K_FREE + j % KS, ALL)
    for j in range(gl.maximum(it - VS, 0), it):
        named_barrier_sync(V_FREE + j % VS, ALL)


@gluon.jit
def send_queries(queries, turn, i_b, i_h, tile, PATCHED: gl.constexpr, C: gl.constexpr):
    """A query tile for the consumers, with its mailbox: head, which tile, its number of steps (0 if its rows attend nothing, -1 when all is done),
    how many of them, the first ones, are masked, and the bits of the first."""
    q_desc, q_bufs, q_full, tile_mailbox, grid_width = queries
    NWG: gl.constexpr = C.value.warpgroups
    if turn > 0:
        named_barrier_sync(C.value.q_free, 32 + 128 * NWG)
    for n in gl.static_range(5):
        mailbox_write(tile_mailbox, n, tile[n])
    if tile[2] > 0:
        mbarrier.expect(q_full, NWG * q_desc.block_type.nbytes)
        for w in gl.static_range(NWG):
            tma_load(q_desc, tma_coords(i_b, i_h, (tile[1] * NWG + w) * ROWS, grid_width, PATCHED), q_full, q_bufs.index(w))
    else:
        mbarrier.arrive(q_full, count=1)


@gluon.jit
def send_keys(keys, queries, it, i_kv, i_hk, first, turn, i_b, i_h, tile, PATCHED: gl.constexpr, C: gl.constexpr):
    """A tile of K, with a note of where it lies, and of V; the first one brings the queries along."""
    k_desc, v_desc, k_bufs, v_bufs, k_full, v_full, step_mailbox, grid_width = keys
    KS: gl.constexpr = C.value.k_stages
    VS: gl.constexpr = C.value.v_stages
    ALL: gl.constexpr = 32 + 128 * C.value.warpgroups
    n0 = i_kv * C.value.block_n
    if it >= KS:
        named_barrier_sync(K_FREE + it % KS, ALL)
    mailbox_write(step_mailbox, it % KS, n0)
    mbarrier.expect(k_full.index(it % KS), k_desc.block_type.nbytes)
    tma_load(k_desc, tma_coords(i_b, i_hk, n0, grid_width, PATCHED), k_full.index(it % KS), k_bufs.index(it % KS))
    if first:
        send_queries(queries, turn, i_b, i_h, tile, PATCHED, C)
    if it >= VS:
        named_barrier_sync(V_FREE + it % VS, ALL)
    mbarrier.expect(v_full.index(it % VS), v_desc.block_type.nbytes)
    tma_load(v_desc, tma_coords(i_b, i_hk, n0, grid_width, PATCHED), v_full.index(it % VS), v_bufs.index(it % VS))


# -- consumer --------------------------------------------------------------------------------------------------------


@gluon.jit
def consumer(
    args, SCORE: gl.constexpr, MAPPED: gl.constexpr, PATCHED: gl.constexpr, SINKS: gl.constexpr, DROPOUT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr
):
    (
        o_desc,
        p_lse,
        p_max,
        p_sinks,
        p_seed,
        q_bufs,
        k_bufs,
        v_bufs,
        o_bufs,
        bars,
        tile_mailbox,
        step_mailbox,
        p_bits,
        n_heads,
        n_q,
        n_kv,
        grid_width,
        scale,
        keep_scale,
        threshold,
        score,
    ) = args
    q_full, k_full, v_full = bars
    NWG: gl.constexpr = C.value.warpgroups
    BN: gl.constexpr = C.value.block_n
    D: gl.constexpr = C.value.d
    DV: gl.constexpr = C.value.dv
    VS: gl.constexpr = C.value.v_stages
    ALL: gl.constexpr = 32 + 128 * NWG
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    buffers = (k_bufs, v_bufs, k_full, v_full, step_mailbox)
    q = q_bufs.index(WG).reshape([ROWS, D])
    out = o_bufs.index(WG)

    if C.value.ping_pong and WG == NWG - 1:
        named_barrier_arrive(TURN, 256)  # warpgroup 0 begins
    it = 0  # key tiles seen, over all query tiles
    turn = 0
    mbarrier.wait(q_full, 0)
    steps = mailbox_read(tile_mailbox, 2)
    while steps >= 0:
        i_bh = mailbox_read(tile_mailbox, 0)
        i_tile = mailbox_read(tile_mailbox, 1)
        masked = mailbox_read(tile_mailbox, 3)
        bits_row = (mailbox_read(tile_mailbox, 4) * NWG + WG) * ROWS
        m0 = (i_tile * NWG + WG) * ROWS
        where = (i_bh // n_heads, i_bh % n_heads, m0, n_q, n_kv, scale, threshold, p_seed, score)
        b_m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        b_l = gl.sum(gl.sum(gl.zeros([ROWS, BN], gl.float32, S_L).reshape([ROWS, BN // 8, 4, 2]), 1), 2)
        b_o = gl.zeros([ROWS, DV], gl.float32, O_L)
        if steps > 0:
            # A step's bits is loaded a step ahead: memory may take longer to answer than Q K^T takes.
            b_words = mask_bits_of(p_bits, bits_row, masked > 0, MAPPED, C)
            b_p, b_m, b_l, b_decay, b_words = first_step(
                q, b_m, b_l, b_words, buffers, it, (p_bits, bits_row + NWG * ROWS, masked > 1), masked > 0, steps > 1, where, SCORE, MAPPED, DROPOUT, WG, C
            )
            it += 1
            for i in range(1, steps):
                b_p, b_o, b_m, b_l, b_decay, b_words = attend(
                    q,
                    b_p,
                    b_o,
                    b_m,
                    b_l,
                    b_decay,
                    b_words,
                    buffers,
                    it,
                    (p_bits, bits_row + (i + 1) * (NWG * ROWS), i + 1 < masked),
                    i < masked,
                    i + 1 < steps,
                    where,
                    SCORE,
                    MAPPED,
                    DROPOUT,
                    WG,
                    C,
                )
                it += 1
            b_o = rescale(b_o, b_decay)
            last = (it - 1) % VS
            if VS <= 2:
                mbarrier.wait(v_full.index(last), ((it - 1) // VS) & 1)
            o_token = warpgroup_mma(b_p, v_bufs.index(last).reshape([BN, DV]), b_o, is_async=True)
            b_o = warpgroup_mma_wait(0, deps=[o_token])
            named_barrier_arrive(V_FREE + last, ALL)
        else:
            release_q(False, C)

        # Out. Everything is in base 2 from here on.
        b_sum = gl.convert_layout(gl.sum(b_l, 1), ROW, assert_trivial=True)
        b_top = b_m * scale[1]
        o_q = m0 + gl.arange(0, ROWS, ROW)
        o_row = i_bh.to(gl.int64) * n_q + unpermuted_row(m0, gl.arange(0, ROWS, ROW), grid_width, PATCHED)
        gl.store(p_max + o_row, b_top * LN2, mask=o_q < n_q)
        has_nonfinite = gl.convert_layout(nonfinite_rows(b_o), ROW, assert_trivial=True) | overflowed(b_m, b_sum)
        if SINKS:  # one more key, of value 0
            sink = gl.load(p_sinks + i_bh % n_heads).to(gl.float32) * LOG2E
            b_base = gl.maximum(b_top, sink)
            b_share = gl.exp2(b_top - b_base)
            b_sum = b_sum * b_share + gl.exp2(sink - b_base)
            b_o = b_o * gl.expand_dims(gl.convert_layout(b_share, gl.SliceLayout(1, O_L), assert_trivial=True), 1)
            b_top = b_base
        nothing = b_sum == 0.0
        b_sum = gl.where(nothing, 1.0, b_sum)
        b_lse = gl.where(nothing, float("-inf"), (b_top + gl.log2(b_sum)) * LN2)
        gl.store(p_lse + o_row, gl.where(has_nonfinite > 0, float("nan"), b_lse), mask=o_q < n_q)  # NaN: see fwd_fixup
        b_o = b_o * gl.expand_dims(gl.convert_layout(keep_scale / b_sum, gl.SliceLayout(1, O_L), assert_trivial=True), 1)
        if C.value.own_o_buffer:
            tma.store_wait(0)  # the tile before has left
        out.reshape([ROWS, DV]).store(b_o.to(q_bufs.dtype))
        fence_async_shared()
        tma_store(o_desc, tma_coords(i_bh // n_heads, i_bh % n_heads, m0, grid_width, PATCHED), out)
        if not C.value.own_o_buffer:
            tma.store_wait(0)
            named_barrier_arrive(C.value.q_free, ALL)
        turn += 1
        mbarrier.wait(q_full, turn & 1)
        steps = mailbox_read(tile_mailbox, 2)
    tma.store_wait(0)
    if C.value.ping_pong and WG == 0:
        named_barrier_sync(TURN, 256)  # meet the last arrival


@gluon.jit
def first_step(
    q,
    b_m,
    b_l,
    b_words,
    buffers,
    it,
    bits,
    masked,
    more,
    where,
    SCORE: gl.constexpr,
    MAPPED: gl.constexpr,
    DROPOUT: gl.constexpr,
    WG: gl.constexpr,
    C: gl.constexpr,
):
    """Scores of the first key tile; no P V is under way."""
    k_bufs, _, k_full, v_full, step_mailbox = buffers
    NWG: gl.constexpr = C.value.warpgroups
    KS: gl.constexpr = C.value.k_stages
    VS: gl.constexpr = C.value.v_stages
    mbarrier.wait(k_full.index(it % KS), (it // KS) & 1)
    n0 = mailbox_read(step_mailbox, it % KS)
    if C.value.ping_pong:
        named_barrier_sync(TURN + WG, 256)
    s_token = issue_scores(q, k_bufs.index(it % KS), C)
    if C.value.ping_pong:
        named_barrier_arrive(TURN + (WG + 1) % NWG, 256)
    b_next = mask_bits_of(bits[0], bits[1], bits[2], MAPPED, C)
    b_s = warpgroup_mma_wait(0, deps=[s_token])
    named_barrier_arrive(K_FREE + it % KS, 32 + 128 * NWG)
    release_q(more, C)
    b_p, b_m, b_l, b_decay = softmax_step(b_s, b_m, b_l, n0, masked, b_words, where, SCORE, MAPPED, True, DROPOUT, C)
    mbarrier.wait(k_full.index((it + 1) % KS), ((it + 1) // KS) & 1, pred=more)
    if VS > 2:
        mbarrier.wait(v_full.index(it % VS), (it // VS) & 1)
    return as_operand(b_p, k_bufs.dtype, C), b_m, b_l, b_decay, b_next


@gluon.jit
def release_q(more, C: gl.constexpr):
    """Q's memory, after the last Q K^T. In every step this branch is also a border that ptxas moves no arithmetic of masks and scores across."""
    if C.value.own_o_buffer:
        if not more:
            named_barrier_arrive(C.value.q_free, 32 + 128 * C.value.warpgroups)


@gluon.jit
def attend(
    q,
    b_p,
    b_o,
    b_m,
    b_l,
    b_decay,
    b_words,
    buffers,
    it,
    bits,
    masked,
    more,
    where,
    SCORE: gl.constexpr,
    MAPPED: gl.constexpr,
    DROPOUT: gl.constexpr,
    WG: gl.constexpr,
    C: gl.constexpr,
):
    """One step: scores of key tile `it`, P V of the one before. b_decay is what the last maximum makes of the sums before it; `bits` tells
    where the next step's lies.

    Masked steps take a branch: code of their own would be larger, and ptxas then moves the mask's arithmetic where it delays others."""
    k_bufs, v_bufs, k_full, v_full, step_mailbox = buffers
    NWG: gl.constexpr = C.value.warpgroups
    KS: gl.constexpr = C.value.k_stages
    VS: gl.constexpr = C.value.v_stages
    BN: gl.constexpr = C.value.block_n
    DV: gl.constexpr = C.value.dv
    ALL: gl.constexpr = 32 + 128 * NWG
    if C.value.ping_pong:
        named_barrier_sync(TURN + WG, 256)
    s_token = issue_scores(q, k_bufs.index(it % KS), C)
    b_o = rescale(b_o, b_decay)
    if VS <= 2:
        mbarrier.wait(v_full.index((it - 1) % VS), ((it - 1) // VS) & 1)
    o_token = warpgroup_mma(b_p, v_bufs.index((it - 1) % VS).reshape([BN, DV]), b_o, is_async=True)
    if C.value.ping_pong:
        named_barrier_arrive(TURN + (WG + 1) % NWG, 256)
    n0 = mailbox_read(step_mailbox, it % KS)
    b_next = mask_bits_of(bits[0], bits[1], bits[2], MAPPED, C)
    if VS > 2:  # waits in the shadow of the products
        mbarrier.wait(k_full.index((it + 1) % KS), ((it + 1) // KS) & 1, pred=more)
    b_s = warpgroup_mma_wait(1, deps=[s_token])
    named_barrier_arrive(K_FREE + it % KS, ALL)
    release_q(more, C)
    b_p, b_m, b_l, b_decay = softmax_step(b_s, b_m, b_l, n0, masked, b_words, where, SCORE, MAPPED, False, DROPOUT, C)
    if VS > 2:
        mbarrier.wait(v_full.index(it % VS), (it // VS) & 1)
    else:
        mbarrier.wait(k_full.index((it + 1) % KS), ((it + 1) // KS) & 1, pred=more)
    b_o, b_p, b_l, b_decay = warpgroup_mma_wait(0, deps=[o_token, b_p, b_l, b_decay])
    named_barrier_arrive(V_FREE + (it - 1) % VS, ALL)
    return as_operand(b_p, k_bufs.dtype, C), b_o, b_m, b_l, b_decay, b_next


@gluon.jit
def issue_scores(q, k_buf, C: gl.constexpr):
    BN: gl.constexpr = C.value.block_n
    D: gl.constexpr = C.value.d
    nothing = gl.zeros([ROWS, BN], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16]))
    return warpgroup_mma(q, k_buf.reshape([BN, D]).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def mask_bits_of(p_bits, row, masked, MAPPED: gl.constexpr, C: gl.constexpr):
    BN: gl.constexpr = C.value.block_n
    if MAPPED:
        like = gl.zeros([ROWS, BN], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16]))
        return load_mask_bits(p_bits, row, masked, ROWS, like, True)
    else:
        return masked


@gluon.jit
def softmax_step(
    b_s, b_m, b_l, n0, masked, b_words, where, SCORE: gl.constexpr, MAPPED: gl.constexpr, FIRST: gl.constexpr, DROPOUT: gl.constexpr, C: gl.constexpr
):
    """From q.k to weights. Running maximum b_m [ROWS], sums b_l [ROWS, 4] (one for each lane of a row), and the factor for what was summed before."""
    i_b, i_h, m0, n_q, n_kv, scale, threshold, p_seed, score = where
    BN: gl.constexpr = C.value.block_n
    S_L: gl.constexpr = b_s.type.layout
    BY_THREAD: gl.constexpr = by_thread(ROWS, BN)
    o_q = gl.expand_dims(m0 + gl.arange(0, ROWS, gl.SliceLayout(1, S_L)), 1)
    o_column = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(0, S_L)), 0)
    o_kv = n0 + o_column
    b_s = scored(b_s, scale, i_b, i_h, row_index(o_q, m0 + ROWS <= n_q), column_index(n0, o_column, n0 + BN <= n_kv), score, SCORE)
    if MAPPED:
        if masked:
            b_s = apply_mask_bits(b_s, b_words)
    elif FIRST:  # without a map the keys' end comes first
        if masked:
            b_s = gl.where(o_kv < n_kv, b_s, float("-inf"))
    c = scale[1]
    b_high = gl.max(gl.max(gl.max(b_s.reshape(BY_THREAD), 1), 2), 1)
    b_new = gl.maximum(b_m, gl.convert_layout(b_high, b_m.type.layout, assert_trivial=True))
    b_base = gl.where(b_new == float("-inf"), 0.0, b_new * c)  # a row with nothing yet: measure from 0, weights are 0
    b_decay = gl.exp2(b_m * c - b_base)
    b_p = gl.exp2(b_s * c - gl.expand_dims(b_base, 1))
    b_sum = gl.sum(gl.sum(b_p.reshape(BY_THREAD), 1), 2)
    by_row = gl.expand_dims(gl.convert_layout(b_decay, gl.SliceLayout(1, b_sum.type.layout), assert_trivial=True), 1)
    b_l = gl.convert_layout(b_l, b_sum.type.layout, assert_trivial=True) * by_row + b_sum
    if DROPOUT:
        b_p = gl.where(dropout_keep(p_seed, threshold, i_b, i_h, o_q, o_kv), b_p, 0.0)
    return b_p, b_new, b_l, b_decay


@gluon.jit
def rescale(b_o, b_decay):
    # Opaque to LLVM, which would move the product to the end of the step before, in front of Q K^T.
    b_decay = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [b_decay], dtype=gl.float32, is_pure=False, pack=1)
    return b_o * gl.expand_dims(gl.convert_layout(b_decay, gl.SliceLayout(1, b_o.type.layout), assert_trivial=True), 1)


@gluon.jit
def as_operand(b_p, dtype: gl.constexpr, C: gl.constexpr):
    """P as the left operand of P V: 16 bits, in the registers where it is."""
    DV: gl.constexpr = C.value.dv
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    return gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, O_L, 2), assert_trivial=True)
