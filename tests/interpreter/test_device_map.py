"""Tile schedules that kernels make of masks that load from tensors, in Triton's interpreter: those of the dense mask, and nothing remembered for too long."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw
from tests.engines.test_tile_schedule import check
from tests.interpreter.test_mask_bits import unpacked
from tests.support.brute import dense_mask, states_of
from tests.support.looked_maps import problem
from tilewise import masks
from tilewise.core.problem import Problem
from tilewise.engines.gluon import NO_GLUON
from tilewise.engines.gpu import device_map, plan, tile_schedule
from tilewise.engines.gpu.device_map import device_maps, is_made_on_device
from tilewise.engines.gpu.plan import GpuPlan
from tilewise.engines.gpu.structure import Pass
from tilewise.engines.gpu.tile_schedule import key_schedule, query_schedule
from tilewise.tiles import EMPTY, FULL, PARTIAL

BATCH, HEADS = 2, 3


def numbers(*shape: int, most: int, seed: int) -> Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(seed))


def documents(length: int, seed: int) -> Tensor:
    return numbers(length, most=4, seed=seed).sort().values


# Masks of all kinds, by the number of queries and keys and a seed.
MASKS: dict[str, Any] = {
    "documents": lambda q, kv, seed: equal(documents(q, seed), documents(kv, seed)),
    "causal documents": lambda q, kv, seed: masks.causal & equal(documents(q, seed), documents(kv, seed)),
    "window and documents": lambda q, kv, seed: masks.sliding_window(20) & equal(documents(q, seed), documents(kv, seed)),
    "lengths": lambda q, kv, seed: masks.padding(numbers(BATCH, most=kv + 1, seed=seed)),
    "left padding": lambda q, kv, seed: later_keys(numbers(BATCH, most=kv + 1, seed=seed)),
    "a limit per head": lambda q, kv, seed: within(numbers(HEADS, most=kv, seed=seed)),
    "tiles per batch and head": lambda q, kv, seed: cells(numbers(BATCH, HEADS, 7, 7, most=2, seed=seed)),
    "anything": lambda q, kv, seed: dense(numbers(q, kv, most=2, seed=seed)),
}


def equal(ids: Tensor, kv_ids: Tensor) -> Any:
    return lambda b, h, q, kv: ids[q] == kv_ids[kv]


def later_keys(first: Tensor) -> Any:
    return lambda b, h, q, kv: (kv >= first[b]) & (q >= kv)


def within(limit: Tensor) -> Any:
    return lambda b, h, q, kv: (q - kv).abs() <= limit[h]


def cells(table: Tensor) -> Any:
    return lambda b, h, q, kv: table[b, h, q // 37, kv // 37] != 0


def dense(table: Tensor) -> Any:
    return lambda b, h, q, kv: table[q, kv] != 0


def copies(p: Problem, dense: Tensor) -> Tensor:
    """A dense mask without the batches and heads that have no map of their own."""
    assert p.mask is not None
    uses = p.mask.program.uses
    return dense[: p.batch if "b" in uses else 1, : p.heads if "h" in uses else 1]


lengths = st.tuples(st.integers(1, 110), st.integers(1, 110))
tiles = st.tuples(st.sampled_from([16, 32, 48, 64, 128, 192]), st.sampled_from([16, 32, 64, 96, 128]))


@settings(max_examples=20)
@given(st.sampled_from(list(MASKS)), lengths, tiles, st.sampled_from([2, 4, 128]), st.integers(0, 99))
def test_schedules_are_those_of_the_dense_mask(name: str, length: tuple[int, int], tile: tuple[int, int], chunk: int, seed: int) -> None:
    """Runs that cross chunks are cut there."""
    mask = MASKS[name](*length, seed)
    p = problem(mask, BATCH, HEADS, *length, "cpu")
    assert is_made_on_device(p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_map, "CHUNK", chunk)
        rows, columns = query_schedule(p, tile), key_schedule(p, tile)
    states = states_of(copies(p, dense_mask(mask, BATCH, HEADS, *length)), tile)
    check(rows, states, length[1] % tile[1] != 0)
    check(columns, states.transpose(2, 3), length[0] % tile[0] != 0)
    for schedule, found in ((rows, states), (columns, states.transpose(2, 3))):
        batch, heads, count, _ = found.shape
        assert schedule.count == count and schedule.strides == (heads * count if batch > 1 else 0, count if heads > 1 else 0)
        order = torch.argsort((found != EMPTY).sum(3), dim=2, descending=True, stable=True)
        assert torch.equal(schedule.tensors[0].long(), order.flatten())


@pytest.mark.parametrize("by_keys", [False, True], ids=["by queries", "by keys"])
@pytest.mark.parametrize("name", ["causal documents", "tiles per batch and head", "lengths"])
def test_they_are_those_of_maps_made_otherwise(name: str, by_keys: bool) -> None:
    make = key_schedule if by_keys else query_schedule
    p = problem(MASKS[name](100, 130, 3), BATCH, HEADS, 100, 130, "cpu")
    found = make(p, (32, 48))
    wanted = make(p, (32, 48), find=lambda p: None)
    assert (found.count, found.strides) == (wanted.count, wanted.strides)
    assert torch.equal(found.tensors[0], wanted.tensors[0])
    for mine, theirs in zip(found.tensors[1].view(-1, 4).tolist(), wanted.tensors[1].view(-1, 4).tolist(), strict=True):
        for kind in range(3):
            assert tiles_between(found.tensors, *mine[kind : kind + 2]) == tiles_between(wanted.tensors, *theirs[kind : kind + 2])


def tiles_between(tensors: tuple[Tensor, ...], first: int, last: int) -> list[int]:
    return sorted(tile for run in range(first, last) for tile in range(int(tensors[2][run]), int(tensors[3][run])))


@pytest.mark.skipif(NO_GLUON is not None, reason=str(NO_GLUON))
@pytest.mark.parametrize(
    ("rows", "columns", "by_keys", "transposed"), [(64, 128, False, False), (192, 128, False, False), (128, 64, True, False), (64, 64, True, True)]
)
@pytest.mark.parametrize("name", ["causal documents", "tiles per batch and head", "lengths"])
def test_mask_bits(name: str, rows: int, columns: int, by_keys: bool, transposed: bool) -> None:
    """How many tiles of each row are visited and masked, and the bits of those."""
    from tilewise.engines.gluon.tile_schedule import MapAxis, hopper_schedule, too_many_mask_bits

    mask = MASKS[name](140, 170, 5)
    p = problem(mask, BATCH, HEADS, 140, 170, "cpu")
    axis = MapAxis(rows, columns, by_keys, transposed)
    schedule = hopper_schedule(p, axis)
    _, visited, masked, offsets, starts, stops, first, bits = schedule.tensors
    allowed = copies(p, dense_mask(mask, BATCH, HEADS, 140, 170))
    states = states_of(allowed, axis.tile)
    allowed, states = (t.transpose(2, 3) if by_keys else t for t in (allowed, states))
    cut = states.shape[3] * columns != allowed.shape[3]
    is_masked = (states == PARTIAL) | ((states == FULL) & (torch.arange(states.shape[3]) == states.shape[3] - 1) & cut)
    assert visited.tolist() == (states != EMPTY).sum(3).flatten().tolist() and masked.tolist() == is_masked.sum(3).flatten().tolist()
    allowed = torch.nn.functional.pad(allowed, (0, 256, 0, 256)).flatten(0, 1)
    for r, (_, begin, _, end) in enumerate(offsets.view(-1, 4).tolist()):
        at = int(first[r])
        for column in [c for run in range(begin, end) for c in range(int(starts[run]), int(stops[run]))]:
            i_bh, i_row = r // schedule.count, r % schedule.count
            wanted = allowed[i_bh, i_row * rows : (i_row + 1) * rows, column * columns : (column + 1) * columns]
            found = unpacked(bits[at], columns if not transposed else rows)
            assert torch.equal(found.T if transposed else found, wanted)
            at += 1
        assert at - int(first[r]) == int(masked[r])
    assert hopper_schedule(p, axis).tensors[-1] is bits  # kept with the map
    assert not too_many_mask_bits(p)


@pytest.mark.parametrize("mask", [masks.causal, lambda b, h, q, kv: (q - kv) % 3 == 0, masks.sliding_window(20)], ids=["causal", "stripes", "window"])
def test_masks_of_positions_alone_are_not_made_anew(mask: Any) -> None:
    assert not is_made_on_device(problem(mask, 1, 1, 50, 50, "cpu"))


def test_given_tiles_and_large_masks_are_not_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = MASKS["documents"](64, 64, 0)
    given_tiles = tw.tile_map(mask, q_len=64, kv_len=64, tile=(16, 16))
    assert is_made_on_device(problem(mask, 1, 1, 64, 64, "cpu")) and is_made_on_device(problem(given_tiles, 1, 1, 64, 64, "cpu"))
    monkeypatch.setattr(device_map, "MAX_ELEMENTS", 128 * 128 - 1)
    assert not is_made_on_device(problem(mask, 1, 1, 64, 64, "cpu"))


def attended(mask: Any, backend: str, length: int = 40) -> list[Tensor]:
    inputs = [torch.randn(1, 2, length, 16, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3)]
    out = tw.attention(*inputs, mask=mask, backend=backend)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize("change", ["in place", "another tensor", "other memory"])
def test_new_contents_are_a_new_map(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_schedule, "kernel_map", None)  # nothing else makes one
    ids = [documents(40, 0)]
    mask = masks.causal & (lambda b, h, q, kv: ids[0][q] == ids[0][kv])
    for seed in range(3):
        if change == "in place":
            ids[0].copy_(documents(40, seed))
        elif change == "another tensor":
            ids[0] = documents(40, seed)
        else:
            ids[0].data = documents(40, seed)
        before = device_maps.made
        for found, wanted in zip(attended(mask, "triton"), attended(mask, "reference"), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert device_maps.made == before + 1  # for both passes
        attended(mask, "triton")
        assert device_maps.made == before + 1


def test_another_layout_is_of_the_same_sizes_and_takes_the_place_of_the_old() -> None:
    device_maps.clear()
    ids = documents(100, 0)
    mask = equal(ids, ids)
    found = []
    for seed in range(4):
        ids.copy_(documents(100, seed))
        p = problem(mask, 1, 1, 100, 100, "cpu")
        found.append([(t.shape, t.stride(), t.dtype) for s in (query_schedule(p, (32, 16)), key_schedule(p, (32, 16))) for t in s.tensors])
    assert found[1:] == found[:-1] and len(device_maps._kept) == 1


def test_no_tensor_is_kept_alive() -> None:
    device_maps.clear()
    for seed in range(3):
        ids = documents(64, seed)
        query_schedule(problem(equal(ids, ids), 1, 1, 64, 64, "cpu"), (16, 16))
        del ids
        gc.collect()
    assert len(device_maps._kept) == 1  # the last one goes when the next is kept


def test_what_is_kept_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    device_maps.clear()
    monkeypatch.setattr(device_map, "MAX_BYTES", 3 * 128 * 128 // 4 + 100)
    layouts = [documents(64, seed) for seed in range(8)]
    for ids in layouts:
        query_schedule(problem(equal(ids, ids), 1, 1, 64, 64, "cpu"), (16, 16))
        assert 1 <= len(device_maps._kept) <= 3


def test_tensors_without_versions_get_a_map_every_time() -> None:
    ids = torch.nn.Parameter(documents(40, 0).float())
    p = problem(equal(ids, ids), 1, 1, 40, 40, "cpu")
    before = device_maps.made
    query_schedule(p, (16, 16))
    query_schedule(p, (16, 16))
    assert device_maps.made == before + 2


def test_a_capture_has_maps_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replay computes depends on contents that nobody knows while it is captured; layers of one capture share a map."""
    ids = documents(40, 0)
    p = problem(equal(ids, ids), 1, 1, 40, 40, "cpu")
    outside = device_maps.get(p)
    under_way = 0
    monkeypatch.setattr(device_map, "capture_id", lambda stream: under_way)
    under_way = 7
    first = device_maps.get(p)
    assert first is not outside and device_maps.get(p) is first
    under_way = 8
    second = device_maps.get(p)
    assert second is not first and second is not outside
    under_way = 0
    assert device_maps.get(p) is outside


@pytest.mark.parametrize("where", ["capture_id", "stream_of"])
@pytest.mark.parametrize("kind", ["documents", "causal", "given tiles"])
def test_a_pass_is_prepared_again_elsewhere_if_its_schedule_is_made_on_the_device(kind: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a capture, or on another stream. Others are ready everywhere, and cannot be made in a capture."""
    ids = documents(40, 0)
    bare = replace(tw.tile_map(equal(ids, ids), q_len=40, kv_len=40, tile=(16, 16)), given=True)
    mask = {"documents": equal(ids, ids), "causal": masks.causal, "given tiles": bare}[kind]
    p = problem(mask, 1, 1, 40, 40, "cpu")
    made = GpuPlan(p)
    under_way = 0
    monkeypatch.setattr(plan, "capture_id", lambda stream: 0)
    monkeypatch.setattr(plan, where, lambda _: under_way)
    outside = made.prepared("forward", p, "test", Pass)
    assert made.prepared("forward", p, "test", Pass) is outside
    under_way = 7
    inside = made.prepared("forward", p, "test", Pass)
    assert (inside is outside) == (kind != "documents") and made.prepared("forward", p, "test", Pass) is inside
    under_way = 0
    assert made.prepared("forward", p, "test", Pass) is not inside or kind != "documents"


@pytest.mark.parametrize(
    ("name", "role"), [("causal documents", "sparse_fwd"), ("anything", "sparse_fwd"), ("lengths", "fwd"), ("left padding", "fwd"), ("a limit per head", "fwd")]
)
def test_a_forward_is_chosen_without_a_look(name: str, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.engines.triton import run

    p = problem(MASKS[name](60, 60, 0), BATCH, HEADS, 60, 60, "cpu")
    monkeypatch.setattr(run, "table_config", lambda role, p: role)  # as if they were different
    monkeypatch.setattr(run, "kernel_map", None)
    assert run.fwd_role(p) == role
