"""Training steps with torch's SDPA and with tilewise, side by side: tiles skipped, time and memory.

    python examples/finetune/compare.py examples/finetune/padded_prompts.json

Steps of the two take turns, and the shortest of each counts. Memory is how far a step raises the peak of a process of its own.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from settings import Settings, read
from train import Run, one_step, start

import tilewise as tw
from tilewise.integrations import configure

NATIVE = "native"  # torch's SDPA, given the same masks
MIB = 2**20


def seconds(run: Run, mechanisms: list[str], turns: int) -> dict[str, float]:
    """The shortest step of each mechanism; the first, in which kernels may be compiled, does not count."""
    best = dict.fromkeys(mechanisms, float("inf"))
    for turn in range(turns + 1):
        for name in mechanisms:
            with configure(run.learner.model, {"attention_mechanism": name}):
                began = time.perf_counter()
                one_step(run, turn)
                if turn > 0:
                    best[name] = min(best[name], time.perf_counter() - began)
    return best


def skipped(run: Run, mechanism: str) -> float:
    """The share of tiles that a step's attention does not compute."""
    with configure(run.learner.model, {"attention_mechanism": mechanism}), tw.watch(run.learner.model) as watched:
        one_step(run, 0)
    uses = [use for layer in watched.layers for use in layer.uses]
    tiles = sum(use.tiles for use in uses)
    return 1 - sum(use.computed for use in uses) / tiles if tiles else 0.0


def peak(run: Run, mechanism: str) -> int:
    """Bytes that a step, once everything is loaded, needs at most beyond what was there before. On a CPU by the process's high-water mark, which Linux has."""
    on_gpu = run.settings.torch_device.type == "cuda"
    with configure(run.learner.model, {"attention_mechanism": mechanism}):
        one_step(run, 0)
        before = torch.cuda.memory_allocated() if on_gpu else process_bytes("VmRSS")
        torch.cuda.reset_peak_memory_stats() if on_gpu else Path("/proc/self/clear_refs").write_text("5")  # marks start anew
        one_step(run, 1)
    return (torch.cuda.max_memory_allocated() if on_gpu else process_bytes("VmHWM")) - before


def process_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024


def peak_of_its_own_process(config: Path, mechanism: str) -> int:
    command = [sys.executable, __file__, str(config), "--peak-of", mechanism]
    given_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # glibc keeps nothing that is freed
    ran = subprocess.run(command, env=os.environ | given_back, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise SystemExit(ran.stderr)
    return int(ran.stdout.split()[-1])


def compare(settings: Settings, config: Path, turns: int) -> list[list[str]]:
    """The table, row by row."""
    run, mechanisms = start(settings), [NATIVE, settings.attention_mechanism]
    times = seconds(run, mechanisms, turns)
    memory = {name: peak_of_its_own_process(config, name) for name in mechanisms}
    header = ["attention", "tiles skipped", "a training step", "memory of a step"]
    return [header, *[[name, f"{skipped(run, name):.0%}", f"{1000 * times[name]:.0f} ms", f"{memory[name] / MIB:.0f} MiB"] for name in mechanisms]]


def main() -> None:
    parser = argparse.ArgumentParser(description="A training step on torch's SDPA and on tilewise.")
    parser.add_argument("config", type=Path, help="the settings, as JSON")
    parser.add_argument("--turns", type=int, default=5, help="steps of each that are timed")
    parser.add_argument("--peak-of", metavar="MECHANISM", help="print the bytes that a step of this mechanism takes, and nothing else")
    given = parser.parse_args()
    settings = read(given.config)
    if given.peak_of is not None:
        print(peak(start(settings), given.peak_of))
        return
    table = compare(settings, given.config, given.turns)
    size = settings.image_size
    print(f"{settings.model}, {settings.batch_size} pictures of {size} x {size}, prompts padded to {settings.prompt_tokens} tokens")
    print(f"{settings.dtype} on {settings.torch_device}, {torch.get_num_threads()} threads of the CPU, torch {torch.__version__}\n")
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
