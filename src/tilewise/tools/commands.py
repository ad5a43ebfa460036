"""The subcommands of `tilewise`."""

import importlib.util
import inspect
import json
import sys
import traceback
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

import tilewise
from tilewise.core import store
from tilewise.engines.cpp.libraries import MAX_LOADED
from tilewise.errors import InputError, TilewiseError

app = typer.Typer(name="tilewise", help="Attention that you program in Python and that runs tile by tile.", no_args_is_help=True, add_completion=False)
cache = typer.Typer(help="Look after the store of compiled kernels.", no_args_is_help=True)
app.add_typer(cache, name="cache")
benchmarks = typer.Typer(invoke_without_command=True)
app.add_typer(benchmarks, name="bench")
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


@benchmarks.callback()
def bench(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Where to draw the bars.")] = Path("tilewise-bench.png"),
    length: Annotated[int | None, typer.Option(min=64, help="Tokens; 16384 on a GPU and 2048 on a CPU unless given.")] = None,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    head_dim: Annotated[int, typer.Option(min=1, max=512)] = 128,
    device: Annotated[str, typer.Option(help="Device to run on; the GPU if there is one, unless given.")] = "",
) -> None:
    """Masks and scores on this machine, forward and backward, beside torch's SDPA and FlexAttention; draws the bars as a PNG."""
    from tilewise.tools.bench import run

    if context.invoked_subcommand is not None:
        _refuse_options_before(context)
        return
    where = usable(device)
    usual = 16384 if where.type == "cuda" else 2048
    raise typer.Exit(run(picture(out), usual if length is None else length, heads, head_dim, where))


def _refuse_options_before(context: typer.Context) -> None:
    """`bench --out x model` would be measured without them."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"write it after {context.invoked_subcommand!r}", param_hint=f"--{name.replace('_', '-')}")


def picture(out: Path) -> Path:
    if out.suffix.lower() not in PICTURES:
        raise typer.BadParameter(f"{out} is no picture; its name must end in one of {', '.join(PICTURES)}", param_hint="--out")
    return out


@benchmarks.command()
def model(
    name: Annotated[str, typer.Argument(help="The model; without one, they are listed.")] = "",
    show: Annotated[bool, typer.Option("--list", help="List the models and the implementations.")] = False,
    mode: Annotated[list[str] | None, typer.Option(help="step or inference; both unless given.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help="Only this implementation; may be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Not this implementation; may be repeated.")] = None,
    tiny: Annotated[bool | None, typer.Option("--tiny/--full", help="Few tokens and narrow layers, or real widths; tiny on a CPU unless given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How many turns each implementation takes.")] = 5,
    limit: Annotated[int, typer.Option(min=1, help="Seconds after which an implementation that has not finished a call is stopped.")] = 400,
    warm: Annotated[bool, typer.Option(help="Use kernels that this machine has compiled before: first calls are shorter.")] = False,
    device: Annotated[str, typer.Option(help="Device to run on; the GPU if there is one, unless given.")] = "",
    out: Annotated[Path, typer.Option(help="Where to draw the bars.")] = Path("tilewise-bench-model.png"),
) -> None:
    """A whole model of random weights on this machine, with SDPA, FlexAttention and tilewise: a table, and bars as a PNG."""
    from tilewise.tools import bench_model
    from tilewise.tools.bench_models import processes, rows
    from tilewise.tools.bench_models.workload import Scale

    if show or not name:
        raise typer.Exit(bench_model.list_models())
    row = rows.find(name)
    rows.check([*(impl or []), *(skip or [])])
    lacking = rows.missing(row)
    if lacking is not None:
        raise InputError(lacking)
    where = usable(device)
    scale = Scale(where.type != "cuda" if tiny is None else tiny, where)
    jobs = rows.jobs_of(row, scale, mode or [], impl or [], skip or [])
    if not jobs:
        raise InputError(f"nothing is left to measure of {name} on {where}: it has the modes {row.modes} and the implementations {row.implementations}")
    settings = processes.Settings(scale.tiny, str(where), rounds, limit=limit, warm=warm)
    raise typer.Exit(bench_model.run(row, jobs, settings, picture(out)))


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
            table.add_row(f.what, f"[{colours[f.status]}]{f.status}", escape(f.detail), escape(f.fix))
        console.print(table)
    raise typer.Exit(0 if examination.healthy(findings) else 1)


@app.command()
def build(
    what: Annotated[list[str] | None, typer.Argument(help="Masks or scores to build for, as file.py:name; plain and causal if none is given.")] = None,
    arch: Annotated[list[str] | None, typer.Option(help="Architecture, such as sm_90, or cpu; this machine's GPU unless given.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(min=1, help="Head dim; 64 and 128 unless given.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp16 or fp32; bf16 unless given.")] = None,
    forward_only: Annotated[bool, typer.Option(help="Leave out the backward's kernels.")] = False,
    decode: Annotated[bool, typer.Option(help="Also the kernels for single queries over long caches.")] = False,
) -> None:
    """Compile kernels ahead of time into the store; works without a GPU, and does nothing the second time."""
    masks, scores = _functions(what or [])
    if not what:
        masks = [None, tilewise.masks.causal]
    with Progress(console=console, transient=True) as progress, _told_by_line([name.rpartition(":")[0] for name in what or []]):
        bar = progress.add_task("compiling", total=None)
        report = tilewise.build_kernels(
            masks or [None],
            scores or [None],
            head_dim or [64, 128],
            dtype or ["bf16"],
            arch,
            backward=not forward_only,
            decode=decode,
            progress=lambda done, total, name: progress.update(bar, completed=done, total=total, description=escape(name)),
        )
    console.print(str(report), highlight=False, soft_wrap=True, markup=False)


def _functions(names: list[str]) -> tuple[list[Any], list[Any]]:
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
        with _told_by_line([file]):
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
def _told_by_line(files: list[str]) -> Iterator[None]:
    """What goes wrong in a user's file is told with its line."""
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


@cache.command()
def info() -> None:
    """Where the kernels are, how many, how large."""
    count, size, most = len(store.entries()), store.size() / 2**20, store.most_bytes() / 2**20
    print(f"{store.kernel_root()}: {count} kernels, {size:.1f} MiB of at most {most:.0f} MiB ({store.SIZE_VARIABLE}); the least recently used go first")
    print(f"a process keeps at most {MAX_LOADED} C++ libraries of masks and scores loaded")


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
    written = 0
    with zipfile.ZipFile(file, "w") as archive:
        for path in store.entries():
            with suppress(FileNotFoundError):  # another process has just evicted it
                archive.writestr(path.name, path.read_bytes())
                written += 1
    print(f"{written} kernels written to {file}")


@cache.command("import")
def import_(file: Annotated[Path, typer.Argument(help="Archive that `tilewise cache export` wrote.", exists=True)]) -> None:
    """Take kernels from an archive; each is checked before it is kept."""
    imported = refused = 0
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if _take(archive, member):
                    imported += 1
                else:
                    refused += 1
    except zipfile.BadZipFile as error:
        raise InputError(f"{file} is no archive that `tilewise cache export` wrote, or is damaged: {error}") from None
    print(f"{imported} kernels taken into {store.kernel_root()}" + (f", {refused} entries refused" if refused else ""))
    raise typer.Exit(1 if refused else 0)


def _take(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bool:
    """Keep one entry of an archive, if it is a kernel; its name is a key, and never a path."""
    key = member.filename.removesuffix(store.ENDING)
    if not (member.filename.endswith(store.ENDING) and len(key) == 64 and all(c in "0123456789abcdef" for c in key)):
        return False
    if member.compress_type != zipfile.ZIP_STORED:  # as exported; what is packed small may be of any size
        return False
    try:
        return store.write(key, store.unpack(archive.read(member)))
    except (ValueError, zipfile.BadZipFile, EOFError, RuntimeError):  # damaged, or encrypted
        return False
