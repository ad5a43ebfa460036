"""How the work is split: by shapes alone, so that the result does not depend on the number of threads."""

import torch
from torch import Tensor

from tilewise.core.problem import Problem
from tilewise.engines.cpp.tile_schedule import TileSchedule
from tilewise.lang import derive

MAX_DECODE_QUERIES, MIN_SPLIT_KEYS, MAX_SPLITS = 4, 512, 32  # when a forward is decoding, and how its keys are split
MAX_CHUNKS, MIN_CHUNK_TILES = 16, 2  # backward: chunks of keys over all (batch, kv head); key tiles in each
MAX_COPIES, MAX_COPIES_BYTES = 8, 2**28  # private copies of captures' gradients that every item adds to


def is_decoding(p: Problem) -> bool:
    """Too few queries to fill a tile's lanes. Not if gradients are needed (the backward recomputes scores in the tiled summation order), nor if the map
    itself was given as tiles.
    """
    return p.q_len <= MAX_DECODE_QUERIES and p.given_tiles is None and not any([t.requires_grad for t in (p.query, p.key, p.value)])


def split_count(p: Problem) -> int:
    return max(1, min(p.kv_len // MIN_SPLIT_KEYS, MAX_SPLITS))


def chunk_count(p: Problem, schedule: TileSchedule) -> int:
    return max(1, min(MAX_CHUNKS // (p.batch * p.kv_heads), schedule.rows // MIN_CHUNK_TILES))


# -- gradients of the score's captures ----------------------------------------------------------------------------------


def zeroed_capture_gradients(p: Problem, wanted: frozenset[int]) -> dict[int, Tensor]:
    """Zeros to accumulate the captures' gradients in: [copies, *shape] each."""
    if p.score is None or not wanted:
        return {}
    copies = 1 if _owned_axes(p, wanted) else _private_copies(p, wanted)
    return {k: torch.zeros((copies, *p.score.captures[k].shape), dtype=torch.float64, device=p.device) for k in wanted}


def item_groups(p: Problem, wanted: frozenset[int]) -> list[list[int]]:
    """(batch, kv head) items, grouped so that different groups never add to the same memory; a group runs in order on one thread."""
    count = p.batch * p.kv_heads
    axes = _owned_axes(p, wanted)
    if axes:
        keys = [(k // p.kv_heads if "b" in axes else 0, k % p.kv_heads if "h" in axes else 0) for k in range(count)]
        return [[k for k in range(count) if keys[k] == key] for key in sorted(set(keys))]
    groups = min(_private_copies(p, wanted), count)
    return [list(range(count * g // groups, count * (g + 1) // groups)) for g in range(groups)]


def _owned_axes(p: Problem, wanted: frozenset[int]) -> frozenset[str]:
    """Which of b and h index every load of a wanted capture: items that differ in them add to different elements."""
    assert p.score is not None
    derivative = derive(p.score.program, wanted)
    owned = frozenset("bh")
    for site in derivative.sites:
        instructions = [derivative.program.instructions[derivative.program.results[k]] for k in site.indices]
        owned &= {i.attr for i in instructions if i.op == "index"}
    sizes = {"b": p.batch, "h": p.kv_heads}
    return frozenset(a for a in owned if sizes[a] > 1)


def _private_copies(p: Problem, wanted: frozenset[int]) -> int:
    assert p.score is not None
    size = 8 * sum(p.score.captures[k].numel() for k in wanted)
    return max(1, min(MAX_COPIES, p.batch * p.kv_heads, MAX_COPIES_BYTES // max(size, 1)))
