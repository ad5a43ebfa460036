"""The arguments of plain Triton kernels, grouped.

A kernel takes `tensors` (those of the call), `args` (what all calls like it share), its generated functions, and `C`, a frozen
dataclass of compile-time constants. `tensors` and `args` are NamedTuples: kernels read `args.shape.n_kv`. Triton flattens them into parameters
in the order of their fields. Nothing here needs Triton.

Two rules for kernel code. A tuple that may hold None or strides is read field by field, never assigned or unpacked, because an assignment in Triton
turns the constants inside a tuple into tensors (and fails on None in Triton 3.3). A field of C becomes a constant by `M: tl.constexpr = C.value.m`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


class Strides(tuple[int, ...]):
    """(batch, head, sequence, dim) strides, 64-bit, so that every offset made with them is."""


class AlignedStrides(Strides):
    """Strides of a tensor whose rows lie on 16-byte boundaries: the last is 1, the others multiples of 16."""


class Shape(NamedTuple):
    n_heads: int
    ratio: int  # query heads per key head
    n_q: int
    n_kv: int


class Schedule(NamedTuple):
    """A TileSchedule as kernels read it (see kernels/primitives.py). All but the strides are None without a tile map."""

    order: Tensor | None
    offsets: Tensor | None
    starts: Tensor | None
    stops: Tensor | None
    strides: tuple[int, int]  # (batch, head), in rows of the map


class PlaceArgs(NamedTuple):
    """Where a part of a problem lies in the whole (core/places.py)."""

    query_squares: Tensor
    key_squares: Tensor
    batch: int
    head: int


class PageArgs(NamedTuple):
    """Where keys and values lie that are in pages (core/pages.py): their strides are those of (page, head, row, dim)."""

    table: Tensor
    lengths: Tensor
    stride: int  # of the table's rows
    n_sequences: int  # of a batch element
    span: int  # keys that a sequence has room for
    n_pages: int


class Mods(NamedTuple):
    """What turns q.k into the final score, and dropout's numbers. A generated function's arguments are (captures, ints, floats, sizes and strides)."""

    scale: tuple[float, float, float]  # of q.k before the score function; of its result, into base 2; of sums over dS (mods.scales)
    keep_scale: float  # 1 / (1 - dropout_p), times the scale of values in pages
    threshold: int
    mask: tuple[Any, ...]
    score: tuple[Any, ...]
    places: PlaceArgs | tuple[()] = ()  # only where dropout is drawn for a part of a problem


class TileGeometry(NamedTuple):
    """The tiles of a mask, of m x n each, numbered row by row, head by head."""

    n_heads: int
    n_rows: int
    n_columns: int
    n_q: int
    n_kv: int
    m: int
    n: int


class BaseGeometry(NamedTuple):
    """The base tiles of a mask, and how many programs share a row of them."""

    n_heads: int
    n_rows: int
    n_columns: int
    n_blocks: int
    n_q: int
    n_kv: int


class RowsGeometry(NamedTuple):
    """The rows of a tile map along one axis, over tiles across it, and the base tiles they are made of."""

    n_rows: int  # of a (batch, head)
    n_columns: int
    n_half: int  # the most runs of one kind that a row can have
    is_cut: int  # whether the end of the sequence cuts the last tile of a row
    n_along: int  # base tiles
    n_across: int
    s_head: int  # strides of their states
    s_along: int
    s_across: int
    split_along: int  # tiles of a base tile, where that is the larger
    split_across: int
    n_bits: int  # blocks of mask bits that a row has room for


# -- arguments of kernels that several engines have ---------------------------------------------------------------------


class FwdTensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    max_score: Tensor
    sinks: Tensor | None
    seed: Tensor | None


class FwdStrides(NamedTuple):
    q: Strides
    k: Strides
    v: Strides
    out: Strides


class FwdArgs(NamedTuple):
    strides: FwdStrides
    schedule: Schedule  # of query tiles
    shape: Shape
    n_tiles: int
    mods: Mods
    pages: PageArgs | tuple[()] = ()


class PreprocessStrides(NamedTuple):
    out: Strides
    do: Strides


class BwdStrides(NamedTuple):
    q: Strides
    k: Strides
    v: Strides
    do: Strides
    dq: Strides
    dk: Strides
    dv: Strides


# -- constants -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelConstants:
    """The base of every `C`."""

    @property
    def value(self) -> "KernelConstants":
        """Triton's compiler wraps C in a constexpr and its interpreter does not: `C.value.m` reads a field in both."""
        return self


@dataclass(frozen=True)
class AttentionConstants(KernelConstants):
    """Of a kernel, or of one role of a kernel, that computes tiles of m queries by n keys."""

    m: int
    n: int
    d: int  # head dims, padded to powers of two
    dv: int
    d_true: int  # head dims of the tensors
    dv_true: int
    mapped: bool  # there is a tile map; otherwise every tile is full
    given: bool  # the caller gave the tiles, and the mask applies inside the partial ones alone
    dropout: bool
    placed: bool  # dropout is drawn for a part of a problem, by its places in the whole
    sinks: bool
    precision: str  # tl.dot's input_precision
    upcast: bool  # compute in float32: Triton's interpreter has no bfloat16
    stages: int  # tiles in flight
    masked_stages: int  # the same in loops that evaluate the mask
    page: int  # rows of a page of keys and values; 0: they are in no pages
    anchored: bool  # of a forward: full tiles take no maxima (docs/kernels/softmax.md)


@dataclass(frozen=True)
class ClassifyConstants(KernelConstants):
    empty: int  # states of a tile
    partial: int
    full: int
    rows: int  # elements of the mask evaluated at a time
    columns: int
    tiles: int  # of a program, at most


@dataclass(frozen=True)
class BaseConstants(KernelConstants):
    forbids: int  # bits of a state
    allows: int
    size: int  # of a base tile
    columns: int  # keys that a program evaluates


@dataclass(frozen=True)
class RowsConstants(KernelConstants):
    forbids: int
    allows: int
    along: int  # base tiles of a tile
    across: int
    padded_along: int  # the same as powers of two
    padded_across: int
    chunk: int  # tiles looked at together; even, so that a row of n tiles has at most n / 2 runs of one kind, rounded up


@dataclass(frozen=True)
class OrderConstants(KernelConstants):
    chunk: int
