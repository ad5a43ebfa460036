"""What the benchmarks share: what they ran on, how long and how much memory something takes, tables, saved results."""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # runs from a checkout, installed or not

MIB = 2**20
QUIET = 0.15  # cores in use elsewhere that do not disturb
PATIENCE, TRIES = 120, 3  # seconds to wait for quiet, in all; how often a disturbed measurement is made
RESULTS = Path(__file__).parent / "results"


# -- time ------------------------------------------------------------------------------------------------------------


def milliseconds(function: Callable[[], Any], *, seconds: float = 1.0, least: int = 5, most: int = 50) -> float:
    """Median time of a call, once warm: as many calls as fit in the given seconds, within limits."""
    function()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or (len(times) < most and time.perf_counter() < end):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return 1e3 * median(times)


# -- memory ----------------------------------------------------------------------------------------------------------


def peak_growth(function: Callable[[], Any]) -> int:
    """Bytes by which this process, at its largest during the call, is larger than before it."""
    before = _status("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    except OSError as error:
        if _status("VmHWM") > before + 8 * MIB:
            raise RuntimeError(f"the peak memory of a call cannot be told from what came before it: {error}") from error
    function()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory is measured on Linux only")


def in_subprocess(script: Path, name: str, *arguments: Any, timeout: float = 1800) -> Any:
    """What the function `name` of a script returns (as JSON), called in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        code = (
            f"import json, sys; sys.path[:] = {[str(script.parent), *sys.path]!r}; import {script.stem}; "
            f"json.dump({script.stem}.{name}(*json.loads(sys.argv[1])), open(sys.argv[2], 'w'))"
        )
        command = [sys.executable, "-c", code, json.dumps(arguments), str(answer)]
        done = subprocess.run(command, timeout=timeout, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}{arguments} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return json.loads(answer.read_text())


class Watch:
    """Measures in fresh processes while nobody else uses the machine, as far as possible, and tells how far that was."""

    def __init__(self, script: str) -> None:
        self.script = Path(script).resolve()
        self.patience = PATIENCE
        self.disturbed: list[float] = []  # cores that others used during each measurement

    def measure(self, name: str, *arguments: Any) -> Any:
        """What the script's function returns. A disturbed measurement is repeated and the least disturbed one counts."""
        found: list[tuple[float, Any]] = []
        while not found or (found[-1][0] > QUIET and len(found) < TRIES and self.patience > 0):
            self._wait()
            begin, before = time.perf_counter(), _busy_elsewhere()
            answer = in_subprocess(self.script, name, *arguments)
            found.append(((_busy_elsewhere() - before) / (time.perf_counter() - begin), answer))
        cores, answer = min(found, key=lambda pair: pair[0])
        self.disturbed.append(cores)
        return answer

    def _wait(self) -> None:
        """Until the machine is quiet for a second, or patience has run out for the whole benchmark."""
        busy = QUIET
        while busy >= QUIET and self.patience > 0:
            before = _busy_elsewhere()
            time.sleep(1)
            busy = _busy_elsewhere() - before
            self.patience -= 1 if busy >= QUIET else 0

    def note(self) -> str:
        noisy = sum(cores > QUIET for cores in self.disturbed)
        if not noisy:
            return f"No other process used more than {QUIET:.0%} of a core during any of the {len(self.disturbed)} measurements."
        return f"Other processes used up to {max(self.disturbed):.1f} cores during {noisy} of the {len(self.disturbed)} measurements, which may lengthen them."


def _busy_elsewhere() -> float:
    """Seconds of CPU that processes other than this one and its children have used since the machine started."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # all but idle and waiting for disks
    own = os.times()
    return busy - (own.user + own.system + own.children_user + own.children_system)


# -- reports ---------------------------------------------------------------------------------------------------------


def arguments(description: str, *flags: tuple[str, str]) -> argparse.Namespace:
    """The command line every benchmark has, with its own flags (name, help)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help=f"also write the report under {RESULTS.relative_to(Path(__file__).parents[1])}/")
    parser.add_argument("--name", default=Path(sys.argv[0]).stem, help="the saved report's name (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="CPU threads torch may use (default: %(default)s)")
    for name, text in flags:
        parser.add_argument(name, action="store_true", help=text)
    return parser.parse_args()


def machine(threads: int) -> str:
    """One line on what the numbers were measured on."""
    import tilewise

    versions = f"tilewise {tilewise.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{versions}, {_cpu()}, {os.cpu_count()} cores, {threads} threads"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table whose columns line up in a terminal too; the first column to the left, the others to the right."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[c]) for row in cells) for c in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(w) if c == 0 else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))) + " |" for row in cells]
    rule = "|" + "|".join("-" * (w + 2) if c == 0 else "-" * (w + 1) + ":" for c, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def report(script: str, options: argparse.Namespace, title: str, sections: Sequence[str]) -> None:
    """Print the report and, if asked, save it under the script's name."""
    named = [] if options.name == Path(script).stem else ["--name", options.name]
    command = " ".join(["python", f"benchmarks/{Path(script).name}", *[f"--{name}" for name, value in vars(options).items() if value is True], *named])
    text = "\n\n".join([f"# {title}", f"Measured on: {machine(options.threads)}.  \nRepeat with: `{command}`", *sections])
    print("\n" + text)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{options.name}.md"
        path.write_text(text + "\n")
        print(f"\nsaved to {path}")


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def time_text(ms: float) -> str:
    return f"{ms:.1f} ms" if ms < 1000 else f"{ms / 1000:.2f} s"


def memory_text(size: int) -> str:
    return f"{size / MIB:.0f} MiB" if size >= MIB else "below 1 MiB"
