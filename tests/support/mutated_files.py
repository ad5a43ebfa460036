"""Damaged and hostile tile map files: random changes to good ones, from single bytes to programs that are almost right."""

import io
import json
import random
import zipfile
from collections.abc import Callable
from typing import Any

Parts = dict[str, bytes]  # of a map file, by name; the header first

INTEGERS = [-1, 0, 1, 2, 3, 7, 63, 64, 2**31 - 1, 2**31, -(2**31), 2**40, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30]
ODD = [None, True, False, "", "x", [], {}, [[]], 1.5, -0.0, float("nan"), float("inf"), "0", "torch.int32", [0], [-1], {"a": 1}]
WORDS = ["index", "score", "int", "float", "literal", "load", "cast", "add", "mul", "floordiv", "mod", "pow", "lt", "and", "not", "where", "abs", "shl"]
WORDS += ["q", "kv", "b", "h", "-", "bool", "i64", "f32", "f64", "True", "1.0", "nan", "system", "0", "1", "2"]
NUMBERS = [b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x00", b"\x01\x00\x00\x00"]  # four bytes of a tensor


def parts_of(raw: bytes) -> Parts:
    with zipfile.ZipFile(io.BytesIO(raw)) as file:
        return {name: file.read(name) for name in file.namelist()}


def packed(parts: Parts, compression: int = zipfile.ZIP_STORED) -> bytes:
    """The parts as a file, with checksums made good: what a hostile writer could do."""
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w", compression) as file:
        for name, content in parts.items():
            file.writestr(name, content)
    return into.getvalue()


def mutated(raw: bytes, draw: random.Random) -> bytes:
    """The file with one change, or a few."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        change = draw.choice(CHANGES)
        try:
            raw = change(raw, draw)
        except Exception:  # an earlier change left nothing to change in this way
            return raw
    return raw


def _bytes(raw: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(raw))
    return draw.choice(
        [
            raw[:at] + bytes([draw.randrange(256)]) + raw[at + 1 :],
            raw[:at] + raw[at + draw.randrange(1, 9) :],
            raw[:at] + draw.randbytes(draw.randrange(1, 9)) + raw[at:],
            raw[:at],
            raw + draw.randbytes(draw.randrange(1, 30)),
        ]
    )


def _header(raw: bytes, draw: random.Random) -> bytes:
    parts = parts_of(raw)
    header = json.loads(parts["header.json"])
    _change_inside(header, draw)
    return packed(parts | {"header.json": json.dumps(header).encode()})


def _change_inside(value: Any, draw: random.Random) -> None:
    """Change one thing anywhere in a JSON value."""
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = draw.choice(keys)
    inner = value[key]
    if isinstance(inner, (dict, list)) and inner and draw.random() < 0.7:
        _change_inside(inner, draw)
    elif draw.random() < 0.15:
        del value[key]
    elif isinstance(inner, int) and draw.random() < 0.7:
        value[key] = draw.choice([*INTEGERS, inner + 1, inner - 1, -inner])
    elif isinstance(inner, list) and draw.random() < 0.5:
        inner.append(draw.choice([*INTEGERS, *inner, *ODD]))
    else:
        value[key] = draw.choice(ODD)


def _program(raw: bytes, draw: random.Random) -> bytes:
    parts = parts_of(raw)
    header = json.loads(parts["header.json"])
    lines = header["mask"]["program"].split(";")
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.randrange(len(lines))
        words = lines[at].split(" ")
        where = draw.randrange(len(words))
        words[where : where + draw.randrange(2)] = [draw.choice([*map(str, INTEGERS), *WORDS, str(draw.randrange(len(lines)))])][: draw.choice((0, 1, 1, 1))]
        lines[at] = " ".join(words)
        if draw.random() < 0.1:
            lines.insert(at, draw.choice(lines))
    header["mask"]["program"] = ";".join(lines)
    return packed(parts | {"header.json": json.dumps(header).encode()})


def _numbers(raw: bytes, draw: random.Random) -> bytes:
    """One number of a tensor."""
    parts = parts_of(raw)
    name = draw.choice([n for n, content in parts.items() if n != "header.json" and content])
    content = bytearray(parts[name])
    at = draw.randrange(len(content)) // 4 * 4
    content[at : at + 4] = draw.choice([*NUMBERS, draw.randbytes(4)])
    return packed(parts | {name: bytes(content[: len(parts[name])])})


def _sizes(raw: bytes, draw: random.Random) -> bytes:
    """A tensor longer, shorter or of another shape, and its description with it, perhaps."""
    parts = parts_of(raw)
    header = json.loads(parts["header.json"])
    name = draw.choice(list(header["tensors"]))
    content, (dtype, shape) = parts[name], header["tensors"][name]
    size = draw.choice((0, 4, 8, len(content) // 2, 2 * len(content), len(content) + 4))
    content = (content * 2 + bytes(size))[:size]
    if draw.random() < 0.6:
        width = {"torch.bool": 1, "torch.int32": 4, "torch.float32": 4}.get(dtype, 8)
        header["tensors"][name] = [dtype, draw.choice([[size // width], [1] * (len(shape) - 1) + [size // width], [-1], [0, 2**62], shape])]
    return packed(parts | {name: content, "header.json": json.dumps(header).encode()})


def _members(raw: bytes, draw: random.Random) -> bytes:
    parts = parts_of(raw)
    name = draw.choice(list(parts))
    if draw.random() < 0.3:
        return packed(parts, zipfile.ZIP_DEFLATED)
    if draw.random() < 0.5:
        del parts[name]
    else:
        parts[draw.choice(["../outside", "capture.99", "capture.-1", "partial.start ", "header.json/"])] = parts[name]
    return packed(parts)


CHANGES: list[Callable[[bytes, random.Random], bytes]] = [_bytes, _header, _header, _program, _program, _numbers, _sizes, _members]
