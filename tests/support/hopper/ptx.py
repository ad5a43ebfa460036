"""Inline PTX as C++: every instruction of an `asm` statement becomes a call of the function of its name (machine/instructions.h)."""

import re
from typing import NamedTuple

STATEMENT = re.compile(r"\basm\s*(?:volatile\s*)?\(")
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
TYPES = {"pred": "bool", "b32": "u32"}
WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2$")
ELEMENT = re.compile(r"(.*)\[(\d+)\]$")


class Statement(NamedTuple):
    """An `asm` statement: its text, and what its operands %0, %1, ... stand for."""

    text: str
    operands: list[str]


def translated(source: str) -> str:
    """The same C++ without `asm` statements. Lines keep their numbers."""
    parts: list[str] = []
    end = 0
    for found in STATEMENT.finditer(source):
        close = _closing(source, found.end())
        parts += [source[end : found.start()], _block(_read(source[found.end() : close])), "\n" * source.count("\n", found.start(), close)]
        end = close + 1
    return "".join([*parts, source[end:]])


def _closing(source: str, start: int) -> int:
    """Where the parenthesis closes that has been opened before `start`."""
    depth, at = 1, start
    while depth:
        string = STRING.match(source, at)
        if string:
            at = string.end()
            continue
        depth += {"(": 1, ")": -1}.get(source[at], 0)
        at += 1
    return at - 1


def _read(inside: str) -> Statement:
    parts, at = [""], 0
    while at < len(inside):
        string = STRING.match(inside, at)
        end = string.end() if string else _closing(inside, at + 1) + 1 if inside[at] == "(" else at + 1
        if inside[at] == ":":
            parts.append("")
        else:
            parts[-1] += inside[at:end]
        at = end
    text = "".join(STRING.findall(parts[0])).replace("\\n", "\n").replace("\\t", "\t")
    return Statement(text, [operand for part in parts[1:3] for operand in _operands(part)])


def _operands(part: str) -> list[str]:
    """The expressions of `"=r"(x), "l"(&t)`."""
    found: list[str] = []
    at = 0
    while (string := STRING.search(part, at)) is not None:
        start = part.index("(", string.end()) + 1
        at = _closing(part, start)
        found.append(part[start:at])
    return found


def _block(statement: Statement) -> str:
    text = statement.text.strip()
    if text.startswith("{\n") and text.endswith("}"):
        text = text[1:-1]
    lines = [_line(line.strip(), statement) for line in text.split(";")]
    return "{ " + " ".join([line for line in lines if line]) + " }"


def _line(line: str, statement: Statement) -> str:
    label = re.match(r"(\w+):\s*(?!:)", line)
    if label:
        return f"{label.group(1)}: {_line(line[label.end() :], statement) or ';'}"
    if not line:
        return ""
    declared = re.fullmatch(r"\.reg \.(\w+) (\w+)", line)
    if declared:
        return f"{TYPES[declared.group(1)]} {declared.group(2)};"
    guarded = re.match(r"@(\w+) ", line)
    if guarded:
        return f"if ({guarded.group(1)}) {_line(line[guarded.end() :], statement)}"
    opcode, _, rest = line.partition(" ")
    if opcode == "bra":
        return f"goto {rest};"
    if opcode.startswith("wgmma.mma_async"):
        return _product(opcode, rest, statement)
    arguments = [_value(name, statement) for name in re.split(r"[\s,{}\[\]]+", rest) if name and name != "_"]
    return f"ptx::{re.sub('[.:]+', '_', opcode)}({', '.join(arguments)});"


def _value(name: str, statement: Statement) -> str:
    if name.startswith("%%"):
        return f"ptx::{name[2:]}()"
    return f"({statement.operands[int(name[1:])]})" if name.startswith("%") else name


def _product(opcode: str, rest: str, statement: Statement) -> str:
    """wgmma's registers are lists, whose elements have to be those of one array, in order. Then come A, B, whether to add, and numbers: the factors of A and B,
    and whether they are transposed, for operands in shared memory."""
    shape = WGMMA.fullmatch(opcode)
    assert shape is not None, f"{opcode} is not emulated"
    n, fp16 = int(shape.group(1)), shape.group(2) == "f16"
    items = [item.strip() for item in re.findall(r"\{[^}]*\}|[^,{}]+", rest) if item.strip()]
    sums, a, b, add, *numbers = items
    a_in_registers = a.startswith("{")
    factors, transposed = numbers[:2], numbers[2:]
    assert factors == ["1", "1"] and len(transposed) == (1 if a_in_registers else 2), f"{opcode} with {numbers} is not emulated"
    assert a_in_registers or transposed[0] == "0", f"{opcode} with a transposed A is not emulated"
    values = [_array(sums, n // 2, statement), _array(a, 4, statement) if a_in_registers else _value(a, statement), _value(b, statement), add]
    shaped = f"hopper::Shape{{{n}, {str(fp16).lower()}, {str(transposed[-1] == '1').lower()}}}"
    return f"ptx::wgmma_{'registers' if a_in_registers else 'shared'}({shaped}, {', '.join(values)});"


def _array(items: str, count: int, statement: Statement) -> str:
    expressions = [statement.operands[int(name.strip()[1:])] for name in items.strip("{}").split(",")]
    elements = [ELEMENT.fullmatch(x) for x in expressions]
    names = {x.group(1) for x in elements if x is not None}
    assert len(names) == 1 and [int(x.group(2)) for x in elements if x is not None] == list(range(count)), f"{items} are not the {count} elements of one array"
    return names.pop()
