"""Score functions whose places come in two parts, as the Hopper kernels call them, beside those that take them whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tilewise import scores
from tilewise.engines.triton.mods import mod_arguments, score_of, slope_of
from tilewise.problem import Options, make_problem

QUERIES, KEYS, TILE = 200, 300, 64
SLOPES = torch.tensor([0.25, 0.0625])
TABLE = torch.linspace(-1.0, 1.0, 2 * 41).view(2, 41)

SCORES: dict[str, Callable[..., Any]] = {
    "alibi": scores.alibi(SLOPES),
    "distance decay": scores.distance_decay(0.125),
    "distance decay by head": scores.distance_decay(SLOPES),
    "softcap of alibi": lambda s, b, h, q, kv: 5.0 * torch.tanh((s + SLOPES[h] * (kv - q)) / 5.0),
    "relative bias": scores.relative_bias(TABLE),
    "a wave over keys": lambda s, b, h, q, kv: s + torch.sin(kv * 0.5),
    "queries alone": lambda s, b, h, q, kv: s * (q.float() + 1.0),
    "a negated sum": lambda s, b, h, q, kv: s + (-(q + kv - 7)) * 0.25,
    "a sum with a load": lambda s, b, h, q, kv: s + (kv - q + TABLE[h, kv % 41].int()).float() * SLOPES[h],
    "extremes": lambda s, b, h, q, kv: s + torch.maximum(kv - q, q - 30).float() * 0.5,
    "integers stay integers": lambda s, b, h, q, kv: s + ((q - kv) // 3) % 5,
    "two distances": lambda s, b, h, q, kv: s + (kv - q) * (q - kv) * 0.001,
}


@triton.jit
def both(p_whole, p_parts, p_score, h, m0, n0, score, WHOLE: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):
    o_row, o_column = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    place = o_row * TILE + o_column
    b_s = tl.load(p_score + place)
    q, kv = m0 + o_row, n0 + o_column
    b_whole = WHOLE(b_s, 0, h, q, kv, score[0], score[1], score[2], score[3])
    b_parts = PARTS(b_s, 0, h, (q, q & 0), (n0 + (o_column & 6), o_column & ~6), score[0], score[1], score[2], score[3])
    tl.store(p_whole + place, b_whole + b_s * 0)
    tl.store(p_parts + place, b_parts + b_s * 0)


@pytest.mark.parametrize("function", [score_of, slope_of])
@pytest.mark.parametrize("name", SCORES)
def test_parts_are_the_whole(name: str, function: Callable[..., Any]) -> None:
    q, kv = (torch.zeros((1, 2, n, 16), dtype=torch.float16) for n in (QUERIES, KEYS))
    p = make_problem(q, kv, kv, None, SCORES[name], Options())[0]
    whole, parts = (function(p, in_parts=flag) for flag in (False, True))
    if whole is None:  # a score that only adds has no slope
        assert parts is None
        return
    score = torch.randn((TILE, TILE), generator=torch.Generator().manual_seed(0))
    for head, m0, n0 in ((0, 0, 0), (1, 64, 128), (1, 128, 192)):
        found = torch.empty((2, TILE, TILE))
        both[(1,)](found[0], found[1], score, head, m0, n0, mod_arguments(p)["score"], WHOLE=whole.function(), PARTS=parts.function(), TILE=TILE)
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-4)
    assert name in ("queries alone",) or parts.source != whole.source


def test_places_past_the_end_load_nothing_outside() -> None:
    """Without a clamp in the kernel the load itself keeps its index inside."""
    bias = torch.arange(float(KEYS))
    q, kv = (torch.zeros((1, 2, n, 16), dtype=torch.float16) for n in (QUERIES, KEYS))
    p = make_problem(q, kv, kv, None, lambda s, b, h, q, kv: s + bias[kv], Options())[0]
    whole, parts = (score_of(p, in_parts=flag) for flag in (False, True))
    assert whole is not None and parts is not None
    assert "tl.minimum" in parts.source and "tl.minimum" not in whole.source
