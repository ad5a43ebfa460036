"""Builds under way: once per kernel, several kernels at a time, what follows beside what is waited for; failures, interruptions, the end of the process."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tilewise import masks, scores
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.gluon import NO_GLUON
from tilewise.engines.gpu import build_queue
from tilewise.engines.gpu.build_queue import PriorityLock, in_background, notify, on_first_build, once
from tilewise.engines.gpu.limits import NO_TRITON


def wait_for(condition: Callable[[], bool]) -> None:
    latest = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < latest
        time.sleep(0.01)


def wait_for_waiting(key: str, count: int) -> None:
    """Until so many threads wait for a build under way."""
    wait_for(lambda: len(build_queue._process.building[key]._condition._waiters) == count)


# -- once ------------------------------------------------------------------------------------------------------------


def test_of_eight_threads_one_builds() -> None:
    calls: list[int] = []

    def build() -> str:
        calls.append(1)
        wait_for_waiting("eight", 7)
        return "kernel"

    with ThreadPoolExecutor(8) as pool:
        assert [f.result() for f in [pool.submit(once, "eight", build) for _ in range(8)]] == ["kernel"] * 8
    assert len(calls) == 1 and not build_queue._process.building


def test_who_waits_gets_the_error_and_who_comes_later_builds_again() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def fail() -> str:
        begun.set()
        go_on.wait()
        raise ValueError("ptxas fell over")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(once, "error", fail)
        begun.wait()
        second = pool.submit(once, "error", lambda: "kernel")
        wait_for_waiting("error", 1)
        go_on.set()
        for waiting in (first, second):
            with pytest.raises(ValueError, match="ptxas fell over"):
                waiting.result()
    assert once("error", lambda: "kernel") == "kernel"


def test_who_waits_for_an_interrupted_build_builds_itself() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def interrupted() -> str:
        begun.set()
        go_on.wait()
        raise KeyboardInterrupt

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(once, "interrupted", interrupted)
        begun.wait()
        second = pool.submit(once, "interrupted", lambda: "kernel")
        wait_for_waiting("interrupted", 1)
        go_on.set()
        with pytest.raises(KeyboardInterrupt):
            first.result()
        assert second.result() == "kernel"


def test_turns_are_taken_one_at_a_time_in_their_order() -> None:
    turns, order = PriorityLock(), list[int]()

    def take(turn: int) -> None:
        with turns.wait(turn):
            order.append(turn)
            time.sleep(0.01)
            order.append(turn)

    with ThreadPoolExecutor(6) as pool, turns.wait(0):
        taken = [pool.submit(take, turn) for turn in (2, 1, 0, 2, 1, 0)]
        wait_for(lambda: len(turns._waiting) == 6)
    assert all(t.result() is None for t in taken)
    assert order == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


# -- beside and in the background ------------------------------------------------------------------------------------


def test_what_follows_is_started_once_and_only_if_something_is_built() -> None:
    started: list[str] = []
    with on_first_build(lambda: started.append("outer")):
        with on_first_build(lambda: started.append("inner")):
            notify()
            notify()
        assert started == ["inner"]
        notify()
    notify()
    with on_first_build(lambda: started.append("nothing built")):
        pass
    assert started == ["inner", "outer"]


def test_a_start_that_fails_hurts_nobody() -> None:
    def fail() -> None:
        raise ValueError("no such kernel")

    with on_first_build(fail):
        notify()


def test_a_background_failure_hurts_nobody_and_is_met_by_who_needs_the_kernel() -> None:
    def fail() -> str:
        raise ValueError("ptxas fell over")

    in_background(lambda: once("background", fail))
    wait_for(lambda: not build_queue._process.threads)
    with pytest.raises(ValueError, match="ptxas fell over"):
        once("background", fail)


ENDING = """
import sys, time
from tilewise.engines.gpu.build_queue import in_background, once

def compile():
    print("building", flush=True)
    while True:  # a compiler's passes, from one to the next
        time.sleep(0.05)

in_background(lambda: once("kernel", compile))
in_background(lambda: once("kernel", compile))  # waits for the other
time.sleep(0.3)
"""


def test_the_process_ends_while_builds_are_under_way() -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "building\n"
    _, errors = process.communicate(timeout=60)  # waiting for such builds would have no end
    assert process.returncode == 0 and errors == ""


FORKING = """
import os, threading
from tilewise.engines.gpu.build_queue import in_background, once

never = threading.Event()
in_background(lambda: once("kernel", never.wait))
child = os.fork()
if child == 0:
    os._exit(0 if once("kernel", lambda: "built") == "built" else 1)
assert os.waitpid(child, 0)[1] == 0
never.set()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
def test_a_forked_process_waits_for_no_thread_it_does_not_have() -> None:
    subprocess.run([sys.executable, "-c", FORKING], check=True, timeout=60)


# -- the kernels of a call -------------------------------------------------------------------------------------------

FORKED = """
import os, sys
from tilewise.engines.gpu.generated import _folder

folder = _folder()
if os.fork() == 0:
    sys.exit()  # runs what is registered for the end of the process
os.wait()
assert folder.is_dir()
print(folder)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_generated_sources_go_with_their_process_not_with_a_fork_of_it() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True, timeout=120)
    assert not Path(ran.stdout.strip()).exists()


needs_triton = pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
needs_gluon = pytest.mark.skipif(NO_GLUON is not None, reason=str(NO_GLUON))
LAYOUTS = {
    "bhsd": lambda heads, dim: torch.zeros(2, heads, 256, dim, dtype=torch.bfloat16, requires_grad=True),
    "bshd": lambda heads, dim: torch.zeros(2, 256, heads, dim, dtype=torch.bfloat16, requires_grad=True).transpose(1, 2),
    "odd strides": lambda heads, dim: torch.zeros(2, heads, 256, dim + 3, dtype=torch.bfloat16, requires_grad=True)[..., :dim],
}


def problem(layout: str = "bhsd", mask: object = None, dim: int = 64, score: object = None, **options: object) -> Problem:
    make = LAYOUTS[layout]
    return make_problem(make(4, dim), make(2, dim), make(2, dim), mask, score, Options(enable_gqa=True, **options))[0]


@needs_triton
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_built_ahead_is_what_is_started(layout: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name: a forward and a backward in which no kernel really starts, and the same problem without its data."""
    from tilewise.engines.gpu import background_build
    from tilewise.engines.gpu.kernel_cache import store_key
    from tilewise.engines.gpu.launch import Launch, flat, request_of
    from tilewise.engines.gpu.plan import GpuPlan
    from tilewise.engines.gpu.workspace import Workspace
    from tilewise.engines.triton import aot, fitting, run

    started: list[str] = []

    class Nothing:
        device = None

        def __init__(self, launch: Launch) -> None:
            self.declared = flat(launch.tensors)

        def launch(self, tensors: list[torch.Tensor | None]) -> None:
            """In the order that the launch declared."""
            kinds = lambda listed: [None if t is None else (t.shape, t.dtype) for t in listed]
            assert kinds(tensors) == kinds(self.declared)
            assert all([a is b for a, b in zip(tensors, self.declared, strict=True) if any([a is t for t in (p.query, p.key, p.value)])])

    def prepare(launch: Launch, device: torch.device) -> Nothing:
        started.append(store_key(request_of(launch, 90)))
        return Nothing(launch)

    for module in (run, fitting):
        monkeypatch.setattr(module, "prepare", prepare)
    monkeypatch.setattr(Workspace, "parts", Workspace.tensors)  # an address does not tell of what
    p = problem(layout, score=scores.relative_bias(torch.zeros(4, 511, requires_grad=True)), deterministic=deterministic)
    wanted = background_build.wanted_gradients(p)
    assert wanted == frozenset({0})
    with torch.no_grad():
        output = run.forward(p, GpuPlan(p))
        run.backward(p, GpuPlan(p), output, torch.empty_like(output.out), None, wanted)
    data_free = background_build.on_meta(p)
    launches = aot.forward_launches(data_free) + aot.backward_launches(data_free, wanted)
    assert [store_key(request_of(launches()[0], 90)) for launches in launches] == started


@needs_triton
def test_without_gradients_no_backward_is_built() -> None:
    from tilewise.engines.gpu import background_build

    plain = problem()
    plain = plain.replaced(query=plain.query.detach(), key=plain.key.detach(), value=plain.value.detach())
    assert background_build.wanted_gradients(plain) is None
    with torch.inference_mode():
        assert background_build.wanted_gradients(problem()) is None


@needs_triton
@pytest.mark.parametrize("engine", ["triton", pytest.param("gluon", marks=needs_gluon), pytest.param("cuda", marks=needs_gluon)])
def test_the_first_build_of_a_forward_starts_the_others(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the compiler is real; nothing is stored."""
    from tilewise.core import store
    from tilewise.engines.cuda import nvrtc
    from tilewise.engines.cuda.source import CudaKernel
    from tilewise.engines.gpu import background_build
    from tilewise.engines.gpu.kernel_cache import FACTS, load_or_build
    from tilewise.engines.gpu.kernel_request import KernelRequest
    from tilewise.engines.gpu.launch import request_of
    from tilewise.engines.registry import engine_named
    from tilewise.engines.triton import aot

    built: list[str] = []

    def compiled(request: KernelRequest, table: object) -> dict[str, bytes]:
        built.append(request.kernel)
        return {"facts": json.dumps(dict.fromkeys(FACTS, 0)).encode(), "cubin": b"cubin"}

    from tilewise.engines.gpu import compiler

    monkeypatch.setattr(compiler, "compiled", compiled)
    monkeypatch.setattr(CudaKernel, "compiled", lambda self, request: compiled(request, None))
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(store, "write", lambda key, parts: None)
    monkeypatch.setattr(store, "read", lambda key: None)
    monkeypatch.setattr(background_build, "architecture", lambda device: 90)
    p = problem(mask=masks.causal)
    builds_of = engine_named(engine).background_builds()
    launch = aot.map_launches(background_build.on_meta(p))[0]()[0]
    with on_first_build(lambda: builds_of.forward(p)):
        load_or_build(request_of(launch, 90), launch.table)
    wait_for(lambda: not build_queue._process.threads)
    hopper = {"hopper_fwd", "hopper_fwd_fixup", "hopper_bwd_preprocess", "hopper_bwd", "hopper_bwd_postprocess", "pack_mask_bits"}
    follow = {"triton": {"fwd", "bwd_preprocess", "bwd", "dq_postprocess"}, "gluon": hopper, "cuda": hopper - {"hopper_fwd", "hopper_fwd_fixup"} | {"cuda_fwd"}}
    assert set(built) == {"classify"} | follow[engine]


@needs_triton
def test_kernels_are_compiled_at_the_same_time_and_warnings_stay_as_they_were() -> None:
    import warnings

    from tilewise.engines.gpu import background_build, compiler
    from tilewise.engines.gpu.launch import request_of
    from tilewise.engines.triton import aot

    p = background_build.on_meta(problem(mask=lambda b, h, q, kv: q * 5 >= kv * 3, dim=32))
    launches = [make()[0] for make in aot.forward_launches(p) + aot.backward_launches(p, frozenset())]
    before = list(warnings.filters)
    with ThreadPoolExecutor(4) as pool:
        assert all(files["cubin"] for files in pool.map(lambda launch: compiler.compiled(request_of(launch, 90), launch.table()), launches))
    assert list(warnings.filters) == before
