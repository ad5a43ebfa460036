"""The configuration a kernel runs in: tuned, or the table's, and stepped down until it fits the GPU's shared memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.problem import Problem
from tilewise.engines.gpu import tuning
from tilewise.engines.gpu.config import Configs, all_smaller, dot_precision
from tilewise.engines.gpu.device_map import device_map_of, is_made_on_device
from tilewise.engines.gpu.driver import OutOfSharedMemory
from tilewise.engines.gpu.kernel_cache import architecture, sources_digest
from tilewise.engines.gpu.launch import KernelLaunch, Launch, prepare
from tilewise.engines.triton.config import is_miscompiled, table_configs


class FitKey(NamedTuple):
    """All that decides which configuration is chosen, and how much shared memory it takes: what `table_config` reads, the score's program (its
    generated function may take shared memory), the dtypes of results, keys and values (storing and loading them may), the size of pages and the device.
    Lengths, strides and contents decide neither."""

    roles: tuple[str, ...]
    head_dim: int
    v_dim: int
    dtype: torch.dtype
    result_dtype: torch.dtype
    precision: str
    is_masked: bool
    score: str
    given_tile: tuple[int, int] | None
    device: torch.device
    stored: torch.dtype  # of keys and values
    page: int | None  # rows of a page


_fitting: dict[FitKey, Configs] = {}


def fit_key(p: Problem, roles: tuple[str, ...]) -> FitKey:
    score = "" if p.score is None else p.score.program.text
    inner = p.dtype, p.result_dtype, dot_precision(p.dtype)
    stored = p.key.dtype, None if p.pages is None else p.pages.size
    return FitKey(roles, p.head_dim, p.v_dim, *inner, p.mask is not None, score, _given_tile(p), p.device, *stored)


def fitted(p: Problem, roles: tuple[str, ...], make: Callable[[Configs], Launch]) -> KernelLaunch:
    """The launch in the best configuration whose shared memory the GPU has; what did not fit is not tried again."""
    key = fit_key(p, roles)
    configs: Configs | None = _fitting.get(key)
    if configs is None or tuning.is_on():
        configs = tuned(p, roles, make)
    while configs is not None:
        try:
            ready = prepare(make(configs), p.device)
        except OutOfSharedMemory:
            configs = all_smaller(configs)
            continue
        _fitting[key] = configs
        return ready
    raise RuntimeError(f"no configuration of the {' and '.join(roles)} kernel fits this GPU for {p.describe()}")


def tuned(p: Problem, roles: tuple[str, ...], make: Callable[[Configs], Launch]) -> Configs:
    """The configurations of kernels like this one: those found by trying, now or earlier, else the table's."""
    tile, precision = _given_tile(p), dot_precision(p.dtype)
    arch = architecture(p.device) if p.device.type == "cuda" else p.device.type
    inputs = f"{p.head_dim} {p.v_dim} {p.dtype} {precision}"
    if p.pages is not None:
        inputs += f" pages {p.pages.size} {p.key.dtype}"
    kind = f"{roles} {inputs} masked {p.mask is not None} scored {p.score is not None} tiles {tile} {arch} {sources_digest()}"

    def milliseconds(configs: Configs) -> float:
        if any([is_miscompiled(role, config, precision) for role, config in zip(roles, configs, strict=True)]):
            raise RuntimeError("the compiler makes wrong code of it")
        launch = make(configs)
        tensors = [t for value in launch.tensors["tensors"] for t in _for_trial(value)]
        ready = prepare(launch, p.device).bind(p, device_map_of, is_made_on_device(p))
        return tuning.milliseconds(lambda: ready.launch(tensors))

    return tuning.best(kind, roles, table_configs(roles, p), tile, milliseconds)


def _for_trial(value: Any) -> list[Tensor | None]:
    """Sums, which come in tuples, are copied: trials would add to them."""
    return [t.clone() for t in value] if isinstance(value, tuple) else [value]


def _given_tile(p: Problem) -> tuple[int, int] | None:
    return None if p.given_tiles is None else p.given_tiles.tile  # others are cut as the kernels like
