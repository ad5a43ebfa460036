"""Tile maps as objects: slicing, moving, cutting, comparing, counting, drawing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.support.brute import check_map, check_runs, elements_of, states_of
from tests.support.varied import KEYS, QUERIES, TILE, attended, given_map, random_states, varied_dense, varied_map
from tilewise import masks
from tilewise.errors import InputError
from tilewise.tiles import EMPTY, TileMap, draw, tilemap

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
}


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
)
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
    """The lines of a drawing; all that stands above it is the first."""
    return lines_of(tw.tile_map(*args, **kwargs))


def lines_of(tile_map: TileMap) -> list[str]:
    lines = str(tile_map).split("\n")
    words = " ".join([repr(tile_map), draw.which_is_drawn(tile_map)]).split()
    above = next(k for k in range(1, len(lines) + 1) if " ".join(lines[:k]).split() == words)
    assert all(len(line) <= 80 for line in lines[:above])
    return [" ".join(words), *lines[above:]]


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
    above, *map_of_first = drawn(lambda b, h, q, kv: (h == 0) & (b == 0), batch=2, heads=3, q_len=8, kv_len=8)
    assert map_of_first == ["  ██"] and "drawn: batch element 0 of 2, head 0 of 3 (" in above
    above, *map_of_first = drawn(lambda b, h, q, kv: h == 1, heads=2, q_len=8, kv_len=8)
    assert map_of_first == [""] and "drawn: head 0 of 2 (" in above
    assert "drawn:" not in drawn(masks.causal, batch=2, heads=2, q_len=8, kv_len=8)[0]


def test_words_above_a_drawing_are_never_broken() -> None:
    mask = masks.document(lengths=[300, 724]) & masks.causal & masks.sliding_window(100) & masks.global_tokens(4) & masks.prefix_lm(256)
    lines = str(tw.tile_map(mask, q_len=1024, kv_len=1024)).split("\n")
    assert max(map(len, lines)) <= 80 and lines[1].startswith("  ")
    long = "x" * 100
    named = tw.tile_map(masks.Mask(lambda b, h, q, kv: q >= kv, long), q_len=1024, kv_len=1024)
    assert f"TileMap({long}:" in str(named).split("\n")


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
    lines = lines_of(found)
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
