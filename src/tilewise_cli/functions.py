"""Masks and scores that users name on the command line, as file.py:name."""

import importlib.util
import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer


def functions(names: list[str]) -> tuple[list[Any], list[Any]]:
    """file.py:name -> the mask functions and the score functions among them, told apart by their parameters."""
    masks: list[Any] = []
    scores: list[Any] = []
    for text in names:
        file, _, name = text.rpartition(":")
        path = Path(file)
        spec = importlib.util.spec_from_file_location(path.stem, path) if file and path.is_file() else None
        if spec is None or spec.loader is None:
            raise typer.BadParameter(f"{text!r}: write file.py:name, with an existing Python file", param_hint="WHAT")
        module = importlib.util.module_from_spec(spec)
        with told_by_line([file]):
            spec.loader.exec_module(module)
        found = getattr(module, name, None)
        if not callable(found):
            there = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
            raise typer.BadParameter(f"{path} has no function {name!r}; it has: {there or 'none'}", param_hint="WHAT")
        (scores if _parameters(found, text) == 5 else masks).append(found)
    return masks, scores


def _parameters(function: Any, text: str) -> int:
    try:
        return len(inspect.signature(function).parameters)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no function of (b, h, q, kv) or (score, b, h, q, kv)", param_hint="WHAT") from None


@contextmanager
def told_by_line(files: list[str]) -> Iterator[None]:
    """What goes wrong in a user's file is told with its line."""
    from tilewise.errors import InputError, TilewiseError

    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename in {*files, *[str(Path(f).absolute()) for f in files]}]
        unreadable = frames[-1].filename.startswith("<frozen importlib") and not isinstance(error, ImportError)  # Python could not even begin with it
        if isinstance(error, TilewiseError) or not (lines or unreadable):
            raise
        file, said = files[0] if len(files) == 1 else "a given file", f"{type(error).__name__}: {error}"
        if isinstance(error, SyntaxError) and error.lineno is not None:
            file, lines, said = str(error.filename), [error.lineno], error.msg
        raise InputError(f"{file}{f', line {lines[-1]}' if lines else ''}: {said}") from error
