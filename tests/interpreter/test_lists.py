"""Tiles chosen from data go straight to the kernels, in Triton's interpreter: the schedules of both passes, results against the reference, what is kept."""

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw
from tests.engines.test_tile_schedule import check
from tests.interpreter.test_mask_bits import unpacked
from tests.support.brute import dense_mask
from tests.support.looked_maps import problem
from tilewise import TileMap, masks, sparse
from tilewise.core import map_cache
from tilewise.engines.gluon import NO_GLUON
from tilewise.engines.gpu import device_map, tile_schedule
from tilewise.engines.gpu.device_map import bits_blocks, device_map_of, device_maps, form_of_given, is_made_on_device, table_sizes
from tilewise.engines.gpu.tile_schedule import key_schedule, query_schedule
from tilewise.frontend import call_cache
from tilewise.tiles import EMPTY, FULL, PARTIAL

KEPT = torch.arange(400) % 300 < 100
PADDING = torch.arange(400) < torch.tensor([[400], [130]])
MASKS: dict[str, Any] = {
    "none": None,
    "causal": masks.causal,
    "captured": lambda b, h, q, kv: KEPT[kv],
    "by head": lambda b, h, q, kv: (q - kv).abs() < 40 * (h + 1),
    "by batch": lambda b, h, q, kv: PADDING[b, kv],
}


@pytest.fixture(autouse=True)
def straight_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No map is made in any other way."""
    monkeypatch.setattr(tile_schedule, "kernel_map", None)


def random_lists(batch: int, heads: int, lengths: tuple[int, int], tile: tuple[int, int], entries: int, seed: int) -> Tensor:
    """Some entries negative, some past the end, some twice, in any order."""
    rows, columns = (-(-n // size) for n, size in zip(lengths, tile, strict=True))
    return torch.randint(-1, columns + 2, (batch, heads, rows, entries), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def chosen_map(indices: Tensor, lengths: tuple[int, int], tile: tuple[int, int], counts: Tensor | None = None, **options: Any) -> TileMap:
    """As on a GPU, where wrong entries are ignored: on a CPU they would be refused."""
    columns = -(-lengths[1] // tile[1])
    return TileMap.from_lists(indices.masked_fill(indices >= columns, -1), counts, q_len=lengths[0], kv_len=lengths[1], tile=tile, **options)


def elements(tiles: TileMap, batch: int, heads: int) -> Tensor:
    """(batch, heads, queries, keys) what is attended, by the map's own runs and the mask."""
    g = tiles.geometry
    states = tiles.dense().repeat_interleave(g.tile[0], 2).repeat_interleave(g.tile[1], 3)[..., : g.q_len, : g.kv_len]
    inside = torch.ones(1, dtype=torch.bool)
    if tiles.mask is not None:
        b, h, q, kv = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, g.q_len, g.kv_len)), indexing="ij")
        inside = torch.as_tensor(tw.lang.evaluate(tiles.mask, {"b": b, "h": h, "q": q, "kv": kv}))
    return (states == FULL) | ((states == PARTIAL) & inside)


lengths = st.tuples(st.integers(1, 150), st.integers(1, 150))
tiles = st.tuples(st.sampled_from([16, 48, 64, 128]), st.sampled_from([16, 32, 64, 96]))


@settings(max_examples=12)
@given(lengths, tiles, st.integers(0, 5), st.sampled_from([(1, 1), (2, 3)]), st.sampled_from([2, 4, 128]), st.integers(0, 99))
def test_schedules_are_those_of_the_lists(length: tuple[int, int], tile: tuple[int, int], entries: int, lead: tuple[int, int], chunk: int, seed: int) -> None:
    """With the kernels' tiles as large as those that were given, or dividing them; rows of lists that go over a chunk's end."""
    found = chosen_map(random_lists(*lead, length, tile, entries, seed), length, tile, always=[(0, 1)] if seed % 2 else [])
    p = problem(found, 2, 3, *length, "cpu")
    assert is_made_on_device(p)
    for own in (tile, (16, 16), (16, tile[1])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_map, "CHUNK", chunk)
            table_sizes.cache_clear()
            found.derived.clear()
            rows, columns = query_schedule(p, own), key_schedule(p, own)
            table_sizes.cache_clear()
        states = found.dense().repeat_interleave(tile[0] // own[0], 2).repeat_interleave(tile[1] // own[1], 3)
        states = states[:, :, : -(-length[0] // own[0]), : -(-length[1] // own[1])]
        check(rows, states, length[1] % own[1] != 0)
        check(columns, states.transpose(2, 3), length[0] % own[0] != 0)


@pytest.mark.parametrize("tile", [(64, 64), (128, 64), (64, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_on_top_leaves_out_what_it_forbids(name: str, tile: tuple[int, int]) -> None:
    """Tiles that it cuts are partial to kernels, tiles that it allows altogether are full."""
    length = (300, 390)
    lists = random_lists(2, 3, length, tile, 3, 0)
    found, listed = chosen_map(lists, length, tile, mask=MASKS[name]), chosen_map(lists, length, tile)
    states = listed.dense()
    if name != "none":
        whole = tw.tile_map(MASKS[name], batch=2, heads=3, q_len=length[0], kv_len=length[1], tile=tile).dense()
        states = torch.where(states != EMPTY, whole, EMPTY)
        assert torch.equal(elements(found, 2, 3), elements(listed, 2, 3) & dense_mask(MASKS[name], 2, 3, *length))
        assert int((states != EMPTY).sum()) < listed.computed_tiles
    p = problem(found, 2, 3, *length, "cpu")
    check(query_schedule(p, tile), states, length[1] % tile[1] != 0)
    check(key_schedule(p, tile), states.transpose(2, 3), length[0] % tile[0] != 0)


def test_lists_for_all_heads_under_masks_that_differ_stay_partial(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen_map(random_lists(1, 1, (200, 200), (64, 64), 3, 1), (200, 200), (64, 64), mask=MASKS["by head"])
    assert found.full_tiles == 0
    check(query_schedule(problem(found, 1, 3, 200, 200, "cpu"), (32, 64)), found.dense().repeat_interleave(2, 2)[:, :, :7], True)
    monkeypatch.setattr(device_map, "MAX_LOOKED_AT", 1000)  # too large a mask to ask beforehand, likewise
    large = chosen_map(random_lists(1, 1, (200, 200), (64, 64), 3, 1), (200, 200), (64, 64), mask=masks.causal)
    states = (large.chosen.states != EMPTY).to(torch.uint8) * PARTIAL  # type: ignore[union-attr]  # lists were given
    check(query_schedule(problem(large, 1, 3, 200, 200, "cpu"), (64, 64)), states, True)


def both_passes(mask: Any, backend: str, q_len: int, kv_len: int, heads: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, q_len, 16, generator=generator).requires_grad_()
    key, value = (torch.randn(2, heads, kv_len, 16, generator=generator).requires_grad_() for _ in range(2))
    out, lse = tw.attention(query, key, value, mask=mask, backend=backend, return_lse=True)
    return [out, lse, *torch.autograd.grad((out * torch.arange(16) * 0.1).sum(), (query, key, value))]


@pytest.mark.parametrize("tile", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_both_passes_are_the_reference_s(name: str, tile: tuple[int, int]) -> None:
    """Per head, wrong entries among them, queries without any, and both ends cut."""
    length = (tile[0] + 20, tile[1] + 50)
    indices = random_lists(2, 3, length, tile, 2, 3)
    indices[0, 0, 0] = -1
    counts = torch.full(indices.shape[:3], 2)
    counts[1, 2] = 0
    found = chosen_map(indices, length, tile, counts, mask=MASKS[name])
    mine, wanted = both_passes(found, "triton", *length), both_passes(found, "reference", *length)
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert not mine[0][0, 0, : tile[0]].any() and not mine[0][1, 2].any() and bool((mine[1][1, 2] == -torch.inf).all())
    assert is_made_on_device(problem(found, 2, 3, *length, "cpu"))


def test_block_masks_and_moba_take_the_same_way() -> None:
    """torch's lists: mask_mod decides inside partial blocks, and is not asked inside full ones."""
    from torch.nn.attention.flex_attention import BlockMask

    counts, indices = torch.tensor([1, 2, 1])[None, None], torch.tensor([[0, 0, 0], [0, 1, 0], [2, 0, 0]])[None, None]
    full_counts, full_indices = torch.tensor([1, 0, 2])[None, None], torch.tensor([[2, 0, 0], [0, 0, 0], [0, 1, 0]])[None, None]
    numbers = [t.int() for t in (counts, indices, full_counts, full_indices)]
    blocks = BlockMask.from_kv_blocks(*numbers, BLOCK_SIZE=64, mask_mod=lambda b, h, q, kv: q >= kv, seq_lengths=(180, 190))
    for a, b in zip(both_passes(blocks, "triton", 180, 190), both_passes(blocks, "reference", 180, 190), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    query, key = torch.randn(2, 1, 2, 200, 16, generator=torch.Generator().manual_seed(0))
    with tw.attention_backend("triton"):
        found = sparse.moba(query, key, key, block=32, top_k=3)
    with tw.attention_backend("reference"):
        torch.testing.assert_close(found, sparse.moba(query, key, key, block=32, top_k=3), rtol=1e-4, atol=1e-4)


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_a_map_is_a_copy_of_its_lists() -> None:
    indices = random_lists(1, 2, (90, 110), (64, 64), 2, 0)
    found = chosen_map(indices, (90, 110), (64, 64))
    before = both_passes(found, "triton", 90, 110, heads=2)
    indices.fill_(0)
    for a, b in zip(both_passes(found, "triton", 90, 110, heads=2), before, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("what", ["tiles", "mask"])
def test_contents_changed_in_place_are_noticed(what: str) -> None:
    kept = KEPT.clone()
    found = chosen_map(random_lists(1, 1, (90, 110), (64, 64), 2, 0), (90, 110), (64, 64), mask=lambda b, h, q, kv: kept[kv])
    assert found.chosen is not None
    for seed in range(3):
        if what == "tiles":
            found.chosen.states.copy_(torch.randint(2, found.chosen.states.shape, generator=torch.Generator().manual_seed(seed)))
        else:
            kept.copy_(KEPT.roll(40 * seed))
        listed = torch.arange(2).expand(1, 1, 2, 2).where(found.chosen.states != EMPTY, -1)
        fresh = TileMap.from_lists(listed, q_len=90, kv_len=110, mask=lambda b, h, q, kv: kept[kv])
        for a, b in zip(both_passes(found, "triton", 90, 110), both_passes(fresh, "reference", 90, 110), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_one_map_serves_both_passes_and_later_calls() -> None:
    found = chosen_map(random_lists(1, 1, (90, 110), (64, 64), 2, 0), (90, 110), (64, 64))
    before = device_maps.made
    for _ in range(2):
        both_passes(found, "triton", 90, 110)
    assert device_maps.made == before + 1


@pytest.mark.parametrize("mask", [None, masks.causal], ids=["lists", "a mask on top"])
def test_maps_of_every_step_are_let_go_of(mask: Any) -> None:
    """What was made for a map goes with it, and caches do not grow; the mask on top is looked at once."""
    both_passes(chosen_map(random_lists(1, 1, (90, 110), (64, 64), 2, 0), (90, 110), (64, 64), mask=mask), "triton", 90, 110)
    call_cache.forget()
    before = device_maps.made, len(device_maps._kept), len(device_maps._recipes), len(map_cache.maps._maps)
    gone = []
    for seed in range(5):
        found = chosen_map(random_lists(1, 1, (90, 110), (64, 64), 2, seed), (90, 110), (64, 64), mask=mask)
        both_passes(found, "triton", 90, 110)
        made = device_map_of(problem(found, 2, 3, 90, 110, "cpu"))
        gone.append(weakref.ref(made))
        del found, made
        gc.collect()
    assert device_maps.made == before[0] + 5
    assert (len(device_maps._kept), len(device_maps._recipes), len(map_cache.maps._maps)) == before[1:]
    assert len(call_cache._calls) <= 2
    call_cache.forget()
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_a_capture_has_maps_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen_map(random_lists(1, 1, (100, 100), (64, 64), 2, 0), (100, 100), (64, 64))
    p = problem(found, 1, 1, 100, 100, "cpu")
    outside, under_way = device_map_of(p), 7
    monkeypatch.setattr(device_map, "capture_id", lambda stream: under_way)
    inside = device_map_of(p)
    assert inside is not outside and device_map_of(p) is inside
    under_way = 0
    assert device_map_of(p) is not inside


def test_inference_tensors_are_known_too() -> None:
    with torch.inference_mode():
        found = chosen_map(random_lists(1, 1, (100, 100), (64, 64), 2, 0).clone(), (100, 100), (64, 64))
        p = problem(found, 1, 1, 100, 100, "cpu")
        assert device_map_of(p) is device_map_of(p)


# -- memory follows from shapes ----------------------------------------------------------------------------------------


def test_rooms_are_as_large_as_lists_can_fill() -> None:
    """40 heads of 75,600 tokens: tiles of 128, of which lists name 148 or 59."""
    for entries in (148, 59):
        form = device_map.MapForm(1, 40, 75600, 75600, (128, 128), 0, PARTIAL | FULL, entries, (591 * 593, 593), is_masked=False)
        geometry, sizes = table_sizes(form, (128, 128), False)
        assert geometry.n_half == entries + 5 and sum(sizes) * 4 < (2 * entries + 20) * 8 * 40 * 591
        assert bits_blocks(form, (128, 128), False) == bits_blocks(form, (64, 128), True) == 1
        finer, _ = table_sizes(form, (32, 128), True)
        assert finer.n_columns == 2363 and finer.n_half == 296 + 19


@pytest.mark.skipif(NO_GLUON is not None, reason=str(NO_GLUON))
@pytest.mark.parametrize(("rows", "columns", "by_keys", "transposed"), [(128, 128, False, False), (128, 64, True, False), (64, 64, True, True)])
@pytest.mark.parametrize("name", ["none", "causal", "by batch"])
def test_mask_bits(name: str, rows: int, columns: int, by_keys: bool, transposed: bool) -> None:
    """Where no mask decides, one block is that of all tiles cut by the end: along the other axis, what lies past the end is never stored."""
    from tilewise.engines.gluon.tile_schedule import MapAxis, hopper_schedule

    length = (300, 390)
    found = chosen_map(random_lists(2, 3, length, (128, 128), 2, 4), length, (128, 128), mask=MASKS[name])
    p = problem(found, 2, 3, *length, "cpu")
    axis = MapAxis(rows, columns, by_keys, transposed)
    schedule = hopper_schedule(p, axis)
    order, visited, masked, offsets, starts, stops, first, bits = schedule.tensors
    blocks = bits_blocks(form_of_given(p), axis.tile, by_keys)
    assert order.data_ptr() == bits[blocks].data_ptr() and (name != "none" or blocks == 1)  # the tables lie behind the blocks
    allowed = elements(found, 2, 3)
    allowed = torch.nn.functional.pad(allowed.transpose(2, 3) if by_keys else allowed, (0, 256, 0, 256)).flatten(0, 1)
    end = length[0] if by_keys else length[1]
    for r, (full, begin, _, last) in enumerate(offsets.view(-1, 4).tolist()):
        at = int(first[r])
        i_bh, i_row = r // schedule.count, r % schedule.count
        for column in [c for run in range(begin, last) for c in range(int(starts[run]), int(stops[run]))]:
            wanted = allowed[i_bh, i_row * rows : (i_row + 1) * rows, column * columns : (column + 1) * columns]
            if name == "none":
                wanted = (torch.arange(column * columns, (column + 1) * columns) < end).expand(rows, -1)
            mine = unpacked(bits[at], columns if not transposed else rows)
            assert torch.equal(mine.T if transposed else mine, wanted)
            at += 1
        assert at - int(first[r]) == int(masked[r])
        assert int(visited[r]) == sum(int(stops[run] - starts[run]) for run in range(full, last))


@pytest.mark.skipif(NO_GLUON is not None, reason=str(NO_GLUON))
def test_masks_on_top_of_very_many_tiles_are_left_to_the_triton_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By shapes alone: lists bound the bits of a forward, but not those along keys."""
    from tilewise.engines.gluon import tile_schedule as hopper

    p = problem(chosen_map(random_lists(1, 1, (512, 512), (128, 128), 1, 0), (512, 512), (128, 128), mask=masks.causal), 1, 1, 512, 512, "cpu")
    assert not hopper.too_many_mask_bits(p) and not hopper.too_many_mask_bits(p, by_keys=True)
    monkeypatch.setattr(hopper, "MAX_ELEMENTS", 8 * 4 * 128 * 16)
    assert not hopper.too_many_mask_bits(p) and hopper.too_many_mask_bits(p, by_keys=True)


def test_a_mask_on_lists_and_by_itself_are_two_maps() -> None:
    """With lists of tiles as large as base tiles, both are of the same contents and sizes."""
    query, key, value = torch.randn(3, 1, 1, 64, 32)
    document = torch.tensor([0] * 20 + [1] * 30 + [2] * 14)
    mask = lambda b, h, q, kv: document[q] == document[kv]
    wanted = tw.attention(query, key, value, mask=mask, backend="reference")
    lists = TileMap.from_lists(torch.arange(4).expand(1, 1, 4, 4).contiguous(), q_len=64, kv_len=64, tile=(16, 16), mask=mask)
    for either in (lists, mask):
        torch.testing.assert_close(tw.attention(query, key, value, mask=either, backend="triton"), wanted)
