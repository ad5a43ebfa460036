"""Tile sizes and stages of the CUDA forward, by head dim. Chosen by measurements on an H200 (docs/kernels/hopper.md)."""

from dataclasses import dataclass

import torch

from tilewise.core.problem import Problem
from tilewise.engines.gluon import config as gluon

ROWS = 64  # query rows of a warpgroup
CLUSTER_TILES = 8  # query tiles of a head from which on programs share keys in pairs, though one tile may be missing from the last pair


@dataclass(frozen=True)
class ForwardConfig:
    """The constants of kernels/forward.cu."""

    d: int  # head dim of Q and K in shared memory, padded with zeros
    dv: int  # head dim of V
    block_n: int  # keys of a step
    warpgroups: int  # consumer warpgroups: a query tile has 64 rows for each
    k_stages: int
    v_stages: int
    cluster: int  # programs that share keys and values by multicast
    mapped: bool  # a tile schedule says which key tiles are visited, and its mask bits what is allowed in them
    fp16: bool

    @property
    def block_m(self) -> int:
        return ROWS * self.warpgroups

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_m, self.block_n

    @property
    def shared(self) -> int:
        """Bytes of shared memory: tiles, 1024 to align them, 256 for barriers and messages."""
        q, kv = self.block_m * self.d, self.block_n * (self.k_stages * self.d + self.v_stages * self.dv)
        return 1024 + 2 * (q + kv) + 256

    @property
    def warps(self) -> int:
        return 4 + 4 * self.warpgroups


def forward_config(p: Problem, mapped: bool) -> ForwardConfig:
    """Pairs of programs need pairs of query tiles."""
    forms = forward_forms(p, mapped)
    tiles = -(-p.q_len // forms[0].block_m)
    return forms[0] if tiles % 2 == 0 or tiles >= CLUSTER_TILES else forms[-1]


def forward_forms(p: Problem, mapped: bool) -> list[ForwardConfig]:
    """What lengths may ask for: programs in pairs, if that pays, and alone. Where there is a map, its tiles are the Gluon engine's: the two share tile
    schedules, mask bits and the fix-up."""
    theirs, fp16 = gluon.forward_config(p), p.dtype == torch.float16
    if mapped or theirs.d == 64:
        return [ForwardConfig(theirs.d, theirs.dv, theirs.block_n, theirs.warpgroups, k_stages=3, v_stages=3, cluster=1, mapped=mapped, fp16=fp16)]
    return [ForwardConfig(theirs.d, theirs.dv, 176, 2, k_stages=2, v_stages=2, cluster=cluster, mapped=mapped, fp16=fp16) for cluster in (2, 1)]
