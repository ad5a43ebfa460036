"""What a run leaves behind: its log, its losses and their plot, and checkpoints to go on from."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.losses: list[float] = []

    def say(self, text: str) -> None:
        """On the screen and in log.txt."""
        print(text, flush=True)
        with (self.path / "log.txt").open("a") as log:
            log.write(text + "\n")

    def plot(self) -> None:
        """loss.csv, and loss.png where matplotlib is installed."""
        (self.path / "loss.csv").write_text("step,loss\n" + "".join(f"{step},{loss!r}\n" for step, loss in enumerate(self.losses)))
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return
        figure = Figure(figsize=(7, 4))
        axes = figure.subplots()
        axes.plot(self.losses, color="0.75", label="each step")
        axes.plot(smoothed(self.losses), color="C0", label="smoothed")
        axes.set(xlabel="step", ylabel="flow-matching loss")
        axes.legend()
        figure.savefig(self.path / "loss.png", dpi=120)

    def save(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Model, optimizer and losses. Written aside and renamed, so that a run that is stopped leaves the last whole checkpoint."""
        fresh, final, old = (self.path / name for name in ("checkpoint.new", "checkpoint", "checkpoint.old"))
        model.save_pretrained(fresh)
        save_file(_flat(optimizer), fresh / "optimizer.safetensors")
        (fresh / "run.json").write_text(json.dumps({"losses": self.losses}))
        if final.exists():
            final.rename(old)
        fresh.rename(final)
        _remove(old)

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """The step to go on with: 0, or the one after the checkpoint's."""
        folder = self.path / "checkpoint"
        if not (folder / "run.json").is_file():
            return 0
        weights = [path for path in sorted(folder.glob("*.safetensors")) if path.name != "optimizer.safetensors"]
        model.load_state_dict({name: tensor for path in weights for name, tensor in load_file(path).items()})
        _restore(optimizer, load_file(folder / "optimizer.safetensors"))
        self.losses = json.loads((folder / "run.json").read_text())["losses"]
        return len(self.losses)


def smoothed(losses: list[float], weight: float = 0.9) -> list[float]:
    found: list[float] = []
    for loss in losses:
        found.append(loss if not found else weight * found[-1] + (1 - weight) * loss)
    return found


def _flat(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {f"{number}.{name}": value.contiguous() for number, state in optimizer.state_dict()["state"].items() for name, value in state.items()}


def _restore(optimizer: torch.optim.Optimizer, flat: dict[str, torch.Tensor]) -> None:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in flat.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def _remove(folder: Path) -> None:
    if folder.exists():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
