"""The kernel store: one private folder of compiled kernels, safe to share among processes.

An entry is one file: a JSON header with the size and sha256 of each part, then the parts. It is written beside its place and
moved there in one step, and checked whenever it is read. Whatever is wrong with it, the worst is that a kernel is built again.
"""

import hashlib
import json
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger("tilewise")

VARIABLE = "TILEWISE_CACHE_DIR"
MAGIC = b"tilewise kernel 1\n"
ENDING = ".kernel"
_warned: set[str] = set()


def warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


def kernel_root() -> Path:
    """The folder compiled kernels are kept in: TILEWISE_CACHE_DIR, or tilewise's place in the user's cache directory."""
    return _private_folder(Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else _user_cache() / "tilewise")


def _user_cache() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


@lru_cache(maxsize=8)
def _private_folder(wanted: Path) -> Path:
    """The folder if it is this user's alone; otherwise a temporary one, so that nobody else's code is ever loaded."""
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = _not_private(wanted)
    except OSError as error:
        problem = str(error)
    if problem is None:
        return wanted
    folder = Path(tempfile.mkdtemp(prefix="tilewise-"))
    warn_once(f"the kernel store {wanted} cannot be used ({problem}); kernels go to {folder} for this process only. Set {VARIABLE} to a private folder.")
    return folder


def _not_private(folder: Path) -> str | None:
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return f"it belongs to user {status.st_uid}"
    if os.name == "posix" and status.st_mode & 0o022:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o}); chmod 700 it"
    return None


def path_of(key: str) -> Path:
    return kernel_root() / f"{key}{ENDING}"


def read(key: str) -> dict[str, bytes] | None:
    """The parts of an entry; None if there is none or it is damaged."""
    path = path_of(key)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        warn_once(f"the kernel store cannot be read ({error}); kernels are built again")
        return None
    try:
        return unpack(raw)
    except ValueError as error:
        logger.info("kernel %s is damaged (%s) and will be built again", path.name, error)
        return None


def write(key: str, parts: dict[str, bytes]) -> None:
    """Keep an entry. A disk that is full or read-only costs the next process a build, nothing more."""
    path = path_of(key)
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{key[:16]}.", suffix=".tmp", delete=False) as file:
            temporary = file.name
            file.write(pack(parts))
        os.replace(temporary, path)
    except OSError as error:
        warn_once(f"the kernel store {path.parent} cannot be written ({error}); kernels stay in memory")
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)


def find_or_build(key: str, build: Callable[[], dict[str, bytes]]) -> tuple[dict[str, bytes], bool]:
    """The parts of an entry, and whether they had to be built, which one of all processes that want them does."""
    parts = read(key)
    if parts is not None:
        return parts, False
    with building(key):
        parts = read(key)
        if parts is not None:
            return parts, False
        parts = build()
        write(key, parts)
        return parts, True


@contextmanager
def building(key: str) -> Iterator[None]:
    """Held while an entry is built, so that processes that want the same wait for it; a killed holder's lock dies with it."""
    from filelock import FileLock, Timeout

    lock = FileLock(path_of(key).with_suffix(".lock"), timeout=120)
    try:
        lock.acquire()
    except (OSError, Timeout):  # a folder that cannot hold locks: build without, twice is only slower
        yield
        return
    try:
        yield
    finally:
        lock.release()


def pack(parts: dict[str, bytes]) -> bytes:
    header = {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in parts.items()}
    return MAGIC + json.dumps(header).encode() + b"\n" + b"".join(parts.values())


def unpack(raw: bytes) -> dict[str, bytes]:
    """The parts of a packed entry, each checked against its sum; ValueError says what is wrong."""
    if not raw.startswith(MAGIC):
        raise ValueError("not a tilewise kernel")
    line, _, body = raw[len(MAGIC) :].partition(b"\n")
    parts, at = {}, 0
    try:
        header = json.loads(line)
        for name, (size, digest) in header.items():
            data = body[at : at + size]
            if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
                raise ValueError(f"part {name!r} does not match its checksum")
            parts[name] = data
            at += size
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"unreadable header: {error}") from error
    if at != len(body):
        raise ValueError("bytes after the last part")
    return parts


def entries() -> list[Path]:
    return sorted(kernel_root().glob(f"*{ENDING}"))


def clear() -> int:
    """Remove every kernel; how many there were."""
    found = entries()
    for path in [*found, *kernel_root().glob("*.lock"), *kernel_root().glob("*.tmp")]:
        with suppress(OSError):
            path.unlink()
    return len(found)


def damaged() -> list[Path]:
    """Entries that do not match their checksums."""
    bad = []
    for path in entries():
        try:
            unpack(path.read_bytes())
        except (OSError, ValueError):
            bad.append(path)
    return bad
