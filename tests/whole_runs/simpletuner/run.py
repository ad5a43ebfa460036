"""Whole training runs of SimpleTuner, from its own command: tiny Flux, Z-Image and SDXL, three steps each, with native attention and with tilewise.

    python3.12 tests/whole_runs/simpletuner/run.py FOLDER

makes an environment of its own in FOLDER (several GB; SimpleTuner is AGPL and no dependency of tilewise), random weights and eight pictures, trains on
the device at hand, and prints the losses side by side. Exits 1 if they differ. An environment, weights and caches that FOLDER has already are used again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE, REPOSITORY = Path(__file__).parent, Path(__file__).parents[3]
VERSION, OLDEST_PYTHON = "4.10.1", (3, 12)
STEPS = 3
TOLERANCES = {"train_loss": 1e-5, "grad_absmax": 1e-3}  # relative, in float32; SimpleTuner's names of a step's loss and of its largest gradient
NATIVE = "native"
MECHANISMS = (NATIVE, "flex", "tilewise")
MODULE = "-m tilewise.integrations.simpletuner_train"

FAMILIES: dict[str, dict[str, Any]] = {
    "flux": {"model_flavour": "dev", "tokenizer_max_length": 32},
    "z_image": {"model_flavour": "base", "tokenizer_max_length": 64},
    "sdxl": {"model_flavour": "base-1.0"},
}
CONFIG = {
    "model_type": "lora",
    "lora_type": "standard",
    "lora_rank": 4,
    "lora_alpha": 4,
    "max_train_steps": STEPS,
    "num_train_epochs": 0,
    "train_batch_size": 2,
    "seed": 42,
    "optimizer": "optimi-adamw",
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "mixed_precision": "no",
    "base_model_default_dtype": "fp32",
    "base_model_precision": "no_change",
    "gradient_checkpointing": True,
    "checkpoint_step_interval": STEPS,
    "report_to": "simpletuner",
    "push_to_hub": False,
    "use_ema": False,
    "resolution": 256,
    "resolution_type": "pixel",
    "minimum_image_size": 0,
    "aspect_bucket_rounding": 2,
    "disable_bucket_pruning": True,
    "caption_dropout_probability": 0.0,
    "vae_batch_size": 1,
    "vae_dtype": "fp32",
    "disable_benchmark": True,
    "validation_disable": True,
    "validation_prompt_library": False,
    "validation_step_interval": 1000,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=FAMILIES, nargs="+", default=[*FAMILIES])
    given = parser.parse_args()
    folder = given.folder.absolute()
    environment(folder / "venv")
    weights(folder)
    alike = [compare(folder, family) for family in given.only]
    sys.exit(0 if all(alike) else 1)


def environment(venv: Path) -> None:
    """SimpleTuner, and this tilewise."""
    if not (venv / "bin" / "simpletuner").exists():
        if sys.version_info < OLDEST_PYTHON:
            sys.exit(f"SimpleTuner {VERSION} needs Python 3.12 or newer, and this is {sys.version.split()[0]}: run it by a newer one")
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([venv / "bin" / "pip", "install", "torch>=2.13", "torchvision", f"simpletuner=={VERSION}"], check=True)
    subprocess.run([venv / "bin" / "pip", "install", "--quiet", "--no-deps", "--force-reinstall", REPOSITORY], check=True)


def weights(folder: Path) -> None:
    if not (folder / "tiny" / "sdxl" / "model_index.json").exists():  # the last that is written
        subprocess.run([folder / "venv" / "bin" / "python", HERE / "weights.py", folder / "tiny"], check=True, env=variables(folder))


def compare(folder: Path, family: str) -> bool:
    """Train one family by every mechanism. The first run fills SimpleTuner's caches, which costs it random numbers; it counts for nothing."""
    if not (folder / "runs" / family / "filling-caches" / "log.txt").exists():
        train(folder, family, NATIVE, "filling-caches")
    runs = {mechanism: train(folder, family, mechanism, mechanism) for mechanism in MECHANISMS}
    alike = True
    for mechanism, found in runs.items():
        close = len(found) == STEPS and all(
            abs(step[name] - native[name]) <= tolerance * abs(native[name])
            for step, native in zip(found, runs[NATIVE], strict=True)
            for name, tolerance in TOLERANCES.items()
        )
        alike &= close
        losses, gradients = ("  ".join(f"{step[name]:.7f}" for step in found) for name in TOLERANCES)
        print(f"{family:8} {mechanism:9} losses {losses}  largest gradients {gradients}  {'' if close else 'DIFFERS'}".rstrip(), flush=True)
    return alike


def train(folder: Path, family: str, mechanism: str, name: str) -> list[dict[str, float]]:
    """What SimpleTuner recorded of every step of one `simpletuner train`; what it printed is in log.txt."""
    place = folder / "runs" / family / name
    shutil.rmtree(place, ignore_errors=True)
    write_config(folder, place, family, mechanism)
    extra = {"ACCELERATE_EXTRA_ARGS": MODULE} if mechanism != NATIVE else {}
    with (place / "log.txt").open("w") as log:
        command = [folder / "venv" / "bin" / "simpletuner", "train"]
        done = subprocess.run(command, cwd=place, env=variables(folder) | extra, stdout=log, stderr=log, check=False)
    if done.returncode or (extra and "attention calls served by tilewise: " not in (place / "log.txt").read_text()):
        (place / "log.txt").rename(place / "failed.txt")
        sys.exit(f"{family} with {mechanism} failed; see {place / 'failed.txt'}")
    records = [json.loads(line)["metrics"] for line in (place / "output" / "training_metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "train_loss" in record]


def write_config(folder: Path, place: Path, family: str, mechanism: str) -> None:
    (place / "config").mkdir(parents=True)
    tiny, cache = folder / "tiny", folder / "runs" / family / "cache"
    weights = dict.fromkeys(("pretrained_model_name_or_path", "pretrained_vae_model_name_or_path"), str(tiny / family))
    own = {"model_family": family, "attention_mechanism": mechanism, **weights}
    paths = {"data_backend_config": "config/multidatabackend.json", "output_dir": str(place / "output")}
    pictures = {
        "id": "tiny",
        "type": "local",
        "dataset_type": "image",
        "instance_data_dir": str(tiny / "data"),
        "cache_dir_vae": str(cache / "vae"),
        "crop": True,
        "crop_style": "center",
        "crop_aspect": "square",
        "resolution": 256,
        "resolution_type": "pixel",
        "minimum_image_size": 64,
        "metadata_backend": "discovery",
        "caption_strategy": "textfile",
        "repeats": 10,
    }
    text = {"id": "text", "dataset_type": "text_embeds", "default": True, "type": "local", "cache_dir": str(cache / "text")}
    (place / "config" / "config.json").write_text(json.dumps(CONFIG | FAMILIES[family] | own | paths, indent=2))
    (place / "config" / "multidatabackend.json").write_text(json.dumps([pictures, text], indent=2))


def variables(folder: Path) -> dict[str, str]:
    """The environment of SimpleTuner's processes: its own commands first, nothing from the network, and memory that is not pinned without a GPU."""
    path = os.pathsep.join([str(folder / "venv" / "bin"), os.environ["PATH"]])
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(folder / "huggingface")}
    return os.environ | offline | {"PATH": path, "PYTHONPATH": str(HERE / "without_a_gpu"), "MIXED_PRECISION": "no"}


if __name__ == "__main__":
    main()
