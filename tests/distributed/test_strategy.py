"""The choice of a layout: which splits work, what travels, the figures to reach, and what is refused."""

import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise import masks
from tilewise.distributed import assign
from tilewise.distributed.assign import TILE, Work, loads, work_of, work_of_all
from tilewise.distributed.picture import picture
from tilewise.distributed.report import describe
from tilewise.distributed.simulate import simulate
from tilewise.distributed.strategy import STAGED, Layout, choose, head_splits
from tilewise.distributed.traffic import Machine, Shape
from tilewise.errors import InputError

SHAPE = Shape(batch=1, heads=64, kv_heads=8, head_dim=128, v_dim=128, element_size=2)
CUDA = Machine.of("cuda")
seeds = st.integers(0, 2**32).map(Random)


@pytest.fixture(autouse=True, scope="module")
def without_threads() -> Iterator[None]:
    with assign.one_thread():
        yield


def work(mask: Any, length: int, **sizes: int) -> Work:
    return work_of(tw.tile_map(mask, q_len=length, kv_len=length, tile=(TILE, TILE), **sizes))


def documents(length: int) -> Any:
    """Packed documents of very different lengths, none longer than a quarter."""
    draw, lengths = Random(0), []
    while sum(lengths) < length:
        lengths.append(min(int(draw.lognormvariate(6.5, 1.6)) + 1, length // 4, length - sum(lengths)))
    return masks.causal & masks.document(lengths=lengths)


MASKS: dict[str, Any] = {
    "causal": lambda length: masks.causal,
    "window": lambda length: masks.causal & masks.sliding_window(4096),
    "documents": documents,
    "global": lambda length: masks.causal & (masks.sliding_window(4096) | masks.global_tokens(256)),
    "prefix": lambda length: masks.prefix_lm(length // 4),
}


# -- splits of heads -------------------------------------------------------------------------------------------------


def test_head_splits_are_those_of_a_brute_force() -> None:
    for heads in range(1, 25):
        for kv_heads in [k for k in range(1, heads + 1) if heads % k == 0]:
            for ranks in range(1, 25):
                expected = []
                for parts in range(1, ranks + 1):
                    if ranks % parts or heads % parts:
                        continue
                    used = [{h // (heads // kv_heads) for h in range(u * heads // parts, (u + 1) * heads // parts)} for u in range(parts)]
                    apart = all(not a & b for u, a in enumerate(used) for b in used[:u])  # nobody shares a key head
                    if apart or all(len(key_heads) == 1 for key_heads in used):
                        expected.append(parts)
                assert head_splits(ranks, heads, kv_heads) == tuple(expected), (ranks, heads, kv_heads)


# -- layouts ---------------------------------------------------------------------------------------------------------


def check(layout: Layout, works: list[tuple[Work, int]]) -> None:
    """What holds for every layout."""
    length, tiles = works[0][0].length, works[0][0].tiles
    assert sum(end - begin for ranges in layout.holdings for begin, end in ranges) == length
    assert sum(end - begin for ranges in layout.rows for begin, end in ranges) == length and len(layout.rows) == layout.groups
    shape = layout.shape
    load = sum(layers * (shape.heads // one.heads) * loads(one, layout.owners, layout.head_groups) for one, layers in works)
    assert torch.allclose(layout.loads, torch.as_tensor(load))
    by_group = layout.loads.view(layout.groups, layout.head_groups).mean(1)
    assert float(by_group.max() - by_group.min()) <= layout.bound + 1e-9 * float(by_group.sum())
    own = torch.zeros(layout.groups, tiles, dtype=torch.bool)
    rows = layout.owners.row_groups(layout.head_groups)
    own[rows.rank, rows.tile] = True
    for needs, hot, transport in zip(layout.needs, layout.hot, layout.transport, strict=True):
        assert needs.shape == (layout.groups, tiles) and hot.shape == (tiles,)
        assert (transport == "none") == (layout.groups == 1) and (transport != "gather" or bool(hot.all()))
    if layout.owners.length % TILE == 0 and bool((own.sum(0) == 1).all()):
        received = torch.stack([((needs | hot) & ~own).sum(1) for needs, hot in zip(layout.needs, layout.hot, strict=True)])
        assert torch.equal(layout.received_tiles[:, :: layout.head_groups], received.double())
    assert layout.imbalance >= 1 - 1e-9 and math.isfinite(layout.time_s) and layout.time_s >= layout.compute_s - 1e-12


@settings(max_examples=150)
@given(seeds)
def test_layouts_of_any_problem(draw: Random) -> None:
    ranks, length = draw.randint(1, 64), draw.choice([0, draw.randint(1, 400), draw.randint(1, 20_000)])
    heads = draw.choice([1, 3, 4, 8, 12])
    shape = Shape(draw.randint(1, 2), heads, draw.choice([k for k in range(1, heads + 1) if heads % k == 0]), 64, draw.choice([64, 32]), 2)
    window = torch.tensor([draw.choice([64, 300, 2000]) for _ in range(heads)])
    kinds: list[Any] = [masks.causal, masks.sliding_window(draw.randint(1, 999)), lambda b, h, q, kv: (q >= kv) & (q - kv < window[h])]
    works = [(work(mask, length, heads=heads), draw.randint(1, 3)) for mask in draw.sample(kinds, draw.randint(1, 2))]
    cuts = sorted(draw.choices(range(length + 1), k=ranks - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
    asked = [{}, {"strategy": "gather"}, {"strategy": "needed"}, {"rounds": draw.randint(1, 5)}, {"order": "contiguous"}, {"sizes": sizes}]
    options: dict[str, Any] = draw.choice(asked)
    machine = Machine(1e12, draw.choice([1e9, 1e11]), 1e11, draw.choice([1, 4, 8]))
    layout = choose(works, ranks, shape, machine, **options)
    check(layout, works)
    if "sizes" in options:
        assert layout.owners.held().tolist() == options["sizes"]
    else:
        rows = layout.owners.row_groups(layout.head_groups).held()
        assert int(rows.max() - rows.min()) <= (layout.rounds + 1) * TILE  # the last tile may be short


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("ranks", [8, 64])
def test_figures_to_reach(name: str, ranks: int) -> None:
    length = 8192 * ranks
    works = [(work(MASKS[name](length), length), 1)]
    layout = choose(works, ranks, SHAPE, CUDA)
    check(layout, works)
    share = layout.received_share[0]
    assert layout.imbalance <= 1.05
    if name == "window":
        assert layout.rounds == 1 and layout.head_groups == 1, "a window stays in its order"
    if ranks == 64 and name == "window":
        assert float(share.max()) <= 0.01
    if ranks == 64 and name == "documents":
        assert float(share.max()) <= 0.05 and 1 < layout.head_groups <= 8, "heads inside the node"


def test_hot_tiles_go_to_all_where_their_owner_would_send_many_copies() -> None:
    length = 64 * 1024
    layout = choose([(work(MASKS["global"](length), length), 1)], 64, SHAPE, CUDA, head_groups=1)
    assert layout.transport == ("needed",) and layout.hot[0].nonzero().flatten().tolist() == [0, 1]
    assert float(layout.sent_tiles.max()) < 64


def test_two_stages_where_they_save_more_than_they_cost() -> None:
    """The first leaves multiprocessors to the collective, and parts are merged: a fast network cannot win that back."""
    length = 64 * 8192
    works = [(work(MASKS["window"](length), length), 1)]
    slow, fast = (choose(works, 64, SHAPE, Machine(540e12, network, 360e9, 8), head_groups=1) for network in (15e9, 45e9))
    assert 0.1 < fast.network_s / fast.compute_s < STAGED - 1 < slow.network_s / slow.compute_s
    assert (slow.stages("cuda"), fast.stages("cuda"), slow.stages("cpu")) == (2, 1, 1)
    inside = choose(works, 8, SHAPE, Machine(540e12, 15e9, 360e9, 8), head_groups=1)
    assert inside.stages("cuda") == 1


def test_full_attention_is_gathered_and_small_groups_split_heads() -> None:
    assert choose([(work_of_all(65536), 1)], 64, SHAPE, CUDA).transport == ("gather",)
    heads = choose([(work_of_all(65536), 1)], 8, SHAPE, CUDA, strategy="ulysses")
    assert (heads.head_groups, heads.transport, heads.name) == (8, ("none",), "heads over 8")
    assert float(heads.received_tiles.max()) == 0 and float(heads.bytes_network.max()) == 0
    tokens, width = 8192, 2 * (128 + 128)  # bytes of a key and a value of one head
    assert float(heads.bytes_node.max()) == 7 / 8 * tokens * (64 + 8) * width  # queries and outputs, keys and values


def test_bytes_of_a_halo() -> None:
    """Contiguous ranks with a window of one tile receive one tile from the rank before, and send one."""
    works = [(work(masks.causal & masks.sliding_window(TILE), 16 * 1024), 1)]
    layout = choose(works, 16, SHAPE, CUDA, strategy="needed", head_groups=1, order="contiguous")
    assert layout.received_tiles[0].tolist() == [0.0] + [1.0] * 15 and layout.sent_tiles[0].tolist() == [1.0] * 15 + [0.0]
    of_tile = TILE * 8 * (128 + 128) * 2
    assert [rank for rank in range(16) if layout.bytes_network[rank] == of_tile] == [7, 8], "the only pair in two nodes"
    assert layout.bytes_node.tolist() == [of_tile] * 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "heads"}, "impossible for 64 heads on 8 key heads and 6 ranks, heads can be split over 2 ranks at most"),
        ({"strategy": "ring"}, "strategy must be one of auto, heads"),
        ({"head_groups": 4}, "head_groups=4 does not work for 64 heads on 8 key heads and 6 ranks; these do: 1, 2"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"rounds": 2, "order": "contiguous"}, "one chunk per row group, got rounds=2"),
        ({"sizes": [1, 2]}, "tokens of each of 6 ranks, 1024 in all; got 2 numbers, 3 in all"),
        ({"order": "zigzag"}, "order must be"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        choose([(work_of_all(1024), 1)], 6, SHAPE, CUDA, **options)


def test_masks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="one length, got 1024 and 2048"):
        choose([(work_of_all(1024), 1), (work_of_all(2048), 1)], 2, SHAPE, CUDA)
    per_head = work(lambda b, h, q, kv: q - kv > h, 256, heads=4)
    with pytest.raises(InputError, match="for 4 heads and the problem has 64"):
        choose([(per_head, 1)], 2, SHAPE, CUDA)
    with pytest.raises(InputError, match="leaves one for 2 ranks"):
        choose([(work_of_all(1024), 1)], 2, SHAPE, CUDA, strategy="needed", head_groups=2)


# -- words and pictures ----------------------------------------------------------------------------------------------


def test_a_layout_is_described() -> None:
    works = [(work(MASKS["documents"](65536), 65536), 1), (work(masks.causal, 65536), 2)]
    small, large = (choose(works, ranks, SHAPE, CUDA) for ranks in (8, 64))
    text = describe(small, ["documents", "causal"])
    assert small.reason in text and "modelled" in text and "imbalance" in text and "causal: " in text
    lines = describe(large, ["documents", "causal"]).splitlines()
    table = lines[[line.split()[:1] for line in lines].index(["rank"]) + 1 :]
    assert int(table[0].split()[0]) == 0 and any("more ranks" in line for line in table) and len(lines) < 30
    assert "of 0.0" not in text and "one rank" in describe(choose(works, 1, SHAPE, CUDA), ["documents", "causal"])


def test_a_simulation_is_a_table() -> None:
    found = simulate(MASKS["documents"](65536), ranks=8)
    assert len(found.rows) == 7 and found.rows[0].time_ms == min(row.time_ms for row in found.rows)
    assert all(row.name in str(found) for row in found.rows) and "not measured" in str(found)
    assert max(map(len, str(found).splitlines()[:-3])) <= 120 and found.rows[1].name in found._repr_html_()
    assert simulate(None, ranks=3, length=1000).rows[0].imbalance < 1.4
    assert "64 heads on 8" in str(found) and "4 heads on 4" in str(simulate(None, ranks=3, length=1000, heads=4))


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_layout_is_drawn(ending: str, tmp_path: Path) -> None:
    works = [(work(masks.causal, 5000), 1), (work_of_all(5000), 1)]
    layout = choose(works, 8, SHAPE, CUDA, head_groups=2)
    path = picture(layout, [one for one, _ in works], tmp_path / f"layout.{ending}", ["causal", "full"])
    assert path.read_bytes().startswith(b"\x89PNG" if ending == "png" else b"<?xml")
