"""torch's activation functions, in terms of the language's operations."""

from collections.abc import Callable
from typing import Any

from tilewise.lang.refusals import refuse
from tilewise.lang.symbol import Symbol
from tilewise.lang.tracer import tracer_of

SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946  # torch's


def activation(op: str) -> Callable[..., Any]:
    """torch.nn.functional passes `inplace` along."""

    def apply(input: Any, inplace: bool = False) -> Any:
        _refuse_in_place(op, inplace)
        return tracer_of((input,)).emit(op, input)

    return apply


def softplus(input: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    if not isinstance(beta, Symbol) and not isinstance(threshold, Symbol) and (beta, threshold) == (1.0, 20.0):
        return tracer_of((input,)).emit("softplus", input)
    scaled = input * beta
    return _where(scaled > threshold, input, scaled.tracer.emit("logaddexp", scaled, 0.0) / beta)


def logsigmoid(input: Any) -> Any:
    return -softplus(-input, threshold=50.0)


def gelu(input: Any, *, approximate: str = "none") -> Any:
    if approximate not in ("none", "tanh"):
        raise refuse(f"gelu takes approximate='none' or 'tanh', got {approximate!r}")
    return tracer_of((input,)).emit("gelu" if approximate == "none" else "gelu_tanh", input)


def elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    _refuse_in_place("elu", inplace)
    return _where(input > 0, input, alpha * _expm1_of_negative(input))


def leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    _refuse_in_place("leaky_relu", inplace)
    return _where(input > 0, input, input * negative_slope)


def hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    _refuse_in_place("hardtanh", inplace)
    return _where(input <= min_val, min_val, _where(input >= max_val, max_val, input))  # unlike clamp, flat where it begins to cut


def relu6(input: Any, inplace: bool = False) -> Any:
    return hardtanh(input, 0.0, 6.0, inplace)


def hardsigmoid(input: Any, inplace: bool = False) -> Any:
    return relu6(input + 3.0, inplace) / 6.0


def hardswish(input: Any, inplace: bool = False) -> Any:
    return input * hardsigmoid(input, inplace)


def mish(input: Any, inplace: bool = False) -> Any:
    _refuse_in_place("mish", inplace)
    return input * tracer_of((input,)).emit("tanh", softplus(input))


def softsign(input: Any) -> Any:
    return input / (1.0 + abs(input))


def celu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    _refuse_in_place("celu", inplace)
    return _where(input > 0, input, alpha * _expm1_of_negative(input, alpha))


def selu(input: Any, inplace: bool = False) -> Any:
    return SELU_SCALE * elu(input, SELU_ALPHA, inplace)


def _refuse_in_place(name: str, inplace: bool) -> None:
    if inplace:
        raise refuse(f"{name} with inplace=True changes a value in place; leave inplace out")


def _where(condition: Any, input: Any, other: Any) -> Any:
    return tracer_of((condition, input, other)).emit("where", condition, input, other)


def _expm1_of_negative(input: Any, divisor: float | None = None) -> Any:
    """expm1, for where the input is negative. Elsewhere it is bounded, though not chosen: its derivative is multiplied by 0, which of infinity would be NaN."""
    bounded = _where(input > 0, 0.0, input)  # not clamp, whose derivative at 0 is another one
    return tracer_of((input,)).emit("expm1", bounded if divisor is None else bounded / divisor)


ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "silu": activation("silu"),
    "relu": activation("relu"),
    "softplus": softplus,
    "logsigmoid": logsigmoid,
    "gelu": gelu,
    "elu": elu,
    "leaky_relu": leaky_relu,
    "hardtanh": hardtanh,
    "relu6": relu6,
    "hardsigmoid": hardsigmoid,
    "hardswish": hardswish,
    "mish": mish,
    "softsign": softsign,
    "celu": celu,
    "selu": selu,
}
