"""What prepared launches are known by: everything about a problem but addresses and contents."""

from typing import Any

import torch

from tilewise import masks, scores
from tilewise.core.pages import Pages
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.gpu.structure import structure_key
from tilewise.tiles import tile_map


def problem(
    *,
    shape: tuple[int, ...] = (2, 4, 64, 16),
    dtype: torch.dtype = torch.float32,
    kv_heads: int = 4,
    shift: int = 0,
    transposed: bool = False,
    window: int = 5,
    limit: float = 0.5,
    ids: Any = None,
    bias: Any = None,
    sinks: Any = None,
    mask: Any = None,
    options: Options | None = None,
) -> Problem:
    """One that every change below makes another of."""

    def tensor(heads: int) -> torch.Tensor:
        size = (shape[0], heads, *shape[2:])
        t = torch.randn(torch.Size(size).numel() + shift, dtype=dtype)[shift:]
        return t.view(size[0], size[2], size[1], size[3]).transpose(1, 2) if transposed else t.view(size)

    ids = torch.arange(shape[2]) // 7 if ids is None else ids
    bias = torch.zeros(shape[2]) if bias is None else bias
    given = (lambda b, h, q, kv: (ids[q] == ids[kv]) & (q - kv < window)) if mask is None else mask
    changes = [lambda s, b, h, q, kv: torch.where(s > limit, s, s + bias[q]), *([] if sinks is None else [scores.sinks(sinks)])]
    query, key, value = tensor(shape[1]), tensor(kv_heads), tensor(kv_heads)
    return make_problem(query, key, value, given, changes, options or Options(enable_gqa=True))[0]


CHANGES: dict[str, dict[str, Any]] = {
    "batch": {"shape": (1, 4, 64, 16)},
    "heads": {"shape": (2, 8, 64, 16)},
    "key heads": {"kv_heads": 2},
    "length": {"shape": (2, 4, 80, 16)},
    "head dim": {"shape": (2, 4, 64, 32)},
    "dtype": {"dtype": torch.float64},
    "strides": {"transposed": True},
    "alignment": {"shift": 1},
    "a number of the mask": {"window": 6},
    "a number of the score": {"limit": 0.25},
    "a zero's sign": {"limit": 0.0},
    "a negative zero": {"limit": -0.0},
    "a capture's dtype": {"ids": torch.arange(64, dtype=torch.int32) // 7},
    "a capture's shape": {"ids": torch.arange(128) // 7},
    "a capture's strides": {"ids": (torch.arange(128) // 7)[::2]},
    "the score's capture": {"bias": torch.zeros(64, dtype=torch.float64)},
    "sinks": {"sinks": torch.zeros(4)},
    "sinks of another dtype": {"sinks": torch.zeros(4, dtype=torch.float64)},
    "sinks elsewhere in 16 bytes": {"sinks": torch.zeros(5)[1:]},
    "another mask": {"mask": masks.causal},
    "a grid": {"mask": masks.neighborhood((8, 8), 3)},
    "a map": {"mask": tile_map(masks.causal, q_len=64, kv_len=64, tile=(32, 32))},
    "a map of other tiles": {"mask": tile_map(masks.causal, q_len=64, kv_len=64, tile=(16, 32))},
    "scale": {"options": Options(0.3, enable_gqa=True)},
    "dropout": {"options": Options(dropout_p=0.1, enable_gqa=True, seed=3)},
    "more dropout": {"options": Options(dropout_p=0.2, enable_gqa=True, seed=3)},
    "deterministic": {"options": Options(deterministic=True, enable_gqa=True)},
    "row maxima": {"options": Options(max_scores=True, enable_gqa=True)},
}


def test_whatever_launches_depend_on_makes_another_structure() -> None:
    keys = [structure_key(problem()), *[structure_key(problem(**change)) for change in CHANGES.values()]]
    assert len(set(keys)) == len(CHANGES) + 1


def test_pages_are_part_of_it() -> None:
    def paged(
        rows: int = 16, stored: torch.dtype = torch.float16, most: int = 4, sequences: int = 2, all_attended: bool = True, fill: int = 0, v_scale: float = 1.0
    ) -> Any:
        pages = torch.zeros(6, 2, rows, 16, dtype=stored)
        found = Pages(torch.full((2, most), fill, dtype=torch.int32), rows, torch.full((sequences,), fill, dtype=torch.int32), all_attended, v_scale)
        return structure_key(make_problem(torch.zeros(2, 4, 1, 16).half(), pages, pages, masks.causal, None, Options(), found)[0])

    changes: list[dict[str, Any]] = [{"rows": 32}, {"stored": torch.float8_e5m2}, {"most": 5}, {"sequences": 4}, {"all_attended": False}, {"v_scale": 0.5}]
    assert len({paged(), *[paged(**change) for change in changes]}) == len(changes) + 1
    assert paged(fill=1) == paged()  # other tables, other contents


def test_addresses_and_contents_are_no_part_of_it() -> None:
    ids = torch.zeros(64, dtype=torch.int64)
    first = problem(ids=ids)
    ids += 1
    others = [problem(ids=ids), problem(), problem(bias=torch.ones(64)), problem(mask=None)]
    assert {structure_key(p) for p in [first, *others]} == {structure_key(first)}


def test_whether_tf32_is_allowed_is_part_of_it() -> None:
    before, precision = structure_key(problem()), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert structure_key(problem()) != before
    finally:
        torch.set_float32_matmul_precision(precision)
