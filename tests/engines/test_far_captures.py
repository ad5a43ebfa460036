"""Views of few elements that lie far apart: what generated code computes their offsets with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.codegen import layouts_of
from tilewise.engines.cpp import mods as cpp
from tilewise.engines.cuda import mods as cuda
from tilewise.engines.gpu import mods as gpu

# The text of a score by each generator, and the 64-bit type of its language.
TEXTS: dict[str, tuple[Callable[[Problem], Any], str]] = {
    "triton": (gpu.score_of, ".to(tl.int64)"),
    "cuda": (cuda.score_of, "(i64)"),
    "cpp": (cpp.score_unit, "(i64)"),
}


def table(row: int) -> Tensor:
    """[2, 8], with so many elements between its rows."""
    return torch.empty_strided((2, 8), (row, 1), device="meta")


def added(bias: Tensor) -> Any:
    return lambda s, b, h, q, kv: s + bias[h, kv]


@pytest.mark.parametrize(("row", "wide"), [(8, False), (2**31 - 8, False), (2**31 - 7, True), (2**31, True), (2**40, True)])
def test_offsets_that_need_64_bits(row: int, wide: bool) -> None:
    assert [layout.wide for layout in layouts_of([table(row), table(row)[:1], table(row)[:0]])] == [wide, False, False]


@pytest.mark.parametrize("language", TEXTS)
def test_every_generator_looks_at_offsets(language: str) -> None:
    write, wide = TEXTS[language]
    counts = []
    for row in (8, 2**31):
        query = torch.empty((1, 2, 8, 16), dtype=torch.bfloat16, device="meta")
        p = make_problem(query, query, query, None, added(table(row)), Options())[0]
        counts.append(write(p).source.count(wide))
    assert counts[0] < counts[1]
