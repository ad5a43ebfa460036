"""Saves and loads tile maps: a zip of a JSON header and the tensors' raw bytes. Nothing in the file is ever executed."""

import ctypes
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InputError
from tilewise.lang import INDICES, BoundProgram, parse
from tilewise.lang.types import NAME_OF
from tilewise.memory import resolved
from tilewise.tiles.geometry import Geometry
from tilewise.tiles.runs import Runs, ordered

if TYPE_CHECKING:
    from tilewise.tiles.tilemap import TileMap

FORMAT = "tilewise tile map 1"
DTYPES = {
    str(d): d for d in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def save(tile_map: "TileMap", path: Path) -> None:
    g, mask = tile_map.geometry, tile_map.mask
    tensors = {f"{kind}.{field}": getattr(runs, field) for kind, runs in _runs(tile_map) for field in ("offsets", "start", "count")}
    header: dict[str, Any] = {"format": FORMAT, "name": tile_map.name, "given": tile_map.given, "geometry": [g.batch, g.heads, g.q_len, g.kv_len, *g.tile]}
    if mask is not None:
        header["mask"] = {"program": mask.program.text, "ints": list(mask.ints), "floats": [float(x).hex() for x in mask.floats]}
        tensors |= {f"capture.{k}": t for k, t in enumerate(mask.captures)}
    header["tensors"] = {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("header.json", json.dumps(header))
        for name, tensor in tensors.items():
            file.writestr(name, _bytes(tensor))


def _bytes(tensor: Tensor) -> bytes:
    packed = resolved(tensor.detach().cpu().contiguous())
    return ctypes.string_at(packed.data_ptr(), packed.nbytes) if packed.numel() else b""


def _runs(tile_map: "TileMap") -> tuple[tuple[str, Runs], tuple[str, Runs]]:
    return ("partial", tile_map.partial), ("full", tile_map.full)


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
                header = json.loads(file.read("header.json"))
                if header["format"] != FORMAT:
                    raise InputError(f"it holds {header['format']!r}, this version reads {FORMAT!r}")
                tensors = {name: _tensor(file.read(name), dtype, shape) for name, (dtype, shape) in header["tensors"].items()}
            return _read(header, tensors)
        except Exception as error:  # there are too many ways for a file to be damaged to list them
            raise InputError(f"{path} is not a tile map or is damaged: {error or type(error).__name__}") from error


def _read(header: dict[str, Any], tensors: dict[str, Tensor]) -> Stored:
    batch, heads, q_len, kv_len, q_tile, kv_tile = map(int, header["geometry"])
    if min(batch, heads, q_len, kv_len) < 0 or min(q_tile, kv_tile) < 1:
        raise InputError(f"its lengths and tiles are {header['geometry']}")
    geometry = Geometry(batch, heads, q_len, kv_len, (q_tile, kv_tile))
    partial, full = (Runs(*(tensors[f"{kind}.{f}"] for f in ("offsets", "start", "count"))) for kind in ("partial", "full"))
    if not (_fits(partial, geometry) and _fits(full, geometry) and _apart(partial, full)):
        raise InputError(f"its runs do not fit a map of {geometry.q_tiles} x {geometry.kv_tiles} tiles")
    mask = _read_mask(header["mask"], tensors) if "mask" in header else None
    return Stored(geometry, partial, full, mask, str(header["name"]), bool(header["given"]))


def _read_mask(stored: dict[str, Any], tensors: dict[str, Tensor]) -> BoundProgram:
    program = parse(stored["program"])
    captures = tuple(tensors[f"capture.{k}"] for k in range(len(program.captures)))
    ints, floats = tuple(map(int, stored["ints"])), tuple(map(float.fromhex, stored["floats"]))
    slots = {"int": len(ints), "float": len(floats), "load": len(captures)}
    right = (
        all(spec == (NAME_OF[t.dtype], t.dim()) for spec, t in zip(program.captures, captures, strict=True))
        and all(int(i.attr) < slots[i.op] for i in program.instructions if i.op in slots)
        and program.uses <= {*INDICES}
        and program.result_type.is_bool
    )
    if not right:
        raise InputError("its mask and captured tensors do not belong together")
    return BoundProgram(program, captures, ints, floats)


def _tensor(raw: bytes, dtype: str, shape: list[int]) -> Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=DTYPES[dtype]) if raw else torch.zeros(0, dtype=DTYPES[dtype])
    return flat.view(shape)


def _fits(runs: Runs, geometry: Geometry) -> bool:
    """Engines use a map's numbers as memory offsets without checks, so damaged files must be rejected here."""
    start, end = runs.start.long(), runs.start.long() + runs.count.long()
    return (
        all(t.dtype == torch.int32 and t.dim() == 1 for t in (runs.offsets, runs.start, runs.count))
        and runs.rows == geometry.rows
        and int(runs.offsets[0]) == 0
        and bool((runs.offsets[1:] >= runs.offsets[:-1]).all())
        and int(runs.offsets[-1]) == len(start)
        and bool(((start >= 0) & (end > start) & (end <= geometry.kv_tiles)).all())
    )


def _apart(partial: Runs, full: Runs) -> bool:
    """Whether no tile is listed twice and each row's runs are sorted."""

    def overlap(row: Tensor, start: Tensor, count: Tensor) -> bool:
        return bool(((row[1:] == row[:-1]) & (start[1:] < start[:-1] + count[:-1])).any())

    each = [(runs.row_of_run(), runs.start.long(), runs.count.long()) for runs in (partial, full)]
    return not (overlap(*each[0]) or overlap(*each[1]) or overlap(*ordered(each)))
