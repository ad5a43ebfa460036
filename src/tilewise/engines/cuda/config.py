"""Tile sizes and stages of the CUDA forward, by head dim. Those of 64 and 128 were chosen by measurements on an H200 (docs/kernels/hopper_trials.md)."""

from dataclasses import dataclass

import torch

from tilewise.core.problem import Problem
from tilewise.engines.cuda.mods import is_bounded, keeps_range, uses_distance
from tilewise.engines.gluon import config as gluon
from tilewise.engines.gpu.limits import shared_memory
from tilewise.engines.gpu.mods import has_score
from tilewise.lang import Band, band_of
from tilewise.lang.bands import LONGEST
from tilewise.sizes import less

ROWS = 64  # query rows of a warpgroup
CHUNK = 64  # columns that lie side by side in shared memory, in 128 bytes
CLUSTER_TILES = 8  # query tiles of a head from which on programs share keys in pairs, though one tile may be missing from the last pair
MOST_KEYS_OF_BAND = 128  # of a step
KEYS_OF_THREE = 80  # of a step where three warpgroups compute head dims above 64
KEPT_BY_DISTANCE = 8  # registers that hold what depends on the distance of a key and a query, for the second row
REGISTERS, REGISTERS_SCORED, REGISTERS_DROPOUT = 196, 188, 176  # that scores, weights and outputs may take of a thread's 240


@dataclass(frozen=True)
class ForwardConfig:
    """The constants of kernels/forward.cu."""

    d: int  # head dim of Q and K, a multiple of 16: TMA fills up with zeros
    dv: int  # head dim of V, a multiple of 8
    block_n: int  # keys of a step
    warpgroups: int  # consumer warpgroups: a query tile has 64 rows for each
    k_stages: int
    v_stages: int
    cluster: int  # programs that share keys and values by multicast
    mapped: bool  # a tile schedule says which key tiles are visited, and its mask bits what is allowed in them
    banded: bool  # the mask is a band: the kernel finds its key tiles by itself
    fp16: bool
    sinks: bool
    scored: bool  # a score function is applied to q.k
    anchored: bool  # row maxima are looked for in a row's first key tile and in masked ones alone
    dropout: bool
    partial: bool  # outputs are parts of rows', in fp32

    @property
    def block_m(self) -> int:
        return ROWS * self.warpgroups

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_m, self.block_n

    @property
    def shared(self) -> int:
        """Bytes of shared memory: tiles, 1024 to align them, 256 for barriers and messages."""
        q, kv = self.block_m * padded(self.d), self.block_n * (self.k_stages * padded(self.d) + self.v_stages * padded(self.dv))
        return 1024 + 2 * (q + kv) + 256

    @property
    def registers(self) -> int:
        """Of a thread, for scores, for the weights of the step before, in 16 bits, and for outputs."""
        return self.block_n // 2 + self.block_n // 4 + self.dv // 2

    def fits(self, kept: int) -> bool:
        """kept: registers that a score keeps from one column to the next."""
        most = REGISTERS_DROPOUT if self.dropout else REGISTERS_SCORED if self.scored else REGISTERS
        return self.shared <= shared_memory(90) and self.registers + kept <= most

    @property
    def repairs(self) -> bool:
        """Whether the kernel itself computes rows again that are not finite: where neither mask bits nor functions decide about elements."""
        return not (self.mapped or self.scored or self.dropout or self.partial)

    @property
    def warps(self) -> int:
        return 4 + 4 * self.warpgroups


def padded(dim: int) -> int:
    """A head dim in shared memory."""
    return -(-dim // CHUNK) * CHUNK


def band_for(p: Problem) -> Band | None:
    """The band that the whole mask is; None where a tile schedule is needed, or no mask is given."""
    if p.mask is None or p.given_tiles is not None:
        return None
    return band_of(p.mask) if less(p.q_len, LONGEST) and less(p.kv_len, LONGEST) else None


def forward_config(p: Problem, mapped: bool) -> ForwardConfig:
    """Pairs of programs need pairs of query tiles."""
    forms = forward_forms(p, mapped)
    tiles = -(-p.q_len // forms[0].block_m)
    return forms[0] if tiles % 2 == 0 or tiles >= CLUSTER_TILES else forms[-1]


def forward_forms(p: Problem, mapped: bool) -> list[ForwardConfig]:
    """What lengths may ask for: programs in pairs, if that pays (scores and dropout leave no registers for it), and alone. With a map, tiles are the
    Gluon engine's: the two share tile schedules, mask bits and the fix-up. Without one, a step takes as many keys as fit; of a band up to 128, because larger
    tiles lie across its edges too often. A bounded score (softcap) takes the special function unit twice for an element: three warpgroups keep it busy."""
    theirs, dims, scored, dropout = gluon.forward_config(p), (-(-p.head_dim // 16) * 16, p.v_dim), has_score(p), p.dropout_p > 0
    band = band_for(p)
    banded, anchored = band is not None, not scored or keeps_range(p, band)
    kept = KEPT_BY_DISTANCE if scored and uses_distance(p) else 0
    warpgroups = 3 if banded and max(dims) <= 2 * CHUNK and not dropout and is_bounded(p) else theirs.warpgroups

    def form(block_n: int, k_stages: int, v_stages: int, cluster: int) -> ForwardConfig:
        rest = (mapped, banded, p.dtype == torch.float16, p.sinks is not None, scored, anchored, dropout, p.partial)
        return ForwardConfig(*dims, block_n, warpgroups, k_stages, v_stages, cluster, *rest)

    most = MOST_KEYS_OF_BAND if banded else 256
    if mapped or theirs.warpgroups == 3:
        block_n = theirs.block_n
    elif warpgroups == 3:
        block_n = KEYS_OF_THREE
    else:
        block_n = next(n for n in range(most, 0, -16) if form(n, 2, 2, 1).fits(kept))
    if mapped or banded or warpgroups == 3:
        return [next(c for c in (form(block_n, *stages, 1) for stages in ((3, 3), (3, 2), (2, 2))) if c.shared <= shared_memory(90))]
    return [form(block_n, 2, 2, cluster) for cluster in ((1,) if scored or dropout else (2, 1))]
