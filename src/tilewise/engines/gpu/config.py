"""Tile sizes, warps and pipeline stages of a kernel, and how a choice steps down to one that fits a GPU."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from tilewise.core.tf32 import allows_tf32
from tilewise.engines.gpu.limits import interpreted

LOG2E = 1.4426950408889634
SMALLEST_SUM, LARGEST_SUM = 2.0**-60, 2.0**120  # of a row's weights: one that is out of this range is computed again (docs/kernels/softmax.md)


class Config(NamedTuple):
    m: int  # query rows of a tile
    n: int  # keys of a tile
    warps: int
    stages: int  # tiles in flight
    masked_stages: int = 2  # the same for tiles that evaluate the mask


Configs = tuple[Config, ...]  # one for each role of a kernel: some programs of one launch do one thing, some another


def padded_dim(size: int) -> int:
    """The power of two a head dim is padded to in registers; tl.dot needs at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def dot_precision(dtype: torch.dtype) -> str:
    """tl.dot's `input_precision` for 32-bit inputs; products of 16-bit ones are exact, whatever this says.

    "bf16x6" is as accurate as float32: each input is the sum of three bf16 numbers, and tensor cores compute the six of the nine
    products of two such sums that matter.
    """
    if dtype != torch.float32:
        return "ieee"
    if allows_tf32():
        return "tf32"
    return "bf16x6" if has_bf16x6() else "ieee"


@lru_cache(maxsize=1)
def has_bf16x6() -> bool:
    """Triton 3.6 is the first that has it."""
    if interpreted():
        return False
    from triton.backends.nvidia.compiler import CUDAOptions

    return "bf16x6" in CUDAOptions.allowed_dot_input_precisions


def dividing(config: Config, tile: tuple[int, int]) -> Config:
    """The configuration with tiles that divide the given ones: a kernel's tile must not straddle two of them."""
    return config._replace(m=math.gcd(config.m, tile[0]), n=math.gcd(config.n, tile[1]))


def smaller(config: Config) -> Config | None:
    """The next thing to try when a configuration does not fit a GPU's shared memory. With a single stage every load is waited for: that comes last."""
    if config.stages > 2:
        return config._replace(stages=config.stages - 1, masked_stages=min(config.masked_stages, config.stages - 1))
    if config.n > 32 and config.n >= config.m:
        return config._replace(n=config.n // 2)
    if config.m > 32:
        return config._replace(m=config.m // 2)
    if config.stages > 1:
        return config._replace(stages=1, masked_stages=1)
    if config.n > 16 and config.n >= config.m:
        return config._replace(n=config.n // 2)
    if config.m > 16:
        return config._replace(m=config.m // 2)
    return None


def all_smaller(configs: Configs) -> Configs | None:
    """The same for all roles of one kernel, which share its memory."""
    found = [smaller(c) for c in configs]
    return None if any([c is None for c in found]) else tuple([c for c in found if c is not None])
