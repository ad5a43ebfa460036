"""Saves and loads tile maps: a zip of a JSON header and the tensors' raw bytes, uncompressed. Nothing in the file is ever executed.

A file may come from anywhere, and engines trust a map: its runs become memory offsets, its program C++. So only what `save` could have written is loaded,
and nothing is allocated that the file is not as long as. What a map says (which tiles, which mask) is its writer's.
"""

import ctypes
import json
import math
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InputError
from tilewise.lang import INDICES, BoundProgram, parse
from tilewise.lang.types import INTEGER_RANGE, NAME_OF
from tilewise.memory import resolved
from tilewise.tiles.geometry import Geometry
from tilewise.tiles.runs import Runs, ordered

if TYPE_CHECKING:
    from tilewise.tiles.tilemap import TileMap

FORMAT = "tilewise tile map 1"
DTYPES = {str(d): d for d in NAME_OF}
KINDS, FIELDS = ("partial", "full"), ("offsets", "start", "count")
HEADER, HEADER_KEYS = "header.json", {"format", "name", "given", "geometry", "tensors"}  # and "mask", if it has one
MASK_KEYS = {"program", "ints", "floats"}
LONGEST_HEADER = 2**22  # parsed, JSON takes many times its length
LONGEST, LARGEST_TILE, MOST_TILES = 2**40, 2**31 - 1, 2**31 - 1  # tokens of a dimension; of a tile; tiles of a dimension, which are counted in 32 bits
MOST_DIMENSIONS = 64  # that torch computes with
END_OF_ZIP = b"PK\x05\x06"
END_BYTES = 22  # of the record that ends a zip without a comment


def save(tile_map: "TileMap", path: Path) -> None:
    g, mask = tile_map.geometry, tile_map.mask
    tensors = {f"{kind}.{field}": getattr(getattr(tile_map, kind), field) for kind in KINDS for field in FIELDS}
    header: dict[str, Any] = {"format": FORMAT, "name": tile_map.name, "given": tile_map.given, "geometry": [g.batch, g.heads, g.q_len, g.kv_len, *g.tile]}
    if mask is not None:
        header["mask"] = {"program": mask.program.text, "ints": list(mask.ints), "floats": [float(x).hex() for x in mask.floats]}
        tensors |= {f"capture.{k}": t for k, t in enumerate(mask.captures)}
    header["tensors"] = {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()}
    text = json.dumps(header)
    if len(text) > LONGEST_HEADER:
        raise InputError(f"the mask is too long to be saved: {len(mask.program.instructions) if mask else 0} instructions")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr(HEADER, text)
        for name, tensor in tensors.items():
            file.writestr(name, _bytes(tensor))


def _bytes(tensor: Tensor) -> bytes:
    packed = resolved(tensor.detach().cpu().contiguous())
    return ctypes.string_at(packed.data_ptr(), packed.nbytes) if packed.numel() else b""


class Stored(NamedTuple):
    """A map as it was written."""

    geometry: Geometry
    partial: Runs
    full: Runs
    mask: BoundProgram | None
    name: str
    given: bool


def load(path: Path) -> Stored:
    with path.open("rb") as raw:
        try:
            with zipfile.ZipFile(raw) as file:
                members = _members(file, raw)
                header = _header(file, members)
                tensors = {name: _tensor(file, members[name], *header["tensors"][name]) for name in header["tensors"]}
            return _read(header, tensors)
        except Exception as error:  # there are too many ways for a file to be damaged to list them
            raise InputError(f"{path} is not a tile map or is damaged: {error or type(error).__name__}") from error


# -- the file --------------------------------------------------------------------------------------------------------


def _members(file: zipfile.ZipFile, raw: IO[bytes]) -> dict[str, zipfile.ZipInfo]:
    """What the zip holds, all of it together no larger than the file."""
    size = raw.seek(0, 2)
    raw.seek(max(0, size - END_BYTES))
    found = file.infolist()
    alone = raw.read(len(END_OF_ZIP)) == END_OF_ZIP and min([m.header_offset for m in found], default=0) == 0
    stored = all([m.compress_type == zipfile.ZIP_STORED and m.file_size == m.compress_size and not m.flag_bits & 1 for m in found])
    if not (alone and stored and sum([m.file_size for m in found]) <= size and len({m.filename for m in found}) == len(found)):
        raise InputError("the zip is not one that tilewise writes: compressed, encrypted, with a name twice, or with bytes around it")
    return {m.filename: m for m in found}


def _header(file: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo]) -> dict[str, Any]:
    if HEADER not in members or members[HEADER].file_size > LONGEST_HEADER:
        raise InputError(f"it has no {HEADER} of at most {LONGEST_HEADER} bytes")
    header: dict[str, Any] = json.loads(file.read(HEADER), object_pairs_hook=_object, parse_constant=_no_number)
    known = header.get("format") if isinstance(header, dict) else None
    if known != FORMAT:
        raise InputError(f"it holds {str(known)[:80]!r}, this version reads {FORMAT!r}")
    if header.keys() - {"mask"} != HEADER_KEYS or type(header["tensors"]) is not dict or {*members} != {HEADER, *header["tensors"]}:
        raise InputError("its header does not tell what the file holds")
    return header


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise InputError("its header has a key twice")
    return dict(pairs)


def _no_number(text: str) -> Any:
    raise InputError(f"its header has {text} for a number")


def _tensor(file: zipfile.ZipFile, member: zipfile.ZipInfo, dtype: Any, shape: Any) -> Tensor:
    if dtype not in DTYPES or not _integers(shape, 0, LONGEST) or len(shape) > MOST_DIMENSIONS:
        raise InputError(f"{member.filename} is described as {str(dtype)[:80]} {str(shape)[:80]}")
    if math.prod(shape) * DTYPES[dtype].itemsize != member.file_size:
        raise InputError(f"{member.filename} has {member.file_size} bytes, which is not {dtype} {shape}")
    raw = bytearray(file.read(member))
    if dtype == "torch.bool" and raw.strip(b"\x00\x01"):  # other bytes are no booleans, and whoever reads them so may do anything
        raise InputError(f"{member.filename} holds what is no boolean")
    flat = torch.frombuffer(raw, dtype=DTYPES[dtype]) if raw else torch.zeros(0, dtype=DTYPES[dtype])
    return flat.view(shape)


def _integers(values: Any, low: int, high: int) -> bool:
    """Whether it is a list of integers in a range; to Python, True is one."""
    return type(values) is list and all([type(v) is int and low <= v <= high for v in values])


# -- the map ---------------------------------------------------------------------------------------------------------


def _read(header: dict[str, Any], tensors: dict[str, Tensor]) -> Stored:
    name, given, geometry = header["name"], header["given"], _geometry(header["geometry"])
    if type(name) is not str or type(given) is not bool:
        raise InputError(f"its name and whether it is given are {str(name)[:80]!r} and {str(given)[:80]!r}")
    partial, full = (Runs(*(tensors.pop(f"{kind}.{field}") for field in FIELDS)) for kind in KINDS)
    if not (_fits(partial, geometry) and _fits(full, geometry) and _apart(partial, full)):
        raise InputError(f"its runs do not fit a map of {geometry.q_tiles} x {geometry.kv_tiles} tiles")
    mask = _read_mask(header["mask"], tensors) if "mask" in header else None
    if mask is None and (tensors or not given):
        raise InputError("it has captured tensors, or tiles that a mask decides about, but no mask")
    return Stored(geometry, partial, full, mask, name, given)


def _geometry(values: Any) -> Geometry:
    if _integers(values, 0, LONGEST) and len(values) == 6 and all([1 <= tile <= LARGEST_TILE for tile in values[4:]]):
        batch, heads, q_len, kv_len, q_tile, kv_tile = values
        found = Geometry(batch, heads, q_len, kv_len, (q_tile, kv_tile))
        if max(found.q_tiles, found.kv_tiles) <= MOST_TILES:
            return found
    raise InputError(f"its lengths and tiles are {str(values)[:80]}")


def _read_mask(stored: Any, tensors: dict[str, Tensor]) -> BoundProgram:
    if type(stored) is not dict or stored.keys() != MASK_KEYS or type(stored["program"]) is not str:
        raise InputError("its mask is no program with its numbers")
    program = parse(stored["program"])
    ints, floats = _ints(stored["ints"]), _floats(stored["floats"])
    if {*tensors} != {f"capture.{k}" for k in range(len(program.captures))}:
        raise InputError(f"its mask captures {len(program.captures)} tensors, and the file holds {len(tensors)}")
    captures = tuple([tensors[f"capture.{k}"] for k in range(len(program.captures))])
    slots = {"int": len(ints), "float": len(floats)}
    right = (
        all([spec == (NAME_OF[t.dtype], t.dim()) and t.numel() > 0 for spec, t in zip(program.captures, captures, strict=True)])
        and all([int(i.attr) < slots[i.op] for i in program.instructions if i.op in slots])
        and program.uses <= {*INDICES}
        and len(program.results) == 1
        and program.result_type.is_bool
    )
    if not right:
        raise InputError("its mask, captured tensors and numbers do not belong together")
    return BoundProgram(program, captures, ints, floats)


def _ints(values: Any) -> tuple[int, ...]:
    if not _integers(values, *INTEGER_RANGE["i64"]):
        raise InputError("its mask's integers are no list of 64-bit integers")
    return tuple(values)


def _floats(values: Any) -> tuple[float, ...]:
    if type(values) is not list or not all([type(v) is str and float.fromhex(v).hex() == v for v in values]):
        raise InputError("its mask's floats are no list of hexadecimal floats")
    return tuple([float.fromhex(v) for v in values])


def _fits(runs: Runs, geometry: Geometry) -> bool:
    """Engines use a map's numbers as memory offsets without checks, so damaged files must be rejected here."""
    if not all([t.dtype == torch.int32 and t.dim() == 1 for t in (runs.offsets, runs.start, runs.count)]):
        return False
    if len(runs.offsets) != geometry.rows + 1 or len(runs.start) != len(runs.count):
        return False
    end = runs.start.long() + runs.count
    return (
        int(runs.offsets[0]) == 0
        and bool((runs.offsets[1:] >= runs.offsets[:-1]).all())
        and int(runs.offsets[-1]) == len(runs.start)
        and bool(((runs.start >= 0) & (end > runs.start) & (end <= geometry.kv_tiles)).all())
    )


def _apart(partial: Runs, full: Runs) -> bool:
    """Whether no tile is listed twice, and each row's runs of one kind are sorted and do not touch."""

    def closer(gap: int, row: Tensor, start: Tensor, count: Tensor) -> bool:
        return bool(((row[1:] == row[:-1]) & (start[1:] < start[:-1] + count[:-1] + gap)).any())

    each = [(runs.row_of_run(), runs.start.long(), runs.count.long()) for runs in (partial, full)]
    return not (closer(1, *each[0]) or closer(1, *each[1]) or closer(0, *ordered(each)))
