"""What is prepared once for all problems of one structure: kernels looked up, tile sizes fitted, everything packed but addresses.

The plan's structure layer for passes. A training step with new documents, a new mask object or another batch of the same sizes finds its passes here.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilewise.core.map_cache import exact
from tilewise.core.problem import Problem
from tilewise.core.tf32 import allows_tf32
from tilewise.engines.gpu import tuning
from tilewise.engines.gpu.device_map import FoundOnce, is_made_on_device
from tilewise.engines.gpu.launch import InterpretedLaunch, PreparedLaunch
from tilewise.lang import BoundProgram

MAX_STRUCTURES = 512
AnyPass = TypeVar("AnyPass", bound="Pass")
MaybePass = TypeVar("MaybePass", bound="Pass | None")


class Pass:
    """The launches of a forward or a backward: prepared for a structure by __init__, ready to run for problems of that structure once they are bound."""

    def bind(self: AnyPass, p: Problem) -> AnyPass:
        """The same pass with the captures of this problem, the tile schedule that follows from their contents, and its places in a larger problem."""
        bound = object.__new__(type(self))
        find, for_stream = FoundOnce(), is_made_on_device(p)  # GpuPlan._contents
        for name, value in vars(self).items():
            bound.__dict__[name] = value.bind(p, find, for_stream) if isinstance(value, (PreparedLaunch, InterpretedLaunch)) else value
        find.publish()
        return bound


_prepared: dict[Hashable, Pass] = {}


def prepared(name: Hashable, p: Problem, make: Callable[[], MaybePass]) -> MaybePass:
    """The pass of this name for problems like this one, prepared now or earlier, and not bound; None if `make` has none."""
    key = (name, structure_key(p), tuning.state())
    found: Any = _prepared.pop(key, None) or make()
    if found is not None:
        while len(_prepared) >= MAX_STRUCTURES:
            _prepared.pop(next(iter(list(_prepared))), None)  # a list: other threads may add to it meanwhile
        _prepared[key] = found  # the last to be dropped
    made: MaybePass = found
    return made


def structure_key(p: Problem) -> tuple[Any, ...]:
    """What prepared launches depend on: everything about a problem but addresses, and what its tensors contain.

    Kernels depend on dtypes, alignment, constants; packed numbers on shapes, strides, the programs' numbers, scale and dropout; schedules' sizes and strides on
    shapes, on what the mask looks at, and on the geometry of given tiles; how work is grouped on how many of a row can be chosen. Of a part of a larger
    problem, kernels depend on the dtype of its results and on whether there are places, packed numbers on how many batch elements and heads come before it.
    How many programs a persistent kernel has depends on the multiprocessors that are busy.
    Of pages, kernels depend on their dtype and size and on whether the mask must be asked, packed numbers on the form of the table, the number of
    sequences and the scale of values. The tensors of a backward are part of its name (plan.backward_name).
    """
    tiles, places, pages = p.tiles, p.dropout_places, p.pages
    return (
        p.device,
        p.dtype,
        p.dtype == torch.float32 and allows_tf32(),
        *[(t.shape, t.stride(), t.data_ptr() & 15) for t in (p.query, p.key, p.value)],
        _program_key(p.mask),
        _program_key(p.score),
        None if tiles is None else (tiles.geometry, tiles.given, None if tiles.chosen is None else tiles.chosen.most),
        _vector_key(p.sinks),
        _vector_key(p.seed),
        *exact((p.scale, p.dropout_p)),
        p.deterministic,
        p.max_scores,
        p.grid,
        p.partial,
        p.busy_sms,
        None if places is None else (places.batch, places.head),
        None if pages is None else (p.key.dtype, pages.size, pages.table.shape, pages.table.stride(), pages.lengths.shape, pages.all_attended, pages.v_scale),
    )


def _program_key(bound: BoundProgram | None) -> tuple[Any, ...] | None:
    if bound is None:
        return None
    return bound.program.text, bound.ints, exact(bound.floats), tuple([(t.dtype, t.shape, t.stride()) for t in bound.captures])


def _vector_key(t: Tensor | None) -> tuple[Any, ...] | None:
    return None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() & 15)
