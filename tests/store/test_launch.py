"""How a launch's tensors reach a kernel, with a kernel that only looks at them."""

import struct
import weakref
from typing import Any

import pytest
import torch

from tilewise.core.problem import Options, make_problem
from tilewise.engines.gpu import kernel_cache, launch
from tilewise.engines.gpu.driver import OwnPlaces
from tilewise.engines.gpu.launch import AlignedStrides, Launch, TmaTensor, prepare, score_captures, stretches


class Kernel:
    """Keeps what it is packed and launched with. A tensor map takes a word here, as a pointer does."""

    def __init__(self) -> None:
        self.packings: list[tuple[list[torch.Tensor], list[int], list[Any]]] = []
        self.launched: list[tuple[int, dict[int, int]]] = []  # programs, addresses by word

    def packed(self, tma_tensors: list[torch.Tensor], addresses: list[int], static_values: list[Any]) -> bytes:
        self.packings.append((tma_tensors, addresses, static_values))
        self.own = len(tma_tensors) + len(addresses)
        return bytes(8 * (self.own + 2))

    def address_places(self, own: int) -> tuple[OwnPlaces, list[int]]:
        return OwnPlaces(tuple(range(self.own - own)), slice(self.own - own, self.own)), [8 * (self.own + n) for n in range(self.static)]

    static = 0  # tensors among the static arguments

    def launch(self, programs: int, stream: int, packed: bytes, places: OwnPlaces, addresses: list[int]) -> None:
        words = [*places.maps, *range(places.pointers.start, places.pointers.stop)]
        own = dict(zip(words, addresses, strict=True))
        static = struct.unpack_from(f"{self.static}P", packed, 8 * self.own)
        self.launched.append((programs, own | dict(enumerate(static, self.own))))


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
    (tma, addresses, static), *_ = kernel.packings
    assert [t.data_ptr() for t in tma] == [a.data_ptr()] and addresses == [t.data_ptr() for t in (b, c, d)]
    assert static == [64, 32, 16, 5, 3, 0.5]
    others = [torch.zeros(4, 8) for _ in range(4)]
    ready.launch([others[0], others[1], None, others[2], others[3]])
    assert kernel.launched == [(7, {n: t.data_ptr() for n, t in enumerate(others)})]


def test_what_is_missing_stays_missing(kernel: Kernel) -> None:
    b = torch.zeros(4)
    ready = prepare(launched_with({"p_a": None, "p_b": b, "sums": ()}), torch.device("cuda", 0))
    ready.launch([None, b])
    assert kernel.launched == [(7, {0: b.data_ptr()})]


def nothing_found(p: Any) -> None:
    """No map is made on the device."""


def test_a_stretch_is_given_by_its_address(kernel: Kernel) -> None:
    memory = torch.zeros(2, 6, dtype=torch.int32)
    parts = stretches(memory, 1, [2, 3, 5])
    assert [len(part) for part in parts] == [2, 3, 5] and [(part.data_ptr() - memory.data_ptr()) // 4 for part in parts] == [1, 3, 6]
    parts[1].view()[:] = 1
    assert memory.tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]]
    prepare(launched_with({"tables": tuple(parts)}), torch.device("cuda", 0)).launch(parts)
    assert kernel.launched == [(7, {n: part.data_ptr() for n, part in enumerate(parts)})]


def test_binding_puts_a_problems_captures_and_schedule_in(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures are not kept alive, schedules are."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    kernel.static = 2

    def problem(capture: torch.Tensor) -> Any:
        tensors = [torch.zeros(1, 1, 16, 16) for _ in range(3)]
        return make_problem(*tensors, None, lambda s, b, h, q, kv: s + capture[q], Options())[0]

    schedules: dict[int, torch.Tensor] = {}

    def schedule(p: Any, find: Any) -> list[torch.Tensor | None]:
        return [None, schedules.setdefault(p.score.captures[0].data_ptr(), torch.zeros(4, dtype=torch.int32))]

    own, first, second = torch.zeros(4), torch.zeros(16), torch.ones(16)
    p = problem(first)
    static_args = {"tiles": tuple(schedule(p, nothing_found)), "score": (p.score.captures,)}
    made = Launch("kernel", dict, 7, {"p": own}, static_args, {}, 4, 1, True, (schedule, score_captures))
    ready = prepare(made, torch.device("cuda", 0))
    for capture in (first, second, first):
        ready.bind(problem(capture), nothing_found).launch([own])
    at = [(7, {0: own.data_ptr(), 1: schedules[c.data_ptr()].data_ptr(), 2: c.data_ptr()}) for c in (first, second, first)]
    assert kernel.launched == at
    bound = ready.bind(problem(second), nothing_found)
    gone = weakref.ref(second)
    del second, capture
    assert gone() is None
    scheduled = weakref.ref(schedules.popitem()[1])
    assert scheduled() is not None
    del bound
    assert scheduled() is None


def test_a_source_of_other_tensors_is_refused(kernel: Kernel) -> None:
    kernel.static = 1
    static = torch.zeros(4, dtype=torch.int32)
    ready = prepare(
        Launch("kernel", dict, 7, {"p": torch.zeros(4)}, {"tiles": (static,)}, {}, 4, 1, True, (lambda p, find: [torch.zeros(4)],)), torch.device("cuda", 0)
    )
    with pytest.raises(RuntimeError, match="static arguments"):
        ready.bind(None, nothing_found)
