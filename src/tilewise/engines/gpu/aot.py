"""Ahead-of-time builds: launches of problems without data (on the meta device), compiled into the store without running anything."""

import json
from collections.abc import Callable

from tilewise.engines.gpu.config import Configs, all_smaller
from tilewise.engines.gpu.kernel_cache import load_or_build
from tilewise.engines.gpu.launch import Launch, request_of
from tilewise.engines.gpu.limits import shared_memory

Candidates = Callable[[], list[Launch]]  # one kernel of a pass, from the best configuration down


def step_down(configs: Configs, make: Callable[[Configs], Launch]) -> Candidates:
    def launches() -> list[Launch]:
        found: list[Launch] = []
        left: Configs | None = configs
        while left is not None:
            found.append(make(left))
            left = all_smaller(left)
        return found

    return launches


def build(candidates: list[Launch], arch: int) -> str:
    """Compile the first launch whose kernel fits the architecture's shared memory; its name and size."""
    limit = shared_memory(arch)
    for launch in candidates:
        facts = json.loads(load_or_build(request_of(launch, arch), launch.table)["facts"])
        if facts["shared"] <= limit:
            return f"{launch.kernel} ({facts['shared'] // 1024} KiB shared)"
    raise RuntimeError(f"no configuration of the {candidates[0].kernel} kernel fits sm_{arch}")
