"""Makes passes of a problem, which run on tensors laid out like its own."""

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor

from tilewise.core.output import Output
from tilewise.core.problem import Problem
from tilewise.engines.base import NOTHING, EmptyOutputs, like_query
from tilewise.engines.cpp import kernels, splits
from tilewise.engines.cpp.arguments import BACKWARD, BACKWARD_CALL, FORWARD, FORWARD_CALL, address, laid_out, problem_values
from tilewise.engines.cpp.libraries import library_of
from tilewise.engines.cpp.mods import Arguments, dscore_unit
from tilewise.engines.cpp.tile_schedule import TileSchedule, key_schedule, query_schedule
from tilewise.engines.cpp.tile_size import KEYS, LANES
from tilewise.engines.cpp.workspace import Workspace, give_back

PACKING_BYTES, UNPACKED = 2**19, (0, 0, 0)  # packing pays if the queries together read at least so many bytes of each key
PAIRING_LANES = LANES  # or, for products of pairs, if so many lanes do
pack_forward, pack_backward = struct.Struct(FORWARD_CALL).pack, struct.Struct(BACKWARD_CALL).pack


# -- the forward -------------------------------------------------------------------------------------------------------


class Forward:
    """A forward, or decoding: a few queries over many keys."""

    def __init__(self, p: Problem) -> None:
        decoding = splits.is_decoding(p)
        if decoding and p.pages is not None and p.pages.ends_say_all:
            p = p.replaced(mask=None)
        schedule = _no_schedule() if decoding else query_schedule(p)
        values, self._keep_alive = problem_values(p, schedule)
        parts = splits.split_count(p) if decoding else 1
        rows = p.heads // p.kv_heads * p.q_len
        split_bytes = p.batch * p.kv_heads * parts * rows * (p.v_dim + 2) * p.inner_dtype.itemsize if decoding else 0  # last: acc[Dv], max_score, total
        self._workspace = Workspace(split_bytes, *(UNPACKED if decoding else _packed_sizes(p, schedule.density)))
        self._kernel = kernels.kernel("decode" if decoding else "forward", p.dtype, p.result_dtype, p.key.dtype)
        self._prepared = struct.pack(FORWARD, *values, *laid_out(like_query(p.query, p.v_dim)), 0, 0, parts, 0, *UNPACKED)
        self._outputs, self._max_scores = EmptyOutputs(p), p.max_scores

    def run(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: int, needs_lse: bool = True) -> Output:
        outputs = self._outputs
        output = Output(outputs.out(query), outputs.rows() if needs_lse else NOTHING[0], outputs.rows() if self._max_scores else NOTHING[1])
        memory, buffers = self._workspace.borrow()
        call = pack_forward(
            torch.get_num_threads(),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            output.out.data_ptr(),
            output.lse.data_ptr(),  # 0 of an empty tensor: then the kernel makes none
            output.max_score.data_ptr(),
            address(sinks),
            seed,
            *buffers,
        )
        self._kernel(self._prepared, call)
        give_back(memory)
        return output


def _no_schedule() -> TileSchedule:
    return TileSchedule((0,) * 12, 0, 0, 0)


def _packed_sizes(p: Problem, density: float) -> tuple[int, int, int]:
    """Bytes of packed keys, packed values, and the "all finite" flag of each block. `density` is the share of queries that attend to a key."""
    if p.pages is not None:  # there may be room for far more keys than there are
        return UNPACKED
    in_pairs, itemsize, heads = kernels.in_pairs(p.dtype), p.inner_dtype.itemsize, density * (p.heads // p.kv_heads)
    if in_pairs:
        pays = heads * max(p.q_len, LANES // 2) >= PAIRING_LANES
    else:
        pays = heads * p.q_len * itemsize * max(p.head_dim, p.v_dim) >= PACKING_BYTES
    if not pays:
        return UNPACKED
    blocks = p.batch * p.kv_heads * -(-p.kv_len // KEYS)
    sizes = (2 * _pad32(p.head_dim), 2 * _pad32(p.v_dim)) if in_pairs else (itemsize * p.head_dim, itemsize * p.v_dim)
    return blocks * KEYS * sizes[0], blocks * KEYS * sizes[1], blocks


def _pad32(size: int) -> int:
    return -(-size // 32) * 32


# -- the backward ------------------------------------------------------------------------------------------------------


class Backward:
    """A backward. It makes the gradients of the wanted captures, too."""

    def __init__(self, p: Problem, out: Tensor, grad_out: Tensor, wanted: frozenset[int]) -> None:
        schedule = key_schedule(p)
        values, keep_alive = problem_values(p, schedule)
        blocks_per_tile = -(-schedule.other_tile // LANES)
        blocks = -(-p.q_len // schedule.other_tile) * blocks_per_tile
        chunks = 1 if wanted else splits.chunk_count(p, schedule)
        self._groups = splits.item_groups(p, wanted) if wanted else []
        self._slots = len(p.score.captures) if wanted and p.score is not None else 0
        groups = _group_arguments(self._groups) if wanted else Arguments((chunks * p.batch * p.kv_heads, 0, 0))
        dscore = None if p.score is None else library_of(dscore_unit(p.score, p, wanted), p.score.program.text)
        self._prepared = struct.pack(
            BACKWARD,
            *values,
            *laid_out(out),
            *laid_out(grad_out),
            *[0] * 3,
            blocks,
            blocks_per_tile,
            *[0] * 10,
            0 if dscore is None else dscore.address("slope"),
            0,
            self._slots,
            chunks,
            *groups.values,
        )
        self._keep_alive = keep_alive, groups.keep_alive, dscore
        self._kernel = kernels.kernel("backward", p.dtype, p.result_dtype)
        shares, itemsize = chunks * p.batch * p.heads * blocks, p.inner_dtype.itemsize
        delta_bytes = 0 if p.sinks is not None else p.batch * p.heads * p.q_len * itemsize  # where there are sinks, their gradient needs delta
        self._workspace = Workspace(delta_bytes, *_query_layouts(p, grad_out, blocks), shares * _pad32(p.head_dim) * LANES * itemsize, shares)

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        grads: tuple[Tensor, Tensor, Tensor],
        delta: Tensor | None,
        capture_sums: dict[int, Tensor],
        seed: int,
    ) -> None:
        """Writes the gradients of query, key and value, and delta where it is given; adds to those of the captures."""
        pointers = self._pointers(capture_sums) if capture_sums else None
        memory, buffers = self._workspace.borrow()  # delta's is the first
        if delta is not None:
            buffers = [delta.data_ptr(), *buffers[1:]]
        dq, dk, dv = grads
        call = pack_backward(
            torch.get_num_threads(),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            out.data_ptr(),
            grad_out.data_ptr(),
            lse.data_ptr(),
            address(grad_lse),
            *buffers,
            dq.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
            0 if pointers is None else ctypes.addressof(pointers),
            seed,
        )
        self._kernel(self._prepared, call)
        give_back(memory)

    def _pointers(self, capture_sums: dict[int, Tensor]) -> Any:
        """Where each group adds to the captures' gradients: [groups][slots]."""
        pointers = (ctypes.c_void_p * (len(self._groups) * self._slots))()
        for g in range(len(self._groups)):
            for slot, copies in capture_sums.items():
                pointers[g * self._slots + slot] = copies[g % len(copies)].data_ptr()
        return pointers


def _query_layouts(p: Problem, grad_out: Tensor, blocks: int) -> list[int]:
    """Bytes of the packed copies of Q and dO: transposed to lanes, by rows (0 if the tensor's own can be read), and the flags for "all finite"."""
    count = p.batch * p.heads * blocks
    if kernels.in_pairs(p.dtype):
        pairs = [count * LANES * _pad32(d) * 2 for d in (p.head_dim, p.v_dim)]
        return [*pairs, *pairs, count]
    block, width = count * LANES * p.inner_dtype.itemsize, 64 // p.inner_dtype.itemsize
    rows = [0 if _readable_in_place(t, p) else block * (-(-t.shape[3] // width) * width) for t in (p.query, grad_out)]
    return [block * p.head_dim, block * p.v_dim, *rows, 0]


def _readable_in_place(t: Tensor, p: Problem) -> bool:
    """Whether the kernel can read a tensor's rows without a copy: in the compute dtype, contiguous, a whole number of vectors."""
    return t.dtype == p.inner_dtype and t.stride(3) == 1 and t.shape[3] * t.element_size() % 64 == 0


def _group_arguments(groups: list[list[int]]) -> Arguments:
    """The number of groups, and the items of each."""
    offsets = (ctypes.c_int64 * (len(groups) + 1))()
    items = (ctypes.c_int64 * sum([len(group) for group in groups]))(*[item for group in groups for item in group])
    for g, group in enumerate(groups):
        offsets[g + 1] = offsets[g] + len(group)
    return Arguments((len(groups), ctypes.addressof(offsets), ctypes.addressof(items)), (offsets, items))
