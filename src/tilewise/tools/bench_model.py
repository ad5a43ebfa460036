"""`tilewise bench model`: one whole model on this machine with every attention, as a table and as bars."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from tilewise.errors import InputError
from tilewise.tools.bench_models import processes, shown
from tilewise.tools.bench_models.processes import Findings, Key, Result, Settings
from tilewise.tools.bench_models.rows import IMPLEMENTATIONS, ROWS, Job, Row, has_fa3


@dataclass(frozen=True)
class Measured:
    """One model's results, by mode and implementation."""

    row: Row
    settings: Settings
    findings: Findings
    modes: dict[str, dict[str, Result]]

    @property
    def title(self) -> str:
        name = f"{self.row.name}, tiny" if self.settings.tiny else self.row.about
        return f"{name}, {self.findings.device}, {self.findings.versions}"

    @property
    def tilewise_failed(self) -> bool:
        return any("tilewise" in results and results["tilewise"].failed for results in self.modes.values())


def tables_of_models() -> tuple[Table, Table]:
    models = Table("model", "what it is", "from", "measured")
    for row in ROWS.values():
        models.add_row(row.name, row.about, row.client, ", ".join(row.modes))
    implementations = Table("implementation", "what it is")
    for name, about in IMPLEMENTATIONS.items():
        implementations.add_row(name, about)
    return models, implementations


def models_as_json() -> dict[str, Any]:
    rows = {row.name: {"about": row.about, "from": row.client, "modes": row.modes, "implementations": row.implementations} for row in ROWS.values()}
    return {"models": rows, "implementations": IMPLEMENTATIONS}


def measure(row: Row, jobs: list[Job], settings: Settings, tell: Callable[[dict[str, Any]], None]) -> Measured:
    findings = processes.measure(jobs, settings, tell)
    if not findings.results:
        raise InputError(f"{row.name} was not measured")
    return Measured(row, settings, findings, {job.mode: by_implementation(job, findings) for job in jobs})


def table(found: Measured) -> Table:
    lines = [(mode, *shown.cells(name, results)) for mode, results in found.modes.items() for name in results]
    columns = ("", *shown.COLUMNS)
    said = [k for k in range(len(columns)) if any(line[k] not in ("", shown.NOTHING) for line in lines)]  # a CPU has no peak of GPU memory
    drawn = Table(*[columns[k] for k in said], title=found.title)
    for line in lines:
        drawn.add_row(*[escape(line[k]) for k in said])
    return drawn


def notes(found: Measured, only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[str]:
    """What is said below the table, of which implementations were asked for too."""
    said = []
    for mode, results in found.modes.items():
        more = shown.microseconds_a_layer(found.row, results) if found.row.host_layers else None
        if more is not None:
            said.append(f"{mode}: tilewise takes {more:+.0f} us a layer more than SDPA")
    if found.settings.device.startswith("cuda") and "fa3" in found.row.implementations and not has_fa3():
        said.append(shown.NO_FA3)
    if not found.settings.device.startswith("cuda") and "flex" in found.row.implementations and not only and "flex" not in skip:
        said.append(shown.NO_FLEX)
    return said


def as_json(found: Measured) -> dict[str, Any]:
    """Times in milliseconds; `ms` is their median, and `off` the difference from the implementation `beside`."""
    results = {mode: {name: asdict(result) | {"ms": result.ms} for name, result in by_name.items()} for mode, by_name in found.modes.items()}
    where = {"device": found.findings.device, "versions": found.findings.versions}
    return {"model": found.row.name, "about": found.row.about, "tiny": found.settings.tiny, **where, "results": results}


def by_implementation(job: Job, findings: Findings) -> dict[str, Result]:
    return {name: findings.results[key] for name in job.implementations if (key := (job.row, job.mode, name)) in findings.results}


class Advance:
    """Moves a progress bar by the events of the measuring: each implementation's first call and its turns."""

    def __init__(self, progress: Progress, jobs: list[Job], rounds: int) -> None:
        self.progress, self.steps = progress, 1 + rounds
        self.taken: dict[Key, int] = {}
        self.bar: TaskID = progress.add_task("starting", total=self.steps * sum(len(job.implementations) for job in jobs))

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "building":
            self.progress.update(self.bar, description=f"building {event['row']}")
        if "implementation" not in event:
            return
        key = event["row"], event["mode"], event["implementation"]
        if kind == "begin":
            self.progress.update(self.bar, description=f"{event['mode']}, {event['implementation']}" + ("" if self.taken.get(key) else ": first call"))
        else:
            self.taken[key] = {"first": 1, "time": self.taken.get(key, 0) + 1, "failed": self.steps}[kind]
        self.progress.update(self.bar, completed=sum(self.taken.values()))


def draw(found: Measured, path: Path) -> str:
    """The time of every implementation that ran, a panel for each mode."""
    try:
        import matplotlib
    except ImportError:
        return "not drawn; matplotlib is not installed (pip install 'tilewise[viz]')"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(found.modes), figsize=(6.5 * len(found.modes), 3.5), squeeze=False)
    for panel, (mode, results) in zip(panels[0], found.modes.items(), strict=True):
        times = {name: result.ms for name, result in results.items() if result.ms is not None}
        bars = panel.barh(list(times), list(times.values()), color=["tab:orange" if name == "tilewise" else "tab:blue" for name in times])
        panel.bar_label(bars, labels=[shown.milliseconds(ms) for ms in times.values()], padding=3)
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.set_title(f"{mode}, ms")
    figure.suptitle(found.title, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)
