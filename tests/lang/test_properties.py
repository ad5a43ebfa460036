"""What must hold for every program, tried on generated ones."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.generated import captures, function_of, smooth_trees, trees
from tests.support.programs import assert_derives_as_autograd, grid, scores, trace_value, value_of
from tilewise import masks
from tilewise.lang import BoundProgram, Bounds, Interval, derive, interpret, parse, trace_mask, trace_score
from tilewise.lang.types import DTYPE_OF

FEW = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
MANY = settings(FEW, max_examples=300)
SEEDS = st.integers(0, 20)


def run(call: BoundProgram, inputs: dict[str, Tensor]) -> Tensor:
    """The interpreter's value; programs that torch itself refuses to compute (an integer divided by zero) are not examples."""
    try:
        return value_of(call, inputs)
    except RuntimeError as error:
        assume(not any(words in str(error) for words in ("ZeroDivisionError", "negative integer powers", "without overflow")))
        raise


def traced(tree: Any, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> BoundProgram:
    return trace_value(function_of(tree, tensors), dtype)


@FEW
@given(st.sampled_from("ifb").flatmap(lambda kind: trees(kind, 3)), SEEDS, st.sampled_from((torch.float32, torch.float64)))
def test_the_type_of_every_instruction_is_the_interpreters_dtype(tree: Any, seed: int, dtype: torch.dtype) -> None:
    call = traced(tree, captures(seed), dtype)
    inputs = grid() | {"score": scores(dtype, seed)}
    run(call, inputs)
    everything = replace(call.program, results=tuple(range(len(call.program.instructions))))
    for value, instruction in zip(interpret(everything, call, inputs), call.program.instructions, strict=True):
        if isinstance(value, Tensor):
            assert value.dtype == DTYPE_OF[instruction.type.dtype]
            assert instruction.type.level == min(value.dim(), 1) + 1
        else:
            assert instruction.type.level == 0


@FEW
@given(st.sampled_from("ifb").flatmap(lambda kind: trees(kind, 3)), SEEDS)
def test_a_program_is_rebuilt_from_its_text(tree: Any, seed: int) -> None:
    program = traced(tree, captures(seed)).program
    assert parse.__wrapped__(program.text) == program


# -- bounds ----------------------------------------------------------------------------------------------------------

STARTS = st.one_of(st.integers(0, 12), st.integers(0, 12), st.sampled_from((1000, 100_000)))
BOXES = st.tuples(st.integers(0, 2), st.integers(0, 3), STARTS, st.integers(1, 6), STARTS, st.integers(1, 6))
RANGES = st.tuples(st.integers(-20, 20), st.integers(0, 12)).map(lambda ends: (ends[0] / 4, (ends[0] + ends[1]) / 4))


def holds(lo: float, hi: float, values: Tensor) -> bool:
    """Whether every value lies in the interval; Python compares an int with a float exactly."""
    if math.isnan(lo) or math.isnan(hi):
        return True
    if values.is_floating_point() and bool(values.isnan().any()):
        return False
    return lo <= values.min().item() and values.max().item() <= hi


@MANY
@given(st.sampled_from("iffbb").flatmap(lambda kind: trees(kind, 4)), SEEDS, st.lists(BOXES, min_size=3, max_size=3), RANGES)
def test_bounds_hold_every_value_of_the_box(tree: Any, seed: int, boxes: list[tuple[int, ...]], score: tuple[float, float]) -> None:
    call = traced(tree, captures(seed))
    b, h, q, q_size, kv, kv_size = torch.tensor(boxes).double().unbind(1)
    ends = {"b": Interval(b, b), "h": Interval(h, h), "q": Interval(q, q + q_size - 1), "kv": Interval(kv, kv + kv_size - 1)}
    ends["score"] = Interval(*(torch.tensor(end, dtype=torch.float64) for end in score))
    found = Bounds(call, torch.device("cpu")).over(ends)
    lows, highs = (end.expand(len(boxes)) for end in found)
    points = torch.linspace(*score, 7).view(-1, 1, 1, 1, 1)
    for k, (b_at, h_at, q_at, q_count, kv_at, kv_count) in enumerate(boxes):
        inputs = {
            "b": torch.full((1, 1, 1, 1), b_at),
            "h": torch.full((1, 1, 1, 1), h_at),
            "q": torch.arange(q_at, q_at + q_count).view(1, 1, -1, 1),
            "kv": torch.arange(kv_at, kv_at + kv_count),
        }
        values = run(call, inputs | {"score": points})
        if values.dtype == torch.bool:
            values = values.int()
        lo, hi = lows[k].item(), highs[k].item()
        assert holds(lo, hi, values), f"[{lo}, {hi}] does not hold {values.min().item()} .. {values.max().item()} of {call.program.text}"


def decided(call: BoundProgram, q: tuple[int, int], kv: tuple[int, int], b: int = 0, h: int = 0) -> bool | None:
    """True or False everywhere on the box, or None."""
    ends = {"b": (b, b), "h": (h, h), "q": q, "kv": kv}
    box = {name: Interval(*(torch.tensor([float(end)], dtype=torch.float64) for end in pair)) for name, pair in ends.items()}
    lo, hi = Bounds(call, torch.device("cpu")).over(box)
    return bool(lo.item()) if lo.item() == hi.item() else None


def test_bounds_decide_causal_away_from_the_diagonal() -> None:
    call = trace_mask(masks.causal)
    assert decided(call, (128, 255), (0, 127)) is True
    assert decided(call, (0, 127), (128, 255)) is False
    assert decided(call, (128, 255), (128, 255)) is None
    assert decided(call, (127, 127), (0, 127)) is True


def test_bounds_decide_documents_apart_and_within() -> None:
    call = trace_mask(masks.document(lengths=[100, 60, 500, 3000]) & masks.causal)
    assert decided(call, (200, 300), (0, 99)) is False
    assert decided(call, (300, 400), (200, 299)) is True
    assert decided(call, (150, 170), (100, 120)) is None
    assert decided(call, (2000, 2100), (1000, 1100)) is True  # far enough along for the table's blocks
    assert decided(call, (2000, 2100), (300, 400)) is False


# Masks, a box where they hold, a box where they do not.
DECIDED = {
    "window": (masks.sliding_window(64), ((100, 120), (90, 110)), ((100, 120), (300, 400))),
    "prefix": (masks.prefix_lm(50), ((0, 9), (10, 49)), ((60, 69), (70, 90))),
    "padding": (masks.padding(torch.tensor([30, 50])), ((0, 99), (0, 29)), ((0, 99), (30, 40))),
    "neighborhood": (masks.neighborhood((8, 16), (3, 16)), ((16, 31), (16, 31)), ((0, 15), (64, 79))),
    "tiles by floor division": (lambda b, h, q, kv: q // 32 == kv // 32, ((32, 63), (32, 63)), ((32, 63), (64, 95))),
    "tiles by float floor": (lambda b, h, q, kv: torch.floor(q / 32) == torch.floor(kv / 32), ((33, 62), (33, 62)), ((32, 63), (96, 127))),
    "remainder within a period": (lambda b, h, q, kv: kv % 100 < 50, ((0, 9), (110, 140)), ((0, 9), (160, 190))),
    "shift": (lambda b, h, q, kv: q >> 5 >= kv >> 5, ((64, 95), (32, 63)), ((32, 63), (64, 95))),
    "power": (lambda b, h, q, kv: (q - kv) ** 2 <= 100, ((50, 55), (50, 55)), ((50, 55), (80, 90))),
    "negated": (~masks.causal, ((0, 9), (10, 19)), ((10, 19), (0, 9))),
    "float distance": (lambda b, h, q, kv: (q - kv).abs().float() * 0.5 < 10.0, ((50, 55), (50, 55)), ((50, 55), (80, 90))),
    "choice": (lambda b, h, q, kv: torch.where(q < 10, kv < 5, kv > 50), ((20, 30), (60, 70)), ((0, 9), (5, 70))),
    "sum of booleans": (lambda b, h, q, kv: (q < 10) + (kv < 10), ((0, 9), (0, 9)), ((10, 19), (10, 19))),
}


@pytest.mark.parametrize("name", DECIDED)
def test_bounds_decide_the_obvious(name: str) -> None:
    mask, inside, outside = DECIDED[name]
    call = trace_mask(mask)
    assert decided(call, *inside) is True
    assert decided(call, *outside) is False


# -- derivatives -----------------------------------------------------------------------------------------------------


def learned(seed: int) -> dict[str, Tensor]:
    """The float captures in float64, requiring grad; one stays in float32."""
    return {name: t.double().requires_grad_() if t.is_floating_point() and name != "scale" else t for name, t in captures(seed).items()}


@MANY
@given(smooth_trees(4), SEEDS)
def test_derivatives_are_autograds(tree: Any, seed: int) -> None:
    tensors = learned(seed)
    tensors["scale"].requires_grad_()
    call = trace_score((function_of(tree, tensors),), torch.float64)
    inputs = grid() | {"score": scores(torch.float64, seed)}
    run(call, inputs)
    assert_derives_as_autograd(call, inputs)


X = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
TENTHS = torch.full((5,), 0.1, dtype=torch.float64, requires_grad=True)  # of which whole numbers are not quite multiples
TIES = {
    "minimum": lambda s, b, h, q, kv: torch.minimum(s, X[q]),
    "maximum": lambda s, b, h, q, kv: torch.maximum(X[q], X[kv - 2]),
    "maximum of one": lambda s, b, h, q, kv: torch.maximum(s, s),
    "clamp": lambda s, b, h, q, kv: s.clamp(-1.0, 1.0),
    "clamp crossed": lambda s, b, h, q, kv: s.clamp(min=1.0, max=-1.0),
    "clamp to captures": lambda s, b, h, q, kv: s.clamp(min=X[q], max=X[kv - 2]),
    "clamp to captures and numbers": lambda s, b, h, q, kv: X[q].clamp(-1.0, 1.0) * s.clamp(min=X[q], max=1),
    "fmin": lambda s, b, h, q, kv: torch.fmin(s, X[q]),
    "fmax": lambda s, b, h, q, kv: torch.fmax(X[q], X[kv - 2]),
    "relu": lambda s, b, h, q, kv: torch.relu(s),
    "abs": lambda s, b, h, q, kv: s.abs() + X[q].abs(),
    "square": lambda s, b, h, q, kv: s**2 + X[q] ** 2,
    "zeroth power": lambda s, b, h, q, kv: s**0,
    "power of zero": lambda s, b, h, q, kv: X[2].abs() ** s.abs(),
    "power by number": lambda s, b, h, q, kv: 2**s,
    "where by score": lambda s, b, h, q, kv: torch.where(s > 0, s * 0.1, X[q]),
    "one tensor three times": lambda s, b, h, q, kv: s * X[q] + X[kv - 2] * X[q] + X[X[q].long()],
    "one place twice": lambda s, b, h, q, kv: X[q] * X[q] * s,
    "number alone": lambda s, b, h, q, kv: s * 0 + 1.5,
    "without the score": lambda s, b, h, q, kv: X[q] * 2,
    "detached": lambda s, b, h, q, kv: s.detach() * s + X[q].detach(),
    "through float32": lambda s, b, h, q, kv: s.float() * 0.25 + s,
    "remainder of number": lambda s, b, h, q, kv: 5.5 % (s + 10),
    "remainder of score": lambda s, b, h, q, kv: s % 1.5 + s % (X[q] + 3),
    "remainder by a tenth": lambda s, b, h, q, kv: (s + 0.5) % TENTHS[q],
    "floor division": lambda s, b, h, q, kv: s // 1.5 + 5 // (s + 10) + s * 2,
    "rounded": lambda s, b, h, q, kv: torch.round(s * 0.7) + torch.floor(X[q]) + s,
    "through integers": lambda s, b, h, q, kv: s.long() * 0.1 + s,
}


@pytest.mark.parametrize("name", TIES)
def test_derivatives_at_ties_and_corners_are_autograds(name: str) -> None:
    whole = scores(torch.float64).round()
    assert_derives_as_autograd(trace_score((TIES[name],), torch.float64), grid() | {"score": whole})


def test_float64_derivatives_keep_float64_digits() -> None:
    call = trace_score((lambda s, b, h, q, kv: torch.where(q > kv, s * 0.1, s * 0.3) * (1 / 3),), torch.float64)
    found = interpret(derive(call.program, frozenset()).program, call, grid() | {"score": scores(torch.float64)})[0]
    tenths = torch.where(grid()["q"] > grid()["kv"], 1.0, 3.0).double() / 10
    torch.testing.assert_close(found, (tenths / 3).expand_as(found), rtol=1e-14, atol=0)
