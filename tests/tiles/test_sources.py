"""Every other form a mask may come in: boolean and additive tensors, torch's BlockMask, tile maps themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import tilewise as tw
from tests.support.brute import check_map, check_runs, dense_mask, elements_of
from tests.support.varied import BATCH, HEADS, KEYS, QUERIES, TILE, attended, given_map, random_states, varied_map
from tilewise import masks
from tilewise.errors import InputError
from tilewise.tiles import from_block_mask

# -- tensors as masks ------------------------------------------------------------------------------------------------

SHAPES = [
    (BATCH, HEADS, QUERIES, KEYS),
    (1, HEADS, QUERIES, KEYS),
    (BATCH, 1, QUERIES, KEYS),
    (1, 1, QUERIES, KEYS),
    (BATCH, 1, 1, KEYS),
    (BATCH, HEADS, QUERIES, 1),
    (1, 1, 1, 1),
    (HEADS, QUERIES, KEYS),
    (1, QUERIES, KEYS),
    (QUERIES, KEYS),
    (1, KEYS),
    (QUERIES, 1),
    (1, 1),
    (KEYS,),
    (1,),
]


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
