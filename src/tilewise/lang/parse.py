"""A program read back from its text, which may come from a file.

Generated code trusts a program: its operands become variables, its slots addresses. So only what tracing could have written is read: operations of the
tables, operands that come before, as many as the operation takes and of types that it takes, slots that exist, no instruction that nothing needs.
Whatever the text can say in another way than `program_of` says it (spaces, signs, a line written twice) is no program's.
"""

import copyreg
from functools import lru_cache
from typing import Any

from tilewise.errors import InputError
from tilewise.lang.ops import OPS, infer
from tilewise.lang.program import INDICES, CaptureSpec, Program, Tape, literal_value, program_of
from tilewise.lang.types import DTYPE_OF, FLOATS, INTEGER_RANGE, NUMBER

LEAVES = ("index", "score", "int", "float", "literal")


@lru_cache(maxsize=1024)
def parse(text: str) -> Program:
    """The program with this text; InputError says why there is none."""
    head, *lines = text.split(";")
    captures = tuple([_capture(words) for words in head.split()])
    tape = Tape()
    for line in lines[:-1]:
        try:
            _put(tape, captures, line.split())
        except ValueError as error:
            raise InputError(f"{line[:80]!r} is no instruction of the mask and score language: {error}") from None
    arrow, *results = lines[-1].split() if lines else [""]
    count = len(tape.instructions)
    if arrow != "->" or not results or not all([_is_number(k) and int(k) < count for k in results]):
        raise InputError(f"a program of {count} instructions cannot end in {lines[-1][:80] if lines else text[:80]!r}")
    program = program_of(tape.instructions, tuple(map(int, results)), captures)
    if program.text != text or len(needed(program)) != count:
        raise InputError("no program is written like this: an instruction is not needed, or stands there twice, or is spelled in another way")
    return program


def needed(program: Program) -> set[int]:
    """The instructions that the results need."""
    found = set(program.results)
    for k in range(len(program.instructions) - 1, -1, -1):
        if k in found:
            found.update(program.instructions[k].args)
    return found


def _capture(words: str) -> CaptureSpec:
    dtype, _, rank = words.partition(":")
    if dtype not in DTYPE_OF or not _is_number(rank):
        raise InputError(f"{words[:80]!r} is no captured tensor's dtype and rank")
    return CaptureSpec(dtype, int(rank))


def _put(tape: Tape, captures: tuple[CaptureSpec, ...], words: list[str]) -> None:
    """Write one instruction; ValueError says what is wrong with it."""
    if len(words) < 2:
        raise ValueError("it has too few words")
    op, attr, *operands = words
    if not all([_is_number(a) and int(a) < len(tape.instructions) for a in operands]):
        raise ValueError(f"operands are numbers of earlier instructions, of which there are {len(tape.instructions)}")
    at = tuple(map(int, operands))
    if op in LEAVES:
        if at:
            raise ValueError("it takes no operands")
        _put_leaf(tape, op, attr)
    elif op == "load":
        _put_load(tape, captures, attr, at)
    elif op in OPS:
        _put_operation(tape, op, attr, at)
    else:
        raise ValueError("there is no such operation")


def _put_leaf(tape: Tape, op: str, attr: str) -> None:
    if op == "literal":
        value = literal_value(attr)
        if type(value) is int and not _fits(value):
            raise ValueError("the number does not fit in 64 bits")
        tape.literal(value)
        return
    known = {"index": attr in INDICES, "score": attr in FLOATS, "int": _is_number(attr), "float": _is_number(attr)}
    if not known[op]:
        raise ValueError(f"there is no {op} {attr[:80]!r}")
    if op == "index":
        tape.index(attr)
    elif op == "score":
        tape.score(attr)
    elif op == "int":
        tape.int_slot(int(attr))
    else:
        tape.float_slot(int(attr))


def _put_load(tape: Tape, captures: tuple[CaptureSpec, ...], attr: str, at: tuple[int, ...]) -> None:
    if not (_is_number(attr) and int(attr) < len(captures)):
        raise ValueError(f"there are {len(captures)} captured tensors")
    dtype, rank = captures[int(attr)]
    if len(at) != rank:
        raise ValueError(f"that captured tensor has {rank} dimensions")
    if not all([tape.type(a).is_integer for a in at]):
        raise ValueError("indices are integers")
    tape.load(int(attr), dtype, at)


def _put_operation(tape: Tape, op: str, attr: str, at: tuple[int, ...]) -> None:
    types = tuple([tape.type(a) for a in at])
    if len(at) != OPS[op].arity:
        raise ValueError(f"it takes {OPS[op].arity} operands")
    if not OPS[op].takes(*types):
        raise ValueError(f"it does not take {', '.join([t.dtype for t in types])}")
    if op == "cast":
        if attr not in DTYPE_OF:
            raise ValueError("there is no such dtype")
    elif attr != "-":
        raise ValueError("it has no attribute")
    elif all([t.level == NUMBER for t in types]):
        raise ValueError("it computes with numbers alone")
    attr = attr if op == "cast" else ""
    tape.put(op, at, attr, infer(OPS[op], types, attr))


def _is_number(text: str) -> bool:
    """Whether a word is a position or a slot; no program has a billion."""
    return 0 < len(text) < 10 and text.isascii() and text.isdigit()


def _fits(value: int) -> bool:
    low, high = INTEGER_RANGE["i64"]
    return low <= value <= high


def _by_text(program: Program) -> tuple[Any, ...]:
    return parse, (program.text,)


copyreg.pickle(Program, _by_text)  # a program is pickled as its text
