"""The map of a mask is exact: every tile empty, partial or full as the dense mask has it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.support.brute import check_map, dense_mask
from tests.support.operations import Operations
from tilewise import masks
from tilewise.errors import InputError
from tilewise.lang import trace_mask
from tilewise.tiles import Geometry, Look, TileMap, build, look, runs

BATCH, HEADS = 2, 3
LENGTHS = ((0, 0), (0, 5), (5, 0), (1, 1), (1, 70), (70, 1), (48, 48), (65, 63), (97, 130))
TILES = ((16, 16), (8, 32), (32, 8), (1, 1), (200, 200), (13, 7))


class Case(NamedTuple):
    make: Callable[[int, int], Any]  # a mask for these lengths
    uses: str = ""  # which of b and h the mask depends on

    def function(self, q_len: int, kv_len: int) -> Any:
        """Maps are exact for any function at any lengths: also for a mask that is made for others."""
        made = self.make(q_len, kv_len)
        return made.function if isinstance(made, masks.Mask) else made


def numbers(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Random numbers; at least one along every dimension, for the masks of empty sequences too."""
    return torch.randint(high, [max(n, 1) for n in shape], generator=torch.Generator().manual_seed(seed))


def documents(length: int, count: int = 4, seed: int = 0) -> Tensor:
    return numbers(count, length, seed=seed).sort().values


def packed(total: int) -> list[int]:
    return [total // 4, total // 2, 0, total - total // 4 - total // 2]


def prefixed(q_len: int, kv_len: int) -> Any:
    total = max(q_len, kv_len, 4)
    return masks.shared_prefix(packed(total), [0, 0, 2, 3])


def spans(kv_len: int, tokens: int) -> Tensor:
    return numbers(90, -(-kv_len // tokens) + 1, 2, seed=3).sort(1).values


def parents(count: int) -> list[int]:
    return [int(p) for p in (numbers(1000, count, seed=5) % (torch.arange(count) + 1) - 1)]


MASKS = {
    "full": Case(lambda q, k: masks.full),
    "causal": Case(lambda q, k: masks.causal),
    "causal lower right": Case(masks.causal_lower_right),
    "window": Case(lambda q, k: masks.sliding_window(11)),
    "window 0": Case(lambda q, k: masks.sliding_window(0)),
    "window left and right": Case(lambda q, k: masks.sliding_window(40, 3)),
    "dilated window": Case(lambda q, k: masks.dilated_window(30, 3)),
    "prefix": Case(lambda q, k: masks.prefix_lm(20)),
    "prefix per batch": Case(lambda q, k: masks.prefix_lm(torch.tensor([5, 60])), "b"),
    "document": Case(lambda q, k: masks.document(documents(q), documents(k))),
    "document, unsorted": Case(lambda q, k: masks.document(numbers(3, q), numbers(3, k, seed=1))),
    "document per batch": Case(lambda q, k: masks.document(numbers(3, BATCH, q), numbers(3, BATCH, k, seed=1)), "b"),
    "document by lengths": Case(lambda q, k: masks.document(lengths=packed(max(q, k, 4)))),
    "padding": Case(lambda q, k: masks.padding(torch.tensor([40, 0])), "b"),
    "global tokens": Case(lambda q, k: masks.global_tokens(3)),
    "global tokens, marked": Case(lambda q, k: masks.global_tokens(torch.arange(max(q, k, 1)) % 40 == 39)),
    "shared prefix": Case(prefixed),
    "block diffusion": Case(lambda q, k: masks.block_diffusion(max(q, k, 2) // 2, 8)),
    "tree": Case(lambda q, k: masks.tree(parents(max(q, 1)), prefix=9)),
    "neighborhood 1-D": Case(lambda q, k: masks.neighborhood(max(q, k, 5), 5)),
    "neighborhood 2-D": Case(lambda q, k: masks.neighborhood((13, 10), (3, 5))),
    "neighborhood 3-D": Case(lambda q, k: masks.neighborhood((5, 4, 7), (3, 2, 3))),
    "sliding tile": Case(lambda q, k: masks.sliding_tile((8, 12), (4, 6), (2, 3), text=10)),
    "radial": Case(lambda q, k: masks.radial(5, 23, least=4, text=9)),
    "spatial and temporal": Case(lambda q, k: masks.spatial_temporal(6, 17, torch.tensor([False, True, False]), frame_reach=1, token_reach=2, text=5), "h"),
    "cross": Case(lambda q, k: masks.cross(spans(k, 20), 20)),
    "per batch": Case(lambda q, k: masks.per_batch([masks.causal, masks.sliding_window(5)], torch.tensor([1, 0])), "b"),
    "and": Case(lambda q, k: masks.causal & masks.sliding_window(20) & masks.document(documents(q), documents(k))),
    "or": Case(lambda q, k: masks.causal | masks.global_tokens(2)),
    "not": Case(lambda q, k: ~(masks.causal & masks.sliding_window(20))),
    "nothing": Case(lambda q, k: ~masks.full),
}


def unsorted(q_len: int, kv_len: int) -> Any:
    q_doc, kv_doc = numbers(5, q_len), numbers(5, kv_len, seed=1)
    return lambda b, h, q, kv: (q_doc[q] == kv_doc[kv]) & (q >= kv)


def window_per_head(q_len: int, kv_len: int) -> Any:
    reach = torch.tensor([2, 30, 1000])
    return lambda b, h, q, kv: (q - kv).abs() <= reach[h]


def window_per_batch_and_head(q_len: int, kv_len: int) -> Any:
    reach = numbers(60, BATCH, HEADS, seed=2)
    return lambda b, h, q, kv: (q - kv <= reach[b, h]) & (q >= kv)


def loads_of_loads(q_len: int, kv_len: int) -> Any:
    doc, rank = documents(max(q_len, kv_len, 1)), torch.tensor([2, 0, 3, 1])
    return lambda b, h, q, kv: rank[doc[q]] >= rank[doc[kv]]


def block_table(q_len: int, kv_len: int) -> Any:
    table = numbers(2, 12, 12, seed=7).bool()
    return lambda b, h, q, kv: table[q // 12, kv // 12]


def block_table_per_head(q_len: int, kv_len: int) -> Any:
    table = numbers(4, HEADS, 12, 12, seed=8) > 0
    return lambda b, h, q, kv: table[h, q // 12, kv // 12] | (q == kv)


def floats(q_len: int, kv_len: int) -> Any:
    return lambda b, h, q, kv: (q / 7 - kv * 0.11).abs() < 2.5


def distances(q_len: int, kv_len: int) -> Any:
    place = torch.rand((max(q_len, kv_len, 1), 2), generator=torch.Generator().manual_seed(1))
    return lambda b, h, q, kv: ((place[q, 0] - place[kv, 0]) ** 2 + (place[q, 1] - place[kv, 1]) ** 2).sqrt() < 0.2


def waves(q_len: int, kv_len: int) -> Any:
    return lambda b, h, q, kv: torch.sin(q * 0.2) + torch.cos(kv * 0.1) > 0.3


def nan(q_len: int, kv_len: int) -> Any:
    return lambda b, h, q, kv: (q - kv) / (q - kv) == 1


def infinities(q_len: int, kv_len: int) -> Any:
    bias = torch.where(torch.arange(max(kv_len, 1)) % 50 < 30, 0.0, -torch.inf)
    return lambda b, h, q, kv: bias[kv] > -1


def negative_index(q_len: int, kv_len: int) -> Any:
    doc = documents(max(q_len, kv_len, 9))
    return lambda b, h, q, kv: doc[q - 5] == doc[kv]


def bits(q_len: int, kv_len: int) -> Any:
    return lambda b, h, q, kv: ((q ^ kv) >> 3) & 3 == 0


def large_numbers(q_len: int, kv_len: int) -> Any:
    return lambda b, h, q, kv: q * 2**54 + 1 > kv * 2**54


def by_where(q_len: int, kv_len: int) -> Any:
    return lambda b, h, q, kv: torch.where(q < 30, kv < 10, q >= kv)


LAMBDAS = {
    "unsorted documents, causal": Case(unsorted),
    "window per head": Case(window_per_head, "h"),
    "window per batch element and head": Case(window_per_batch_and_head, "bh"),
    "loads of loads": Case(loads_of_loads),
    "table of blocks": Case(block_table),
    "table of blocks per head": Case(block_table_per_head, "h"),
    "float arithmetic": Case(floats),
    "distances of points": Case(distances),
    "waves": Case(waves),
    "nan": Case(nan),
    "infinities": Case(infinities),
    "negative index": Case(negative_index),
    "remainders": Case(lambda q, k: lambda b, h, q, kv: (q + kv) % 9 < 4),
    "bits": Case(bits),
    "large numbers": Case(large_numbers),
    "where": Case(by_where),
    "true": Case(lambda q, k: lambda b, h, q, kv: True),
    "false": Case(lambda q, k: lambda b, h, q, kv: False),
    "only the heads": Case(lambda q, k: lambda b, h, q, kv: h == 1, "h"),
    "only the batch": Case(lambda q, k: lambda b, h, q, kv: b > 0, "b"),
    "only queries": Case(lambda q, k: lambda b, h, q, kv: q % 20 < 10),
    "only keys": Case(lambda q, k: lambda b, h, q, kv: kv >= 33),
}
CASES = MASKS | LAMBDAS


@pytest.fixture(autouse=True, params=["whole", "coarse"])
def grid_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as it is, once with so little room that cells are split and everything is done in many chunks."""
    if request.param == "coarse":
        monkeypatch.setattr(build, "ON_CPU", build.Grain(grid=20, part=30, looked=50))
        monkeypatch.setattr(look, "CHUNK_ELEMENTS", 700)
        monkeypatch.setattr(runs, "LOOSE", 40)


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}x{t[1]}")
@pytest.mark.parametrize("name", CASES)
def test_map_is_exact(name: str, tile: tuple[int, int]) -> None:
    case = CASES[name]
    for q_len, kv_len in LENGTHS:
        if q_len * kv_len > 2500 * tile[0] * tile[1]:
            continue  # enough tiles in the others
        mask = case.function(q_len, kv_len)
        found = tw.tile_map(mask, batch=BATCH, heads=HEADS, q_len=q_len, kv_len=kv_len, tile=tile)
        assert found.shape == (BATCH if "b" in case.uses else 1, HEADS if "h" in case.uses else 1, q_len, kv_len)
        check_map(found, dense_mask(mask, BATCH, HEADS, q_len, kv_len))


def test_every_mask_is_covered() -> None:
    made = {type(case.make(48, 48)).__name__ for case in MASKS.values()}
    assert made == {"Mask"}
    factories = {name for name, value in vars(masks).items() if not name.startswith("_") and getattr(value, "__annotations__", {}).get("return") is masks.Mask}
    factories -= {"as_mask", "on_grid"}
    assert len(factories) > 10
    used = " ".join(case.make(48, 48).name for case in MASKS.values())
    assert {name for name in factories if name not in used} == set()


def test_captures_may_be_longer_or_shorter_than_the_lengths() -> None:
    """Loads past the end read the edge, in the map as in the attention."""
    table = numbers(2, 20, 30, seed=1).bool()
    found = tw.tile_map(lambda b, h, q, kv: table[q, kv], q_len=50, kv_len=40, tile=(8, 8))
    at = torch.arange(50).clamp(max=19)[:, None], torch.arange(40).clamp(max=29)
    check_map(found, table[at][None, None])
    found = tw.tile_map(lambda b, h, q, kv: table[q, kv], q_len=13, kv_len=7, tile=(8, 8))
    check_map(found, table[None, None, :13, :7])


def test_map_of_many_batch_elements_and_heads() -> None:
    reach = numbers(40, 11, 13, seed=2)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() <= reach[b, h]

    found = tw.tile_map(mask, batch=11, heads=13, q_len=33, kv_len=35, tile=(16, 8))
    check_map(found, dense_mask(mask, 11, 13, 33, 35))


def test_no_batch_or_no_heads() -> None:
    found = tw.tile_map(lambda b, h, q, kv: kv < 5, batch=0, heads=0, q_len=10, kv_len=10, tile=(4, 4))
    assert found.shape == (1, 1, 10, 10)
    found = tw.tile_map(lambda b, h, q, kv: kv < b, batch=0, q_len=10, kv_len=10, tile=(4, 4))
    assert found.shape == (0, 1, 10, 10)
    assert (found.total_tiles, found.computed_tiles, found.sparsity, found.computed_pairs()) == (0, 0, 0.0, 0)


def test_dense_map_without_a_mask_covers_everything() -> None:
    found = tw.tile_map(None, q_len=20, kv_len=30, tile=(16, 16))
    assert (found.full_tiles, found.partial_tiles) == (4, 0)


def test_a_look_that_sees_every_tile_needs_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SEEN_WHOLE_ON_CPU", build.SEEN_WHOLE)
    ids = documents(16384, 20)
    wanted = tw.tile_map(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), q_len=16384, kv_len=16384, tile=(64, 64))
    states = wanted.dense().flatten()

    def seen(geometry: Geometry, numbers: Tensor) -> Tensor:
        assert torch.equal(numbers, torch.arange(geometry.total))
        return states

    call = trace_mask(lambda b, h, q, kv: q >= kv % 7)  # nobody evaluates it
    with Operations() as made:
        partial, full = build.build(call, wanted.geometry, torch.device("cpu"), Look(seen))
    assert TileMap(wanted.geometry, partial, full, wanted.mask, wanted.name) == wanted
    assert made.seen.total() <= 40, made.seen


def test_a_look_with_bounds_sees_every_tile_of_a_long_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many elements they have; one without bounds, or with too many tiles, is asked for what bounds on coarser cells leave open."""
    call, geometry = trace_mask(lambda b, h, q, kv: 2 * q >= 2 * kv), Geometry(1, 1, 2**17, 2**17, (4096, 4096))  # not known for a band
    asked: list[int] = []

    def seen(geometry: Geometry, numbers: Tensor) -> Tensor:
        asked.append(len(numbers))
        return torch.ones_like(numbers)

    for has_bounds, tiles, count in ((True, 32 * 32, 32 * 32), (True, 32 * 32 - 1, 32), (False, 32 * 32, 32)):
        monkeypatch.setattr(build, "BOUNDED_WHOLE", tiles)
        asked.clear()
        build.build(call, geometry, torch.device("cpu"), Look(seen, has_bounds))
        assert sum(asked) == count


def test_what_tile_map_refuses() -> None:
    with pytest.raises(InputError, match="depends on b: tell tile_map how many there are with batch="):
        tw.tile_map(lambda b, h, q, kv: q >= b, q_len=4, kv_len=4)
    with pytest.raises(InputError, match="depends on h: tell tile_map how many there are with heads="):
        tw.tile_map(lambda b, h, q, kv: q >= h, q_len=4, kv_len=4)
    with pytest.raises(InputError, match=r"lengths >= 0 and tiles >= 1, got q_len=-1"):
        tw.tile_map(masks.causal, q_len=-1, kv_len=4)
    with pytest.raises(InputError, match=r"tile=\(0, 16\)"):
        tw.tile_map(masks.causal, q_len=4, kv_len=4, tile=(0, 16))
    with pytest.raises(InputError, match=r"tile_map: tile is a pair of whole numbers, the queries and keys of a tile, got 64; write tile=\(64, 64\)"):
        tw.tile_map(masks.causal, q_len=128, kv_len=128, tile=64)
    for wrong in ("64", (64,), (64, 64, 64), (64.0, 64.0), None):
        with pytest.raises(InputError, match="tile is a pair of whole numbers"):
            tw.tile_map(masks.causal, q_len=128, kv_len=128, tile=wrong)
    with pytest.raises(InputError, match=r"recut: tile is a pair .* write tile=\(64, 64\)"):
        tw.tile_map(masks.causal, q_len=128, kv_len=128).recut(64)
    with pytest.raises(InputError, match="mask must be a function of"):
        tw.tile_map(3, q_len=4, kv_len=4)
