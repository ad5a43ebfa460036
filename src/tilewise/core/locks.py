"""Locks that are free in a forked process: whoever holds one while another thread forks is not in the child, and would never release it there."""

import os
import threading
import weakref

_made: "weakref.WeakSet[threading.Lock]" = weakref.WeakSet()


def new_lock() -> threading.Lock:
    made = threading.Lock()
    _made.add(made)
    return made


def _free_all() -> None:
    for lock in list(_made):
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as Python's own modules do


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_all)
