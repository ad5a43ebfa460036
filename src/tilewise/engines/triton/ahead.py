"""Building ahead: every kernel a problem needs, compiled into the store without running anything."""

from collections.abc import Callable

import torch

from tilewise.engines.base import Output, like_query
from tilewise.engines.triton import run
from tilewise.engines.triton.config import Config, choose, smaller
from tilewise.engines.triton.launch import Launch, parts_of, request_of
from tilewise.problem import Problem

SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 87: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024, 120: 99 * 1024}
LEAST_SHARED = 99 * 1024


def forward_launches(p: Problem) -> list[Callable[[], list[Launch]]]:
    """What a forward of this problem starts: each entry gives its launches from the best configuration down."""
    out = like_query(p.query, p.v_dim)
    lse = torch.empty((p.batch, p.heads, p.q_len), dtype=torch.float32, device=p.device)
    if run.is_decoding(p):
        parts = run._splits(p, choose("decode", p))
        return [_steps("decode", p, lambda config: run._split(p, parts, config)), lambda: [run._combine(p, parts, out, lse, lse)]]
    return [_steps("forward", p, lambda config: run._forward(p, out, lse, lse, config))]


def backward_launches(p: Problem, wanted: frozenset[int]) -> list[Callable[[], list[Launch]]]:
    out = like_query(p.query, p.v_dim)
    rows = torch.empty((p.batch, p.heads, p.q_len), dtype=torch.float32, device=p.device)
    gradients = run.gradient_buffers(p, wanted)
    return [
        lambda: [run._sums(p, Output(out, rows, rows), out, None, rows)],
        _steps("keys", p, lambda config: run._keys(p, rows, out, rows, p.key, p.value, config)),
        _steps("queries", p, lambda config: run._queries(p, rows, out, rows, p.query, gradients, wanted, config)),
    ]


def _steps(kernel: str, p: Problem, make: Callable[..., Launch]) -> Callable[[], list[Launch]]:
    def ladder() -> list[Launch]:
        found: list[Launch] = []
        config: Config | None = choose(kernel, p)
        while config is not None:
            found.append(make(config))
            config = smaller(config)
        return found

    return ladder


def build(launches: list[Launch], arch: int) -> str:
    """Compile the first launch whose kernel fits the architecture's shared memory; its name and size."""
    import json

    limit = SHARED_MEMORY.get(arch, LEAST_SHARED)
    for launch in launches:
        facts = json.loads(parts_of(request_of(launch, arch))["facts"])
        if facts["shared"] <= limit:
            return f"{launch.kernel} ({facts['shared'] // 1024} KiB shared)"
    raise RuntimeError(f"no configuration of the {launches[0].kernel} kernel fits sm_{arch}")
