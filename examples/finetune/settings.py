"""The settings of a run, read from config.json and checked."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from tilewise.integrations import mechanism_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Settings:
    attention_mechanism: str  # auto, flex, flash, native, math, or an engine of tilewise
    model: str = "tiny-flux"  # tiny-flux, tiny-qwen-image, tiny-sdxl-unet, or a folder that diffusers saved
    vae: str | None = None  # a folder with an AutoencoderKL; without one, the model sees pixels
    images: str | None = None  # a folder of pictures, labelled by their sub-folder; without one, shapes are drawn
    image_size: int = 16
    prompt_tokens: int = 8  # what every prompt is padded to, or cut
    output: str = "finetune-output"
    steps: int = 200
    batch_size: int = 16
    learning_rate: float = 0.003
    seed: int = 0
    log_every: int = 20
    checkpoint_every: int = 100
    sample_every: int = 100
    gradient_checkpointing: bool = False
    device: str | None = None
    dtype: str = "float32"
    threads: int | None = None  # of the CPU; torch's own choice unless given

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def read(path: Path) -> Settings:
    """Exits with the reason where a setting is missing, unknown or impossible."""
    mechanism_of(path)  # a file that is no JSON object, or names no mechanism that exists, is an error here
    given = json.loads(path.read_text())
    known = {field.name for field in fields(Settings)}
    if unknown := sorted(set(given) - known):
        raise SystemExit(f"{path}: unknown settings {', '.join(unknown)}; allowed are {', '.join(sorted(known))}")
    settings = Settings(**given)
    if settings.dtype not in DTYPES:
        raise SystemExit(f"{path}: dtype is one of {', '.join(DTYPES)}, got {settings.dtype!r}")
    for name in ("image_size", "prompt_tokens", "steps", "batch_size", "log_every", "checkpoint_every", "sample_every"):
        if not isinstance(getattr(settings, name), int) or getattr(settings, name) < 1:
            raise SystemExit(f"{path}: {name} must be a whole number of at least 1, got {getattr(settings, name)!r}")
    return settings
