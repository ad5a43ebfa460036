"""The cache of maps: the same mask on the same tensors is built once; anything that changed is never served stale."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.support.brute import check_map, dense_mask
from tilewise import masks
from tilewise.core import map_cache
from tilewise.core.map_cache import MapCache, maps
from tilewise.lang import trace_mask
from tilewise.tiles import Geometry, TileMap

CPU = torch.device("cpu")
LENGTH = 512  # several of the blocked engine's tiles, so that a stale map shows


@pytest.fixture(autouse=True, params=["by identity", "by value"])
def by_value(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """What is never stale is so however tensors are known; the cache is empty."""
    if request.param == "by identity":
        monkeypatch.setattr(map_cache, "MAX_VALUE_BYTES", -1)
    maps.clear()
    yield bool(request.param == "by value")
    maps.clear()


def geometry(length: int = LENGTH, tile: tuple[int, int] = (64, 64)) -> Geometry:
    return Geometry(2, 2, length, length, tile)


def built_during(call: Callable[[], Any]) -> int:
    before = maps.built
    call()
    return maps.built - before


def documents(*lengths: int) -> Tensor:
    return masks.ids_of_lengths(lengths)


def attend(mask: Any, length: int = LENGTH, width: int | None = None) -> Tensor:
    """(queries, keys): who was attended, seen through uniform weights on one-hot values."""
    keys = length if width is None else width
    query, key = torch.zeros((1, 1, length, 4)), torch.zeros((1, 1, keys, 4))
    return tw.attention(query, key, torch.eye(keys)[None, None], mask=mask, backend="blocked")[0, 0] > 0


def dense(mask: Any, length: int = LENGTH) -> Tensor:
    return dense_mask(mask, 1, 1, length, length)[0, 0]


# -- what is built once ----------------------------------------------------------------------------------------------


def test_batches_and_heads_that_a_mask_does_not_look_at_share_its_map() -> None:
    by_head = lambda b, h, q, kv: q - kv <= h * 100

    def attended(mask: Any, batch: int, heads: int) -> int:
        x = torch.zeros((batch, heads, LENGTH, 4))
        return built_during(lambda: tw.attention(x, x, x, mask=mask, backend="blocked"))

    assert [attended(masks.causal, *sizes) for sizes in ((1, 1), (2, 3), (4, 1))] == [1, 0, 0]
    assert [attended(by_head, *sizes) for sizes in ((1, 2), (3, 2), (1, 4))] == [1, 0, 1]


def test_same_mask_is_built_once() -> None:
    mask = masks.causal & masks.document(documents(160, 240, 112))
    assert built_during(lambda: attend(mask)) == 1
    assert built_during(lambda: [attend(mask) for _ in range(5)]) == 0


def test_same_function_traced_anew_is_built_once() -> None:
    ids = documents(160, 240, 112)
    assert built_during(lambda: [attend(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)) for _ in range(5)]) == 1


def test_masks_of_one_structure_over_one_tensor_share_a_map() -> None:
    ids = documents(160, 240, 112)
    assert built_during(lambda: (attend(masks.document(ids)), attend(masks.document(ids)), attend(lambda b, h, q, kv: ids[q] == ids[kv]))) == 1


def test_forward_and_backward_share_a_map() -> None:
    ids = documents(160, 240, 112)
    query = torch.randn((1, 2, LENGTH, 8), requires_grad=True)
    mask = masks.document(ids)
    assert built_during(lambda: tw.attention(query, query, query, mask=mask, backend="blocked").sum().backward()) <= 2
    assert built_during(lambda: tw.attention(query, query, query, mask=mask, backend="blocked").sum().backward()) == 0


# -- what is built anew ----------------------------------------------------------------------------------------------


def test_tensor_changed_in_place() -> None:
    ids = documents(256, 256)
    mask = masks.document(ids)
    assert torch.equal(attend(mask), dense(mask))
    ids[:130] = 7
    assert built_during(lambda: attend(mask)) == 1
    assert torch.equal(attend(mask), dense(mask))
    ids.copy_(documents(80, 432))
    assert torch.equal(attend(mask), dense(mask))


def test_tensor_changed_through_a_view_or_its_base() -> None:
    base = torch.stack([documents(256, 256), documents(256, 256)])
    ids = base[0]
    mask = masks.document(ids)
    attend(mask)
    base[:, 40:200] = 3
    assert torch.equal(attend(mask), dense(mask))
    ids.view(8, 64)[5:7] = 4
    assert torch.equal(attend(mask), dense(mask))


def test_tensor_replaced_by_an_equal_one(by_value: bool) -> None:
    first, second = documents(160, 352), documents(160, 352)
    assert built_during(lambda: attend(masks.document(first))) == 1
    assert built_during(lambda: attend(masks.document(second))) == (not by_value)
    assert torch.equal(attend(masks.document(second)), dense(masks.document(first)))


def test_tensor_given_other_data() -> None:
    """As Module.to does with parameters: the tensor stays the same object, and its version the same number."""
    reach = torch.full((LENGTH,), 3.0)
    attend(lambda b, h, q, kv: (q - kv).abs() <= reach[q])
    reach.data = torch.full((LENGTH,), 300.0)
    found = attend(lambda b, h, q, kv: (q - kv).abs() <= reach[q])
    assert torch.equal(found, dense(lambda b, h, q, kv: (q - kv).abs() <= 300))


def test_other_numbers_and_lengths_and_tiles_have_their_own_maps() -> None:
    def everything() -> None:
        for window in (3, 9):
            for length in (LENGTH, LENGTH + 1):
                for tile in ((64, 64), (32, 64)):
                    call = trace_mask(lambda b, h, q, kv, w=window: q - kv <= w)
                    found = maps.get(call, geometry(length, tile), CPU)
                    assert found.tile == tile
                    check_map(found, dense_mask(lambda b, h, q, kv, w=window: q - kv <= w, 1, 1, length, length))

    assert built_during(everything) == 8
    assert built_during(everything) == 0


def test_window_and_length_through_attention() -> None:
    for window in (0, 5, 300):
        for length in (LENGTH, 400):
            mask = masks.sliding_window(window)
            for _ in range(2):
                assert torch.equal(attend(mask, length), dense(mask, length))
    assert built_during(lambda: [attend(masks.sliding_window(w), n) for w in (0, 5, 300) for n in (LENGTH, 400)]) == 0
    assert torch.equal(attend(masks.sliding_window(5), LENGTH, 400), dense_mask(masks.sliding_window(5), 1, 1, LENGTH, 400)[0, 0])


def test_freed_tensor_whose_identity_is_taken_over() -> None:
    """A new tensor may get the id (and the version) of one that is gone; its map must be its own."""
    seen: set[int] = set()
    reused = 0
    for step in range(200):
        ids = documents(step % 61 * 8 + 1, LENGTH - step % 61 * 8 - 1)
        reused += id(ids) in seen
        seen.add(id(ids))
        found = maps.get(trace_mask(lambda b, h, q, kv, ids=ids: ids[q] == ids[kv]), geometry(), CPU)
        check_map(found, dense_mask(lambda b, h, q, kv, ids=ids: ids[q] == ids[kv], 1, 1, LENGTH, LENGTH))
        del ids, found
        gc.collect(0)
    assert reused > 0, "no identity was taken over: the test showed nothing"


def test_cache_keeps_no_tensor_alive() -> None:
    import weakref

    ids = documents(160, 352)
    attend(masks.document(ids))
    gone = weakref.ref(ids)
    del ids
    gc.collect()
    assert gone() is None


def test_equal_bytes_of_another_dtype_or_shape_are_another_mask() -> None:
    """What a mask loads depends on both."""
    halves = torch.tensor([0, 1, 0, 0], dtype=torch.int32).repeat_interleave(LENGTH // 4)
    wide = halves.view(torch.int64)
    for row in (halves, wide, halves.view(2, -1)[1], wide.view(torch.float64)):
        mask = lambda b, h, q, kv, row=row: row[kv % row.shape[0]] == 0
        assert torch.equal(attend(mask), dense(mask))
        whole = row.view(4, -1)
        mask = lambda b, h, q, kv, whole=whole: whole[kv % 4, 0] == 0
        assert torch.equal(attend(mask), dense(mask))


def test_tensors_that_are_not_in_memory_as_they_are() -> None:
    numbers = torch.complex(torch.zeros(LENGTH), torch.arange(LENGTH) // 100 * 1.0)
    for ids in (
        numbers.imag,
        numbers.conj().imag,
        torch._efficientzerotensor(LENGTH),
        documents(160, 352)[None].expand(2, -1)[1],
        documents(*[100] * 11)[::2][:LENGTH],
    ):
        mask = lambda b, h, q, kv, ids=ids: (ids[q] == ids[kv]) & (ids[kv] >= 0)
        assert torch.equal(attend(mask), dense(mask))


def test_inference_tensors_are_never_known_by_identity(by_value: bool) -> None:
    """They carry no version: a change in place leaves no trace."""
    with torch.inference_mode():
        ids = documents(256, 256)
        mask = masks.document(ids)
        assert built_during(lambda: (attend(mask), attend(mask))) == (1 if by_value else 2)
        ids[:130] = 7
        assert torch.equal(attend(mask), dense(mask))


def test_ordinary_tensors_are_cached_in_inference_mode() -> None:
    ids = documents(256, 256)
    mask = masks.document(ids)
    with torch.inference_mode():
        assert built_during(lambda: (attend(mask), attend(mask))) == 1
    assert torch.equal(attend(mask), dense(mask))


def test_maps_given_by_the_user_are_cut_not_built() -> None:
    given = tw.tile_map(masks.causal, q_len=LENGTH, kv_len=LENGTH, tile=(32, 32))
    assert torch.equal(attend(given), dense(masks.causal))


# -- the cache itself ------------------------------------------------------------------------------------------------


def test_least_recently_used_map_goes_first() -> None:
    cache = MapCache(3)
    calls = [trace_mask(lambda b, h, q, kv, w=w: q - kv <= w) for w in range(5)]

    def get(k: int) -> TileMap:
        return cache.get(calls[k], geometry(), CPU)

    for k in (0, 1, 2, 0, 3):  # 1 goes
        get(k)
    assert cache.built == 4
    for k in (0, 2, 3):
        get(k)
    assert cache.built == 4
    get(1)
    assert cache.built == 5
    assert len(cache._maps) == 3


def test_clear() -> None:
    mask = masks.sliding_window(3)
    attend(mask)
    maps.clear()
    assert built_during(lambda: attend(mask)) == 1


def test_batch_and_head_dimensions_are_part_of_the_key() -> None:
    reach = torch.tensor([[1, 40], [90, 300], [LENGTH, 0]])
    call = trace_mask(lambda b, h, q, kv: (q - kv).abs() <= reach[b, h])
    for batch in (1, 2, 3):
        for heads in (1, 2):
            found = maps.get(call, Geometry(batch, heads, LENGTH, LENGTH, (64, 64)), CPU)
            check_map(found, dense_mask(lambda b, h, q, kv: (q - kv).abs() <= reach[b, h], batch, heads, LENGTH, LENGTH))


def test_from_many_threads() -> None:
    """Each thread gets the map of its own mask, and a mask that all share is seldom built twice."""
    shared = masks.document(documents(80, 432))
    wanted = dense(shared)
    start = threading.Barrier(8)

    def work(thread: int) -> None:
        start.wait()
        for step in range(10):
            assert torch.equal(attend(shared), wanted)
            own = documents(20 * thread + 1, 20 * step + 1, LENGTH - 20 * thread - 20 * step - 2)
            mask = masks.document(own)
            assert torch.equal(attend(mask), dense(mask))
            own[: LENGTH // 2] = 9
            assert torch.equal(attend(mask), dense(mask))

    before = maps.built
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, n) for n in range(8)]:
            done.result()
    assert maps.built - before <= 8 * 10 * 2 + 8
    assert len(maps._maps) <= map_cache.MAX_MAPS
    assert built_during(lambda: attend(shared)) == 0


def test_everything_is_forgotten_when_what_was_made_for_maps_grows_large() -> None:
    cache, told = MapCache(8), []
    cache.on_clear.append(lambda: told.append(True))
    cache.weigh(2**29)
    assert not told
    cache.weigh(2**29 + 1)
    assert told == [True] and not cache._maps
    cache.weigh(2**28)
    assert told == [True]  # counted from the last one on


def test_a_map_that_is_missing_during_a_capture_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call = trace_mask(masks.causal)
    with pytest.raises(RuntimeError, match="call attention once before the capture"):
        maps.get(call, geometry(), torch.device("cuda"))
    maps.get(call, geometry(), CPU)  # no capture is disturbed on a CPU
