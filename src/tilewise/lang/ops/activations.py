"""Functions known as activations."""

import math

import torch
from torch.nn import functional

from tilewise.lang import intervals
from tilewise.lang.ops.entry import Gradients, define, emit, times
from tilewise.lang.ops.rules import float_of, floats, numbers, same
from tilewise.lang.program import Tape

SOFTPLUS_LINEAR = 20.0  # torch's threshold: beyond it softplus(x) is x
GELU_INNER, GELU_CUBE = math.sqrt(2.0 / math.pi), 0.044715  # gelu's approximation by tanh(k (x + c x^3))


def _slope_of_tanh(t: Tape, x: int, out: int) -> int:
    return emit(t, "sub", t.literal(1.0), emit(t, "mul", out, out))


define(
    "tanh",
    1,
    meaning=torch.tanh,
    result=float_of,
    bounds=intervals.increasing(torch.tanh),
    derive=times(_slope_of_tanh),
    triton="tanh({0})",
    triton_fast="fast_tanh({0})",
    triton_in_float32=True,
    cpp="tanh_of({0})",
)


def _slope_of_sigmoid(t: Tape, x: int, out: int) -> int:
    return emit(t, "mul", out, emit(t, "sub", t.literal(1.0), out))


define(
    "sigmoid",
    1,
    meaning=torch.sigmoid,
    result=float_of,
    bounds=intervals.increasing(torch.sigmoid),
    derive=times(_slope_of_sigmoid),
    triton="tl.sigmoid({0})",
    triton_in_float32=True,
    cpp="sigmoid({0})",
)


def _slope_of_silu(t: Tape, x: int, out: int) -> int:
    s = emit(t, "sigmoid", x)
    return emit(t, "mul", s, emit(t, "add", t.literal(1.0), emit(t, "mul", x, emit(t, "sub", t.literal(1.0), s))))


define(
    "silu",
    1,
    meaning=functional.silu,
    result=float_of,
    bounds=intervals.silu,
    takes=floats,
    derive=times(_slope_of_silu),
    triton="({0} * tl.sigmoid({0}))",
    triton_in_float32=True,
    cpp="silu({0})",
)


def _derive_relu(t: Tape, g: int, a: tuple[int, ...], out: int) -> Gradients:
    """A choice, not a product: what is cut stays cut where the gradient is infinite."""
    return (emit(t, "where", emit(t, "le", a[0], t.literal(0)), t.literal(0.0), g),)


define(
    "relu",
    1,
    meaning=torch.relu,
    result=same,
    bounds=intervals.increasing(torch.relu),
    takes=numbers,
    exact=True,
    derive=_derive_relu,
    triton="tl.maximum({0}, 0, tl.PropagateNan.ALL)",
    cpp="positive_part({0})",
)


def _slope_of_softplus(t: Tape, x: int, out: int) -> int:
    return emit(t, "where", emit(t, "gt", x, t.literal(SOFTPLUS_LINEAR)), t.literal(1.0), emit(t, "sigmoid", x))


define(
    "softplus",
    1,
    meaning=functional.softplus,
    result=float_of,
    bounds=intervals.softplus,
    takes=floats,
    derive=times(_slope_of_softplus),
    triton="softplus({0})",
    triton_in_float32=True,
    cpp="softplus({0})",
)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    """torch's formula. Its own function may be oneDNN's on a CPU, which gives NaN at infinity where other devices do not."""
    wide = x.float() if x.element_size() == 2 else x
    return (wide * 0.5 * (1.0 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def _slope_of_gelu(t: Tape, x: int, out: int) -> int:
    """The normal distribution's cdf(x) + x pdf(x)."""
    cdf = _half_plus_half(t, emit(t, "erf", emit(t, "mul", x, t.literal(math.sqrt(0.5)))))
    pdf = emit(t, "mul", t.literal(math.sqrt(0.5 / math.pi)), emit(t, "exp", emit(t, "mul", t.literal(-0.5), emit(t, "mul", x, x))))
    return emit(t, "add", cdf, emit(t, "mul", x, pdf))


define(
    "gelu",
    1,
    meaning=_gelu,
    result=float_of,
    bounds=intervals.gelu,
    takes=floats,
    derive=times(_slope_of_gelu),
    triton="({0} * 0.5 * (1.0 + tl.erf({0} * 0.7071067811865476)))",
    triton_in_float32=True,
    cpp="gelu({0})",
)


def _slope_of_gelu_tanh(t: Tape, x: int, out: int) -> int:
    """With y = k (x + c x^3): (1 + tanh y) / 2 + x (1 - tanh(y)^2) y' / 2."""
    square = emit(t, "mul", x, x)
    y = emit(t, "mul", t.literal(GELU_INNER), emit(t, "add", x, emit(t, "mul", t.literal(GELU_CUBE), emit(t, "mul", square, x))))
    slope = emit(t, "mul", t.literal(GELU_INNER), emit(t, "add", t.literal(1.0), emit(t, "mul", t.literal(3 * GELU_CUBE), square)))
    tanh = emit(t, "tanh", y)
    rest = emit(t, "mul", emit(t, "mul", emit(t, "mul", t.literal(0.5), x), _slope_of_tanh(t, y, tanh)), slope)
    return emit(t, "add", _half_plus_half(t, tanh), rest)


define(
    "gelu_tanh",
    1,
    meaning=lambda x: functional.gelu(x, approximate="tanh"),
    result=float_of,
    bounds=intervals.gelu_tanh,
    takes=floats,
    derive=times(_slope_of_gelu_tanh),
    triton="({0} * 0.5 * (1.0 + tanh(0.7978845608028654 * ({0} + 0.044715 * {0} * {0} * {0}))))",
    triton_fast="({0} * 0.5 * (1.0 + fast_tanh(0.7978845608028654 * ({0} + 0.044715 * {0} * {0} * {0}))))",
    triton_in_float32=True,
    cpp="gelu_tanh({0})",
)


def _half_plus_half(t: Tape, x: int) -> int:
    return emit(t, "add", t.literal(0.5), emit(t, "mul", t.literal(0.5), x))
