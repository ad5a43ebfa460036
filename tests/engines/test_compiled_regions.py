"""Attention inside what torch.compile treats as a region of its own: checkpoints, branches, transforms of torch.func."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise import masks, scores

LENGTH = 40
IDS = torch.arange(LENGTH) // 9
TABLE = torch.randn(2, 2 * LENGTH - 1, generator=torch.Generator().manual_seed(1)).requires_grad_()
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "is_causal": lambda: {"is_causal": True},
    "window": lambda: {"mask": masks.causal & masks.sliding_window(7)},
    "documents": lambda: {"mask": masks.document(IDS) & masks.causal},
    "function": lambda: {"mask": lambda b, h, q, kv: (q >= kv) & (IDS[q] == IDS[kv])},
    "learned": lambda: {"score": [scores.relative_bias(TABLE), scores.softcap(3.0)]},
    "plain": dict,
}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def query() -> Tensor:
    return torch.randn(2, 2, LENGTH, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("name", CALLS)
def test_checkpoints_compile_in_one_graph(name: str) -> None:
    options, x = CALLS[name](), query()
    leaves = [x, TABLE] if name == "learned" else [x]

    def model(x: Tensor) -> Tensor:
        def layer(y: Tensor) -> Tensor:
            return tw.attention(y, y, y, **options)

        return checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False).square().sum()

    found = torch.autograd.grad(torch.compile(model, fullgraph=True, backend="aot_eager")(x), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(model(x), leaves))


class Doubled(TorchFunctionMode):
    """Twice what torch.sin is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return 2 * found if func is torch.sin else found


def test_modes_around_a_checkpoint_stay_what_they_are() -> None:
    """What is entered to trace a mask in a checkpoint is left again, and that alone."""
    x = query()

    def model(x: Tensor) -> Tensor:
        y = checkpoint(lambda y: tw.attention(y, y, y, is_causal=True), x, use_reentrant=False)
        with Doubled():
            z = torch.sin(y)
            torch._dynamo.graph_break()
            return z + torch.sin(y)

    with Doubled():
        found, wanted = torch.compile(model, backend="aot_eager")(x), model(x)
        assert [type(mode) for mode in _get_current_function_mode_stack()] == [Doubled]
    torch.testing.assert_close(found, wanted)
    assert _get_current_function_mode_stack() == []


def test_a_users_change_in_a_checkpoint_is_still_refused() -> None:
    seen: list[int] = []

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        seen.append(1)
        return q >= kv

    model = lambda x: checkpoint(lambda y: tw.attention(y, y, y, mask=mask), x, use_reentrant=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="side effect"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(query())


def test_branches() -> None:
    def model(x: Tensor) -> Tensor:
        one, other = lambda y: tw.attention(y, y, y, is_causal=True), lambda y: tw.attention(y, y, y, mask=lambda b, h, q, kv: q <= kv)
        found: Tensor = torch.cond(x.sum() > 0, one, other, (x,))
        return found

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for x in (query().detach().abs(), -query().detach().abs()):
        torch.testing.assert_close(compiled(x), model(x))


TRANSFORMED: dict[str, Callable[[Tensor], Any]] = {
    "vmap": lambda x: torch.func.vmap(lambda y: tw.attention(y, y, y, is_causal=True))(torch.stack([x, 2 * x])),
    "grad": torch.func.grad(lambda y: tw.attention(y, y, y, mask=masks.document(IDS)).square().sum()),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_break_the_graph(name: str) -> None:
    x = query().detach()
    torch.testing.assert_close(torch.compile(TRANSFORMED[name], backend="aot_eager")(x), TRANSFORMED[name](x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"call torch\.func outside of compiled code"):
        torch.compile(TRANSFORMED[name], backend="aot_eager", fullgraph=True)(x)


def test_a_model_with_gradient_checkpointing_compiles_in_one_graph() -> None:
    transformers = pytest.importorskip("transformers")
    tw.integrations.transformers.register()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": 50}
    model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, attn_implementation="tilewise")).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 50, (2, 30), generator=torch.Generator().manual_seed(0))
    keep = torch.ones_like(ids)
    keep[0, 20:] = 0

    def gradients(run: Any) -> list[Tensor]:
        out = run(input_ids=ids, attention_mask=keep, use_cache=False).last_hidden_state * keep[..., None]
        return list(torch.autograd.grad(out.square().sum(), list(model.parameters())))

    found = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    for mine, wanted in zip(found, gradients(model), strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-4)
