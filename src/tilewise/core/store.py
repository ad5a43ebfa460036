"""The kernel store: one private folder of compiled kernels, safe to share among processes.

An entry is one file: a JSON header with the size and sha256 of each part, then the parts. It is written beside its place and
moved there in one step, and checked whenever it is read. Whatever is wrong with it, the worst is that a kernel is built again.
"""

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tilewise.core.folders import NOWHERE
from tilewise.core.folders import VARIABLE as VARIABLE  # these three are the store's, too
from tilewise.core.folders import kernel_root as kernel_root
from tilewise.core.folders import warn_once as warn_once

logger = logging.getLogger("tilewise")

SIZE_VARIABLE = "TILEWISE_CACHE_MIB"
DEFAULT_MIB = 4096
MAGIC = b"tilewise kernel 1\n"
ENDING = ".kernel"
LEFT_OVER_SECONDS = 3600  # a temporary file of this age was left by a process that was killed
Value = TypeVar("Value")
Parts = dict[str, bytes]


def path_of(key: str) -> Path:
    return kernel_root() / f"{key}{ENDING}"


def read(key: str) -> Parts | None:
    """The parts of an entry; None if there is none or it is damaged."""
    path = path_of(key)
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warn_once(f"the kernel store cannot be read ({error.strerror}); kernels are built again")
        return None
    try:
        parts = unpack(raw)
    except ValueError as error:
        logger.info("kernel %s is damaged (%s) and will be built again", path.name, error)
        return None
    with suppress(OSError):
        os.utime(path)  # what was used last stays longest
    return parts


def write(key: str, parts: Parts) -> bool:
    """Keep an entry; whether that was possible. A disk that is full or read-only costs the next process a build, nothing more."""
    path = path_of(key)
    if path.parent == NOWHERE:  # the user has been told
        return False
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{key[:16]}.", suffix=".tmp", delete=False) as file:
            temporary = file.name
            file.write(pack(parts))
        os.replace(temporary, path)
    except OSError as error:
        warn_once(f"the kernel store {path.parent} cannot be written ({error.strerror}); kernels stay in memory")
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)
        return False
    trim()
    return True


def find(key: str, use: Callable[[Parts], Value]) -> Value | None:
    """What `use` makes of an entry's parts; None if there is no entry, or it cannot be used."""
    parts = read(key)
    if parts is None:
        return None
    try:
        return use(parts)
    except Exception as error:  # its checksums are right, but it is not what it should be: whatever that is, it is built again
        logger.info("kernel %s cannot be used (%s: %s) and will be built again", key, type(error).__name__, error)
        return None


def find_or_build(key: str, build: Callable[[], Parts], use: Callable[[Parts], Value]) -> tuple[Value, bool]:
    """What `use` makes of an entry's parts, and whether they had to be built, which one of all processes that want them does."""
    found = find(key, use)
    if found is not None:
        return found, False
    with building(key):
        found = find(key, use)
        if found is not None:
            return found, False
        return rebuilt(key, build, use), True


def rebuilt(key: str, build: Callable[[], Parts], use: Callable[[Parts], Value]) -> Value:
    """What `use` makes of what is built now, which replaces an entry that may be there."""
    parts = build()
    made = use(parts)
    write(key, parts)
    return made


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


def pack(parts: Parts) -> bytes:
    header = {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in parts.items()}
    return MAGIC + json.dumps(header).encode() + b"\n" + b"".join(parts.values())


def unpack(raw: bytes) -> Parts:
    """The parts of a packed entry, each checked against its sum; ValueError says what is wrong."""
    if not raw.startswith(MAGIC):
        raise ValueError("not a tilewise kernel")
    line, _, body = raw[len(MAGIC) :].partition(b"\n")
    parts: Parts = {}
    at = 0
    try:
        header = json.loads(line)
        for name, (size, digest) in header.items():
            data = body[at : at + size]
            if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
                raise ValueError(f"part {name!r} does not match its checksum")
            parts[name] = data
            at += size
    except (json.JSONDecodeError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"unreadable header: {error}") from error
    if not parts:
        raise ValueError("no parts")
    if at != len(body):
        raise ValueError("bytes after the last part")
    return parts


def entries() -> list[Path]:
    return sorted(kernel_root().glob(f"*{ENDING}"))


def size() -> int:
    """Bytes of all entries together."""
    return sum([used.st_size for _, used in _by_last_use()])


def most_bytes() -> int:
    """How large the store may become: TILEWISE_CACHE_MIB, or 4096 MiB."""
    given = os.environ.get(SIZE_VARIABLE, "")
    if given and not (given.isascii() and given.isdigit()):
        warn_once(f"{SIZE_VARIABLE} must be a whole number of MiB, got {given!r}; {DEFAULT_MIB} is used")
        given = ""
    return (int(given) if given else DEFAULT_MIB) * 2**20


def trim() -> None:
    """Remove what was used least recently until the store is no larger than it may be, and what killed processes left.

    Processes may do this at the same time, and read and write meanwhile: an entry goes as a whole, and whoever misses it builds it again.
    """
    found = _by_last_use()
    total, most = sum([used.st_size for _, used in found]), most_bytes()
    for path, used in found:
        if total <= most:
            break
        with suppress(OSError):
            if path.stat().st_mtime_ns == used.st_mtime_ns:  # else it has been used in the meantime
                path.unlink()
                path.with_suffix(".lock").unlink(missing_ok=True)
        total -= used.st_size
    for path in _temporary():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > LEFT_OVER_SECONDS:
                path.unlink()


def _by_last_use() -> list[tuple[Path, os.stat_result]]:
    found: list[tuple[Path, Any]] = []
    for path in entries():
        with suppress(OSError):  # another process has just removed it
            found.append((path, path.stat()))
    return sorted(found, key=lambda entry: entry[1].st_mtime_ns)


def _temporary() -> list[Path]:
    """Entries being written, and libraries being loaded where there is no temporary folder."""
    return [path for pattern in ("*.tmp", "tilewise-*.so") for path in kernel_root().glob(pattern)]


def clear() -> int:
    """Remove every kernel; how many there were."""
    found = entries()
    for path in [*found, *kernel_root().glob("*.lock"), *_temporary()]:
        with suppress(OSError):
            path.unlink()
    return len(found)


def damaged() -> list[Path]:
    """Entries that do not match their checksums."""
    return [path for path in entries() if is_damaged(path)]


def is_damaged(path: Path) -> bool:
    try:
        unpack(path.read_bytes())
    except (OSError, ValueError):
        return True
    return False
