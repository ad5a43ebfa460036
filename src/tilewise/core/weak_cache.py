"""Values remembered for tensors, without keeping any of them alive."""

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from tilewise.core.locks import new_lock

Value = TypeVar("Value")


class _Entry(NamedTuple):
    value: Any
    objects: tuple["weakref.ref[Any]", ...]
    lifetimes: tuple["weakref.ref[Any]", ...]


class WeakCache(Generic[Value]):
    """The most recently used values, each known by a key and by the objects it was made from. An entry goes when one of them has been collected."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()
        self._gone: deque[Any] = deque()  # keys of entries that lost an object
        self._lock = new_lock()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Any, objects: Sequence[Any]) -> Value | None:
        """The value of this key, if it was made from these very objects: ids get reused, so identity is checked."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        for n, ref in enumerate(entry.objects):  # every call comes here, and zip takes longer
            if ref() is not objects[n]:
                return None
        if 2 * len(self._entries) > self._most:  # only then the order matters
            try:  # noqa: SIM105  (every call comes here, and this costs nothing)
                self._entries.move_to_end(key)
            except KeyError:  # another thread has just dropped it
                pass
        value: Value = entry.value
        return value

    def keep(self, key: Any, objects: Sequence[Any], value: Value, lifetimes: Sequence[Any] = ()) -> None:
        """`lifetimes` are objects that `find` need not compare, but without which the value is of no use."""
        gone = partial(_note, self._gone.append, key)
        entry = _Entry(value, tuple([weakref.ref(thing, gone) for thing in objects]), tuple([weakref.ref(thing, gone) for thing in lifetimes]))
        with self._lock:
            while self._gone:  # here, not in the callback, which may come at any moment
                self._drop_if_gone(self._gone.popleft())
            self._entries[key] = entry
            self._entries.move_to_end(key)
            while len(self._entries) > self._most:
                self._entries.popitem(last=False)

    def _drop_if_gone(self, key: Any) -> None:
        entry = self._entries.get(key)
        if entry is not None and any([ref() is None for ref in entry.objects + entry.lifetimes]):  # else another has its place
            del self._entries[key]

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


def _note(append: Callable[[Any], None], key: Any, _: "weakref.ref[Any]") -> None:
    append(key)
