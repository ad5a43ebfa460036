"""Functions that are traced as several operations: torch's values, and its derivatives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import tilewise as tw
from tests.support.programs import assert_derives_as_autograd, grid, scores, trace_value
from tilewise.lang import INDICES, evaluate

BOUNDS, ZERO = torch.arange(5) / 4 - 0.5, torch.tensor(0.0)  # which the scores, quarters, meet

PICKED = torch.tensor([1, 3])
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
    "relu6": lambda s, b, h, q, kv: functional.relu6(s * 2.0),
    "hardswish": lambda s, b, h, q, kv: functional.hardswish(s * 0.9),
    "mish": lambda s, b, h, q, kv: functional.mish(s),
    "softsign": lambda s, b, h, q, kv: functional.softsign(s),
    "celu": lambda s, b, h, q, kv: functional.celu(s * 30.0, 2.0),
    "selu": lambda s, b, h, q, kv: functional.selu(s * 30.0),
    "frac": lambda s, b, h, q, kv: torch.frac(s * 0.7),
    "nan_to_num": lambda s, b, h, q, kv: torch.nan_to_num(torch.where(q > kv, s, (h - 1) / (h * 0.0)), 1.5, posinf=3.0) + torch.nan_to_num(q),
    "lerp": lambda s, b, h, q, kv: torch.lerp(s, s * s, 0.3) + torch.lerp(s, -s, s) + s.lerp(s * 2, 0.75),
    "addcmul, addcdiv": lambda s, b, h, q, kv: torch.addcmul(s, s, s * 2, value=0.5) + torch.addcdiv(s, s, s * s + 1) + s.addcmul(q, kv),
    "xlogy": lambda s, b, h, q, kv: torch.xlogy(s, s * s + 0.5) + torch.special.xlogy(q, kv),
    "logaddexp2": lambda s, b, h, q, kv: torch.logaddexp2(s, -s * 2),
    "degrees": lambda s, b, h, q, kv: torch.deg2rad(s) + torch.rad2deg(s),
    "fmin, fmax": lambda s, b, h, q, kv: torch.fmin(s, s * s - 1.1) * torch.fmax(s, -s * 0.5 + 0.1),
    "fmin, fmax at ties": lambda s, b, h, q, kv: torch.fmin(s, s.round()) - 3.0 * torch.fmax(s, BOUNDS[q]),
    "clamp": lambda s, b, h, q, kv: s.clamp(-1.0, 1.5) - 3.0 * torch.clamp_min(s, 0.0) + 5.0 * s.clip(max=2),
    "clamp to tensors": lambda s, b, h, q, kv: s.clamp(BOUNDS[q], BOUNDS[q] + 1.0) - 3.0 * s.clamp(min=ZERO) + 5.0 * torch.clamp_max(s, s.round()),
    "isclose": lambda s, b, h, q, kv: torch.where(torch.isclose(s, s.round(), atol=0.3) | torch.isposinf(1.0 / s) | torch.isneginf(s), s, 0.5 * s),
    "isfinite": lambda s, b, h, q, kv: torch.where(torch.isfinite(1.0 / s), s, 0.0),
    "isin": lambda s, b, h, q, kv: torch.where(torch.isin(kv, PICKED) ^ torch.isin(q, PICKED, invert=True) ^ torch.isin(h, 1), s, 0.5 * s),
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
