"""`tilewise` and its commands. What they do is imported inside them: until a command runs, nothing here imports torch."""

import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tilewise_cli.bench import benchmarks
from tilewise_cli.cache import cache
from tilewise_cli.functions import functions, told_by_line
from tilewise_cli.options import Device, Json, usable
from tilewise_cli.terminal import console, loading, print_json, steps

COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
ARCHITECTURES = ("cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

app = typer.Typer(name="tilewise", no_args_is_help=True)
app.add_typer(cache, name="cache")
app.add_typer(benchmarks, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tilewise {_version()}")
        raise typer.Exit


def _version() -> str:
    """The library's, read from its file, which lies beside this package wherever it is installed."""
    return str(runpy.run_path(str(Path(__file__).parents[1] / "tilewise" / "_version.py"))["__version__"])


@app.callback()
def root(version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False) -> None:
    """Attention that you program in Python and that runs tile by tile."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures of the tile maps.")] = Path("tilewise-demo"),
    length: Annotated[int, typer.Option(min=64, help="Tokens per sequence.")] = 2048,
    device: Device = "",
) -> None:
    """A short tour: masks, their tile maps, attention forward and backward, checked and timed beside torch."""
    with loading():
        from tilewise.tools.demo import tour
    raise typer.Exit(tour(out, length, str(usable(device))))


@app.command()
def backends(as_json: Json = False) -> None:
    """List every backend name and what it is."""
    with loading():
        import tilewise
    if as_json:
        return print_json(tilewise.backends())
    table = Table("backend", "what it is")
    for name, summary in tilewise.backends().items():
        table.add_row(name, summary)
    console.print(table)


@app.command("version")
def versions(as_json: Json = False) -> None:
    """Print the versions of tilewise, torch and Python."""
    with loading():
        import torch
    found = {"tilewise": _version(), "torch": str(torch.__version__), "Python": sys.version.split()[0]}
    if as_json:
        return print_json(found)
    print(", ".join(f"{name} {version}" for name, version in found.items()))


@app.command()
def doctor(
    as_json: Json = False,
    report: Annotated[bool, typer.Option("--report", help="Print one block to paste into an issue, without user names and home folders.")] = False,
) -> None:
    """Examine this machine: versions, GPU, store, and every engine run against the reference. Exits 1 if something is wrong."""
    if as_json and report:
        raise typer.BadParameter("choose one of --json and --report", param_hint="--report")
    with loading():
        from tilewise.tools import doctor as examination
        from tilewise.tools.doctor_report import as_block
    with steps("examining") as tell:
        findings = examination.examine(tell)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    elif report:
        print(as_block(findings))
    else:
        has_fixes = any(f.fix for f in findings)
        table = Table("what", "", "found", *(["to do"] if has_fixes else []))
        for f in findings:
            table.add_row(f.what, f"[{COLOURS[f.status]}]{f.status}", escape(f.detail), *([escape(f.fix)] if has_fixes else []))
        console.print(table)
    raise typer.Exit(0 if examination.healthy(findings) else 1)


@app.command()
def build(
    what: Annotated[list[str] | None, typer.Argument(help="Masks or scores to build for, as file.py:name; plain and causal if none is given.")] = None,
    arch: Annotated[
        list[str] | None, typer.Option(help="Architecture, such as sm_90, or cpu; this machine's GPU unless given.", autocompletion=lambda: list(ARCHITECTURES))
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(min=1, help="Head dim; 64 and 128 unless given.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp16 or fp32; bf16 unless given.", autocompletion=lambda: ["bf16", "fp16", "fp32"])] = None,
    forward_only: Annotated[bool, typer.Option(help="Leave out the backward's kernels.")] = False,
    decode: Annotated[bool, typer.Option(help="Also the kernels for single queries over long caches.")] = False,
    as_json: Json = False,
) -> None:
    """Compile kernels ahead of time into the store; works without a GPU, and does nothing the second time."""
    with loading():
        import tilewise
    masks, scores = functions(what or [])
    if not what:
        masks = [None, tilewise.masks.causal]
    with steps("compiling") as tell, told_by_line([name.rpartition(":")[0] for name in what or []]):
        found = tilewise.build_kernels(
            masks or [None], scores or [None], head_dim or [64, 128], dtype or ["bf16"], arch, backward=not forward_only, decode=decode, progress=tell
        )
    if as_json:
        return print_json(asdict(found))
    console.print(str(found), highlight=False, soft_wrap=True, markup=False)
