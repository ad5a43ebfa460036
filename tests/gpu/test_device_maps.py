"""Masks that load from tensors, on a GPU: new contents take no host synchronisation, follow a CUDA graph's replays, and may come from any stream."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.engines.test_tile_schedule import check
from tests.gpu.test_fused import both_passes, fused, tensors
from tests.support.brute import dense_mask, states_of
from tests.support.looked_maps import problem
from tests.support.operations import Operations
from tilewise import masks
from tilewise.engines.gpu.device_map import device_maps
from tilewise.engines.gpu.kernel_cache import Counts
from tilewise.engines.gpu.tile_schedule import TileSchedule, key_schedule, query_schedule


def documents(length: int, count: int, seed: int) -> Tensor:
    cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(seed))[: count - 1] + 1
    return torch.searchsorted(cuts.sort().values, torch.arange(length), right=True).cuda()


def same(ids: Tensor) -> Any:
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)


def close(found: Any, wanted: Any) -> None:
    """16-bit results of kernels that add in another order: a tile too many or too few differs by more."""
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=3e-2, atol=3e-2 * max(1.0, float(b.abs().max())))


def on_cpu(schedule: TileSchedule) -> TileSchedule:
    return TileSchedule(schedule.count, schedule.mapped, tuple([t.view().cpu() for t in schedule.tensors]), schedule.strides)


@pytest.mark.parametrize("tile", [(16, 16), (128, 128), (192, 128), (64, 96)], ids=str)
@pytest.mark.parametrize("lengths", [(1000, 700), (300, 3000), (1, 200), (2048, 2048)], ids=str)
def test_schedules_are_those_of_the_dense_mask(lengths: tuple[int, int], tile: tuple[int, int]) -> None:
    table = torch.rand(2, 3, 40, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    limits = torch.tensor([100, 650])
    mask = lambda b, h, q, kv: table[b, h, q // 80, kv // 80] & (kv < limits[b])
    table_there, limits_there = table.cuda(), limits.cuda()
    there = lambda b, h, q, kv: table_there[b, h, q // 80, kv // 80] & (kv < limits_there[b])
    p = problem(there, 2, 3, *lengths, "cuda")
    states = states_of(dense_mask(mask, 2, 3, *lengths), tile)
    check(on_cpu(query_schedule(p, tile)), states, lengths[1] % tile[1] != 0)
    check(on_cpu(key_schedule(p, tile)), states.transpose(2, 3), lengths[0] % tile[0] != 0)


@fused
def test_new_contents_do_not_wait_for_the_device(engine: str) -> None:
    query, key, value = tensors(1, 4, 2048, 128)
    ids = documents(2048, 8, 0)
    mask = same(ids)
    layouts = [documents(2048, 8, seed) for seed in range(1, 4)]
    both_passes(engine, query, key, value, mask=mask)  # everything is compiled
    found = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for layout in layouts:
            ids.copy_(layout)
            found.append(both_passes(engine, query, key, value, mask=mask))
            fresh = layout.clone()
            found.append(both_passes(engine, query, key, value, mask=same(fresh)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for n, layout in enumerate(layouts):
        wanted = both_passes("reference", query, key, value, mask=same(layout))
        close(found[2 * n], wanted)
        close(found[2 * n + 1], wanted)


@fused
@pytest.mark.parametrize("dim", [64, 256])
def test_lengths_do_not_wait_either(engine: str, dim: int) -> None:
    inputs = tensors(4, 2, 500, dim)
    lengths = torch.tensor([500, 3, 128, 333], device="cuda")
    both_passes(engine, *inputs, mask=masks.padding(lengths))
    other = torch.tensor([1, 499, 500, 64], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = both_passes(engine, *inputs, mask=masks.padding(other))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    close(found, both_passes("reference", *inputs, mask=masks.padding(other)))


@fused
def test_a_captured_step_follows_the_documents(engine: str) -> None:
    """Two layers share a map within the graph; replays see what the ids are by then, and calls outside of the graph see theirs."""
    query, key, value = tensors(1, 4, 1500, 64)
    ids = documents(1500, 5, 0)
    mask = same(ids)

    def step() -> tuple[Tensor, ...]:
        first = tw.attention(query, key, value, mask=mask, backend=engine)
        out = tw.attention(first, key, value, mask=mask, backend=engine)
        return out, *torch.autograd.grad(out.float().square().sum(), (query, key, value))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    before = device_maps.made
    with torch.cuda.graph(graph):
        found = step()
    assert device_maps.made == before + 1
    for seed in range(1, 4):
        ids.copy_(documents(1500, 5, seed))
        graph.replay()
        replayed = [t.clone() for t in found]
        close(replayed, step())
        close(tw.attention(query, key, value, mask=mask, backend=engine)[None], tw.attention(query, key, value, mask=mask, backend="reference")[None])


@fused
def test_a_first_call_can_be_captured(engine: str) -> None:
    """Of a mask that was never called on: kernels of its kind are compiled."""
    query, key, value = (t.detach() for t in tensors(1, 2, 700, 128))
    tw.attention(query, key, value, mask=same(documents(700, 3, 0)), backend=engine)
    ids = documents(700, 4, 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.attention(query, key, value, mask=same(ids), backend=engine)
    for seed in (2, 3):
        ids.copy_(documents(700, 4, seed))
        graph.replay()
        close([out], [tw.attention(query, key, value, mask=same(ids), backend="reference")])


@fused
def test_other_streams_wait_for_the_map(engine: str) -> None:
    query, key, value = (t.detach() for t in tensors(1, 4, 1024, 64))
    slow = torch.randn(4096, 4096, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    for seed in range(5):
        layout = documents(1024, 6, seed)
        ids = torch.zeros_like(layout)
        mask = same(ids)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            for _ in range(10):
                slow = slow @ slow / 64
            ids.copy_(layout)
            found = [tw.attention(query, key, value, mask=mask, backend=engine)]
        for stream in streams[1:]:
            with torch.cuda.stream(stream):  # nobody made these wait for the first; the map does
                found.append(tw.attention(query, key, value, mask=mask, backend=engine))
        torch.cuda.synchronize()
        wanted = tw.attention(query, key, value, mask=same(layout), backend="reference")
        close(found, [wanted] * len(found))
        slow = torch.randn(4096, 4096, device="cuda")


@fused
def test_threads_share_a_map(engine: str) -> None:
    query, key, value = (t.detach() for t in tensors(1, 2, 777, 64))
    ids = documents(777, 6, 1)
    mask = same(ids)
    found: list[Tensor] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(tw.attention(query, key, value, mask=mask, backend=engine))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    torch.cuda.synchronize()
    close(found, [tw.attention(query, key, value, mask=mask, backend="reference")] * 4)


@fused
def test_kept_launches_know_what_they_are_of(engine: str) -> None:
    """Masks of one program that differ in a number, a layout, a dtype or the sizes of the problem."""
    query, key, value = tensors(2, 2, 600, 64)
    table = torch.randint(3, (600, 600), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    limit = lambda ids, window: lambda b, h, q, kv: (ids[q, kv // 7] == ids[kv, q // 7]) & (q - kv < window)
    scaled = lambda ids, factor: lambda b, h, q, kv: ids[q, kv].float() * factor < 1.5
    made = [
        *[limit(table, window) for window in (3, 100, 599)],
        limit(table.T, 100),
        limit(table.int(), 100),
        limit(table[:300].repeat(2, 1), 100),
        *[scaled(table, factor) for factor in (0.5, 1.0, 2.0)],
    ]
    for mask in made:
        close(both_passes(engine, query, key, value, mask=mask), both_passes("reference", query, key, value, mask=mask))
    shorter = [t[:, :, :333].detach().requires_grad_() for t in (query, key, value)]
    for mask in made:
        close(both_passes(engine, *shorter, mask=mask), both_passes("reference", *shorter, mask=mask))


@pytest.mark.parametrize("length", [16384, 16000])
def test_a_new_layout_is_a_few_launches(length: int) -> None:
    """Two allocations and four views are all that torch is asked for; other layouts compile nothing."""
    p = [problem(same(documents(length, 20, seed)), 1, 16, length, length, "cuda") for seed in range(2)]
    query_schedule(p[0], (64, 64))
    key_schedule(p[0], (64, 64))
    built = Counts.built + Counts.loaded
    with Operations() as made:
        query_schedule(p[1], (64, 64))
        key_schedule(p[1], (64, 64))
    assert made.seen.total() <= 8, made.seen
    assert Counts.built + Counts.loaded == built


def test_a_new_padding_mask_does_not_wait_for_the_device() -> None:
    """As diffusers' models make them: another boolean tensor of keys in every step; one that hides nothing, and one of a row without keys, too."""
    query, key, value = tensors(2, 4, 1000, 64)
    kept = [torch.arange(1000)[None, None, None] < torch.tensor(lengths)[:, None, None, None] for lengths in ([1000, 300], [1000, 1000], [1000, 0])]
    kept.append(torch.rand(2, 1, 1, 1000) < 0.5)
    there = [mask.cuda() for mask in kept]
    step = lambda mask: tw.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    step(there[0].clone()).sum().backward()  # kernels are compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [step(mask) for mask in there]
        found[-1].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plain = [t.detach().float().cpu() for t in (query, key, value)]
    close(found, [torch.nn.functional.scaled_dot_product_attention(*plain, attn_mask=mask).nan_to_num().cuda() for mask in kept])
