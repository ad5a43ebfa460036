"""Faults and bad input that have bitten other libraries, by their number in the list of faults."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.support.cases import CASES
from tilewise import masks, scores
from tilewise.engines.cpp import CppEngine
from tilewise.engines.gpu.limits import interpreted
from tilewise.tiles import Geometry
from tilewise.tiles.runs import from_dense

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OWN = ["triton"] if DEVICE == "cuda" else ["cpp", "triton"] if interpreted() else ["cpp"]
ENGINES = ("reference", "blocked", *OWN)
engines = pytest.mark.parametrize("engine", ENGINES)
NAN, INF = float("nan"), float("inf")


def tensors(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    made = [torch.randn(shape or (1, 2, 150, 8), generator=generator, dtype=torch.float64, device="cpu") for _ in range(3)]
    return [t.to(DEVICE, dtype).requires_grad_() for t in made]


def poisoned(tensor: Tensor, where: Any, value: float) -> Tensor:
    spoilt = tensor.detach().clone()
    spoilt[where] = value
    return spoilt.requires_grad_()


def run(q: Tensor, k: Tensor, v: Tensor, engine: str, grad: Tensor | None = None, leaves: tuple[Tensor, ...] = (), **options: Any) -> tuple[Tensor, ...]:
    """Output, lse, and the gradients of query, key, value and further leaves."""
    if engine == "triton" and q.dtype == torch.float64:
        pytest.skip("the Triton engine has no float64")
    out, lse = tw.attention(q, k, v, return_lse=True, backend=engine, **options)
    found = torch.autograd.grad([out], [q, k, v, *leaves], [torch.ones_like(out) if grad is None else grad])
    return (out.detach(), lse.detach(), *found)


def assert_same(found: Tensor, expected: Tensor, engine: str) -> None:
    """Bit by bit; the Triton engine adds up in another order where it had to be careful."""
    if engine == "triton":
        torch.testing.assert_close(found, expected, equal_nan=True)
    else:
        assert torch.equal(found, expected)


# -- 1: a fully masked row -------------------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_row_1_a_row_with_nothing_gives_zero(engine: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype=dtype)
    table = torch.randn(2, 150, requires_grad=True)
    out, lse, dq, dk, dv, dtable = run(
        q, k, v, engine, leaves=(table,), mask=lambda b, h, i, j: (i % 3 != 0) & (i >= j), score=lambda s, b, h, i, j: s + table[h, j]
    )
    assert torch.equal(out[:, :, ::3], torch.zeros_like(out[:, :, ::3])) and (lse[:, :, ::3] == -INF).all()
    assert torch.equal(dq[:, :, ::3], torch.zeros_like(dq[:, :, ::3]))
    assert all(t.isfinite().all() for t in (out, dq, dk, dv, dtable)) and lse[:, :, 1::3].isfinite().all()


@engines
@pytest.mark.parametrize("form", ["function", "dense", "additive", "padding", "map", "score"])
def test_row_1_by_every_kind_of_mask(engine: str, form: str) -> None:
    q, k, v = tensors(2, 2, 40, 8)
    nothing: dict[str, dict[str, Any]] = {
        "function": {"mask": ~masks.full},
        "dense": {"mask": torch.zeros(40, 40, dtype=torch.bool)},
        "additive": {"mask": torch.full((40, 40), -INF)},
        "padding": {"mask": torch.zeros(2, 40, dtype=torch.bool)},
        "map": {"mask": tw.tile_map(~masks.full, q_len=40, kv_len=40, device=DEVICE)},
        "score": {"score": lambda s, b, h, i, j: s - INF},
    }
    out, lse, *found = run(q, k, v, engine, **nothing[form])
    assert (out == 0).all() and (lse == -INF).all() and all((g == 0).all() for g in found)


# -- 2: NaN and Inf where nobody looks -------------------------------------------------------------------------------

VISIBLE = {
    "causal": (masks.causal, slice(100, None), slice(None, 100)),  # mask, poisoned keys, queries that do not see them
    "window": (masks.sliding_window(4), slice(60, 61), slice(None, 56)),
    "padding": (masks.padding(torch.tensor([90], device=DEVICE)), slice(90, None), slice(None)),
    "documents": (masks.document(torch.arange(150, device=DEVICE) // 50), slice(0, 50), slice(50, None)),
    "dense": (torch.arange(150, device=DEVICE) < 110, slice(110, None), slice(None)),
    "map": (tw.tile_map(masks.causal, q_len=150, kv_len=150, tile=(32, 16), device=DEVICE), slice(100, None), slice(None, 100)),
}


@engines
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", VISIBLE)
def test_row_2_masked_keys_and_values_do_not_leak(engine: str, name: str, value: float) -> None:
    """What a query does not attend changes not one bit of its output or of any gradient it sends."""
    mask, keys, blind = VISIBLE[name]
    q, k, v = tensors()
    grad = torch.zeros(1, 2, 150, 8)
    grad[:, :, blind] = torch.randn(grad[:, :, blind].shape)
    clean = run(q, k, v, engine, grad, mask=mask)
    at = (slice(None), slice(None), keys)
    spoilt = run(q, poisoned(k, at, value), poisoned(v, at, value), engine, grad, mask=mask)
    for which in (0, 1, 2):  # out, lse, dq of the blind rows
        assert_same(spoilt[which][:, :, blind], clean[which][:, :, blind], engine)
    seen_by_others = masks_rows(mask, blind)
    for which in (3, 4):  # dk, dv of keys that only blind rows attend
        only_blind = ~seen_by_others
        torch.testing.assert_close(spoilt[which][:, :, only_blind], clean[which][:, :, only_blind], rtol=1e-5, atol=1e-6)
        assert spoilt[which][:, :, only_blind].isfinite().all()


def masks_rows(mask: Any, blind: slice) -> Tensor:
    """(keys,) whether a key is attended by any query that is not blind."""
    i, j = torch.arange(150, device=DEVICE)[:, None], torch.arange(150, device=DEVICE)
    if isinstance(mask, tw.TileMap):
        mask = masks.causal
    allowed = mask.expand(150, 150) if isinstance(mask, Tensor) else mask(torch.zeros(1, 1, dtype=torch.int64), 0, i, j).expand(150, 150)
    others = torch.ones(150, dtype=torch.bool)
    others[blind] = False
    return (allowed & others[:, None]).any(0)


@engines
def test_row_2_given_tiles_are_full_whatever_the_mask_inside_says(engine: str) -> None:
    """A NaN key that the mask inside hides, and a NaN query that it keeps from some keys: the others get what they would without."""
    length, tile = 80, 32  # the last tiles end in the middle
    states = torch.tensor([[2, 0, 2], [1, 0, 2], [2, 1, 2]], device=DEVICE)
    call = masks.as_mask(lambda b, h, i, j: (i % 9 != 0) & (j % 5 != 0)).traced()
    given = tw.TileMap(Geometry(1, 1, length, length, (tile, tile)), from_dense(states == 1), from_dense(states == 2), call, given=True)
    q, k, v = tensors(1, 1, length, 16)
    clean = run(q, k, v, engine, mask=given)
    key, query = (0, slice(None), 40), (0, slice(None), 45)  # 40 is in a partial tile alone; 45 is in full tiles from key 64 on
    spoilt = run(poisoned(q, query, NAN), poisoned(k, key, NAN), poisoned(v, key, NAN), engine, mask=given)
    rows = torch.arange(length, device=DEVICE) != 45
    for which in (0, 1, 2):  # out, lse, dq
        assert spoilt[which][0, :, 45].isnan().all()
        torch.testing.assert_close(spoilt[which][:, :, rows], clean[which][:, :, rows], rtol=1e-5, atol=1e-6)
    for which in (3, 4):  # dk, dv
        assert spoilt[which][0, :, 64:].isnan().all()
        torch.testing.assert_close(spoilt[which][:, :, :64], clean[which][:, :, :64], rtol=1e-5, atol=1e-6)


@engines
@pytest.mark.parametrize("value", [NAN, INF])
def test_row_2_padding_of_a_whole_batch_element(engine: str, value: float) -> None:
    q, k, v = tensors(2, 2, 40, 8)
    at = (1, slice(None), slice(7, None))
    mask = masks.padding(torch.tensor([40, 7]))
    clean = run(q, k, v, engine, mask=mask)
    spoilt = run(q, poisoned(k, at, value), poisoned(v, at, value), engine, mask=mask)
    for a, b in zip(clean, spoilt, strict=True):
        assert_same(b, a, engine)


@engines
def test_row_2_a_query_of_a_masked_row(engine: str) -> None:
    """A NaN in a query that attends to nothing reaches no one."""
    q, k, v = tensors()
    mask = lambda b, h, i, j: (i != 70) & (i >= j)
    clean = run(q, k, v, engine, mask=mask)
    spoilt = run(poisoned(q, (0, 0, 70), NAN), k, v, engine, mask=mask)
    for a, b in zip(clean, spoilt, strict=True):
        assert_same(b, a, engine)


@engines
def test_row_2_a_query_spoils_only_the_keys_it_attends(engine: str) -> None:
    """A NaN in one query's row makes its gradients NaN, and those of the keys it attends; not of the others."""
    q, k, v = tensors()
    clean = run(q, k, v, engine, mask=masks.causal)
    spoilt = run(poisoned(q, (0, 0, 70), NAN), k, v, engine, mask=masks.causal)
    others = [r for r in range(150) if r != 70]
    for which in (0, 1, 2):
        assert_same(spoilt[which][:, :, others], clean[which][:, :, others], engine)
        assert spoilt[which][0, 0, 70].isnan().all()
    for which in (3, 4):
        assert spoilt[which][0, 0, :71].isnan().all()
        torch.testing.assert_close(spoilt[which][0, 0, 71:], clean[which][0, 0, 71:], rtol=1e-5, atol=1e-6)
        assert_same(spoilt[which][0, 1], clean[which][0, 1], engine)


@engines
def test_row_2_learned_scores_where_masked(engine: str) -> None:
    """A score that is NaN, or has a NaN derivative, where the mask forbids: nothing of it reaches a gradient."""
    q, k, v = tensors()
    table = torch.randn(150).abs().requires_grad_()

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + torch.sqrt((i - j) * table[i])  # NaN above the diagonal, infinite slope on it

    found = run(q, k, v, engine, leaves=(table,), mask=lambda b, h, i, j: i > j, score=score)
    assert all(t.isfinite().all() for t in (found[0], *found[2:]))


@engines
def test_row_2_a_score_of_minus_infinity(engine: str) -> None:
    """-inf from the score forbids as the mask does, gradients of what it was computed from included."""
    q, k, v = tensors()
    gain = torch.tensor(1.5, requires_grad=True)
    steps = [lambda s, b, h, i, j: torch.where(i >= j, s, -INF), lambda s, b, h, i, j: s * gain]
    found = run(q, k, v, engine, leaves=(gain,), score=steps)
    expected = run(q, k, v, engine, leaves=(gain,), score=steps[1], mask=masks.causal)
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", [None, "auto", "flash", "flex"])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("which", ["key", "value"])
def test_row_2_whatever_a_default_call_chooses(backend: str | None, value: float, which: str) -> None:
    """torch's SDPA would let it through, so no intent but its own name may choose it."""
    q, k, v = (t.requires_grad_() for t in tensors())
    q = q[:, :, :-1]  # nobody attends to the last key
    given = {"key": k, "value": v}
    spoilt = given | {which: poisoned(given[which], (0, 0, -1), value).requires_grad_()}
    found = tw.attention(q, *spoilt.values(), is_causal=True, backend=backend)
    torch.testing.assert_close(found, tw.attention(q, k, v, is_causal=True, backend="reference"))
    for gradient in torch.autograd.grad(found.sum(), (q, *spoilt.values())):
        assert gradient.isfinite().all()


def test_row_2_explain_says_why_sdpa_was_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    assert "lets NaN in masked keys through" in str(tw.explain(q, k, v, is_causal=True))
    monkeypatch.setattr(CppEngine, "refuse", lambda self, problem: "no compiler")
    assert tw.explain(q, k, v, is_causal=True).engine == "native"
    found = tw.explain(q, k, poisoned(v, (0, 0, -1), NAN), is_causal=True)
    assert "holds NaN or Inf" in str(found) and found.engine == "blocked"


# -- 3: NaN where someone looks --------------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_row_3_an_attended_nan_propagates(engine: str, which: str) -> None:
    q, k, v = tensors()
    at = (0, 1, 70)
    spoilt = {"query": q, "key": k, "value": v}
    spoilt[which] = poisoned(spoilt[which], at, NAN)
    out, lse, dq, dk, dv = run(*spoilt.values(), engine, mask=masks.causal)
    rows = slice(70, 71) if which == "query" else slice(70, None)
    assert out[0, 1, rows].isnan().all() and out[0, 1, : rows.start].isfinite().all()
    assert out[0, 0].isfinite().all()
    assert dq[0, 1, rows].isnan().all() and dq[0, 1, : rows.start].isfinite().all()
    assert dk[0, 1, : rows.start].isnan().all()
    if which == "value":
        assert lse.isfinite().all() and dv.isfinite().all()
    else:
        assert lse[0, 1, rows].isnan().all()


@engines
def test_row_3_an_attended_infinity_propagates(engine: str) -> None:
    q, k, v = tensors()
    out = run(q, k, poisoned(v, (0, 0, 20, 3), INF), engine, mask=masks.causal)[0]
    assert (out[0, 0, 20:, 3] == INF).all() and out[0, 0, :20].isfinite().all() and out[..., :3].isfinite().all()


# -- 4, 5: extreme scores --------------------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("offset", [-1e4, -1e30, 1e4, 1e30])
@pytest.mark.parametrize("length", [1, 37, 129])
def test_row_4_very_negative_lse(engine: str, offset: float, length: int) -> None:
    q, k, v = tensors(1, 2, length, 8)
    out, lse, *found = run(q, k, v, engine, score=lambda s, b, h, i, j: s + offset)
    assert all(t.isfinite().all() for t in (out, lse, *found))
    assert torch.allclose(lse, torch.tensor(offset), rtol=1e-2)


@engines
@pytest.mark.parametrize("lengths", [(1, 129), (1, 1), (129, 1), (1, 257)])
def test_row_4_one_query_and_odd_tails(engine: str, lengths: tuple[int, int]) -> None:
    q, (k, v) = tensors(1, 2, lengths[0], 8)[0], tensors(1, 2, lengths[1], 8)[1:]
    for mask in (None, masks.causal, lambda b, h, i, j: j >= 10000):
        out, _, *found = run(q, k, v, engine, mask=mask, score=scores.softcap(1.0))
        assert all(t.isfinite().all() for t in (out, *found))


@engines
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 133120.0])
def test_row_5_huge_logits(engine: str, dtype: torch.dtype, scale: float) -> None:
    q, k, v = tensors(1, 2, 150, 64, dtype=dtype)
    big = [(t.detach() * 50).requires_grad_() for t in (q, k)]
    for mask in (None, masks.causal):
        out, lse, *found = run(*big, v, engine, scale=scale, mask=mask)
        assert all(t.isfinite().all() for t in (out, lse, *found))
        assert out.float().abs().max() <= v.float().abs().max() + 1e-5


# -- 7: overflow in a mask's own arithmetic --------------------------------------------------------------------------


@engines
def test_row_7_indices_are_64_bit(engine: str) -> None:
    """i * 2**24 passes 2**31 at i = 128."""
    q, k, v = tensors()
    far = lambda b, h, i, j: i * 2**24 >= j * 2**24
    torch.testing.assert_close(run(q, k, v, engine, mask=far), run(q, k, v, engine, mask=masks.causal))


@engines
def test_row_7_loads_of_int32_join_64_bits(engine: str) -> None:
    q, k, v = tensors()
    positions = torch.arange(150, dtype=torch.int32)
    far = lambda b, h, i, j: (positions[i].long() * 2**24 >= positions[j].long() * 2**24) & (i * i * i * 1000 >= j * j * j * 1000)
    torch.testing.assert_close(run(q, k, v, engine, mask=far), run(q, k, v, engine, mask=masks.causal))


def test_row_7_a_million_tokens_squared() -> None:
    """(q * 2**21 + kv) at a million tokens is near 2**41; the map is that of causal."""
    length = 2**20
    wide = tw.tile_map(lambda b, h, i, j: i * 2**21 + j >= j * 2**21 + i, q_len=length, kv_len=length, tile=(4096, 4096))
    plain = tw.tile_map(masks.causal, q_len=length, kv_len=length, tile=(4096, 4096))
    assert torch.equal(wide.dense(), plain.dense())


# -- 10, 11, 12, 13: memory, lengths and head dims, by the error rule ------------------------------------------------

ROWS = {
    10: [c for c in CASES if c.name.startswith("grad-output")],
    11: [c for c in CASES if c.name.startswith("strides")],
    12: [c for c in CASES if c.name.startswith(("no ", "nothing at all", "one ", "causal, more keys", "causal, fewer keys", "more keys", "fewer keys"))],
    13: [c for c in CASES if re.match(r"(length|head dim) \d+", c.name)],
}


@pytest.mark.parametrize("row", ROWS)
def test_rows_10_to_13_are_cases(row: int) -> None:
    """test_meaning.py holds them to the error rule on every engine and dtype."""
    assert len(ROWS[row]) >= 4


@engines
def test_row_10_a_grad_output_of_stride_0(engine: str) -> None:
    """sum().backward() sends one number seen through strides of 0."""
    q, k, v = tensors()
    out = tw.attention(q, k, v, mask=masks.causal, backend=engine)
    summed = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    torch.testing.assert_close(summed, torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))


@engines
def test_row_11_a_misaligned_pointer(engine: str) -> None:
    """Half-precision tensors that begin 2 bytes past an aligned address."""
    shape, count = (1, 2, 150, 8), 2400
    q, k, v = (torch.randn(count + 1).half()[1:].view(shape) for _ in range(3))
    assert q.data_ptr() % 4 != 0
    expected = tw.attention(*(t.clone() for t in (q, k, v)), is_causal=True, backend=engine)
    assert torch.equal(tw.attention(q, k, v, is_causal=True, backend=engine), expected)


@engines
def test_row_12_causal_aligns_upper_left(engine: str) -> None:
    """Query i sees keys 0 .. i, whatever the lengths, as torch's SDPA does; lower-right is a mask of its own."""
    q, k, v = tensors(1, 1, 3, 4)[0], *tensors(1, 1, 5, 4, seed=1)[1:]
    first = tw.attention(q, k, v, is_causal=True, backend=engine)[:, :, 0]
    torch.testing.assert_close(first, v[:, :, 0])
    last = tw.attention(q, k, v, mask=masks.causal_lower_right(3, 5), backend=engine)[:, :, 2]
    torch.testing.assert_close(last, tw.attention(q, k, v, backend=engine)[:, :, 2])


@engines
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_row_12_empty_problems(engine: str, lengths: tuple[int, int]) -> None:
    q, (k, v) = tensors(2, 2, lengths[0], 8)[0], tensors(2, 2, lengths[1], 8)[1:]
    ids = torch.zeros(lengths[1], dtype=torch.int64)
    table = torch.zeros(2, lengths[1], requires_grad=True)
    mask = lambda b, h, i, j: ids[j] == 0
    out, lse, *found = run(q, k, v, engine, mask=mask, score=None)
    assert out.shape == (2, 2, lengths[0], 8) and (out == 0).all() and (lse == -INF).all()
    assert all((g == 0).all() for g in found)
    learned = tw.attention(q, k, v, score=lambda s, b, h, i, j: s + table[h, j], backend=engine)
    learned.sum().backward()
    sink = tw.attention(q, k, v, score=scores.sinks(torch.ones(2)), return_lse=True, backend=engine)[1]
    assert (sink == (1.0 if lengths[1] == 0 else sink)).all()


# -- 14: a map of another length -------------------------------------------------------------------------------------


@pytest.mark.parametrize("covered", [(64, 64), (200, 200), (150, 64)])
def test_row_14_a_map_of_another_length_names_both(covered: tuple[int, int]) -> None:
    q, k, v = tensors()
    given = tw.tile_map(masks.causal, q_len=covered[0], kv_len=covered[1])
    with pytest.raises(tw.InputError) as error:
        tw.attention(q, k, v, mask=given)
    for number in (*covered, 150):
        assert str(number) in str(error.value)


def test_row_14_a_block_mask_of_another_length() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = tensors()
    with pytest.raises(tw.InputError, match="block_mask was created for a smaller length"):
        tw.attention(q, k, v, mask=create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu"))


def test_row_14_a_map_of_other_heads_or_batch() -> None:
    q, k, v = tensors(2, 3, 40, 8)
    given = tw.tile_map(lambda b, h, i, j: i + h + b >= j, batch=2, heads=2, q_len=40, kv_len=40)
    with pytest.raises(tw.InputError, match=r"batch 2 and 2 heads, the call has batch 2 and 3 heads"):
        tw.attention(q, k, v, mask=given)


@pytest.mark.parametrize("shape", [(64, 150), (150, 64), (3, 150, 150), (2, 1, 150, 150), (150, 149)])
def test_row_14_a_dense_mask_of_another_length(shape: tuple[int, ...]) -> None:
    q, k, v = tensors()
    for mask in (torch.ones(shape, dtype=torch.bool), torch.zeros(shape)):
        with pytest.raises(tw.InputError, match=re.escape(f"{shape} does not broadcast")):
            tw.attention(q, k, v, mask=mask)


@engines
def test_row_14_a_captured_table_that_is_too_short_reads_its_edge(engine: str) -> None:
    """As every load does; it never reads outside, and the tile map agrees with the mask."""
    q, k, v = tensors()
    short = torch.rand(20, 30) > 0.4
    clamped = short[torch.arange(150).clamp(max=19)[:, None], torch.arange(150).clamp(max=29)]
    torch.testing.assert_close(run(q, k, v, engine, mask=lambda b, h, i, j: short[i, j]), run(q, k, v, engine, mask=clamped))


# -- 15: bad offsets -------------------------------------------------------------------------------------------------

BAD_OFFSETS = {
    "not from 0": torch.tensor([1, 5, 9]),
    "backwards": torch.tensor([0, 6, 5, 9]),
    "past the tokens": torch.tensor([0, 5, 11]),
    "negative": torch.tensor([0, -1, 9]),
}


@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_row_15_bad_cu_seqlens(name: str) -> None:
    q, k, v = (torch.randn(9, 2, 4) for _ in range(3))
    with pytest.raises(tw.InputError, match=r"cu_seqlens_q must start at 0, never decrease and end at most at the 9 tokens given, got \["):
        tw.varlen_attention(q, k, v, BAD_OFFSETS[name])


@pytest.mark.parametrize(
    "offsets", [torch.tensor([0.0, 9.0]), torch.tensor([[0, 9]]), torch.tensor(0), torch.zeros(0, dtype=torch.int64), torch.tensor([False, True])]
)
def test_row_15_cu_seqlens_of_another_kind(offsets: Tensor) -> None:
    q, k, v = (torch.randn(9, 2, 4) for _ in range(3))
    with pytest.raises(tw.InputError, match="1-D int32 or int64 tensor with one more entry than sequences"):
        tw.varlen_attention(q, k, v, offsets)


def test_row_15_offsets_that_do_not_match() -> None:
    q, k, v = (torch.randn(9, 2, 4) for _ in range(3))
    with pytest.raises(tw.InputError, match="cu_seqlens_q describes 2 sequences, cu_seqlens_k 1"):
        tw.varlen_attention(q, k, v, torch.tensor([0, 4, 9]), torch.tensor([0, 9]))
    with pytest.raises(tw.InputError, match="query has 5 tokens and key 9: give cu_seqlens_k"):
        tw.varlen_attention(q[:5], k, v, torch.tensor([0, 5]))


# -- 17: mixed devices, dtypes and shapes ----------------------------------------------------------------------------


def test_row_17_mixed_devices() -> None:
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(tw.InputError, match="one device, got query on cpu, key on meta, value on cpu"):
        tw.attention(q, q.to("meta"), q)


def test_row_17_mixed_dtypes() -> None:
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(tw.InputError, match=r"one dtype .*, got query torch.float32, key torch.float16, value torch.float64"):
        tw.attention(q, q.half(), q.double())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_row_17_other_dtypes(dtype: torch.dtype) -> None:
    q = torch.zeros(1, 2, 5, 8, dtype=dtype)
    with pytest.raises(tw.InputError, match=rf"query has dtype {dtype}; allowed are float16, bfloat16, float32 and float64"):
        tw.attention(q, q, q)


BAD_SHAPES: dict[str, tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], str]] = {
    "head dims": (((1, 2, 5, 8), (1, 2, 5, 4), (1, 2, 5, 8)), r"same head dim, got .* query \(1, 2, 5, 8\), key \(1, 2, 5, 4\)"),
    "batches": (((2, 2, 5, 8), (3, 2, 5, 8), (3, 2, 5, 8)), r"batch size, or 1, got .* query \(2, 2, 5, 8\), key \(3, 2, 5, 8\)"),
    "key and value": (((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 6, 8)), r"same heads and length, got .* value \(1, 2, 6, 8\)"),
    "heads": (((1, 4, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)), r"same number of heads but got Hq=4 and Hkv=2. Try setting enable_gqa=True"),
    "head dim 0": (((1, 2, 5, 0), (1, 2, 5, 0), (1, 2, 5, 8)), r"head dims must be at least 1, got 0 for query and key"),
    "2 dimensions": (((5, 8), (5, 8), (5, 8)), r"query must have 4 dimensions \(layout 'bhsd'\), or 3 with heads=, got shape \(5, 8\)"),
    "3 dimensions": (((1, 5, 8), (1, 5, 8), (1, 5, 8)), r"query has 3 dimensions \(1, 5, 8\): pass heads="),
}


@pytest.mark.parametrize("name", BAD_SHAPES)
def test_row_17_mixed_shapes(name: str) -> None:
    shapes, message = BAD_SHAPES[name]
    with pytest.raises(tw.InputError, match=message):
        tw.attention(*(torch.zeros(s) for s in shapes))


def test_row_17_gqa_that_does_not_divide() -> None:
    with pytest.raises(tw.InputError, match="multiple of kv heads for GQA but got Hq=5 and Hkv=2"):
        tw.attention(torch.zeros(1, 5, 3, 8), torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), enable_gqa=True)


def test_row_17_other_arguments() -> None:
    q = torch.zeros(1, 2, 5, 8)
    flat = torch.zeros(1, 5, 16)
    for message, call in {
        "layout must be one of bhsd, bshd, hbsd, sbhd, got 'bdhs'": lambda: tw.attention(q, q, q, layout="bdhs"),
        "heads= is for 3-D tensors": lambda: tw.attention(q, q, q, heads=2),
        "16 features, which 3 heads do not divide": lambda: tw.attention(flat, flat, flat, heads=3),
        "scale must be a number, got a tensor that is learned": lambda: tw.attention(q, q, q, scale=torch.tensor(0.5, requires_grad=True)),
        "dropout_p must be from 0 to 1, got 1.5": lambda: tw.attention(q, q, q, dropout_p=1.5),
        r"seed must be from 0 to 2\*\*63 - 1, got -1": lambda: tw.attention(q, q, q, dropout_p=0.5, seed=-1),
        "seed must be an int or a tensor with one int64": lambda: tw.attention(q, q, q, dropout_p=0.5, seed=torch.zeros(2)),
        "one logit per query head: 2, got shape": lambda: tw.attention(q, q, q, score=scores.sinks(torch.zeros(3))),
        "at most one scores.sinks": lambda: tw.attention(q, q, q, score=[scores.sinks(torch.zeros(2))] * 2),
        "a mask tensor must be boolean": lambda: tw.attention(q, q, q, mask=torch.zeros(5, 5, dtype=torch.int64)),
        "mask must be a function": lambda: tw.attention(q, q, q, mask="causal"),
        r"may mean \(batch, keys\) or \(queries, keys\)": lambda: tw.attention(*[torch.zeros(5, 2, 5, 8)] * 3, mask=torch.ones(5, 5, dtype=torch.bool)),
        "is_causal=True with a map of tiles": lambda: tw.attention(q, q, q, mask=tw.tile_map(masks.causal, q_len=5, kv_len=5), is_causal=True),
    }.items():
        with pytest.raises(tw.InputError, match=message):
            call()
