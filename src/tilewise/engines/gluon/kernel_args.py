"""The argument tuples of the Hopper engine's plain Triton kernels (see gpu/kernel_args.py). Fields are in the order of the kernels' parameters."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tilewise.engines.gpu.kernel_args import AttentionConstants, BwdStrides, FwdStrides, KernelConstants, Mods, PreprocessStrides, Schedule, Shape


@dataclass(frozen=True)
class FixupConstants(AttentionConstants):
    rows: int  # the tile's, padded to a power of two
    tiles: int  # of a program


class FixupArgs(NamedTuple):
    strides: FwdStrides
    schedule: Schedule  # of query tiles
    shape: Shape
    n_tiles: int  # of a head
    n_all: int  # of all heads
    mods: Mods
    pages: tuple[()] = ()


class PreprocessTensors(NamedTuple):
    out: Tensor
    do: Tensor
    lse: Tensor
    dlse: Tensor | None
    lse_padded: Tensor  # [batch * heads * n_padded], in the order in which `bwd` takes queries
    delta_padded: Tensor
    delta: Tensor
    dq_sums: Tensor


class PreprocessArgs(NamedTuple):
    strides: PreprocessStrides
    n_heads: int
    n_q: int
    n_padded: int  # rows of a head in padded tensors
    grid_width: int


@dataclass(frozen=True)
class PreprocessConstants(KernelConstants):
    has_dlse: bool
    patched: bool  # `bwd` takes tokens in the order of strips (patches.py)
    m: int
    dv: int
    dv_true: int
    d_sum: int  # columns of dq_sums


class PostprocessTensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dq_sums: Tensor
    nonfinite: Tensor  # whether a key tile's dK or dV is, for each of two warpgroups
    seed: Tensor | None


class PostprocessArgs(NamedTuple):
    strides: BwdStrides
    rows: Schedule  # of query tiles
    n_rows: int
    columns: Schedule  # of key tiles
    n_columns: int
    n_dq_programs: int
    shape: Shape
    n_padded: int
    grid_width: int
    mods: Mods


@dataclass(frozen=True)
class PostprocessConstants(KernelConstants):
    dq: AttentionConstants  # tiles of `rows`
    dkdv: AttentionConstants  # tiles of `columns`
    patched: bool
    d_sum: int


class MaskBitsGeometry(NamedTuple):
    n_rows: int
    n_heads: int
    n_programs: int  # per row of the map
    m: int  # rows of a block of bits
    n_q: int
    n_kv: int


@dataclass(frozen=True)
class MaskBitsConstants(KernelConstants):
    by_keys: bool  # the map's rows are key tiles
    transposed: bool  # a block's rows are the map's columns
    orders: bool  # the map's rows, too
    chunk: int  # rows looked at together for that
    rows_per_program: int
    columns: int
