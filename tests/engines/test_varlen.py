"""Packed sequences against a plain loop: one call of the reference per sequence."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import functional, masks, scores
from tilewise.core.map_cache import maps
from tilewise.frontend import packing

LENGTHS = {
    "equal": ([40, 40, 40], None),
    "uneven": ([3, 70, 1, 90, 17], None),
    "with empty ones": ([0, 30, 0, 0, 25, 0], None),
    "one": ([33], None),
    "none": ([], None),
    "cross": ([5, 60, 1, 40], [70, 3, 1, 20]),
    "cross with empty ones": ([5, 0, 20, 7], [0, 12, 30, 7]),
}


def offsets(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)


def packed(q_lengths: list[int], kv_lengths: list[int], heads: int = 2, kv_heads: int = 2, extra: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = ((sum(q_lengths) + extra, heads, 8), (sum(kv_lengths) + extra, kv_heads, 8), (sum(kv_lengths) + extra, kv_heads, 6))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in sizes]


def looped(q: Tensor, k: Tensor, v: Tensor, q_lengths: list[int], kv_lengths: list[int], **options: Any) -> tuple[Tensor, Tensor]:
    """(tokens, heads, D) and (heads, tokens), one sequence after the other; b is the sequence's number there, too."""
    outs, lses = [q[:0, :, :1].expand(-1, -1, v.shape[2])], [q[:0, :, 0].T]
    i = j = 0
    for number, (m, n) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        part = [t[None].transpose(1, 2) for t in (q[i : i + m], k[j : j + n], v[j : j + n])]
        i, j = i + m, j + n
        given = {name: within(number, f) for name, f in options.items() if name in ("mask", "score") and f is not None}
        out, lse = tw.attention(*part, enable_gqa=True, return_lse=True, backend="reference", **(options | given))
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def within(number: int, given: Any) -> Any:
    """A mask or score, or several, with b fixed to a sequence's number."""
    if isinstance(given, list):
        return [within(number, f) for f in given]
    if isinstance(given, scores.Sinks):
        return given
    return lambda *args: given(*args[:-4], args[-4] * 0 + number, *args[-3:])


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...], leaves: list[Tensor]) -> None:
    """Outputs, and gradients of both outputs together."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    weights = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape) for t in expected]
    every = []
    for outputs in (found, expected):
        kept = [(torch.where(t == -torch.inf, 0.0, t) * w).sum() for t, w in zip(outputs, weights, strict=True)]
        every.append(torch.autograd.grad(sum(kept), leaves, allow_unused=True))
    for one, other in zip(*every, strict=True):
        one, other = (torch.zeros(()) if g is None else g for g in (one, other))
        torch.testing.assert_close(one, other.expand_as(one).to(one.dtype), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("engine", ["blocked", "cpp", "reference"])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_is_a_loop_over_sequences(name: str, engine: str, is_causal: bool) -> None:
    q_lengths, kv_lengths = LENGTHS[name]
    kv = q_lengths if kv_lengths is None else kv_lengths
    q, k, v = packed(q_lengths, kv)
    given = (offsets(q_lengths), None if kv_lengths is None else offsets(kv))
    found = tw.varlen_attention(q, k, v, *given, is_causal=is_causal, return_lse=True, backend=engine)
    assert_same(found, looped(q, k, v, q_lengths, kv, is_causal=is_causal), [q, k, v])


@pytest.mark.parametrize("engine", ["blocked", "cpp", "reference"])
@pytest.mark.parametrize("heads", [(4, 2), (6, 1)])
def test_packed_gqa(engine: str, heads: tuple[int, int]) -> None:
    lengths = [3, 70, 1, 90]
    q, k, v = packed(lengths, lengths, *heads)
    found = tw.varlen_attention(q, k, v, offsets(lengths), enable_gqa=True, is_causal=True, return_lse=True, backend=engine)
    assert_same(found, looped(q, k, v, lengths, lengths, is_causal=True), [q, k, v])


@pytest.mark.parametrize("engine", ["blocked", "cpp", "reference"])
def test_masks_and_scores_see_positions_inside_their_sequence(engine: str) -> None:
    q_lengths, kv_lengths = [5, 60, 1, 40], [70, 30, 1, 50]
    q, k, v = packed(q_lengths, kv_lengths)
    bias, gain = torch.randn(2, 80, dtype=torch.float64, requires_grad=True), torch.randn(4, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    reach = torch.tensor([20, 5, 0, 40])

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j).abs() <= reach[b] + h

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * gain[b] + bias[h, j] - bias[h, i] * (i - j) / 50.0

    options: dict[str, Any] = {"mask": mask, "score": [score, scores.softcap(3.0), scores.sinks(sink)], "scale": 0.4}
    found = tw.varlen_attention(q, k, v, offsets(q_lengths), offsets(kv_lengths), return_lse=True, backend=engine, **options)
    assert_same(found, looped(q, k, v, q_lengths, kv_lengths, **options), [q, k, v, bias, gain, sink])


def test_masks_of_the_library() -> None:
    lengths = [30, 70, 12]
    q, k, v = packed(lengths, lengths)
    for mask in (masks.causal & masks.sliding_window(9), masks.prefix_lm(4), masks.full, masks.padding(torch.tensor([10, 70, 0]))):
        found = tw.varlen_attention(q, k, v, offsets(lengths), mask=mask, return_lse=True, backend="blocked")
        assert_same(found, looped(q, k, v, lengths, lengths, mask=mask), [q, k, v])


@pytest.mark.parametrize("engine", ["blocked", "cpp", "reference"])
def test_tokens_after_the_last_offset_give_zero(engine: str) -> None:
    lengths = [30, 70]
    q, k, v = packed(lengths, lengths, extra=50)
    spoilt = [t.detach().clone() for t in (q, k, v)]
    for t in spoilt:
        t[100:] = torch.nan
        t.requires_grad_()
    out, lse = tw.varlen_attention(*spoilt, offsets(lengths), return_lse=True, backend=engine)
    assert (out[100:] == 0).all() and (lse[:, 100:] == -torch.inf).all()
    expected = looped(q, k, v, lengths, lengths)
    torch.testing.assert_close((out[:100], lse[:, :100]), expected, rtol=1e-9, atol=1e-10)
    for gradient in torch.autograd.grad(out.sum(), spoilt):
        assert gradient.isfinite().all() and (gradient[100:] == 0).all()


def test_offsets_of_either_integer() -> None:
    lengths = [4, 9]
    q, k, v = packed(lengths, lengths)
    one, other = (tw.varlen_attention(q, k, v, offsets(lengths, dtype), backend="blocked") for dtype in (torch.int32, torch.int64))
    assert torch.equal(one, other)


def test_dropout_is_seeded() -> None:
    lengths = [30, 70]
    q, k, v = packed(lengths, lengths)
    runs = ((1, "blocked"), (1, "reference"), (2, "blocked"))
    one, other, third = (tw.varlen_attention(q, k, v, offsets(lengths), dropout_p=0.5, seed=seed, backend=engine) for seed, engine in runs)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    assert not torch.allclose(one, third)


def test_no_tile_between_sequences_is_computed() -> None:
    """32 sequences of 256 tokens: each has its own 2 x 2 tiles of 128, of 64 x 64."""
    nested = torch.nested.nested_tensor([torch.randn(256, 1, 8) for _ in range(32)], layout=torch.jagged)
    found = tw.explain(nested, nested, nested, layout="bshd", backend="blocked")
    assert (found.computed_tiles, found.skipped_tiles) == (32 * 4, 64 * 64 - 32 * 4)
    causal = tw.explain(nested, nested, nested, layout="bshd", is_causal=True, backend="blocked")
    assert causal.computed_tiles == 32 * 3
    assert found.flops == 2 * 16 * 32 * 256 * 256


# -- nested tensors --------------------------------------------------------------------------------------------------


def nested(lengths: list[int], layout: str, heads: int = 2, dim: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The packed tokens (a leaf) and a jagged view of them in the layout."""
    tokens = torch.randn(sum(lengths), heads, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
    jagged = torch.nested.nested_tensor_from_jagged(tokens, offsets(lengths, torch.int64))
    return tokens, jagged if layout == "bshd" else jagged.transpose(1, 2)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("engine", ["blocked", "cpp", "reference"])
def test_nested_is_packed(layout: str, engine: str) -> None:
    lengths, kv_lengths = [3, 70, 1, 90], [10, 4, 20, 30]
    (q, nested_q), (k, nested_k), (v, nested_v) = (
        nested(n, layout, heads, dim, seed) for seed, (n, heads, dim) in enumerate(((lengths, 4, 8), (kv_lengths, 2, 8), (kv_lengths, 2, 6)))
    )
    options: dict[str, Any] = {"mask": masks.sliding_window(20), "score": scores.softcap(2.0)}
    out = tw.attention(nested_q, nested_k, nested_v, layout=layout, enable_gqa=True, backend=engine, **options)
    assert out.is_nested and out.layout == torch.jagged and out.shape[0] == 4
    values = (out if layout == "bshd" else out.transpose(1, 2)).values()
    expected, _ = looped(q, k, v, lengths, kv_lengths, **options)
    assert_same((values,), (expected,), [q, k, v])


def test_nested_of_torchs_own_making() -> None:
    parts = [torch.randn(n, 2, 8) for n in (5, 9, 1)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    out = tw.attention(jagged, jagged, jagged, layout="bshd", is_causal=True)
    for part, found in zip(parts, out.unbind(), strict=True):
        expected = tw.attention(*[part[None]] * 3, layout="bshd", is_causal=True, backend="reference")
        torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-5)
    out.values().sum().backward()
    assert jagged.grad is not None and jagged.grad.is_nested


def strided(*parts: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([part[0] for part in parts])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("engine", ["blocked", "cpp", "reference"])
def test_strided_nested_tensors_come_back_strided(engine: str, is_causal: bool) -> None:
    parts = [[torch.randn(2, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 0, 9, 1)] for _ in range(3)]
    q, k, v = (torch.nested.as_nested_tensor(p) for p in parts)
    with tw.attention_backend(engine):
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert out.is_nested and out.layout == torch.strided and out.dim() == 4
    expected = [torch.nn.functional.scaled_dot_product_attention(*p, is_causal=is_causal) for p in zip(*parts, strict=True)]
    assert_same(tuple(out.unbind()), tuple(expected), [p[2] for p in parts])


BAD_NESTED: dict[str, Any] = {
    "return_lse is not available for nested tensors": lambda n, d: tw.attention(n, n, n, layout="bshd", return_lse=True),
    "take layout 'bhsd' or 'bshd', got 'sbhd'": lambda n, d: tw.attention(n, n, n, layout="sbhd"),
    "must all be 4-D nested tensors .*, got key: 4-D, not nested": lambda n, d: tw.attention(n, d, d, layout="bshd"),
    "must all be 4-D nested tensors .*, got query: 4-D, not nested": lambda n, d: tw.attention(d, n, n, layout="bshd"),
    "got key: 4-D, nested, layout torch.strided": lambda n, d: tw.attention(n, strided(d, d), n, layout="bshd"),
    "sequences of query must have the same heads": lambda n, d: tw.attention(*[strided(d, d[:, :, :1])] * 3, layout="bshd"),
    "take a mask function or a mask of tilewise.masks": lambda n, d: tw.attention(n, n, n, layout="bshd", mask=torch.ones(14, 14, dtype=torch.bool)),
    "query has 1 sequences, key and value have 2": lambda n, d: tw.attention(nested([14], "bshd")[1], n, n, layout="bshd"),
    "key and value must have the same sequence lengths": lambda n, d: tw.attention(n, n, nested([9, 5], "bshd")[1], layout="bshd"),
}


@pytest.mark.parametrize("message", BAD_NESTED)
def test_bad_nested_input(message: str) -> None:
    with pytest.raises(tw.InputError, match=message):
        BAD_NESTED[message](nested([5, 9], "bshd")[1], torch.randn(2, 9, 2, 8, dtype=torch.float64))


def test_a_map_or_tensor_is_no_mask_of_packed_sequences() -> None:
    q, k, v = packed([5, 9], [5, 9])
    for mask in (tw.tile_map(masks.causal, q_len=14, kv_len=14), torch.ones(14, 14)):
        with pytest.raises(tw.InputError, match="positions inside each sequence"):
            tw.varlen_attention(q, k, v, offsets([5, 9]), mask=mask)


def test_tokens_must_have_three_dimensions() -> None:
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(tw.InputError, match=r"query must be \(tokens, heads, head dim\), got shape \(1, 2, 9, 8\)"):
        tw.varlen_attention(q, q, q, offsets([9]))


# -- what is made once -----------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every set of index tensors, after everything was forgotten."""
    found: list[int] = []
    original = packing.sequence_and_position

    def counted(offsets: Tensor, tokens: int) -> Any:
        found.append(tokens)
        return original(offsets, tokens)

    monkeypatch.setattr(packing, "sequence_and_position", counted)
    packing._known.clear()
    maps.clear()
    return found


CALLS: dict[str, Any] = {
    "alone": {},
    "causal": {"is_causal": True},
    "a mask": {"mask": masks.sliding_window(5)},
    "a function": {"mask": lambda b, h, i, j: i - j < 4},
    "a score": {"score": scores.softcap(2.0), "is_causal": True},
}


def in_turn(lengths: list[int], backend: str = "blocked", **options: Any) -> tuple[list[Tensor], Tensor]:
    """Tokens, and what attention within each sequence gives them."""
    q, k, v = (t.detach() for t in packed(lengths, lengths))
    return [q, k, v], looped(q, k, v, lengths, lengths, **options)[0]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("engine", ["blocked", "cpp"])
def test_layers_share_index_tensors_and_map(name: str, engine: str, made: list[int]) -> None:
    lengths = [30, 70, 12]
    tokens, wanted = in_turn(lengths, **CALLS[name])
    cu, before = offsets(lengths), maps.built
    for layer in range(4):
        found = tw.varlen_attention(*[t.clone() for t in tokens], cu, backend=engine, **CALLS[name])
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
        assert (len(made), maps.built - before) == (1, 1), layer


def test_another_layout_is_another_map(made: list[int]) -> None:
    cu = offsets([30, 70, 12])
    for lengths, change in (
        ([30, 70, 12], lambda n: None),
        ([50, 50, 12], lambda n: cu.copy_(offsets(n))),
        ([20, 80, 12], lambda n: setattr(cu, "data", offsets(n))),
        ([20, 80, 12], lambda n: setattr(cu, "data", offsets(n, torch.int64))),
        ([100, 12], lambda n: setattr(cu, "data", offsets(n))),
    ):
        change(lengths)
        tokens, wanted = in_turn(lengths, is_causal=True)
        for _ in range(2):
            torch.testing.assert_close(tw.varlen_attention(*tokens, cu, is_causal=True, backend="blocked"), wanted, rtol=1e-9, atol=1e-10)
    assert len(made) == 5


def test_other_options_with_the_same_offsets() -> None:
    lengths = [30, 70, 12]
    cu = offsets(lengths)
    for options in (*CALLS.values(), *CALLS.values()):
        tokens, wanted = in_turn(lengths, **options)
        torch.testing.assert_close(tw.varlen_attention(*tokens, cu, backend="blocked", **options), wanted, rtol=1e-9, atol=1e-10)


def test_other_numbers_of_tokens_with_the_same_offsets() -> None:
    """The tokens after the last sequence attend to nothing; a longer key with the query's offsets is no self-attention."""
    lengths = [30, 12]
    cu = offsets(lengths)
    (q, k, v), wanted = in_turn(lengths, is_causal=True)
    more = lambda t: torch.cat([t, torch.full_like(t[:8], torch.nan)])
    for _ in range(2):
        for given in ((q, k, v), (more(q), more(k), more(v)), (q, more(k), more(v)), (more(q), k, v)):
            found = tw.varlen_attention(*given, cu, cu, is_causal=True, backend="blocked")
            torch.testing.assert_close(found[:42], wanted, rtol=1e-9, atol=1e-10)
            assert (found[42:] == 0).all()


def test_wrong_offsets_are_told_every_time_and_after_right_ones() -> None:
    (q, k, v), _ = in_turn([30, 12])
    cu = offsets([30, 12])
    tw.varlen_attention(q, k, v, cu, backend="blocked")
    for wrong in ([0, 30, 20], [1, 30, 42], [0, 30, 43]):
        cu.copy_(torch.tensor(wrong))
        for _ in range(2):
            with pytest.raises(tw.InputError, match=r"cu_seqlens_q must start at 0, never decrease and end at most at the 42 tokens given, got \["):
                tw.varlen_attention(q, k, v, cu, backend="blocked")
    good = offsets([30, 12])
    tw.varlen_attention(q, k, v, good, good, backend="blocked")
    with pytest.raises(tw.InputError, match="cu_seqlens_k must start at 0"):
        tw.varlen_attention(q, k[:40], v[:40], good, good, backend="blocked")


def test_what_is_made_for_sizes_is_checked_with_every_mask() -> None:
    (q, k, v), _ = in_turn([30, 12])
    cu = offsets([30, 12])
    for _ in range(2):
        tw.varlen_attention(q, k, v, cu, score=scores.bias(torch.zeros(30, 30)), backend="blocked")
        with pytest.raises(tw.InputError, match="sequences of up to 20 queries, the longest here has 30"):
            tw.varlen_attention(q, k, v, cu, score=scores.bias(torch.zeros(20, 30)), backend="blocked")
    cu.copy_(offsets([42, 0]))
    with pytest.raises(tw.InputError, match="sequences of up to 30 queries, the longest here has 42"):
        tw.varlen_attention(q, k, v, cu, score=scores.bias(torch.zeros(30, 30)), backend="blocked")


def test_offsets_are_not_kept_alive(made: list[int]) -> None:
    (q, k, v), _ = in_turn([30, 12])
    for step in range(6):
        cu = offsets([30 - step, 12 + step])
        tw.varlen_attention(q, k, v, cu, backend="blocked")
        held = weakref.ref(cu)
        del cu
        gc.collect()
        assert held() is None
    assert len(packing._known) <= 1 and len(made) == 6


def test_layers_share_a_map_in_inference_mode(made: list[int]) -> None:
    tokens, wanted = in_turn([30, 12])
    cu, before = offsets([30, 12]), maps.built
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(tw.varlen_attention(*tokens, cu, backend="blocked"), wanted, rtol=1e-9, atol=1e-10)
        assert (len(made), maps.built - before) == (1, 1)
        inner = offsets([20, 22])  # has no version: it is looked at every time
        for lengths in ([20, 22], [10, 32]):
            inner.copy_(offsets(lengths))
            tokens, wanted = in_turn(lengths)
            torch.testing.assert_close(tw.varlen_attention(*tokens, inner, backend="blocked"), wanted, rtol=1e-9, atol=1e-10)


def test_nested_layers_share_a_map(made: list[int]) -> None:
    _, q = nested([30, 12], "bshd")
    before = maps.built
    for _ in range(3):
        q = tw.attention(q, q, q, layout="bshd", is_causal=True, backend="blocked")
    assert maps.built - before == 1 and len(made) == 1


def test_offsets_changed_past_the_version_counter() -> None:
    """As numpy and collectives of torch.distributed do."""
    memory = np.array([0, 10, 32], dtype=np.int32)
    given = torch.from_numpy(memory)
    x = torch.randn(32, 2, 8)
    for first in (10, 25):
        memory[1] = first
        assert torch.equal(tw.varlen_attention(x, x, x, given), tw.varlen_attention(x, x, x, given.clone()))
    memory[1] = 40
    with pytest.raises(tw.TilewiseError, match="never decrease"):
        tw.varlen_attention(x, x, x, given)
