"""Tile sizes, stages and register budgets of the Hopper kernels, by head dim. Chosen by measurements on an H200 (docs/kernels/hopper_trials.md).

A config is a constexpr of its kernel. Nothing here needs Triton.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from tilewise.core.problem import Problem
from tilewise.engines.gluon.named_barriers import FWD_Q_FREE
from tilewise.engines.gluon.patches import grid_width
from tilewise.engines.gpu.anchoring import is_anchored

ROWS = 64  # query rows of a warpgroup


@dataclass(frozen=True)
class ForwardConfig:
    d: int  # head dim of Q and K in shared memory, padded with zeros
    dv: int  # head dim of V
    block_n: int  # keys of a step
    warpgroups: int  # consumer warpgroups: a query tile has 64 rows for each
    k_stages: int
    v_stages: int  # with three or more, V is awaited after the softmax that precedes P V, and the next K while the products run
    ping_pong: bool  # consumer warpgroups take turns at issuing wgmma
    own_o_buffer: bool  # O is not staged in Q's shared memory, but in some of its own: the next Q can load during the epilogue
    anchored: bool = False  # full tiles but the first keep the rows' maxima as they are (docs/kernels/softmax.md)
    partial: bool = False  # outputs are parts of rows', in fp32: they leave from registers, and O needs no buffer

    @property
    def tile(self) -> tuple[int, int]:
        return ROWS * self.warpgroups, self.block_n

    @property
    def q_free(self) -> int:
        """The named barrier that releases Q's buffer."""
        return FWD_Q_FREE[self.warpgroups]

    @property
    def registers(self) -> tuple[int, int]:
        """Per thread, of a consumer and of the producer."""
        return (240, 24) if self.warpgroups == 2 else (160, 32)


@dataclass(frozen=True)
class BackwardConfig:
    d: int  # head dim in shared memory, the same for Q, K and V: 64, 128 or 256
    stages: int  # of Q and dO

    @property
    def is_wide(self) -> bool:
        """Whether backward_wide.py is used: a warpgroup accumulates dV or dK of all keys of a program, instead of both of half of them."""
        return self.d > 128

    @property
    def block_m(self) -> int:
        """Queries of a step. A warpgroup computes half of the rows of their dQ (D = 64), or half of the columns."""
        return 128 if self.d == 64 else 64

    @property
    def block_n(self) -> int:
        """Keys of a program."""
        return 64 if self.is_wide else 128

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_m, self.block_n

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that a warpgroup computes in a step, for 64 queries."""
        return 128 if self.is_wide else 64

    @property
    def release_threads(self) -> int:
        """Threads that release a stage of Q and dO: those of the store warp if dQ is staged in it, otherwise those of the consumers."""
        return 32 if self.is_wide else 256


def smem_dim(size: int) -> int:
    """The head dim in shared memory, where TMA pads the tensor's own with zeros."""
    return max(64, 1 << (size - 1).bit_length())


def forward_config(p: Problem) -> ForwardConfig:
    config = _of_sizes(p)
    config = _anchored(config) if is_anchored(p) and grid_width(p) is None else config  # most tiles of patches are masked
    return _partial(config) if p.partial else config


def forward_tile(p: Problem) -> tuple[int, int]:
    """Queries and keys of the forward's tiles, which depend neither on a score nor on the form of the output: torch.compile comes here."""
    return _of_sizes(p).tile


def _of_sizes(p: Problem) -> ForwardConfig:
    return _forward_config(smem_dim(p.head_dim), smem_dim(p.v_dim), p.given_tiles is not None, grid_width(p) is not None)


@lru_cache(maxsize=64)
def _anchored(config: ForwardConfig) -> ForwardConfig:
    return replace(config, anchored=True)


@lru_cache(maxsize=64)
def _partial(config: ForwardConfig) -> ForwardConfig:
    return replace(config, partial=True, own_o_buffer=True)


@lru_cache(maxsize=64)
def _forward_config(d: int, dv: int, given: bool, patched: bool) -> ForwardConfig:
    widest = max(d, dv)
    if patched:  # smaller tiles skip more of the keys outside of neighborhoods
        return ForwardConfig(d, dv, block_n=64, warpgroups=2, k_stages=4, v_stages=4, ping_pong=True, own_o_buffer=True)
    if widest == 64 and not given:
        return ForwardConfig(d, dv, block_n=128, warpgroups=3, k_stages=3, v_stages=3, ping_pong=True, own_o_buffer=True)
    if widest <= 128:
        return ForwardConfig(d, dv, block_n=128, warpgroups=2, k_stages=3, v_stages=2, ping_pong=True, own_o_buffer=True)
    return ForwardConfig(d, dv, block_n=64, warpgroups=2, k_stages=2, v_stages=2, ping_pong=False, own_o_buffer=d != dv)


def backward_config(p: Problem) -> BackwardConfig:
    return _backward_config(max(smem_dim(p.head_dim), smem_dim(p.v_dim)))


@lru_cache(maxsize=64)
def _backward_config(d: int) -> BackwardConfig:
    return BackwardConfig(d, stages=2)
