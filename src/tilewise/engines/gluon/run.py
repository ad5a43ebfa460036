"""How a problem becomes launches of the Hopper kernels."""

import math
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from tilewise.engines.base import AGAIN, Again, Gradients, Output, like_query, like_rows
from tilewise.engines.gluon import describable, refuse_backward
from tilewise.engines.gluon.config import ROWS, backward_cut, backward_tile, forward_cut, forward_tile
from tilewise.engines.gluon.maps import Walk, backward_side, forward_side, too_many_stencils, walk
from tilewise.engines.gluon.patches import as_boxes, box, in_strips, width
from tilewise.engines.triton import run as triton_run
from tilewise.engines.triton.config import padded
from tilewise.engines.triton.driver import current_stream, is_capturing
from tilewise.engines.triton.launch import Described, Interpreted, Launch, Prepared, prepare
from tilewise.engines.triton.mods import mask_of, mod_arguments, scales, score_of, slope_of
from tilewise.engines.triton.parts import each, padded_rows, partition, sums_rows
from tilewise.engines.triton.run import dropout_arguments, mask_is_inside, prepared, seed_of, shape_arguments, strides
from tilewise.problem import Problem

L2_SHARE = 8 * 2**20  # bytes of keys and values that programs read at a time: of 4 to 32 MiB the best on an H200
_counters: dict[tuple[int, int], Tensor] = {}


def forward(p: Problem) -> Output:
    misaligned = (p.query.data_ptr() | p.key.data_ptr() | p.value.data_ptr()) % 16  # a compiled graph did not know
    if misaligned or too_many_stencils(p):
        return triton_run.forward(p)
    out = like_query(p.query, p.v_dim)
    lse = torch.empty(p.query.shape[:3], dtype=torch.float32, device=p.query.device)
    output = Output(out, lse, torch.empty_like(lse))
    own = forward_own(p, output, counter(p.device))
    kernel = _ready(p, ("hopper forward",), lambda: forward_launch(p, own))
    kernel.start(own)
    mended = mend_own(p, output)
    mend = _ready(p, ("mend forward",), lambda: mend_forward_launch(p, mended))
    mend.start(mended)
    if triton_run.wants_again(p):
        p.memory[AGAIN] = _again(p, kernel, mend)
    return output


def _again(p: Problem, kernel: Prepared | Interpreted, mend: Prepared | Interpreted) -> Again | None:
    if not isinstance(kernel, Prepared) or not isinstance(mend, Prepared):
        return None
    v_dim, like = p.v_dim, like_rows(p.query)

    def again(query: Tensor, key: Tensor, value: Tensor) -> Output | None:
        device = query.device
        if torch.cuda.current_device() != kernel.device:
            return None
        out = like_query(query, v_dim)
        lse, highest = torch.empty_like(like), torch.empty_like(like)
        rows, number = [lse.data_ptr(), highest.data_ptr()], counter(device)
        kernel.start_with([query, key, value, out], [*rows, number.data_ptr()])
        mend.start_with([], [query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), *rows])
        return Output(out, lse, highest)

    return again


def backward(p: Problem, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
    # Saved tensors may come back elsewhere and otherwise laid out than they went (offloading does that).
    if refuse_backward(p, bool(wanted)) is not None or not all([describable(t) for t in (p.query, p.key, p.value)]) or too_many_stencils(p):
        return triton_run.backward(p, output, grad_out, grad_lse, wanted)
    if not describable(grad_out):
        grad_out = grad_out.contiguous()
    dlse = None if grad_lse is None else grad_lse.float().contiguous()
    axis, count = partition(p, backward_cut(p).d)
    work = Workspace(p, count)
    for part, (out, lse, highest, part_grad, part_dlse, *gradients) in each(p, axis, count, *output, grad_out, dlse, work.dq, work.dk, work.dv, work.delta):
        _backward(part, Output(out, lse, highest), part_grad, part_dlse, work.part(*gradients))
    return Gradients(work.dq, work.dk, work.dv, triton_run.sinks_gradient(p, output, work.delta))


def _backward(p: Problem, output: Output, grad_out: Tensor, dlse: Tensor | None, work: "Workspace") -> None:
    places = tuple([(t.stride(), t.data_ptr() % 16) for t in (p.query, p.key, p.value, output.out, output.lse, grad_out)])
    before = prepare_own(output, grad_out, dlse, work)
    _ready(p, ("prepare backward", places, dlse is None), lambda: prepare_backward_launch(p, before)).start(before)
    own = backward_own(p, grad_out, work)
    _ready(p, ("hopper backward", places), lambda: backward_launch(p, own)).start(own)
    after = finish_own(p, output, grad_out, work)
    _ready(p, ("finish backward", places), lambda: finish_backward_launch(p, after)).start(after)


class Workspace:
    """The gradients, and what the kernels of a backward hand each other, of one of so many parts at a time."""

    def __init__(self, p: Problem, count: int = 1) -> None:
        self.dq, self.dk, self.dv = (t.new_empty(t.shape) for t in (p.query, p.key, p.value))
        cut, rows = backward_cut(p), sums_rows(p) // count
        self.delta = torch.empty((p.batch, p.heads, p.q_len), dtype=torch.float32, device=p.device)
        self.lse_padded, self.delta_padded = self.delta.new_empty((2, rows)).unbind()
        self.sums = self.delta.new_empty((rows * cut.d // 32, 32))  # of dQ
        key_tiles = p.batch * p.kv_heads // count * -(-p.kv_len // backward_tile(cut)[1])
        self.unsound = torch.empty((key_tiles, 2), dtype=torch.int32, device=p.device)

    def part(self, dq: Tensor, dk: Tensor, dv: Tensor, delta: Tensor) -> "Workspace":
        """The same for a part: its own gradients, and the rest over again."""
        part = copy(self)
        part.dq, part.dk, part.dv, part.delta = dq, dk, dv, delta
        return part


def _ready(p: Problem, name: tuple[Any, ...], launch: Callable[[], Launch]) -> Prepared | Interpreted:
    return prepared(p, name, True, lambda: prepare(launch(), p.device))


def counter(device: torch.device) -> Tensor:
    """The number that programs draw their work from: 0 before and after every launch. Launches of one stream take turns with one;
    a captured one brings its own, which is set to 0 within its graph."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    stream = current_stream(index)
    if is_capturing(stream):
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (index, stream)
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return found


# -- tensors of the kernels ------------------------------------------------------------------------------------------


def described(t: Tensor, rows: int, columns: int, wide: int | None) -> Described:
    """A tensor of the problem's tokens, for tiles of so many of them."""
    return Described(as_boxes(t, wide), box(rows, columns, wide))


def forward_own(p: Problem, output: Output, counter: Tensor) -> dict[str, Any]:
    cut, wide = forward_cut(p), width(p)
    return {
        "q_desc": described(p.query, ROWS, cut.d, wide), "k_desc": described(p.key, cut.block_n, cut.d, wide),
        "v_desc": described(p.value, cut.block_n, cut.dv, wide), "o_desc": described(output.out, ROWS, cut.dv, wide),
        "p_lse": output.lse, "p_highest": output.highest, "p_counter": counter, "p_sinks": p.sinks, "p_seed": seed_of(p),
    }  # fmt: skip


def mend_own(p: Problem, output: Output) -> dict[str, Any]:
    return {
        "p_q": p.query, "p_k": p.key, "p_v": p.value, "p_out": output.out, "p_lse": output.lse, "p_highest": output.highest,
        "p_sinks": p.sinks, "p_seed": seed_of(p),
    }  # fmt: skip


def prepare_own(output: Output, grad_out: Tensor, dlse: Tensor | None, work: Workspace) -> dict[str, Any]:
    return {
        "p_out": output.out, "p_do": grad_out, "p_lse": output.lse, "p_dlse": dlse,
        "p_lse_padded": work.lse_padded, "p_delta_padded": work.delta_padded, "p_delta": work.delta, "p_sum": work.sums,
    }  # fmt: skip


def backward_own(p: Problem, grad_out: Tensor, work: Workspace) -> dict[str, Any]:
    cut, wide = backward_cut(p), width(p)
    m, n = backward_tile(cut)
    return {
        "q_desc": described(p.query, m, cut.d, wide), "k_desc": described(p.key, n, cut.d, wide), "v_desc": described(p.value, n, cut.d, wide),
        "do_desc": described(grad_out, m, cut.d, wide), "dk_desc": described(work.dk, 64, cut.d, wide), "dv_desc": described(work.dv, 64, cut.d, wide),
        "dq_desc": Described(work.sums, (2 * cut.dq_columns, 32)),
        "lse_desc": Described(work.lse_padded, (m,)), "delta_desc": Described(work.delta_padded, (m,)), "p_unsound": work.unsound, "p_seed": seed_of(p),
    }  # fmt: skip


def finish_own(p: Problem, output: Output, grad_out: Tensor, work: Workspace) -> dict[str, Any]:
    return {
        "p_q": p.query, "p_k": p.key, "p_v": p.value, "p_do": grad_out, "p_lse": output.lse, "p_delta": work.delta,
        "p_dq": work.dq, "p_dk": work.dk, "p_dv": work.dv, "p_sum": work.sums, "p_unsound": work.unsound, "p_seed": seed_of(p),
    }  # fmt: skip


# -- launches --------------------------------------------------------------------------------------------------------


def forward_launch(p: Problem, own: dict[str, Any]) -> Launch:
    p = in_strips(p)
    wide = width(p)
    walked = walk(p, forward_side(p))
    heads = p.batch * p.heads
    group = min(heads_at_a_time(p, walked) * (p.heads // p.kv_heads), heads)
    return Launch(
        "hopper_forward",
        min(heads * walked.count, processors(p.device)),
        own,
        {
            "tiles": walked.tensors, "s_tiles": walked.strides, **shape_arguments(p), "n_tiles": walked.count, "n_bh": heads,
            "n_group": group, "wide": wide or 0, "scale": scales(p), **dropout_arguments(p), "score": mod_arguments(p)["score"],
        },
        {
            "SCORE": score_of(p, in_parts=True), "MAPPED": walked.mapped, "PATCHED": wide is not None, "SINKS": p.sinks is not None, "DROPOUT": p.dropout_p > 0,
            "C": forward_cut(p),
        },
        4, 1,
    )  # fmt: skip


def mend_forward_launch(p: Problem, own: dict[str, Any]) -> Launch:
    tiles, cut = forward_side(p).tiles(p), forward_cut(p)
    m, n = forward_tile(cut)
    return Launch(
        "mend_forward",
        p.batch * p.heads * tiles.count,
        own,
        {
            "s_q": strides(p.query), "s_k": strides(p.key), "s_v": strides(p.value), "s_out": strides(own["p_out"]),
            "tiles": tiles.tensors, "s_tiles": tiles.strides, **shape_arguments(p), "n_tiles": tiles.count, "scale": scales(p),
            **dropout_arguments(p), **mod_arguments(p),
        },
        {
            "MASK": mask_of(p), "SCORE": score_of(p), "MAPPED": tiles.mapped, "GIVEN": mask_is_inside(p),
            "SINKS": p.sinks is not None, "DROPOUT": p.dropout_p > 0, "ROWS": padded(m), "M": m, "N": n,
            "D": padded(p.head_dim), "DV": padded(p.v_dim), "D_TRUE": p.head_dim, "DV_TRUE": p.v_dim,
        },
        4, 1,
    )  # fmt: skip


def prepare_backward_launch(p: Problem, own: dict[str, Any]) -> Launch:
    rows = 32
    return Launch(
        "prepare_backward",
        p.batch * p.heads * padded_rows(p) // rows,
        own,
        {"s_out": strides(own["p_out"]), "s_do": strides(own["p_do"]), "n_heads": p.heads, "n_q": p.q_len, "n_padded": padded_rows(p), "wide": width(p) or 0},
        {
            "HAS_DLSE": own["p_dlse"] is not None, "PATCHED": width(p) is not None, "M": rows,
            "DV": padded(p.v_dim), "DV_TRUE": p.v_dim, "D_SUM": backward_cut(p).d,
        },
        4, 1,
    )  # fmt: skip


def backward_launch(p: Problem, own: dict[str, Any]) -> Launch:
    p = in_strips(p)
    wide = width(p)
    walked, cut = walk(p, backward_side(p)), backward_cut(p)
    return Launch(
        "hopper_backward_wide" if cut.wide else "hopper_backward",
        p.batch * p.kv_heads * walked.count,
        own,
        {
            "tiles": walked.tensors, "s_tiles": walked.strides, **shape_arguments(p), "n_tiles": walked.count, "n_bh": p.batch * p.kv_heads,
            "n_group": heads_at_a_time(p, walked), "n_padded": padded_rows(p), "wide": wide or 0, "scale": scales(p), **dropout_arguments(p),
            "score": mod_arguments(p)["score"],
        },
        {
            "SCORE": score_of(p, in_parts=True), "SLOPE": slope_of(p, in_parts=True), "MAPPED": walked.mapped, "PATCHED": wide is not None,
            "DROPOUT": p.dropout_p > 0, "C": cut,
        },
        4, 1,
    )  # fmt: skip


def finish_backward_launch(p: Problem, own: dict[str, Any]) -> Launch:
    rows, columns = forward_side(p).tiles(p), backward_side(p).tiles(p)
    rows_tile, columns_tile = forward_tile(forward_cut(p)), backward_tile(backward_cut(p))
    query_programs = p.batch * p.heads * rows.count
    return Launch(
        "finish_backward",
        query_programs + p.batch * p.kv_heads * columns.count,
        own,
        {
            **{f"s_{name}": strides(own[f"p_{name}"]) for name in ("q", "k", "v", "do", "dq", "dk", "dv")},
            "rows": rows.tensors, "s_rows": rows.strides, "n_rows": rows.count,
            "columns": columns.tensors, "s_columns": columns.strides, "n_columns": columns.count,
            "n_query_programs": query_programs, **shape_arguments(p), "n_padded": padded_rows(p), "wide": width(p) or 0, "scale": scales(p),
            **dropout_arguments(p), **mod_arguments(p),
        },
        {
            "MASK": mask_of(p), "SCORE": score_of(p), "SLOPE": slope_of(p), "MAPPED": rows.mapped, "GIVEN": mask_is_inside(p), "PATCHED": width(p) is not None,
            "DROPOUT": p.dropout_p > 0, "ROWS_M": rows_tile[0], "ROWS_N": rows_tile[1], "COLUMNS_M": columns_tile[0], "COLUMNS_N": columns_tile[1],
            "D": padded(p.head_dim), "DV": padded(p.v_dim), "D_TRUE": p.head_dim, "DV_TRUE": p.v_dim, "D_SUM": backward_cut(p).d,
        },
        4, 1,
    )  # fmt: skip


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def heads_at_a_time(p: Problem, walked: Walk) -> int:
    """How many key heads' tiles are mixed, longest first. Without a map all tiles are alike, and those of one head follow each other."""
    if not walked.mapped:
        return 1
    share = min(1.0, 2 * walked.density)  # causal maps visit half of the tiles, and all keys
    bytes_of_head = max(1.0, share * p.kv_len * (p.head_dim + p.v_dim) * p.key.element_size())
    at_once = 2 ** max(0, round(math.log2(L2_SHARE / bytes_of_head)))  # a power of two is likely to divide all heads: the last group should not be small
    return min(at_once, p.batch * p.kv_heads)
