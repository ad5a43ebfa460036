"""Models that call torch's scaled_dot_product_attention themselves: intercept_sdpa and route."""

import copy
import io
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tests.support.compare import check, engine_of, normal, reached, seeded, served_by_flex
from tilewise.integrations import route, unroute

LENGTH, WIDTH = 24, 16


class Attention(nn.Module):
    """The least there is: projections and one SDPA call."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        return x + functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


class Blocks(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **options) if self.checkpointed else block(x, **options)
        return x


def blocks(**options: Any) -> Blocks:
    with seeded():
        return Blocks(**options)


def x_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(2, LENGTH, WIDTH, seed=3, dtype=dtype)


def keep() -> Tensor:
    return torch.arange(LENGTH) < torch.tensor([[LENGTH], [10]])


MASKS = {
    "none": lambda dtype: {},
    "causal": lambda dtype: {"is_causal": True},
    "scale of 0": lambda dtype: {"scale": 0.0},
    "scale of 1": lambda dtype: {"scale": 1.0},
    "boolean keys": lambda dtype: {"attn_mask": keep()[:, None, None, :]},
    "boolean (queries, keys)": lambda dtype: {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(2)},
    "-10000": lambda dtype: {"attn_mask": torch.where(keep(), 0.0, -10000.0)[:, None, None, :].to(dtype)},
    "finfo.min": lambda dtype: {"attn_mask": torch.where(keep(), 0.0, torch.finfo(torch.float32).min)[:, None, None, :].to(dtype)},
    "-inf": lambda dtype: {"attn_mask": torch.where(keep(), 0.0, -torch.inf)[:, None, None, :].to(dtype)},
    "0 and 1, added": lambda dtype: {"attn_mask": keep()[:, None, None, :].to(dtype)},
    "by head": lambda dtype: {"attn_mask": normal(1, 2, LENGTH, LENGTH, seed=9, dtype=torch.float32).gt(-1).logical_or(torch.eye(LENGTH) > 0)},
    "added by head": lambda dtype: {"attn_mask": normal(2, 2, LENGTH, LENGTH, seed=9, dtype=dtype)},
    "a row of -10000 only": lambda dtype: {"attn_mask": torch.where(torch.arange(LENGTH)[:, None] < 5, -10000.0, 0.0).expand(LENGTH, LENGTH).to(dtype)},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("how", ["intercept", "route"])
def test_as_torch_computes_it(name: str, how: str) -> None:
    scope = (lambda model: tw.intercept_sdpa()) if how == "intercept" else route
    watched = check(blocks(), lambda model, dtype: model(x_of(dtype), **MASKS[name](dtype)), scope)
    reached(watched)


def test_one_head_of_512_and_other_values() -> None:
    """As in autoencoders, and in models whose values have a size of their own."""
    for head_dim, v_dim in ((512, 512), (24, 12)):
        q, k = normal(2, 1, LENGTH, head_dim, seed=0, dtype=torch.float32), normal(2, 1, LENGTH, head_dim, seed=1, dtype=torch.float32)
        v = normal(2, 1, LENGTH, v_dim, seed=2, dtype=torch.float32)
        expected = functional.scaled_dot_product_attention(q, k, v)
        with tw.intercept_sdpa("flex"):
            torch.testing.assert_close(functional.scaled_dot_product_attention(q, k, v), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "flex", "native", "math", "blocked"])
@pytest.mark.parametrize("name", ["none", "-10000", "boolean keys", "added by head"])
def test_the_backend_is_obeyed(backend: str, name: str) -> None:
    model, options = blocks(), MASKS[name](torch.float32)
    expected = model(x_of(), **options)
    with tw.intercept_sdpa(backend), tw.watch(model) as watched:
        found = model(x_of(), **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if backend == "auto" and name != "none":
        served_by_flex(watched)
    elif backend == "flex":
        reached(watched)
    else:
        assert watched.engines == {engine_of(backend): 2}, str(watched)


def test_nothing_stays_behind() -> None:
    model = blocks()
    before = functional.scaled_dot_product_attention, [dict(m._forward_hooks) | dict(m._forward_pre_hooks) for m in model.modules()]
    with tw.intercept_sdpa(), route(model):
        model(x_of())
    with pytest.raises(RuntimeError), tw.intercept_sdpa(), route(model):
        model(x_of()[:, :, :3])
    after = functional.scaled_dot_product_attention, [dict(m._forward_hooks) | dict(m._forward_pre_hooks) for m in model.modules()]
    assert after == before and _get_current_function_mode_stack() == []
    with tw.watch(model) as watched:
        model(x_of())
    assert watched.engines == {} and len(watched.bypassing) == 2


def test_other_threads_are_left_alone() -> None:
    model, seen = blocks(), []

    def elsewhere() -> None:
        with tw.watch(model) as watched:
            model(x_of())
        seen.append(watched)

    with tw.intercept_sdpa():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert seen[0].engines == {}


def test_a_route_holds_where_activations_are_computed_again() -> None:
    model = blocks(checkpointed=True)
    with route(model, "blocked"), tw.watch(model) as watched:
        model(x_of().requires_grad_()).sum().backward()
    assert watched.engines == {"blocked": 4} and not watched.bypassing  # forward and once more in the backward


def test_a_routed_model_can_be_copied_and_saved() -> None:
    model = blocks()
    expected = model(x_of())
    route(model, "blocked")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        with tw.watch(other) as watched:
            torch.testing.assert_close(other(x_of()), expected, rtol=1e-5, atol=1e-5)
        assert watched.engines == {"blocked": 2}
    unroute(model)
    with tw.watch(model) as watched:
        model(x_of())
    assert watched.engines == {}


def test_routes_can_differ_within_a_model() -> None:
    model = blocks()
    with route(model, "math"), route(model.blocks[1], "blocked"), tw.watch(model) as watched:
        model(x_of())
    assert [layer.engines for layer in watched.layers] == [["reference"], ["blocked"]]


def test_a_model_can_be_routed_anew() -> None:
    model = blocks()
    route(model, "math")
    with route(model, "blocked"), tw.watch(model) as watched:
        model(x_of())
    assert watched.engines == {"blocked": 2}


def test_mistakes_are_told() -> None:
    with pytest.raises(tw.InputError, match=r"route takes a model .* got dict"):
        route({})
    with pytest.raises(tw.BackendError, match="unknown backend 'fast'"):
        route(blocks(), "fast")
    with pytest.raises(tw.BackendError, match="unknown backend 'fast'"):
        tw.intercept_sdpa("fast")
    with tw.intercept_sdpa(), pytest.raises(tw.InputError, match="does not broadcast"):
        blocks()(x_of(), attn_mask=torch.ones(3, LENGTH, dtype=torch.bool))


def test_under_torch_compile() -> None:
    model = blocks()
    expected = model(x_of())
    compiled = torch.compile(lambda q: functional.scaled_dot_product_attention(q, q, q, is_causal=True), backend="aot_eager", fullgraph=True)
    q = normal(1, 2, LENGTH, 8, seed=1, dtype=torch.float32)
    with tw.intercept_sdpa("flex"):
        torch.testing.assert_close(compiled(q), tw.attention(q, q, q, is_causal=True, backend="flex"))
    torch.testing.assert_close(model(x_of()), expected)


# -- nn.MultiheadAttention ---------------------------------------------------------------------------------------------


class MultiHead(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, **options)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return self.attend(x, x, x, need_weights=False, **options)[0]


MULTI_HEAD = {
    "plain": ({}, lambda: {}),
    "batch first": ({"batch_first": True}, lambda: {}),
    "no bias, other widths": ({"bias": False, "kdim": WIDTH, "vdim": WIDTH, "batch_first": True}, lambda: {}),
    "causal": ({"batch_first": True}, lambda: {"attn_mask": torch.ones(LENGTH, LENGTH).triu(1).bool(), "is_causal": True}),
    "added": ({"batch_first": True}, lambda: {"attn_mask": normal(4, LENGTH, LENGTH, seed=5, dtype=torch.float32)}),
    "padding": ({"batch_first": True}, lambda: {"key_padding_mask": ~keep()}),
    "padding and mask": ({"batch_first": True}, lambda: {"key_padding_mask": ~keep(), "attn_mask": torch.ones(LENGTH, LENGTH).triu(3).bool()}),
}


@pytest.mark.parametrize("name", MULTI_HEAD)
def test_multi_head_attention(name: str) -> None:
    settings, options = MULTI_HEAD[name]
    with seeded():
        model = MultiHead(**settings)
    for training in (True, False):
        model.train(training)
        expected = model(x_of(), **options())
        with tw.intercept_sdpa("flex"), tw.watch(model) as watched:
            found = model(x_of(), **options())
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        reached(watched)


def test_multi_head_attention_goes_by_the_causal_hint_as_torchs() -> None:
    with seeded():
        layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    x, another = x_of(), torch.ones(LENGTH, LENGTH).triu(3).bool()
    for options in ({"attn_mask": another}, {"attn_mask": another, "key_padding_mask": ~keep()}):
        expected = layer(x, x, x, need_weights=False, is_causal=True, **options)[0]
        with tw.intercept_sdpa("flex"):
            torch.testing.assert_close(layer(x, x, x, need_weights=False, is_causal=True, **options)[0], expected, rtol=1e-5, atol=1e-6)
    with tw.intercept_sdpa("flex"), pytest.raises(RuntimeError, match="Need attn_mask"):
        layer(x, x, x, need_weights=False, is_causal=True)


def test_multi_head_attention_that_needs_weights_stays_torchs_and_is_named() -> None:
    with seeded():
        layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    with tw.intercept_sdpa(), tw.watch(layer) as watched:
        _, weights = layer(x_of(), x_of(), x_of(), need_weights=True)
    assert weights is not None and watched.bypassing[0].name == ""
    assert "need_weights=False" in watched.bypassing[0].remedy


def test_an_encoder_layer_of_torch() -> None:
    with seeded():
        model = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
    watched = check(model, lambda m, dtype: m(x_of(dtype), src_key_padding_mask=~keep()), route)
    reached(watched)
