"""watch(): which engine each layer used, and which layers bypass tilewise."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tilewise as tw
from tests.support.compare import normal
from tilewise import masks
from tilewise.frontend.dispatch import observers
from tilewise.integrations import route

LENGTH = 300


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 8)).transpose(1, 2)


class WithTilewise(nn.Module):
    def __init__(self, mask: Any, backend: str = "blocked") -> None:
        super().__init__()
        self.mask, self.backend = mask, backend

    def forward(self, x: Tensor) -> Tensor:
        return tw.attention(heads(x), heads(x), heads(x), mask=self.mask, backend=self.backend).transpose(1, 2).flatten(2)


class SdpaAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(heads(x), heads(x), heads(x)).transpose(1, 2).flatten(2)


class WrittenOutAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax(x @ x.mT) @ x


class LinearAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() @ (x.relu().mT @ x)


class Router(nn.Module):
    """Not attention, though it has a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.ModuleDict({"CrossAttention": SdpaAttention()})

    def forward(self, x: Tensor) -> Tensor:
        return x


def model(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def x_of() -> Tensor:
    return normal(1, LENGTH, 16, seed=0, dtype=torch.float32)


def test_each_layer_with_its_engine_mask_and_tiles() -> None:
    watched_model = model(WithTilewise(masks.causal & masks.sliding_window(10)), WithTilewise(None, "native"), WithTilewise(masks.full))
    with tw.watch(watched_model) as w:
        watched_model(x_of())
        watched_model(x_of())
    first, second, third = w.layers
    assert (first.name, first.calls, first.uses[0].engine, first.uses[0].mask) == ("0", 2, "blocked", "causal & sliding_window(10)")
    assert first.uses[0].skipped == pytest.approx(4 / 9)  # of 3 x 3 tiles, the diagonal and the one below it are computed
    assert second.engines == ["native"] and second.uses[0].skipped is None  # torch does not say
    assert third.uses[0].skipped == 0
    assert w.engines == {"blocked": 4, "native": 2} and not w.bypassing
    text = str(w)
    assert "3 of 3 attention layers reached tilewise (calls: blocked 4, native 2)" in text and "44.4%" in text


def test_layers_that_bypass_are_named_with_the_line_that_routes_them() -> None:
    mixed = model(SdpaAttention(), WrittenOutAttention(), LinearAttention(), Router(), Unused(), nn.MultiheadAttention(16, 2, batch_first=True))
    forward = lambda: mixed[5](*(3 * [mixed[:5](x_of())]), need_weights=False)
    with tw.watch(mixed) as w:
        forward()
    found = {layer.name: (layer.uses[0].engine, layer.bypasses) for layer in w.layers}
    assert found == {
        "0": ("torch SDPA", True),
        "1": ("softmax written out", True),
        "2": ("none seen", True),
        "4.spare.CrossAttention": ("not called", False),
        "5": ("nn.MultiheadAttention", True),
    }
    remedies = {layer.name: layer.remedy for layer in w.bypassing}
    assert remedies["0"] == "tilewise.integrations.route(model)" and remedies["1"].startswith("none:") and remedies["2"].startswith("none:")
    assert "0 of 5 attention layers reached tilewise" in str(w) and "0 bypass tilewise; to route: tilewise.integrations.route(model)" in str(w)
    with route(mixed), tw.watch(mixed) as w:  # the line does what it says
        forward()
    assert [layer.name for layer in w.bypassing] == ["1", "2"] and [layer.name for layer in w.layers if layer.engines] == ["0", "5"]


def test_alike_layers_share_a_row() -> None:
    deep = model(*[WithTilewise(masks.causal) for _ in range(12)])
    with tw.watch(deep) as w:
        deep(x_of())
    assert len(w.layers) == 12 and "{0..11} (12 layers)" in str(w) and len(str(w).splitlines()) == 4


def test_a_dict_of_models_and_pipelines() -> None:
    class Pipeline:
        components = {"unet": model(SdpaAttention()), "scheduler": object()}  # noqa: RUF012  (as pipelines have it)

    for given in (Pipeline(), Pipeline.components):
        with tw.watch(given) as w:
            Pipeline.components["unet"](x_of())
        assert w.layers[0].name == "unet.0" and w.layers[0].remedy == "tilewise.integrations.route(unet)"
    with pytest.raises(tw.InputError, match=r"watch takes a model .* got int"):
        tw.watch(3)


def test_calls_of_other_models_and_threads_are_not_counted() -> None:
    mine, other = model(WithTilewise(masks.causal)), model(WithTilewise(masks.causal))
    with tw.watch(mine) as w:
        other(x_of())
        tw.attention(heads(x_of()), heads(x_of()), heads(x_of()))
        thread = threading.Thread(target=lambda: mine(x_of()))  # the same model on another thread counts
        thread.start()
        thread.join()
    assert w.layers[0].calls == 1


def test_watching_leaves_nothing_behind() -> None:
    watched_model = model(SdpaAttention())
    with pytest.raises(RuntimeError), tw.watch(watched_model) as w:
        watched_model(x_of()[..., :3])
    assert observers == [] and not watched_model[0]._forward_hooks and not watched_model[0]._forward_pre_hooks
    with tw.watch(watched_model) as w, pytest.raises(RuntimeError):
        watched_model(x_of()[..., :3])
    assert w._place.stack == []


def test_a_compiled_model_is_said_to_be_unseen() -> None:
    compiled = torch.compile(model(WithTilewise(masks.causal)), backend="eager")
    with tw.watch(compiled) as w:
        pass
    assert "calls inside torch.compile are not seen" in str(w)
