"""Rows become single values: sums, products, extremes, any, all, and dot products, as torch has them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tilewise.lang.refusals import refuse, undefined
from tilewise.lang.rows import Part, Position, Row, Shape, bounded, constant, made
from tilewise.lang.symbol import Symbol, Trace, Traced
from tilewise.lang.tracer import tracer_of
from tilewise.lang.types import DTYPE_OF, FLOATS, NAME_OF, PROMOTED

ACCUMULATED = {"f16": "f32", "bf16": "f32"}  # what torch adds 16-bit floats in, before it rounds the sum
Elements = Sequence[Symbol]
Fold = Callable[[Trace, Elements, str], Symbol]  # of elements of a dtype


# -- of a list of elements -------------------------------------------------------------------------------------------


def _in_pairs(op: str, elements: list[Symbol]) -> Symbol:
    """For operations whose order does not matter: in few levels, which no compiler minds however many elements there are."""
    tracer = elements[0].tracer
    while len(elements) > 1:
        pairs = [tracer.emit(op, elements[k], elements[k + 1]) for k in range(0, len(elements) - 1, 2)]
        elements = pairs + elements[2 * len(pairs) :]
    return elements[0]


def _number(tracer: Trace, value: bool | int, dtype: str) -> Symbol:
    number: Symbol = tracer.cast(Symbol(tracer, tracer.tape.literal(value)), dtype)
    return number


def _converted(tracer: Trace, elements: Elements, dtype: str) -> list[Symbol]:
    return [tracer.cast(elements[k], dtype) for k in range(len(elements))]


def _one_by_one(op: str, tracer: Trace, elements: Elements, dtype: str) -> Symbol:
    """Each is made when it is used: what a program computes next stands next to what it needs."""
    found: Symbol = tracer.cast(elements[0], dtype)
    for k in range(1, len(elements)):
        found = tracer.emit(op, found, tracer.cast(elements[k], dtype))
    return found


def total(tracer: Trace, elements: Elements, dtype: str) -> Symbol:
    """The sum in this dtype."""
    if not len(elements):
        return _number(tracer, 0, dtype)
    return _one_by_one("add", tracer, elements, dtype) if dtype in FLOATS else _in_pairs("add", _converted(tracer, elements, dtype))


def _added(tracer: Trace, elements: Elements, dtype: str) -> Symbol:
    """Integers are added in 64 bits, 16-bit floats in float32."""
    result = dtype if dtype in FLOATS else "i64"
    added = result if len(elements) == 1 else ACCUMULATED.get(result, result)
    found: Symbol = tracer.cast(total(tracer, elements, added), result)
    return found


def _mean(tracer: Trace, elements: Elements, dtype: str) -> Symbol:
    if dtype not in FLOATS:
        raise undefined("mean", [DTYPE_OF[dtype]])
    summed = total(tracer, elements, ACCUMULATED.get(dtype, dtype))
    found: Symbol = tracer.cast(summed / constant(tracer, len(elements)), dtype)
    return found


def _multiplied(tracer: Trace, elements: Elements, dtype: str) -> Symbol:
    """Integers in 64 bits; every product is rounded."""
    result = dtype if dtype in FLOATS else "i64"
    return _one_by_one("mul", tracer, elements, result) if len(elements) else _number(tracer, 1, result)


def _truth(op: str, of_none: bool) -> Fold:
    """Booleans, but of bytes bytes, as torch has it."""

    def fold(tracer: Trace, elements: Elements, dtype: str) -> Symbol:
        found: Symbol = _in_pairs(op, _converted(tracer, elements, "bool")) if len(elements) else _number(tracer, of_none, "bool")
        return tracer.cast(found, "u8") if dtype == "u8" else found

    return fold


def _extreme(op: str) -> Fold:
    def fold(tracer: Trace, elements: Elements, dtype: str) -> Symbol:
        _refuse_none(elements)
        return _in_pairs(op, _converted(tracer, elements, dtype))

    return fold


def _place_of_extreme(better: str) -> Fold:
    """The place of the first extreme; NaN counts as one."""

    def fold(tracer: Trace, elements: Elements, dtype: str) -> Symbol:
        _refuse_none(elements)
        best, at = elements[0], _number(tracer, 0, "i64")
        for k in range(1, len(elements)):
            x = elements[k]
            wins = tracer.emit(better, x, best)
            if dtype in FLOATS:
                wins = wins | ((x != x) & (best == best))
            at = tracer.emit("where", wins, constant(tracer, k), at)
            best = tracer.emit("where", wins, x, best)
        return at

    return fold


def _refuse_none(elements: Elements) -> None:
    if not len(elements):
        raise refuse("a row without elements has no largest or smallest one")


# -- of the dimensions of a row --------------------------------------------------------------------------------------


def _reduced(name: str, input: Any, dim: Any, keepdim: bool, fold: Fold) -> Traced:
    """What a fold makes of the elements along some dimensions, all unless they are given; a single value is a row of one, as in torch."""
    if isinstance(input, Symbol):
        _dimensions(name, (), dim)
        return fold(input.tracer, [input], NAME_OF[input.dtype])
    if not isinstance(input, Row):
        raise refuse(f"{name} takes a value or a row, got {type(input).__name__}")
    row, shape = bounded(input), tuple(input.shape)
    dims = _dimensions(name, shape, dim)
    left = tuple([1 if d in dims else size for d, size in enumerate(shape)])

    def make(position: Position) -> Symbol:
        ranges = [range(shape[d]) if d in dims else range(position[d], position[d] + 1) for d in range(len(shape))]
        return fold(row.tracer, Part(row, _positions(ranges)), NAME_OF[row.dtype])

    if len(dims) == len(shape) and not keepdim:
        return make((0,) * len(shape))
    reduced = made(row.tracer, left, make, lambda: fold(row.tracer, [_number(row.tracer, 0, NAME_OF[row.dtype])], NAME_OF[row.dtype]))
    return reduced if keepdim else reduced.part(tuple([0 if d in dims else slice(None) for d in range(len(shape))]))


def _positions(ranges: list[range]) -> list[Position]:
    positions: list[Position] = [()]
    for r in ranges:
        positions = [(*p, k) for p in positions for k in r]
    return positions


def _dimensions(name: str, shape: Shape, dim: Any) -> list[int]:
    """The dimensions meant by torch's `dim`."""
    rank = max(len(shape), 1)
    given = list(dim) if isinstance(dim, (tuple, list)) else [] if dim is None else [dim]
    wrong = any([type(d) is not int or not -rank <= d < rank for d in given])
    if wrong or len({d % rank for d in given}) < len(given):
        allowed = "one dimension, 0 or -1" if rank == 1 else f"the dimensions {-rank} to {rank - 1}"
        raise refuse(f"{name} was given dim={dim!r}; a value of shape {tuple(shape)} has {allowed}; leave dim out to reduce all")
    return [d % rank for d in given] if given else list(range(len(shape)))


# -- torch's functions -----------------------------------------------------------------------------------------------


def reduction(name: str, fold: Fold) -> Callable[..., Traced]:
    def apply(input: Any, dim: Any = None, keepdim: bool = False) -> Traced:
        return _reduced(name, input, dim, keepdim, fold)

    return apply


def arithmetic(name: str, fold: Fold) -> Callable[..., Traced]:
    """With a dtype to convert to before."""

    def apply(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Traced:
        return _reduced(name, input if dtype is None else input.to(dtype), dim, keepdim, fold)

    return apply


class Extremes(NamedTuple):
    """As torch.return_types.max."""

    values: Traced
    indices: Traced


def extreme(name: str, op: str, better: str) -> Callable[..., Any]:
    """torch.max has three forms: of all elements, along a dimension, and of two values."""

    def apply(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        second = dim if other is None else other
        if not (second is None or isinstance(second, int)):
            return tracer_of((input, second)).emit(op, input, second)
        values = _reduced(name, input, dim, keepdim, _extreme(op))
        return values if dim is None else Extremes(values, _reduced(name, input, dim, keepdim, _place_of_extreme(better)))

    return apply


def place(name: str, better: str) -> Callable[..., Traced]:
    def apply(input: Any, dim: Any = None, keepdim: bool = False) -> Traced:
        return _reduced(name, input, dim, keepdim, _place_of_extreme(better))

    return apply


def dot(input: Any, tensor: Any) -> Any:
    """As in torch the products of 16-bit floats are not rounded, only their sum is; integers stay in the rows' dtype."""
    if not isinstance(input, Row) or not isinstance(tensor, Row) or len(input.shape) != 1 or len(tensor.shape) != 1:
        raise refuse(
            "@, dot, inner and matmul multiply two rows, each with one dimension left, as in torch.dot(a[b, h, q], c[b, h, kv]); "
            "single values are multiplied by x * y"
        )
    if input.shape != tensor.shape:
        raise refuse(f"rows of {input.shape[0]} and {tensor.shape[0]} elements are multiplied; they must be equally long")
    result = PROMOTED[NAME_OF[input.dtype], NAME_OF[tensor.dtype]]
    if result == "bool":
        raise undefined("dot", [torch.bool, torch.bool])
    computed = ACCUMULATED.get(result, result)
    products = input.tracer.cast(input, computed) * input.tracer.cast(tensor, computed)
    assert isinstance(products, Row)
    return input.tracer.cast(total(input.tracer, Part(products, _positions([range(input.shape[0])])), computed), result)


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": arithmetic("sum", _added),
    "mean": arithmetic("mean", _mean),
    "prod": arithmetic("prod", _multiplied),
    "any": reduction("any", _truth("or", False)),
    "all": reduction("all", _truth("and", True)),
    "amax": reduction("amax", _extreme("maximum")),
    "amin": reduction("amin", _extreme("minimum")),
    "max": extreme("max", "maximum", "gt"),
    "min": extreme("min", "minimum", "lt"),
    "argmax": place("argmax", "gt"),
    "argmin": place("argmin", "lt"),
    "dot": dot,
}
