"""A traced value as the expression that computes it: what print() shows inside a mask or score function."""

from collections.abc import Sequence

from tilewise.lang.program import Tape
from tilewise.lang.types import DTYPE_OF

LONGEST = 240  # characters of an operation; of a longer one, operands are left out

# How tightly Python's operators bind, loosest first: a comparison needs parentheses inside everything else.
COMPARISON, OR, XOR, AND, SHIFT, SUM, PRODUCT, UNARY, POWER, ATOM = range(10)
BINARY = {
    "lt": ("<", COMPARISON),
    "le": ("<=", COMPARISON),
    "gt": (">", COMPARISON),
    "ge": (">=", COMPARISON),
    "eq": ("==", COMPARISON),
    "ne": ("!=", COMPARISON),
    "or": ("|", OR),
    "xor": ("^", XOR),
    "and": ("&", AND),
    "shl": ("<<", SHIFT),
    "shr": (">>", SHIFT),
    "add": ("+", SUM),
    "sub": ("-", SUM),
    "mul": ("*", PRODUCT),
    "div": ("/", PRODUCT),
    "floordiv": ("//", PRODUCT),
    "mod": ("%", PRODUCT),
}
PREFIX = {"neg": "-", "not": "~"}

Written = tuple[str, int]  # a text, and how tightly its outermost operator binds


def expression(tape: Tape, at: int, ints: Sequence[int], floats: Sequence[float]) -> str:
    """Value `at` of a tape: `(q >= kv) & (tensor0[q] == tensor0[kv])`. Captured tensors, whose names are unknown, are numbered as they were met."""
    written: list[Written] = []
    for op, args, attr, _ in tape.instructions[: at + 1]:
        if op in ("int", "float"):
            written.append(_number(str(ints[int(attr)] if op == "int" else floats[int(attr)])))
            continue
        operands = [written[a] for a in args]
        found = _operation(op, operands, attr)
        if len(found[0]) > LONGEST:
            found = _operation(op, [("...", ATOM) if len(text) > LONGEST // len(operands) else (text, binds) for text, binds in operands], attr)
        written.append(found)
    return written[at][0]


def _operation(op: str, operands: list[Written], attr: str) -> Written:
    texts = [text for text, _ in operands]
    if op == "literal":
        return _number(attr)
    if op in ("index", "score"):
        return (attr if op == "index" else "score"), ATOM
    if op == "load":
        return f"tensor{attr}" + (f"[{', '.join(texts)}]" if texts else ""), ATOM
    if op == "cast":
        return f"{_inside(operands[0], ATOM)}.to({DTYPE_OF[attr]})", ATOM
    if op in PREFIX:
        return PREFIX[op] + _inside(operands[0], UNARY), UNARY
    if op == "pow":
        return f"{_inside(operands[0], ATOM)} ** {_inside(operands[1], UNARY)}", POWER
    if op in BINARY:
        sign, binds = BINARY[op]
        left = binds + 1 if binds == COMPARISON else binds  # a < b < c would be one comparison
        return f"{_inside(operands[0], left)} {sign} {_inside(operands[1], binds + 1)}", binds
    return f"{op}({', '.join(texts)})", ATOM


def _number(text: str) -> Written:
    return text, UNARY if text.startswith("-") else ATOM


def _inside(operand: Written, least: int) -> str:
    """The operand, in parentheses if it binds less tightly than its place asks for."""
    text, binds = operand
    return text if binds >= least else f"({text})"
