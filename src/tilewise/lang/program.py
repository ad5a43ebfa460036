"""A program: a mask or a score as a straight line of instructions.

Instruction k may use the values of instructions before it. What varies between calls with the same structure is not
in the program but in its arguments: captured tensors, and the Python numbers met while tracing (`int` and `float`
slots). The program's text is its key, and enough to rebuild it (parse.py).
"""

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilewise.lang.types import DIMENSIONED, FLOATS, INDEX, NUMBER, PROMOTED, ZERO_DIM, Type

INDICES = ("b", "h", "q", "kv")


class Instruction(NamedTuple):
    op: str
    args: tuple[int, ...]
    attr: str  # index name, slot, dtype or literal, depending on the operation; "" where there is none
    type: Type


class CaptureSpec(NamedTuple):
    dtype: str
    rank: int


class Tape:
    """Instructions being written; the same one is never written twice. Floats of what ops.emit() writes are computed in at least the type `narrowest`."""

    def __init__(self, narrowest: str = "") -> None:
        self.narrowest = narrowest
        self.instructions: list[Instruction] = []
        self._written: dict[tuple[str, tuple[int, ...], str], int] = {}

    def put(self, op: str, args: tuple[int, ...], attr: str, type: Type) -> int:
        key = (op, args, attr)
        found = self._written.get(key)
        if found is not None:
            return found
        self.instructions.append(Instruction(op, args, attr, type))
        self._written[key] = len(self.instructions) - 1
        return len(self.instructions) - 1

    def type(self, k: int) -> Type:
        return self.instructions[k].type

    def widened(self, k: int) -> int:
        """Value k, in the narrowest type allowed if it is a narrower float. Python numbers have no width of their own."""
        dtype, level = self.type(k)
        if not self.narrowest or level == NUMBER or dtype not in FLOATS or PROMOTED[dtype, self.narrowest] == dtype:
            return k
        return self.put("cast", (k,), self.narrowest, Type(self.narrowest, level))

    def index(self, name: str) -> int:
        return self.put("index", (), name, INDEX)

    def score(self, dtype: str) -> int:
        return self.put("score", (), dtype, Type(dtype, DIMENSIONED))

    def int_slot(self, slot: int) -> int:
        return self.put("int", (), str(slot), Type("i64", NUMBER))

    def float_slot(self, slot: int) -> int:
        return self.put("float", (), str(slot), Type("f32", NUMBER))

    def literal(self, value: bool | int | float) -> int:
        """A number in the program itself. Subclasses, numpy's float64 among them, print in their own ways: only the number is written."""
        if isinstance(value, bool):
            return self.put("literal", (), str(value), Type("bool", NUMBER))
        if isinstance(value, int):
            return self.put("literal", (), str(operator.index(value)), Type("i64", NUMBER))  # of torch.compile's symbols, this makes a number
        return self.put("literal", (), repr(float(value)), Type("f32", NUMBER))

    def load(self, slot: int, dtype: str, indices: tuple[int, ...]) -> int:
        level = max([ZERO_DIM, *[self.type(i).level for i in indices]])
        return self.put("load", indices, str(slot), Type(dtype, level))


LITERALS = {"True": True, "False": False}


def literal_value(text: str) -> bool | int | float:
    """The number a `literal` instruction stands for."""
    if text in LITERALS:
        return LITERALS[text]
    try:
        return int(text)
    except ValueError:
        return float(text)


@dataclass(frozen=True)
class Program:
    instructions: tuple[Instruction, ...]
    results: tuple[int, ...]
    captures: tuple[CaptureSpec, ...]
    text: str

    # Kept by hand: Dynamo cannot enter the lock of Python 3.11's cached_property.

    @property
    def uses(self) -> frozenset[str]:
        """Which of b, h, q, kv and score any result depends on."""
        found: frozenset[str] | None = self.__dict__.get("_uses")
        if found is None:
            found = frozenset([name for k in self.results for name in self.dependencies[k]])
            if not torch.compiler.is_compiling():
                self.__dict__["_uses"] = found
        return found

    @property
    def dependencies(self) -> tuple[frozenset[str], ...]:
        """For every instruction, the indices it depends on (its natural rank), and `score`."""
        found: tuple[frozenset[str], ...] | None = self.__dict__.get("_dependencies")
        if found is None:
            found = _dependencies(self.instructions)
            if not torch.compiler.is_compiling():
                self.__dict__["_dependencies"] = found
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> "Program":
        return self  # nothing in it changes

    @property
    def result_type(self) -> Type:
        return self.instructions[self.results[0]].type


def _dependencies(instructions: tuple[Instruction, ...]) -> tuple[frozenset[str], ...]:
    found: list[frozenset[str]] = []
    for op, args, attr, _ in instructions:
        own = [attr] if op == "index" else ["score"] if op == "score" else []
        found.append(frozenset([*own, *[name for a in args for name in found[a]]]))
    return tuple(found)


def finish(tape: Tape, results: tuple[int, ...], captures: tuple[CaptureSpec, ...]) -> Program:
    """The program of what the results need, and nothing else."""
    needed = [False] * len(tape.instructions)
    for k in results:
        needed[k] = True
    for k in range(len(tape.instructions) - 1, -1, -1):
        if needed[k]:
            for a in tape.instructions[k].args:
                needed[a] = True
    place: list[int] = []
    kept: list[Instruction] = []
    for k, instruction in enumerate(tape.instructions):
        place.append(len(kept))
        if needed[k]:
            args = tuple([place[a] for a in instruction.args])
            kept.append(Instruction(instruction.op, args, instruction.attr, instruction.type))
    return program_of(kept, tuple([place[k] for k in results]), captures)


def program_of(instructions: list[Instruction], results: tuple[int, ...], captures: tuple[CaptureSpec, ...]) -> Program:
    """A program with its text: `dtype:rank` of the captures; one `op attr operands` per instruction; `-> results`."""
    lines = [" ".join([f"{dtype}:{rank}" for dtype, rank in captures])]
    for op, args, attr, _ in instructions:
        lines.append(" ".join([op, attr if attr else "-", *[str(a) for a in args]]))
    lines.append(" ".join(["->", *[str(k) for k in results]]))
    return Program(tuple(instructions), results, captures, ";".join(lines))


@dataclass(frozen=True, eq=False)
class BoundProgram:
    """A program and the arguments of one call: what tracing a function gives."""

    program: Program
    captures: tuple[torch.Tensor, ...] = ()
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    repeatable: bool = True  # tracing looked at no tensor's contents, so it would give the same again

    def with_captures(self, captures: tuple[torch.Tensor, ...]) -> "BoundProgram":
        """The same of other tensors."""
        other = object.__new__(BoundProgram)
        own = other.__dict__
        own.update(self.__dict__)  # the constructor would take several times as long
        own["captures"] = captures
        return other
