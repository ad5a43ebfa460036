"""Folders on disk: the one that kernels are kept in, and temporary ones. Where one cannot be had, another serves, and one warning says so."""

import atexit
import logging
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger("tilewise")

VARIABLE = "TILEWISE_CACHE_DIR"
NOWHERE = Path(os.devnull) / "tilewise"  # nothing can be read from it or written to it
_warned: set[str] = set()


def warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


def kernel_root() -> Path:
    """The folder compiled kernels are kept in: TILEWISE_CACHE_DIR, or tilewise's place in the user's cache directory."""
    given = os.environ.get(VARIABLE)
    return private_folder(Path(given) if given else _user_cache() / "tilewise")


def _user_cache() -> Path:
    if sys.platform == "win32" and "LOCALAPPDATA" in os.environ:
        return Path(os.environ["LOCALAPPDATA"])
    if sys.platform not in ("darwin", "win32") and os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"])
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and a user whom the system does not know
        return NOWHERE
    return home / {"darwin": "Library/Caches", "win32": "AppData/Local"}.get(sys.platform, ".cache")


@lru_cache(maxsize=8)
def private_folder(wanted: Path) -> Path:
    """The folder if it is this user's alone; otherwise a temporary one, so that nobody else's code is ever loaded. NOWHERE if there is none either."""
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = _not_private(wanted)
    except OSError as error:
        problem = str(error)
    if problem is None:
        return wanted
    problem = "the user has no home directory" if NOWHERE in wanted.parents else f"{wanted} cannot be used: {problem}"
    try:
        folder = process_folder()
        kept = f"kernels go to {folder} for this process only"
    except OSError as error:
        folder, kept = NOWHERE, f"nor a temporary folder ({error}); kernels stay in memory"
    warn_once(f"there is no kernel store ({problem}); {kept}. Set {VARIABLE} to a private folder.")
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


def process_folder() -> Path:
    """A new private folder, removed when this process ends; not when a fork of it does."""
    folder, owner = Path(tempfile.mkdtemp(prefix="tilewise-")), os.getpid()

    @atexit.register
    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    return folder


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """The system's, or else the kernel store's; OSError if neither can be written to."""
    try:
        made = tempfile.TemporaryDirectory(prefix="tilewise-")
    except OSError:
        if kernel_root() == NOWHERE:
            raise
        made = tempfile.TemporaryDirectory(prefix="tilewise-", dir=kernel_root())
    with made as folder:
        yield Path(folder)
