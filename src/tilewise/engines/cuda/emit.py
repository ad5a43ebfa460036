"""A score function as CUDA C++: a struct that the forward asks for a thread's scores.

A thread has two rows of a query tile, 8 apart, and of a key tile the columns 8 j + 2 c + e (forward.cu). What depends on neither is computed once for a
query tile, with what depends on the row; what depends on the column once for both rows; only the rest for every element. What depends on the distance between
key and query alone (ALiBi, tables of distances) is computed once for two elements: the second row is as far from a column as the first from the one 8 before.

    columns     0    8    16   24          D: computed, = : as D of the row above, one to the left
    row 0       D    D    D    D
    row 8       D    =    =    =

The operations' own text is written by engines/cxx/writer.py. Python numbers and captures are fields of the kernel's arguments.

A key's place is kv0 + c: kv0 is the thread's own, c a constant once the loop is unrolled. Sums that hold it are split in two: a float made of it then costs
one addition of a constant, instead of an integer's and a conversion, and the address of a load none at all.
"""

from collections.abc import Mapping

from tilewise.engines.codegen import SUMS, Layout
from tilewise.engines.cxx.writer import SPECIAL, TYPE, CxxWriter, Special
from tilewise.engines.facts import Facts
from tilewise.lang import Program
from tilewise.lang.types import Type

ONCE, ROW, COLUMN, DISTANCE, ELEMENT = range(5)  # where a value is computed
ARGUMENTS = ("int", "float", "literal")  # values that are written wherever they are used
EXACT = 2**24  # float32 holds every integer up to here
TILE = 1024  # more than a key's place in its tile
IN_TILES = (DISTANCE, COLUMN, ELEMENT)  # what is computed for a key tile


class Writer(CxxWriter):
    """Sorts statements by where they are computed."""

    def __init__(self, program: Program, facts: Facts, layouts: tuple[Layout, ...]) -> None:
        self.levels: list[int] = []
        self.texts: list[str] = []  # how values are called
        self.fields: list[str] = []
        self.distances: list[str] = []  # fields of the struct Distance
        self.statements: dict[int, list[str]] = {ONCE: [], ROW: [], COLUMN: [], DISTANCE: [], ELEMENT: []}
        super().__init__(program, facts, layouts)

    def _write(self, k: int) -> None:
        self.levels.append(self._level(k))
        super()._write(k)

    def _level(self, k: int) -> int:
        uses = self.program.dependencies[k]
        if "score" in uses:
            return ELEMENT
        if {"q", "kv"} <= uses:
            return DISTANCE if self._is_of_distance(k) else ELEMENT
        return ROW if "q" in uses else COLUMN if "kv" in uses else ONCE

    def _is_of_distance(self, k: int) -> bool:
        """Whether a value that depends on query and key does so through their distance alone: it is that, or made of values that are."""
        levels = {self.levels[a] for a in self.program.instructions[k].args}
        return levels <= {ONCE, DISTANCE} or self._is_distance(k)

    def _is_distance(self, k: int) -> bool:
        """Key less query, or the other way round, plus what is the same for all of a query tile."""
        op, _, _, type = self.program.instructions[k]
        if op not in SUMS or self._width(k, type) != "i32":
            return False
        terms = self._terms_of_sum(k, "+", "i32")
        keys, queries = ([sign for sign, n in terms if self._is_index(n, which)] for which in ("kv", "q"))
        return len(keys) == len(queries) == 1 and keys != queries and all([self.levels[n] == ONCE for _, n in terms if not self._is_place(n)])

    def declare(self, k: int, dtype: str, text: str) -> None:
        level, type = self.levels[k], TYPE[dtype]
        if self.program.instructions[k].op in ARGUMENTS:
            self.texts.append(f"({type})({text})")
        elif level in (ONCE, ROW):
            self.texts.append(f"v{k}" if level == ONCE else f"v{k}[r]")
            self.fields.append(f"{type} v{k};" if level == ONCE else f"{type} v{k}[2];")
            self.statements[level].append(f"{self.texts[k]} = {text};")
        elif level == DISTANCE:
            self.texts.append(f"d.v{k}")
            self.distances.append(f"{type} v{k};")
            self.statements[level].append(f"d.v{k} = {text};")
        else:
            self.texts.append(f"v{k}")
            self.statements[level].append(f"const {type} v{k} = {text};")

    def value(self, k: int) -> str:
        if self.levels[-1] == DISTANCE and self._is_place(k):  # of the value that is being written
            return "q0" if self._is_index(k, "q") else "kv"
        return self.texts[k]

    def integer(self, n: int) -> str:
        return f"a.i_{n}"

    def floating(self, n: int) -> tuple[str, str]:
        return "f32", f"a.f_{n}"

    def place(self, n: int) -> str:
        return f"a.s_{n}"

    def element(self, slot: int, indices: tuple[int, ...]) -> str:
        last = len(indices) - 1
        if indices and self._is_contiguous(slot, last) and self._is_inside(slot, last, indices[last]):
            parts = self._split_sum(indices[last])
            if parts is not None:
                before = [f"{self._offset(slot, d, k)} + " for d, k in enumerate(indices[:last])]
                return f"fetch(a.p_{slot} + ({''.join(before)}{parts[0]}) + {parts[1]})"
        return f"fetch(a.p_{slot} + ({self.address(slot, indices)}))"

    @property
    def special(self) -> Mapping[str, Special]:
        return SPECIAL_OF_CUDA

    def _operation(self, name: str, args: tuple[int, ...], type: Type, dtype: str) -> str:
        k = len(self.levels) - 1  # the value that is being written
        if self.levels[k] == DISTANCE and self._is_distance(k):
            first, second = self._split_terms(self._terms_of_sum(k, "+", "i32"))
            return f"{first} + {second}"
        return super()._operation(name, args, type, dtype)

    # -- sums in two parts -------------------------------------------------------------------------------------------

    def _cast(self, k: int, dtype: str) -> str:
        parts = self._split_float(k) if dtype == "f32" else None
        return super()._cast(k, dtype) if parts is None else f"((float){parts[0]} + (float){parts[1]})"

    def _split_float(self, k: int) -> tuple[str, str] | None:
        """The two parts of an integer that becomes a float; None where it is another, or might be rounded."""
        return self._split_sum(k) if self.facts.within(k, TILE - EXACT, EXACT - TILE) else None

    def _split_sum(self, k: int) -> tuple[str, str] | None:
        """The two parts of a sum of 32-bit integers, the second of them known to the compiler; None where no key's place is in it."""
        if self.types[k] != "i32":
            return None
        terms = self._terms(k, "+", "i32")
        return self._split_terms(terms) if any([self._is_index(n, "kv") for _, n in terms]) else None

    def _split_terms(self, terms: list[tuple[str, int]]) -> tuple[str, str]:
        signs = [sign for sign, n in terms if self._is_index(n, "kv")]
        others = "".join([f" {sign} {self._cast(n, 'i32')}" for sign, n in terms if not self._is_index(n, "kv")])
        kv0, c = ("".join([f" {sign} {name}" for sign in signs]) for name in ("kv0", "c"))
        return f"(0{kv0}{others})", f"(0{c})"

    def _is_index(self, k: int, which: str) -> bool:
        op, _, attr, _ = self.program.instructions[k]
        return op == "index" and attr == which

    def _is_place(self, k: int) -> bool:
        return self._is_index(k, "q") or self._is_index(k, "kv")

    # -- operations: see SPECIAL_OF_CUDA -----------------------------------------------------------------------------

    def _div(self, args: tuple[int, ...], operands: list[str], computed: str) -> str:
        """One division, not one for each element; scores of 16-bit inputs do not see the rounding."""
        if computed == "f64" or self.program.dependencies[args[1]] & {"q", "kv", "score"}:
            return f"{operands[0]} / {operands[1]}"
        return f"{operands[0]} * (1.0f / {operands[1]})"

    def _mul(self, args: tuple[int, ...], operands: list[str], computed: str) -> str:
        """A number times a sum in two parts: n (x + c) as n x + n c, of which the second is part of an operation that adds."""
        for a, n in (args, args[::-1]) if computed == "f32" else ():
            op, inner, _, _ = self.program.instructions[a]
            parts = self._split_float(inner[0] if op == "cast" and self.types[a] == "f32" else a)
            if parts is not None and not self.program.dependencies[n] & {"q", "kv", "score"}:
                number = self._cast(n, "f32")
                return f"multiply_add((float){parts[1]}, {number}, (float){parts[0]} * {number})"
        return f"{operands[0]} {'&' if computed == 'bool' else '*'} {operands[1]}"


SPECIAL_OF_CUDA: dict[str, Special] = {**SPECIAL, "div": Writer._div, "mul": Writer._mul}  # type: ignore[dict-item]  # of this writer alone


def score_source(inside: Writer, anywhere: Writer) -> str:
    """The struct Score. `inside` may be used for tiles that end before the sequences do, `anywhere` for all. Integers may be wider anywhere, and then no
    distances."""
    inside = inside if inside.levels == anywhere.levels else anywhere
    both = [inside.statements[level] for level in IN_TILES] != [anywhere.statements[level] for level in IN_TILES]
    both = both or inside.result(0, "f32") != anywhere.result(0, "f32")
    lines = ['#line 1 "score"', "struct Score {", *_indent(["i32 q0;", *anywhere.fields])]
    lines += [
        "    DEV void begin(const Args& a, i32 b, i32 h, i32 row) {      // the thread's first",
        "        q0 = row;",
        *_indent(anywhere.statements[ONCE], 2),
        "#pragma unroll",
        "        for (int r = 0; r < 2; r++) {",
        "            const i32 q = min(row + 8 * r, a.n_q - 1);",
        *_indent(anywhere.statements[ROW], 3),
        "        }",
        "    }",
        "    struct Distance {                                           // what depends on it, for one of them",
        *_indent(anywhere.distances, 2),
        "    };",
        *(_apply("inside", inside) if both else []),
        *_apply("anywhere", anywhere),
        "    // q.k becomes the score. kv0: the thread's first key; is_inside: none of the tile's queries and keys lies past the end.",
        "    DEV void apply(const Args& a, float (&s)[NS], i32 kv0, bool is_inside) const {",
        *(["        if (is_inside) apply_inside(a, s, kv0);", "        else apply_anywhere(a, s, kv0);"] if both else ["        apply_anywhere(a, s, kv0);"]),
        "    }",
        "};",
        "",
    ]
    return "\n".join(lines)


def _apply(name: str, w: Writer) -> list[str]:
    return [
        f"    DEV Distance distance_{name}(const Args& a, i32 kv0, i32 c) const {{   // of the first row from column c, or of the second from c + 8",
        "        const i32 kv = kv0 + c;",
        "        Distance d;",
        *_indent(w.statements[DISTANCE], 2),
        "        return d;",
        "    }",
        f"    DEV void apply_{name}(const Args& a, float (&s)[NS], i32 kv0) const {{",
        f"        Distance before[2] = {{distance_{name}(a, kv0, -8), distance_{name}(a, kv0, -7)}};",
        "#pragma unroll",
        "        for (int n = 0; n < NS / 2; n++) {",
        "            const i32 c = n / 2 * 8 + n % 2, kv = kv0 + c;",
        f"            const Distance here = distance_{name}(a, kv0, c);",
        *_indent(w.statements[COLUMN], 3),
        "#pragma unroll",
        "            for (int r = 0; r < 2; r++) {",
        "                const Distance d = r ? before[n % 2] : here;",
        "                const float score = s[n / 2 * 4 + 2 * r + n % 2] * a.score_scale;",
        *_indent(w.statements[ELEMENT], 4),
        f"                s[n / 2 * 4 + 2 * r + n % 2] = {w.result(0, 'f32')};",
        "            }",
        "            before[n % 2] = here;",
        "        }",
        "    }",
    ]


def _indent(lines: list[str], times: int = 1) -> list[str]:
    return [f"{'    ' * times}{line}" for line in lines]
