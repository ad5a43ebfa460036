"""Functions known as activations."""

import torch

from tilewise.lang import intervals
from tilewise.lang.ops.entry import Gradients, define, emit, times
from tilewise.lang.ops.rules import float_of, floats, numbers, same
from tilewise.lang.program import Tape


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
    meaning=torch.nn.functional.silu,
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
