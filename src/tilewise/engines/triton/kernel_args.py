"""The argument tuples of the Triton engine's kernels (see gpu/kernel_args.py). Fields are in the order of the kernels' parameters."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tilewise.engines.gpu.kernel_args import AttentionConstants, BwdStrides, KernelConstants, Mods, PageArgs, PreprocessStrides, Schedule, Shape, Strides

# -- decoding ------------------------------------------------------------------------------------------------------------


class DecodeSplitTensors(NamedTuple):
    """What a split leaves for `decode_combine`, or, if it is the only one, the output: the others are None."""

    q: Tensor
    k: Tensor
    v: Tensor
    acc: Tensor | None  # [batch * kv heads, splits, rows, DV] weighted values of every split
    row_max: Tensor | None  # [batch * kv heads, splits, rows]
    row_sum: Tensor | None
    out: Tensor | None
    lse: Tensor | None
    max_score: Tensor | None
    sinks: Tensor | None
    seed: Tensor | None


class DecodeStrides(NamedTuple):
    q: Strides
    k: Strides
    v: Strides
    out: Strides | None


class DecodeSplitArgs(NamedTuple):
    strides: DecodeStrides
    shape: Shape
    n_splits: int
    mods: Mods
    pages: PageArgs | tuple[()] = ()


@dataclass(frozen=True)
class DecodeSplitConstants(AttentionConstants):
    whole: bool  # there is one split: the kernel makes the output
    paired: bool  # float8 keys and values are loaded two by two
    has_lengths: bool  # keys are in pages, those of a batch element before args.pages.lengths[i_b]


class DecodeCombineTensors(NamedTuple):
    acc: Tensor
    row_max: Tensor
    row_sum: Tensor
    out: Tensor
    lse: Tensor
    max_score: Tensor
    sinks: Tensor | None


class DecodeCombineArgs(NamedTuple):
    s_out: Strides
    n_heads: int
    ratio: int
    n_q: int
    n_splits: int
    keep_scale: float


@dataclass(frozen=True)
class DecodeCombineConstants(KernelConstants):
    sinks: bool
    splits: int  # at most
    dv: int
    dv_true: int


# -- backward ------------------------------------------------------------------------------------------------------------


class PreprocessTensors(NamedTuple):
    out: Tensor
    do: Tensor
    lse: Tensor
    dlse: Tensor | None
    delta: Tensor
    shift: Tensor | None  # [batch * heads * queries, 2, SHIFT_TERMS]
    dq_sums: Tensor | None  # [batch * heads * n_rows, D]


class PreprocessArgs(NamedTuple):
    strides: PreprocessStrides
    n_heads: int
    n_q: int
    n_rows: int  # n_q, or the rows that a head has in dq_sums
    unit: float  # scale * log2(e) where -lse is added to q.k before it is scaled (no DSCORE), else 1


@dataclass(frozen=True)
class PreprocessConstants(KernelConstants):
    has_dlse: bool
    folded: bool
    has_sums: bool
    m: int
    dv: int
    dv_true: int
    d_sum: int


class BwdTensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    lse: Tensor
    delta: Tensor
    shift: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    seed: Tensor | None
    capture_grads: tuple[Tensor, ...] = ()  # what SCATTER adds to
    dq_sums: tuple[Tensor, ...] = ()  # one tensor, where dQ is added up atomically


class BwdArgs(NamedTuple):
    strides: BwdStrides
    columns: Schedule  # of key tiles, for dkdv programs
    n_columns: int
    rows: Schedule  # of query tiles, for dq programs
    n_rows: int
    n_dkdv_programs: int
    shape: Shape
    n_padded: int  # rows of a head in dq_sums
    mods: Mods


@dataclass(frozen=True)
class DkdvConstants(AttentionConstants):
    folded: bool  # products add -lse and -delta (see add_shift)
    atomic_dq: str | None  # how dkdv programs add their share of dQ: "red", "atomic_add" (see add_dq), or not at all


@dataclass(frozen=True)
class BwdConstants(KernelConstants):
    dkdv: DkdvConstants
    dq: AttentionConstants
    has_dkdv: bool  # whether there are dkdv programs


class DqPostprocessTensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dq_sums: Tensor
    seed: Tensor | None


class DqPostprocessStrides(NamedTuple):
    q: Strides
    k: Strides
    v: Strides
    do: Strides
    dq: Strides


class DqPostprocessArgs(NamedTuple):
    strides: DqPostprocessStrides
    schedule: Schedule  # of query tiles
    n_tiles: int
    shape: Shape
    n_padded: int
    mods: Mods
