"""Configurations found by trying: the neighbours of the table's choice, timed on the first call, the winner kept in the kernel store.

Off unless TILEWISE_AUTOTUNE=1 or `with autotuned():`. What was found is used from then on, by every process, tuning or not.
"""

import hashlib
import json
import logging
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tilewise.core import store
from tilewise.core.locks import new_lock
from tilewise.engines.gpu.config import Config, Configs, dividing

logger = logging.getLogger("tilewise")

VARIABLE = "TILEWISE_AUTOTUNE"
TILES, WARPS, STAGES = range(16, 257), range(4, 9), range(1, 6)  # what a configuration may have
WARM_UP, RUNS = 2, 10


class _Scopes:
    """Open `autotuned()` scopes of the whole process: backward passes run on threads of torch's own. The variable is one that never ends."""

    depth = int(os.environ.get(VARIABLE) == "1")
    lock = new_lock()


@contextmanager
def autotuned() -> Iterator[None]:
    """Time the candidates of every kernel that is first met inside the `with` block, on any thread."""
    with _Scopes.lock:
        _Scopes.depth += 1
    try:
        yield
    finally:
        with _Scopes.lock:
            _Scopes.depth -= 1


def is_on() -> bool:
    return _Scopes.depth > 0 and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())  # a graph must not hold trials


def state() -> tuple[bool, int]:
    """Changes whenever a launch prepared earlier may not be the best any more."""
    return is_on(), len(_found)


_found: dict[str, Configs] = {}


def best(kind: str, roles: tuple[str, ...], table: Configs, tile: tuple[int, int] | None, time: Callable[[Configs], float]) -> Configs:
    """The winner for this kind of kernel: an earlier one's, else found now if tuning is on, else the table's choice."""
    if kind not in _found:
        key = hashlib.sha256(f"configurations {kind}".encode()).hexdigest()

        def use(parts: dict[str, bytes]) -> Configs:
            return _read(parts, roles)

        if is_on():
            try:
                found: Configs | None = store.find_or_build(key, lambda: {"configs": json.dumps(quickest(roles, table, tile, time)).encode()}, use)[0]
            except NoCandidate:  # that is no result to keep
                return table
        else:
            found = store.find(key, use)
        if found is None:
            return table
        _found[kind] = found
    return _found[kind]


def _read(parts: dict[str, bytes], roles: tuple[str, ...]) -> Configs:
    """Configurations as the store keeps them; ValueError if they are none."""
    found = tuple([Config(*c) for c in json.loads(parts["configs"])])
    if len(found) != len(roles):
        raise ValueError(f"{len(found)} configurations for {len(roles)} roles")
    return found


class NoCandidate(RuntimeError):
    """Not even the table's configuration ran in a trial."""


def quickest(roles: tuple[str, ...], table: Configs, tile: tuple[int, int] | None, time: Callable[[Configs], float]) -> Configs:
    times: dict[Configs, float] = {}
    for candidate in candidates(roles, table, tile):
        try:
            times[candidate] = time(candidate)
        except Exception as error:  # too large for the GPU, or for the compiler: no candidate
            logger.debug("%s cannot run: %s", candidate, error)
    if not times:
        raise NoCandidate(f"no configuration of {' and '.join(roles)} could run")
    winner = min(times, key=lambda c: times[c])
    logger.info("tuned %s: %s, %.3f ms, of %d candidates", " and ".join(roles), winner, times[winner], len(times))
    return winner


def candidates(roles: tuple[str, ...], table: Configs, tile: tuple[int, int] | None) -> list[Configs]:
    """The table's choice, and those that differ from it in one number; roles of one kernel have the same warps."""
    found = [table, *[tuple([c._replace(warps=w) for c in table]) for w in (4, 8)]]
    for k, (role, config) in enumerate(zip(roles, table, strict=True)):
        changes = [config._replace(n=n) for n in (config.n // 2, config.n * 2)] + [config._replace(stages=s) for s in (config.stages - 1, config.stages + 1)]
        if not role.endswith("decode"):  # whose rows are those of the problem, in either role
            changes += [config._replace(m=m) for m in (config.m // 2, config.m * 2)]
        found += [(*table[:k], change, *table[k + 1 :]) for change in changes]
    if tile is not None:
        found = [tuple([dividing(c, tile) for c in configs]) for configs in found]
    return [c for c in dict.fromkeys(found) if all([_possible(config) for config in c])]


def _possible(c: Config) -> bool:
    return c.m in TILES and c.n in TILES and c.warps in WARPS and c.stages in STAGES


def milliseconds(start: Callable[[], None]) -> float:
    """Median time on the GPU of what `start` starts."""
    for _ in range(WARM_UP):
        start()
    times: list[float] = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        start()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
