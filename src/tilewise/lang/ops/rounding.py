"""Rounding, signs, and conversions to another type."""

import torch

from tilewise.lang import intervals
from tilewise.lang.ops.entry import define
from tilewise.lang.ops.rules import numbers, same

define(
    "floor",
    1,
    meaning=torch.floor,
    result=same,
    bounds=intervals.increasing(torch.floor),
    takes=numbers,
    exact=True,
    triton="tl.floor({0})",
    triton_of_integers="{0}",
    triton_in_float32=True,
    cpp="floor({0})",
    cpp_of_integers="{0}",
)
define(
    "ceil",
    1,
    meaning=torch.ceil,
    result=same,
    bounds=intervals.increasing(torch.ceil),
    takes=numbers,
    exact=True,
    triton="tl.ceil({0})",
    triton_of_integers="{0}",
    triton_in_float32=True,
    cpp="ceil({0})",
    cpp_of_integers="{0}",
)
define(
    "round",
    1,
    meaning=torch.round,
    result=same,
    bounds=intervals.increasing(torch.round),
    takes=numbers,
    exact=True,
    triton="round_even({0})",
    triton_of_integers="{0}",
    triton_in_float32=True,
    cpp="rounded({0})",
    cpp_of_integers="{0}",
)
define(
    "trunc",
    1,
    meaning=torch.trunc,
    result=same,
    bounds=intervals.increasing(torch.trunc),
    takes=numbers,
    exact=True,
    triton="tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))",
    triton_of_integers="{0}",
    triton_in_float32=True,
    cpp="trunc({0})",
    cpp_of_integers="{0}",
)
define(
    "sign",
    1,
    meaning=torch.sign,
    result=same,
    bounds=intervals.sign,
    exact=True,
    triton="tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0))",
    cpp="sign({0})",
    cpp_of_bools="{0}",
)
define("cast", 1, meaning=lambda x: x, result=same, bounds=lambda a: a, derive=lambda t, g, a, out: (g,), triton=None, cpp=None, special=True)
define("detach", 1, meaning=torch.Tensor.detach, result=same, bounds=lambda a: a, exact=True, triton="{0}", cpp="{0}")
