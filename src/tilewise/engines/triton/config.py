"""Tile sizes, warps and pipeline stages of the Triton kernels, by role, dtype and head dim."""

import torch

from tilewise.core.problem import FLOAT8, Problem
from tilewise.engines.gpu.config import Config, Configs, dividing, dot_precision, padded_dim
from tilewise.engines.gpu.limits import interpreted

# Roles of programs: "fwd" a query tile of the forward ("sparse_fwd" where little of the map is computed), "decode" a split of the keys
# ("deep_decode" with another key tile on its way, so that two programs share a multiprocessor and not three),
# "dkdv" and "dq" a key tile and a query tile of the backward, "dkdv_atomic_dq" a key tile that adds up dQ in memory too.
FWD, BWD, BWD_ATOMIC_DQ = ("fwd",), ("dkdv", "dq"), ("dkdv_atomic_dq",)  # the roles of one kernel must have the same warps
DECODE, DEEP_DECODE = ("decode",), ("deep_decode",)

# Largest head dim (padded to a power of two, the larger of q's and v's) -> configuration, for 16-bit inputs. Measured on an H200.
TABLES = {
    "fwd": {64: Config(128, 64, 4, 3), 128: Config(128, 128, 8, 3), 256: Config(128, 64, 8, 2), 512: Config(64, 32, 8, 2)},
    "dkdv": {64: Config(64, 64, 4, 3), 128: Config(32, 128, 8, 3), 256: Config(64, 64, 8, 2), 512: Config(16, 32, 8, 1)},
    "dq": {64: Config(64, 128, 4, 3), 128: Config(128, 64, 8, 3), 256: Config(128, 32, 8, 3), 512: Config(32, 16, 8, 1)},
    "dkdv_atomic_dq": {64: Config(64, 64, 4, 3), 128: Config(64, 128, 8, 3)},
    "decode": {64: Config(16, 128, 4, 3), 128: Config(16, 64, 4, 3), 256: Config(16, 32, 4, 3), 512: Config(16, 16, 4, 2)},
}
MAX_ATOMIC_DQ_DIM = max(TABLES["dkdv_atomic_dq"])
SPARSE = 0.25  # maps of which less is computed have a large share of partial tiles: smaller ones waste less
TABLES["deep_decode"] = {size: config._replace(stages=config.stages + 1) for size, config in TABLES["decode"].items()}
TABLES["sparse_fwd"] = TABLES["fwd"] | {128: Config(64, 64, 4, 3)}

# The same where a mask is computed too, which takes registers.
MASKED = {"dkdv": {128: Config(32, 64, 4, 3), 256: Config(32, 64, 8, 3)}, "dq": {128: Config(64, 64, 4, 2)}}
# The same for 32-bit inputs without tensor cores, where it is not half of the above. Larger tiles spill kilobytes (D128: 64 x 64 takes ten times as long).
IEEE = {"fwd": {64: Config(32, 128, 8, 2), 128: Config(32, 64, 8, 2), 256: Config(32, 32, 8, 2), 512: Config(16, 16, 8, 2)}}
IEEE["sparse_fwd"] = IEEE["fwd"]
# The same for bf16x6, whose three terms take three times the registers. A backward has less than 64 rows in a product: see is_miscompiled.
BF16X6 = {
    "fwd": {64: Config(64, 64, 4, 2), 128: Config(64, 32, 4, 2), 256: Config(32, 64, 8, 2), 512: Config(16, 32, 8, 2)},
    "dkdv": {64: Config(64, 32, 4, 2), 128: Config(64, 32, 8, 2), 256: Config(64, 16, 8, 2), 512: Config(32, 16, 8, 1, 1)},
    "dq": {64: Config(32, 64, 4, 2), 128: Config(32, 64, 8, 2), 256: Config(16, 64, 8, 2), 512: Config(16, 32, 8, 1, 1)},
}
BF16X6["sparse_fwd"] = BF16X6["fwd"]
BY_PRECISION = {"ieee": IEEE, "bf16x6": BF16X6}
SHIFT_TERMS = 16  # columns of a product that adds a number per query: the least a product takes; see kernels/backward.py
INTERPRETER = Config(32, 32, 4, 1, 1)  # small tiles, so that small tests have tails and several tiles


def table_configs(roles: tuple[str, ...], p: Problem) -> Configs:
    """The table's choice for every role of a kernel."""
    return tuple([table_config(role, p) for role in roles])


def table_config(role: str, p: Problem) -> Config:
    if interpreted():
        config = INTERPRETER
    else:
        width = max(padded_dim(p.head_dim), padded_dim(p.v_dim))
        largest, config = next((size, c) for size, c in TABLES[role].items() if width <= size)
        if p.mask is not None and (p.score is None or largest > 128):
            config = MASKED.get(role, {}).get(largest, config)
        if role.endswith("decode") and p.key.dtype in FLOAT8 and p.dtype != torch.float32:  # half the bytes
            config = config._replace(n=2 * config.n)
        if p.dtype == torch.float32:  # twice the bytes
            config = config._replace(m=max(16, config.m // 2), n=max(16, config.n // 2), stages=min(config.stages, 2))
            config = BY_PRECISION.get(dot_precision(p.dtype), {}).get(role, {}).get(largest, config)
    return config if p.given_tiles is None else dividing(config, p.given_tiles.tile)


def is_miscompiled(role: str, config: Config, precision: str) -> bool:
    """Whether a configuration is known to become wrong code. wgmma, for products of 64 rows and more, takes operands from shared memory by descriptors
    in uniform registers. A bf16x6 backward has many of those, and ptxas 12.8, which Triton 3.6 brings, overwrites some."""
    rows = config.n if role == "dkdv" else config.m
    return precision == "bf16x6" and role in BWD and rows >= 64
