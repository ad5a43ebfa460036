"""Shared by the tests of the language: a small grid of real indices, tracing of functions that may return anything, gradients both ways."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.lang import INDICES, BoundProgram, derive, evaluate, interpret, wrapped
from tilewise.lang.symbol import Symbol
from tilewise.lang.trace import _call, _finish, _operand_of_result
from tilewise.lang.tracer import Tracer
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


def trace_value(function: Callable[..., Any], dtype: torch.dtype = torch.float32) -> BoundProgram:
    """The program of f(score, b, h, q, kv), whatever it returns: neither a mask's nor a score's rules apply."""
    tracer = Tracer(torch.device("cpu"))
    symbols = [Symbol(tracer, tracer.tape.index(name)) for name in INDICES]
    score = Symbol(tracer, tracer.tape.score(NAME_OF[dtype]))
    result = _call(tracer, function, [score, *symbols], "score", "(score, b, h, q, kv)")
    return _finish(tracer, _operand_of_result(tracer, result, function))


def value_of(call: BoundProgram, inputs: dict[str, Tensor]) -> Tensor:
    """What the interpreter gives, in the type the program promises."""
    value = torch.as_tensor(evaluate(call, inputs))
    assert value.dtype == DTYPE_OF[call.program.result_type.dtype], f"typed {call.program.result_type.dtype}, is {value.dtype}: {call.program.text}"
    return value


def assert_traces_as_torch(function: Callable[..., Any], expected: Callable[..., Any] | None = None, dtype: torch.dtype = torch.float32) -> BoundProgram:
    """f(score, b, h, q, kv) traced and interpreted is what plain torch gives on real tensors, in values and dtype."""
    inputs = grid() | {"score": scores(dtype)}
    wanted = torch.as_tensor((expected or function)(inputs["score"], *(inputs[name] for name in INDICES)))
    call = trace_value(function, dtype)
    found = value_of(call, inputs)
    assert found.dtype == wanted.dtype
    shape = (BATCH, HEADS, QUERIES, KEYS)
    torch.testing.assert_close(found.expand(shape), wanted.expand(shape), rtol=0, atol=0, equal_nan=True)
    return call


def gradients_by_autograd(call: BoundProgram, inputs: dict[str, Tensor], weights: Tensor) -> list[Tensor]:
    """Of sum(weights * program), with respect to the score and every capture that requires grad."""
    sources = [inputs["score"], *(t for t in call.captures if t.requires_grad)]
    result = torch.as_tensor(evaluate(call, inputs))
    if not result.requires_grad:
        return [torch.zeros_like(s) for s in sources]
    found = torch.autograd.grad((result.expand_as(weights) * weights).sum(), sources, allow_unused=True)
    return [torch.zeros_like(s) if g is None else g for s, g in zip(sources, found, strict=True)]


def gradients_by_derive(call: BoundProgram, inputs: dict[str, Tensor], weights: Tensor) -> tuple[list[Tensor], float]:
    """The same by `derive`; and the largest finite number met on the way, which is what sums can be exact to."""
    wanted = [k for k, t in enumerate(call.captures) if t.requires_grad]
    derivative = derive(call.program, frozenset(wanted))
    with torch.no_grad():
        everything = replace(derivative.program, results=tuple(range(len(derivative.program.instructions))))
        steps = [torch.as_tensor(value) for value in interpret(everything, call, inputs)]
        largest = max(float(step.double().nan_to_num(0, 0, 0).abs().max()) for step in steps)
        results = [steps[k] for k in derivative.program.results]
        found = [results[0].expand_as(weights) * weights]
        for slot in wanted:
            total = torch.zeros_like(call.captures[slot])
            for site in (s for s in derivative.sites if s.slot == slot):
                place = wrapped(total, tuple(results[k].expand_as(weights) for k in site.indices))
                part = (results[site.gradient].expand_as(weights) * weights).to(total.dtype)
                total = total.index_put(place, part, accumulate=True) if place else total + part.sum()
            found.append(total)
    return found, largest


def assert_derives_as_autograd(call: BoundProgram, inputs: dict[str, Tensor]) -> None:
    shape = torch.broadcast_shapes(*(t.shape for t in inputs.values()))
    weights = torch.randint(1, 4, shape, generator=torch.Generator().manual_seed(3)).double()
    inputs = inputs | {"score": inputs["score"].clone().requires_grad_()}
    expected = gradients_by_autograd(call, inputs, weights)
    found, largest = gradients_by_derive(call, inputs, weights)
    for wanted, derived in zip(expected, found, strict=True):
        tolerance = 1e-12 if wanted.dtype == torch.float64 else 1e-6
        wrong = ~((derived - wanted).abs() <= tolerance * weights.numel() * (1 + largest)) & wanted.isfinite()
        assert not bool(wrong.any()), f"{derived[wrong][0]} is not {wanted[wrong][0]}, {int(wrong.sum())} like it, for {call.program.text}"
