"""Runs the `tilewise` command. Its libraries (Typer, Rich) come with `pip install 'tilewise[cli]'`."""

import os
import sys
from collections.abc import Sequence
from typing import Any

MISTAKE, REFUSED, INTERRUPTED, CLOSED_PIPE = 2, 1, 130, 1  # exit codes; a closed pipe's is Typer's own, where it sees it first


def main() -> None:
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before the command itself, or after it
        code = INTERRUPTED
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """The exit code of a command. What a user can get wrong, or a disk, is told in one line; anything else is a bug of ours and keeps its traceback."""
    try:
        import rich  # noqa: F401  (to see whether it is there)
        import typer
    except ImportError as error:
        return _tell(f"the tilewise command needs {error.name}: pip install 'tilewise[cli]'", REFUSED)
    from tilewise_cli.app import app

    # Which package has it depends on Typer's version.
    usage_error: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        code = app(list(arguments), prog_name="tilewise", standalone_mode=False)
        sys.stdout.flush()
    except typer.Abort:  # in some versions of Typer, Ctrl-C
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes at the end
        return CLOSED_PIPE
    except OSError as error:
        return _tell(f"{error.filename}: {error.strerror}" if error.filename else str(error), REFUSED)
    except usage_error as error:
        if not arguments or type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            return MISTAKE
        command = "tilewise" if error.ctx is None else error.ctx.command_path
        return _tell(f"{error.format_message()} (see {command} --help)", MISTAKE)
    except Exception as error:  # tilewise's own are told apart by name: importing their class would import torch
        if not _is_tilewise_error(error):
            raise
        return _tell(str(error), REFUSED)
    return code if isinstance(code, int) else 0


def _is_tilewise_error(error: Exception) -> bool:
    """Asked without importing the library: where it is not loaded, nothing of it was raised."""
    errors = sys.modules.get("tilewise.errors")
    return errors is not None and isinstance(error, errors.TilewiseError)


def _tell(mistake: str, code: int) -> int:
    print(f"tilewise: {' '.join(mistake.split())}", file=sys.stderr)
    return code
