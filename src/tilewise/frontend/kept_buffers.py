"""Tensors that outlive a call, so that the next call of their kind is a known one: it finds the same objects, and writes into them what it wants masked.

Whoever is given some holds them by an object of its own, and they are given out again only once that object is gone. What the last holder's kernels have
still to read is read before the next one writes, if both use the same stream: so a kind has to name it.
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

from tilewise.core.locks import new_lock

MAX_KINDS, MAX_OF_A_KIND = 16, 4
Value = TypeVar("Value")


class _Kept(NamedTuple):
    value: Any
    holder: "weakref.ref[Any]"  # who was given it last


class KeptBuffers(Generic[Value]):
    """The latest kinds. One kind's are several, because a holder may still have its own when it asks for the next."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._kinds: dict[Hashable, list[_Kept]] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def take(self, kind: Hashable, make: Callable[[], Value]) -> Value:
        """Tensors that nobody holds. They belong to the caller, who gives them a holder."""
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
                del self._kinds[next(iter(self._kinds))]
            of_kind = self._kinds.setdefault(kind, [])
            free = next((k for k in reversed(range(len(of_kind))) if of_kind[k].holder() is None), None)  # the latest: few calls are to be known
            if free is not None:
                taken: Value = of_kind.pop(free).value
                return taken
        return make()

    def keep(self, kind: Hashable, value: Value, holder: Any) -> None:
        """For others, once the holder is gone."""
        with self._lock:
            of_kind = self._kinds.get(kind)
            if of_kind is not None and len(of_kind) < MAX_OF_A_KIND:
                of_kind.append(_Kept(value, weakref.ref(holder)))

    def clear(self) -> None:
        with self._lock:
            self._kinds.clear()
