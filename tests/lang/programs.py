"""Shared by the tests of the language: a small grid of real indices, and tracing of functions that may return anything."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.lang import INDICES, Call, evaluate
from tilewise.lang import trace as tracing
from tilewise.lang.types import DTYPE_OF, NAME_OF

BATCH, HEADS, QUERIES, KEYS = 2, 3, 5, 7


def grid(batch: int = BATCH, heads: int = HEADS, queries: int = QUERIES, keys: int = KEYS) -> dict[str, Tensor]:
    """b, h, q, kv as index tensors that broadcast against each other."""
    sizes = dict(zip(INDICES, (batch, heads, queries, keys), strict=True))
    return {name: torch.arange(n).view([-1 if d == axis else 1 for d in range(4)]) for axis, (name, n) in enumerate(sizes.items())}


def scores(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Quarters between -5 and 5, so that zeros, ties and halves are met."""
    numbers = torch.randint(-20, 21, (BATCH, HEADS, QUERIES, KEYS), generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype) / 4


def trace_value(function: Callable[..., Any], dtype: torch.dtype = torch.float32) -> Call:
    """The program of f(score, b, h, q, kv), whatever it returns: neither a mask's nor a score's rules apply."""
    tracer = tracing.Tracer(torch.device("cpu"))
    symbols = [tracing.Symbol(tracer, tracer.tape.index(name)) for name in INDICES]
    score = tracing.Symbol(tracer, tracer.tape.score(NAME_OF[dtype]))
    result = tracing._call(function, [score, *symbols], "score", "(score, b, h, q, kv)")
    return tracing._finish(tracer, tracing._operand_of_result(tracer, result, function))


def value_of(call: Call, inputs: dict[str, Tensor]) -> Tensor:
    """What the interpreter gives, in the type the program promises."""
    value = torch.as_tensor(evaluate(call, inputs))
    assert value.dtype == DTYPE_OF[call.program.result_type.dtype], f"typed {call.program.result_type.dtype}, is {value.dtype}: {call.program.text}"
    return value


def assert_traces_as_torch(function: Callable[..., Any], expected: Callable[..., Any] | None = None, dtype: torch.dtype = torch.float32) -> Call:
    """f(score, b, h, q, kv) traced and interpreted is what plain torch gives on real tensors, in values and dtype."""
    inputs = grid() | {"score": scores(dtype)}
    wanted = torch.as_tensor((expected or function)(inputs["score"], *(inputs[name] for name in INDICES)))
    call = trace_value(function, dtype)
    found = value_of(call, inputs)
    assert found.dtype == wanted.dtype
    shape = (BATCH, HEADS, QUERIES, KEYS)
    torch.testing.assert_close(found.expand(shape), wanted.expand(shape), rtol=0, atol=0, equal_nan=True)
    return call
