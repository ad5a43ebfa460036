"""Whole training runs as users start them: `accelerate launch` on a diffusers training script, and transformers' Trainer on packed documents.

Losses with tilewise are those with the library's own attention. tests/whole_runs/simpletuner does the same for SimpleTuner, in an environment of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tilewise as tw
from tests.support.compare import engine_of
from tests.support.run_and_leave import TWO_PROCESSES
from tilewise.integrations import transformers as client

pytest.importorskip("accelerate", reason="accelerate is not installed; it comes with the dev extra")

SCRIPT = Path(__file__).parents[2] / "examples" / "accelerate" / "train.py"
CLOSE = {"rel": 2e-6, "abs": 0.0}  # a hundredth of what 1 % of error in attention would change


# -- accelerate and diffusers ----------------------------------------------------------------------------------------


ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")


def trained(attention: str, *arguments: str, launch: tuple[str, ...] = ()) -> Any:
    """The last line of examples/accelerate/train.py. Attention is asked for as flex, so that on a CPU it is not torch's own again."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TILEWISE_BACKEND": "flex", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, str(SCRIPT), "--attention", attention, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_trained_alike(native: Any, ours: Any, processes: int) -> None:
    assert native["served"] == {} and ours["served"].keys() == {engine_of("flex")} and ours["processes"] == processes
    assert len(ours["losses"]) == 4 and ours["losses"] == pytest.approx(native["losses"], **CLOSE)
    assert ours["losses"][0] != ours["losses"][1]


@pytest.mark.slow
def test_accelerate_trains_as_with_native_attention_and_either_goes_on(tmp_path: Path) -> None:
    """Gradients are accumulated and clipped, activations computed again. A state that is saved with one attention is resumed with another."""
    model, state = ("--model", "unet"), str(tmp_path)
    native, ours = trained("native", *model, launch=ACCELERATE), trained("tilewise", *model, "--save", state, launch=ACCELERATE)
    assert_trained_alike(native, ours, 1)
    later_native, later = (trained(attention, *model, "--resume", state) for attention in ("native", "tilewise"))
    assert later["losses"] == pytest.approx(later_native["losses"], **CLOSE) and later["losses"][0] < ours["losses"][0]  # the same pictures, later


@pytest.mark.slow
def test_two_processes_train_as_with_native_attention() -> None:
    """Gradients are averaged by DDP."""
    native, ours = (trained(attention, "--model", "flux", launch=TWO_PROCESSES) for attention in ("native", "tilewise"))
    assert_trained_alike(native, ours, 2)


# -- transformers' Trainer -------------------------------------------------------------------------------------------


@pytest.fixture
def registered() -> Iterator[None]:
    client.register()
    yield
    client.unregister()


class Trained(NamedTuple):
    losses: list[float]
    gradients: list[float]  # their norms
    watched: tw.watch


def trained_on_documents(implementation: str, folder: Path, **collator: Any) -> Trained:
    """Three steps of a tiny Llama on packed documents, four of different lengths a step."""
    from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=100, initializer_range=0.2, **sizes, attn_implementation=implementation)
    ids = [torch.randint(1, 100, (length,)).tolist() for length in (150, 40, 210, 90, 60, 300, 17, 120, 80, 200, 33, 70)]
    steps = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1}
    arguments = TrainingArguments(output_dir=str(folder), **steps, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True)
    model = LlamaForCausalLM(config)
    trainer = Trainer(model, arguments, DataCollatorWithFlattening(**collator), [{"input_ids": row, "labels": row} for row in ids])
    with tw.watch(model) as watched:
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Trained([entry["loss"] for entry in logged], [entry["grad_norm"] for entry in logged], watched)


def test_the_trainer_packs_documents_as_with_sdpa(registered: None, tmp_path: Path) -> None:
    wanted, found = (trained_on_documents(implementation, tmp_path) for implementation in ("sdpa", "tilewise"))
    assert found.watched.engines == {engine_of("flex"): 6} and "causal & packed" in str(found.watched)
    assert len(found.losses) == 3 and found.losses == pytest.approx(wanted.losses, **CLOSE)
    assert found.gradients == pytest.approx(wanted.gradients, rel=1e-4)
    run_together = trained_on_documents("tilewise", tmp_path, return_position_ids=False)  # documents that see each other: not the same
    assert all(abs(a - b) > 1e-3 for a, b in zip(run_together.losses, found.losses, strict=True))
