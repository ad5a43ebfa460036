"""Rules that operations share: which types they take and give, and what torch needs to be called with."""

from collections.abc import Callable
from typing import Any

import torch

from tilewise.lang.types import Type, as_float, promote

# -- types of results ------------------------------------------------------------------------------------------------


def truth(*types: Type) -> Type:
    return Type("bool", max([t.level for t in types]))


def same(t: Type) -> Type:
    return t


def float_of(*types: Type) -> Type:
    return as_float(promote(*types))


# -- types of operands -----------------------------------------------------------------------------------------------


def numbers(*types: Type) -> bool:
    return not promote(*types).is_bool


def no_boolean(*types: Type) -> bool:
    return not any(t.is_bool for t in types)


def bits(*types: Type) -> bool:
    return not promote(*types).is_float


def integers(*types: Type) -> bool:
    return promote(*types).is_integer


def floats(*types: Type) -> bool:
    return promote(*types).is_float


# -- torch's functions -----------------------------------------------------------------------------------------------


def as_tensors(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch functions that take no Python numbers: give them tensors of the promoted type instead."""

    def on_tensors(*args: Any) -> torch.Tensor:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        dtype = _promoted(args)
        device = tensors[0].device
        return f(*(a if isinstance(a, torch.Tensor) else torch.tensor(a, dtype=dtype, device=device) for a in args))

    return on_tensors


def by_first(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch functions that cannot be derived, or called at all, with a Python number as first operand."""
    with_number = as_tensors(f)
    return lambda x, y: f(x, y) if isinstance(x, torch.Tensor) else with_number(x, y)


def _promoted(args: tuple[Any, ...]) -> torch.dtype:
    dtype = args[0]
    for a in args[1:]:
        dtype = torch.result_type(torch.empty((1,), dtype=dtype) if isinstance(dtype, torch.dtype) else dtype, a)
    return dtype if isinstance(dtype, torch.dtype) else torch.result_type(dtype, dtype)
