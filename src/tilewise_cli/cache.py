"""`tilewise cache`: the store of compiled kernels."""

import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from tilewise_cli.options import Json
from tilewise_cli.terminal import loading, print_json, steps

cache = typer.Typer(help="Look after the store of compiled kernels.", no_args_is_help=True)


@cache.command()
def info(as_json: Json = False) -> None:
    """Where the kernels are, how many, how large."""
    with loading():
        from tilewise.core import store
        from tilewise.engines.cpp.libraries import MAX_LOADED
        from tilewise.tools.words import counted
    count, size, most = len(store.entries()), store.size(), store.most_bytes()
    if as_json:
        return print_json({"folder": str(store.kernel_root()), "kernels": count, "bytes": size, "most_bytes": most, "most_libraries": MAX_LOADED})
    bounds = f"{size / 2**20:.1f} MiB of at most {most / 2**20:.0f} MiB ({store.SIZE_VARIABLE}); the least recently used go first"
    print(f"{store.kernel_root()}: {counted(count, 'kernel')}, {bounds}")
    print(f"a process keeps at most {MAX_LOADED} C++ libraries of masks and scores loaded")


@cache.command()
def verify(as_json: Json = False) -> None:
    """Check every kernel against its checksum. Exits 1 if one is damaged."""
    with loading():
        from tilewise.core import store
        from tilewise.tools.words import counted
    with steps("reading kernels") as tell:
        paths = store.entries()
        damaged = []
        for done, path in enumerate(paths, 1):
            if store.is_damaged(path):
                damaged.append(path)
            tell(done, len(paths), "reading kernels")
    sound = len(paths) - len(damaged)
    if as_json:
        print_json({"sound": sound, "damaged": [str(path) for path in damaged]})
    else:
        for path in damaged:
            print(f"damaged: {path}")
        print(f"{counted(sound, 'sound kernel')}, {len(damaged)} damaged")
    raise typer.Exit(1 if damaged else 0)


@cache.command()
def clear() -> None:
    """Remove every kernel; they are built again when needed."""
    with loading():
        from tilewise.core import store
        from tilewise.tools.words import counted
    print(f"{counted(store.clear(), 'kernel')} removed from {store.kernel_root()}")


@cache.command("export")
def export(file: Annotated[Path, typer.Argument(help="Archive to write.")]) -> None:
    """Pack every kernel into one file, to carry them to another machine."""
    with loading():
        from tilewise.core import store
        from tilewise.tools.words import counted
    written = 0
    with zipfile.ZipFile(file, "w") as archive, steps("packing kernels") as tell:
        paths = store.entries()
        for done, path in enumerate(paths, 1):
            with suppress(FileNotFoundError):  # another process has just evicted it
                archive.writestr(path.name, path.read_bytes())
                written += 1
            tell(done, len(paths), "packing kernels")
    print(f"{counted(written, 'kernel')} written to {file}")


@cache.command("import")
def import_(file: Annotated[Path, typer.Argument(help="Archive that `tilewise cache export` wrote.", exists=True)]) -> None:
    """Take kernels from an archive; each is checked before it is kept."""
    with loading():
        from tilewise.core import store
        from tilewise.errors import InputError
        from tilewise.tools.words import counted
    imported = refused = 0
    try:
        with zipfile.ZipFile(file) as archive, steps("taking kernels") as tell:
            members = archive.infolist()
            for member in members:
                if _take(archive, member):
                    imported += 1
                else:
                    refused += 1
                tell(imported + refused, len(members), "taking kernels")
    except zipfile.BadZipFile as error:
        raise InputError(f"{file} is no archive that `tilewise cache export` wrote, or is damaged: {error}") from None
    print(f"{counted(imported, 'kernel')} taken into {store.kernel_root()}" + (f", {counted(refused, 'entry')} refused" if refused else ""))
    raise typer.Exit(1 if refused else 0)


def _take(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bool:
    """Keep one entry of an archive, if it is a kernel; its name is a key, and never a path."""
    from tilewise.core import store

    key = member.filename.removesuffix(store.ENDING)
    if not (member.filename.endswith(store.ENDING) and len(key) == 64 and all(c in "0123456789abcdef" for c in key)):
        return False
    if member.compress_type != zipfile.ZIP_STORED:  # as exported; what is packed small may be of any size
        return False
    try:
        return store.write(key, store.unpack(archive.read(member)))
    except (ValueError, zipfile.BadZipFile, EOFError, RuntimeError):  # damaged, or encrypted
        return False
