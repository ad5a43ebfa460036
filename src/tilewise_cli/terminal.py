"""What the commands write: results to standard output, as tables or JSON; progress to standard error, and only where that is a terminal."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

console = Console()


def print_json(found: Any) -> None:
    print(json.dumps(found, indent=2))


@contextmanager
def loading() -> Iterator[None]:
    """Around the imports of the library: torch takes seconds."""
    with Console(stderr=True).status("loading torch"):
        yield


class Steps:
    """A progress bar of steps that have names: called with (done, total, name of the step)."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress, self._bar = progress, progress.add_task(what, total=None)

    def __call__(self, done: int, total: int, name: str) -> None:
        self._progress.update(self._bar, completed=done, total=total, description=escape(name))


@contextmanager
def steps(what: str) -> Iterator[Steps]:
    with progress_bar() as progress:
        yield Steps(progress, what)


def progress_bar() -> Progress:
    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
