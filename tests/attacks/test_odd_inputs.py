"""Tensors and numbers of odd kinds: an answer, or an error that says what is allowed."""

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise import masks, scores
from tilewise.core import problem
from tilewise.distributed import run
from tilewise.errors import InputError, TilewiseError
from tilewise.flex import flex_attention
from tilewise.frontend.dispatch import observers
from tilewise.functional import scaled_dot_product_attention
from tilewise.tiles import Geometry, TileMap
from tilewise.tiles.runs import from_dense

X = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(0))
META = X.to("meta")
WAYS: dict[str, Callable[..., Any]] = {
    "attention": tw.attention,
    "cpp": lambda *t, **options: tw.attention(*t, backend="cpp", **options),
    "blocked": lambda *t, **options: tw.attention(*t, backend="blocked", **options),
    "functional": scaled_dot_product_attention,
    "flex": flex_attention,
}
ways = pytest.mark.parametrize("way", WAYS)


# -- scale -----------------------------------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("scale", [np.array(0.5), np.float32(0.5), np.float64(0.5), Decimal("0.5"), torch.tensor(0.5)], ids=lambda s: type(s).__name__)
def test_scale_may_be_a_number_of_any_library(way: str, scale: Any) -> None:
    for _ in range(2):  # the second is a cached call
        assert torch.equal(WAYS[way](X, X, X, scale=scale), WAYS[way](X, X, X, scale=0.5))
    assert torch.equal(WAYS[way](X, X, X, scale=np.int64(2)), WAYS[way](X, X, X, scale=2))


@ways
@pytest.mark.parametrize("scale", ["0.5", b"1", [0.5], 1j, np.array([0.5, 1]), torch.ones(1), torch.tensor(0.5, requires_grad=True), META[0, 0, 0, 0]], ids=str)
def test_scale_is_a_number(way: str, scale: Any) -> None:
    with pytest.raises(tw.InputError, match="scale must be a number"):
        WAYS[way](X, X, X, scale=scale)


# -- seed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [3.5, 3.0, "x", True, [3], np.float64(3), torch.tensor(3.0), torch.tensor([3, 4])], ids=str)
@pytest.mark.parametrize("before", ["the first call", "a known call"])
def test_a_seed_is_a_whole_number(seed: Any, before: str) -> None:
    if before == "a known call":
        tw.attention(X, X, X, dropout_p=0.5, seed=3)
    with pytest.raises(tw.InputError, match="seed must be an int or a tensor with one int64, got"):
        tw.attention(X, X, X, dropout_p=0.5, seed=seed)


def test_a_seed_without_dropout_is_looked_at_too() -> None:
    problem.seed_tensor(3, 0.0, X.device)
    with pytest.raises(tw.InputError, match="seed must be an int"):
        problem.seed_tensor("x", 0.0, X.device)


@pytest.mark.parametrize("seed", [3.5, "x", True], ids=str)
def test_a_seed_that_ranks_share_is_a_whole_number(seed: Any) -> None:
    assert run._seed(np.int64(3)) == run._seed(torch.tensor(3)) == 3
    with pytest.raises(tw.InputError, match="seed must be an int or a tensor with one int64, got"):
        run._seed(seed)


def test_a_seed_may_be_numpys() -> None:
    expected = tw.attention(X, X, X, dropout_p=0.5, seed=3)
    for seed in (np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor([3])):
        assert torch.equal(tw.attention(X, X, X, dropout_p=0.5, seed=seed), expected)


# -- layouts ---------------------------------------------------------------------------------------------------------

SPARSE = {"coo": X.to_sparse(), "hybrid": X.to_sparse(2), "mkldnn": X.to_mkldnn()}
USES: dict[str, Callable[[Any], Any]] = {
    "query": lambda t: tw.attention(t, t, t),
    "value": lambda t: tw.attention(X, X, t, backend="cpp"),
    "drop-in": lambda t: scaled_dot_product_attention(t, t, t),
    "flex": lambda t: flex_attention(X, t, X),
    "mask": lambda t: tw.attention(X, X, X, mask=t),
    "attn_mask": lambda t: scaled_dot_product_attention(X, X, X, attn_mask=t),
    "score's capture": lambda t: tw.attention(X, X, X, score=lambda s, b, h, i, j: s + t[b, h, i, j]),
    "mask's capture": lambda t: tw.attention(X, X, X, mask=lambda b, h, i, j: t[b, h, i, j] > 0),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("layout", SPARSE)
def test_sparse_tensors_are_refused(use: str, layout: str) -> None:
    with pytest.raises(TilewiseError, match=r"layout torch\.(sparse_coo|_mkldnn).*to_dense"):
        USES[use](SPARSE[layout])


def test_sparse_sinks_and_lengths_are_refused() -> None:
    with pytest.raises(TilewiseError, match="sinks has layout"):
        tw.attention(X, X, X, score=scores.sinks(torch.ones(2).to_sparse()))
    with pytest.raises(TilewiseError, match="cu_seqlens_q has layout"):
        tw.varlen_attention(X[0], X[0], X[0], torch.tensor([0, 2]).to_sparse())


# -- tensors without contents ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", [{}, {"mask": masks.causal}, {"mask": torch.ones(8, 8, device="meta")}, {"score": scores.alibi(2)}], ids=str)
def test_meta_tensors_give_shapes(options: dict[str, Any], autocast: bool) -> None:
    query = META.clone().requires_grad_()
    with torch.autocast("cpu", enabled=autocast):
        out = tw.attention(query, META, META, **options)
        dropped_in = scaled_dot_product_attention(query, META, META, attn_mask=options.get("mask"))
        assert tw.explain(query, META, META, **options).engine is not None
    assert out.is_meta and out.shape == X.shape and dropped_in.shape == X.shape
    (gradient,) = torch.autograd.grad(out, query, torch.empty_like(out))
    assert gradient.is_meta and gradient.shape == X.shape


def test_what_has_no_contents_cannot_be_captured() -> None:
    bias = torch.ones(2, device="meta")
    for options in ({"score": lambda s, b, h, i, j: s + bias[h]}, {"mask": lambda b, h, i, j: bias[h] > 0}, {"score": scores.sinks(bias)}):
        with pytest.raises(tw.InputError, match="is on the meta device, so it has no contents, but the query is on cpu"):
            tw.attention(X, X, X, **options)
    with pytest.raises(tw.InputError, match="cu_seqlens_q is on the meta device"):
        tw.varlen_attention(X[0], X[0], X[0], torch.tensor([0, 2], device="meta"))


@pytest.mark.parametrize("tensor", [META, X.to(torch.complex64), X.int(), X.bool()], ids=["meta", "complex64", "int32", "bool"])
def test_one_of_another_kind_is_refused(tensor: torch.Tensor) -> None:
    for given in ((X, tensor, X), (X, X, tensor), (tensor, X, X)):
        with pytest.raises(tw.InputError, match=r"must be on one device|must have one dtype"):
            tw.attention(*given)
    if not tensor.is_meta:
        with pytest.raises(tw.InputError, match="allowed are float16, bfloat16, float32 and float64"):
            tw.attention(tensor, tensor, tensor)


def test_another_default_device_does_not_move_the_engines_memory() -> None:
    """The C++ engine wrote to memory that was none."""
    x = [torch.randn(1, 2, 24, 8, requires_grad=True) for _ in range(3)]
    expected = tw.attention(*x, backend="reference", is_causal=True)
    with torch.device("meta"):
        for _ in range(2):
            found = tw.attention(*x, backend="cpp", is_causal=True)
            gradients = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), x))


@pytest.mark.parametrize("backend", ["blocked", "cpp"])
def test_a_given_map_changed_before_the_backward_is_an_error(backend: str) -> None:
    x = [torch.randn(1, 2, 128, 8, requires_grad=True) for _ in range(3)]
    tiles = torch.eye(2, dtype=torch.bool)
    given = TileMap(Geometry(1, 1, 128, 128, (64, 64)), from_dense(tiles & False), from_dense(tiles), None, given=True)
    out = tw.attention(*x, mask=given, backend=backend)
    given.full.start[0] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_options_that_are_tensors_are_read_in_every_call() -> None:
    x = [torch.randn(1, 2, 64, 8) for _ in range(3)]
    p, causal = torch.tensor(0.0), torch.tensor(False)
    call = lambda: tw.attention(*x, dropout_p=p, is_causal=causal, seed=1, backend="blocked")
    for probability, is_causal in ((0.0, False), (0.5, False), (0.0, True)):
        p.fill_(probability)
        causal.fill_(is_causal)
        assert torch.equal(call(), tw.attention(*x, dropout_p=probability, is_causal=is_causal, seed=1, backend="blocked"))
    assert torch.equal(tw.attention(*x, dropout_p=np.array(0.0), is_causal=np.bool_(True), backend="blocked"), call())


def test_a_map_whose_masks_tensors_had_to_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map may be on the query's device and its mask's tensors on another: every call moves them. The move is imitated by a copy."""
    ids = torch.arange(256) // 40
    tiles = tw.tile_map(masks.document(ids), q_len=256, kv_len=256)
    moved = problem.moved
    monkeypatch.setattr(problem, "moved", lambda t, device, name: t.clone() if "captures" in name else moved(t, device, name))
    x = torch.randn(1, 2, 256, 8)
    bound: list[bool] = []
    watch = lambda served: bound.append(served.problem.mask.captures[0] is ids)
    observers.append(watch)
    try:
        for _ in range(3):
            tw.attention(x, x, x, mask=tiles, backend="blocked")
    finally:
        observers.remove(watch)
    assert bound == [False] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": "0.1"}, "dropout_p must be a number"),
        ({"dropout_p": None}, "dropout_p must be a number"),
        ({"dropout_p": torch.tensor([0.1, 0.2])}, "dropout_p must be a number"),
        ({"dropout_p": torch.tensor(0.1, device="meta")}, "dropout_p must be a number"),
        ({"is_causal": "yes"}, "is_causal must be True or False"),
        ({"is_causal": torch.tensor([True, False])}, "is_causal must be True or False"),
        ({"deterministic": torch.tensor(True, device="meta")}, "deterministic must be True or False"),
    ],
)
def test_options_of_no_meaning(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TilewiseError, match=message):
        tw.attention(X, X, X, **options)


@pytest.mark.parametrize("make", [scores.sinks, scores.distance_decay, lambda t: lambda s, b, h, q, kv: s + t[h]], ids=["sinks", "library", "own"])
def test_tensors_whose_memory_was_freed(make: Callable[[torch.Tensor], Any]) -> None:
    """As FSDP does with the parameters of a module whose forward has ended. Known calls come to the same end."""
    rates = torch.rand(2)
    score = make(rates)
    for _ in range(2):
        tw.attention(X, X, X, score=score)
    rates.untyped_storage().resize_(0)
    for again in (score, make(rates)):
        with pytest.raises(tw.InputError, match="it was freed"):
            tw.attention(X, X, X, score=again)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("lengths", [(100, 300), (300, 100), (77, 77)])
@pytest.mark.parametrize("corner", ["causal_upper_left", "causal_lower_right"])
def test_torchs_causal_bias_is_a_mask_everywhere(corner: str, lengths: tuple[int, int], heads: int) -> None:
    """It is a tensor whose memory was never written."""
    from torch.nn.attention import bias

    torch.manual_seed(0)
    q, k = (torch.randn(2, heads, n, 16) for n in lengths)
    mask = getattr(bias, corner)(*lengths)
    wanted = tw.attention(q, k, k, mask=masks.causal if corner == "causal_upper_left" else masks.causal_lower_right(*lengths), backend="reference")
    found = [
        tw.attention(q, k, k, mask=mask),
        tw.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask),
        tw.flex.flex_attention(q, k, k, block_mask=mask),
    ]
    for out in found:
        torch.testing.assert_close(out, wanted)
    both = masks.causal if corner == "causal_upper_left" else masks.causal_lower_right(*lengths) & masks.causal
    torch.testing.assert_close(tw.attention(q, k, k, mask=mask, is_causal=True), tw.attention(q, k, k, mask=both, backend="reference"))
    assert "causal" in str(tw.explain(q, k, k, mask=mask))


def test_a_causal_bias_of_other_lengths_is_an_error() -> None:
    from torch.nn.attention.bias import causal_lower_right

    q = torch.randn(1, 2, 20, 8)
    with pytest.raises(InputError, match="is made for 10 queries"):
        tw.attention(q, q, q, mask=causal_lower_right(10, 20))
