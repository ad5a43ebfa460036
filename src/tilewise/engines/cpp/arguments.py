"""The kernels' structs (kernel/arguments.h), packed: what is the same in calls that are alike, and what differs from call to call."""

from typing import Any

from torch import Tensor

from tilewise.core.problem import Problem
from tilewise.engines.cpp import threads
from tilewise.engines.cpp.mods import mask_unit, program_arguments, score_unit
from tilewise.engines.cpp.tile_schedule import TileSchedule
from tilewise.engines.dropout import output_scale, places_key, threshold

# Every field has 8 bytes.
TENSOR = "5q"
PROBLEM = f"=9q{3 * TENSOR}12q12qqdd6q5q"
FORWARD, FORWARD_CALL = f"{PROBLEM}{TENSOR}7q", "=13q"
BACKWARD, BACKWARD_CALL = f"{PROBLEM}{2 * TENSOR}22q", "=21q"


def problem_values(p: Problem, schedule: TileSchedule) -> tuple[list[Any], Any]:
    """The kernel's `Problem` as numbers, and the objects it points into, which must outlive the call. What is 0 here is set for every call: threads, the
    addresses of tensors, the seed."""
    mask, score = program_arguments(p.mask, mask_unit(p)), program_arguments(p.score, score_unit(p))
    placed = places_key(p)
    values = [
        threads.pool(),
        0,
        p.batch,
        p.heads,
        p.kv_heads,
        p.q_len,
        p.kv_len,
        p.head_dim,
        p.v_dim,
        *laid_out(p.query),
        *laid_out(p.key),
        *laid_out(p.value),
        *schedule.values,
        *mask.values,
        *score.values,
        0,
        float(p.scale),
        output_scale(p),
        threshold(p.dropout_p),
        0,
        *((0,) * 4 if placed is None else placed),
        *_pages(p),
    ]
    return values, (mask, score, schedule, p.dropout_places)


def _pages(p: Problem) -> tuple[int, ...]:
    """The kernel's `Pages`. A call's key covers the addresses."""
    if p.pages is None:
        return (0,) * 5
    return p.pages.table.data_ptr(), p.pages.table.stride(0), p.pages.size, p.key.shape[0], p.pages.lengths.data_ptr() if p.pages.one_sequence else 0


def laid_out(t: Tensor) -> tuple[int, ...]:
    """The kernel's `Tensor`, without its address."""
    return (0, *t.stride())


def address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
