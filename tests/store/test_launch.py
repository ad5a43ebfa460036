"""How a launch's tensors reach a kernel, with a kernel that only looks at them."""

from typing import Any

import pytest
import torch

from tilewise.engines.gpu import kernel_cache, launch
from tilewise.engines.gpu.launch import AlignedStrides, Launch, TmaTensor, prepare


class Kernel:
    """Keeps what it is packed and launched with."""

    def __init__(self) -> None:
        self.images: list[tuple[list[torch.Tensor], list[int], list[Any]]] = []
        self.launched: list[tuple[int, list[int], list[int]]] = []

    def image(self, tma_tensors: list[torch.Tensor], addresses: list[int], static_values: list[Any]) -> int:
        self.images.append((tma_tensors, addresses, static_values))
        return len(self.images) - 1

    def launch(self, programs: int, stream: int, image: int, tma_addresses: list[int], addresses: list[int]) -> None:
        self.launched.append((programs, tma_addresses, addresses))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(kernel_cache, "find", lambda key: found)
    monkeypatch.setattr(launch, "enter_context", lambda device: None)
    monkeypatch.setattr(launch, "current_stream", lambda device: 0)
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    return found


def launched_with(tensors: dict[str, Any]) -> Launch:
    return Launch("kernel", dict, 7, tensors, {"s": AlignedStrides((64, 32, 16, 1)), "n": 5, "pair": (None, (3, 0.5))}, {"M": 64}, 4, 1)


def test_tensors_are_flat_in_the_order_of_the_parameters_those_of_tma_first(kernel: Kernel) -> None:
    a, b, c, d = (torch.zeros(4, 8) for _ in range(4))
    device = torch.device("cuda", 0)
    ready = prepare(launched_with({"a_desc": TmaTensor(a.view(2, 2, 8), (1, 2, 8)), "p_b": b, "p_none": None, "sums": (c, d)}), device)
    (tma, addresses, static), *_ = kernel.images
    assert [t.data_ptr() for t in tma] == [a.data_ptr()] and addresses == [t.data_ptr() for t in (b, c, d)]
    assert static == [64, 32, 16, 5, 3, 0.5]
    others = [torch.zeros(4, 8) for _ in range(4)]
    ready.launch([others[0], others[1], None, others[2], others[3]])
    assert kernel.launched == [(7, [others[0].data_ptr()], [t.data_ptr() for t in others[1:]])]


def test_what_is_missing_stays_missing(kernel: Kernel) -> None:
    b = torch.zeros(4)
    ready = prepare(launched_with({"p_a": None, "p_b": b, "sums": ()}), torch.device("cuda", 0))
    ready.launch([None, b])
    assert kernel.launched == [(7, [], [b.data_ptr()])]
