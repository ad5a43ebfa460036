"""Attention forward for Hopper (sm_90) in Gluon: one TMA producer warp and two or three consumer warpgroups.

S = score(Q K^T), P = 2^(S c - m c), 0 where the mask forbids, O = P V / rowsum(P), lse = ln 2 (m c + log2 rowsum(P)). m is the row maximum of S; c = scale[1]
takes scores to base 2, and includes the softmax scale where there is no score function.

The kernel is persistent: programs draw query tiles from a common counter, the rows of the tile schedule with most work first. The producer walks the
schedule, so empty tiles are never loaded. A consumer warpgroup owns 64 query rows. Its step i, with P kept in registers:

    issue S(i) = Q K(i)^T, then O += P(i-1) V(i-1); softmax(i) runs while the second product is under way.

Why the schedule is as it is (docs/kernels/hopper_trials.md has the measurements):
 - Ping-pong: warpgroups take turns at issuing their two products, so that the softmax of one runs under the products of another.
 - P is packed to 16 bits after the wait for P V. Packed before it, the new P needs registers of its own while the old P and the scores are still live.
 - Row maxima and sums are first reduced over the registers of a thread, even and odd columns apart: four independent chains instead of one. The sums are
   reduced across lanes only once per query tile, in the epilogue.
 - O is rescaled after Q K^T was issued, not before it. With C.anchored it is rescaled in few steps, at their end, and row maxima stay as they are in all
   others (docs/kernels/softmax.md).
 - A wait for an mbarrier ends a basic block. One stands between the softmax and the wait for P V, or ptxas hoists that wait above the exp2s.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilewise.engines.gluon import named_barriers
from tilewise.engines.gluon.kernels.primitives import (
    LN2,
    LOG2E,
    MASK_BITS,
    N_MASKED,
    N_TILES,
    ORDER,
    START,
    STOP,
    TWO_WARPGROUPS,
    apply_mask_bits,
    apply_score,
    buffers_for,
    column_index,
    fragment_shape,
    load_mask_bits,
    mailbox_read,
    mailbox_write,
    named_barrier_arrive,
    named_barrier_sync,
    new_mailbox,
    next_item,
    nonfinite_rows,
    overflowed,
    phase,
    row_index,
    runs_of,
    tma_coords,
    tma_load,
    tma_store,
    uniform,
    unpermuted_row,
    wgmma_layout,
)
from tilewise.engines.gpu.kernels.primitives import dropout_keep

ROWS = gl.constexpr(64)  # query rows of a warpgroup
TURN = gl.constexpr(named_barriers.FWD_TURN)
K_FREE = gl.constexpr(named_barriers.FWD_K_FREE)
V_FREE = gl.constexpr(named_barriers.FWD_V_FREE)

# Slots of the tile mailbox, one message per query tile
HEAD = gl.constexpr(0)  # i_b * n_heads + i_h
TILE = gl.constexpr(1)  # which query tile
STEPS = gl.constexpr(2)  # K/V tiles to visit: 0 if the tile's rows attend nothing, -1 when all work is done
MASKED = gl.constexpr(3)  # how many of them are masked; they come first
BITS = gl.constexpr(4)  # index of the first one's block of mask bits


VOTE_ASM = gl.constexpr(  # $0 = any lane's $1 > 2^120 ? infinity : $1
    "{ .reg .pred over; setp.gt.f32 over, $1, 0f7B800000; vote.sync.any.pred over, over, 0xffffffff; selp.f32 $0, 0f7F800000, $1, over; }"
)


@gluon.constexpr_function
def all_threads(config):
    """Threads of the producer warp and of all consumers."""
    return named_barriers.WARP + named_barriers.WARPGROUP * config.warpgroups


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
    s_tiles,
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
    s_out,
    dv_true,
    SCORE: gl.constexpr,
    MAPPED: gl.constexpr,
    PATCHED: gl.constexpr,
    SINKS: gl.constexpr,
    DROPOUT: gl.constexpr,
    C: gl.constexpr,
):
    """Allocates shared memory and starts the roles: the producer loads Q, K and V of one query tile after the other, and each of the consumer warpgroups
    computes 64 rows of it. The consumers need nearly all registers, so the producer gets by with few.

    q_desc, k_desc, v_desc, o_desc: TMA descriptors, [batch, heads, tokens, dim], or [.., columns, rows, dim] of a grid if PATCHED.
    p_lse, p_max: [batch, heads, n_q]. p_counter: see next_item. tiles, s_tiles: a HopperSchedule's tensors, (batch, head) strides in rows of the map.
    ratio: query heads per key head. n_tiles: query tiles per head. n_bh: batch * heads. n_group: heads whose tiles are mixed because their K and V
    fit into the L2 cache together. scale: see gpu/mods.py. C: a ForwardConfig. If C.partial, o_desc is a pointer to float32, s_out are the strides and dv_true
    the head dim of what it points to."""
    NWG: gl.constexpr = C.value.warpgroups
    KS: gl.constexpr = C.value.k_stages
    VS: gl.constexpr = C.value.v_stages
    MBARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_bufs = buffers_for(q_desc, NWG)  # [NWG, 64, D]
    k_bufs = buffers_for(k_desc, KS)  # [KS, BN, D]
    v_bufs = buffers_for(v_desc, VS)  # [VS, BN, DV]
    o_bufs = q_bufs  # [NWG, 64, DV]
    if C.value.own_o_buffer and not C.value.partial:
        o_bufs = buffers_for(o_desc, NWG)
    q_full = gl.allocate_shared_memory(gl.int64, [1], MBARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [KS, 1], MBARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [VS, 1], MBARRIER)
    mbarrier.init(q_full, count=1)
    for s in gl.static_range(KS):
        mbarrier.init(k_full.index(s), count=1)
    for s in gl.static_range(VS):
        mbarrier.init(v_full.index(s), count=1)
    tile_mailbox = new_mailbox(5)  # HEAD, TILE, STEPS, MASKED, BITS
    step_mailbox = new_mailbox(KS)  # by stage of K: its tile's first key

    bufs = (q_bufs, k_bufs, v_bufs)
    full = (q_full, k_full, v_full)
    mailboxes = (tile_mailbox, step_mailbox)
    load_shape = (n_heads, ratio, n_kv, n_tiles, n_bh, n_group, grid_width)
    load = ((q_desc, k_desc, v_desc), bufs, full, mailboxes, p_counter, tiles, s_tiles, load_shape)
    work_shape = (n_heads, n_q, n_kv, grid_width)
    work = (
        (o_desc, s_out, dv_true, p_lse, p_max),
        p_sinks,
        p_seed,
        bufs,
        o_bufs,
        full,
        mailboxes,
        tiles[MASK_BITS],
        work_shape,
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
def producer(load, MAPPED: gl.constexpr, PATCHED: gl.constexpr, C: gl.constexpr):
    """The producer warp draws query tiles and loads, for each, Q once and K and V of every tile of its row of the map, as soon as the consumers have
    released a stage. Masked tiles come first, so that step i finds its mask bits in the i-th block of the row's. Q is sent after the first K, whose
    stage is usually free before Q's buffer is."""
    descs, bufs, full, mailboxes, p_counter, tiles, s_tiles, shape = load
    q_desc, k_desc, v_desc = descs
    q_bufs, k_bufs, v_bufs = bufs
    q_full, k_full, v_full = full
    tile_mailbox, step_mailbox = mailboxes
    n_heads, ratio, n_kv, n_tiles, n_bh, n_group, grid_width = shape
    BN: gl.constexpr = C.value.block_n
    KS: gl.constexpr = C.value.k_stages
    VS: gl.constexpr = C.value.v_stages
    ALL_THREADS: gl.constexpr = all_threads(C)
    q_pipe = (q_desc, q_bufs, q_full, tile_mailbox, grid_width)
    kv_pipe = (k_desc, v_desc, k_bufs, v_bufs, k_full, v_full, step_mailbox, grid_width)
    n_items = n_tiles * n_bh
    q_sent = 0  # query tiles
    kv_sent = 0  # K/V tiles, over all query tiles
    item = next_item(p_counter, n_items)
    while item < n_items:
        # Items are ordered by group of heads, then by length of the row, then by head.
        first_head = item // (n_tiles * n_group) * n_group
        in_group = item - first_head * n_tiles
        heads = gl.minimum(n_group, n_bh - first_head)  # the last group may be smaller
        i_bh = first_head + in_group % heads
        i_tile = in_group // heads
        i_b = i_bh // n_heads
        i_h = i_bh % n_heads
        i_hk = i_h // ratio
        if MAPPED:
            row = i_b * s_tiles[0] + i_h * s_tiles[1]
            i_tile = uniform(gl.load(tiles[ORDER] + row + i_tile))
            row += i_tile
            n_steps = uniform(gl.load(tiles[N_TILES] + row))
            n_masked = uniform(gl.load(tiles[N_MASKED] + row))
            i_bits, full_run, masked_run, end = runs_of(tiles, row)
            if n_steps == 0:
                send_q(q_pipe, q_sent, i_b, i_h, (i_bh, i_tile, 0, 0, 0), PATCHED, C)
            message = (i_bh, i_tile, n_steps, n_masked, i_bits)
            sent_before = kv_sent
            for run in range(masked_run, end):
                start = uniform(gl.load(tiles[START] + run))
                for i_kv in range(start, uniform(gl.load(tiles[STOP] + run))):
                    send_kv(kv_pipe, q_pipe, kv_sent, i_kv, i_hk, kv_sent == sent_before, q_sent, i_b, i_h, message, PATCHED, C)
                    kv_sent += 1
            for run in range(full_run, masked_run):
                start = uniform(gl.load(tiles[START] + run))
                for i_kv in range(start, uniform(gl.load(tiles[STOP] + run))):
                    send_kv(kv_pipe, q_pipe, kv_sent, i_kv, i_hk, kv_sent == sent_before, q_sent, i_b, i_h, message, PATCHED, C)
                    kv_sent += 1
        else:  # all tiles, from the last to the first: only the last can need a mask
            n_steps = gl.cdiv(n_kv, BN)
            message = (i_bh, i_tile, n_steps, (n_kv % BN != 0).to(gl.int32), 0)
            for i in range(n_steps):
                send_kv(kv_pipe, q_pipe, kv_sent, n_steps - 1 - i, i_hk, i == 0, q_sent, i_b, i_h, message, PATCHED, C)
                kv_sent += 1
        q_sent += 1
        item = next_item(p_counter, n_items)
    send_q(q_pipe, q_sent, 0, 0, (0, 0, -1, 0, 0), PATCHED, C)
    for j in range(gl.maximum(kv_sent - KS, 0), kv_sent):  # sync with the consumers' last arrivals: no named barrier may be left half complete
        named_barrier_sync(K_FREE + j % KS, ALL_THREADS)
    for j in range(gl.maximum(kv_sent - VS, 0), kv_sent):
        named_barrier_sync(V_FREE + j % VS, ALL_THREADS)


@gluon.jit
def send_q(q_pipe, q_sent, i_b, i_h, message, PATCHED: gl.constexpr, C: gl.constexpr):
    """Loads a query tile, [NWG * 64, D], with its message in the tile mailbox (HEAD to BITS); only the message if there are no steps to compute."""
    q_desc, q_bufs, q_full, tile_mailbox, grid_width = q_pipe
    NWG: gl.constexpr = C.value.warpgroups
    if q_sent > 0:
        named_barrier_sync(C.value.q_free, all_threads(C))
    for n in gl.static_range(5):
        mailbox_write(tile_mailbox, n, message[n])
    if message[STEPS] > 0:
        mbarrier.expect(q_full, NWG * q_desc.block_type.nbytes)
        for w in gl.static_range(NWG):
            tma_load(q_desc, tma_coords(i_b, i_h, (message[TILE] * NWG + w) * ROWS, grid_width, PATCHED), q_full, q_bufs.index(w))  # [64, D]
    else:
        mbarrier.arrive(q_full, count=1)


@gluon.jit
def send_kv(kv_pipe, q_pipe, kv_sent, i_kv, i_hk, is_first, q_sent, i_b, i_h, message, PATCHED: gl.constexpr, C: gl.constexpr):
    """Loads a tile of K, with its first key in the step mailbox, and of V; the query tile's first step loads Q in between."""
    k_desc, v_desc, k_bufs, v_bufs, k_full, v_full, step_mailbox, grid_width = kv_pipe
    KS: gl.constexpr = C.value.k_stages
    VS: gl.constexpr = C.value.v_stages
    ALL_THREADS: gl.constexpr = all_threads(C)
    n0 = i_kv * C.value.block_n
    if kv_sent >= KS:
        named_barrier_sync(K_FREE + kv_sent % KS, ALL_THREADS)
    mailbox_write(step_mailbox, kv_sent % KS, n0)
    mbarrier.expect(k_full.index(kv_sent % KS), k_desc.block_type.nbytes)
    tma_load(k_desc, tma_coords(i_b, i_hk, n0, grid_width, PATCHED), k_full.index(kv_sent % KS), k_bufs.index(kv_sent % KS))  # [BN, D]
    if is_first:
        send_q(q_pipe, q_sent, i_b, i_h, message, PATCHED, C)
    if kv_sent >= VS:
        named_barrier_sync(V_FREE + kv_sent % VS, ALL_THREADS)
    mbarrier.expect(v_full.index(kv_sent % VS), v_desc.block_type.nbytes)
    tma_load(v_desc, tma_coords(i_b, i_hk, n0, grid_width, PATCHED), v_full.index(kv_sent % VS), v_bufs.index(kv_sent % VS))  # [BN, DV]


# -- consumer --------------------------------------------------------------------------------------------------------


@gluon.jit
def consumer(
    work, SCORE: gl.constexpr, MAPPED: gl.constexpr, PATCHED: gl.constexpr, SINKS: gl.constexpr, DROPOUT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr
):
    """Consumer warpgroup WG computes rows [64 WG, 64 WG + 64) of every query tile: a first step without P V, steps that each issue S of one K tile and P V of
    the one before, a last P V without S, then the epilogue. P V lags a step behind so that the tensor cores have it to do during the softmax."""
    outputs, p_sinks, p_seed, bufs, o_bufs, full, mailboxes, p_bits, shape, scale, keep_scale, threshold, score = work
    o_desc, s_out, dv_true, p_lse, p_max = outputs
    q_bufs, k_bufs, v_bufs = bufs
    q_full, k_full, v_full = full
    tile_mailbox, step_mailbox = mailboxes
    n_heads, n_q, n_kv, grid_width = shape
    NWG: gl.constexpr = C.value.warpgroups
    BN: gl.constexpr = C.value.block_n
    D: gl.constexpr = C.value.d
    DV: gl.constexpr = C.value.dv
    VS: gl.constexpr = C.value.v_stages
    ANCHORED: gl.constexpr = C.value.anchored
    ALL_THREADS: gl.constexpr = all_threads(C)
    S_L: gl.constexpr = wgmma_layout(BN)
    O_L: gl.constexpr = wgmma_layout(DV)
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    kv_pipe = (k_bufs, v_bufs, k_full, v_full, step_mailbox)
    q = q_bufs.index(WG).reshape([ROWS, D])  # [64, D]
    o_buf = o_bufs.index(WG)  # [64, DV]

    if C.value.ping_pong and WG == NWG - 1:
        named_barrier_arrive(TURN, TWO_WARPGROUPS)  # warpgroup 0 has the first turn
    i_step = 0  # K/V tiles computed, over all query tiles
    i_item = 0  # query tiles computed
    mbarrier.wait(q_full, 0)
    n_steps = mailbox_read(tile_mailbox, STEPS)
    while n_steps >= 0:
        i_bh = mailbox_read(tile_mailbox, HEAD)
        i_tile = mailbox_read(tile_mailbox, TILE)
        n_masked = mailbox_read(tile_mailbox, MASKED)
        bits_row = (mailbox_read(tile_mailbox, BITS) * NWG + WG) * ROWS  # our first row among all mask bits
        m0 = (i_tile * NWG + WG) * ROWS
        score_args = (i_bh // n_heads, i_bh % n_heads, m0, n_q, n_kv, scale, threshold, p_seed, score)
        b_m = gl.full([ROWS], float("-inf"), gl.float32, ROW)  # row maximum of S
        b_l = gl.sum(gl.sum(gl.zeros([ROWS, BN], gl.float32, S_L).reshape([ROWS, BN // 8, 4, 2]), 1), 2)  # row sums of P, [64, 4]: one per lane
        b_o = gl.zeros([ROWS, DV], gl.float32, O_L)
        if n_steps > 0:
            # Mask bits are loaded a step ahead: global memory may take longer to answer than Q K^T takes.
            b_words = step_mask_bits(p_bits, bits_row, n_masked > 0, MAPPED, C)
            next_bits = (p_bits, bits_row + NWG * ROWS, n_masked > 1)
            b_p, b_m, b_l, b_decay, b_words = first_step(
                q, (b_m, b_l, b_words), kv_pipe, i_step, next_bits, n_masked > 0, n_steps > 1, score_args, SCORE, MAPPED, DROPOUT, WG, C
            )
            i_step += 1
            for i in range(1, n_steps):
                next_bits = (p_bits, bits_row + (i + 1) * (NWG * ROWS), i + 1 < n_masked)
                state = (b_p, b_o, b_m, b_l, b_decay, b_words)
                b_p, b_o, b_m, b_l, b_decay, b_words = step(
                    q, state, kv_pipe, i_step, next_bits, i < n_masked, i <= n_masked, i + 1 < n_steps, score_args, SCORE, MAPPED, DROPOUT, WG, C
                )
                i_step += 1
            if not ANCHORED:
                b_o = rescale_o(b_o, b_decay)
            last = (i_step - 1) % VS
            if VS <= 2:
                mbarrier.wait(v_full.index(last), phase(i_step - 1, VS))
            o_token = warpgroup_mma(b_p, v_bufs.index(last).reshape([BN, DV]), b_o, is_async=True)  # O += P V  [64, DV]
            b_o = warpgroup_mma_wait(0, deps=[o_token])
            named_barrier_arrive(V_FREE + last, ALL_THREADS)
        else:
            release_q(False, C)

        # Epilogue: O = O / l, lse = m + ln l. Maxima are in base 2 here (m c), until they are stored.
        b_l_row = gl.convert_layout(gl.sum(b_l, 1), ROW, assert_trivial=True)  # [64]
        if ANCHORED:  # a row without a maximum, if there were steps that need none, was shifted by 0
            b_m = gl.where((b_m == float("-inf")) & (n_steps > (n_masked + 1 if MAPPED else 1)), 0.0, b_m)
        b_mc = b_m * scale[1]
        o_q = m0 + gl.arange(0, ROWS, ROW)
        o_row = i_bh.to(gl.int64) * n_q + unpermuted_row(m0, gl.arange(0, ROWS, ROW), grid_width, PATCHED)
        if not ANCHORED:
            gl.store(p_max + o_row, b_mc * LN2, mask=o_q < n_q)
        needs_fixup = gl.convert_layout(nonfinite_rows(b_o), ROW, assert_trivial=True) | overflowed(b_m, b_l_row)
        if SINKS:  # a sink is one more key, whose value is 0: l += 2^(sink - m), after m and O are rescaled to the new maximum
            if ANCHORED:  # sums of any size: from here on O / l with a sum of 1, and m c + log2 l in place of the maximum
                b_o = b_o * gl.expand_dims(gl.convert_layout(1.0 / gl.where(b_l_row == 0.0, 1.0, b_l_row), gl.SliceLayout(1, O_L), assert_trivial=True), 1)
                b_mc += gl.log2(b_l_row)
                b_l_row = gl.full_like(b_l_row, 1.0)
            sink = gl.load(p_sinks + i_bh % n_heads).to(gl.float32) * LOG2E
            b_mc_new = gl.maximum(b_mc, sink)
            b_mc_new = gl.where(b_mc_new == float("-inf"), 0.0, b_mc_new)  # neither keys nor a sink: -inf - -inf would be NaN
            b_sink_decay = gl.exp2(b_mc - b_mc_new)
            b_l_row = b_l_row * b_sink_decay + gl.exp2(sink - b_mc_new)
            b_o = b_o * gl.expand_dims(gl.convert_layout(b_sink_decay, gl.SliceLayout(1, O_L), assert_trivial=True), 1)
            b_mc = b_mc_new
        is_empty = b_l_row == 0.0  # a row that attends nothing: O = 0, lse = -inf
        b_l_row = gl.where(is_empty, 1.0, b_l_row)
        b_lse = gl.where(is_empty, float("-inf"), (b_mc + gl.log2(b_l_row)) * LN2)
        gl.store(p_lse + o_row, gl.where(needs_fixup > 0, float("nan"), b_lse), mask=o_q < n_q)  # NaN: fwd_fixup recomputes the row (nonfinite_rows.py)
        b_o = b_o * gl.expand_dims(gl.convert_layout(keep_scale / b_l_row, gl.SliceLayout(1, O_L), assert_trivial=True), 1)
        if C.value.partial:
            p_o = o_desc + (i_bh // n_heads).to(gl.int64) * s_out[0] + (i_bh % n_heads).to(gl.int64) * s_out[1]
            store_part(p_o, s_out, m0, n_q, dv_true, b_o, grid_width, PATCHED)
        else:
            if C.value.own_o_buffer:
                tma.store_wait(0)  # the TMA store of the previous tile has read the buffer
            o_buf.reshape([ROWS, DV]).store(b_o.to(q_bufs.dtype))
            fence_async_shared()
            tma_store(o_desc, tma_coords(i_bh // n_heads, i_bh % n_heads, m0, grid_width, PATCHED), o_buf)
            if not C.value.own_o_buffer:
                tma.store_wait(0)
                named_barrier_arrive(C.value.q_free, ALL_THREADS)
        i_item += 1
        mbarrier.wait(q_full, i_item & 1)
        n_steps = mailbox_read(tile_mailbox, STEPS)
    tma.store_wait(0)
    if C.value.ping_pong and WG == 0:
        named_barrier_sync(TURN, TWO_WARPGROUPS)  # take the last turn that was passed on: no named barrier may be left half complete


@gluon.jit
def store_part(p_o, s_out, m0, n_q, dv_true, b_o, grid_width, PATCHED: gl.constexpr):
    """O [64, DV] from registers, in fp32: the four lanes of a row write 32 bytes of it together."""
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, b_o.type.layout))
    o_column = gl.expand_dims(gl.arange(0, b_o.shape[1], gl.SliceLayout(0, b_o.type.layout)), 0)  # [1, DV]
    p_rows = p_o + gl.expand_dims(unpermuted_row(m0, o_row, grid_width, PATCHED).to(gl.int64) * s_out[2], 1)  # [64, 1]
    gl.store(p_rows + o_column, b_o, mask=gl.expand_dims(m0 + o_row < n_q, 1) & (o_column < dv_true // 8 * 8))  # a multiple of 8, as the compiler can see


@gluon.jit
def first_step(
    q,
    state,
    kv_pipe,
    i_step,
    next_bits,
    is_masked,
    has_next,
    score_args,
    SCORE: gl.constexpr,
    MAPPED: gl.constexpr,
    DROPOUT: gl.constexpr,
    WG: gl.constexpr,
    C: gl.constexpr,
):
    """S and softmax of a query tile's first K tile; there is no P V yet. Arguments are those of `step`, but the state is only m, l and the mask bits."""
    b_m, b_l, b_words = state
    k_bufs, _, k_full, v_full, step_mailbox = kv_pipe
    NWG: gl.constexpr = C.value.warpgroups
    KS: gl.constexpr = C.value.k_stages
    VS: gl.constexpr = C.value.v_stages
    mbarrier.wait(k_full.index(i_step % KS), phase(i_step, KS))
    n0 = mailbox_read(step_mailbox, i_step % KS)
    if C.value.ping_pong:
        named_barrier_sync(TURN + WG, TWO_WARPGROUPS)
    s_token = issue_qk(q, k_bufs.index(i_step % KS), C)  # S = Q K^T  [64, BN]
    if C.value.ping_pong:
        named_barrier_arrive(TURN + (WG + 1) % NWG, TWO_WARPGROUPS)
    b_next_words = step_mask_bits(next_bits[0], next_bits[1], next_bits[2], MAPPED, C)
    b_s = warpgroup_mma_wait(0, deps=[s_token])
    named_barrier_arrive(K_FREE + i_step % KS, all_threads(C))
    release_q(has_next, C)
    b_p, b_m, b_l, b_decay = softmax_step(b_s, b_m, b_l, n0, is_masked, True, b_words, score_args, SCORE, MAPPED, True, DROPOUT, C)
    mbarrier.wait(k_full.index((i_step + 1) % KS), phase(i_step + 1, KS), pred=has_next)
    if VS > 2:
        mbarrier.wait(v_full.index(i_step % VS), phase(i_step, VS))
    return as_operand(b_p, k_bufs.dtype, C), b_m, b_l, b_decay, b_next_words


@gluon.jit
def release_q(has_next, C: gl.constexpr):
    """Releases Q's buffer after the query tile's last Q K^T. The branch is there in every step, also as a border across which ptxas does not move the
    arithmetic of masks and scores. Without a buffer of its own, O is stored through Q's, which is then released in the epilogue."""
    if C.value.own_o_buffer:
        if not has_next:
            named_barrier_arrive(C.value.q_free, all_threads(C))


@gluon.jit
def step(
    q,
    state,
    kv_pipe,
    i_step,
    next_bits,
    is_masked,
    is_exact,
    has_next,
    score_args,
    SCORE: gl.constexpr,
    MAPPED: gl.constexpr,
    DROPOUT: gl.constexpr,
    WG: gl.constexpr,
    C: gl.constexpr,
):
    """S and softmax of K tile i_step, P V of the tile before it. state: P [64, BN] of the tile before, in 16 bits; O; row maxima; row sums; b_decay, the
    softmax rescale that O still needs; this step's mask bits. next_bits: what step_mask_bits needs to load the next step's. is_exact: see softmax_step.

    Masked steps branch. In a loop of their own, which would also be more code, ptxas moves the mask's arithmetic to where it delays the other warpgroup."""
    b_p, b_o, b_m, b_l, b_decay, b_words = state
    k_bufs, v_bufs, k_full, v_full, step_mailbox = kv_pipe
    NWG: gl.constexpr = C.value.warpgroups
    KS: gl.constexpr = C.value.k_stages
    VS: gl.constexpr = C.value.v_stages
    BN: gl.constexpr = C.value.block_n
    DV: gl.constexpr = C.value.dv
    ANCHORED: gl.constexpr = C.value.anchored
    ALL_THREADS: gl.constexpr = all_threads(C)
    if C.value.ping_pong:
        named_barrier_sync(TURN + WG, TWO_WARPGROUPS)
    s_token = issue_qk(q, k_bufs.index(i_step % KS), C)  # S = Q K^T  [64, BN]
    if not ANCHORED:
        b_o = rescale_o(b_o, b_decay)
    if VS <= 2:
        mbarrier.wait(v_full.index((i_step - 1) % VS), phase(i_step - 1, VS))
    o_token = warpgroup_mma(b_p, v_bufs.index((i_step - 1) % VS).reshape([BN, DV]), b_o, is_async=True)  # O += P V  [64, DV]
    if C.value.ping_pong:
        named_barrier_arrive(TURN + (WG + 1) % NWG, TWO_WARPGROUPS)
    n0 = mailbox_read(step_mailbox, i_step % KS)
    b_next_words = step_mask_bits(next_bits[0], next_bits[1], next_bits[2], MAPPED, C)
    if VS > 2:  # the next K is awaited while the products run
        mbarrier.wait(k_full.index((i_step + 1) % KS), phase(i_step + 1, KS), pred=has_next)
    b_s = warpgroup_mma_wait(1, deps=[s_token])
    named_barrier_arrive(K_FREE + i_step % KS, ALL_THREADS)
    release_q(has_next, C)
    b_p, b_m, b_l, b_decay = softmax_step(b_s, b_m, b_l, n0, is_masked, is_exact, b_words, score_args, SCORE, MAPPED, False, DROPOUT, C)
    if VS > 2:
        mbarrier.wait(v_full.index(i_step % VS), phase(i_step, VS))
    else:
        mbarrier.wait(k_full.index((i_step + 1) % KS), phase(i_step + 1, KS), pred=has_next)
    b_o, b_p, b_l, b_decay = warpgroup_mma_wait(0, deps=[o_token, b_p, b_l, b_decay])
    if ANCHORED and MAPPED:  # few steps are exact: O is rescaled where they end, in no other
        if is_exact:
            b_o = b_o * gl.expand_dims(gl.convert_layout(b_decay, gl.SliceLayout(1, b_o.type.layout), assert_trivial=True), 1)
    named_barrier_arrive(V_FREE + (i_step - 1) % VS, ALL_THREADS)
    return as_operand(b_p, k_bufs.dtype, C), b_o, b_m, b_l, b_decay, b_next_words


@gluon.jit
def issue_qk(q, k_buf, C: gl.constexpr):
    """S = Q K^T, [64, BN], asynchronously."""
    BN: gl.constexpr = C.value.block_n
    D: gl.constexpr = C.value.d
    zero_s = gl.zeros([ROWS, BN], gl.float32, wgmma_layout(BN))
    return warpgroup_mma(q, k_buf.reshape([BN, D]).permute((1, 0)), zero_s, use_acc=False, is_async=True)


@gluon.jit
def step_mask_bits(p_bits, row, is_masked, MAPPED: gl.constexpr, C: gl.constexpr):
    """A step's mask bits for our 64 rows; a placeholder where there is no map."""
    BN: gl.constexpr = C.value.block_n
    if MAPPED:
        b_like = gl.zeros([ROWS, BN], gl.float32, wgmma_layout(BN))
        return load_mask_bits(p_bits, row, is_masked, ROWS, b_like, True)
    else:
        return is_masked


@gluon.jit
def softmax_step(
    b_s,
    b_m,
    b_l,
    n0,
    is_masked,
    is_exact,
    b_words,
    score_args,
    SCORE: gl.constexpr,
    MAPPED: gl.constexpr,
    FIRST: gl.constexpr,
    DROPOUT: gl.constexpr,
    C: gl.constexpr,
):
    """Online softmax of one tile: P = 2^(S c - m c) from q.k, [64, BN], with dropout; the new row maxima m [64]; the new row sums l [64, 4], one for each of
    the four lanes of a row; and the softmax rescale 2^(m_old c - m c) [64] of everything summed before, where the step is exact.

    With C.anchored, steps are exact as long as a row may be without a maximum: masked tiles and the one after them. Others keep m, and weights may exceed 1."""
    n_kv = score_args[4]
    c = score_args[5][1]
    ANCHORED: gl.constexpr = C.value.anchored
    b_s = scored(b_s, n0, score_args, SCORE)
    if MAPPED:
        if is_masked:
            b_s = apply_mask_bits(b_s, b_words)
    elif FIRST:  # without a map, the tile at the end of the keys comes first
        if is_masked:
            b_s = gl.where(n0 + column_offsets(b_s) < n_kv, b_s, float("-inf"))
    b_decay = gl.zeros_like(b_m)
    if FIRST or not ANCHORED:
        b_m, b_l, b_decay = new_maxima(b_s, b_m, b_l, c)
    elif MAPPED:
        if is_exact:
            b_m, b_l, b_decay = new_maxima(b_s, b_m, b_l, c)
    b_p = gl.exp2(b_s * c - gl.expand_dims(shift(b_m, c), 1))
    b_l += gl.convert_layout(gl.sum(gl.sum(b_p.reshape(fragment_shape(b_s.shape[0], b_s.shape[1])), 1), 2), b_l.type.layout, assert_trivial=True)
    if ANCHORED and MAPPED and C.value.v_stages > 2:
        b_l = border(b_l)
    return dropped_out(b_p, n0, score_args, DROPOUT), b_m, b_l, b_decay


@gluon.jit
def new_maxima(b_s, b_m, b_l, c):
    """Row maxima with those of one more tile, row sums rescaled to them, and the rescale."""
    b_tile_max = gl.max(gl.max(gl.max(b_s.reshape(fragment_shape(b_s.shape[0], b_s.shape[1])), 1), 2), 1)
    b_m_new = gl.maximum(b_m, gl.convert_layout(b_tile_max, b_m.type.layout, assert_trivial=True))
    b_decay = gl.exp2(b_m * c - shift(b_m_new, c))
    b_l = b_l * gl.expand_dims(gl.convert_layout(b_decay, gl.SliceLayout(1, b_l.type.layout), assert_trivial=True), 1)
    return b_m_new, b_l, b_decay


@gluon.jit
def shift(b_m, c):
    """m c, what weights in base 2 are shifted by; 0 for a row that has attended nothing yet: 2^(-inf - 0) = 0, not NaN."""
    return gl.where(b_m == float("-inf"), 0.0, b_m * c)


@gluon.jit
def border(b_l):
    """The row sums; infinite in all rows of a warp if one of them is out of range. Nothing needs that before the epilogue, but ptxas cannot move a vote of the
    warp, and would otherwise move the exp2s behind the wait for V, and the wait for P V in front of them."""
    return gl.inline_asm_elementwise(VOTE_ASM, "=f,f", [b_l], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def column_offsets(b_s):
    return gl.expand_dims(gl.arange(0, b_s.shape[1], gl.SliceLayout(0, b_s.type.layout)), 0)  # [1, BN]


@gluon.jit
def row_offsets(b_s):
    return gl.expand_dims(gl.arange(0, b_s.shape[0], gl.SliceLayout(1, b_s.type.layout)), 1)  # [64, 1]


@gluon.jit
def scored(b_s, n0, score_args, SCORE: gl.constexpr):
    """Scores from q.k, [64, BN], still to be multiplied by scale[1]."""
    i_b, i_h, m0, n_q, n_kv, scale, _, _, score = score_args
    o_q, o_column = m0 + row_offsets(b_s), column_offsets(b_s)
    return apply_score(b_s, scale, i_b, i_h, row_index(o_q, m0 + b_s.shape[0] <= n_q), column_index(n0, o_column, n0 + b_s.shape[1] <= n_kv), score, SCORE)


@gluon.jit
def dropped_out(b_p, n0, score_args, DROPOUT: gl.constexpr):
    """P without what dropout drops, which stays in the row sums: dropout does not change the softmax's denominator."""
    if DROPOUT:
        i_b, i_h, m0, _, _, _, threshold, p_seed, _ = score_args
        b_p = gl.where(dropout_keep(p_seed, threshold, i_b, i_h, m0 + row_offsets(b_p), n0 + column_offsets(b_p)), b_p, 0.0)
    return b_p


@gluon.jit
def rescale_o(b_o, b_decay):
    # The mov is opaque to LLVM, which would otherwise move the multiplication to the end of the previous step, before Q K^T is issued.
    b_decay = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [b_decay], dtype=gl.float32, is_pure=False, pack=1)
    return b_o * gl.expand_dims(gl.convert_layout(b_decay, gl.SliceLayout(1, b_o.type.layout), assert_trivial=True), 1)


@gluon.jit
def as_operand(b_p, dtype: gl.constexpr, C: gl.constexpr):
    """P as the left operand of P V: packed to 16 bits, in the registers where it is."""
    DV: gl.constexpr = C.value.dv
    return gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, wgmma_layout(DV), 2), assert_trivial=True)
