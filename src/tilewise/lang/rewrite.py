"""Rewriting a program so that an index means something else: a slice's offset, or positions looked up in a tensor."""

from torch import Tensor

from tilewise.lang.ops import OPS, infer
from tilewise.lang.program import Call, CaptureSpec, Program, Tape, finish
from tilewise.lang.types import INDEX, NAME_OF


def shifted(call: Call, name: str, offset: int) -> Call:
    """The program with index `name` replaced by `name + offset`."""
    if offset == 0 or name not in call.program.uses:
        return call
    tape, slot = Tape(), len(call.ints)
    at = tape.index(name)
    moved = tape.put("add", (at, tape.int_slot(slot)), "", tape.type(at))
    return Call(_rewritten(call, name, tape, moved, call.program.captures), call.captures, (*call.ints, offset), call.floats)


def gathered(call: Call, name: str, positions: Tensor) -> Call:
    """The program with index `name` replaced by positions[name]."""
    if name not in call.program.uses:
        return call
    tape, dtype = Tape(), NAME_OF[positions.dtype]
    specs = (*call.program.captures, CaptureSpec(dtype, 1))
    looked_up = tape.load(len(specs) - 1, dtype, (tape.index(name),))
    if dtype != INDEX.dtype:
        looked_up = tape.put("cast", (looked_up,), INDEX.dtype, INDEX)  # a mask computes with positions: 64 bits, as if traced so
    return Call(_rewritten(call, name, tape, looked_up, specs), (*call.captures, positions), call.ints, call.floats)


def _rewritten(call: Call, name: str, tape: Tape, replacement: int, captures: tuple[CaptureSpec, ...]) -> Program:
    place: list[int] = []
    for op, args, attr, type in call.program.instructions:
        at = tuple(place[a] for a in args)
        if op == "index" and attr == name:
            place.append(replacement)
        elif op in OPS:
            place.append(tape.put(op, at, attr, infer(OPS[op], tuple(tape.type(a) for a in at), attr)))
        else:
            place.append(tape.put(op, at, attr, type))
    return finish(tape, tuple(place[k] for k in call.program.results), captures)
