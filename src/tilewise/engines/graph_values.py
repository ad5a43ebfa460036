"""Names for the values of a graph that is being traced.

Compiled code calls operators with buffers, and a buffer may hold one value after the other: the same tensor, of the same version, with other contents. So what
is remembered for a tensor's contents is kept apart by the name that its value has in the graph.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef

# A graph is traced under a mode of its own. Values are known by their storage, which a weak reference keeps from being mistaken for a later one, and by how
# they lie in it: what is written in place has another storage by the time it is read, because AOTAutograd has made graphs functional.
_names: "weakref.WeakKeyDictionary[FakeTensorMode, dict[Any, int]]" = weakref.WeakKeyDictionary()


def names_of(tensors: list[Tensor]) -> list[int]:
    """The values' names, the same whenever the graph is traced; none if these are no values of a graph."""
    found: list[int] = []
    for t in tensors:
        fake = _fake(t)
        if fake is None:
            return []
        known = _names.setdefault(fake.fake_mode, {})
        place = (StorageWeakRef(fake.untyped_storage()), str(fake.dtype), *[str(n) for n in (fake.storage_offset(), *fake.shape, *fake.stride())])
        found.append(known.setdefault(place, len(known)))
    return found


def _fake(t: Tensor) -> FakeTensor | None:
    if isinstance(t, FunctionalTensor):
        torch._sync(t)  # type: ignore[attr-defined]  # what was written into it in place
        t = torch._from_functional_tensor(t.elem)
    return t if isinstance(t, FakeTensor) else None
