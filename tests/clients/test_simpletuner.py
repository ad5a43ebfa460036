"""SimpleTuner's `attention_mechanism`. Its own attention module where it is installed, and a stand-in that keeps the same promises.

SimpleTuner is AGPL and is no dependency of these tests; put an unpacked wheel, accelerate and peft on PYTHONPATH to run the real one.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend
from torch.nn import functional

import tilewise as tw
from tests.support.compare import engine_of
from tests.support.diffusers_models import DIRECT, DISPATCHED, Tiny
from tilewise.integrations import simpletuner as client
from tilewise.integrations import simpletuner_train

PATH = "simpletuner.helpers.training.attention_backend"
REGISTRY = "simpletuner.simpletuner_sdk.server.services.field_registry.registry"
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
        for parent in ("simpletuner.simpletuner_sdk", *(f"simpletuner.simpletuner_sdk.server{rest}" for rest in ("", ".services", ".services.field_registry"))):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        registry: Any = ModuleType(REGISTRY)
        field = SimpleNamespace(choices=[{"value": name, "label": name} for name in ("diffusers", "flex", "native")])
        registry.field_registry = SimpleNamespace(get_field={"attention_mechanism": field}.__getitem__)
        monkeypatch.setitem(sys.modules, REGISTRY, registry)
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


def test_its_context_parallelism_accepts_them(trainer: Any) -> None:
    """SimpleTuner calls enable_parallelism(), which looks at the active backend."""
    for mechanism in ("flex", "tilewise"):
        apply(trainer, mechanism)
        assert _AttentionBackendRegistry._is_context_parallel_available(_AttentionBackendRegistry.get_active_backend()[0])
    client.unregister()
    assert not {"flex", "tilewise"} & _AttentionBackendRegistry._supports_context_parallel


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


def test_the_command_line_offers_what_means_tilewise(trainer: Any) -> None:
    """What is not among the choices, SimpleTuner's own argparse refuses."""

    def offered() -> list[str]:
        return [choice["value"] for choice in sys.modules[REGISTRY].field_registry.get_field("attention_mechanism").choices]

    assert {"flex", "flex-attn", "tilewise"} <= {*offered()} and len({*offered()}) == len(offered())
    client.unregister()
    assert "flex" in offered() and not {"flex-attn", "tilewise"} & {*offered()}


# -- from SimpleTuner's own command ----------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
from simpletuner.helpers.training.attention_backend import AttentionBackendController
from types import SimpleNamespace
print(__name__, *sys.argv)
if "--train" in sys.argv:
    AttentionBackendController.apply(SimpleNamespace(attention_mechanism="flex"), "train")
    for _ in range(3):
        torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3)
if "--fail" in sys.argv:
    sys.exit(3)
"""


def run_by_accelerate(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> None:
    """accelerate launch -m tilewise.integrations.simpletuner_train FOLDER/train.py ARGUMENTS"""
    (folder / "train.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["simpletuner_train.py", str(folder / "train.py"), *arguments])
    simpletuner_train.main()


def test_the_training_script_runs_with_tilewise(trainer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_by_accelerate(monkeypatch, tmp_path, "--train", "--seed=3")
    assert capsys.readouterr().out.splitlines() == [
        f"__main__ {tmp_path / 'train.py'} --train --seed=3",
        f"attention calls served by tilewise: {engine_of('flex')} 3",
    ]


def test_what_was_served_is_told_whatever_happens(trainer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_by_accelerate(monkeypatch, tmp_path, "--fail")
    assert ended.value.code == 3 and "tilewise served no attention call" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")  # one process of several speaks for all
    run_by_accelerate(monkeypatch, tmp_path)
    assert "tilewise served" not in capsys.readouterr().out


def test_without_a_script_it_says_how_it_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["simpletuner_train.py"])
    with pytest.raises(SystemExit, match="ACCELERATE_EXTRA_ARGS"):
        simpletuner_train.main()


@pytest.mark.skipif("simpletuner" not in MISSING, reason="SimpleTuner is installed")
def test_without_simpletuner_it_says_so() -> None:
    with pytest.raises(tw.BackendError, match=r"needs SimpleTuner .* No module named 'simpletuner'"):
        client.register()


def imported_and_compiled() -> Any:
    """As its models do when they first need it."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_that_compile_flex_attention_with_lists_of_their_own(trainer: Any) -> None:
    """The sparse attention of its MiniMax-H3: blocks that a step chose, and rows that are padding."""
    from torch.nn.attention.flex_attention import BlockMask

    compiled, before = imported_and_compiled(), sum(client.served().values())
    for seed in range(2):  # other blocks, other padding
        torch.manual_seed(seed)
        q, k, v = (torch.randn(1, 2, 256, 16, requires_grad=True) for _ in range(3))
        kept = torch.stack([torch.randperm(4)[:2] for _ in range(8)]).view(1, 2, 4, 2)
        valid = torch.arange(256) < 230 - seed
        indices = torch.cat([kept, torch.zeros(1, 2, 4, 2, dtype=kept.dtype)], -1).int()
        block_mask = BlockMask.from_kv_blocks(
            torch.full((1, 2, 4), 2, dtype=torch.int32),
            indices,
            BLOCK_SIZE=64,
            mask_mod=lambda b, h, i, j, valid=valid: valid[i] & valid[j],
            seq_lengths=(256, 256),
        )
        out = compiled(q, k, v, block_mask=block_mask)
        chosen = torch.zeros(1, 2, 4, 4, dtype=torch.bool).scatter_(3, kept, True).repeat_interleave(64, 2).repeat_interleave(64, 3)
        scores = torch.where(chosen & valid[:, None] & valid, q @ k.mT / 4, -torch.inf)
        expected = torch.softmax(scores, -1).nan_to_num() @ v
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), torch.autograd.grad(expected[:, :, valid].square().sum(), (q, k, v)))
    assert sum(client.served().values()) == before + 2


def test_torchs_flex_attention_comes_back(trainer: Any) -> None:
    from torch.nn.attention import flex_attention as module

    assert module.flex_attention is client._flex_attention
    q = torch.randn(1, 2, 64, 16)
    torch.testing.assert_close(torch.compile(module.flex_attention, fullgraph=True)(q, q, q), functional.scaled_dot_product_attention(q, q, q))
    client.unregister()
    assert module.flex_attention is not client._flex_attention and module.flex_attention.__module__ == module.__name__
    client.register()
