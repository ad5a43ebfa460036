"""Operations at 0, at negative, large and infinite numbers and at NaN: torch's values, torch's derivatives, and intervals that hold them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.programs import trace_value
from tilewise.lang import Bounds, Interval, derive, evaluate, interpret

UNARY: dict[str, Callable[[Any], Any]] = {
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "log10": torch.log10,
    "tan": torch.tan,
    "atan": torch.atan,
    "asin": torch.asin,
    "acos": torch.acos,
    "sinh": torch.sinh,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "cosh": torch.cosh,
    "erfc": torch.erfc,
    "softplus": functional.softplus,
    "softplus with a slope": lambda x: functional.softplus(x, beta=2.0, threshold=5.0),
    "gelu": functional.gelu,
    "gelu by tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {"atan2": torch.atan2, "logaddexp": torch.logaddexp, "fmod": torch.fmod, "remainder": torch.remainder}
TESTS: dict[str, Callable[[Any], Any]] = {"isfinite": torch.isfinite, "isnan": torch.isnan, "isinf": torch.isinf}

INF, NAN = float("inf"), float("nan")
NUMBERS = [0.0, -0.0, 1e-30, -1e-9, 1e-4, -0.5, 0.75, -1.0, 1.0, 1.5, -2.5, 5.0, -5.5, 20.0, 20.5, -40.0, 88.0, -100.0, 3e4, -1e30]
SPECIAL = [*NUMBERS, INF, -INF, NAN]
DTYPES = [torch.float32, torch.float64]


def grid_of(values: Tensor) -> dict[str, Tensor]:
    places = {name: torch.zeros(1, dtype=torch.int64) for name in ("b", "h", "q", "kv")}
    return places | {"kv": torch.arange(len(values)), "score": values}


def value_and_derivatives(function: Callable[..., Any], x: Tensor, *others: Tensor) -> list[Tensor]:
    """Of the traced function of the score and of captures at `kv`: its value, then its derivatives by each of them."""
    captures = [t.clone().requires_grad_() for t in others]
    call = trace_value(lambda s, b, h, q, kv: function(s, *(t[kv] for t in captures)), x.dtype)
    derivative = derive(call.program, frozenset(range(len(captures))))
    with torch.no_grad():
        steps = interpret(derivative.program, call, grid_of(x))
        value = torch.as_tensor(evaluate(call, grid_of(x)))
    by_slot = {site.slot: steps[site.gradient] for site in derivative.sites}
    places = [next(k for k, capture in enumerate(call.captures) if capture is t) for t in captures]
    return [value, *(torch.as_tensor(d).expand(x.shape) for d in (steps[0], *(by_slot[k] for k in places)))]


def by_autograd(function: Callable[..., Any], *operands: Tensor) -> list[Tensor]:
    given = [t.clone().requires_grad_() for t in operands]
    value = function(*given)
    return [value.detach(), *torch.autograd.grad(value.sum(), given)]


def assert_same(found: Tensor, wanted: Tensor, *operands: Tensor) -> None:
    rtol = 1e-5 if wanted.dtype == torch.float32 else 1e-11
    torch.testing.assert_close(found.to(wanted.dtype), wanted, rtol=rtol, atol=rtol / 10, equal_nan=True, msg=lambda m: f"{operands}\n{m}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_values_and_derivatives(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([n for n in SPECIAL if not (name.startswith("gelu") and n == INF)], dtype=dtype)  # oneDNN's gelu of infinity is NaN
    for found, wanted in zip(value_and_derivatives(UNARY[name], x), by_autograd(UNARY[name], x), strict=True):
        assert_same(found, wanted, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_values_and_derivatives_of_two(name: str, dtype: torch.dtype) -> None:
    numbers = [n for n in SPECIAL if not (name in ("fmod", "remainder") and abs(n) > 1e20)]  # quotients beyond all precision are NaN, or not
    x, y = (t.flatten() for t in torch.meshgrid(*[torch.tensor([n for n in numbers if abs(n) > 1e-20 or n == 0], dtype=dtype)] * 2, indexing="ij"))
    for found, wanted in zip(value_and_derivatives(BINARY[name], x, y), by_autograd(BINARY[name], x, y), strict=True):
        assert_same(found, wanted, x, y)


@pytest.mark.parametrize("name", TESTS)
def test_questions_about_a_value(name: str) -> None:
    x = torch.tensor(SPECIAL)
    assert torch.equal(torch.as_tensor(evaluate(trace_value(lambda s, b, h, q, kv: TESTS[name](s)), grid_of(x))), TESTS[name](x))
    for dtype in (torch.int32, torch.bool, torch.float16):
        table = torch.tensor([0, 1, 1]).to(dtype)
        found = evaluate(trace_value(lambda s, b, h, q, kv, table=table: TESTS[name](table[kv])), grid_of(torch.zeros(3)))
        assert torch.equal(torch.as_tensor(found), TESTS[name](table))


@pytest.mark.parametrize(
    "method",
    ["log1p", "expm1", "log10", "tan", "atan", "arctan", "asin", "arccos", "arcsinh", "acosh", "arctanh", "sinh", "cosh", "erfc", "isfinite", "isnan", "isinf"],
)
def test_methods(method: str) -> None:
    x = torch.tensor(NUMBERS)
    found = evaluate(trace_value(lambda s, b, h, q, kv: getattr(s, method)()), grid_of(x))
    torch.testing.assert_close(found, getattr(x, method)(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", ["atan2", "arctan2", "fmod", "remainder", "logaddexp"])
def test_methods_of_two(method: str) -> None:
    x = torch.tensor(NUMBERS)
    found = evaluate(trace_value(lambda s, b, h, q, kv: getattr(s, method)(s * 0.5 + 1.0)), grid_of(x))
    torch.testing.assert_close(found, getattr(x, method)(x * 0.5 + 1.0), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["log1p", "expm1", "erf", "erfc", "exp2", "expit"])
def test_torch_special(name: str) -> None:
    x = torch.tensor(NUMBERS)
    found = evaluate(trace_value(lambda s, b, h, q, kv: getattr(torch.special, name)(s)), grid_of(x))
    torch.testing.assert_close(found, getattr(torch.special, name)(x), rtol=0, atol=0, equal_nan=True)


ENDS = [-INF, -1e30, -30.0, -4.0, -1.0, -0.8, -0.7, -1e-3, 0.0, 1e-3, 0.5, 1.2, 2.0, 19.9, 20.0, 20.1, 1e4, INF]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_intervals_hold_what_lies_between_their_ends(name: str, dtype: torch.dtype) -> None:
    """With many points inside: a function may rise and fall."""
    bounds = Bounds(trace_value(lambda s, b, h, q, kv: UNARY[name](s), dtype), torch.device("cpu"))
    zero = torch.zeros(1, dtype=torch.float64)
    for k, low in enumerate(ENDS):
        for high in ENDS[k:]:
            lo, hi = torch.tensor([low, high], dtype=dtype).double().unbind()
            found = bounds.over(dict.fromkeys(("b", "h", "q", "kv"), Interval(zero, zero)) | {"score": Interval(lo[None], hi[None])})
            if bool(found.lo.isnan() | found.hi.isnan()):
                continue
            inside = torch.linspace(*(min(max(end, -1e38), 1e38) for end in (low, high)), 1001, dtype=torch.float64).to(dtype).clamp(lo, hi)
            near = torch.tensor([n for n in (*NUMBERS, *ENDS) if low <= n <= high], dtype=dtype).clamp(lo, hi)
            values = UNARY[name](torch.cat([inside, near])).double()
            assert bool(((values >= found.lo) & (values <= found.hi)).all()), f"{name} over [{low}, {high}]: [{found.lo.item()}, {found.hi.item()}]"


def test_intervals_decide() -> None:
    """They are not merely wide: a mask by one of these functions is decided away from its border."""

    def decided(mask: Callable[..., Any], low: float, high: float) -> bool | None:
        zero = torch.zeros(1, dtype=torch.float64)
        box = {"b": Interval(zero, zero), "h": Interval(zero, zero), "q": Interval(zero, zero), "kv": Interval(zero + low, zero + high)}
        found = Bounds(trace_value(lambda s, b, h, q, kv: mask(kv.float())), torch.device("cpu")).over(box)
        return bool(found.lo.item()) if found.lo.item() == found.hi.item() else None

    assert decided(lambda x: torch.log1p(x) < 3.0, 0, 15) is True
    assert decided(lambda x: torch.expm1(-x) < -0.9, 3, 9) is True
    assert decided(lambda x: torch.fmod(x, 64.0) < 32.0, 0, 31) is True
    assert decided(lambda x: torch.atan2(x, 2.0 + x * 0) > 1.5, 0, 10) is False
    assert decided(lambda x: torch.tan(x / 32.0) < 1.0, 0, 20) is True
    assert decided(lambda x: functional.gelu(x) > 2.0, 3, 9) is True
    assert decided(torch.isfinite, 0, 99) is True
    assert decided(lambda x: torch.isnan(torch.log(x - 1.0)), 0, 9) is None


def test_gelu_takes_only_torchs_approximations() -> None:
    from tilewise import TraceError

    with pytest.raises(TraceError, match="approximate='none' or 'tanh', got 'sigmoid'"):
        trace_value(lambda s, b, h, q, kv: functional.gelu(s, approximate="sigmoid"))
