"""Saving tile maps: a zip of one JSON header and the tensors' raw numbers. Nothing in the file is ever executed."""

import ctypes
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise.errors import InputError
from tilewise.lang import Call, parse
from tilewise.tiles.build import Geometry
from tilewise.tiles.runs import Runs

if TYPE_CHECKING:
    from tilewise.tiles.tilemap import TileMap

FORMAT = "tilewise tile map 1"
DTYPES = {str(d): d for d in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
                              torch.float16, torch.bfloat16, torch.float32, torch.float64)}  # fmt: skip


def save(tile_map: "TileMap", path: Path) -> None:
    g, mask = tile_map.geometry, tile_map.mask
    tensors = {f"{kind}.{field}": getattr(runs, field) for kind, runs in _runs(tile_map) for field in ("offsets", "start", "count")}
    header: dict[str, Any] = {
        "format": FORMAT, "name": tile_map.name, "given": tile_map.given,
        "geometry": [g.batch, g.heads, g.q_len, g.kv_len, *g.tile],
    }  # fmt: skip
    if mask is not None:
        header["mask"] = {"program": mask.program.text, "ints": list(mask.ints), "floats": [float(x).hex() for x in mask.floats]}
        tensors |= {f"capture.{k}": t for k, t in enumerate(mask.captures)}
    header["tensors"] = {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("header.json", json.dumps(header))
        for name, tensor in tensors.items():
            file.writestr(name, _bytes(tensor))


def _bytes(tensor: Tensor) -> bytes:
    packed = tensor.detach().cpu().contiguous()
    return ctypes.string_at(packed.data_ptr(), packed.nbytes) if packed.numel() else b""


def _runs(tile_map: "TileMap") -> tuple[tuple[str, Runs], tuple[str, Runs]]:
    return ("partial", tile_map.partial), ("full", tile_map.full)


def load(path: Path) -> "TileMap":
    from tilewise.tiles.tilemap import TileMap

    try:
        with zipfile.ZipFile(path) as file:
            header = json.loads(file.read("header.json"))
            if header.get("format") != FORMAT:
                raise InputError(f"{path} holds {header.get('format')!r}, this version reads {FORMAT!r}")
            tensors = {name: _tensor(file.read(name), dtype, shape) for name, (dtype, shape) in header["tensors"].items()}
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError) as error:
        raise InputError(f"{path} is not a tile map or is damaged: {error}") from error
    batch, heads, q_len, kv_len, *tile = header["geometry"]
    geometry = Geometry(batch, heads, q_len, kv_len, (tile[0], tile[1]))
    partial, full = (_checked(Runs(*(tensors[f"{kind}.{f}"] for f in ("offsets", "start", "count"))), geometry, path) for kind in ("partial", "full"))
    mask = None
    if "mask" in header:
        stored = header["mask"]
        program = parse(stored["program"])
        captures = tuple(tensors[f"capture.{k}"] for k in range(len(program.captures)))
        mask = Call(program, captures, tuple(stored["ints"]), tuple(float.fromhex(x) for x in stored["floats"]))
    return TileMap(geometry, partial, full, mask, header["name"], header["given"])


def _tensor(raw: bytes, dtype: str, shape: list[int]) -> Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=DTYPES[dtype]) if raw else torch.zeros(0, dtype=DTYPES[dtype])
    return flat.view(shape)


def _checked(runs: Runs, geometry: Geometry, path: Path) -> Runs:
    """Engines trust a map's numbers as addresses, so a damaged file must not get through."""
    steps = runs.offsets[1:] - runs.offsets[:-1]
    right = (
        runs.rows == geometry.rows
        and int(runs.offsets[0]) == 0
        and bool((steps >= 0).all())
        and int(runs.offsets[-1]) == len(runs.start) == len(runs.count)
        and bool(((runs.start >= 0) & (runs.count > 0) & (runs.start + runs.count <= geometry.kv_tiles)).all())
    )
    if not right:
        raise InputError(f"{path} is damaged: its runs do not fit a map of {geometry.q_tiles} x {geometry.kv_tiles} tiles")
    return runs
