"""Packs a problem into the kernels' arguments and runs them."""

import ctypes
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilewise.core.output import Gradients, Output
from tilewise.core.problem import Problem
from tilewise.engines.base import attend_nothing, like_query, scalar_seed, sinks_gradient
from tilewise.engines.cpp import matrix_unit, threads
from tilewise.engines.cpp.compiler import FOR_KERNELS
from tilewise.engines.cpp.libraries import Unit, library_of
from tilewise.engines.cpp.mods import Arguments, dscore_unit, mask_unit, program_arguments, score_unit
from tilewise.engines.cpp.tile_schedule import KEYS, LANES, TileSchedule, key_schedule, query_schedule
from tilewise.engines.cpp.workspace import borrowed
from tilewise.engines.dropout import keep_scale, threshold
from tilewise.lang import derive

ELEMENT = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat", torch.float16: "half"}
MAX_DECODE_QUERIES, MIN_SPLIT_KEYS, MAX_SPLITS = 4, 512, 32  # when a forward is decoding, and how its keys are split
MAX_CHUNKS, MIN_CHUNK_TILES = 16, 8  # backward: chunks of keys over all (batch, kv head); key tiles in each
PACKING_BYTES, UNPACKED = 2**19, (0, 0, 0)  # packing pays if the queries together read at least so many bytes of each key
MAX_COPIES, MAX_COPIES_BYTES = 8, 2**28  # private copies of captures' gradients that every item adds to

# The kernels' structs, as in kernel/arguments.h: every field has 8 bytes.
TENSOR = "5q"
PROBLEM = f"=9q{3 * TENSOR}12q12qqdd2q"
FORWARD = f"{PROBLEM}{TENSOR}7q"
BACKWARD = f"{PROBLEM}{2 * TENSOR}22q"


def kernel_unit(name: str, dtype: torch.dtype) -> Unit:
    """The library of a kernel: "forward" (which includes decode) or "backward"."""
    matrix_unit_flags = ("-DMATRIX_UNIT",) if uses_matrix_unit(dtype) else ()
    return Unit(f'#include "{name}.cpp"\n', (*FOR_KERNELS, f"-DELEMENT={ELEMENT[dtype]}", *matrix_unit_flags))


def uses_matrix_unit(dtype: torch.dtype) -> bool:
    """Whether products run on the processor's matrix unit (AMX)."""
    return dtype == torch.bfloat16 and matrix_unit.usable()


@lru_cache(maxsize=16)
def _kernel(name: str, dtype: torch.dtype) -> Callable[[bytes], None]:
    unit = kernel_unit("backward" if name == "backward" else "forward", dtype)
    function: Any = library_of(unit, unit.source).function(f"tilewise_{name}")
    function.argtypes, function.restype = (ctypes.c_char_p,), None
    kernel: Callable[[bytes], None] = function
    return kernel


def forward(p: Problem) -> Output:
    if p.query.numel() == 0 or p.key.numel() == 0:
        return attend_nothing(p)
    out = like_query(p.query, p.v_dim)
    lse = torch.empty((p.batch, p.heads, p.q_len), dtype=p.inner_dtype)
    max_score = torch.empty_like(lse)
    decoding = is_decoding(p)
    schedule = _no_schedule() if decoding else query_schedule(p)
    values, keep_alive = _problem_values(p, schedule)
    splits, split_results = 1, None
    if decoding:
        splits = split_count(p)
        rows = p.heads // p.kv_heads * p.q_len
        split_results = torch.empty((p.batch, p.kv_heads, splits, rows, p.v_dim + 2), dtype=p.inner_dtype)  # last: acc[Dv], max_score, total
    values += [*_tensor(out), lse.data_ptr(), max_score.data_ptr(), splits, _address(split_results)]
    kernel, sizes = _kernel("decode" if decoding else "forward", p.dtype), UNPACKED if decoding else _packed_sizes(p, schedule.density)
    if sizes is UNPACKED:
        kernel(struct.pack(FORWARD, *values, *UNPACKED))
    else:
        with borrowed(*sizes) as packed:
            kernel(struct.pack(FORWARD, *values, *packed))
    del keep_alive
    return Output(out, lse, max_score)


def backward(p: Problem, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
    if p.score is not None:
        captures = tuple([t.contiguous() if k in wanted else t for k, t in enumerate(p.score.captures)])
        p = replace(p, score=replace(p.score, captures=captures))
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (p.query, p.key, p.value))
    delta = torch.zeros((p.batch, p.heads, p.q_len), dtype=p.inner_dtype)
    capture_sums = _zeroed_capture_gradients(p, wanted)
    grad_lse = None if grad_lse is None else grad_lse.to(p.inner_dtype).contiguous()
    if p.query.numel() and p.key.numel():
        _run_backward(p, output, grad_out.to(p.dtype), grad_lse, delta, (dq, dk, dv), wanted, capture_sums)
    else:
        delta = delta if grad_lse is None else delta - grad_lse
        for t in (dq, dk, dv):
            t.zero_()
    captured = {} if p.score is None else {k: t.sum(0).to(p.score.captures[k].dtype) for k, t in capture_sums.items()}
    return Gradients(dq, dk, dv, sinks_gradient(p, output, delta), captured)


def _run_backward(
    p: Problem,
    output: Output,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    delta: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    wanted: frozenset[int],
    capture_sums: dict[int, Tensor],
) -> None:
    schedule = key_schedule(p)
    values, keep_alive = _problem_values(p, schedule)
    groups = _group_arguments(p, wanted, capture_sums)
    blocks_per_tile = -(-schedule.other_tile // LANES)
    blocks = -(-p.q_len // schedule.other_tile) * blocks_per_tile
    chunks = 1 if wanted else chunk_count(p, schedule)
    dq_written = torch.zeros((chunks, p.batch, p.heads, blocks), dtype=torch.uint8)
    dq_bytes = dq_written.numel() * _pad32(p.head_dim) * LANES * p.inner_dtype.itemsize
    dscore = None if p.score is None else library_of(dscore_unit(p.score, p, wanted), p.score.program.text)
    with borrowed(*_query_layouts(p, grad_out, blocks), dq_bytes) as buffers:
        arguments = struct.pack(
            BACKWARD,
            *values,
            *_tensor(output.out),
            *_tensor(grad_out),
            output.lse.data_ptr(),
            _address(grad_lse),
            delta.data_ptr(),
            blocks,
            blocks_per_tile,
            *buffers,
            dq_written.data_ptr(),
            *[t.data_ptr() for t in grads],
            0 if dscore is None else dscore.address("slope"),
            *groups.values[:2],
            chunks,
            *groups.values[2:],
        )
        _kernel("backward", p.dtype)(arguments)
    del keep_alive


def _query_layouts(p: Problem, grad_out: Tensor, blocks: int) -> list[int]:
    """Bytes of the packed copies of Q and dO: transposed to lanes, by rows (0 if the tensor's own can be read), and the flags for "all finite"."""
    count = p.batch * p.heads * blocks
    if uses_matrix_unit(p.dtype):
        pairs = [count * LANES * _pad32(d) * 2 for d in (p.head_dim, p.v_dim)]
        return [*pairs, *pairs, count]
    block, width = count * LANES * p.inner_dtype.itemsize, 64 // p.inner_dtype.itemsize
    rows = [0 if _readable_in_place(t, p) else block * (-(-t.shape[3] // width) * width) for t in (p.query, grad_out)]
    return [block * p.head_dim, block * p.v_dim, *rows, 0]


def _group_arguments(p: Problem, wanted: frozenset[int], capture_sums: dict[int, Tensor]) -> Arguments:
    """Pointers to the captures' gradients of each group, and the number of captures, of groups, and the items of each."""
    if not wanted:
        return Arguments((0, 0, chunk_count(p, key_schedule(p)) * p.batch * p.kv_heads, 0, 0))
    assert p.score is not None
    groups, slots = _item_groups(p, wanted), len(p.score.captures)
    pointers = (ctypes.c_void_p * (len(groups) * slots))()
    offsets = (ctypes.c_int64 * (len(groups) + 1))()
    items = (ctypes.c_int64 * (p.batch * p.kv_heads))(*[item for group in groups for item in group])
    for g, group in enumerate(groups):
        offsets[g + 1] = offsets[g] + len(group)
        for slot, copies in capture_sums.items():
            pointers[g * slots + slot] = copies[g % len(copies)].data_ptr()
    numbers = (ctypes.addressof(pointers), slots, len(groups), ctypes.addressof(offsets), ctypes.addressof(items))
    return Arguments(numbers, (pointers, offsets, items))


def _packed_sizes(p: Problem, density: float) -> tuple[int, int, int]:
    """Bytes of packed keys, packed values, and the "all finite" flag of each block. `density` is the share of queries that attend to a key."""
    on_matrix_unit, itemsize = uses_matrix_unit(p.dtype), p.inner_dtype.itemsize
    if not on_matrix_unit and density * p.q_len * (p.heads // p.kv_heads) * itemsize * max(p.head_dim, p.v_dim) < PACKING_BYTES:
        return UNPACKED
    blocks = p.batch * p.kv_heads * -(-p.kv_len // KEYS)
    sizes = (2 * _pad32(p.head_dim), 2 * _pad32(p.v_dim)) if on_matrix_unit else (itemsize * p.head_dim, itemsize * p.v_dim)
    return blocks * KEYS * sizes[0], blocks * KEYS * sizes[1], blocks


def _pad32(size: int) -> int:
    return -(-size // 32) * 32


# -- arguments -------------------------------------------------------------------------------------------------------


def _problem_values(p: Problem, schedule: TileSchedule) -> tuple[list[Any], Any]:
    """The kernel's `Problem` as numbers, and the objects it points into, which must outlive the call."""
    mask, score = program_arguments(p.mask, mask_unit(p)), program_arguments(p.score, score_unit(p))
    sinks = None if p.sinks is None else p.sinks.to(p.inner_dtype).contiguous()
    dropped = p.dropout_p > 0
    values = [
        threads.pool(),
        torch.get_num_threads(),
        p.batch,
        p.heads,
        p.kv_heads,
        p.q_len,
        p.kv_len,
        p.head_dim,
        p.v_dim,
        *_tensor(p.query),
        *_tensor(p.key),
        *_tensor(p.value),
        *schedule.values,
        *mask.values,
        *score.values,
        0 if sinks is None else sinks.data_ptr(),
        float(p.scale),
        keep_scale(p.dropout_p) if dropped else 1.0,
        threshold(p.dropout_p),
        scalar_seed(p) if dropped else 0,
    ]
    return values, (mask, score, sinks, schedule)


def _tensor(t: Tensor) -> tuple[int, ...]:
    return (t.data_ptr(), *t.stride())


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _no_schedule() -> TileSchedule:
    return TileSchedule((0,) * 12, 0, 0, 0)


def _readable_in_place(t: Tensor, p: Problem) -> bool:
    """Whether the kernel can read a tensor's rows without a copy: in the compute dtype, contiguous, a whole number of vectors."""
    return t.dtype == p.inner_dtype and t.stride(3) == 1 and t.shape[3] * t.element_size() % 64 == 0


# -- how the work is split: by shapes alone, so that the result does not depend on the number of threads ------------------


def is_decoding(p: Problem) -> bool:
    """Too few queries to fill a tile's lanes. Not if gradients are needed (the backward recomputes scores in the tiled summation order), nor if the map
    itself was given as tiles.
    """
    return p.q_len <= MAX_DECODE_QUERIES and p.given_tiles is None and not any([t.requires_grad for t in (p.query, p.key, p.value)])


def split_count(p: Problem) -> int:
    return max(1, min(p.kv_len // MIN_SPLIT_KEYS, MAX_SPLITS))


def chunk_count(p: Problem, schedule: TileSchedule) -> int:
    return max(1, min(MAX_CHUNKS // (p.batch * p.kv_heads), schedule.rows // MIN_CHUNK_TILES))


def _zeroed_capture_gradients(p: Problem, wanted: frozenset[int]) -> dict[int, Tensor]:
    """Zeros to accumulate the captures' gradients in: [copies, *shape] each."""
    if p.score is None or not wanted:
        return {}
    copies = 1 if owned_axes(p, wanted) else private_copies(p, wanted)
    return {k: torch.zeros((copies, *p.score.captures[k].shape), dtype=torch.float64) for k in wanted}


def _item_groups(p: Problem, wanted: frozenset[int]) -> list[list[int]]:
    """(batch, kv head) items, grouped so that different groups never add to the same memory; a group runs in order on one thread."""
    count = p.batch * p.kv_heads
    if not wanted:
        return []
    axes = owned_axes(p, wanted)
    if axes:
        keys = [(k // p.kv_heads if "b" in axes else 0, k % p.kv_heads if "h" in axes else 0) for k in range(count)]
        return [[k for k in range(count) if keys[k] == key] for key in sorted(set(keys))]
    groups = min(private_copies(p, wanted), count)
    return [list(range(count * g // groups, count * (g + 1) // groups)) for g in range(groups)]


def owned_axes(p: Problem, wanted: frozenset[int]) -> frozenset[str]:
    """Which of b and h index every load of a wanted capture: items that differ in them add to different elements."""
    assert p.score is not None
    derivative = derive(p.score.program, wanted)
    owned = frozenset("bh")
    for site in derivative.sites:
        instructions = [derivative.program.instructions[derivative.program.results[k]] for k in site.indices]
        owned &= {i.attr for i in instructions if i.op == "index"}
    sizes = {"b": p.batch, "h": p.kv_heads}
    return frozenset(a for a in owned if sizes[a] > 1)


def private_copies(p: Problem, wanted: frozenset[int]) -> int:
    assert p.score is not None
    size = 8 * sum(p.score.captures[k].numel() for k in wanted)
    return max(1, min(MAX_COPIES, p.batch * p.kv_heads, MAX_COPIES_BYTES // max(size, 1)))
