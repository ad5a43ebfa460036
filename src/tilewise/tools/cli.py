"""The `tilewise` command. Its libraries (Typer, Rich) come with `pip install 'tilewise[cli]'`."""

import sys


def main() -> None:
    try:
        import rich  # noqa: F401  (to see whether it is there)
        import typer  # noqa: F401  (likewise)
    except ImportError as error:
        sys.exit(f"the tilewise command needs {error.name}: pip install 'tilewise[cli]'")
    from tilewise.tools.commands import app

    app()
