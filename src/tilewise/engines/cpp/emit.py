"""Programs as C++ source: one small function per mask, score and slope (a score's derivative, with its captures' gradients).

A generated function works on a tile: rows along one axis, LANES along the other, queries or keys. What depends on neither axis is
computed once, what depends on the lanes once for the tile, what depends on the row once per row; only the rest in the inner loop, which
the compiler vectorises. Python numbers and captures are arguments. Only numbers, operation names and slots reach the text.

Integers are 64-bit in the language. Where their bounds over the whole problem show that 32 bits hold them, 32 are used; likewise
a load whose index provably stays inside needs no clamping, and a division of non-negative numbers no correction.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tilewise.engines.codegen import INT32, Extents, Layout, ProgramWriter
from tilewise.lang import BoundProgram, Derivative, Program
from tilewise.lang.ops import OPS
from tilewise.lang.program import literal_value
from tilewise.lang.types import FLOATS, INTEGERS, Type

# The C++ type a value is computed in; 16-bit floats are float32 numbers that have been rounded to them.
TYPE = {
    "bool": "bool",
    "u8": "uint8_t",
    "i8": "int8_t",
    "i16": "int16_t",
    "i32": "i32",
    "i64": "i64",
    "f16": "float",
    "bf16": "float",
    "f32": "float",
    "f64": "double",
}
STORED = TYPE | {"f16": "half", "bf16": "bfloat"}
ROUND = {"f16": "to_half({})", "bf16": "to_bfloat({})"}


@dataclass(frozen=True)
class Axes:
    """Which index the lanes and the rows of a tile are."""

    name: str
    lane: str
    row: str


BY_QUERY, BY_KEY = Axes("by_query", "q", "kv"), Axes("by_key", "kv", "q")

# Where a value is computed: once, once per lane, once per row, or for every element.
ONCE, LANE, ROW, ELEMENT = range(4)


class Writer(ProgramWriter):
    """Writes the instructions of one program as statements of C++, sorted by where they are computed."""

    def __init__(self, program: Program, call: BoundProgram, extents: Extents, layouts: tuple[Layout, ...], axes: Axes) -> None:
        super().__init__(program, call, extents, layouts)
        self.axes = axes
        self.levels: list[int] = []
        self.statements: dict[int, list[str]] = {ONCE: [], LANE: [], ROW: [], ELEMENT: []}
        for k in range(len(program.instructions)):
            self._write(k)

    def _level(self, k: int) -> int:
        uses = self.program.dependencies[k]
        if "score" in uses or {self.axes.lane, self.axes.row} <= uses:
            return ELEMENT
        return LANE if self.axes.lane in uses else ROW if self.axes.row in uses else ONCE

    def _write(self, k: int) -> None:
        op, args, attr, type = self.program.instructions[k]
        dtype = self._width(k, type)
        if op == "index":
            text = f"({TYPE[dtype]}){attr}"
        elif op == "score":
            text = "score"
        elif op == "int":
            text = f"p->ints[{int(attr)}]"
        elif op == "float":
            dtype, text = "f64", f"p->floats[{int(attr)}]"  # torch rounds a Python number to what it meets, not before
        elif op == "literal":
            value = literal_value(attr)
            dtype, text = ("f64", _float(value, "double")) if isinstance(value, float) else (dtype, _integer(value))
        elif op == "load":
            text = f"p{int(attr)}[{self.address(int(attr), args)}]"
            if type.dtype in ROUND:
                text = f"widen({text})"
            elif type.is_bool:
                text = f"({text} != 0)"
        elif op == "cast":
            text = self._cast(args[0], dtype)
        else:
            text = self._operation(op, args, type, dtype)
        level = self._level(k)
        self.types.append(dtype)
        self.levels.append(level)
        self.statements[level].append(f"v{k}[l] = {text};" if level == LANE else f"const {TYPE[dtype]} v{k} = {text};")

    def _width(self, k: int, type: Type) -> str:
        op = self.program.instructions[k].op
        return "i32" if type.dtype == "i64" and op not in ("load", "int") and self.ranges[k].within(-INT32, INT32) else type.dtype

    def value(self, k: int) -> str:
        return f"v{k}[l]" if self.levels[k] == LANE else f"v{k}"

    def _cast(self, k: int, dtype: str) -> str:
        """Value k in another type."""
        return self._converted(self.value(k), self.types[k], dtype)

    def _converted(self, text: str, old: str, new: str) -> str:
        if old == new:
            return text
        if new == "bool":
            return f"({text} != 0)"
        if new in ROUND:
            return ROUND[new].format(f"(float)({text})")
        if old in FLOATS and new not in FLOATS:
            return f"to_integer<{TYPE[new]}>({text})"
        return f"({TYPE[new]})({text})" if TYPE[old] != TYPE[new] else text

    def _operation(self, name: str, args: tuple[int, ...], type: Type, dtype: str) -> str:
        if name == "where":
            return f"{self._cast(args[0], 'bool')} ? {self._cast(args[1], dtype)} : {self._cast(args[2], dtype)}"
        computed = self._computed_in(args, type, dtype)
        # torch computes on 16-bit floats in float32 and rounds the result
        operands = [self._cast(a, "f32" if computed in ROUND and self._is_wide(name, n, a) else computed) for n, a in enumerate(args)]
        text = SPECIAL[name](self, args, operands, computed) if name in SPECIAL else _text(name, computed).format(*operands)
        if type.is_bool:
            return text
        text = f"({TYPE[computed]})({text})"
        return ROUND[dtype].format(text) if dtype in ROUND else self._converted(text, computed, dtype)

    # -- operations whose text depends on what is known of their operands: see SPECIAL -------------------------------

    def _floordiv(self, args: tuple[int, ...], operands: list[str], computed: str) -> str:
        return f"{self._kind_of_division(args, computed)}_quotient({operands[0]}, {operands[1]})"

    def _mod(self, args: tuple[int, ...], operands: list[str], computed: str) -> str:
        return f"{self._kind_of_division(args, computed)}_remainder({operands[0]}, {operands[1]})"

    def _kind_of_division(self, args: tuple[int, ...], computed: str) -> str:
        if computed in FLOATS:
            return "float"
        return "positive" if self.ranges[args[0]].lowest >= 0 and self.ranges[args[1]].lowest > 0 else "integer"

    def _pow(self, args: tuple[int, ...], operands: list[str], computed: str) -> str:
        exponent = self.program.instructions[args[1]]
        if computed in FLOATS and exponent.op == "literal":
            n = literal_value(exponent.attr)
            x = operands[0]
            texts = {0: "1", 1: x, 2: f"{x} * {x}", 3: f"{x} * {x} * {x}", -1: f"1 / {x}", -2: f"1 / ({x} * {x})", 0.5: f"sqrt({x})"}
            if n in texts:
                return texts[n]
        return f"{'pow' if computed in FLOATS else 'integer_power'}({operands[0]}, {operands[1]})"

    # -- what is around the operations -------------------------------------------------------------------------------

    def address(self, slot: int, indices: tuple[int, ...]) -> str:
        """Which element of a capture: negative indices count from the end, others are kept inside."""
        layout, (sizes, strides) = self.layouts[slot], self.slots[slot]
        terms = []
        for d, k in enumerate(indices):
            known, size = self.ranges[k], self.sizes[slot][d]
            index = self._cast(k, "i64" if self.types[k] in FLOATS or self.types[k] == "bool" else self.types[k])
            if not known.within(0, size - 1):
                index = f"inside<i64>({index}, s[{sizes + d}])" if self.types[k] not in ("i32", "i16", "i8", "u8") else f"inside<i32>({index}, s[{sizes + d}])"
            offset = "i64" if layout.wide else "i32"
            terms.append(f"({offset})({index})" + ("" if layout.contiguous and d == len(indices) - 1 else f" * ({offset})s[{strides + d}]"))
        return " + ".join(terms) if terms else "0"

    def result(self, position: int, dtype: str) -> str:
        return self._cast(self.program.results[position], dtype)

    def level_of(self, indices: tuple[int, ...]) -> int:
        """Where an address made of these values varies."""
        levels = {self.levels[k] for k in indices} - {ONCE}
        return ONCE if not levels else levels.pop() if len(levels) == 1 else ELEMENT

    def loads(self) -> set[int]:
        return {int(i.attr) for i in self.program.instructions if i.op == "load"}


SPECIAL: dict[str, Callable[[Writer, tuple[int, ...], list[str], str], str]] = {"floordiv": Writer._floordiv, "mod": Writer._mod, "pow": Writer._pow}


def _text(name: str, computed: str) -> str:
    """The text of an operation's entry for operands of this type."""
    op = OPS[name]
    text = op.cpp
    if computed == "bool" and op.cpp_of_bools is not None:
        text = op.cpp_of_bools
    elif computed in INTEGERS and op.cpp_of_integers is not None:
        text = op.cpp_of_integers
    assert text is not None, f"{name} is written by SPECIAL"
    return text


def _integer(value: bool | int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"(i64)({value}LL)" if value > -(2**63) else "std::numeric_limits<i64>::min()"


def _float(value: float, type: str) -> str:
    if value != value:
        return f"NOT_A_NUMBER<{type}>"
    if value in (float("inf"), -float("inf")):
        return f"{'-' if value < 0 else ''}INFINITE<{type}>"
    return f"({value!r})"


# -- whole functions -------------------------------------------------------------------------------------------------

PARAMETERS = "const Program* p, i64 b, i64 h, i64 first, i64 rows, i64 first_lane, i64 last_lane"


def mask_source(writers: list[Writer], real: str) -> str:
    """-inf where the mask says no."""
    return _tile_functions(writers, real, lambda w: [f"row[l] = {w.result(0, 'bool')} ? row[l] : -INFINITE<{real}>;"])


def score_source(writers: list[Writer], real: str) -> str:
    return _tile_functions(writers, real, lambda w: [f"row[l] = {w.result(0, _name(real))};"])


def _name(real: str) -> str:
    return "f64" if real == "double" else "f32"


def _tile_functions(writers: list[Writer], real: str, ending: Callable[[Writer], list[str]]) -> str:
    """One function per pair of axes, which changes a tile in place; `ending` writes the result into row[l]."""
    lines = ['#include "program.h"', ""]
    for w in writers:
        lines.append(f'extern "C" __attribute__((visibility("default"))) void {w.axes.name}({PARAMETERS}, {real}* __restrict tile) {{')
        lines += _indent(_before_rows(w))
        lines.append("    for (i64 r = 0; r < rows; r++) {")
        lines += _indent([f"const i64 {w.axes.row} = first + r;", f"{real}* __restrict row = tile + r * LANES;", *w.statements[ROW]], 2)
        lines += _indent(["#pragma omp simd", "for (int l = 0; l < LANES; l++) {"], 2)
        lines += _indent([f"const {real} score = row[l];", *w.statements[ELEMENT], *ending(w)], 3)
        lines += ["        }", "    }", "}", ""]
    return "\n".join(lines)


def _before_rows(w: Writer) -> list[str]:
    """Arguments, and what is computed once and once per lane."""
    lines = ["const i64* s = p->places;"]
    for slot in sorted(w.loads()):
        type = STORED[w.program.captures[slot].dtype]
        type = "uint8_t" if type == "bool" else type
        lines.append(f"const {type}* __restrict p{slot} = (const {type}*)p->captures[{slot}];")
    lines += w.statements[ONCE]
    lane = [k for k in range(len(w.levels)) if w.levels[k] == LANE]
    if lane:
        lines += [f"{TYPE[w.types[k]]} v{k}[LANES];" for k in lane]
        lines.append("for (int l = 0; l < LANES; l++) {")
        lines.append(f"    const i64 {w.axes.lane} = first_lane + l < last_lane ? first_lane + l : last_lane;")
        lines += _indent(w.statements[LANE])
        lines.append("}")
    return lines


def slope_source(w: Writer, derivative: Derivative, real: str) -> str:
    """ds *= d(result)/d(score); ds * d(result)/d(load) is added up for each load, in double, first over the axis on which its place does not depend."""
    name = _name(real)
    tiles = f"const {real}* __restrict raw, const {real}* __restrict final, {real}* __restrict ds, double* const* gradients"
    lines = ['#include "program.h"', "", f'extern "C" __attribute__((visibility("default"))) void slope({PARAMETERS}, {tiles}) {{']
    lines += _indent(_before_rows(w))
    sites = []
    for n, site in enumerate(derivative.sites):
        indices = tuple(w.program.results[k] for k in site.indices)
        sites.append((n, site, w.level_of(indices), w.address(site.slot, indices)))
        lines.append(f"    double x{n}[LANES] = {{}};")
    lines.append("    for (i64 r = 0; r < rows; r++) {")
    lines += _indent([f"const i64 {w.axes.row} = first + r;", *w.statements[ROW]], 2)
    for n, _, level, _ in sites:
        if level == ELEMENT:
            lines.append(f"        i64 at{n}[LANES];")
    lines += _indent(["#pragma omp simd", "for (int l = 0; l < LANES; l++) {"], 2)
    lines += _indent([f"const {real} score = raw[r * LANES + l], incoming = ds[r * LANES + l];"], 3)
    lines += _indent([f"const bool attended = final[r * LANES + l] != -INFINITE<{real}>;", *w.statements[ELEMENT]], 3)
    for n, site, level, address in sites:
        share = f"(attended ? (double)(incoming * {w.result(site.gradient, name)}) : 0.0)"
        lines.append(f"            x{n}[l] {'+=' if level in (ONCE, LANE) else '='} {share};")
        if level == ELEMENT:
            lines.append(f"            at{n}[l] = {address};")
    lines += _indent([f"ds[r * LANES + l] = attended ? incoming * {w.result(0, name)} : ({real})0;"], 3)
    lines.append("        }")
    for n, site, level, address in sites:
        if level == ELEMENT:
            lines.append(f"        for (int l = 0; l < LANES; l++) gradients[{site.slot}][at{n}[l]] += x{n}[l];")
        if level == ROW:
            lines += _indent([f"double sum{n} = 0;", f"for (int l = 0; l < LANES; l++) sum{n} += x{n}[l];", f"gradients[{site.slot}][{address}] += sum{n};"], 2)
    lines.append("    }")
    for n, site, level, address in sites:
        if level in (ONCE, LANE):
            lines.append(f"    for (int l = 0; l < LANES; l++) gradients[{site.slot}][{address}] += x{n}[l];")
    return "\n".join([*lines, "}", ""])


def _indent(lines: list[str], times: int = 1) -> list[str]:
    return [f"{'    ' * times}{line}" for line in lines]
