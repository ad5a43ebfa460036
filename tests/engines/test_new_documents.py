"""What a training step with another layout of documents, in shapes that are known, has to do before its own kernels: as little as possible."""

from collections import Counter
from typing import Any

import pytest
import torch

from tests.engines.test_rebinding import documents, step
from tests.support.recorded_launches import record
from tilewise.engines.gluon import NO_GLUON
from tilewise.engines.gpu import device_map
from tilewise.engines.gpu.device_map import DeviceMap, device_maps

pytestmark = pytest.mark.skipif(NO_GLUON is not None, reason=str(NO_GLUON))

# The kernels that make schedules, forward and backward.
HOPPER = ["base_states", "schedule_rows", "pack_mask_bits", "schedule_rows", "pack_mask_bits"]
TRITON = ["base_states", *["schedule_rows", "order_rows"] * 3]


@pytest.mark.parametrize(("backend", "made", "memory"), [("cuda", HOPPER, 3), ("gluon", HOPPER, 3), ("triton", TRITON, 4)])
def test_a_step_with_new_documents(backend: str, made: list[str], memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = record(monkeypatch)
    monkeypatch.setattr(device_map, "interpreted", lambda: True)  # schedules are made by kernels
    counts: Counter[str] = Counter()
    find, empty = device_maps.find, DeviceMap.empty

    def counted_find(*given: Any) -> Any:
        counts["asked"] += 1
        return find(*given)

    def counted_empty(self: DeviceMap, *given: Any) -> torch.Tensor:
        counts["memory"] += 1
        return empty(self, *given)

    step(backend, documents(1))
    recorded.clear()
    monkeypatch.setattr(device_maps, "find", counted_find)
    monkeypatch.setattr(DeviceMap, "empty", counted_empty)
    step(backend, documents(2))
    assert [r.kernel for r in recorded if r.kernel in made] == made
    assert counts == {"asked": 2, "memory": memory}  # once in each pass
