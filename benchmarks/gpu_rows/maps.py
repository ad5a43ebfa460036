"""Tile schedules of both passes."""

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from tilewise import masks
from tilewise.core import map_cache
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.gpu.device_map import is_made_on_device
from tilewise.engines.gpu.tile_schedule import key_schedule, query_schedule
from tilewise.engines.triton import run
from tilewise.engines.triton.config import table_config


def maps(args: argparse.Namespace) -> list[list[str]]:
    """Tile schedules of both passes, as an engine makes them before its kernels: of layouts that it has not seen, and of a mask of positions alone."""
    table = [["tile schedules, forward and backward", "GPU ms", "host ms", "host ms after a wait", "peak MiB"]]
    count = 20
    work = {
        "causal documents (20), 16384 tokens": [problem(16384, masks.causal & masks.document(documents(16384, 20))) for _ in range(count)],
        "window 4096 and documents (20), 32768 tokens": [
            problem(32768, masks.sliding_window(4096) & masks.document(documents(32768, 20))) for _ in range(count)
        ],
        "padding, 4 x 4096 tokens": [problem(4096, masks.padding(torch.randint(1, 4097, (4,)).cuda()), batch=4) for _ in range(count)],
        "causal, 131072 tokens, made once": [problem(131072, masks.causal)] * count,
        "radial of 21 frames, 75600 tokens, made once": [problem(75600, masks.radial(21, 3600))] * count,
    }
    for name, problems in work.items():
        for engine in args.engines:
            if engine not in SCHEDULES:
                continue
            scheduled(problems[0], engine)  # compiles
            gpu, host, peaks = zip(*(scheduled(p, engine) for p in problems), strict=True)
            ahead = f"{in_a_row(problems, engine):.3f}" if is_made_on_device(problems[0]) else "-"
            row = [f"{statistics.median(gpu):.3f}", ahead, f"{statistics.median(host):.3f}", f"{max(peaks) / 2**20:.1f}"]
            table.append([f"{name}, {engine}", *row])
            print("  ".join(table[-1]), flush=True)
    return table


def triton_schedules(p: Problem) -> None:
    key, query = (table_config(role, p) for role in ("dkdv_atomic_dq", run.fwd_role(p)))
    query_schedule(p, (query.m, query.n))
    key_schedule(p, (key.m, key.n))
    query_schedule(p, (key.m, key.n))


def hopper_schedules(p: Problem) -> None:
    from tilewise.engines.gluon.config import backward_config, forward_config
    from tilewise.engines.gluon.tile_schedule import hopper_schedule, key_axis, query_axis

    hopper_schedule(p, query_axis(forward_config(p)))
    hopper_schedule(p, key_axis(backward_config(p)))


SCHEDULES = {"triton": triton_schedules, "gluon": hopper_schedules, "cuda": hopper_schedules}


def scheduled(p: Problem, engine: str) -> tuple[float, float, int]:
    """GPU ms, host ms and bytes that schedules take which are not there yet. The GPU is kept busy until all of it is handed over, unless the host has to wait
    for results: then both are the time until everything is there."""
    map_cache.maps.clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if is_made_on_device(p):
        torch.cuda._sleep(10_000_000)  # cycles
    begin.record()
    started = time.perf_counter()
    SCHEDULES[engine](p)
    host = (time.perf_counter() - started) * 1e3
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), host, torch.cuda.max_memory_allocated() - before


def in_a_row(problems: list[Problem], engine: str) -> float:
    """Host ms of schedules as a training step makes them: ahead of the GPU. A host that has just waited for it begins with cold caches, and takes longer."""
    times = []
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    for p in problems:
        map_cache.maps.clear()
        started = time.perf_counter()
        SCHEDULES[engine](p)
        times.append((time.perf_counter() - started) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def problem(length: int, mask: Any, batch: int = 1) -> Problem:
    query = torch.empty(batch, 1, length, 64, device="cuda", dtype=torch.bfloat16)
    return make_problem(query, query, query, mask, None, Options())[0]


def documents(length: int, count: int) -> Tensor:
    """Ids of documents of random lengths."""
    cuts = torch.randperm(length - 1)[: count - 1] + 1
    return torch.searchsorted(cuts.sort().values, torch.arange(length), right=True).cuda()
