"""Rewriting a program so that an index means something else: a slice's offset, positions looked up in a tensor, or a place on a grid."""

from collections.abc import Callable
from math import prod

from torch import Tensor

from tilewise.lang.ops import OPS, emit, infer
from tilewise.lang.program import BoundProgram, CaptureSpec, Program, Tape, finish
from tilewise.lang.types import INDEX, NAME_OF


def shifted(call: BoundProgram, name: str, offset: int) -> BoundProgram:
    """The program with index `name` replaced by `name + offset`."""
    if offset == 0 or name not in call.program.uses:
        return call
    tape, slot = Tape(), len(call.ints)
    at = tape.index(name)
    moved = tape.put("add", (at, tape.int_slot(slot)), "", tape.type(at))
    return BoundProgram(_rewritten(call, name, tape, moved, call.program.captures), call.captures, (*call.ints, offset), call.floats)


def gathered(call: BoundProgram, name: str, positions: Tensor) -> BoundProgram:
    """The program with index `name` replaced by positions[name]."""
    if name not in call.program.uses:
        return call
    tape, dtype = Tape(), NAME_OF[positions.dtype]
    specs = (*call.program.captures, CaptureSpec(dtype, 1))
    looked_up = tape.load(len(specs) - 1, dtype, (tape.index(name),))
    if dtype != INDEX.dtype:
        looked_up = tape.put("cast", (looked_up,), INDEX.dtype, INDEX)  # a mask computes with positions: 64 bits, as if traced so
    return BoundProgram(_rewritten(call, name, tape, looked_up, specs), (*call.captures, positions), call.ints, call.floats)


def in_patches(call: BoundProgram, name: str, shape: tuple[int, ...], strips: tuple[int, ...]) -> BoundProgram:
    """The program with index `name`, which counts the points of a grid in the order of `strips`, replaced by its row-major index.

    The order: the first axis is cut into strips of strips[0], each of these along the second axis into strips of strips[1], and so on;
    the last axis is walked point by point, and at each point all that lies across the strip, row-major. So 64 consecutive points of a
    plane in strips of 8 are a patch of 8 x 8. The last strip of an axis may be narrower.

    Where the program divides the index by the sizes of the grid, as it does to find rows and columns, they are given to it directly.
    """
    if not any([op == "index" and attr == name for op, _, attr, _ in call.program.instructions]):  # torch.compile follows no cached property
        return call
    tape, ints = Tape(), list(call.ints)

    def number(value: int) -> int:
        ints.append(value)
        return tape.int_slot(len(ints) - 1)

    def flat(coordinates: tuple[int, ...]) -> int:
        at = coordinates[0]
        for axis in range(1, len(coordinates)):
            at = emit(tape, "add", emit(tape, "mul", at, sizes[axis]), coordinates[axis])
        return at

    sizes = [number(n) for n in shape]
    places = {}
    coordinates = _coordinates(tape, tape.index(name), shape, strips, number)
    for axes in range(len(shape), 1, -1):  # what is left of the index after each division
        places[flat(coordinates[:axes])] = coordinates[:axes]
    program = _rewritten(call, name, tape, flat(coordinates), call.program.captures, _Divisions(places, shape, call.ints))
    return BoundProgram(program, call.captures, tuple(ints), call.floats, call.repeatable)


def _coordinates(tape: Tape, index: int, shape: tuple[int, ...], strips: tuple[int, ...], number: Callable[[int], int]) -> tuple[int, ...]:
    """Where on the grid an index in the order of strips is, one instruction for every axis."""
    starts: list[int] = []
    heights: list[int] = []  # instructions: how much of each axis lies across the strip
    known = 1  # their product, those that are the same everywhere
    varying: int | None = None  # and the others'
    rest = index
    for axis, strip in enumerate(strips):
        per_strip = number(known * strip * prod(shape[axis + 1 :]))
        if varying is not None:
            per_strip = emit(tape, "mul", varying, per_strip)
        which = emit(tape, "floordiv", rest, per_strip)
        rest = emit(tape, "mod", rest, per_strip)
        start = emit(tape, "mul", which, tape.literal(strip))
        starts.append(start)
        if shape[axis] % strip == 0:
            heights.append(tape.literal(strip))
            known *= strip
        else:  # kept from 1 on where kernels compute past the end
            left = emit(tape, "sub", number(shape[axis]), start)
            height = emit(tape, "clamp_min", emit(tape, "clamp_max", left, tape.literal(strip)), tape.literal(1))
            heights.append(height)
            varying = height if varying is None else emit(tape, "mul", varying, height)
    across = tape.literal(known)
    if varying is not None:
        across = varying if known == 1 else emit(tape, "mul", varying, across)
    last = emit(tape, "floordiv", rest, across)
    rest = emit(tape, "mod", rest, across)
    found = [last]
    for axis in range(len(strips) - 1, -1, -1):
        within = rest if axis == 0 else emit(tape, "mod", rest, heights[axis])
        rest = rest if axis == 0 else emit(tape, "floordiv", rest, heights[axis])
        found.append(emit(tape, "add", starts[axis], within))
    return tuple(found[::-1])


class _Divisions:
    """Quotients and remainders of a row-major index by the grid's sizes, which are known without dividing."""

    def __init__(self, places: dict[int, tuple[int, ...]], shape: tuple[int, ...], ints: tuple[int, ...]) -> None:
        self.places = places  # instruction of an index -> those of its coordinates
        self.flat_of = {coordinates: at for at, coordinates in places.items()}
        self.shape = shape
        self.ints = ints

    def known(self, tape: Tape, op: str, at: tuple[int, ...]) -> int | None:
        coordinates = self.places.get(at[0]) if op in ("mod", "floordiv") else None
        divisor = tape.instructions[at[1]] if coordinates is not None else None
        if coordinates is None or divisor is None or divisor.op != "int" or int(divisor.attr) >= len(self.ints):
            return None
        if self.ints[int(divisor.attr)] != self.shape[len(coordinates) - 1]:
            return None
        if op == "mod":
            return coordinates[-1]
        return coordinates[0] if len(coordinates) == 2 else self.flat_of[coordinates[:-1]]


def _rewritten(
    call: BoundProgram, name: str, tape: Tape, replacement: int, captures: tuple[CaptureSpec, ...], divisions: "_Divisions | None" = None
) -> Program:
    place: list[int] = []
    for op, args, attr, type in call.program.instructions:
        at = tuple(place[a] for a in args)
        known = None if divisions is None or len(at) != 2 else divisions.known(tape, op, at)
        if known is not None:
            place.append(known)
        elif op == "index" and attr == name:
            place.append(replacement)
        elif op in OPS:
            place.append(tape.put(op, at, attr, infer(OPS[op], tuple(tape.type(a) for a in at), attr)))
        else:
            place.append(tape.put(op, at, attr, type))
    return finish(tape, tuple(place[k] for k in call.program.results), captures)
