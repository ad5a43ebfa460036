"""Functions that are traced as several operations: torch's values, and its derivatives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import tilewise as tw
from tests.support.programs import assert_derives_as_autograd, grid, scores, trace_value
from tilewise.lang import INDICES, evaluate

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "softplus": lambda s, b, h, q, kv: functional.softplus(s),
    "softplus of large values": lambda s, b, h, q, kv: functional.softplus(s * 40.0),
    "softplus with a slope": lambda s, b, h, q, kv: functional.softplus(s, beta=2.0, threshold=3.0),
    "logsigmoid": lambda s, b, h, q, kv: functional.logsigmoid(s * 30.0),
    "gelu": lambda s, b, h, q, kv: functional.gelu(s),
    "gelu by tanh": lambda s, b, h, q, kv: functional.gelu(s, approximate="tanh"),
    "elu": lambda s, b, h, q, kv: functional.elu(s * 60.0, 0.5),
    "leaky_relu": lambda s, b, h, q, kv: functional.leaky_relu(s, 0.1),
    "hardtanh": lambda s, b, h, q, kv: functional.hardtanh(s, -2.0, 1.5),
    "masked_fill": lambda s, b, h, q, kv: s.masked_fill(q < kv, -1.0),
    "isfinite": lambda s, b, h, q, kv: torch.where(torch.isfinite(1.0 / s), s, 0.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_derivatives(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    call, inputs = trace_value(function, dtype), grid() | {"score": scores(dtype)}
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-12}
    score = inputs["score"].clone().requires_grad_()
    wanted, found = function(score, *[inputs[i] for i in INDICES]), evaluate(call, inputs | {"score": score})
    torch.testing.assert_close(found, wanted, **close)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), score), torch.autograd.grad(wanted.sum(), score), **close)
    assert_derives_as_autograd(call, inputs)


def test_in_place_is_refused() -> None:
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(tw.TraceError, match="elu with inplace=True changes a value in place"):
        tw.attention(q, q, q, score=lambda s, b, h, q, kv: functional.elu(s, inplace=True))


def test_others_say_what_to_write() -> None:
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(tw.TraceError, match=r"'hypot' is not part of the mask and score language; write torch\.sqrt\(x \* x \+ y \* y\)"):
        tw.attention(q, q, q, score=lambda s, b, h, q, kv: torch.hypot(s, s))
