"""A program read back from its text."""

import copyreg
from functools import lru_cache
from typing import Any

from tilewise.lang.ops import OPS, infer
from tilewise.lang.program import CaptureSpec, Program, Tape, literal_value, program_of


@lru_cache(maxsize=1024)
def parse(text: str) -> Program:
    """The program with this text."""
    head, *lines, tail = text.split(";")
    captures = tuple(CaptureSpec(c.split(":")[0], int(c.split(":")[1])) for c in head.split())
    tape = Tape()
    for line in lines:
        op, attr, *args = line.split()
        at = tuple(map(int, args))
        if op == "index":
            tape.index(attr)
        elif op == "score":
            tape.score(attr)
        elif op == "int":
            tape.int_slot(int(attr))
        elif op == "float":
            tape.float_slot(int(attr))
        elif op == "literal":
            tape.literal(literal_value(attr))
        elif op == "load":
            tape.load(int(attr), captures[int(attr)].dtype, at)
        else:
            attr = "" if attr == "-" else attr
            tape.put(op, at, attr, infer(OPS[op], tuple(tape.type(a) for a in at), attr))
    return program_of(tape.instructions, tuple(map(int, tail[3:].split())), captures)


def _by_text(program: Program) -> tuple[Any, ...]:
    return parse, (program.text,)


copyreg.pickle(Program, _by_text)  # a program is pickled as its text
