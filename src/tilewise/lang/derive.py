"""Derivatives of a score: with respect to the score that comes in, and to every load of the wanted captures.

The score itself is computed in the types that torch gives to its steps. Its derivatives are computed from these values in the score's own type at
least, whatever a step's type is: products of slopes leave the range and the digits of 16-bit captures long before the score does.
"""

from dataclasses import dataclass
from functools import lru_cache

from tilewise.lang.ops import OPS, emit
from tilewise.lang.program import Program, Tape, finish
from tilewise.lang.types import ZERO_DIM, Type


@dataclass(frozen=True)
class LoadSite:
    """One place where a wanted capture is loaded; positions are into the derivative program's results."""

    slot: int
    gradient: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Derivative:
    """`program`'s result 0 is d(result)/d(score); each site has its own d(result)/d(load) and its indices."""

    program: Program
    sites: tuple[LoadSite, ...]


@lru_cache(maxsize=1024)
def derive(program: Program, wanted: frozenset[int]) -> Derivative:
    """Reverse accumulation over the program's one result, written as more instructions on the same tape."""
    tape = Tape(narrowest=program.result_type.dtype)
    for instruction in program.instructions:
        tape.put(*instruction)
    adjoints: dict[int, int] = {program.results[0]: _one(tape, program.result_type)}
    for k in range(len(program.instructions) - 1, -1, -1):
        instruction = program.instructions[k]
        rule = OPS[instruction.op].derive if instruction.op in OPS else None
        if k not in adjoints or rule is None:
            continue
        for operand, gradient in zip(instruction.args, rule(tape, adjoints[k], instruction.args, k), strict=True):
            type = program.instructions[operand].type
            if gradient is None or not type.is_float or type.level == 0:
                continue
            adjoints[operand] = emit(tape, "add", adjoints[operand], gradient) if operand in adjoints else gradient

    zero = tape.literal(0.0)
    results = []
    score = [k for k, i in enumerate(program.instructions) if i.op == "score"]
    results.append(adjoints.get(score[0], zero) if score else zero)
    sites = []
    for k, instruction in enumerate(program.instructions):
        if instruction.op == "load" and int(instruction.attr) in wanted and k in adjoints:
            at = len(results)
            results += [adjoints[k], *instruction.args]
            sites.append(LoadSite(int(instruction.attr), at, tuple(range(at + 1, at + 1 + len(instruction.args)))))
    return Derivative(finish(tape, tuple(results), program.captures), tuple(sites))


def _one(tape: Tape, type: Type) -> int:
    """1 in the result's precision: a Python number would let what is derived from it alone fall back to float32."""
    one = tape.literal(1.0)
    return one if type.dtype == "f32" else tape.put("cast", (one,), type.dtype, Type(type.dtype, ZERO_DIM))
