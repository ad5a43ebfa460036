"""Tile map files of a hostile writer, with good checksums: one clear error, or a map that every engine can compute with."""

import json
import random
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.support.mutated_files import mutated, packed, parts_of
from tilewise import masks
from tilewise.engines.cpp import missing
from tilewise.errors import InputError
from tilewise.tiles import TileMap
from tilewise.tiles.storage import HEADER

LENGTH = 32
ENGINES = ["reference", "blocked", pytest.param("cpp", marks=pytest.mark.skipif(missing() is not None, reason=str(missing())))]


def good_map() -> TileMap:
    ids = torch.arange(LENGTH) // 5
    return tw.tile_map(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q - kv < 7) & (q * 0.5 >= kv * 0.25), q_len=LENGTH, kv_len=LENGTH, tile=(8, 8))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    good_map().save(tmp_path / "map")
    return tmp_path / "map"


def refusal(path: Path) -> str:
    with pytest.raises(InputError, match="is not a tile map or is damaged") as caught:
        TileMap.load(path)
    return str(caught.value)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object], **tensors: bytes) -> None:
    parts = parts_of(path.read_bytes())
    header = json.loads(parts[HEADER])
    change(header)
    path.write_bytes(packed({HEADER: json.dumps(header).encode(), **{n: tensors.get(n, c) for n, c in parts.items() if n != HEADER}}))


PROGRAMS = {
    "a negative slot": ";index q;int -1;lt - 0 1;-> 2",
    "a slot that is not there": ";index q;int 5;lt - 0 1;-> 2",
    "a negative operand": ";index q;int 0;lt - 0 -1;-> 2",
    "an operand that comes later": ";index q;lt - 0 2;int 0;-> 1",
    "its own operand": ";index q;lt - 0 1;-> 1",
    "a result that is not there": ";index q;int 0;lt - 0 1;-> 3",
    "a negative result": ";index q;int 0;lt - 0 1;-> -1",
    "no result": ";index q;int 0;lt - 0 1;->",
    "two results": ";index q;int 0;lt - 0 1;ge - 0 1;-> 2 3",
    "a dead instruction": ";index q;index kv;int 0;lt - 0 2;-> 3",
    "a dead instruction of any text": ';index q;index ");system("true;int 0;lt - 0 1;-> 2',
    "an instruction twice": ";index q;index q;lt - 0 1;-> 2",
    "an unknown operation": ";index q;__class__ - 0;-> 1",
    "an unknown index": ";index score;int 0;lt - 0 1;-> 2",
    "a score": ";score f32;float 0;lt - 0 1;-> 2",
    "too few operands": ";index q;int 0;lt - 0;-> 2",
    "too many operands": ";index q;int 0;lt - 0 1 1;-> 2",
    "operands of a leaf": ";index q;int 0 0;lt - 0 1;-> 2",
    "an unknown dtype": ";index q;cast c64 0;int 0;lt - 1 2;-> 3",
    "an attribute where there is none": ";index q;int 0;lt x 0 1;-> 2",
    "types that it does not take": ";index q;float 0;and - 0 1;int 0;lt - 2 3;-> 4",
    "numbers alone": ";int 0;float 0;lt - 0 1;-> 2",
    "a literal of 70 bits": f";index q;literal {2**70};lt - 0 1;-> 2",
    "digits of another alphabet": ";index q;int \u0660;lt - 0 1;-> 2",
    "a literal spelled otherwise": ";index q;literal 0x10;lt - 0 1;-> 2",
    "spaces": ";index q; int 0;lt - 0 1;-> 2",
    "a load of a float": "i64:1;float 0;load 0 0;int 0;lt - 1 2;-> 3",
    "a load with too few indices": "i64:1;load 0;int 0;lt - 0 1;-> 2",
    "a load of no capture": "i64:1;index q;load 1 0;int 0;lt - 1 2;-> 3",
    "a load of a negative capture": "i64:1;index q;load -1 0;int 0;lt - 1 2;-> 3",
    "another rank": "i64:2;index q;load 0 0 0;int 0;lt - 1 2;-> 3",
    "another dtype": "i32:1;index q;load 0 0;int 0;lt - 1 2;-> 3",
    "nothing": "",
    "not text": 7,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_no_function_traces_to_are_refused(name: str, path: Path) -> None:
    rewrite(path, lambda header: header["mask"].update(program=PROGRAMS[name]))
    refusal(path)


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a capture without elements": lambda h: h["tensors"].update({"capture.0": ["torch.int64", [0]]}),
    "a size of -1": lambda h: h["tensors"].update({"capture.0": ["torch.int64", [-1]]}),
    "a size that overflows": lambda h: h["tensors"].update({"capture.0": ["torch.int64", [2**62, 4]]}),
    "sizes that are not numbers": lambda h: h["tensors"].update({"capture.0": ["torch.int64", [True]]}),
    "a tensor that is not there": lambda h: h["tensors"].update({"capture.1": ["torch.int64", [1]]}),
    "an integer of 65 bits": lambda h: h["mask"].update(ints=[2**64]),
    "a boolean for an integer": lambda h: h["mask"].update(ints=[True]),
    "a float for an integer": lambda h: h["mask"].update(ints=[7.0]),
    "NaN for an integer": lambda h: h["mask"].update(ints=[float("nan")]),
    "a float spelled otherwise": lambda h: h["mask"].update(floats=["0.5", "0.25"]),
    "huge lengths": lambda h: h.update(geometry=[1, 1, 2**62, LENGTH, 2**60, 8]),
    "floats for lengths": lambda h: h.update(geometry=[1, 1, 32.0, 32.0, 8, 8]),
    "seven lengths": lambda h: h.update(geometry=[1, 1, 32, 32, 8, 8, 8]),
    "a name that is none": lambda h: h.update(name=["x"]),
    "given as a number": lambda h: h.update(given=1),
    "no mask, and not given": lambda h: h.pop("mask"),
    "another key": lambda h: h.update(more=1),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_are_never_written_are_refused(name: str, path: Path) -> None:
    rewrite(path, HEADERS[name])
    refusal(path)


def test_a_capture_without_elements_is_refused_whoever_says_so(path: Path) -> None:
    rewrite(path, HEADERS["a capture without elements"], **{"capture.0": b""})
    refusal(path)


def test_booleans_are_0_or_1(tmp_path: Path) -> None:
    allowed = torch.ones(LENGTH, dtype=torch.bool)
    tw.tile_map(lambda b, h, q, kv: allowed[kv], q_len=LENGTH, kv_len=LENGTH, tile=(8, 8)).save(tmp_path / "map")
    rewrite(tmp_path / "map", lambda header: None, **{"capture.0": bytes([1] * 9 + [2] + [1] * 22)})
    assert "no boolean" in refusal(tmp_path / "map")


def test_headers_that_are_hardly_json(path: Path) -> None:
    parts = parts_of(path.read_bytes())
    text = parts[HEADER].decode()
    twice, long = text[:-1] + ', "given": true}', text.replace("32", "1" * 5000)
    for header in ("[" * 100_000, '{"format": ' * 50_000, "{}", "[]", "null", text[:-1], text + " {}", twice, long):
        path.write_bytes(packed(parts | {HEADER: header.encode()}))
        refusal(path)
    path.write_bytes(packed(parts | {HEADER: b"\xff\xfe\x00"}))
    refusal(path)


def test_bytes_around_the_zip_are_refused(path: Path) -> None:
    whole = path.read_bytes()
    for raw in (whole + b"\x00", whole + whole, b"#!" + whole):
        path.write_bytes(raw)
        refusal(path)


def test_a_small_file_takes_little_memory(path: Path) -> None:
    """An eighth of a megabyte that would unpack to an eighth of a gigabyte."""
    rows = 2**25
    parts = parts_of(path.read_bytes())
    header = json.loads(parts[HEADER])
    header["geometry"] = [1, 1, 8 * rows, LENGTH, 8, 8]
    header["tensors"]["partial.offsets"] = ["torch.int32", [rows + 1]]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in (parts | {HEADER: json.dumps(header).encode()}).items():
            if name != "partial.offsets":
                file.writestr(name, content)
        with file.open("partial.offsets", "w") as member:
            for _ in range(rows * 4 // 2**20):
                member.write(bytes(2**20))
            member.write(bytes(4))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert path.stat().st_size < 2**20 and "compressed" in refusal(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB: 64 MiB


@pytest.mark.parametrize("seed", range(4))
def test_mutated_files_are_refused_or_are_maps(seed: int, tmp_path: Path) -> None:
    path, again = tmp_path / "map", tmp_path / "again"
    draw = random.Random(seed)
    wanted = good_map()
    wanted.save(path)
    whole = path.read_bytes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100):
        path.write_bytes(mutated(whole, draw))
        try:
            found = TileMap.load(path)
        except InputError as error:
            assert str(path) in str(error) and "\n" not in str(error)
        else:
            found.save(again)
            assert TileMap.load(again) == found
            if found.geometry == wanted.geometry:
                attended(found, "blocked")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17


def attended(tile_map: TileMap, engine: str, queries: int = LENGTH) -> torch.Tensor:
    x = torch.randn(1, 1, LENGTH, 8, generator=torch.Generator().manual_seed(0))
    return tw.attention(x[:, :, :queries], x, x, mask=tile_map, backend=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_loaded_maps_compute_what_saved_ones_do(engine: str, path: Path) -> None:
    torch.testing.assert_close(attended(TileMap.load(path), engine), attended(good_map(), "reference"))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loaded_map_decodes(engine: str, tmp_path: Path) -> None:
    """One query over a cache, where the C++ engine reads captures without a map."""
    offsets = torch.tensor([40, -40, 3])
    tile_map = tw.tile_map(lambda b, h, q, kv: offsets[kv] > offsets[q - 9], q_len=1, kv_len=LENGTH, tile=(8, 8))
    tile_map.save(tmp_path / "map")
    with torch.no_grad():
        found, wanted = attended(TileMap.load(tmp_path / "map"), engine, 1), attended(tile_map, "reference", 1)
    torch.testing.assert_close(found, wanted)


def test_every_named_mask_is_read_back(tmp_path: Path) -> None:
    """The reader is no stricter than the writer."""
    named = [masks.causal, masks.sliding_window(5), masks.prefix_lm(3), masks.document(lengths=[5, 27]), masks.neighborhood((4, 8), 3)]
    for mask in [*named, named[0] & ~named[1] | named[2]]:
        tile_map = tw.tile_map(mask, q_len=LENGTH, kv_len=LENGTH, tile=(8, 8))
        tile_map.save(tmp_path / "map")
        assert TileMap.load(tmp_path / "map") == tile_map
