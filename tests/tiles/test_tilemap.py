"""Tile maps as objects: slicing, cutting, saving, comparing, counting, drawing, and every form a mask may come in."""

import io
import json
import pickletools
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import tilewise as tw
from tests.tiles.brute import check_map, check_runs, dense_mask, elements_of, states_of
from tilewise import masks
from tilewise.errors import InputError
from tilewise.tiles import EMPTY, Geometry, TileMap, draw, from_block_mask, tilemap
from tilewise.tiles.runs import from_dense
from tilewise.tiles.storage import FORMAT

BATCH, HEADS, QUERIES, KEYS = 3, 2, 45, 37
TILE = (8, 16)
REACH = torch.tensor([[4, 30], [0, 9], [100, 2]])
BIAS = torch.linspace(-1, 1, KEYS)


def varied(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Depends on everything, captures two tensors, a number and a float."""
    return ((q - kv).abs() <= REACH[b, h]) | ((BIAS[kv] > 0.75) & (q > 20))


def varied_map(tile: tuple[int, int] = TILE) -> TileMap:
    return tw.tile_map(varied, batch=BATCH, heads=HEADS, q_len=QUERIES, kv_len=KEYS, tile=tile)


def varied_dense() -> Tensor:
    return dense_mask(varied, BATCH, HEADS, QUERIES, KEYS)


def given_map(states: Tensor, q_len: int, kv_len: int, tile: tuple[int, int], mask: Any = None) -> TileMap:
    """A map given as bare tiles, as top-k or video-sparse attention would choose them."""
    batch, heads = states.shape[:2]
    flat = states.flatten(0, 2)
    call = None if mask is None else masks.as_mask(mask).traced()
    return TileMap(Geometry(batch, heads, q_len, kv_len, tile), from_dense(flat == 1), from_dense(flat == 2), call, "given", given=True)


def random_states(*shape: int) -> Tensor:
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(3)).to(torch.uint8)


def attended(mask: Any, batch: int, heads: int, q_len: int, kv_len: int, backend: str) -> Tensor:
    """An output that shows who was attended: uniform weights over the allowed keys, whose values are one-hot."""
    query, key = torch.zeros((batch, heads, q_len, 4)), torch.zeros((batch, heads, kv_len, 4))
    return tw.attention(query, key, torch.eye(kv_len).expand(batch, heads, -1, -1), mask=mask, backend=backend) > 0


# -- slicing ---------------------------------------------------------------------------------------------------------

SLICES = {
    "everything": ((), slice(None), slice(None), slice(None)),
    "batch element": ((1,), slice(1, 2), slice(None), slice(None)),
    "batch element from the end": ((-1,), slice(2, 3), slice(None), slice(None)),
    "batch elements": ((slice(1, None),), slice(1, 3), slice(None), slice(None)),
    "every other": ((slice(0, None, 2), slice(None, None, 2)), slice(0, None, 2), slice(0, 1), slice(None)),
    "head": ((slice(None), 1), slice(None), slice(1, 2), slice(None)),
    "query tile": ((0, 0, 2), slice(0, 1), slice(0, 1), slice(16, 24)),
    "last query tile": ((0, 0, -1), slice(0, 1), slice(0, 1), slice(40, 45)),
    "query tiles": ((slice(None), slice(None), slice(1, 4)), slice(None), slice(None), slice(8, 32)),
    "query tiles to the end": ((slice(None), slice(None), slice(3, None)), slice(None), slice(None), slice(24, 45)),
    "index tensors": ((torch.tensor([2, 0, 0]), torch.tensor([1, 0]), torch.tensor([4, 1])), [2, 0, 0], [1, 0], [*range(32, 40), *range(8, 16)]),
    "boolean tensor": ((torch.tensor([True, False, True]),), [0, 2], slice(None), slice(None)),
    "list": (([1, 1, 2],), [1, 1, 2], slice(None), slice(None)),
    "last tile last": ((0, 0, torch.tensor([1, 5])), [0], [0], [*range(8, 16), *range(40, 45)]),
    "short tile in the middle": ((0, 0, torch.tensor([5, 1])), [0], [0], [*range(40, 45), 44, 44, 44, *range(8, 16)]),
    "all tiles in another order": ((0, 0, torch.tensor([5, 0, 1, 2, 3, 4])), [0], [0], [*range(40, 45), 44, 44, 44, *range(40)]),
    "nothing": ((slice(0, 0),), slice(0, 0), slice(None), slice(None)),
    "no query tiles": ((0, 0, slice(3, 3)), slice(0, 1), slice(0, 1), slice(0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", SLICES)
def test_slice_is_the_map_of_the_slice(name: str) -> None:
    index, b, h, q = SLICES[name]
    part = varied_map()[index]
    dense = varied_dense()[b][:, h][:, :, q]
    assert part.shape == dense.shape
    check_map(part, dense)
    assert torch.equal(elements_of(part), dense)  # the mask inside partial tiles has moved along
    if dense.numel():
        for backend in ("reference", "blocked"):
            assert torch.equal(attended(part, *dense.shape, backend), dense)


def test_slice_of_a_slice() -> None:
    part = varied_map()[1:, :, 1:][1, torch.tensor([1, 0]), 2:]
    dense = varied_dense()[2:3, [1, 0], 24:]
    check_map(part, dense)
    assert torch.equal(elements_of(part), dense)


def test_slice_can_be_cut_anew() -> None:
    """A slice remembers its mask, moved: tiles of any other size follow from it."""
    check_map(varied_map()[1, 0, 2:].recut((5, 7)), varied_dense()[1:2, :1, 16:])
    check_map(varied_map()[2, 1, torch.tensor([3, 1])].recut((5, 7)), varied_dense()[2:, 1:, [*range(24, 32), *range(8, 16)]])


def test_slice_of_a_given_map() -> None:
    states = random_states(2, 2, 4, 3)
    part = given_map(states, 30, 20, (8, 8), masks.causal)[1, :, torch.tensor([2, 0])]
    assert part.given
    assert torch.equal(part.dense(), states[1:2, :, [2, 0]])
    rows = [*range(16, 24), *range(8)]
    whole = elements_of(given_map(states, 30, 20, (8, 8), masks.causal))
    assert torch.equal(elements_of(part), whole[1:2][:, :, rows])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (3, "index 3 is outside a tile map dimension of 3"),
        (-4, "index -4 is outside"),
        ((0, 0, 6), "index 6 is outside a tile map dimension of 6"),
        ((0, 0, 0, 0), "indexed by batch, head and query tile, got 4 indices"),
        (torch.zeros((2, 2), dtype=torch.int64), "a 1-D tensor"),
        (None, "does not fit a tile map dimension of 3"),
        (torch.tensor([7]), "does not fit a tile map dimension of 3"),
        (slice(None, None, -1), "does not fit a tile map dimension of 3"),
        ("batch", "does not fit a tile map dimension of 3"),
        (1.5, "does not fit a tile map dimension of 3"),
    ],
)  # fmt: skip
def test_what_cannot_index_a_map(index: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        varied_map()[index]


def test_to_moves_the_map_and_its_captures() -> None:
    found = varied_map()
    assert found.to("cpu") == found
    away = found.to("meta")
    assert away.device.type == "meta"
    assert away.mask is not None and all(t.device.type == "meta" for t in away.mask.captures)


# -- cutting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [(8, 16), (4, 4), (16, 16), (5, 7), (100, 100)], ids=str)
def test_map_of_a_mask_can_be_cut_at_will(tile: tuple[int, int]) -> None:
    again = varied_map().recut(tile)
    assert again.tile == tile
    assert again == varied_map(tile)
    assert again.name == varied_map().name


def test_same_tiles_are_not_cut_again() -> None:
    found = varied_map()
    assert found.recut(TILE) is found


@pytest.mark.parametrize("tile", [(8, 16), (8, 8), (4, 16), (1, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("lengths", [(32, 48), (29, 39), (25, 33)], ids=str)
def test_given_map_is_split_exactly(tile: tuple[int, int], lengths: tuple[int, int]) -> None:
    whole = given_map(random_states(2, 3, 4, 3), *lengths, (8, 16), masks.causal)
    split = whole.recut(tile)
    assert split.given and split.tile == tile
    check_runs(split)
    assert torch.equal(elements_of(split), elements_of(whole))
    assert split.computed_pairs() == whole.computed_pairs()


@pytest.mark.parametrize("tile", [(16, 16), (8, 32), (3, 16), (8, 5)], ids=str)
def test_given_map_that_cannot_be_cut(tile: tuple[int, int]) -> None:
    whole = given_map(random_states(1, 1, 4, 3), 32, 48, (8, 16))
    with pytest.raises(InputError, match=r"a map given as tiles of \(8, 16\) can only be cut into tiles that divide them, not"):
        whole.recut(tile)


def test_map_without_a_mask_is_split_too() -> None:
    bare = replace(given_map(random_states(1, 1, 4, 3), 32, 48, (8, 16)), given=False)
    assert bare.mask is None
    assert torch.equal(elements_of(bare.recut((4, 8))), elements_of(bare))


# -- files -----------------------------------------------------------------------------------------------------------


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
    }  # fmt: skip


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
}  # fmt: skip


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
}  # fmt: skip


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


# -- comparing and counting ------------------------------------------------------------------------------------------


def test_equality() -> None:
    window = tw.tile_map(masks.sliding_window(5), q_len=64, kv_len=64, tile=(8, 8))
    assert window == tw.tile_map(masks.sliding_window(5), q_len=64, kv_len=64, tile=(8, 8))
    assert window != tw.tile_map(masks.sliding_window(6), q_len=64, kv_len=64, tile=(8, 8))  # same tiles, another mask inside
    assert window != tw.tile_map(masks.sliding_window(5), q_len=64, kv_len=64, tile=(8, 4))
    assert window != tw.tile_map(masks.sliding_window(5), q_len=64, kv_len=63, tile=(8, 8))
    assert window != replace(window, given=True)
    assert window != replace(window, mask=None)
    assert window != "window" and window is not None
    ids = torch.tensor([0, 0, 1, 1])
    documents = tw.tile_map(masks.document(ids), q_len=4, kv_len=4, tile=(2, 2))
    assert documents == tw.tile_map(masks.document(ids.clone()), q_len=4, kv_len=4, tile=(2, 2))
    assert documents != tw.tile_map(masks.document(ids + 1), q_len=4, kv_len=4, tile=(2, 2))
    assert documents != documents.to("meta")
    strange = torch.tensor([float("nan"), float("inf"), 1.0, -float("inf")])
    unordered = tw.tile_map(lambda b, h, q, kv: strange[q] > strange[kv], q_len=4, kv_len=4, tile=(2, 2))
    assert unordered == tw.tile_map(lambda b, h, q, kv: strange[q] > strange[kv], q_len=4, kv_len=4, tile=(2, 2))


def test_maps_are_not_hashable() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(varied_map())


@pytest.mark.parametrize("tile", [(8, 16), (7, 5), (1, 1), (64, 64)], ids=str)
def test_counts_against_brute_force(tile: tuple[int, int]) -> None:
    found = varied_map(tile)
    states = states_of(varied_dense(), tile)
    assert found.partial_tiles == int((states == 1).sum())
    assert found.full_tiles == int((states == 2).sum())
    assert found.computed_tiles == int((states != EMPTY).sum())
    assert found.total_tiles == states.numel()
    assert found.sparsity == pytest.approx(float((states == EMPTY).double().mean()))
    computed = (states != EMPTY).repeat_interleave(tile[0], 2).repeat_interleave(tile[1], 3)[:, :, :QUERIES, :KEYS]
    pairs = int(computed.sum())
    assert found.computed_pairs() == pairs
    assert found.flops(64) == 2 * pairs * (64 + 64)
    assert found.flops(64, 32) == 2 * pairs * (64 + 32)


def test_flops_of_a_map_that_stands_for_all_heads() -> None:
    found = tw.tile_map(masks.causal, q_len=100, kv_len=100, tile=(16, 16))
    assert found.flops(64, batch=3, heads=8) == 24 * found.flops(64)
    assert tw.tile_map(masks.full, q_len=100, kv_len=90).flops(64) == 4 * 64 * 100 * 90
    assert tw.tile_map(masks.full, q_len=0, kv_len=90).flops(64) == 0
    assert tw.tile_map(masks.document(torch.zeros(0, dtype=torch.int64)), q_len=0, kv_len=0).flops(64) == 0


@pytest.mark.parametrize("dense", [0, tilemap.DENSE_ON_CPU], ids=["by runs", "as a matrix"])
def test_transpose_of_a_map(dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilemap, "DENSE_ON_CPU", dense)
    found = varied_map()
    states = found.dense().transpose(2, 3).flatten(0, 2)
    for runs, state in zip(found.transpose(), (1, 2), strict=True):
        assert torch.equal(torch.stack(runs.cells(), 1), (states == state).nonzero())


# -- drawing ---------------------------------------------------------------------------------------------------------


def drawn(*args: Any, **kwargs: Any) -> list[str]:
    return str(tw.tile_map(*args, **kwargs)).split("\n")


def test_repr_tells_the_essentials() -> None:
    found = tw.tile_map(masks.causal & masks.sliding_window(100), q_len=1000, kv_len=1000)
    assert repr(found) == "TileMap(causal & sliding_window(100): 1000 x 1000 tokens, tiles of 128 x 128, 15 partial, 0 full of 64, 76.6% skipped)"


def test_drawing_of_one_tile() -> None:
    assert drawn(masks.full, q_len=10, kv_len=10)[1:] == ["  ██"]
    assert drawn(masks.causal, q_len=10, kv_len=10)[1:] == ["  ▒▒"]


def test_drawing_of_a_small_map() -> None:
    assert drawn(masks.causal, q_len=64, kv_len=64, tile=(16, 16))[1:] == ["  ▒▒", "  ██▒▒", "  ████▒▒", "  ██████▒▒"]


def test_drawing_of_tall_and_wide_maps() -> None:
    tall = drawn(masks.full, q_len=100_000, kv_len=100, tile=(16, 64))[1:]
    assert (len(tall), {*tall}) == (draw.LARGEST_DRAWING, {"  ████"})
    wide = drawn(masks.full, q_len=100, kv_len=100_000, tile=(64, 16))[1:]
    assert wide == ["  " + "██" * draw.LARGEST_DRAWING] * 2


def test_drawing_of_nothing() -> None:
    assert len(drawn(masks.causal, q_len=0, kv_len=100)) == 1
    assert drawn(~masks.full, q_len=32, kv_len=32, tile=(16, 16))[1:] == ["", ""]


def test_drawing_shows_the_first_batch_element_and_head() -> None:
    assert drawn(lambda b, h, q, kv: (h == 0) & (b == 0), batch=2, heads=2, q_len=8, kv_len=8)[1:] == ["  ██"]
    assert drawn(lambda b, h, q, kv: h == 1, heads=2, q_len=8, kv_len=8)[1:] == [""]


def test_coverage_sums_to_the_work() -> None:
    """However coarse the drawing, no work is lost: its mean is the mean over tiles, a partial one counting a half."""
    for tile in ((1, 1), (8, 16), (3, 5)):
        found = varied_map(tile)[0, 0]
        g = found.geometry
        work = found.full_tiles + found.partial_tiles / 2
        for cells in (1, 4, 24, 512):
            shares = draw.coverage(found, cells)
            rows = torch.bincount(torch.arange(g.q_tiles) * shares.shape[0] // g.q_tiles)
            assert bool((shares >= 0).all()) and bool((shares <= 1).all())
            assert float((shares.mean(1) * rows).sum() * g.kv_tiles) == pytest.approx(work)


def test_large_maps_are_drawn_without_being_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    length = 2**20
    found = tw.tile_map(masks.causal & masks.sliding_window(4096), q_len=length, kv_len=length)
    monkeypatch.setattr(TileMap, "dense", None)
    monkeypatch.setattr("tilewise.tiles.runs.expand", None)
    lines = str(found).split("\n")
    assert len(lines) == 1 + draw.LARGEST_DRAWING
    assert lines[1] == "  ░░░░" and lines[-1] == "  " + " " * (2 * draw.LARGEST_DRAWING - 4) + "░░░░"


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_picture(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, found in {"varied": varied_map(), "empty": tw.tile_map(masks.causal, q_len=0, kv_len=5)}.items():
        path = found.picture(tmp_path / f"{name}.{ending}")
        assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")


def test_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install 'tilewise\[viz\]'"):
        varied_map().picture(tmp_path / "map.png")


# -- tensors as masks ------------------------------------------------------------------------------------------------

SHAPES = [
    (BATCH, HEADS, QUERIES, KEYS), (1, HEADS, QUERIES, KEYS), (BATCH, 1, QUERIES, KEYS), (1, 1, QUERIES, KEYS), (BATCH, 1, 1, KEYS),
    (BATCH, HEADS, QUERIES, 1), (1, 1, 1, 1), (HEADS, QUERIES, KEYS), (1, QUERIES, KEYS), (QUERIES, KEYS), (1, KEYS), (QUERIES, 1), (1, 1), (KEYS,), (1,),
]  # fmt: skip


def random_tensor(shape: tuple[int, ...]) -> Tensor:
    """Mostly long stretches, so that some tiles are empty and some full."""
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(len(shape) * 100 + sum(shape)))
    return torch.nn.functional.avg_pool1d(noise.reshape(-1, 1, shape[-1]), 9, 1, 4).reshape(shape) > 0.5 if shape[-1] > 9 else noise > 0.5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boolean_tensors(shape: tuple[int, ...]) -> None:
    tensor = random_tensor(shape)
    dense = tensor.expand(BATCH, HEADS, QUERIES, KEYS)
    found = tw.tile_map(tensor, batch=BATCH, heads=HEADS, q_len=QUERIES, kv_len=KEYS, tile=TILE)
    padded = (1,) * (4 - len(shape)) + shape
    assert found.shape == (padded[0], padded[1], QUERIES, KEYS)
    check_map(found, dense)
    for mask in (tensor, found):
        assert torch.equal(attended(mask, BATCH, HEADS, QUERIES, KEYS, "blocked"), dense)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_additive_tensors_skip_what_is_minus_infinity(shape: tuple[int, ...]) -> None:
    allowed = random_tensor(shape)
    tensor = torch.where(allowed, torch.linspace(-2, 2, allowed.numel()).view(shape), -torch.inf)
    found = tw.tile_map(tensor, batch=BATCH, heads=HEADS, q_len=QUERIES, kv_len=KEYS, tile=TILE)
    check_map(found, allowed.expand(BATCH, HEADS, QUERIES, KEYS))


def test_additive_tensor_that_skips_nothing() -> None:
    found = tw.tile_map(torch.zeros(QUERIES, KEYS), q_len=QUERIES, kv_len=KEYS)
    assert found.sparsity == 0 and found.partial_tiles == 0


def test_key_padding() -> None:
    tensor = torch.arange(KEYS) < torch.tensor([[37], [0], [20]])
    found = tw.tile_map(tensor, batch=BATCH, heads=HEADS, q_len=QUERIES, kv_len=KEYS, tile=TILE)
    check_map(found, tensor[:, None, None, :].expand(BATCH, HEADS, QUERIES, KEYS))
    assert found.shape[:2] == (BATCH, 1)
    square = torch.ones((3, 3), dtype=torch.bool)
    with pytest.raises(InputError, match=r"may mean \(batch, keys\) or \(queries, keys\) here"):
        tw.tile_map(square, batch=3, q_len=3, kv_len=3)
    assert tw.tile_map(square, q_len=3, kv_len=3).full_tiles == 1


@pytest.mark.parametrize("shape", [(2, QUERIES, KEYS, 1), (BATCH + 1, HEADS, QUERIES, KEYS), (QUERIES, KEYS + 1), (5,), (1, 1, 1, 1, 1)], ids=str)
def test_tensors_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="does not broadcast to"):
        tw.tile_map(torch.ones(shape, dtype=torch.bool), batch=BATCH, heads=HEADS, q_len=QUERIES, kv_len=KEYS)


def test_integer_tensors_are_refused() -> None:
    with pytest.raises(InputError, match=r"must be boolean .* or floating point .*, got torch\.int64"):
        tw.tile_map(torch.ones((QUERIES, KEYS), dtype=torch.int64), q_len=QUERIES, kv_len=KEYS)


# -- torch's BlockMask -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [False, True])
def test_block_mask_is_accepted(per_head: bool) -> None:
    reach = torch.tensor([[10, 200], [90, 0]])

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() <= reach[b, h] if per_head else (q >= kv) & (q - kv < 150)

    sizes = (2, 2, 384, 256)
    block_mask = create_block_mask(mask, *(sizes[:2] if per_head else (None, None)), *sizes[2:], device="cpu")
    found = from_block_mask(block_mask)
    dense = dense_mask(mask, *sizes)
    assert found.given and found.tile == (128, 128)
    check_runs(found)
    assert torch.equal(elements_of(found).expand(sizes), dense)
    assert torch.equal(elements_of(tw.tile_map(block_mask, batch=2, heads=2, q_len=384, kv_len=256, tile=(64, 32))).expand(sizes), dense)
    for backend in ("reference", "blocked"):
        assert torch.equal(attended(block_mask, *sizes, backend), dense)


def test_block_mask_without_full_blocks_or_mask() -> None:
    from torch.nn.attention.flex_attention import BlockMask

    counts, indices = torch.tensor([[[2, 1]]], dtype=torch.int32), torch.tensor([[[[2, 0, 1], [1, 0, 2]]]], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16)
    found = from_block_mask(block_mask)
    assert found.dense().tolist() == [[[[1, 0, 1], [0, 1, 0]]]]
    tiles = torch.tensor([[True, False, True], [False, True, False]]).repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.equal(attended(block_mask, 1, 1, 32, 48, "blocked")[0, 0], tiles)


# -- maps as masks ---------------------------------------------------------------------------------------------------


def test_map_for_other_lengths_is_refused() -> None:
    found = tw.tile_map(masks.causal, q_len=32, kv_len=32)
    with pytest.raises(InputError, match="created for a smaller length than you're using it for"):
        attended(found, 1, 1, 33, 32, "blocked")
    with pytest.raises(InputError, match="build it for these lengths, or slice it"):
        attended(found, 1, 1, 31, 32, "blocked")
    with pytest.raises(InputError, match="is for batch 3 and 2 heads, the call has batch 2 and 2 heads"):
        attended(varied_map(), 2, 2, QUERIES, KEYS, "blocked")


@pytest.mark.parametrize("tile", [(8, 8), (128, 128), (200, 40)], ids=str)
def test_given_map_is_part_of_the_meaning(tile: tuple[int, int]) -> None:
    """What a given map leaves out is masked, whatever its mask says, on tiles the engine cuts or does not."""
    q_len, kv_len = 3 * tile[0] - 3, 2 * tile[1] + 1
    found = given_map(random_states(2, 1, 3, 3), q_len, kv_len, tile, masks.causal)
    dense = elements_of(found).expand(2, 2, -1, -1)
    for backend in ("reference", "blocked"):
        assert torch.equal(attended(found, *dense.shape, backend), dense)
