"""Attention inside the CUDA graphs that torch.compile captures (`mode="reduce-overhead"`): what engines keep must not lie in a graph's memory.

Inductor runs a graph's function once to warm up and once to capture it, and in both all memory comes from a pool that belongs to its graphs. What stays
allocated there but is no output of the graph is an error to inductor, and would be overwritten by the next graph. So:

    warming up      the call runs in a thread of its own, whose memory is ordinary (the pool serves the thread that asked for it, since torch 2.8).
                    Kernels, launches and maps that it makes and keeps are there for the capture. Its results are copied into the pool.
    capturing       tile schedules of masks that load from tensors are made within the graph, so that replays follow what these hold, and let go of
                    when the call ends. Everything else was kept when warming up.
    replaying       nobody calls anything.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from tilewise.core.plan import Plan
from tilewise.core.problem import Problem
from tilewise.engines.gpu.device_map import device_maps, is_made_on_device
from tilewise.engines.gpu.driver import current_stream, is_capturing
from tilewise.engines.gpu.launch import schedules_of_the_graph
from tilewise.engines.gpu.plan import GpuPlan

TREES = "torch._inductor.cudagraph_trees"
Result = TypeVar("Result", bound=tuple[Any, ...])  # of tensors and lists of tensors


def is_capturable(p: Problem) -> bool:
    """Whether a call like this one may be part of a graph. Given tiles may not: they are cut by their contents. Where sizes are symbols, it is not known
    whether a mask's schedule can be made within the graph."""
    if p.tiles is not None:
        return False
    if p.mask is None or not p.mask.captures:
        return True
    return all([type(size) is int for size in (*p.query.shape, *p.key.shape)]) and is_made_on_device(p)


def run(device: torch.device, problem: Callable[[], Problem], call: Callable[[Plan | None], Result]) -> Result:
    """A call of the operator that inductor may put into its graphs: with a plan of its own, or None for any that is kept."""
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = current_stream(index)
    if is_capturing(stream):
        p = problem()
        return _within_capture(p, lambda: call(GpuPlan(p)))  # what it binds is the graph's
    if is_warming_up(index, stream):
        return _copied(in_ordinary_memory(lambda: call(None), index))
    return call(None)


def is_warming_up(device: int, stream: int) -> bool:
    """Whether inductor may be running a function in the memory of its graphs: it does so on a stream that nothing else is meant to use."""
    trees = sys.modules.get(TREES)
    if stream == 0 or trees is None:
        return False
    manager = trees.get_manager(device, create_if_none_exists=False)
    return bool(manager is not None and manager.stream.cuda_stream == stream)


def _within_capture(p: Problem, call: Callable[[], Result]) -> Result:
    if p.mask is None or not is_made_on_device(p):
        return call()
    try:
        with schedules_of_the_graph():
            return call()
    finally:
        device_maps.forget_capture()


def in_ordinary_memory(call: Callable[[], Result], device: int) -> Result:
    """A call in a thread of its own, on the current stream."""
    stream = torch.cuda.current_stream(device)

    def on_this_stream() -> Result:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return call()

    return in_thread(on_this_stream)


def in_thread(call: Callable[[], Result]) -> Result:
    found: list[Result] = []
    failed: list[BaseException] = []

    def run_it() -> None:
        try:
            with torch.no_grad():
                found.append(call())
        except BaseException as error:  # raised again below, in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run_it, name="tilewise, outside of graphs")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _copied(found: Result) -> Result:
    """Results with copies of their tensors, laid out alike."""
    copies: Any = tuple([v.clone() if isinstance(v, Tensor) else [t.clone() for t in v] for v in found])
    return cast(Result, copies)
