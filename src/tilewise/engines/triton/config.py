"""Tile sizes, warps and pipeline stages, by kernel, dtype and head dim; an over-budget choice steps down by itself."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from tilewise.engines.triton import interpreted
from tilewise.problem import Problem
from tilewise.tf32 import allows_tf32

LOG2E = 1.4426950408889634
SHIFT_PARTS = 16  # parts of a number that enters a product, the least a product takes; see backward.shifted


class Config(NamedTuple):
    m: int  # query rows of a tile
    n: int  # keys of a tile
    warps: int
    stages: int  # tiles in flight
    masked_stages: int = 2  # the same for tiles that evaluate the mask


# Largest head dim (padded to a power of two, the larger of q's and v's) -> configuration, for 16-bit inputs. Measured on an H200.
TABLES = {
    "forward": {64: Config(128, 64, 4, 3), 128: Config(128, 128, 8, 3), 256: Config(128, 64, 8, 2), 512: Config(64, 32, 8, 2)},
    "keys": {64: Config(64, 64, 4, 3), 128: Config(32, 128, 8, 3), 256: Config(64, 64, 8, 2), 512: Config(16, 32, 8, 1)},
    "queries": {64: Config(64, 128, 4, 3), 128: Config(128, 64, 8, 3), 256: Config(128, 32, 8, 3), 512: Config(32, 16, 8, 1)},
    "added": {64: Config(64, 64, 4, 3), 128: Config(64, 128, 8, 3)},
    "decode": {64: Config(16, 128, 4, 3), 128: Config(16, 64, 4, 3), 256: Config(16, 32, 4, 3), 512: Config(16, 16, 4, 2)},
}
WIDEST_ADDED = max(TABLES["added"])
SPARSE = 0.25  # maps of which less is computed have a large share of partial tiles: smaller ones waste less
TABLES["sparse"] = TABLES["forward"] | {128: Config(64, 64, 4, 3)}

# The same where a mask is computed too, which takes registers.
MASKED = {
    "keys": {128: Config(32, 64, 4, 3), 256: Config(32, 64, 8, 3)},
    "queries": {128: Config(64, 64, 4, 2)},
}
# The same for 32-bit inputs on plain arithmetic units, where it is not half of the above. Larger tiles spill kilobytes (D128: 64 x 64 takes ten times as long).
PLAIN_UNITS = {"forward": {64: Config(32, 128, 8, 2), 128: Config(32, 64, 8, 2), 256: Config(32, 32, 8, 2), 512: Config(16, 16, 8, 2)}}
PLAIN_UNITS["sparse"] = PLAIN_UNITS["forward"]
# The same for 32-bit inputs in three parts (see `precision`), which take three times the registers. A backward has less than 64 rows in a product: see
# is_miscompiled.
IN_PARTS = {
    "forward": {64: Config(64, 64, 4, 2), 128: Config(64, 32, 4, 2), 256: Config(32, 64, 8, 2), 512: Config(16, 32, 8, 2)},
    "keys": {64: Config(64, 32, 4, 2), 128: Config(64, 32, 8, 2), 256: Config(64, 16, 8, 2), 512: Config(32, 16, 8, 1, 1)},
    "queries": {64: Config(32, 64, 4, 2), 128: Config(32, 64, 8, 2), 256: Config(16, 64, 8, 2), 512: Config(16, 32, 8, 1, 1)},
}
IN_PARTS["sparse"] = IN_PARTS["forward"]
BY_PRECISION = {"ieee": PLAIN_UNITS, "bf16x6": IN_PARTS}
BACKWARD = ("keys", "queries")  # the two kinds of programs of one kernel: they must have the same warps
SMALL = Config(32, 32, 4, 1, 1)  # Triton's interpreter: small tiles, so that small tests have tails and several tiles


def padded(size: int) -> int:
    """The power of two a head dim is padded to in registers; products need at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """What tl.dot calls the way of multiplying 32-bit numbers; products of 16-bit ones are exact, whatever this says.

    "bf16x6" is as good as float32: a number is the sum of three bf16 ones, and of the nine products of two such sums tensor cores make the six that matter.
    """
    if dtype != torch.float32:
        return "ieee"
    if allows_tf32():
        return "tf32"
    return "bf16x6" if has_parts() else "ieee"


@lru_cache(maxsize=1)
def has_parts() -> bool:
    """Triton 3.6 is the first that multiplies in parts."""
    if interpreted():
        return False
    from triton.backends.nvidia.compiler import CUDAOptions

    return "bf16x6" in CUDAOptions.allowed_dot_input_precisions


def choose(kernel: str, p: Problem) -> Config:
    if interpreted():
        config = SMALL
    else:
        width = max(padded(p.head_dim), padded(p.v_dim))
        largest, config = next((size, c) for size, c in TABLES[kernel].items() if width <= size)
        if p.mask is not None and (p.score is None or largest > 128):
            config = MASKED.get(kernel, {}).get(largest, config)
        if p.dtype == torch.float32:  # twice the bytes
            config = config._replace(m=max(16, config.m // 2), n=max(16, config.n // 2), stages=min(config.stages, 2))
            config = BY_PRECISION.get(precision(p.dtype), {}).get(kernel, {}).get(largest, config)
    return config if p.tiles is None or not p.tiles.given else within(config, p.tiles.tile)


def is_miscompiled(kernel: str, config: Config, multiplied: str) -> bool:
    """Whether a configuration is known to become wrong code; `multiplied` is its precision. A product of 64 rows finds its factors in shared memory by
    addresses in registers that all threads share. A backward in parts has many of them, and the assembler of CUDA 12.8, which Triton 3.6 brings, overwrites
    some."""
    rows = config.n if kernel == "keys" else config.m
    return multiplied == "bf16x6" and kernel in BACKWARD and rows >= 64


def within(config: Config, tile: tuple[int, int]) -> Config:
    """The configuration with tiles that divide the given ones, which must not be mixed with their neighbours."""
    return config._replace(m=math.gcd(config.m, tile[0]), n=math.gcd(config.n, tile[1]))


def smaller(config: Config) -> Config | None:
    """The next thing to try when a configuration does not fit a GPU's shared memory. With one stage alone every load is waited for: that comes last."""
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


def all_smaller(configs: tuple[Config, ...]) -> tuple[Config, ...] | None:
    """The same for the programs of one kernel, which share its memory."""
    found = [smaller(c) for c in configs]
    return None if any([c is None for c in found]) else tuple([c for c in found if c is not None])
