"""Tile maps in files: what is saved is loaded the same; files that are foreign, damaged or hostile are refused."""

import io
import json
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.support.brute import elements_of
from tests.support.varied import BATCH, HEADS, KEYS, QUERIES, REACH, TILE, given_map, random_states, varied_dense, varied_map
from tilewise import masks
from tilewise.errors import InputError
from tilewise.tiles import TileMap
from tilewise.tiles.storage import FORMAT


def saved_maps() -> dict[str, TileMap]:
    ids = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2, 2])
    strange = torch.tensor([0.0, float("inf"), -float("inf"), float("nan"), 1e-45], dtype=torch.float64)
    wide = {dtype: torch.arange(-3, 4).to(dtype) for dtype in (torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float32)}
    return {
        "no captures": tw.tile_map(masks.causal, q_len=100, kv_len=90, tile=(16, 16)),
        "numbers": tw.tile_map(lambda b, h, q, kv: (q - kv <= 7) & (q * 0.1 > kv * 0.3), q_len=100, kv_len=90, tile=(16, 16)),
        "captures": varied_map(),
        "documents": tw.tile_map(masks.document(ids), q_len=10, kv_len=10, tile=(4, 4)),
        "strange floats": tw.tile_map(lambda b, h, q, kv: strange[q % 5] > strange[kv % 5], q_len=20, kv_len=20, tile=(4, 4)),
        "all dtypes": tw.tile_map(lambda b, h, q, kv: sum((t[q % 7] > t[kv % 7]).long() for t in wide.values()) > 3, q_len=20, kv_len=20, tile=(4, 4)),
        "0-d capture": tw.tile_map(lambda b, h, q, kv: q - kv <= ids[4], q_len=20, kv_len=20, tile=(4, 4)),
        "strided capture": tw.tile_map(lambda b, h, q, kv: REACH.T[h, b] >= q - kv, batch=3, heads=2, q_len=20, kv_len=20, tile=(4, 4)),
        "boolean tensor": tw.tile_map(varied_dense(), batch=BATCH, heads=HEADS, q_len=QUERIES, kv_len=KEYS, tile=TILE),
        "sliced": varied_map()[1, :, torch.tensor([2, 4])],
        "given": given_map(random_states(2, 2, 4, 3), 30, 20, (8, 8), masks.causal),
        "given, no mask": given_map(random_states(2, 2, 4, 3), 30, 20, (8, 8)),
        "empty": tw.tile_map(masks.causal, q_len=0, kv_len=0),
        "nothing allowed": tw.tile_map(~masks.full, q_len=10, kv_len=10, tile=(4, 4)),
    }


@pytest.mark.parametrize("name", saved_maps())
def test_saved_map_is_the_same_when_loaded(name: str, tmp_path: Path) -> None:
    wanted = saved_maps()[name]
    wanted.save(tmp_path / "map")
    found = TileMap.load(str(tmp_path / "map"))
    assert found == wanted
    assert (found.name, found.given, found.tile, found.shape) == (wanted.name, wanted.given, wanted.tile, wanted.shape)
    assert torch.equal(elements_of(found), elements_of(wanted))


def test_file_is_a_zip_of_json_and_numbers(tmp_path: Path) -> None:
    path = tmp_path / "map"
    varied_map().save(path)
    with zipfile.ZipFile(path) as file:
        names = set(file.namelist())
        header = json.loads(file.read("header.json"))
        contents = {name: file.read(name) for name in names}
    assert header["format"] == FORMAT
    assert names == {"header.json", *header["tensors"]}
    runs = {f"{kind}.{field}" for kind in ("partial", "full") for field in ("offsets", "start", "count")}
    assert set(header["tensors"]) == runs | {"capture.0", "capture.1"}
    for name, raw in contents.items():
        with pytest.raises(ValueError):
            list(pickletools.genops(io.BytesIO(raw)))
        assert name == "header.json" or len(raw) % 4 == 0


def test_loading_never_unpickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pickle was read")

    varied_map().save(tmp_path / "map")
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    assert TileMap.load(tmp_path / "map") == varied_map()


def rejected(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        TileMap.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TileMap.load(tmp_path / "nowhere")


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"", b"PK", b"hello", b"\x80\x04N.", b"\x00" * 1000, b"{}"):
        path.write_bytes(content)
        assert "is not a tile map or is damaged" in rejected(path)
    torch.save({"a": torch.zeros(3)}, path)  # a zip too
    rejected(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", json.dumps({"format": "tilewise tile map 99"}))
    assert "'tilewise tile map 99', this version reads 'tilewise tile map 1'" in rejected(path)


def test_truncated_files(tmp_path: Path) -> None:
    path = tmp_path / "map"
    varied_map().save(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        rejected(path)


def test_damaged_bytes_are_noticed_or_harmless(tmp_path: Path) -> None:
    """Every content is checksummed. A byte that changes neither contents nor their checks (a date, say) may pass."""
    path = tmp_path / "map"
    wanted = varied_map()
    wanted.save(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            found = TileMap.load(path)
        except InputError as error:
            assert str(path) in str(error)
        else:
            assert found == wanted


def rewrite(path: Path, header: dict[str, Any] | None = None, **contents: bytes | None) -> None:
    """The file with a changed header and changed contents, checksums made good: what a hostile writer could do."""
    with zipfile.ZipFile(path) as file:
        old = json.loads(file.read("header.json"))
        parts = {name: file.read(name) for name in file.namelist()}
    parts["header.json"] = json.dumps(old | (header or {})).encode()
    for name, content in contents.items():
        if content is None:
            del parts[name]
        else:
            parts[name] = content
    with zipfile.ZipFile(path, "w") as file:
        for name, content in parts.items():
            file.writestr(name, content)


def int32(values: list[int]) -> bytes:
    return b"".join(v.to_bytes(4, "little", signed=True) for v in values)


FIELDS = {"offsets": 5, "start": 4, "count": 4}
BAD_HEADERS = {
    "no geometry": {"geometry": None},
    "short geometry": {"geometry": [1, 1, 16]},
    "other lengths": {"geometry": [1, 1, 160, 16, 4, 4]},
    "fewer keys": {"geometry": [1, 1, 16, 8, 4, 4]},
    "tiles of 0": {"geometry": [1, 1, 16, 16, 0, 4]},
    "negative length": {"geometry": [1, 1, -16, 16, 4, 4]},
    "words": {"geometry": ["a"] * 6},
    "no tensors": {"tensors": {}},
    "tensors as a list": {"tensors": [1, 2]},
    "unknown dtype": {"tensors": {"partial.start": ["torch.complex64", [4]]}},
    "float runs": {"tensors": {f"{k}.{f}": ["torch.float32", [size - (k == "full" and size == 4)]] for k in ("partial", "full") for f, size in FIELDS.items()}},
    "wrong size": {"tensors": {f"{k}.{f}": ["torch.int32", [99]] for k in ("partial", "full") for f in FIELDS}},
    "unknown operation": {"mask": {"program": ";index q;system - 0;-> 1", "ints": [], "floats": []}},
    "not a program": {"mask": {"program": "import os", "ints": [], "floats": []}},
    "not a mask": {"mask": {"program": ";index q;-> 0", "ints": [], "floats": []}},
    "unknown index": {"mask": {"program": ";index z;literal 3;lt - 0 1;-> 2", "ints": [], "floats": []}},
    "missing number": {"mask": {"program": ";index q;int 4;lt - 0 1;-> 2", "ints": [], "floats": []}},
    "missing capture": {"mask": {"program": "bool:1;index q;load 0 0;-> 1", "ints": [], "floats": []}},
    "bad float": {"mask": {"program": ";index q;float 0;lt - 0 1;-> 2", "ints": [], "floats": ["x"]}},
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_headers(name: str, tmp_path: Path) -> None:
    path = tmp_path / "map"
    tw.tile_map(masks.causal, q_len=16, kv_len=16, tile=(4, 4)).save(path)
    rewrite(path, BAD_HEADERS[name])
    rejected(path)


BAD_RUNS = {  # of a causal map of 4 x 4 tiles: partial (0, 0) (1, 1) (2, 2) (3, 3), full below
    "offsets do not begin at 0": {"partial.offsets": int32([1, 1, 2, 3, 4])},
    "offsets go back": {"partial.offsets": int32([0, 3, 2, 3, 4])},
    "offsets end elsewhere": {"partial.offsets": int32([0, 1, 2, 3, 3])},
    "far offsets": {"partial.offsets": int32([0, 1, 2, 2**31 - 1, 4])},
    "negative start": {"partial.start": int32([-1, 1, 2, 3])},
    "past the end": {"partial.start": int32([0, 1, 2, 4])},
    "overflowing end": {"partial.start": int32([0, 1, 2, 2**31 - 1])},
    "count of 0": {"partial.count": int32([1, 1, 0, 1])},
    "negative count": {"full.count": int32([1, -2, 3])},
    "partial and full": {"partial.start": int32([0, 0, 2, 3])},
    "missing": {"partial.start": None},
    "too short": {"partial.start": int32([0, 1])},
    "odd bytes": {"partial.start": b"abc"},
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_bad_runs(name: str, tmp_path: Path) -> None:
    path = tmp_path / "map"
    tw.tile_map(masks.causal, q_len=16, kv_len=16, tile=(4, 4)).save(path)
    rewrite(path, {}, **BAD_RUNS[name])
    rejected(path)


def test_runs_out_of_order(tmp_path: Path) -> None:
    path = tmp_path / "map"
    given_map(torch.tensor([[[[2, 0, 2, 0]]]]), 4, 16, (4, 4)).save(path)
    rewrite(path, {}, **{"full.start": int32([2, 0])})
    rejected(path)
