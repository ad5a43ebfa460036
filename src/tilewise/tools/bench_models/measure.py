"""Measuring rows in this process. Everything found is told at once, as an event, so that nothing is lost if the process dies.

| event | with | says |
|---|---|---|
| `machine` | `device`, `versions` | where this runs |
| `building` | `row` | a model is being made |
| `begin` | `row`, `mode`, `implementation` | who runs next, and is to blame if nothing follows |
| `first` | the same, `seconds`, `ms`, `gib`, `off`, `beside` | the first call's time, a warm one's, peak memory, difference from the implementation `beside` |
| `time` | the same, `ms` | one turn |
| `failed` | the same, `why`, `fatal` | it cannot; fatal if nothing else can run in this process any more |
| `done` | `row`, `mode` | all turns were taken |
"""

import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from tilewise import __version__
from tilewise.tools.bench_models.rows import STEP, Job, Row, attending, find, register
from tilewise.tools.bench_models.workload import Scale, Workload

TURN, TINY_TURN = 0.3, 0.1  # seconds of calls that the slowest implementation makes in a turn, or one call
MOST = 20  # calls in a turn
PROBES = ("q_proj.weight", "to_q.weight")  # a parameter whose gradient went through attention's backward
Tell = Callable[[dict[str, Any]], None]


class Unusable(Exception):
    """The device does nothing any more in this process."""


def run(jobs: Iterable[Job], scale: Scale, rounds: int, tell: Tell) -> None:
    """Measure the jobs, the modes of one row with the same model."""
    start_libraries(scale)
    for name, group in groupby(jobs, key=lambda job: job.row):
        row = find(name)
        tell({"event": "building", "row": name})
        register(row.client)
        tell(dict(event="machine", **machine(scale.device)))
        workload = row.build(scale)
        for job in group:
            Turns(row, job, workload, scale, tell).take(rounds)
        del workload
        clean(scale.device)


def start_libraries(scale: Scale) -> None:
    """What any model would load, so that the first implementation's first call does not pay for it."""
    torch.nn.functional.linear(scale.noise(64, 64), scale.noise(64, 64).requires_grad_()).sum().backward()


def machine(device: torch.device) -> dict[str, str]:
    """The device's name and the versions of what has been imported."""
    clients = [f"{name} {sys.modules[name].__version__}" for name in ("transformers", "diffusers", "triton") if name in sys.modules]
    versions = ", ".join([f"tilewise {__version__}", f"torch {torch.__version__}", *clients, f"Python {platform.python_version()}"])
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "versions": versions}
    return {"device": f"CPU, {torch.get_num_threads()} of {os.cpu_count()} cores", "versions": versions}


class Turns:
    """One row in one mode: the implementations are tried one after the other, and those that can then take turns, so that noise hits all alike."""

    def __init__(self, row: Row, job: Job, workload: Workload, scale: Scale, tell: Tell) -> None:
        self.row, self.job, self.workload, self.device = row, job, workload, scale.device
        self.turn_seconds = scale.pick(TURN, TINY_TURN)
        self._tell = tell
        self.model = workload.model.train(job.mode == STEP)
        self.reference: tuple[str, list[Tensor]] | None = None  # the first implementation's name and what it computed
        self.direction: Tensor | None = None  # the output's gradient: any loss; one of the output's size would have none, as a norm comes last
        self.seconds: dict[str, float] = {}  # a warm call of each implementation that can

    def take(self, rounds: int) -> None:
        if self.row.compiles:
            torch._dynamo.reset()  # else the modes and implementations of one model are too many for its cache
        for name in self.job.implementations:
            self._guarded(name, self._first)
        for k in range(rounds):
            names = list(self.seconds)
            for name in names[k % len(names) :] + names[: k % len(names)] if names else []:
                self._guarded(name, self._turn)
        self._tell({"event": "done", "row": self.row.name, "mode": self.job.mode})

    def _guarded(self, name: str, measure: Callable[[str], None]) -> None:
        """Whatever goes wrong is this implementation's result; the others go on if they can."""
        self.tell("begin", name)
        why = None
        try:
            with attending(self.row, self.model, name):
                measure(name)
        except Exception as error:  # a client, torch and a driver may raise anything
            why = said(error)
        if why is not None:  # the traceback is gone, and with it the tensors that it held
            self.seconds.pop(name, None)
            fatal = not usable(self.device)
            self.tell("failed", name, why=f"died: {why}" if fatal else why, fatal=fatal)
            if fatal:
                raise Unusable(why)
            self.model.zero_grad(set_to_none=True)
            clean(self.device)

    def _first(self, name: str) -> None:
        """The first call, a warm one, and one for its memory."""
        begin = time.perf_counter()
        found = self._call(0)
        wait(self.device)
        seconds = time.perf_counter() - begin
        computed = [tensor.detach().float().cpu() for tensor in found]
        del found
        if self.reference is None:
            self.reference = name, computed
        beside, expected = self.reference
        off = max(relative_difference(a, b) for a, b in zip(computed, expected, strict=True))
        self._call(1)
        gib = self._peak_gib(lambda: self._call(2))
        begin = time.perf_counter()
        self._call(3)
        wait(self.device)
        self.seconds[name] = time.perf_counter() - begin
        self.model.zero_grad(set_to_none=True)
        clean(self.device)
        self.tell("first", name, seconds=seconds, ms=1e3 * self.seconds[name], gib=gib, off=off, beside=beside)

    def _turn(self, name: str) -> None:
        """As many calls of each implementation as the slowest one has time for: all see the same inputs."""
        count = max(1, min(MOST, int(self.turn_seconds / max(self.seconds.values()))))
        self._call(count)  # the one before left memory in other pieces
        wait(self.device)
        begin = time.perf_counter()
        for k in range(count):
            self._call(k)
        wait(self.device)
        self.tell("time", name, ms=1e3 * (time.perf_counter() - begin) / count)

    def _call(self, turn: int) -> list[Tensor]:
        """One call; what it computed: the output and, of a step, the gradient of a parameter behind attention."""
        if self.job.mode != STEP:
            with torch.no_grad():
                return [self.workload.forward(turn)]
        self.model.zero_grad(set_to_none=True)
        out = self.workload.forward(turn)
        if self.direction is None:
            self.direction = torch.randn(out.shape, generator=torch.Generator(out.device).manual_seed(1), device=out.device).to(out)
        out.backward(self.direction)
        probe = next(p for name, p in self.model.named_parameters() if name.endswith(PROBES))
        assert probe.grad is not None
        return [out, probe.grad]

    def _peak_gib(self, call: Callable[[], Any]) -> float | None:
        """GPU memory of a call, above what stood before it; nobody counts it on a CPU."""
        self.model.zero_grad(set_to_none=True)
        if self.device.type != "cuda":
            call()
            return None
        wait(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        wait(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**30

    def tell(self, event: str, name: str, **more: Any) -> None:
        self._tell(dict(event=event, row=self.row.name, mode=self.job.mode, implementation=name, **more))


def relative_difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def said(error: Exception) -> str:
    """An error as it fits into a table."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__


def usable(device: torch.device) -> bool:
    """An illegal memory access ends a process's CUDA for good, whoever made it."""
    try:
        wait(device)
        torch.ones(1, device=device).add_(1)
        wait(device)
    except RuntimeError:
        return False
    return True


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
