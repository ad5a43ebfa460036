"""Element types and torch's promotion rules, on names so that they can be used while tracing.

A value has a dtype and a level. As in torch, a Python number (level 0) or a 0-d tensor (level 1) only changes the
dtype of a dimensioned value (level 2) when it belongs to a higher category: bool < integer < float.
"""

from typing import NamedTuple

import torch

NAME_OF = {
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}
DTYPE_OF = {name: dtype for dtype, name in NAME_OF.items()}

FLOATS = ("f16", "bf16", "f32", "f64")
INTEGERS = ("u8", "i8", "i16", "i32", "i64")

NUMBER, ZERO_DIM, DIMENSIONED = 0, 1, 2

INTEGER_RANGE = {name: (torch.iinfo(DTYPE_OF[name]).min, torch.iinfo(DTYPE_OF[name]).max) for name in INTEGERS}
PROMOTED = {(a, b): NAME_OF[torch.promote_types(DTYPE_OF[a], DTYPE_OF[b])] for a in DTYPE_OF for b in DTYPE_OF}


class Type(NamedTuple):
    dtype: str
    level: int

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def is_integer(self) -> bool:
        return self.dtype in INTEGERS

    @property
    def is_bool(self) -> bool:
        return self.dtype == "bool"


BOOL = Type("bool", DIMENSIONED)
INDEX = Type("i64", DIMENSIONED)  # 64 bits: a mask's own arithmetic must not overflow at any length


def _combine(higher: str | None, lower: str | None) -> str | None:
    """The dtype of values of one level joined by values of a lower one."""
    if higher is None:
        return lower
    if lower is None or higher in FLOATS:
        return higher
    if higher == "bool" or lower in FLOATS:
        return PROMOTED[higher, lower]
    return higher


def promote(*types: Type) -> Type:
    """The type that torch gives to an elementwise operation on these operands."""
    by_level: list[str | None] = [None, None, None]
    for t in types:
        found = by_level[t.level]
        by_level[t.level] = t.dtype if found is None else PROMOTED[found, t.dtype]
    number, zero_dim, dimensioned = by_level
    dtype = _combine(dimensioned, _combine(zero_dim, number))
    assert dtype is not None
    return Type(dtype, max([t.level for t in types]))


def as_float(t: Type) -> Type:
    """The type of a function that always returns a float: integers become torch's default float32."""
    return t if t.is_float else Type("f32", t.level)
