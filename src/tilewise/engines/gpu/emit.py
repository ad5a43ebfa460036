"""Programs as Triton source: one small function per mask, score, dscore (its derivative) and scatter, gauge or fixed (captures' gradients).

A generated function takes b and h as scalars and q and kv as a column and a row (or a row and a column: it does not care),
so that what depends on q alone stays a column and only what needs both is a tile; they may come in two parts (gluon/kernels/primitives.py).
Python numbers and captures are arguments: `p` pointers, `i` ints, `f` floats, `s` sizes and strides. Only numbers, operation names and
slots reach the text.

Integers are 64-bit in the language. Where their bounds over the whole problem show that 32 bits hold them, 32 are used; likewise
a load whose index provably stays inside needs no clamping, and a division of non-negative numbers no correction.
"""

from collections.abc import Callable

import torch

from tilewise.engines.codegen import Layout, ProgramWriter
from tilewise.engines.facts import Facts
from tilewise.engines.gpu.limits import interpreted
from tilewise.lang import Derivative, Program
from tilewise.lang.derive import LoadSite
from tilewise.lang.ops import OPS
from tilewise.lang.program import literal_value
from tilewise.lang.types import DTYPE_OF, FLOATS, INTEGERS, NUMBER, Type

TL = {
    "bool": "tl.int1",
    "u8": "tl.uint8",
    "i8": "tl.int8",
    "i16": "tl.int16",
    "i32": "tl.int32",
    "i64": "tl.int64",
    "f16": "tl.float16",
    "bf16": "tl.bfloat16",
    "f32": "tl.float32",
    "f64": "tl.float64",
}
HALF = 2**30 - 1  # differences of such integers fit in 32 bits
DIFFERENCES = {"ge": "({0} - {1})", "gt": "({0} - {1} - 1)", "le": "({1} - {0})", "lt": "({1} - {0} - 1)"}  # negative where the comparison is false
EXACT = 2**24  # float32 holds every integer up to here
TILE = 1024  # more than a part of a place
PLACES = ("q", "kv")
SCORE_PARAMETERS = "score, b, h, q, kv, p, i, f, s"

# Triton copies what a loop loads to shared memory ahead of time, element by element where neighbours do not lie side by side. For
# keys' own rows and tables that costs more than it hides, so those go straight to registers.
UNPIPELINED = {"f32", "i32", "i64", "f16", "bf16"}


class Writer(ProgramWriter):
    """Writes the instructions of one program as lines of Triton."""

    def __init__(self, program: Program, facts: Facts, layouts: tuple[Layout, ...], precise: bool, split_index: bool) -> None:
        super().__init__(program, facts, layouts)
        self.split_index = split_index  # q and kv
        self.precise = precise
        self.lines: list[str] = []
        for k in range(len(program.instructions)):
            self._write(k)

    def _write(self, k: int) -> None:
        op, args, attr, type = self.program.instructions[k]
        dtype = self._width(k, type)
        if op == "index":
            text = f"{attr}[0] + {attr}[1]" if self.split_index and attr in PLACES else attr
            dtype = "i32"
        elif op == "score":
            text = "score"
            dtype = "f32"
        elif op == "int":
            text = f"i[{attr}]"
        elif op == "float":
            text = f"f[{attr}]"
        elif op == "literal":
            text = _literal(attr)
        elif op == "load":
            address = self.address("p", int(attr), args)
            text = f"load_unpipelined({address})" if type.dtype in UNPIPELINED and "kv" in self.varies(args) else f"tl.load({address})"
            if type.is_bool:
                text = f"({text} != 0)"
            elif dtype != type.dtype:
                text = f"{text}.to({TL[dtype]})"
        elif op == "cast":
            text = self._cast(args[0], dtype)
        else:
            text = self._operation(op, args, type, dtype)
        self.types.append(dtype)
        self.lines.append(f"v{k} = {text}")

    def _width(self, k: int, type: Type) -> str:
        if type.dtype == "bf16" and interpreted():  # the interpreter cannot compute with bfloat16
            return "f32"
        return "i32" if type.dtype == "i64" and self.facts.fits32(k) and self.program.instructions[k].op != "load" else type.dtype

    def _cast(self, k: int, dtype: str) -> str:
        """Value k in another type; literals adapt by themselves."""
        instruction = self.program.instructions[k]
        if instruction.op == "literal" and dtype != "bool":
            value = literal_value(instruction.attr)
            return _literal(repr(float(value)) if dtype.startswith(("f", "bf")) else repr(value))
        if self.types[k] == dtype:
            return f"v{k}"
        if dtype == "bool":
            return f"(v{k} != 0)"
        return self._as_float(k) if dtype == "f32" else f"v{k}.to({TL[dtype]})"

    def _widened(self, k: int, narrow: str) -> str:
        """Value k as float32, after it was rounded to 16 bits if it is a number."""
        op, _, attr, type = self.program.instructions[k]
        if type.level != NUMBER or (narrow == "bf16" and interpreted()):  # the interpreter rounds nothing to bfloat16
            return self._cast(k, "f32")
        if op == "literal":
            return _literal(repr(float(torch.tensor(literal_value(attr), dtype=DTYPE_OF[narrow]))))
        return f"v{k}.to({TL[narrow]}).to(tl.float32)"

    def _as_float(self, k: int) -> str:
        """An integer as float32. Conversion is slow on a GPU and float sums are not: where both are exact, q and kv are converted
        apart, as a column and a row, and the tile is computed from those."""
        parts = self._split_float(k)
        if parts is not None:
            return f"({parts[0]}.to(tl.float32) + {parts[1]})"
        op, args, _, _ = self.program.instructions[k]
        exact = self.types[k] == "i32" and self.facts.within(k, -EXACT, EXACT)
        if exact and op in ("add", "sub", "neg", "abs", "minimum", "maximum") and {"q", "kv"} <= self.program.dependencies[k]:
            return self._text(op, "f32").format(*[self._cast(a, "f32") for a in args])
        return f"v{k}.to(tl.float32)"

    def _split_float(self, k: int) -> tuple[str, str] | None:
        """A sum of places and other integers in two parts: integers, and floats that the compiler knows; None where it is another or might be rounded."""
        if not self.split_index or self.precise or self.types[k] != "i32" or not self.facts.within(k, TILE - EXACT, EXACT - TILE):
            return None
        return self._split_sum(k, ".to(tl.float32)", "0.0")

    def _split_sum(self, k: int, cast: str, zero: str) -> tuple[str, str] | None:
        """The two parts of a sum of places and other 32-bit integers, the second of them known to the compiler; None where no place is in it."""
        terms = self._terms(k, "+", "i32")
        places = [(sign, self.program.instructions[n].attr) for sign, n in terms if self._is_place(n)]
        if not places:
            return None
        others = [f" {sign} v{n}" for sign, n in terms if not self._is_place(n)]
        first, second = ("".join([f" {sign} {name}[{part}]{cast}" for sign, name in places]) for part, cast in ((0, ""), (1, cast)))
        return f"(0{first}{''.join(others)})", f"({zero}{second})"

    def _is_place(self, k: int) -> bool:
        op, _, attr, _ = self.program.instructions[k]
        return op == "index" and attr in PLACES

    def _operation(self, name: str, args: tuple[int, ...], type: Type, dtype: str) -> str:
        if name == "where":
            return f"tl.where({self._cast(args[0], 'bool')}, {self._cast(args[1], dtype)}, {self._cast(args[2], dtype)})"
        narrow = self._computed_in(args, type, dtype)
        computed = "f32" if narrow in ("f16", "bf16") and (OPS[name].triton_in_float32 or interpreted()) else narrow
        operands = [self._cast(a, computed) if computed == narrow or self._is_wide(name, n, a) else self._widened(a, narrow) for n, a in enumerate(args)]
        text = SPECIAL[name](self, args, operands, computed) if name in SPECIAL else None
        if text is None:
            text = self._text(name, computed).format(*operands)
        return text if type.is_bool or dtype == computed else f"({text}).to({TL[dtype]})"

    def _text(self, name: str, computed: str) -> str:
        """The text of an operation's entry for operands of this type."""
        op = OPS[name]
        text = op.triton
        if computed == "bool" and op.triton_of_bools is not None:
            text = op.triton_of_bools
        elif computed in INTEGERS and op.triton_of_integers is not None:
            text = op.triton_of_integers
        elif computed == "f32":
            text = (op.triton_precise if self.precise else op.triton_fast) or text
        assert text is not None, f"{name} is written by SPECIAL"
        return text

    # -- operations whose text depends on what is known of their operands: see SPECIAL -------------------------------

    def _floordiv(self, args: tuple[int, ...], operands: list[str], computed: str) -> str:
        a, b = operands
        if computed in FLOATS:
            return f"tl.floor({a} / {b})"
        if self._is_positive_division(args):
            return f"quotient({a}, {b})" if computed == "i32" and self._divides_quickly(*args) else f"({a} // {b})"
        return f"({a} // {b} - {_rounds_up(a, b)}.to({TL[computed]}))"

    def _mod(self, args: tuple[int, ...], operands: list[str], computed: str) -> str:
        a, b = operands
        if computed in FLOATS:
            return f"({a} - tl.floor({a} / {b}) * {b})"
        if self._is_positive_division(args):
            return f"({a} - quotient({a}, {b}) * {b})" if computed == "i32" and self._divides_quickly(*args) else f"({a} % {b})"
        return f"(({a} % {b}) + tl.where({_rounds_up(a, b)}, {b}, 0))"

    def _divides_quickly(self, a: int, b: int) -> bool:
        """Whether a column or row divided by one number may be multiplied by that number's inverse in 32 bits (see steps.quotient)."""
        varies = self.program.dependencies
        one_number = not varies[b] and self.program.instructions[b].op != "literal"  # the compiler knows what to do with a literal
        return one_number and bool(varies[a] & {"q", "kv"}) and self.facts.is_at_least(b, 2) and self.facts.product_is_below(a, b, 2**32)

    def _div(self, args: tuple[int, ...], operands: list[str], computed: str) -> str | None:
        """One division, not one per element; scores of 16-bit inputs do not see the rounding."""
        if self.precise or self.program.dependencies[args[1]] & {"q", "kv", "score"}:
            return None
        return f"({operands[0]} * (1.0 / {operands[1]}))"

    def _add(self, args: tuple[int, ...], operands: list[str], computed: str) -> str | None:
        return self._integer_sum(args, "+", computed)

    def _sub(self, args: tuple[int, ...], operands: list[str], computed: str) -> str | None:
        return self._integer_sum(args, "-", computed)

    def _integer_sum(self, args: tuple[int, ...], sign: str, computed: str) -> str | None:
        """A sum of integers in another order, which changes nothing: first what depends on q alone, or kv alone, so that one
        operation is left per element."""
        if computed not in INTEGERS:
            return None
        terms = self._terms(args[0], "+", computed) + self._terms(args[1], sign, computed)
        if len(terms) == 2 or not {"q", "kv"} <= self.varies(args):
            return None
        groups: dict[frozenset[str], str] = {}
        for sign, k in terms:
            rank = self.program.dependencies[k] & {"q", "kv"}
            groups[rank] = f"{groups.get(rank, '')} {sign} {self._cast(k, computed)}"
        scalars = groups.pop(frozenset(), "")
        first, *others = [text for _, text in sorted(groups.items(), key=lambda group: sorted(group[0]))]
        return "(" + " + ".join(f"(0{text})" for text in (first + scalars, *others)) + ")"

    def _mul(self, args: tuple[int, ...], operands: list[str], computed: str) -> str | None:
        """A number times places in parts: c (x + y) as c x + c y, of which the second is part of an operation that adds."""
        if computed != "f32":
            return None
        for a, n in (args, args[::-1]):
            op, inner, _, _ = self.program.instructions[a]
            parts = self._split_float(inner[0] if op == "cast" and self.types[a] == "f32" else a)
            if parts is not None and not self.program.dependencies[n] & {"q", "kv", "score"}:
                number = self._cast(n, "f32")
                return f"tl.fma({parts[1]}, {number}, {parts[0]}.to(tl.float32) * {number})"
        return None

    def _pow(self, args: tuple[int, ...], operands: list[str], computed: str) -> str:
        exponent = self.program.instructions[args[1]]
        if exponent.op == "literal":
            n = literal_value(exponent.attr)
            if n in range(9):
                return "(" + " * ".join([operands[0]] * int(n)) + ")" if n else f"({operands[0]} * 0 + 1)"
            if n == 0.5 and computed in FLOATS:
                return f"tl.sqrt({operands[0]})"
        return f"power({operands[0]}, {operands[1]})"

    # -- what is around the operations -------------------------------------------------------------------------------

    def address(self, pointers: str, slot: int, indices: tuple[int, ...]) -> str:
        """Where an element of a capture lies: negative indices count from the end, others are kept inside."""
        layout, (sizes, strides) = self.layouts[slot], self.slots[slot]
        terms: list[str] = []
        for d, k in enumerate(indices):
            index = f"v{k}"
            if not self.facts.is_inside(k, slot, d):
                if not self.facts.is_at_least(k, 0):
                    index = f"tl.where({index} < 0, {index} + s[{sizes + d}], {index})"
                    index = f"tl.maximum({index}, 0)"
                index = f"tl.minimum({index}, s[{sizes + d}] - 1)"
            if layout.wide or self.types[k] == "i64":
                index = f"({index}).to({'tl.int64' if layout.wide else 'tl.int32'})" if self.program.instructions[k].op != "literal" else index
            if layout.contiguous and d == len(indices) - 1:
                terms += (self._split_offset(k) if index == f"v{k}" else None) or (index,)
            else:
                terms.append(f"({index}) * s[{strides + d}]")
        return " + ".join([f"{pointers}[{slot}]", *terms])

    def _split_offset(self, k: int) -> tuple[str, str] | None:
        """An index in two parts: added to the pointer one after the other, what the compiler knows becomes part of the load's instruction."""
        return self._split_sum(k, "", "0") if self.split_index and self.types[k] == "i32" else None

    def sign(self, k: int) -> str:
        """The boolean k as an integer that is negative where it is false."""
        op, args, _, _ = self.program.instructions[k]
        if op in ("and", "or") and all(self.program.instructions[a].type.is_bool for a in args):
            return f"({self.sign(args[0])} {'|' if op == 'and' else '&'} {self.sign(args[1])})"
        if op == "not":
            return f"(~{self.sign(args[0])})"
        if op in DIFFERENCES and all([self.types[a] == "i32" and self.facts.within(a, -HALF, HALF) for a in args]):
            return DIFFERENCES[op].format(*[f"v{a}" for a in args])
        return f"tl.where({self._cast(k, 'bool')}, 0, -1)"

    def result(self, position: int = 0, dtype: str | None = None) -> str:
        k = self.program.results[position]
        return self._cast(k, dtype) if dtype else f"v{k}"

    def varies(self, indices: tuple[int, ...]) -> frozenset[str]:
        return frozenset().union(*(self.program.dependencies[k] for k in indices)) if indices else frozenset()


def _literal(text: str) -> str:
    return f'float("{text}")' if text in ("inf", "-inf", "nan") else f"({text})"


def _rounds_up(a: str, b: str) -> str:
    """Whether Triton's quotient of two integers, which is rounded towards zero, is above the true one."""
    remainder = f"({a} % {b})"
    return f"(({remainder} != 0) & (({remainder} < 0) != ({b} < 0)))"


SPECIAL: dict[str, Callable[[Writer, tuple[int, ...], list[str], str], str | None]] = {
    "add": Writer._add,
    "sub": Writer._sub,
    "mul": Writer._mul,
    "div": Writer._div,
    "floordiv": Writer._floordiv,
    "mod": Writer._mod,
    "pow": Writer._pow,
}


def mask_source(writer: Writer) -> list[str]:
    """Gives integers that are negative where the mask forbids: sums and bits of integers take a fraction of what as many predicates do."""
    return ["@triton.jit", "def mask(b, h, q, kv, p, i, f, s):", *_indent(writer.lines), f"    return {writer.sign(writer.program.results[0])}"]


def score_source(writer: Writer, name: str = "score_mod") -> list[str]:
    result = writer.result(0, "f32")
    if "score" not in writer.program.uses:  # give it the scores' shape
        result = f"tl.where(score == score, {result}, {result})"
    return ["@triton.jit", f"def {name}({SCORE_PARAMETERS}):", *_indent(writer.lines), f"    return {result}"]


def dscore_source(writer: Writer, name: str = "dscore") -> list[str]:
    return ["@triton.jit", f"def {name}({SCORE_PARAMETERS}):", *_indent(writer.lines), f"    return {writer.result(0, 'f32')}"]


def either_source(name: str, inside: list[str], anywhere: list[str]) -> list[str]:
    """The function `inside` where all places are known to lie before the ends, `anywhere` elsewhere; both are given with their decorators."""
    choose = f"""\
@triton.jit
def {name}({SCORE_PARAMETERS}):
    if q[2] & kv[2]:
        result = inside({SCORE_PARAMETERS})
    else:
        result = anywhere({SCORE_PARAMETERS})
    return result"""
    return [*inside, "", *anywhere, "", *choose.splitlines()]


def scatter_source(writer: Writer, derivative: Derivative) -> list[str]:
    """Adds ds * d(score)/d(load) to each load's place in `g`."""
    return _shares_source("scatter", writer, derivative, lambda site, address, x: f"add_share({address}, {x})")


def gauge_source(writer: Writer, derivative: Derivative) -> list[str]:
    """The same shares, measured: the largest of each capture goes to its place in the last of `g` (see fixed_point)."""
    last = len(writer.program.captures)
    return _shares_source("gauge", writer, derivative, lambda site, address, x: f"gauge_share({address}, {x}, g[{last}] + {site.slot})")


def fixed_source(writer: Writer, derivative: Derivative) -> list[str]:
    """The same shares, added as integers in units of their capture's place in the last of `g`."""
    last = len(writer.program.captures)
    return _shares_source("fixed", writer, derivative, lambda site, address, x: f"add_fixed({address}, {x}, g[{last}] + {site.slot})")


def _shares_source(name: str, writer: Writer, derivative: Derivative, use: Callable[[LoadSite, str, str], str]) -> list[str]:
    """What happens to each load's share of the gradient, summed first over the axes on which its place does not depend."""
    lines = ["@triton.jit", f"def {name}(ds, attended, score, b, h, q, kv, p, i, f, s, g):", *_indent(writer.lines)]
    for n, site in enumerate(derivative.sites):
        indices = tuple(writer.program.results[k] for k in site.indices)
        varies = writer.varies(indices)
        lines.append(f"    x{n} = tl.where(attended, ds * {writer.result(site.gradient, 'f32')}, 0.0)")
        if "kv" not in varies:
            lines.append(f"    x{n} = tl.sum(x{n}, 1, keep_dims=True)")
        if "q" not in varies:
            lines.append(f"    x{n} = tl.sum(x{n}, 0, keep_dims=True)")
        lines.append(f"    {use(site, writer.address('g', site.slot, indices), f'x{n}')}")
    return lines


def _indent(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
