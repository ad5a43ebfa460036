"""`tilewise bench model`: one whole model on this machine with every attention, as a table and as bars."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from tilewise.errors import InputError
from tilewise.tools.bench_models import processes, shown
from tilewise.tools.bench_models.processes import Findings, Key, Result, Settings
from tilewise.tools.bench_models.rows import IMPLEMENTATIONS, ROWS, Job, Row, has_fa3

Measure = Callable[..., Findings]


def list_models() -> int:
    models = Table("model", "what it is", "from", "measured")
    for row in ROWS.values():
        models.add_row(row.name, row.about, row.client, ", ".join(row.modes))
    implementations = Table("implementation", "what it is")
    for name, about in IMPLEMENTATIONS.items():
        implementations.add_row(name, about)
    Console().print(models, implementations)
    return 0


def run(row: Row, jobs: list[Job], settings: Settings, out: Path, measure: Measure = processes.measure) -> int:
    """Measure, print the table and draw the bars. 1 if tilewise itself could not."""
    out.parent.mkdir(parents=True, exist_ok=True)  # an error now, not after minutes of measuring
    console = Console()
    with Progress(console=console, transient=True) as progress:
        findings = measure(jobs, settings, Advance(progress, jobs, settings.rounds))
    if not findings.results:
        raise InputError(f"{row.name} was not measured")
    title = f"{row.name + ', tiny' if settings.tiny else row.about}, {findings.device}, {findings.versions}"
    modes = {job.mode: by_implementation(job, findings) for job in jobs}
    table = Table("", *shown.COLUMNS, title=title)
    for mode, results in modes.items():
        for name in results:
            table.add_row(mode, *[escape(cell) for cell in shown.cells(name, results)])
    console.print(table)
    for mode, results in modes.items():
        more = shown.microseconds_a_layer(row, results) if row.host_layers else None
        if more is not None:
            console.print(f"{mode}: tilewise takes {more:+.0f} us a layer more than SDPA", highlight=False)
    if not has_fa3() and "fa3" in row.implementations:
        console.print(shown.NO_FA3, highlight=False)
    console.print(f"bars: {draw(modes, title, out)}", highlight=False, markup=False)
    return 1 if any("tilewise" in results and results["tilewise"].failed for results in modes.values()) else 0


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


def draw(modes: dict[str, dict[str, Result]], title: str, path: Path) -> str:
    """The time of every implementation that ran, a panel for each mode."""
    try:
        import matplotlib
    except ImportError:
        return "not drawn, matplotlib is missing: pip install 'tilewise[viz]'"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(modes), figsize=(6.5 * len(modes), 3.5), squeeze=False)
    for panel, (mode, results) in zip(panels[0], modes.items(), strict=True):
        times = {name: found.ms for name, found in results.items() if found.ms is not None}
        bars = panel.barh(list(times), list(times.values()), color=["tab:orange" if name == "tilewise" else "tab:blue" for name in times])
        panel.bar_label(bars, labels=[shown.milliseconds(ms) for ms in times.values()], padding=3)
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.set_title(f"{mode}, ms")
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)
