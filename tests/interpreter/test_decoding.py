"""Decoding kernels in Triton's interpreter: drawn problems as models decode them, in one split and in several."""

import random
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise import masks, scores
from tilewise.engines.gpu import structure
from tilewise.engines.triton import run
from tilewise.frontend import call_cache
from tilewise.integrations.step_masks import Sight, mask_of


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes would have the splits of the test before."""
    call_cache.forget()
    monkeypatch.setattr(structure, "_prepared", {})


def drawn(seed: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, kv_heads, ratio, queries = draw.randint(1, 3), draw.randint(1, 2), draw.choice([1, 2, 3]), draw.choice([1, 1, 2])
    keys = draw.choice([64, 65, 95, 200, 301])
    dim, v_dim = draw.choice([(16, 16), (24, 16), (16, 32)])
    inputs = [torch.randn(shape, generator=generator) for shape in ((batch, queries, kv_heads * ratio, dim), (batch, kv_heads, keys, dim))]
    query, key, value = inputs[0].transpose(1, 2), inputs[1], torch.randn((batch, kv_heads, keys, v_dim), generator=generator)
    visible = torch.arange(keys) >= torch.randint(0, keys, (batch, 1), generator=generator)
    sight = Sight(
        offset=draw.choice([None, torch.tensor(draw.randint(0, keys)), draw.randint(0, keys)]),
        window=None,
        visible=draw.choice([None, visible, visible.flip(-1), torch.rand(batch, keys, generator=generator) < 0.02]),
    )
    if sight.offset is not None and draw.random() < 0.5:
        sight = sight._replace(window=draw.randint(1, keys))
    changes: list[Any] = []
    if draw.random() < 0.4:
        changes.append(scores.softcap(1.5))
    if draw.random() < 0.4:
        changes.append(scores.sinks(torch.randn(kv_heads * ratio, generator=generator)))
    options: dict[str, Any] = {"mask": mask_of(sight), "score": changes, "enable_gqa": True, "return_lse": True}
    if draw.random() < 0.2:
        options |= {"dropout_p": 0.3, "seed": seed}
    return [query, key, value], options


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("seed", range(8))
def test_drawn_problems(seed: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "split_count", lambda p: splits)
    tensors, options = drawn(seed)
    found = tw.attention(*tensors, backend="triton", **options)
    wanted = tw.attention(*[t.double() for t in tensors], backend="reference", **options)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-5)
    assert found[0].transpose(1, 2).is_contiguous()  # as the query's is


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("where", ["before", "within", "after"])
def test_masked_keys_that_are_nan(where: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cache's buffer holds where nothing was written: rows are computed again, one by one."""
    monkeypatch.setattr(run, "split_count", lambda p: splits)
    query, (key, value) = torch.randn(1, 4, 1, 16), torch.randn(2, 1, 2, 200, 16)
    hidden = {"before": slice(0, 70), "within": slice(90, 120), "after": slice(130, 200)}[where]
    visible = torch.ones(1, 200, dtype=torch.bool)
    visible[:, hidden] = False
    wanted = tw.attention(query, key, value, mask=mask_of(Sight(visible=visible)), enable_gqa=True, backend="reference")
    key[:, :, hidden], value[:, :, hidden] = torch.nan, torch.nan
    sinks = scores.sinks(torch.tensor([0.0, 1.0, 2.0, -torch.inf]))
    found = tw.attention(query, key, value, mask=mask_of(Sight(visible=visible)), enable_gqa=True, backend="triton")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    nothing = tw.attention(query, key, value, mask=masks.padding(torch.tensor([0])), score=sinks, enable_gqa=True, return_lse=True, backend="triton")
    assert torch.equal(nothing[0], torch.zeros_like(query)) and torch.equal(nothing[1][0, :, 0], sinks.logits)


def reads(mask: Any, splits: int, monkeypatch: pytest.MonkeyPatch, keys: int = 320) -> list[int]:
    """The key tiles that are loaded, by the keys' own numbers: the tiles of the interpreter are of 32 keys."""
    monkeypatch.setattr(run, "split_count", lambda p: splits)
    from tilewise.engines.triton.kernels import decode

    loaded: set[int] = set()
    original = decode.split_tile

    def noted(b_q: Any, state: Any, kv: Any, bh: Any, i_q: Any, i_kv: Any, *others: Any) -> Any:
        loaded.add(int(i_kv.handle.data.item() if hasattr(i_kv, "handle") else i_kv))
        return original(b_q, state, kv, bh, i_q, i_kv, *others)

    monkeypatch.setattr(decode, "split_tile", noted)
    tw.attention(torch.randn(1, 2, 1, 16), torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 16), mask=mask, backend="triton")
    return sorted(loaded)


@pytest.mark.parametrize("splits", [1, 3])
def test_keys_that_are_masked_are_not_read(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads(None, splits, monkeypatch) == list(range(10))
    assert reads(mask_of(Sight(offset=torch.tensor(70))), splits, monkeypatch) == [0, 1, 2]
    assert reads(mask_of(Sight(offset=torch.tensor(200), window=64)), splits, monkeypatch) == [4, 5, 6]
    padded = torch.arange(320)[None] >= 100
    assert reads(mask_of(Sight(visible=padded)), splits, monkeypatch) == list(range(3, 10))
    assert reads(mask_of(Sight(visible=padded & False)), splits, monkeypatch) == []


def test_splits_fill_the_device_and_many_sequences_need_none() -> None:
    sms = 132
    for heads in (1, 8, 64, 512, 2048):
        for tiles in (1, 8, 32, 512):
            splits = run.best_split_count(tiles, heads, sms, True)
            assert 1 <= splits <= max(1, tiles // run.TILES_PER_SPLIT) and splits <= run.MAX_SPLITS
    assert run.best_split_count(512, 1, sms, True) > 64  # one head alone
    assert run.best_split_count(512, 8, sms, True) * 8 >= sms
    assert run.best_split_count(4, 8, sms, True) == 1 and run.best_split_count(512, 3 * sms, sms, True) == 1
    assert not run.is_deep(512, 3 * sms, sms) and not run.is_deep(128, sms - 4, sms)


def test_two_programs_share_a_multiprocessor_where_three_would_leave_a_short_round() -> None:
    """512 heads are 1.3 rounds of three and 1.94 rounds of two: one split of each (measured: 242 us; two splits 262, one with three 277)."""
    assert run.best_split_count(64, 512, 132, True) == 1 and run.is_deep(64, 512, 132)
    assert run.best_split_count(64, 512, 132, False) == 2
