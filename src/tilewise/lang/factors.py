"""The numbers a score multiplies by, first and last, taken out of its program: f(s) = gain * g(factor * s).

Kernels multiply by a scale before the program and into base 2 after it whatever it does, so these numbers cost nothing there. Inside
they cost a multiplication of every element, and two more in the derivative.
"""

from typing import NamedTuple

from tilewise.lang.program import BoundProgram, Program, Tape, finish, literal_value

LARGEST = 1e6  # of a factor's or gain's size, and its inverse the least factor's: beyond, products computed one by one might leave float32's range
LEAST_GAIN = 1e-3  # a smaller one would not tell scores apart that it makes equal
BALANCED = 8.0  # factor * gain, and its inverse: kernels round the derivative of g to 16 bits, which must not be much smaller or larger than f's


class Factored(NamedTuple):
    factor: float
    call: BoundProgram
    gain: float  # positive: the largest g is the largest f


def factored(call: BoundProgram) -> Factored:
    program = call.program
    users = _users(program)
    start = next((k for k, instruction in enumerate(program.instructions) if instruction.op == "score"), None)
    factor, score = 1.0, start
    while score is not None and len(users[score]) == 1:
        found = _product(call, users[score][0])
        if found is None or found[0] != score or not 1.0 / LARGEST <= abs(factor * found[1]) <= LARGEST:
            break
        factor, score = factor * found[1], users[score][0]
    gain, result = 1.0, program.results[0]
    while result != score:
        found = _product(call, result)
        if found is None or not LEAST_GAIN <= gain * found[1] <= LARGEST:
            break
        result, gain = found[0], gain * found[1]
    nothing = score == start and result == program.results[0]
    if nothing or not 1.0 / BALANCED <= abs(factor * gain) <= BALANCED:
        return Factored(1.0, call, 1.0)
    tape = Tape()
    place: list[int] = []
    for k, (op, args, attr, type) in enumerate(program.instructions):
        place.append(tape.score(type.dtype) if k == score else tape.put(op, tuple([place[a] for a in args]), attr, type))
    return Factored(factor, BoundProgram(finish(tape, (place[result],), program.captures), call.captures, call.ints, call.floats, call.repeatable), gain)


def _users(program: Program) -> list[list[int]]:
    """For every instruction, those that use it; the program's end uses its result."""
    users: list[list[int]] = [[] for _ in program.instructions]
    for k, instruction in enumerate(program.instructions):
        for a in instruction.args:
            users[a].append(k)
    for k in program.results:
        users[k].append(len(program.instructions))
    return users


def _product(call: BoundProgram, k: int) -> tuple[int, float] | None:
    """If instruction k is another of the same type times a number that is known: that one, and the number."""
    if k == len(call.program.instructions):
        return None
    op, args, _, type = call.program.instructions[k]
    if op == "mul":
        sides = [(args[0], _number(call, args[1])), (args[1], _number(call, args[0]))]
    elif op == "div":
        divisor = _number(call, args[1])
        sides = [(args[0], 1.0 / divisor if divisor else None)]
    else:
        return None
    return next(((other, n) for other, n in sides if n is not None and call.program.instructions[other].type == type), None)


def _number(call: BoundProgram, k: int) -> float | None:
    """What instruction k is, if it is a number of the program or of its arguments."""
    op, _, attr, type = call.program.instructions[k]
    if op == "int":
        return float(call.ints[int(attr)])
    if op == "float":
        return call.floats[int(attr)]
    return float(literal_value(attr)) if op == "literal" and not type.is_bool else None
