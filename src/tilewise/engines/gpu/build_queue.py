"""Builds under way: a kernel is built once, by whoever asks first, and others wait for it. What is wanted soon is built beside what is wanted now.

Triton's passes, LLVM and ptxas let other threads run, so kernels are built in threads, at the same time. A background build that fails is
forgotten: whoever waits for it gets the error, and whoever asks later meets it in a build of their own.
"""

import atexit
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("tilewise")

PATIENCE = 5.0  # seconds that the end of the process waits for builds that were given up


class _Process:
    """What is under way in this process; a forked one begins with nothing, since it has none of the threads."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.lock = threading.Lock()
        self.building: dict[str, Future[Any]] = {}
        self.threads: set[threading.Thread] = set()
        self.ending = False


class _Upcoming(threading.local):
    start: Callable[[], None] | None = None


_process = _Process()
_upcoming = _Upcoming()


def once(key: str, build: Callable[[], Any]) -> Any:
    """What `build` returns; of several threads that want the same, one calls it."""
    while True:
        mine: Future[Any] = Future()
        try:
            with _process.lock:
                first = _process.building.setdefault(key, mine)
            if first is mine:
                return _into(mine, build)
        finally:
            with _process.lock:
                if _process.building.get(key) is mine:
                    del _process.building[key]
            mine.cancel()  # of no effect where it has a result
        try:
            return first.result()
        except CancelledError:
            continue  # the thread that built it was interrupted


def _into(future: "Future[Any]", build: Callable[[], Any]) -> Any:
    try:
        result = build()
    except Exception as error:  # whatever it is, those who wait for this build meet it too
        future.set_exception(error)
        raise
    future.set_result(result)
    return result


class PriorityLock:
    """A lock. Of those who wait for it, one with the lowest turn is next."""

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):  # whoever holds it is not in the child
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._taken = False

    @contextmanager
    def wait(self, turn: int) -> Iterator[None]:
        with self._changed:
            self._waiting.append(turn)
            try:
                self._changed.wait_for(lambda: not self._taken and turn == min(self._waiting))
                self._taken = True
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()  # if it was interrupted, another one is next
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()


class on_first_build:
    """If a kernel has to be built inside the `with` block, in this thread, `start` is called before, once: to start building what follows."""

    __slots__ = ("_before", "_start")

    def __init__(self, start: Callable[[], None]) -> None:
        self._start = start

    def __enter__(self) -> None:
        self._before, _upcoming.start = _upcoming.start, self._start

    def __exit__(self, *_: object) -> None:
        _upcoming.start = self._before


def notify() -> None:
    """A kernel is about to be built in this thread."""
    start, _upcoming.start = _upcoming.start, None
    if start is None:
        return
    try:
        start()
    except Exception as error:  # what follows is built when it is wanted, and its error, if it is one, met there
        logger.debug("what follows could not be built ahead: %s", error)


def in_background(work: Callable[[], Any]) -> None:
    """Do something in a thread of its own. It must not be needed: it is given up when the process ends."""

    def run() -> None:
        try:
            work()
        except Exception as error:  # whoever needs the kernel builds it again, and meets the error
            logger.debug("a kernel could not be built in the background: %s", error)
        finally:
            _process.threads.discard(thread)

    thread = threading.Thread(target=run, name="tilewise build", daemon=True)
    if _process.ending:
        return
    _process.threads.add(thread)
    try:
        thread.start()
    except RuntimeError as error:  # no more threads
        _process.threads.discard(thread)
        logger.debug("no thread for a build in the background: %s", error)


def _end() -> None:
    """Give up what is under way. A compiler must not run on while the process is taken down; it ends at its next step in Python, within a second or so."""
    _process.ending = True
    threads = list(_process.threads)
    for thread in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    latest = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, latest - time.monotonic()))


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.begin)
