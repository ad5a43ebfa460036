"""The instructions of a program as C++, whoever computes them: what differs between CPU and GPU is left to subclasses.

Integers are 64-bit in the language. Where their bounds over the whole problem show that 32 bits hold them, 32 are used; likewise
a load whose index provably stays inside needs no clamping, a division of non-negative numbers no correction, and an integer that cannot be the
lesser or greater of two no comparison.
Only numbers, operation names and slots reach the text.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping

from tilewise.engines.codegen import Layout, ProgramWriter
from tilewise.engines.facts import Facts
from tilewise.lang import Program
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
EXTREMES = {"minimum": "lesser", "clamp_max": "lesser", "maximum": "greater", "clamp_min": "greater"}
ROUND = {"f16": "to_half({})", "bf16": "to_bfloat({})"}


class CxxWriter(ProgramWriter):
    """Writes instructions one after the other; `declare` says what becomes of their texts."""

    def __init__(self, program: Program, facts: Facts, layouts: tuple[Layout, ...]) -> None:
        super().__init__(program, facts, layouts)
        self.same: dict[int, int] = {}  # values that are others
        for k in range(len(program.instructions)):
            self._write(k)

    # -- what subclasses say -----------------------------------------------------------------------------------------

    @abstractmethod
    def declare(self, k: int, dtype: str, text: str) -> None:
        """Value k, of this type, is computed by this text."""

    @abstractmethod
    def value(self, k: int) -> str:
        """How later texts call value k."""

    @abstractmethod
    def integer(self, n: int) -> str:
        """The program's n-th integer."""

    @abstractmethod
    def floating(self, n: int) -> tuple[str, str]:
        """The program's n-th float: the type it comes in, and its text."""

    @abstractmethod
    def element(self, slot: int, indices: tuple[int, ...]) -> str:
        """What a capture holds there."""

    @abstractmethod
    def place(self, n: int) -> str:
        """The n-th of the captures' sizes and strides."""

    @property
    def special(self) -> "Mapping[str, Special]":
        return SPECIAL

    # -- instructions ------------------------------------------------------------------------------------------------

    def _write(self, k: int) -> None:
        op, args, attr, type = self.program.instructions[k]
        dtype = self._width(k, type)
        if op == "index":
            text = f"({TYPE[dtype]}){attr}"
        elif op == "score":
            text = "score"
        elif op == "int":
            text = self.integer(int(attr))
        elif op == "float":
            dtype, text = self.floating(int(attr))
        elif op == "literal":
            value = literal_value(attr)
            dtype, text = ("f64", _float(value, "double")) if isinstance(value, float) else (dtype, _integer(value))
        elif op == "load":
            text = self.element(int(attr), args)
            if type.dtype in ROUND:
                text = f"widen({text})"
            elif type.is_bool:
                text = f"({text} != 0)"
        elif op == "cast":
            text = self._cast(args[0], dtype)
        else:
            text = self._operation(op, args, type, dtype)
        self.types.append(dtype)
        self.declare(k, dtype, text)

    def _width(self, k: int, type: Type) -> str:
        op = self.program.instructions[k].op
        return "i32" if type.dtype == "i64" and op not in ("load", "int") and self.facts.fits32(k) else type.dtype

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
        decided = self._decided(name, args) if type.is_integer else None
        if decided is not None:
            self.same[len(self.types)] = self.same.get(decided, decided)
            return self._cast(decided, dtype)
        computed = self._computed_in(args, type, dtype)
        # torch computes on 16-bit floats in float32 and rounds the result
        operands = [self._cast(a, "f32" if computed in ROUND and self._is_wide(name, n, a) else computed) for n, a in enumerate(args)]
        text = self.special[name](self, args, operands, computed) if name in self.special else _text(name, computed).format(*operands)
        if type.is_bool:
            return text
        text = f"({TYPE[computed]})({text})"
        return ROUND[dtype].format(text) if dtype in ROUND else self._converted(text, computed, dtype)

    def _decided(self, name: str, args: tuple[int, ...]) -> int | None:
        """Which of two integers is the lesser or the greater, if their ranges tell."""
        if name not in EXTREMES:
            return None
        lesser = next((a for a, b in (args, args[::-1]) if self.facts.never_exceeds(a, b)), None)
        return lesser if lesser is None or EXTREMES[name] == "lesser" else args[args[0] == lesser]

    def _terms(self, k: int, sign: str, dtype: str) -> list[tuple[str, int]]:
        return super()._terms(self.same.get(k, k), sign, dtype)

    # -- operations whose text depends on what is known of their operands: see SPECIAL -------------------------------

    def _floordiv(self, args: tuple[int, ...], operands: list[str], computed: str) -> str:
        return f"{self._kind_of_division(args, computed)}_quotient({operands[0]}, {operands[1]})"

    def _mod(self, args: tuple[int, ...], operands: list[str], computed: str) -> str:
        return f"{self._kind_of_division(args, computed)}_remainder({operands[0]}, {operands[1]})"

    def _kind_of_division(self, args: tuple[int, ...], computed: str) -> str:
        if computed in FLOATS:
            return "float"
        return "positive" if self._is_positive_division(args) else "integer"

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
        return " + ".join([self._offset(slot, d, k) for d, k in enumerate(indices)]) or "0"

    def _offset(self, slot: int, d: int, k: int) -> str:
        """How far index k goes along dimension d of a capture."""
        layout, (sizes, strides) = self.layouts[slot], self.slots[slot]
        index = self._cast(k, "i64" if self.types[k] in FLOATS or self.types[k] == "bool" else self.types[k])
        if not self._is_inside(slot, d, k):
            index = f"inside<{'i32' if self.types[k] in ('i32', 'i16', 'i8', 'u8') else 'i64'}>({index}, {self.place(sizes + d)})"
        offset = "i64" if layout.wide else "i32"
        return f"({offset})({index})" + ("" if self._is_contiguous(slot, d) else f" * ({offset}){self.place(strides + d)}")

    def _is_inside(self, slot: int, d: int, k: int) -> bool:
        return self.facts.is_inside(k, slot, d)

    def _is_contiguous(self, slot: int, d: int) -> bool:
        return self.layouts[slot].contiguous and d == self.program.captures[slot].rank - 1

    def result(self, position: int, dtype: str) -> str:
        return self._cast(self.program.results[position], dtype)

    def loads(self) -> set[int]:
        return {int(i.attr) for i in self.program.instructions if i.op == "load"}


Special = Callable[[CxxWriter, tuple[int, ...], list[str], str], str]
SPECIAL: dict[str, Special] = {"floordiv": CxxWriter._floordiv, "mod": CxxWriter._mod, "pow": CxxWriter._pow}


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
    return f"(i64)({value}LL)" if value > -(2**63) else "LOWEST"


def _float(value: float, type: str) -> str:
    if value != value:
        return f"not_a_number<{type}>()"
    if value in (float("inf"), -float("inf")):
        return f"{'-' if value < 0 else ''}infinite<{type}>()"
    return f"({value!r})"
