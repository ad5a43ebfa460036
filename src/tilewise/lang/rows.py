"""Rows: values with a few dimensions of their own, for every (b, h, q, kv).

They begin as captured tensors that are not indexed in all their dimensions, are computed with element by element, and end in a
reduction (reductions.py), which writes them out one element after the other: a program knows single values only.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.errors import TraceError
from tilewise.lang.refusals import refuse
from tilewise.lang.symbol import Symbol, Trace, Traced
from tilewise.lang.types import DTYPE_OF, FLOATS, INTEGERS, NAME_OF, PROMOTED

LONGEST_ROW = 512  # elements are written out, which takes a compiler's time

Shape = tuple[int, ...]
Position = tuple[int, ...]


class Row(Traced):
    """Values of a shape; each is written when it is first needed."""

    def __init__(self, tracer: Trace, shape: Shape, dtype: str, make: Callable[[Position], Symbol]) -> None:
        self.tracer = tracer
        self._shape = shape
        self._dtype = dtype
        self._make = make
        self._made: dict[Position, Symbol] = {}

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._shape)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPE_OF[self._dtype]

    def element(self, position: Position) -> Symbol:
        found = self._made.get(position)
        if found is None:
            found = self._made[position] = self._make(position)
        return found

    def part(self, index: tuple[Any, ...]) -> Traced:
        places, kept = _view(index, self._shape)
        for i in places:
            if isinstance(i, Traced):
                raise refuse("a computed row is indexed with a value that differs for every (b, h, q, kv); index the captured tensor with it instead")
        sources = [places[d] if isinstance(places[d], (int, range)) else range(self._shape[d]) for d in range(len(places))]
        shape = tuple([1 if d is None else len(sources[d]) for d in kept])

        def make(position: Position) -> Symbol:
            return self.element(_source(sources, kept, position))

        return Row(self.tracer, shape, self._dtype, make) if shape else make(())

    def __repr__(self) -> str:
        return f"row of shape {tuple(self._shape)}, {self.dtype}"

    def __len__(self) -> int:
        return self._shape[0]

    def __iter__(self) -> Any:
        bounded(self)
        return iter([self.part((k,)) for k in range(len(self))])

    def described(self) -> str:
        """What it is, and what can be done with it."""
        return (
            f"a row of shape {tuple(self._shape)}; index captured tensors in all their dimensions, for instance tensor[h], or reduce the row to one value, "
            "for instance with .sum(-1) or .any(-1)"
        )

    def incomplete(self) -> TraceError:
        return refuse(self.described())


class Part(Sequence[Symbol]):
    """Some elements of a row."""

    def __init__(self, row: Row, positions: list[Position]) -> None:
        self.row = row
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, k: Any) -> Any:
        return self.row.element(self.positions[k])


class CapturedRow(Row):
    """A captured tensor indexed in only some of its dimensions, or in none; unlike other rows it can still be indexed by b, h, q and kv."""

    def __init__(self, tracer: Trace, tensor: torch.Tensor, places: list[Any], kept: list[int | None]) -> None:
        """`places`: for every dimension of the tensor its index, a range, or a slice of the whole; `kept`: the row's dimensions among them, None: a new one."""
        sizes = [len(place) if isinstance(place, range) else size for place, size in zip(places, tensor.shape, strict=True)]
        shape = tuple([1 if d is None else sizes[d] for d in kept])
        super().__init__(tracer, shape, NAME_OF[tensor.dtype], self._load)
        self.tensor = tensor
        self.places = places
        self.kept = kept

    def _load(self, position: Position) -> Symbol:
        sources = [range(size) if isinstance(place, slice) else place for place, size in zip(self.places, self.tensor.shape, strict=True)]
        at = _source(sources, self.kept, position)
        loaded: Symbol = self.tracer.load(self.tensor, tuple([constant(self.tracer, i) if isinstance(i, int) else i for i in at]))
        return loaded

    def part(self, index: tuple[Any, ...]) -> Traced:
        places, kept = _view(index, self._shape)
        combined = list(self.places)
        for place, d in zip(places, self.kept, strict=True):
            if d is not None and not isinstance(place, slice):
                combined[d] = self._place(place, d)
        row_of = [None if d is None else self.kept[d] for d in kept]
        if all(isinstance(place, Symbol) for place in combined) and not row_of:
            loaded: Symbol = self.tracer.load(self.tensor, tuple(combined))
            return loaded
        return CapturedRow(self.tracer, self.tensor, combined, row_of)

    def _place(self, index: Any, d: int) -> Any:
        """An index, or a range, of what is left of the tensor's dimension d."""
        left = self.places[d]
        if isinstance(index, range):
            return index if isinstance(left, slice) else left[index.start : index.stop : index.step]
        if isinstance(left, slice):
            return index if isinstance(index, Symbol) else Symbol(self.tracer, self.tracer.operand(index))
        if not isinstance(index, int):
            raise refuse("part of a captured tensor is indexed with a value that differs for every (b, h, q, kv); take the part outside the function")
        return constant(self.tracer, left[index])

    def described(self) -> str:
        rank, given = self.tensor.dim(), self.tensor.dim() - len([d for d in self.kept if d is not None])
        whole = "used whole" if given == 0 else f"indexed in {given} of its {rank} dimensions"
        return (
            f"a captured tensor of shape {tuple(self.tensor.shape)} {whole}; index all of its dimensions, with b, h, q or kv, for instance tensor[h] or "
            "tensor[q - kv + offset], or reduce what is left to one value, for instance with .sum(-1) or .any(-1)"
        )


def constant(tracer: Trace, number: int) -> Symbol:
    return Symbol(tracer, tracer.tape.literal(number))


def filled(like: Traced, value: Symbol) -> Traced:
    """One value, in the shape of another."""
    return Row(like.tracer, like._shape, NAME_OF[value.dtype], lambda position: value) if isinstance(like, Row) else value


def part(value: Traced, index: tuple[Any, ...]) -> Traced:
    """value[index]. A single value can only be given new dimensions."""
    if isinstance(value, Row):
        return value.part(index)
    if any([i is not None and i is not ... for i in index]):
        raise refuse("b, h, q, kv and score are single values and cannot be indexed")
    shape = tuple([1 for i in index if i is None])
    assert isinstance(value, Symbol)
    return Row(value.tracer, shape, NAME_OF[value.dtype], lambda position: value) if shape else value


def _view(index: tuple[Any, ...], shape: Shape) -> tuple[list[Any], list[int | None]]:
    """What is taken of every dimension (an index, a range, or a slice: the whole), and which of them are kept, None standing for new ones."""
    given = len([i for i in index if i is not None and i is not ...])
    if given > len(shape) or len([i for i in index if i is ...]) > 1:
        raise refuse(f"{given} indices for a captured tensor or row of shape {tuple(shape)}")
    rest = [slice(None)] * (len(shape) - given)
    entries: list[Any] = []
    for i in index:
        entries += rest if i is ... else [i]
    if not any([i is ... for i in index]):
        entries += rest
    places: list[Any] = []
    kept: list[int | None] = []
    for i in entries:
        if i is None:
            kept.append(None)
            continue
        size = shape[len(places)]
        if isinstance(i, slice):
            kept.append(len(places))
            if i.step is not None and i.step < 1:
                raise refuse(f"a captured tensor or row is indexed with {i}; as in torch, its step must be positive")
            i = i if i.start is None and i.stop is None and i.step is None else range(size)[i]
        elif isinstance(i, int) and not -size <= i < size:
            raise refuse(f"index {i} is outside a dimension of size {size} of a captured tensor or row of shape {tuple(shape)}")
        places.append(i)
    return places, kept


def _source(sources: list[Any], kept: list[int | None], position: Position) -> tuple[Any, ...]:
    """Where an element of a view lies in what is viewed."""
    at = list(sources)
    for d, k in zip(kept, position, strict=True):
        if d is not None:
            at[d] = sources[d][k]
    return tuple(at)


# -- element by element ----------------------------------------------------------------------------------------------


def elementwise(tracer: Trace, apply: Callable[..., Any], operands: list[Traced]) -> Row:
    """A function of single values, of the elements of the rows among its operands; shapes broadcast, and types are promoted, as in torch."""
    rows = [x for x in operands if isinstance(x, Row)]
    shape = broadcast([bounded(row)._shape for row in rows])
    common = rows[0]._dtype
    for row in rows[1:]:
        common = PROMOTED[common, row._dtype]
    fitted = [tracer.cast(x, common) if _yields(tracer, x, common) else x for x in operands]

    def make(position: Position) -> Symbol:
        result: Symbol = apply(*[element_of(x, position) for x in fitted])
        return result

    return made(tracer, shape, make, lambda: apply(*[_sample(x) for x in fitted]))


def made(tracer: Trace, shape: Shape, make: Callable[[Position], Symbol], sample: Callable[[], Symbol]) -> Row:
    """A row of what is made for every position; `sample` is of the same type, where there is none."""
    if 0 in shape:
        return bounded(Row(tracer, shape, NAME_OF[sample().dtype], make))
    first = (0,) * len(shape)
    found = make(first)
    row = bounded(Row(tracer, shape, NAME_OF[found.dtype], make))
    row._made[first] = found
    return row


def bounded(row: Row) -> Row:
    if count(row._shape) > LONGEST_ROW:
        raise refuse(
            f"a row has {count(row._shape)} elements, at most {LONGEST_ROW} are allowed, because each is written out; take a part of it, or compute the result "
            f"before the call and load from that. It is {row.described()}"
        )
    return row


def count(shape: Shape) -> int:
    total = 1
    for size in shape:
        total = total * size
    return total


def broadcast(shapes: list[Shape]) -> Shape:
    found: list[int] = []
    for d in range(-max([len(s) for s in shapes]), 0):
        size = 1
        for shape in shapes:
            if len(shape) >= -d and shape[d] != 1:
                if size != 1 and size != shape[d]:
                    raise refuse(f"rows of shapes {' and '.join([str(tuple(s)) for s in shapes])} do not broadcast")
                size = shape[d]
        found.append(size)
    return tuple(found)


def _yields(tracer: Trace, operand: Traced, common: str) -> bool:
    """Whether an operand of the same category takes the rows' own type: a single value's does not count beside rows', as a 0-d tensor's."""
    if isinstance(operand, Symbol) and tracer.tape.type(operand.at).level == 0:  # a Python number
        return False
    dtype = NAME_OF[operand.dtype]
    return dtype != common and any([dtype in category and common in category for category in (FLOATS, INTEGERS)])


def element_of(operand: Traced, position: Position) -> Traced:
    if not isinstance(operand, Row):
        return operand
    shape = operand._shape
    return operand.element(tuple([0 if size == 1 else k for size, k in zip(shape, position[len(position) - len(shape) :], strict=True)]))


def _sample(operand: Traced) -> Traced:
    """Some value of an operand's type."""
    return operand.tracer.cast(constant(operand.tracer, 0), operand._dtype) if isinstance(operand, Row) else operand
