"""`tilewise bench` and `tilewise bench model`."""

from pathlib import Path
from typing import Annotated

import typer

from tilewise_cli.options import Device, Json, Picture, picture, usable
from tilewise_cli.terminal import console, loading, print_json, progress_bar, steps

benchmarks = typer.Typer(invoke_without_command=True)


@benchmarks.callback()
def bench(
    context: typer.Context,
    out: Picture = Path("tilewise-bench.png"),
    length: Annotated[int | None, typer.Option(min=64, help="Tokens; 16384 on a GPU and 2048 on a CPU unless given.")] = None,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    head_dim: Annotated[int, typer.Option(min=1, max=512)] = 128,
    device: Device = "",
    as_json: Json = False,
) -> None:
    """Masks and scores on this machine, forward and backward, beside torch's SDPA and FlexAttention; draws the bars as a PNG."""
    if context.invoked_subcommand is not None:
        return _refuse_options_before(context)
    path = picture(out)
    with loading():
        from tilewise.tools import bench
    where = usable(device)
    usual = 16384 if where.type == "cuda" else 2048
    with steps("measuring") as tell:
        found = bench.measure(usual if length is None else length, heads, head_dim, where, tell)
    drawn = bench.draw(found, path)
    if as_json:
        return print_json(bench.as_json(found) | {"picture": drawn})
    console.print(bench.table(found))
    console.print(f"bars: {drawn}", highlight=False, markup=False, soft_wrap=True)


def _refuse_options_before(context: typer.Context) -> None:
    """`bench --out x model` would be measured without them."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            hint = "--json" if name == "as_json" else f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"write it after {context.invoked_subcommand!r}", param_hint=hint)


@benchmarks.command()
def model(
    name: Annotated[str, typer.Argument(help="The model; without one, they are listed.")] = "",
    show: Annotated[bool, typer.Option("--list", help="List the models and the implementations.")] = False,
    mode: Annotated[list[str] | None, typer.Option(help="step or inference; both unless given.", autocompletion=lambda: ["step", "inference"])] = None,
    impl: Annotated[list[str] | None, typer.Option(help="Only this implementation; may be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Not this implementation; may be repeated.")] = None,
    tiny: Annotated[bool | None, typer.Option("--tiny/--full", help="Few tokens and narrow layers, or real widths; tiny on a CPU unless given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How many turns each implementation takes.")] = 5,
    limit: Annotated[int, typer.Option(min=1, help="Seconds after which an implementation that has not finished a call is stopped.")] = 400,
    warm: Annotated[bool, typer.Option(help="Use kernels that this machine has compiled before: first calls are shorter.")] = False,
    device: Device = "",
    out: Picture = Path("tilewise-bench-model.png"),
    as_json: Json = False,
) -> None:
    """A whole model of random weights on this machine, with SDPA, FlexAttention and tilewise: a table, and bars as a PNG."""
    with loading():
        from tilewise.errors import InputError
        from tilewise.tools import bench_model
        from tilewise.tools.bench_models import processes, rows
        from tilewise.tools.bench_models.workload import Scale
    if show or not name:
        return print_json(bench_model.models_as_json()) if as_json else console.print(*bench_model.tables_of_models())
    row = rows.find(name)
    rows.check([*(impl or []), *(skip or [])])
    rows.check_modes(row, mode or [])
    lacking = rows.missing(row)
    if lacking is not None:
        raise InputError(lacking)
    path = picture(out)
    where = usable(device)
    scale = Scale(where.type != "cuda" if tiny is None else tiny, where)
    for implementation in impl or []:
        reason = rows.why_not(implementation, scale)
        if reason is not None:
            raise InputError(reason)
    jobs = rows.jobs_of(row, scale, mode or [], impl or [], skip or [])
    if not jobs:
        raise InputError(f"nothing is left to measure of {name} on {where}: it has the modes {row.modes} and the implementations {row.implementations}")
    settings = processes.Settings(scale.tiny, str(where), rounds, limit=limit, warm=warm)
    with progress_bar() as progress:
        found = bench_model.measure(row, jobs, settings, bench_model.Advance(progress, jobs, rounds))
    drawn = bench_model.draw(found, path)
    if as_json:
        print_json(bench_model.as_json(found) | {"picture": drawn})
    else:
        console.print(bench_model.table(found))
        for note in [*bench_model.notes(found, impl or [], skip or []), f"bars: {drawn}"]:
            console.print(note, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(1 if found.tilewise_failed else 0)
