"""A kernel's whole PTX, as Triton leaves it, as C++: a function that every thread runs. Instructions become calls of functions of their name
(machine/module.h), those of numbers and memory with their type as template argument."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.hopper.ptx import WGMMA

ENTRY = re.compile(r"\.visible \.entry (\w+)\(([^)]*)\)[^{]*")
PARAMETER = re.compile(r"\.param (?:\.align (\d+) )?\.(\w+)[^,]*?(\w+)(?:\[(\d+)\])?\s*(?:,|$)")
REGISTERS = re.compile(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>")
TYPED = re.compile(
    "(add|sub|mul|mad|fma|div|rem|neg|abs|min|max|and|or|xor|not|shl|shr|setp|selp|cvt|cvta|mov|bfe|ex2|lg2|rcp|tanh|prmt|ld|st|atom|shfl|redux)"
    r"\..*\b(pred|[bus](8|16|32|64)|([us]16|b?f16)(x2)?|f32)"
)
REGISTER_OF = {"pred": "bool", "b16": "u16", "b32": "u32", "b64": "u64", "f32": "u32", "f64": "u64", "u32": "u32", "s32": "u32", "u64": "u64"}
SPECIAL = {"%tid.x": "place->thread.x", "%ctaid.x": "place->block.x", "%nctaid.x": "place->grid.x", "%laneid": "place->thread.x % 32"}
BYTES = {"b8": 1, "u8": 1, "u16": 2, "u32": 4, "f32": 4, "u64": 8}


class Module(NamedTuple):
    """What the emulator compiles: the text of `void kernel(const char* args)`, and how many bytes of arguments it is given."""

    text: str
    bytes_of_args: int


def translated(ptx: str) -> Module:
    found = ENTRY.search(ptx)
    assert found is not None, "no kernel in the text"
    parameters, size = _parameters(found.group(2))
    statements = list(_statements(_body(ptx, found.end())))
    return Module(_Writer(parameters, statements).text(), size)


def _parameters(text: str) -> tuple[dict[str, int], int]:
    """Where each of them lies among the arguments."""
    places: dict[str, int] = {}
    end = 0
    for alignment, kind, name, count in PARAMETER.findall(text):
        size = BYTES[kind]
        step = int(alignment) if count else size  # .align of a pointer is that of what it points to
        places[name] = -(-end // step) * step
        end = places[name] + size * int(count or 1)
    return places, end


def _body(ptx: str, start: int) -> str:
    """The text between the braces, without comments and debugging information."""
    depth, lines = 0, []
    for line in ptx[start:].splitlines():
        code = line.split("//")[0].strip()
        if code.startswith(".loc"):
            continue
        lines.append(code)
        depth += code.count("{") - code.count("}")
        if depth == 0 and code:
            break
    text = "\n".join(lines).strip()
    return text[1:-1]


def _statements(body: str) -> Iterator[str]:
    """Labels ("name:"), "{" and "}" of blocks, and instructions."""
    at = 0
    label = re.compile(r"([$\w]+):(?!:)")
    while at < len(body):
        if body[at].isspace() or body[at] == ";":
            at += 1
        elif body[at] in "{}":
            yield body[at]
            at += 1
        elif (named := label.match(body, at)) is not None:
            yield named.group(0)
            at = named.end()
        else:
            end = body.index(";", at)
            yield " ".join(body[at:end].split())
            at = end + 1


class _Writer:
    """Registers become variables, but for sums of products, which are elements of arrays; labels stay labels."""

    def __init__(self, parameters: dict[str, int], statements: list[str]) -> None:
        self._parameters, self._statements = parameters, statements
        self._sums = _arrays([_items(s.partition(" ")[2])[0] for s in statements if s.startswith("wgmma.mma_async")])
        self._targets: dict[str, list[str]] = {}  # of indirect jumps

    def text(self) -> str:
        lines: list[str] = []
        label = ""
        for n, statement in enumerate(self._statements):
            if statement == "{":
                lines.append("{" + "".join([f" __label__ {name};" for name in self._labels_of_block(n)]))
            elif statement == "}":
                lines.append("}")
            elif statement.startswith(".branchtargets"):
                self._targets[label] = [_name(x) for x in re.split(r"[\s,]+", statement)[1:]]
            elif statement.endswith(":"):
                label = statement[:-1]
                lines.append(f"{_name(label)}:;")
            elif (registers := REGISTERS.fullmatch(statement)) is not None:
                lines.append(self._declared(*registers.groups()))
            elif statement.startswith(".reg"):
                kind, names = re.match(r"\.reg \.(\w+) (.*)", statement).groups()  # type: ignore[union-attr]  # PTX that ptxas takes
                lines.append(f"{REGISTER_OF[kind]} {names};")
            elif not statement.startswith("."):
                lines.append(self._instruction(statement))
        return "\n".join(["void kernel(const char* args) {", *lines, "}"])

    def _labels_of_block(self, opening: int) -> list[str]:
        """Those of its own: inline assembly repeats them."""
        depth, names = 0, []
        for statement in self._statements[opening:]:
            depth += {"{": 1, "}": -1}.get(statement, 0)
            if depth == 0:
                break
            if depth == 1 and statement.endswith(":"):
                names.append(_name(statement[:-1]))
        return names

    def _declared(self, kind: str, prefix: str, count: str) -> str:
        names = [name for n in range(int(count)) if (name := f"{prefix}{n}") not in self._sums]
        arrays = {array.split("[")[0]: 0 for array in self._sums.values() if array.startswith(f"sums_{prefix}")}
        for array in self._sums.values():
            name, index = array[:-1].split("[")
            if name in arrays:
                arrays[name] = max(arrays[name], int(index) + 1)
        return f"{REGISTER_OF[kind]} {', '.join([*names, *[f'{name}[{size}]' for name, size in arrays.items()]])};"

    def _instruction(self, statement: str) -> str:
        guard = ""
        if (guarded := re.match(r"@(!?)%?(\w+) ", statement)) is not None:
            guard = f"if ({guarded.group(1)}{guarded.group(2)}) "
            statement = statement[guarded.end() :]
        opcode, _, rest = statement.partition(" ")
        return guard + self._call(opcode, rest)

    def _call(self, opcode: str, rest: str) -> str:
        first, *parts = opcode.split(".")
        if first == "bra":
            return f"goto {_name(rest)};"
        if first == "brx":
            number, table = re.split(r"[\s,]+", rest)
            cases = "".join([f" case {n}: goto {target};" for n, target in enumerate(self._targets[table])])
            return f"switch ({self._value(number)}) {{{cases} }}"
        if first == "ret":
            return "return;"
        if opcode.startswith("wgmma.mma_async"):
            return self._product(opcode, rest)
        values = [self._value(x) for x in re.findall(r"[^\s,{}\[\]|]+", re.sub(r"\s*\+\s*", "+", rest)) if x != "_"]
        if first == "mov" and "{" in rest:  # a register as several, or several as one
            unpacked = "unpack_high" if rest.startswith("{_") else "unpack_low" if ", _}" in rest else "unpack"
            return f"module::{unpacked if rest.startswith('{') else 'pack'}({', '.join(values)});"
        if TYPED.fullmatch(opcode):
            kind = "bool" if parts[-1] == "pred" else f"module::{parts[-1]}"
            return f"module::{_joined([first, *parts[:-1]])}<{kind}>({', '.join(values)});"
        return f"module::{_joined([first, *parts])}({', '.join(values)});"

    def _value(self, text: str) -> str:
        """An operand: a register, a number, the place of a parameter or of shared memory, or a sum of such."""
        if "+" in text:
            return f"({' + '.join([self._value(x) for x in text.split('+')])})"
        if text in SPECIAL:
            return f"(hopper::{SPECIAL[text]})"
        if text.startswith("%"):
            return self._sums.get(text[1:], text[1:])
        if text in self._parameters:
            return f"((u64)args + {self._parameters[text]})"
        if text == "global_smem":
            return "(u64)hopper::window()"
        if text.startswith("0f"):
            return f"0x{text[2:]}ll"
        return f"{text}ll" if re.fullmatch(r"-?(0x)?[0-9a-fA-F]+", text) else text

    def _product(self, opcode: str, rest: str) -> str:
        shape = WGMMA.fullmatch(opcode)
        assert shape is not None, f"{opcode} is not emulated"
        n, fp16 = int(shape.group(1)), shape.group(2) == "f16"
        sums, a, b, add, *numbers = _items(rest)
        factors, transposed = numbers[:2], [x == "1" for x in numbers[2:]]
        in_registers = a.startswith("{")
        assert factors == ["1", "1"] and len(transposed) == (1 if in_registers else 2), f"{opcode} with {numbers} is not emulated"
        shaped = f"hopper::Shape{{{n}, {_bool(fp16)}, {_bool(transposed[-1])}, {_bool(len(transposed) == 2 and transposed[0])}}}"
        first = self._sums[_registers(sums)[0]].split("[")[0]
        words = f"{{{', '.join([self._value(f'%{x}') for x in _registers(a)])}}}" if in_registers else "{}"
        from_shared = "0" if in_registers else self._value(a)
        taken = f"const u32 a[4] = {words}; hopper::product_issue({shaped}, (float*){first}, {'a' if in_registers else 'nullptr'}, false"
        return f"{{ {taken}, {from_shared}, {self._value(b)}, {self._value(add)}); }}"


def _arrays(lists: list[str]) -> dict[str, str]:
    """Registers of sums as elements of arrays: the machine is given an address."""
    found: dict[str, str] = {}
    for names in {tuple(_registers(x)) for x in lists}:
        assert not any(name in found for name in names), "sums of products in flight overlap"
        found |= {name: f"sums_{names[0]}[{n}]" for n, name in enumerate(names)}
    return found


def _items(operands: str) -> list[str]:
    """Of a product: lists in braces, registers and numbers."""
    return re.findall(r"\{[^}]*\}|[^\s,{}]+", operands)


def _registers(items: str) -> list[str]:
    return [x.strip().removeprefix("%") for x in items.strip("{}").split(",")]


def _name(label: str) -> str:
    return label.replace("$", "")


def _joined(parts: list[str]) -> str:
    return "_".join(parts).replace("::", "_")


def _bool(value: bool) -> str:
    return str(value).lower()
