"""Hardware named barriers (bar.sync, bar.arrive) of the Hopper kernels, in one table. A thread block has 16; Triton itself uses 0 to 4.

A barrier completes when all its threads have arrived or synced; threads that only arrive do not wait. Consumers release stages by named
barriers and not by mbarriers, because Triton puts a bar.sync of the whole warpgroup before an mbarrier's arrive.
"""

COUNT, OURS = 16, 5  # barriers of a thread block; the first one that Triton does not use
WARP, WARPGROUP = 32, 128  # threads

# Forward. The consumers arrive on the *_FREE barriers and the producer warp syncs.
FWD_TURN = 5  # + warpgroup: ping-pong, its turn to issue wgmma; the warpgroup before it arrives, it syncs itself
FWD_K_FREE = 8  # + stage: K's stage is released
FWD_V_FREE = 12  # + stage: V's stage is released
FWD_Q_FREE = {2: 7, 3: 11}  # by number of consumer warpgroups; Q's buffer is released. 11 is free with three of them: K then has at most three stages

# Backward, head dims up to 128.
BWD_STAGE_FREE = 8  # + stage of Q and dO: the 256 consumer threads arrive, the load warp syncs
BWD_DQ_STAGED = 10  # + warpgroup: its 128 threads arrive, the store warp syncs
BWD_DQ_SENT = 12  # + warpgroup: the store warp arrives, its 128 threads sync
BWD_LOOP_DONE = 14  # the 256 consumer threads sync
BWD_DS_READY = 15  # the 256 consumer threads sync

# Backward, head dims above 128. BWD_STAGE_FREE is used here too, but it is the store warp that arrives.
WIDE_WARPGROUP = 5  # + warpgroup: its 128 threads sync
WIDE_DQ_STAGED = 10  # + 2 * warpgroup + stage: its 128 threads arrive, the store warp syncs
WIDE_P_READY = 14  # the second warpgroup arrives, the first syncs
WIDE_CONSUMERS = 15  # the 256 consumer threads sync


def used_by_forward(warpgroups: int, k_stages: int, v_stages: int) -> list[int]:
    turns = [FWD_TURN + w for w in range(warpgroups)]
    return [*turns, FWD_Q_FREE[warpgroups], *[FWD_K_FREE + s for s in range(k_stages)], *[FWD_V_FREE + s for s in range(v_stages)]]


def used_by_backward(is_wide: bool, stages: int) -> list[int]:
    free = [BWD_STAGE_FREE + s for s in range(stages)]
    if is_wide:
        return [WIDE_WARPGROUP, WIDE_WARPGROUP + 1, *free, *[WIDE_DQ_STAGED + n for n in range(2 * stages)], WIDE_P_READY, WIDE_CONSUMERS]
    return [*free, BWD_DQ_STAGED, BWD_DQ_STAGED + 1, BWD_DQ_SENT, BWD_DQ_SENT + 1, BWD_LOOP_DONE, BWD_DS_READY]
