"""Numbers taken out of a score's program, first and last: what they and the rest are together is the score."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.generated import captures, function_of, smooth_trees
from tests.support.programs import grid, scores, trace_value, value_of
from tilewise.lang import BoundProgram, factored
from tilewise.scores import softcap

TABLE = torch.tensor([1.5, 2.5])

# score -> factor, gain, and how many instructions are left
TAKEN: dict[str, tuple[Callable[..., Any], float, float, int]] = {
    "softcap": (softcap(30.0), 1 / 30, 30.0, 2),
    "softcap, the other way round": (lambda s, b, h, q, kv: torch.tanh(s * 0.25) * 4, 0.25, 4.0, 2),
    "softcap of 1, which is the same program": (softcap(1.0), 1.0, 1.0, 2),
    "a large softcap": (softcap(2000.0), 1 / 2000, 2000.0, 2),
    "only a number": (lambda s, b, h, q, kv: s * 3, 3.0, 1.0, 1),
    "numbers one after the other": (lambda s, b, h, q, kv: 2.0 * (torch.sin(3.0 * s / 4.0) / 8.0), 0.75, 0.25, 2),
    "a negative factor": (lambda s, b, h, q, kv: torch.tanh(s * -2.0), -2.0, 1.0, 2),
    "a product after a sum": (lambda s, b, h, q, kv: (s + TABLE[h]) * 0.5, 1.0, 0.5, 4),
}
LEFT: dict[str, Callable[..., Any]] = {
    "a negative gain": lambda s, b, h, q, kv: torch.tanh(s) * -2.0,
    "the score used twice": lambda s, b, h, q, kv: torch.tanh(s * 2.0) + s,
    "a number that is learned": lambda s, b, h, q, kv: torch.tanh(s * TABLE[h]),
    "a number divided by the score": lambda s, b, h, q, kv: 2.0 / (1.0 + s),
    "a gain alone, of which the derivative would be much smaller": lambda s, b, h, q, kv: 50.0 * torch.tanh((s + TABLE[h]) / 50.0),
    "a factor alone": lambda s, b, h, q, kv: torch.tanh(s * 20.0) + TABLE[h],
    "a number beyond bounds": lambda s, b, h, q, kv: torch.tanh(s * 1e-9) * 1e9,
    "division by zero": lambda s, b, h, q, kv: torch.tanh(s / 0.0),
    "no score at all": lambda s, b, h, q, kv: TABLE[h] + q,
}


def assert_same(call: BoundProgram, inputs: dict[str, Tensor]) -> None:
    factor, rest, gain = factored(call)
    wanted = torch.as_tensor(value_of(call, inputs))
    found = gain * torch.as_tensor(value_of(rest, inputs | {"score": factor * inputs["score"]}))
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", TAKEN)
def test_numbers_are_taken_out(name: str) -> None:
    function, factor, gain, left = TAKEN[name]
    call = trace_value(function, torch.float64)
    found = factored(call)
    assert (found.factor, found.gain) == pytest.approx((factor, gain))
    assert len(found.call.program.instructions) == left
    assert_same(call, grid() | {"score": scores(torch.float64, 0)})


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_a_number_of_the_score_stays(name: str) -> None:
    call = trace_value(LEFT[name], torch.float64)
    found = factored(call)
    assert (found.factor, found.gain) == (1.0, 1.0) and found.call is call


NUMBERS = st.sampled_from((0.5, 2, 3.0, -1.5, 0.25, 1e9))


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(smooth_trees(2), st.lists(NUMBERS, max_size=3), st.lists(NUMBERS, max_size=3), st.integers(0, 20))
def test_together_they_are_the_score(tree: Any, first: list[float], last: list[float], seed: int) -> None:
    inner = function_of(tree, captures(seed))

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        for n in first:
            s = s * n
        s = inner(s, b, h, q, kv)
        for n in last:
            s = n * s
        return s

    assert_same(trace_value(score, torch.float64), grid() | {"score": scores(torch.float64, seed)})
