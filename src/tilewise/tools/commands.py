"""The subcommands of `tilewise`."""

import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tilewise
from tilewise.core import store
from tilewise.errors import TilewiseError

app = typer.Typer(name="tilewise", help="Attention that you program in Python and that runs tile by tile.", no_args_is_help=True, add_completion=False)
cache = typer.Typer(help="Look after the store of compiled kernels.", no_args_is_help=True)
app.add_typer(cache, name="cache")
console = Console()
PICTURES = (".png", ".pdf", ".svg", ".jpg")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures of the tile maps.")] = Path("tilewise-demo"),
    length: Annotated[int, typer.Option(min=64, help="Tokens per sequence.")] = 2048,
    device: Annotated[str, typer.Option(help="Device to run on; the GPU if there is one, unless given.")] = "",
) -> None:
    """A short tour: masks, their tile maps, attention forward and backward, checked and timed beside torch."""
    from tilewise.tools.demo import tour

    raise typer.Exit(tour(out, length, str(usable(device))))


def usable(device: str) -> torch.device:
    """The device of an option; the GPU if there is one, unless given."""
    if not device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises AssertionError for "not compiled with CUDA"
        raise typer.BadParameter(f"torch cannot use the device {device!r} here: {str(error).splitlines()[0][:120]}", param_hint="--device") from None
    return torch.device(device)


@app.command()
def bench(
    out: Annotated[Path, typer.Option(help="Where to draw the bars.")] = Path("tilewise-bench.png"),
    length: Annotated[int | None, typer.Option(min=64, help="Tokens; 16384 on a GPU and 2048 on a CPU unless given.")] = None,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    head_dim: Annotated[int, typer.Option(min=1, max=512)] = 128,
    device: Annotated[str, typer.Option(help="Device to run on; the GPU if there is one, unless given.")] = "",
) -> None:
    """Masks and scores on this machine, forward and backward, beside torch's SDPA and FlexAttention; draws the bars as a PNG."""
    from tilewise.tools.bench import run

    if out.suffix.lower() not in PICTURES:
        raise typer.BadParameter(f"{out} is no picture; its name must end in one of {', '.join(PICTURES)}", param_hint="--out")
    where = usable(device)
    usual = 16384 if where.type == "cuda" else 2048
    raise typer.Exit(run(out, usual if length is None else length, heads, head_dim, where))


@app.command()
def backends() -> None:
    """List every backend name and what it is."""
    table = Table("backend", "what it is")
    for name, summary in tilewise.backends().items():
        table.add_row(name, summary)
    console.print(table)


@app.command()
def version() -> None:
    """Print the versions of tilewise, torch and Python."""
    print(f"tilewise {tilewise.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """Examine this machine: versions, GPU, store, and every engine run against the reference. Exits 1 if something is wrong."""
    from tilewise.tools import doctor as examination

    findings = examination.examine()
    if as_json:
        print(json.dumps(examination.as_json(findings), indent=2))
    else:
        colours = {"ok": "green", "note": "yellow", "problem": "red"}
        table = Table("what", "", "found", "to do")
        for f in findings:
            table.add_row(f.what, f"[{colours[f.status]}]{f.status}", f.detail, f.fix)
        console.print(table)
    raise typer.Exit(0 if examination.healthy(findings) else 1)


@app.command()
def build(
    what: Annotated[list[str] | None, typer.Argument(help="Masks or scores to build for, as file.py:name; plain and causal if none is given.")] = None,
    arch: Annotated[list[str] | None, typer.Option(help="Architecture, such as sm_90, or cpu; this machine's GPU unless given.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Head dim; 64 and 128 unless given.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp16 or fp32; bf16 unless given.")] = None,
    forward_only: Annotated[bool, typer.Option(help="Leave out the backward's kernels.")] = False,
    decode: Annotated[bool, typer.Option(help="Also the kernels for single queries over long caches.")] = False,
) -> None:
    """Compile kernels ahead of time into the store; works without a GPU, and does nothing the second time."""
    masks, scores = _functions(what or [])
    if not what:
        masks = [None, tilewise.masks.causal]
    try:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("compiling", total=None)
            report = tilewise.build_kernels(
                masks or [None],
                scores or [None],
                head_dim or [64, 128],
                dtype or ["bf16"],
                arch,
                backward=not forward_only,
                decode=decode,
                progress=lambda done, total, name: progress.update(bar, completed=done, total=total, description=name),
            )
    except TilewiseError as error:
        console.print(f"[red]{error}", highlight=False)
        raise typer.Exit(1) from None
    console.print(str(report), highlight=False, soft_wrap=True)


def _functions(names: list[str]) -> tuple[list[Any], list[Any]]:
    """file.py:name -> the mask functions and the score functions among them, told apart by their parameters."""
    import inspect

    masks: list[Any] = []
    scores: list[Any] = []
    for text in names:
        file, _, name = text.rpartition(":")
        path = Path(file)
        if not file or not path.is_file():
            console.print(f"[red]{text!r}: write file.py:name, with an existing file", highlight=False)
            raise typer.Exit(2)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found = getattr(module, name, None)
        if not callable(found):
            there = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
            console.print(f"[red]{path} has no function {name!r}; it has: {there}", highlight=False)
            raise typer.Exit(2)
        (scores if len(inspect.signature(found).parameters) == 5 else masks).append(found)
    return masks, scores


@cache.command()
def info() -> None:
    """Where the kernels are, how many, how large."""
    entries = store.entries()
    print(f"{store.kernel_root()}: {len(entries)} kernels, {sum(p.stat().st_size for p in entries) / 2**20:.1f} MiB")


@cache.command()
def verify() -> None:
    """Check every kernel against its checksum. Exits 1 if one is damaged."""
    damaged = store.damaged()
    for path in damaged:
        print(f"damaged: {path}")
    print(f"{len(store.entries()) - len(damaged)} kernels are sound, {len(damaged)} damaged")
    raise typer.Exit(1 if damaged else 0)


@cache.command()
def clear() -> None:
    """Remove every kernel; they are built again when needed."""
    print(f"{store.clear()} kernels removed from {store.kernel_root()}")


@cache.command("export")
def export(file: Annotated[Path, typer.Argument(help="Archive to write.")]) -> None:
    """Pack every kernel into one file, to carry them to another machine."""
    entries = store.entries()
    with zipfile.ZipFile(file, "w") as archive:
        for path in entries:
            archive.write(path, path.name)
    print(f"{len(entries)} kernels written to {file}")


@cache.command("import")
def import_(file: Annotated[Path, typer.Argument(help="Archive that `tilewise cache export` wrote.", exists=True)]) -> None:
    """Take kernels from an archive; each is checked before it is kept."""
    imported = refused = 0
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            key = name.removesuffix(store.ENDING)
            if not (name.endswith(store.ENDING) and len(key) == 64 and all(c in "0123456789abcdef" for c in key)):
                refused += 1
                continue
            try:
                store.write(key, store.unpack(archive.read(name)))
                imported += 1
            except ValueError:
                refused += 1
    print(f"{imported} kernels taken into {store.kernel_root()}" + (f", {refused} entries refused" if refused else ""))
    raise typer.Exit(1 if refused else 0)
