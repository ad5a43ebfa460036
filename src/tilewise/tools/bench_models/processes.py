"""Measuring in processes of their own: a kernel that crashes, or compiles for ever, takes nothing but its own result with it."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from tilewise.core.store import VARIABLE as STORE
from tilewise.tools.bench_models.rows import Job

WORKER = (sys.executable, "-m", "tilewise.tools.bench_models.worker")
CACHES = (STORE, "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # environment variables: where compiled kernels are kept
Key = tuple[str, str, str]  # row, mode, implementation


@dataclass(frozen=True)
class Settings:
    """How to measure; `limit` is how many seconds an implementation may be silent, `deadline` when everything has to end (time.monotonic)."""

    tiny: bool
    device: str
    rounds: int = 5
    threads: int = 0  # of the CPU; 0: as torch chooses
    limit: float = 400.0
    deadline: float = float("inf")
    warm: bool = False  # use the kernels that this machine has compiled before


@dataclass
class Result:
    """What one implementation took in one row and mode; or why it took nothing."""

    times: list[float] = field(default_factory=list)  # milliseconds, of each turn
    first_s: float | None = None
    warm_ms: float | None = None  # one call, before the turns
    gib: float | None = None
    off: float | None = None
    beside: str | None = None
    failed: str | None = None

    @property
    def ms(self) -> float | None:
        """The median of the turns; one call if there was no time for turns; None if it failed."""
        if self.failed is not None:
            return None
        return median(self.times) if self.times else self.warm_ms


@dataclass
class Findings:
    """All results, and where they were measured."""

    results: dict[Key, Result] = field(default_factory=dict)
    device: str = ""
    versions: str = ""

    def take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "machine":
            self.device, self.versions = event["device"], event["versions"]
        if "implementation" not in event:
            return
        result = self.results.setdefault(_key(event), Result())
        if kind == "first":
            result.first_s = event["seconds"] if result.first_s is None else result.first_s  # after a restart, compiled kernels are there already
            result.warm_ms, result.gib, result.off, result.beside, result.times = event["ms"], event["gib"], event["off"], event["beside"], []
        elif kind == "time":
            result.times.append(event["ms"])
        elif kind == "failed":
            result.failed = event["why"]


def measure(jobs: Sequence[Job], settings: Settings, tell: Callable[[dict[str, Any]], None], worker: Sequence[str] = WORKER) -> Findings:
    """Measure all jobs, in a new process without the culprit whenever one has died. What the deadline cuts off has no result."""
    findings = Findings()
    left = list(jobs)
    with _caches(settings.warm) as environment:
        while left and time.monotonic() < settings.deadline:
            process = _Process([*worker, _order(left, settings)], environment)
            try:
                left = _listen(process, left, settings, findings, tell)
            finally:
                process.end()
    findings.results = {key: found for key, found in findings.results.items() if found.ms is not None or found.failed is not None}
    return findings


def _order(jobs: Sequence[Job], settings: Settings) -> str:
    return json.dumps({"jobs": jobs, "tiny": settings.tiny, "device": settings.device, "rounds": settings.rounds, "threads": settings.threads})


def _listen(process: "_Process", jobs: list[Job], settings: Settings, findings: Findings, tell: Callable[[dict[str, Any]], None]) -> list[Job]:
    """Take the process's events until it ends or has to; the jobs that are left for another."""
    done: set[tuple[str, str]] = set()
    row, running = "", None  # what is being built; who runs
    while True:
        patience = min(settings.limit, settings.deadline - time.monotonic())
        event = process.next_event(max(patience, 0.0))
        if event is None:
            break
        findings.take(event)
        tell(event)
        row = event.get("row", row)
        if event["event"] == "begin":
            running = _key(event)
        elif event["event"] == "done":
            done.add((event["row"], event["mode"]))
            running = None
        elif event["event"] == "building":
            running = None
    if time.monotonic() >= settings.deadline:
        return []
    why = process.cause_of_death(settings.limit)
    if why is not None:
        culprits = [running] if running else [key for key in _keys(jobs) if key[0] == row or not row]  # a model that cannot be built, or nothing can
        for key in culprits:
            if key[:2] not in done and findings.results.get(key, Result()).failed is None:  # else it has told why itself
                event = {"event": "failed", "row": key[0], "mode": key[1], "implementation": key[2], "why": why, "fatal": True}
                findings.take(event)
                tell(event)
    failed = {key for key, found in findings.results.items() if found.failed}
    left = [Job(job.row, job.mode, [name for name in job.implementations if (job.row, job.mode, name) not in failed]) for job in jobs]
    return [job for job in left if job.implementations and (job.row, job.mode) not in done]


def _key(event: dict[str, Any]) -> Key:
    return event["row"], event["mode"], event["implementation"]


def _keys(jobs: Sequence[Job]) -> list[Key]:
    return [(job.row, job.mode, name) for job in jobs for name in job.implementations]


@contextmanager
def _caches(warm: bool) -> Iterator[dict[str, str]]:
    """The environment of a worker: what this process can import, and empty caches of compiled kernels, so that a first call is a first call."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if warm:
        yield environment
        return
    with tempfile.TemporaryDirectory(prefix="tilewise-bench-", ignore_cleanup_errors=True) as folder:
        yield environment | {name: str(Path(folder) / name.lower()) for name in CACHES}


class _Process:
    """A worker, whose events a thread reads, so that they can be waited for with a limit."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._complaints = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (end() closes it)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._complaints, env=environment, text=True)
        self._lines: queue.Queue[str | None] = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        self._too_slow = False

    def _read(self, out: IO[str]) -> None:
        with out:
            for line in out:
                self._lines.put(line)
        self._lines.put(None)

    def next_event(self, patience: float) -> dict[str, Any] | None:
        """None if the process has ended, or says nothing for so many seconds."""
        try:
            line = self._lines.get(timeout=patience)
        except queue.Empty:
            self._too_slow = True
            return None
        return None if line is None else dict(json.loads(line))

    def cause_of_death(self, limit: float) -> str | None:
        """None if it has done all that was asked."""
        if self._too_slow:
            return f"stopped after {limit:.0f} s"
        code = self._process.wait()
        if code == 0:
            return None
        self._complaints.seek(0)
        lines = [line.strip() for line in self._complaints if line.strip()]
        how = f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"died: {how}{f', {lines[-1][:120]}' if lines and code > 0 else ''}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._complaints.close()
