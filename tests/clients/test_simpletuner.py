"""SimpleTuner's `attention_mechanism`. Its own attention module where it is installed, and a stand-in that keeps the same promises.

SimpleTuner is AGPL and is no dependency of these tests; put an unpacked wheel, accelerate and peft on PYTHONPATH to run the real one.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from torch.nn import functional

import tilewise as tw
from tests.support.compare import engine_of
from tests.support.diffusers_models import DIRECT, DISPATCHED, Tiny
from tilewise.integrations import simpletuner as client

PATH = "simpletuner.helpers.training.attention_backend"
MISSING = [name for name in ("simpletuner", "accelerate", "peft") if importlib.util.find_spec(name) is None]


def stand_in() -> ModuleType:
    """What is known of SimpleTuner's module: a table of names, one context held open, and native attention for names it does not know."""
    module: Any = ModuleType(PATH)
    module.AttentionBackendName = AttentionBackendName
    module._DIFFUSERS_BACKEND_TARGETS = {"flex": "flex", "flex-attn": "flex", "native": "native", "native-math": "_native_math"}
    module._DIFFUSERS_BACKEND_ALIASES = {alias: AttentionBackendName(target) for alias, target in module._DIFFUSERS_BACKEND_TARGETS.items()}

    class AttentionBackendController:
        _open: AbstractContextManager[None] | None = None
        _active: str | None = None

        @classmethod
        def apply(cls, config: Any, phase: Any) -> None:
            name = config.attention_mechanism.lower().replace("_", "-")
            cls.restore_default()
            if name in module._DIFFUSERS_BACKEND_ALIASES:
                cls._open = attention_backend(module._DIFFUSERS_BACKEND_ALIASES[name])
                cls._open.__enter__()
                cls._active = name

        @classmethod
        def restore_default(cls) -> None:
            if cls._open is not None:
                cls._open.__exit__(None, None, None)
            cls._open, cls._active = None, None

        @classmethod
        def active_backend(cls) -> str | None:
            return cls._active

        @staticmethod
        def _is_sageattention_backend(backend: str) -> bool:
            return "sage" in backend

    module.AttentionBackendController = AttentionBackendController
    return module


@pytest.fixture(params=["stand-in", "real"])
def trainer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "real":
        if MISSING:
            pytest.skip(f"SimpleTuner's own module needs {', '.join(MISSING)}, which are not installed")
        module: Any = importlib.import_module(PATH)
    else:
        module = stand_in()
        for parent in ("simpletuner", "simpletuner.helpers", "simpletuner.helpers.training"):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, PATH, module)
        sys.modules["simpletuner.helpers.training"].attention_backend = module
    client.register()
    yield module
    client.unregister()


def apply(trainer: Any, mechanism: str) -> None:
    trainer.AttentionBackendController.apply(SimpleNamespace(attention_mechanism=mechanism), "train")


def engines(tiny: Tiny) -> dict[str, int]:
    model = tiny.make()
    with tw.watch(model) as watched:
        tiny.call(model, torch.float32).sum().backward()
    return watched.engines


FLUX, SD3 = DISPATCHED[0], DIRECT[0]


def test_mechanisms_that_mean_tilewise(trainer: Any) -> None:
    for mechanism, backend in (("flex", "flex"), ("flex-attn", "flex"), ("tilewise", "auto"), ("Tilewise", "auto")):
        apply(trainer, mechanism)
        assert engines(FLUX).keys() == {engine_of(backend)}, mechanism  # through diffusers' dispatcher
        assert engines(SD3).keys() == {engine_of(backend)}, mechanism  # past it
    assert sum(client.served().values()) == 4 * 5
    with tw.attention_backend("math"):
        assert engines(FLUX).keys() == engines(SD3).keys() == {"reference"}


def test_other_mechanisms_do_not(trainer: Any) -> None:
    before = functional.scaled_dot_product_attention
    apply(trainer, "flex")
    apply(trainer, "native")
    assert engines(FLUX) == engines(SD3) == {} and functional.scaled_dot_product_attention is before
    assert client.served() == {}  # what a user looks at
    apply(trainer, "flex")
    trainer.AttentionBackendController.restore_default()
    assert engines(FLUX) == engines(SD3) == {} and functional.scaled_dot_product_attention is before


def test_with_activations_computed_again(trainer: Any) -> None:
    apply(trainer, "flex")
    model = SD3.make().train()
    model.enable_gradient_checkpointing()
    with tw.watch(model) as watched:
        SD3.call(model, torch.float32).sum().backward()
    assert watched.engines == {engine_of("flex"): 6} and not watched.bypassing


def test_an_unknown_mechanism_is_an_error(trainer: Any) -> None:
    with pytest.raises(tw.BackendError, match=r"unknown attention_mechanism 'flx'; allowed are .*flex.*tilewise"):
        apply(trainer, "flx")


def test_registering_twice_and_unregistering(trainer: Any) -> None:
    client.register()
    apply(trainer, "flex")
    client.unregister()
    client.unregister()
    assert "tilewise" not in trainer._DIFFUSERS_BACKEND_ALIASES and functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    apply(trainer, "native")
    trainer.AttentionBackendController.restore_default()


@pytest.mark.skipif("simpletuner" not in MISSING, reason="SimpleTuner is installed")
def test_without_simpletuner_it_says_so() -> None:
    with pytest.raises(tw.BackendError, match=r"needs SimpleTuner .* No module named 'simpletuner'"):
        client.register()
