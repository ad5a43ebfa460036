"""Maps given as lists of key tiles: what they leave out is masked, on every engine, forward and backward."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.support.brute import check_runs, dense_mask, elements_of
from tests.support.varied import attended
from tilewise import TileMap, masks
from tilewise.errors import InputError

TILE = (64, 64)
Q_LEN, KV_LEN = 200, 270  # 4 and 5 tiles, the last ones cut


def random_lists(batch: int, heads: int, entries: int = 3, seed: int = 0) -> Tensor:
    """Some negative, some twice, in any order."""
    return torch.randint(-2, 5, (batch, heads, 4, entries), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def meant(indices: Tensor, counts: Tensor | None = None) -> Tensor:
    """(batch, heads, queries, keys) whether a list names the pair's tile, one entry after the other."""
    found = torch.zeros((*indices.shape[:2], Q_LEN, KV_LEN), dtype=torch.bool)
    for b, h, row in torch.cartesian_prod(*(torch.arange(n) for n in indices.shape[:3])).tolist():
        count = indices.shape[3] if counts is None else int(counts[b, h, row])
        for column in indices[b, h, row, :count].tolist():
            if column >= 0:
                found[b, h, row * 64 : row * 64 + 64, column * 64 : column * 64 + 64] = True
    return found


def listed(indices: Tensor, counts: Tensor | None = None, **options: Any) -> TileMap:
    found = TileMap.from_lists(indices, counts, q_len=Q_LEN, kv_len=KV_LEN, tile=TILE, **options)
    assert found.given
    check_runs(found)
    return found


@pytest.mark.parametrize(("batch", "heads"), [(2, 3), (1, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize("backend", ["blocked", "cpp", "reference"])
def test_what_is_not_listed_is_masked(batch: int, heads: int, backend: str) -> None:
    lists = random_lists(batch, heads)
    found = listed(lists)
    wanted = meant(lists)
    assert torch.equal(elements_of(found), wanted) and found.partial_tiles == 0
    assert torch.equal(attended(found, 2, 3, Q_LEN, KV_LEN, backend), wanted.expand(2, 3, -1, -1))


def test_counts_always_and_no_entries() -> None:
    lists, counts = random_lists(2, 2, entries=4), torch.randint(0, 5, (2, 2, 4), generator=torch.Generator().manual_seed(1))
    assert torch.equal(elements_of(listed(lists, counts)), meant(lists, counts))
    on = meant(lists, counts)
    on[..., :64] = True
    on[..., 192:] = True
    assert torch.equal(elements_of(listed(lists, counts, always=[(0, 1), (3, 5)])), on)
    assert listed(lists[..., :0]).computed_tiles == 0
    assert TileMap.from_lists(lists[:, :, :0], q_len=0, kv_len=KV_LEN).computed_tiles == 0


CAPTURED = torch.arange(KV_LEN) % 90 < 60
PADDING = torch.arange(KV_LEN) < torch.tensor([[KV_LEN], [130]])
MASKS: dict[str, Any] = {
    "causal": masks.causal,
    "captured": lambda b, h, q, kv: CAPTURED[kv],
    "by head": lambda b, h, q, kv: (q - kv).abs() < 30 * (h + 1),
    "by batch": lambda b, h, q, kv: PADDING[b, kv],
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", ["blocked", "cpp"])
def test_a_mask_decides_inside(name: str, backend: str) -> None:
    lists = random_lists(2, 3)
    found = listed(lists, mask=MASKS[name])
    wanted = meant(lists) & dense_mask(MASKS[name], 2, 3, Q_LEN, KV_LEN)
    assert torch.equal(attended(found, 2, 3, Q_LEN, KV_LEN, backend), wanted)


def test_tiles_that_the_mask_allows_or_forbids_throughout_are_known() -> None:
    everything = torch.arange(5, dtype=torch.int32).expand(1, 1, 4, 5)
    found, whole = listed(everything, mask=masks.causal), tw.tile_map(masks.causal, q_len=Q_LEN, kv_len=KV_LEN, tile=TILE)
    assert torch.equal(found.dense(), whole.dense())
    assert found.name == "lists & causal"


def test_so_are_those_of_every_batch_element_and_head() -> None:
    everything = torch.arange(5, dtype=torch.int32).expand(2, 3, 4, 5)
    by_head = listed(everything, mask=MASKS["by head"])
    whole = tw.tile_map(MASKS["by head"], q_len=Q_LEN, kv_len=KV_LEN, heads=3, tile=TILE)
    assert torch.equal(by_head.dense(), whole.dense().expand(2, -1, -1, -1))
    shared = listed(everything[:1, :1], mask=MASKS["by batch"])  # one list for masks that differ
    assert shared.partial_tiles == 4 * 5


def test_masks_that_load_from_tensors_are_not_looked_at() -> None:
    """What these hold may change while the map lives."""
    everything = torch.arange(5, dtype=torch.int32).expand(2, 3, 4, 5)
    assert listed(everything, mask=MASKS["by batch"]).partial_tiles == everything.numel()


@pytest.mark.parametrize("backend", ["blocked", "cpp"])
def test_gradients(backend: str) -> None:
    """Rows that select nothing included: row 1 of every head."""
    lists = random_lists(1, 2)
    lists[:, :, 1] = -1
    allowed = meant(lists) & dense_mask(masks.causal, 1, 2, Q_LEN, KV_LEN)
    tensors = [torch.randn(1, 2, n, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (Q_LEN, KV_LEN, KV_LEN)]
    q, k, v = tensors
    out = tw.attention(q, k, v, mask=listed(lists, mask=masks.causal), backend=backend)
    weights = (q @ k.transpose(-1, -2) / 4).masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num()
    assert not bool(out[:, :, 64:128].any())
    torch.testing.assert_close(out, weights @ v)
    upstream = torch.randn_like(out)
    for found, wanted in zip(torch.autograd.grad(out, tensors, upstream), torch.autograd.grad(weights @ v, tensors, upstream), strict=True):
        torch.testing.assert_close(found, wanted)


def test_larger_tiles_are_cut() -> None:
    lists = torch.tensor([[[[0, 2], [1, -1]]]])
    found = TileMap.from_lists(lists, q_len=Q_LEN, kv_len=KV_LEN, tile=(128, 128))
    wanted = torch.zeros((1, 1, Q_LEN, KV_LEN), dtype=torch.bool)
    wanted[..., :128, :128] = wanted[..., :128, 256:] = wanted[..., 128:, 128:256] = True
    assert torch.equal(attended(found, 1, 1, Q_LEN, KV_LEN, "cpp"), wanted)


def test_while_compiling() -> None:
    lists = random_lists(1, 2)

    def computed(lists: Tensor) -> Tensor:
        found = TileMap.from_lists(lists, q_len=Q_LEN, kv_len=KV_LEN, tile=TILE, mask=masks.causal)
        return tw.attention(q, q[:, :, :1].expand(-1, -1, KV_LEN, -1), v, mask=found, backend="blocked")

    q, v = torch.randn(1, 2, Q_LEN, 8), torch.randn(1, 2, KV_LEN, 8)
    compiled = torch.compile(computed, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(lists), computed(lists))


BAD: dict[str, tuple[Any, str]] = {
    "past the end": (lambda: listed(torch.full((1, 1, 4, 1), 5)), "tiles 0 to 4 of 64, but tile 5 is listed"),
    "float": (lambda: listed(torch.zeros(1, 1, 4, 1)), "int32 or int64 indices"),
    "three dimensions": (lambda: listed(torch.zeros(1, 4, 1, dtype=torch.int32)), r"got torch.int32 of shape \(1, 4, 1\)"),
    "other rows": (lambda: listed(torch.zeros(1, 1, 3, 1, dtype=torch.int32)), "200 queries are 4 tiles of 64, but the lists are of 3"),
    "counts of other rows": (lambda: listed(random_lists(1, 1), torch.ones(1, 1, 3, dtype=torch.int32)), r"counts of shape \(1, 1, 4\)"),
    "too large counts": (lambda: listed(random_lists(1, 1), torch.full((1, 1, 4), 4)), "counts are from 0 to 3, the entries of a list, got 4 to 4"),
    "always outside": (lambda: listed(random_lists(1, 1), always=[(3, 6)]), r"key tiles from 0 to 5, got \(3, 6\)"),
    "no tile": (lambda: TileMap.from_lists(random_lists(1, 1), q_len=4, kv_len=4, tile=(0, 64)), "tiles >= 1"),
    "a mask of other lengths": (lambda: listed(random_lists(1, 1), mask=masks.neighborhood(200, 5)), "made for 200 keys"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_lists_are_errors(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(InputError, match=message):
        make()
