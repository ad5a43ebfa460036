"""Programs as C++ source: one small function per mask, score and slope (a score's derivative, with its captures' gradients).

A generated function works on a tile: rows along one axis, LANES along the other, queries or keys. What depends on neither axis is
computed once, what depends on the lanes once for the tile, what depends on the row once per row; only the rest in the inner loop, which
the compiler vectorises. Python numbers and captures are arguments. The operations' own text is written by engines/cxx/writer.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tilewise.engines.codegen import Layout
from tilewise.engines.cxx.writer import STORED, TYPE, CxxWriter
from tilewise.engines.facts import Facts
from tilewise.lang import Derivative, Program


@dataclass(frozen=True)
class Axes:
    """Which index the lanes and the rows of a tile are."""

    name: str
    lane: str
    row: str


BY_QUERY, BY_KEY = Axes("by_query", "q", "kv"), Axes("by_key", "kv", "q")

# Where a value is computed: once, once per lane, once per row, or for every element.
ONCE, LANE, ROW, ELEMENT = range(4)


class Writer(CxxWriter):
    """Sorts statements by where they are computed."""

    def __init__(self, program: Program, facts: Facts, layouts: tuple[Layout, ...], axes: Axes) -> None:
        self.axes = axes
        self.levels: list[int] = []
        self.statements: dict[int, list[str]] = {ONCE: [], LANE: [], ROW: [], ELEMENT: []}
        super().__init__(program, facts, layouts)

    def _level(self, k: int) -> int:
        uses = self.program.dependencies[k]
        if "score" in uses or {self.axes.lane, self.axes.row} <= uses:
            return ELEMENT
        return LANE if self.axes.lane in uses else ROW if self.axes.row in uses else ONCE

    def declare(self, k: int, dtype: str, text: str) -> None:
        level = self._level(k)
        self.levels.append(level)
        self.statements[level].append(f"v{k}[l] = {text};" if level == LANE else f"const {TYPE[dtype]} v{k} = {text};")

    def value(self, k: int) -> str:
        return f"v{k}[l]" if self.levels[k] == LANE else f"v{k}"

    def integer(self, n: int) -> str:
        return f"p->ints[{n}]"

    def floating(self, n: int) -> tuple[str, str]:
        return "f64", f"p->floats[{n}]"  # torch rounds a Python number to what it meets, not before

    def element(self, slot: int, indices: tuple[int, ...]) -> str:
        return f"p{slot}[{self.address(slot, indices)}]"

    def place(self, n: int) -> str:
        return f"s[{n}]"

    def level_of(self, indices: tuple[int, ...]) -> int:
        """Where an address made of these values varies."""
        levels = {self.levels[k] for k in indices} - {ONCE}
        return ONCE if not levels else levels.pop() if len(levels) == 1 else ELEMENT


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
