"""Whole models of random weights, each with torch's SDPA, FlexAttention and tilewise: training steps and inference.

    python benchmarks/models.py                              # every row that this machine can run
    python benchmarks/models.py --only flux wan --save       # some rows; --save keeps the results of all others
    python benchmarks/models.py --skip flex --total 520      # what fits into 520 seconds; flex compiles for minutes
    python benchmarks/models.py --only llama --impl flex     # one implementation; the others' earlier results stay
    python benchmarks/models.py --readme                     # the README's table, from the saved results

Implementations take turns within a row, and every time is the median of the turns. On a GPU a row has a process of its own; what makes it crash
is written into the table, and the row goes on in another process without it. Caches of compiled kernels are empty when a row begins,
unless --warm is given.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import torch
from common import RESULTS, progress, table

from tilewise.tools.bench_models import processes, shown
from tilewise.tools.bench_models.processes import Findings, Result, Settings
from tilewise.tools.bench_models.rows import IMPLEMENTATIONS, INFERENCE, ROWS, STEP, Job, Row, check, find, jobs_of, missing
from tilewise.tools.bench_models.workload import Scale

STORED, REPORT = RESULTS / "models.json", RESULTS / "models.md"
BASELINES = ("sdpa", "native", "eager")  # a row has one of these
MODES = {STEP: "training step", INFERENCE: "inference"}
TINY = ", tiny"  # ends the name of a machine, for what was measured there of tiny models
HOST_TIMES = "Host time: 16 layers so small that the device waits for the host (on a GPU); medians of turns, and of their differences within a round:"
ELSEWHEN = "\\*"  # marks what was measured in another run than tilewise's


# -- measuring -------------------------------------------------------------------------------------------------------


def options() -> argparse.Namespace:
    names = "\n".join(["rows:", *[f"  {row.name:18s} {row.about} ({row.client}; {', '.join(row.modes)})" for row in ROWS.values()]])
    implementations = "\n".join(["implementations:", *[f"  {name:18s} {about}" for name, about in IMPLEMENTATIONS.items()]])
    parser = argparse.ArgumentParser(description=__doc__, epilog=f"{names}\n\n{implementations}", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ROW", default=[], help="measure only these rows")
    parser.add_argument("--mode", nargs="+", choices=list(MODES), default=[], help="measure only this")
    parser.add_argument("--impl", nargs="+", metavar="NAME", default=[], help="measure only these implementations")
    parser.add_argument("--skip", nargs="+", metavar="NAME", default=[], help="do not measure these implementations")
    parser.add_argument("--tiny", action=argparse.BooleanOptionalAction, help="few tokens and narrow layers; the default on a CPU")
    parser.add_argument("--device", help="the GPU if there is one, unless given")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each implementation takes (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=400, help="seconds after which an implementation that has not finished a call is stopped (default: %(default)s)"
    )
    parser.add_argument("--total", type=float, default=float("inf"), help="seconds after which everything ends; what was measured until then counts")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="CPU threads torch may use on a CPU (default: %(default)s)")
    parser.add_argument("--warm", action="store_true", help="use kernels that this machine has compiled before: first calls are shorter")
    parser.add_argument("--save", action="store_true", help=f"merge the results into {STORED.name} and write {REPORT.name}, after every row")
    parser.add_argument("--readme", action="store_true", help="measure nothing; print the README's table from the saved results")
    parser.add_argument("--list", action="store_true", help="measure nothing; list the rows and the implementations")
    chosen = parser.parse_args()
    if chosen.list:
        print(f"{names}\n\n{implementations}")
        parser.exit()
    check([*chosen.impl, *chosen.skip])
    return chosen


def chosen_jobs(asked: argparse.Namespace, scale: Scale) -> list[list[Job]]:
    """What each process measures: a row on a GPU, where a crash costs a process; everything on a CPU, where importing costs most."""
    rows = [find(name) for name in asked.only] or [row for row in ROWS.values() if scale.device.type == "cuda" or not row.compiles]
    groups: list[list[Job]] = []
    for row in rows:
        lacking = missing(row)
        jobs = [] if lacking else jobs_of(row, scale, asked.mode, asked.impl, asked.skip)
        if not jobs:
            progress(lacking or f"{row.name}: nothing to measure on {scale.device}")
        groups.append(jobs)
    groups = [group for group in groups if group]
    return groups if scale.device.type == "cuda" else [[job for group in groups for job in group]]


def main() -> None:
    asked = options()
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    if asked.readme:
        print(readme(stored))
        return
    device = torch.device(asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    scale = Scale(device.type != "cuda" if asked.tiny is None else asked.tiny, device)
    threads = asked.threads if device.type == "cpu" else 0
    settings = Settings(scale.tiny, str(device), asked.rounds, threads, asked.limit, time.monotonic() + asked.total, asked.warm)
    run = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    here: dict[str, Any] = {}  # what this run measured, in the form that is stored
    for jobs in chosen_jobs(asked, scale):
        findings = processes.measure(jobs, settings, said)
        for job in jobs:
            unmeasured = [name for name in job.implementations if (job.row, job.mode, name) not in findings.results]
            if unmeasured:
                progress(f"{job.row}, {job.mode}: no time left for {', '.join(unmeasured)}")
        merge(here, findings, scale.tiny, run)
        merge(stored, findings, scale.tiny, run)
        if asked.save and findings.results:
            save(stored)
    print("\n" + report(here))
    if asked.save:
        print(f"\nmerged into {STORED} and {REPORT}")


def said(event: dict[str, Any]) -> None:
    """One line on what has been measured, or was not possible."""
    if event["event"] in ("first", "failed"):
        what = f"first call {event['seconds']:.1f} s" if event["event"] == "first" else event["why"]
        progress(f"{event['row']}, {event['mode']}, {event['implementation']}: {what}")


# -- the stored results ----------------------------------------------------------------------------------------------
# {machine: {"runs": {run: versions and command}, "results": {row: {mode: {implementation: a Result, and its run}}}}}


def merge(stored: dict[str, Any], findings: Findings, tiny: bool, run: str) -> None:
    """Put findings in the place of earlier ones of the same machine, row, mode and implementation; all others stay."""
    if not findings.results:
        return
    section = stored.setdefault(findings.device + (TINY if tiny else ""), {"runs": {}, "results": {}})
    command = shlex.join(["python", "benchmarks/models.py", *sys.argv[1:]])
    section["runs"][run] = {"versions": findings.versions, "command": command}
    for (row, mode, name), result in findings.results.items():
        section["results"].setdefault(row, {}).setdefault(mode, {})[name] = asdict(result) | {"run": run}
    used = {result["run"] for row in section["results"].values() for mode in row.values() for result in mode.values()}
    section["runs"] = {name: about for name, about in section["runs"].items() if name in used}


def save(stored: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    STORED.write_text(json.dumps(stored, indent=1) + "\n")
    REPORT.write_text(report(stored) + "\n")


class Measured:
    """One row in one mode, as stored: its results in the row's order, and which of them are not of tilewise's run."""

    def __init__(self, row: Row, mode: str, tiny: bool, found: dict[str, dict[str, Any]]) -> None:
        self.row = row
        about = row.name if tiny else row.about  # which tells the real sizes
        self.title = f"{about}, {MODES[mode]}" if len(row.modes) > 1 else about
        self.runs = {name: found[name]["run"] for name in row.implementations if name in found}
        self.results = {name: Result(**{key: value for key, value in found[name].items() if key != "run"}) for name in self.runs}

    def text(self, name: str, most: int = 40) -> str:
        """Milliseconds, or why there are none, in so many letters."""
        result = self.results.get(name)
        if result is None:
            return ""
        elsewhen = ELSEWHEN if self.runs[name] != self.runs.get("tilewise", self.runs[name]) else ""
        text = shown.time_of(result).replace("|", "/")
        return (text if len(text) <= most else f"{text[: most - 3]}...") + elsewhen

    def lead(self) -> str:
        """How many times as long the fastest other implementation takes as tilewise."""
        ours = self.results["tilewise"].ms if "tilewise" in self.results else None
        others = [found.ms for name, found in self.results.items() if name != "tilewise" and found.ms is not None]
        return f"{min(others) / ours:.2f}" if ours is not None and others else ""


def measured(machine: str, section: dict[str, Any]) -> list[Measured]:
    found, tiny = section["results"], machine.endswith(TINY)
    return [Measured(row, mode, tiny, found[row.name][mode]) for row in ROWS.values() for mode in row.modes if mode in found.get(row.name, {})]


# -- reports ---------------------------------------------------------------------------------------------------------


def report(stored: dict[str, Any]) -> str:
    """The page: for every machine the times side by side, host times, and everything about every implementation."""
    notes = [
        "# Whole models",
        "Random weights. Milliseconds of a training step without the optimizer, of a forward, or of generating; medians of turns, ~ of a single call. "
        "Beside the best: how many times as long the fastest other implementation takes as tilewise. "
        f"{ELSEWHEN} was measured in another run than tilewise's. [How to read it](../../docs/performance.md).",
    ]
    return "\n\n".join([*notes, *[part for machine, section in stored.items() for part in machine_report(machine, section)]])


def machine_report(machine: str, section: dict[str, Any]) -> list[str]:
    found = measured(machine, section)
    runs = "\n".join([f"- {run}: {about['versions']}; `{about['command']}`" for run, about in section["runs"].items()])
    parts = [f"## {machine}", runs, times([m for m in found if not m.row.host_layers])]
    host = [m for m in found if m.row.host_layers]
    if host:
        parts += [HOST_TIMES, host_times(host)]
    parts += [
        "Each implementation: its first call includes compiling; the difference is that of outputs (and gradients, of a step) from the first one's.",
        details(found),
    ]
    return parts if any("fa3" in m.results for m in found) else [*parts, shown.NO_FA3]


def times(found: Sequence[Measured]) -> str:
    names = [name for name in ("cudnn", "flash", "fa3", "flex") if any(name in m.results for m in found)]
    header = ["model", "SDPA or eager", *names, "tilewise", "beside the best"]
    return table(header, [[m.title, baseline(m), *[m.text(name) for name in names], m.text("tilewise"), m.lead()] for m in found])


def baseline(m: Measured) -> str:
    """SDPA's time, or eager attention's where SDPA cannot express the model."""
    name = next((name for name in BASELINES if name in m.results), "")
    return m.text(name) + (" (eager)" if name == "eager" else "")


def host_times(found: Sequence[Measured]) -> str:
    more = [shown.microseconds_a_layer(m.row, m.results) for m in found]
    lines = [[m.title, m.text("sdpa"), m.text("tilewise"), "" if us is None else f"{us:+.0f}"] for m, us in zip(found, more, strict=True)]
    return table(["model", "sdpa, ms", "tilewise, ms", "us a layer more"], lines)


def details(found: Sequence[Measured]) -> str:
    lines: list[list[str]] = []
    for m in found:
        for name in m.results:
            cells = shown.cells(name, m.results)
            lines.append([m.title, cells[0], m.text(name, most=200), *cells[2:]])
    return table(["model", *shown.COLUMNS], lines)


def readme(stored: dict[str, Any]) -> str:
    """The README's tables: the GPUs' rows, with SDPA, the best of its kernels and FA3, flex, tilewise; and host times."""
    parts: list[str] = []
    for machine, section in stored.items():
        if not machine.endswith(TINY):
            found = measured(machine, section)
            header = [f"{machine}, ms", "SDPA or eager", "cuDNN, FA2, FA3", "torch flex", "tilewise", "beside the best", "first call, flex / tilewise"]
            parts.append(table(header, [readme_line(m) for m in found if not m.row.host_layers]))
            parts.append(host_times([m for m in found if m.row.host_layers]))
    return "\n\n".join(parts) or f"{STORED} has no results of a GPU: python benchmarks/models.py --save"


def readme_line(m: Measured) -> list[str]:
    first = {name: m.results[name].first_s for name in ("flex", "tilewise") if name in m.results}
    seconds = " / ".join("-" if first.get(name) is None else f"{first[name]:.1f} s" for name in ("flex", "tilewise"))
    return [m.title, baseline(m), best_of(m, ("cudnn", "flash", "fa3")), m.text("flex"), m.text("tilewise"), m.lead(), seconds]


def best_of(m: Measured, names: Sequence[str]) -> str:
    ran = [name for name in names if name in m.results and m.results[name].ms is not None]
    best = min(ran, key=lambda name: m.results[name].ms or 0, default=None)
    if best is not None:
        return f"{m.text(best)} ({best})"
    return ", ".join(f"{name}: {m.text(name)}" for name in names if name in m.results)


if __name__ == "__main__":
    main()
