"""The Hopper engine's mask bits against the mask itself, in Triton's interpreter."""

import pytest
import torch

from tilewise import masks, tile_map
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.gluon import NO_GLUON

pytestmark = pytest.mark.skipif(NO_GLUON is not None, reason=str(NO_GLUON))

MASKS = {
    "causal": masks.causal,
    "window": masks.causal & (lambda b, h, q, kv: q - kv < 70),
    "by batch and head": lambda b, h, q, kv: (q * 7 + kv * (h + 2) + b) % 5 < 3,
    "everything": lambda b, h, q, kv: (q >= 0) & (kv >= 0),
}


@pytest.mark.parametrize(
    ("columns", "by_keys", "transposed"), [(64, False, False), (128, False, False), (64, True, False), (128, True, False), (64, True, True)]
)
@pytest.mark.parametrize("name", MASKS)
def test_bits_are_what_the_mask_allows(name: str, columns: int, by_keys: bool, transposed: bool) -> None:
    from tilewise.engines.gluon.tile_schedule import MapAxis, bits_launch
    from tilewise.engines.gpu.launch import flat, prepare

    query, key = torch.empty(2, 2, 200, 64, dtype=torch.bfloat16), torch.empty(2, 2, 230, 64, dtype=torch.bfloat16)
    p = make_problem(query, key, key, MASKS[name], None, Options())[0]
    axis = MapAxis(64, columns, by_keys, transposed)
    tiles = axis.schedule(p)
    _, offsets, start, stop = tiles.tensors
    rows = len(offsets) // 4
    masked = [sum((stop - start)[offsets[4 * r + 1] : offsets[4 * r + 3]].tolist()) for r in range(rows)]
    first = torch.tensor([sum(masked[:r]) for r in range(rows)], dtype=torch.int32)
    bits = torch.zeros((sum(masked) + 1, axis.bits_shape[0], 4), dtype=torch.int32)
    launch = bits_launch(p, axis, bits, tiles, first)
    prepare(launch, p.device).launch(flat(launch.tensors))

    b, h, q, kv = torch.meshgrid(torch.arange(2), torch.arange(2), torch.arange(200), torch.arange(230), indexing="ij")
    allowed = MASKS[name](b, h, q, kv)
    allowed = allowed.transpose(2, 3) if by_keys else allowed
    allowed = torch.nn.functional.pad(allowed, (0, 256 - allowed.shape[3], 0, 256 - allowed.shape[2]))
    seen = 0
    for r in range(rows):
        i_bh, i_tile = r // tiles.count, r % tiles.count
        i_b, i_h = (i_bh // 2, i_bh % 2) if rows > tiles.count else (0, 0)
        at = int(first[r])
        for run in range(int(offsets[4 * r + 1]), int(offsets[4 * r + 3])):
            for column in range(int(start[run]), int(stop[run])):
                wanted = allowed[i_b, i_h, i_tile * 64 : i_tile * 64 + 64, column * columns : (column + 1) * columns]
                found = unpacked(bits[at], columns)
                assert torch.equal(found.T if transposed else found, wanted)
                at, seen = at + 1, seen + 1
    assert seen == sum(masked) > 0
    assert not bits[-1].any()  # nothing is written past the end


def unpacked(words: torch.Tensor, columns: int) -> torch.Tensor:
    """[rows, columns] of bits: column 8 j + 2 c + e is bit 2 j + e of word c."""
    column = torch.arange(columns)
    return (words[:, column % 8 // 2] >> (column // 8 * 2 + column % 2)) & 1 != 0


def test_too_many_mask_bits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tiles in which the mask decides count, and nothing is looked at while all of them together would be few."""
    from tilewise.engines.gluon import tile_schedule

    def problem(mask: object) -> Problem:
        query = torch.empty(1, 1, 400, 64, dtype=torch.bfloat16)
        return make_problem(query, query, query, mask, None, Options())[0]

    causal, full = problem(masks.causal), problem(MASKS["everything"])
    assert not tile_schedule.too_many_mask_bits(causal) and not tile_schedule.too_many_mask_bits(problem(None))
    monkeypatch.setattr(tile_schedule, "MAX_BYTES", 1)
    assert tile_schedule.too_many_mask_bits(causal) and not tile_schedule.too_many_mask_bits(full)


@pytest.mark.parametrize("by_keys", [False, True], ids=["by queries", "by keys"])
@pytest.mark.parametrize("name", MASKS)
def test_rows_are_counted(name: str, by_keys: bool) -> None:
    """How many tiles of each row are visited and masked, and where its mask bits begin, counted from the map itself."""
    from tilewise.engines.gluon import launches
    from tilewise.engines.gluon.tile_schedule import MapAxis, hopper_schedule

    query, key = torch.empty(2, 2, 192, 64, dtype=torch.bfloat16), torch.empty(2, 2, 256, 64, dtype=torch.bfloat16)
    p = make_problem(query, key, key, MASKS[name], None, Options())[0]
    axis = MapAxis(64, 64, by_keys, transposed=False)
    schedule = hopper_schedule(p, axis)
    cells = tile_map(MASKS[name], q_len=192, kv_len=256, batch=2, heads=2, tile=(64, 64)).dense()
    cells = (cells.transpose(2, 3) if by_keys else cells).flatten(0, 2)
    _, visited, masked, _, _, _, first, bits = schedule.tensors
    assert visited.tolist() == (cells > 0).sum(1).tolist() and masked.tolist() == (cells == 1).sum(1).tolist()
    assert first.tolist() == (masked.cumsum(0) - masked).tolist() and len(bits) == max(1, int(masked.sum()))
    assert schedule.density == pytest.approx(float((cells > 0).float().mean()))
    assert 1 <= launches.heads_per_group(p, schedule) <= 4
    assert hopper_schedule(p, axis) is schedule  # kept with the map
