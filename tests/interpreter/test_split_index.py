"""Score functions whose places come in two parts, as the Hopper kernels call them, beside those that take them whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tilewise import scores
from tilewise.core.problem import Options, make_problem
from tilewise.engines.gpu.mods import dscore_of, mod_arguments, score_of

QUERIES, KEYS, TILE = 200, 300, 64
SLOPES = torch.tensor([0.25, 0.0625])
TABLE = torch.linspace(-1.0, 1.0, 2 * 41).view(2, 41)
DISTANCES = torch.linspace(-1.0, 1.0, 2 * (QUERIES + KEYS - 1)).view(2, -1)
BIAS = torch.linspace(-1.0, 1.0, KEYS)
DENSE = torch.linspace(-1.0, 1.0, QUERIES * KEYS).view(QUERIES, KEYS)

SCORES: dict[str, Callable[..., Any]] = {
    "alibi": scores.alibi(SLOPES),
    "distance decay": scores.distance_decay(0.125),
    "distance decay by head": scores.distance_decay(SLOPES),
    "softcap of alibi": lambda s, b, h, q, kv: 5.0 * torch.tanh((s + SLOPES[h] * (kv - q)) / 5.0),
    "relative bias": scores.relative_bias(TABLE),
    "a table of all distances": lambda s, b, h, q, kv: s + DISTANCES[h, q - kv + KEYS - 1],
    "a bias of keys": lambda s, b, h, q, kv: s + BIAS[kv],
    "a dense bias": lambda s, b, h, q, kv: s * DENSE[q, kv],
    "a wave over keys": lambda s, b, h, q, kv: s + torch.sin(kv * 0.5),
    "queries alone": lambda s, b, h, q, kv: s * (q.float() + 1.0),
    "a negated sum": lambda s, b, h, q, kv: s + (-(q + kv - 7)) * 0.25,
    "a sum with a load": lambda s, b, h, q, kv: s + (kv - q + TABLE[h, kv % 41].int()).float() * SLOPES[h],
    "extremes": lambda s, b, h, q, kv: s + torch.maximum(kv - q, q - 30).float() * 0.5,
    "integers stay integers": lambda s, b, h, q, kv: s + ((q - kv) // 3) % 5,
    "two distances": lambda s, b, h, q, kv: s + (kv - q) * (q - kv) * 0.001,
}


@triton.jit
def both(p_whole, p_parts, p_score, h, m0, n0, n_q, n_kv, score, WHOLE: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):
    o_row, o_column = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    place = o_row * TILE + o_column
    b_s = tl.load(p_score + place)
    q, kv = m0 + o_row, n0 + o_column
    b_whole = WHOLE(b_s, 0, h, tl.minimum(q, n_q - 1), tl.minimum(kv, n_kv - 1), score[0], score[1], score[2], score[3])
    queries, keys = (q, q & 0, m0 + TILE <= n_q), (n0 + (o_column & 6), o_column & ~6, n0 + TILE <= n_kv)
    b_parts = PARTS(b_s, 0, h, queries, keys, score[0], score[1], score[2], score[3])
    tl.store(p_whole + place, b_whole + b_s * 0)
    tl.store(p_parts + place, b_parts + b_s * 0)


@pytest.mark.parametrize("function", [score_of, dscore_of])
@pytest.mark.parametrize("name", SCORES)
def test_parts_are_the_whole(name: str, function: Callable[..., Any]) -> None:
    q, kv = (torch.zeros((1, 2, n, 16), dtype=torch.float16) for n in (QUERIES, KEYS))
    p = make_problem(q, kv, kv, None, SCORES[name], Options())[0]
    whole, parts = (function(p, split_index=flag) for flag in (False, True))
    if whole is None:  # a score that only adds has no slope
        assert parts is None
        return
    score = torch.randn((TILE, TILE), generator=torch.Generator().manual_seed(0))
    for head, m0, n0 in ((0, 0, 0), (1, 64, 128), (1, 128, 192), (0, 192, 256)):  # the last tile goes past both ends
        found = torch.empty((2, TILE, TILE))
        arguments = (head, m0, n0, QUERIES, KEYS, mod_arguments(p)["score"])
        both[(1,)](found[0], found[1], score, *arguments, WHOLE=whole.function(), PARTS=parts.function(), TILE=TILE)
        wanted = found[:, : QUERIES - m0, : KEYS - n0]
        torch.testing.assert_close(wanted[1], wanted[0], rtol=1e-5, atol=1e-4)
    assert name in ("queries alone",) or parts.source != whole.source


def test_loads_are_kept_inside_only_past_the_end() -> None:
    q, kv = (torch.zeros((1, 2, n, 16), dtype=torch.float16) for n in (QUERIES, KEYS))
    p = make_problem(q, kv, kv, None, SCORES["a bias of keys"], Options())[0]
    whole, parts = (score_of(p, split_index=flag) for flag in (False, True))
    assert whole is not None and parts is not None and "tl.minimum" not in whole.source
    inside, anywhere = parts.source.split("def anywhere")
    assert "tl.minimum" not in inside and "tl.minimum" in anywhere
    plain = score_of(make_problem(q, kv, kv, None, SCORES["alibi"], Options())[0], split_index=True)
    assert plain is not None and "anywhere" not in plain.source
