"""Hardware named barriers (bar.sync, bar.arrive) of the Hopper kernels, in one table: a thread block has 16, of which Triton itself uses 0 to 4.

A barrier is complete when all its threads have arrived or synced; who only arrives does not wait. Consumers release stages this way: an
mbarrier's arrive costs a whole bar.sync of the warpgroup.
"""

COUNT, OURS = 16, 5  # barriers of a thread block; the first that Triton leaves alone

# Forward. A warpgroup's turn to issue products; stages of K and V released by the consumers; Q released, by a barrier that the others leave.
FWD_TURN = 5  # + warpgroup
FWD_K_FREE = 8  # + stage
FWD_V_FREE = 12  # + stage
FWD_Q_FREE = {2: 7, 3: 11}  # by consumer warpgroups: with three of them there are three stages of K at most

# Backward, head dims up to 128.
BWD_STAGE_FREE = 8  # + stage: who is done with it last arrives (the 256 consumer threads), the load warp syncs
BWD_DQ_STAGED = 10  # + warpgroup: 128 threads arrive, the store warp syncs
BWD_DQ_SENT = 12  # + warpgroup: the store warp arrives, 128 threads sync
BWD_LOOP_DONE = 14  # the 256 consumer threads sync
BWD_DS_READY = 15  # so they do

# Backward, wider heads. Its stages are released as above.
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
