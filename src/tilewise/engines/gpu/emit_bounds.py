"""Masks as Triton source of their bounds: a function that says of whole tiles whether a mask allows everything in them, or nothing.

It takes b, h, q and kv as pairs, the first and the last of each tile, and gives a pair of booleans: (1, 1) everything, (0, 0) nothing, (0, 1) undecided.
It is written for integers that fit 32 bits over the whole problem, as those of nearly all masks do: their ends are computed in 64, so that nothing wraps. A
mask that computes something else has none, which is always right: who asks has to look into the tiles.
"""

from tilewise.engines.codegen import ProgramWriter
from tilewise.lang.ops import OPS
from tilewise.lang.types import Type, promote

FOLLOWED = ("i32", "i64")  # integers of fewer bits may wrap
DIVISIONS = ("floordiv", "mod")  # their bounds are those of a dividend of at least 0 and a divisor above it


class BoundsWriter(ProgramWriter):
    """Writes the interval of every instruction of a mask."""

    def lines(self) -> list[str] | None:
        """The function's body; None if a mask has no such bounds."""
        texts = [self._interval(k) for k in range(len(self.program.instructions))]
        if None in texts:
            return None
        return [*[f"v{k} = {text}" for k, text in enumerate(texts)], f"return v{self.program.results[0]}"]

    def _interval(self, k: int) -> str | None:
        op, args, attr, type = self.program.instructions[k]
        if op == "index":
            return f"widened({attr})"
        if not type.is_bool and type.dtype not in FOLLOWED:
            return None
        if op == "int":
            return f"(i[{attr}], i[{attr}])"
        if op == "literal":
            return f"({attr}, {attr})"
        if op == "load":
            return self._load(int(attr), args)
        return self._operation(op, args, k)

    def _operation(self, op: str, args: tuple[int, ...], k: int) -> str | None:
        types = [self.program.instructions[a].type for a in args]
        computed = promote(*types)
        if computed.is_bool:
            text = OPS[op].triton_bounds_of_bools
        elif any([t.dtype not in FOLLOWED for t in types]) or not self._stays_exact(op, args, k, computed):
            return None
        else:
            text = OPS[op].triton_bounds
        return None if text is None else text.format(*[f"v{a}" for a in args])

    def _stays_exact(self, op: str, args: tuple[int, ...], k: int, computed: Type) -> bool:
        """Whether an operation of integers gives what it would without limits: none is converted to fewer bits than it has, and the result fits."""
        converts = all([self.program.instructions[a].type.dtype == computed.dtype or computed.dtype == "i64" or self.facts.fits32(a) for a in args])
        fits = self.program.instructions[k].type.is_bool or self.facts.fits32(k)
        return converts and fits and (op not in DIVISIONS or self._is_positive_division(args))

    def _load(self, slot: int, indices: tuple[int, ...]) -> str | None:
        """Of a stretch of a capture's last dimension, in one place along the others: b and h are points."""
        varies = [self.program.dependencies[k] for k in indices]
        inside = all([self.facts.is_inside(k, slot, d) for d, k in enumerate(indices)])
        if not varies or not varies[-1] or not inside or any([v & {"q", "kv"} for v in varies[:-1]]):
            return None
        strides = self.slots[slot][1]
        places = "".join([f" + offset(v{k}[0], s[{strides + d}])" for d, k in enumerate(indices[:-1])])
        last = len(indices) - 1
        text = f"loaded_bounds(p[{slot}], (0{places}), v{indices[last]}, s[{strides + last}])"
        return f"truth_bounds({text})" if self.program.captures[slot].dtype == "bool" else text


def bounds_source(lines: list[str]) -> list[str]:
    return ["@triton.jit", "def bounds(b, h, q, kv, p, i, f, s):", *[f"    {line}" for line in lines]]
