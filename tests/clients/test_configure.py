"""configure(model, config): the attention mechanism of a config.json."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewise as tw
from tests.clients.test_sdpa import blocks, x_of
from tests.clients.test_transformers import BERT, IDS, LLAMA
from tests.support.compare import engine_of, reached
from tests.support.diffusers_models import DIRECT, DISPATCHED, Tiny
from tilewise.frontend.dispatch import candidates
from tilewise.integrations import configure, diffusers, transformers

MECHANISMS = ["flex", "math", "blocked", "reference", "native"]
FAMILIES = [t for t in DISPATCHED + DIRECT if t.name in ("flux", "chroma", "ltx-video", "hunyuan-video", "sd3", "pixart", "sdxl unet")]


def engines(model: nn.Module, tiny: Tiny) -> dict[str, int]:
    with tw.watch(model) as watched:
        tiny.call(model, torch.float32)
    assert not watched.engines or not watched.bypassing, str(watched)
    return watched.engines


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("tiny", FAMILIES, ids=str)
def test_diffusers(tiny: Tiny, mechanism: str) -> None:
    """One line for models that dispatch, models that do not, and those that do both; and the way back."""
    model = tiny.make()
    expected = tiny.call(model, torch.float32)
    with configure(model, {"attention_mechanism": mechanism}):
        torch.testing.assert_close(tiny.call(model, torch.float32), expected, rtol=1e-4, atol=1e-5)
        found = engines(model, tiny).keys()
        assert found <= {e.name for e in candidates("flex")} if mechanism == "flex" else found == {engine_of(mechanism)}
    assert engines(model, tiny) == {}
    diffusers.unregister()


@pytest.mark.parametrize("mechanism", ["flex", "math", "auto"])
def test_transformers(mechanism: str) -> None:
    for tiny in (LLAMA, BERT):
        model = tiny.make()
        expected = model(input_ids=IDS)[0]
        before = model.config._attn_implementation
        with configure(model, {"attention_mechanism": mechanism}), tw.watch(model) as watched:
            torch.testing.assert_close(model(input_ids=IDS)[0], expected, rtol=1e-4, atol=1e-4)
        assert not watched.bypassing and watched.engines.keys() == {engine_of(mechanism, is_causal=tiny is LLAMA)}
        assert model.config._attn_implementation == before
    transformers.unregister()


def test_a_model_that_keeps_its_own_attention_is_said_to(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import FalconConfig, FalconModel

    model = FalconModel(FalconConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    with tw.watch(model) as watched:
        model(input_ids=IDS, use_cache=False)
    assert watched.bypassing[0].remedy == "tilewise.integrations.route(model)"
    with configure(model, {"attention_mechanism": "flex"}), tw.watch(model) as watched:
        model(input_ids=IDS, use_cache=False)
    assert "FalconModel keeps its own attention" in caplog.text
    reached(watched)  # it calls torch's SDPA, which is served
    transformers.unregister()


def test_any_other_model_and_again() -> None:
    model = blocks()
    configure(model, {"attention_mechanism": "math"})
    done = configure(model, {"attention_mechanism": "blocked"})
    with tw.watch(model) as watched:
        model(x_of())
    assert watched.engines == {"blocked": 2}
    done.remove()
    with tw.watch(model) as watched:
        model(x_of())
    assert watched.engines == {}


def test_two_models_do_not_disturb_each_other() -> None:
    tiny = DISPATCHED[0]
    one, other = tiny.make(), tiny.make()
    with configure(one, {"attention_mechanism": "blocked"}):
        assert engines(other, tiny) == {} and engines(one, tiny).keys() == {"blocked"}
        with configure(other, {"attention_mechanism": "math"}):
            assert engines(other, tiny).keys() == {"reference"} and engines(one, tiny).keys() == {"blocked"}
    diffusers.unregister()


def test_models_within_a_model() -> None:
    """As wrappers for several devices, for adapters and for training hold them."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.picture = LLAMA.make(), DISPATCHED[0].make()

        def forward(self) -> None:
            self.text(input_ids=IDS)
            DISPATCHED[0].call(self.picture, torch.float32)

    model = Both()
    with tw.watch(model) as watched:
        model()
    remedies = [layer.remedy for layer in watched.bypassing]
    assert remedies[0] == 'tilewise.integrations.transformers.register(); model.text.set_attn_implementation("tilewise")'
    assert remedies[-1] == 'tilewise.integrations.diffusers.register(); model.set_attention_backend("tilewise")'
    with configure(model, {"attention_mechanism": "flex"}), tw.watch(model) as watched:
        model()
    reached(watched)
    assert model.text.config._attn_implementation == "sdpa"
    diffusers.unregister()
    transformers.unregister()


def test_a_configured_model_can_go() -> None:
    for tiny in (LLAMA, DISPATCHED[0]):
        model = tiny.make()
        configured = configure(model, {"attention_mechanism": "flex"})
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
        configured.remove()
    diffusers.unregister()
    transformers.unregister()


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"attention_mechanism": "blocked", "learning_rate": 1e-4}))
    model = blocks()
    for given in (path, str(path)):
        with configure(model, given), tw.watch(model) as watched:
            model(x_of())
        assert watched.engines == {"blocked": 2}


def test_mistakes_are_told(tmp_path: Path) -> None:
    model = blocks()
    with pytest.raises(tw.BackendError, match=r"unknown attention_mechanism 'flx' .* allowed are auto, flex, flash, math, native"):
        configure(model, {"attention_mechanism": "flx"})
    with pytest.raises(tw.BackendError, match="unknown attention_mechanism None"):
        configure(model, {"attention_mechanism": None})
    with pytest.raises(tw.InputError, match="does not name an 'attention_mechanism'"):
        configure(model, {"attention": "flex"})
    with pytest.raises(tw.InputError, match="must be a JSON object"):
        configure(model, ["flex"])
    with pytest.raises(tw.InputError, match="cannot be read"):
        configure(model, tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(tw.InputError, match="is no JSON"):
        configure(model, tmp_path / "broken.json")
    with pytest.raises(tw.InputError, match="takes a model"):
        configure({}, {"attention_mechanism": "flex"})
    with configure(model, {"attention_mechanism": "triton"}), pytest.raises(tw.BackendError, match="must be on a CUDA device"):
        model(x_of())
