"""Lists of tiles that a model makes anew in every layer and step, on a GPU: no host synchronisation from the lists to both passes, in CUDA graphs too."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.engines.test_tile_schedule import check as check_schedule
from tests.gpu.test_device_maps import close, on_cpu
from tests.gpu.test_fused import ON_HOPPER, both_passes, fused, tensors
from tests.support.cases import Case, Draw, Masking
from tests.support.error_rule import check
from tests.support.looked_maps import problem
from tilewise import TileMap, masks, sparse
from tilewise.engines.gpu import device_map, launch, tile_schedule
from tilewise.engines.gpu.device_map import device_maps, is_made_on_device
from tilewise.engines.gpu.tile_schedule import key_schedule, query_schedule
from tilewise.tiles import EMPTY, FULL

TILES = pytest.mark.parametrize("tile", [(64, 64), (128, 128), (128, 64), (256, 128)], ids=str)


def lists(heads: int, lengths: tuple[int, int], tile: tuple[int, int], entries: int, seed: int, batch: int = 1) -> Tensor:
    """Some entries are negative, some past the end, some there twice; in any order."""
    rows, columns = (-(-n // size) for n, size in zip(lengths, tile, strict=True))
    return torch.randint(-1, columns + 2, (batch, heads, rows, entries), generator=torch.Generator().manual_seed(seed), dtype=torch.int32, device="cpu").cuda()


def mapped(indices: Tensor, length: int, tile: tuple[int, int] = (128, 128), **options: Any) -> TileMap:
    return TileMap.from_lists(indices, q_len=length, kv_len=length, tile=tile, **options)


class without_waiting:
    """Whatever synchronises is an error in here."""

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")


@TILES
@pytest.mark.parametrize("lengths", [(1000, 700), (300, 3000), (2048, 2048)], ids=str)
def test_schedules_are_those_of_the_lists(lengths: tuple[int, int], tile: tuple[int, int]) -> None:
    found = TileMap.from_lists(lists(3, lengths, tile, 4, 0, batch=2), q_len=lengths[0], kv_len=lengths[1], tile=tile)
    p = problem(found, 2, 3, *lengths, "cuda")
    assert is_made_on_device(p)
    for own in (tile, (64, 64), (16, 64)):
        states = found.dense().cpu().repeat_interleave(tile[0] // own[0], 2).repeat_interleave(tile[1] // own[1], 3)
        states = states[:, :, : -(-lengths[0] // own[0]), : -(-lengths[1] // own[1])]
        check_schedule(on_cpu(query_schedule(p, own)), states, lengths[1] % own[1] != 0)
        check_schedule(on_cpu(key_schedule(p, own)), states.transpose(2, 3), lengths[0] % own[0] != 0)


MASKS: dict[str, Any] = {
    "lists": lambda kept: None,
    "causal": lambda kept: masks.causal,
    "captured": lambda kept: lambda b, h, q, kv: kept[kv],
    "by head": lambda kept: lambda b, h, q, kv: (q - kv).abs() < 200 * (h + 1),
}


@fused
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("tile", [(64, 64), (128, 128)], ids=str)
def test_new_lists_do_not_wait_for_the_device(engine: str, name: str, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """From lists to the gradients, with one kernel of each kind compiled; counts and always-on tiles too."""
    if engine == "gluon" and tile != (128, 128):
        pytest.skip("given tiles of 64 are the Triton engine's")
    monkeypatch.setattr(tile_schedule, "kernel_map", None)  # no map is made in any other way
    length = 1500
    inputs = tensors(1, 4, length, 128)
    kept = torch.arange(length, device="cuda") % 700 < 400
    mask = MASKS[name](kept)
    drawn = [lists(4, (length, length), tile, 5, seed) for seed in range(3)]
    counts = [torch.full_like(d[..., 0], 4) for d in drawn]

    def step(n: int) -> tuple[Tensor, ...]:
        return both_passes(engine, *inputs, mask=mapped(drawn[n], length, tile, counts=counts[n], always=[(0, 1)], mask=mask))

    step(0)
    with without_waiting():
        found = [step(n) for n in range(3)]
    for n in range(3):
        close(found[n], both_passes("reference", *inputs, mask=mapped(drawn[n], length, tile, counts=counts[n], always=[(0, 1)], mask=mask)))


@fused
@pytest.mark.parametrize("grid", [(4, 16, 16), (4, 15, 14)], ids=["whole cubes", "ragged"])
def test_methods_do_not_wait_either(engine: str, grid: tuple[int, int, int]) -> None:
    """Ragged cubes have a mask on top."""
    order = sparse.cubes(grid, (4, 4, 8), device="cuda")
    inputs = tensors(1, 2, len(order.place), 64)

    def step() -> list[Tensor]:
        with tw.attention_backend(engine):
            outs = [sparse.cube_attention(*inputs, order, choose) for choose in (lambda s: sparse.top_p(s, 0.5), lambda s: sparse.top_k(s, 3))]
            if engine == "triton":  # MoBA's query tiles are of 64
                outs.append(sparse.moba(*inputs, block=128, top_k=3))
        return [*outs, *torch.autograd.grad(sum(out.float().square().sum() for out in outs), inputs)]

    step()
    with without_waiting():
        step()


@fused
def test_torchs_block_lists_do_not_wait_either(engine: str) -> None:
    from torch.nn.attention.flex_attention import BlockMask

    length, columns = 1280, 10
    inputs = tensors(1, 2, length, 128)
    mask_mod = lambda b, h, q, kv: q >= kv
    generator = torch.Generator().manual_seed(0)
    partial, full = (torch.rand(1, 2, columns, columns, generator=generator).argsort(-1).int().cuda() for _ in range(2))
    partial_counts, full_counts = (torch.randint(0, 4, (1, 2, columns), generator=generator, dtype=torch.int32).cuda() for _ in range(2))
    blocks = BlockMask.from_kv_blocks(partial_counts, partial, full_counts, full, BLOCK_SIZE=128, mask_mod=mask_mod, compute_q_blocks=False)
    both_passes(engine, *inputs, mask=blocks)
    with without_waiting():
        found = both_passes(engine, *inputs, mask=blocks)
    close(found, both_passes("reference", *inputs, mask=blocks))


@fused
def test_a_captured_step_follows_the_lists(engine: str) -> None:
    """Lists that the graph itself makes, lists that are written in place between replays, and a mask on top that changes."""
    length, tile = 1500, (128, 128)
    inputs = tensors(1, 4, length, 64)
    indices = lists(4, (length, length), tile, 4, 0)
    kept = torch.arange(length, device="cuda") < 1000

    def step() -> tuple[Tensor, ...]:
        first = tw.attention(*inputs, mask=mapped(indices, length), backend=engine)
        out = tw.attention(first, *inputs[1:], mask=mapped(indices.flip(1), length, mask=lambda b, h, q, kv: kept[kv]), backend=engine)
        return out, *torch.autograd.grad(out.float().square().sum(), inputs)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    kept_before = len(launch._captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    assert len(launch._captured) == kept_before  # everything is the graph's own
    for seed in range(1, 4):
        indices.copy_(lists(4, (length, length), tile, 4, seed))
        kept.copy_(torch.arange(length, device="cuda") % (200 * seed) < 150)
        graph.replay()
        replayed = [t.clone() for t in found]
        close(replayed, step())


@fused
def test_a_map_made_before_a_capture_may_be_used_in_it(engine: str) -> None:
    """It is a copy of its lists, and stays, whatever becomes of the map."""
    length = 1000
    query, key, value = (t.detach() for t in tensors(1, 2, length, 128))
    found = mapped(lists(2, (length, length), (128, 128), 3, 0), length)
    wanted = tw.attention(query, key, value, mask=found, backend=engine).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.attention(query, key, value, mask=found, backend=engine)
    del found
    torch.full((64, 2**20), 255, dtype=torch.uint8, device="cuda")  # would lie where the map was
    out.zero_()
    graph.replay()
    close([out], [wanted])


@fused
def test_maps_of_other_streams(engine: str) -> None:
    length = 1500
    query, key, value = (t.detach() for t in tensors(1, 4, length, 128))
    side, drawn = torch.cuda.Stream(), [lists(4, (length, length), (128, 128), 4, seed) for seed in range(4)]
    tw.attention(query, key, value, mask=mapped(drawn[0], length), backend=engine)
    torch.cuda.synchronize()
    found = []
    for indices in drawn:
        torch.cuda._sleep(20_000_000)
        tiles = mapped(indices, length)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found.append(tw.attention(query, key, value, mask=tiles, backend=engine))
        del tiles  # its memory may be given to the next one
        mapped(torch.zeros_like(indices), length)
    torch.cuda.synchronize()
    for indices, out in zip(drawn, found, strict=True):
        close([out], [tw.attention(query, key, value, mask=mapped(indices, length), backend="reference")])


# -- the error rule --------------------------------------------------------------------------------------------------


def listed(tile: tuple[int, int], with_mask: bool) -> Any:
    """A case's mask: lists per batch element and head, drawn, wrong and empty ones among them."""

    def make(draw: Draw) -> Masking:
        case = draw.case
        lengths = (case.q_len, case.kv[2])
        indices = lists(case.heads, lengths, tile, 3, 7, case.batch).to(draw.device)
        indices[0, 0, 0] = -1
        mask = masks.causal if with_mask else None
        found = TileMap.from_lists(indices, q_len=lengths[0], kv_len=lengths[1], tile=tile, mask=mask)
        columns = -(-lengths[1] // tile[1])
        on = torch.zeros((*indices.shape[:3], columns + 3), dtype=torch.bool, device=draw.device).scatter_(3, indices.long() + 1, True)[..., 1 : columns + 1]
        allowed = on.repeat_interleave(tile[0], 2).repeat_interleave(tile[1], 3)[..., : lengths[0], : lengths[1]]
        if with_mask:
            allowed = allowed & torch.ones(lengths, dtype=torch.bool, device=draw.device).tril()
        return Masking(found, allowed)

    return make


@pytest.mark.parametrize("engine", ["auto", "triton", pytest.param("gluon", marks=pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU"))])
@pytest.mark.parametrize("with_mask", [False, True], ids=["lists", "causal on top"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("tile", [(64, 64), (128, 128)], ids=str)
def test_both_passes_keep_to_the_error_rule(engine: str, with_mask: bool, dim: int, tile: tuple[int, int]) -> None:
    if engine == "gluon" and tile != (128, 128):
        pytest.skip("given tiles of 64 are the Triton engine's")
    case = Case("lists", batch=2, heads=4, q_len=600, kv_len=730, head_dim=dim, mask=listed(tile, with_mask), through=("out", "lse"))
    check(case, engine, "cuda", torch.bfloat16)


@pytest.mark.slow
@fused
def test_a_video_of_75600_tokens(engine: str) -> None:
    """40 heads of 128, a tenth of the tiles: no synchronisation, and rows against dense attention to what they chose."""
    length, heads, entries = 75600, 40, 59
    inputs = tensors(1, heads, length, 128)
    indices = torch.rand(1, heads, 591, 591, device="cuda").topk(entries, -1).indices.int()
    small = lists(heads, (1024, 1024), (128, 128), 3, 0)
    both_passes(engine, *tensors(1, heads, 1024, 128), mask=mapped(small, 1024))
    with without_waiting():
        out = tw.attention(*inputs, mask=mapped(indices, length), backend=engine)
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(bool(g.isfinite().all()) for g in grads)
    for head, row in ((0, 0), (17, 300), (39, 590)):
        keys = (indices[0, head, row].long()[:, None] * 128 + torch.arange(128, device="cuda")).flatten()
        keys = keys[keys < length]
        query = inputs[0][0, head, row * 128 : (row + 1) * 128].double()
        weights = (query @ inputs[1][0, head, keys].double().T * 128**-0.5).softmax(-1)
        torch.testing.assert_close(out[0, head, row * 128 : (row + 1) * 128].double(), weights @ inputs[2][0, head, keys].double(), rtol=2e-2, atol=2e-2)


# -- what is kept ------------------------------------------------------------------------------------------------------


@fused
def test_memory_does_not_grow_with_new_lists(engine: str) -> None:
    length = 2048
    inputs = tensors(1, 8, length, 128)

    def step(seed: int) -> None:
        both_passes(engine, *inputs, mask=mapped(lists(8, (length, length), (128, 128), 5, seed), length))

    for seed in range(3):
        step(seed)
    torch.cuda.synchronize()
    before, made = torch.cuda.memory_allocated(), device_maps.made
    for seed in range(3, 40):
        step(seed)
    torch.cuda.synchronize()
    assert device_maps.made == made + 37
    assert torch.cuda.memory_allocated() - before < 8 * 2**20


def test_a_mask_on_top_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    classified = device_map.classified
    monkeypatch.setattr(device_map, "classified", lambda *given: looked.append(given) or classified(*given))
    inputs = tensors(1, 2, 1024, 64)
    device_maps.clear()
    for seed in range(3):
        found = mapped(lists(2, (1024, 1024), (128, 128), 3, seed), 1024, mask=masks.causal)
        both_passes("triton", *inputs, mask=found)
        states = found.dense()
        assert bool((states.triu(1) == EMPTY).all()) and bool((states == FULL).any())
    assert len(looked) == 1
