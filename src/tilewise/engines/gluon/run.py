"""How a problem becomes launches of the Hopper kernels."""

from typing import Any

import torch
from torch import Tensor

from tilewise.engines.base import Gradients, Output, like_query
from tilewise.engines.gluon.config import ROWS, forward_cut, forward_tile
from tilewise.engines.triton import run as triton_run
from tilewise.engines.triton.config import Config, padded
from tilewise.engines.triton.driver import current_stream
from tilewise.engines.triton.launch import Described, Launch, prepare
from tilewise.engines.triton.mods import mask_of, mod_arguments, score_of
from tilewise.engines.triton.run import dropout_arguments, prepared, seed_of, shape_arguments, strides
from tilewise.engines.triton.walks import KernelTiles, row_tiles
from tilewise.problem import Problem

L2_SHARE = 32 * 2**20  # bytes of keys and values that programs read at a time
_counters: dict[tuple[int, int], Tensor] = {}


def forward(p: Problem) -> Output:
    out = like_query(p.query, p.v_dim)
    lse, highest = torch.empty((2, p.batch, p.heads, p.q_len), dtype=torch.float32, device=p.device).unbind()
    cut = forward_cut(p)
    m, n = forward_tile(cut)
    unsound = torch.empty((p.batch * p.heads * -(-p.q_len // m) * cut.warpgroups,), dtype=torch.int32, device=p.device)
    rows = {"p_lse": lse, "p_highest": highest, "p_unsound": unsound}
    rest = {"p_sinks": p.sinks, "p_seed": seed_of(p)}
    own = {
        "q_desc": Described(p.query, (1, 1, ROWS, cut.d)), "k_desc": Described(p.key, (1, 1, n, cut.d)),
        "v_desc": Described(p.value, (1, 1, n, cut.dv)), "o_desc": Described(out, (1, 1, ROWS, cut.dv)),
        **rows, "p_counter": counter(p.device), **rest,
    }  # fmt: skip
    _ready(p, "hopper forward", lambda: forward_launch(p, own)).start(own)
    mended = {"p_q": p.query, "p_k": p.key, "p_v": p.value, "p_out": out, **rows, **rest}
    _ready(p, "mend forward", lambda: mend_forward_launch(p, mended)).start(mended)
    return Output(out, lse, highest)


def backward(p: Problem, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
    return triton_run.backward(p, output, grad_out, grad_lse, wanted)


def _ready(p: Problem, name: str, launch: Any) -> Any:
    return prepared(p, (name,), True, lambda: prepare(launch(), p.device))


def counter(device: torch.device) -> Tensor:
    """The number that programs draw their work from: 0 before and after every launch. Launches of one stream take turns with one;
    a captured one brings its own, which is set to 0 within its graph."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    key = (index, current_stream(index))
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return found


# -- launches --------------------------------------------------------------------------------------------------------


def forward_tiles(p: Problem) -> KernelTiles:
    m, n = forward_tile(forward_cut(p))
    return row_tiles(p, Config(m, n, 4, 1))


def forward_launch(p: Problem, own: dict[str, Any]) -> Launch:
    tiles = forward_tiles(p)
    items = p.batch * p.heads * tiles.count
    return Launch(
        "hopper_forward",
        min(items, processors(p.device)),
        own,
        {
            "tiles": tiles.with_work, "s_tiles": tiles.strides, **shape_arguments(p), "n_tiles": tiles.count, "n_bh": p.batch * p.heads,
            "n_group": heads_at_a_time(p, tiles.mapped), "scale": float(p.scale), **dropout_arguments(p), **mod_arguments(p),
        },
        {
            "MASK": mask_of(p), "SCORE": score_of(p), "MAPPED": tiles.mapped, "SINKS": p.sinks is not None, "DROPOUT": p.dropout_p > 0,
            "C": forward_cut(p),
        },
        4, 1,
    )  # fmt: skip


def mend_forward_launch(p: Problem, own: dict[str, Any]) -> Launch:
    tiles, cut = forward_tiles(p), forward_cut(p)
    m, n = forward_tile(cut)
    return Launch(
        "mend_forward",
        p.batch * p.heads * tiles.count,
        own,
        {
            "s_q": strides(p.query), "s_k": strides(p.key), "s_v": strides(p.value), "s_out": strides(own["p_out"]),
            "tiles": tiles.tensors, "s_tiles": tiles.strides, **shape_arguments(p), "n_tiles": tiles.count, "scale": float(p.scale),
            **dropout_arguments(p), **mod_arguments(p),
        },
        {
            "MASK": mask_of(p), "SCORE": score_of(p), "MAPPED": tiles.mapped, "SINKS": p.sinks is not None, "DROPOUT": p.dropout_p > 0,
            "PARTS": cut.warpgroups, "M": m, "N": n, "D": padded(p.head_dim), "DV": padded(p.v_dim), "D_TRUE": p.head_dim, "DV_TRUE": p.v_dim,
        },
        4, 1,
    )  # fmt: skip


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def heads_at_a_time(p: Problem, mapped: bool) -> int:
    """How many heads' tiles are mixed, longest first. Without a map all tiles are alike, and those of one head follow each other."""
    if not mapped:
        return 1
    bytes_of_head = p.kv_len * (p.head_dim + p.v_dim) * p.key.element_size()
    return min(p.batch * p.heads, max(1, L2_SHARE // bytes_of_head) * (p.heads // p.kv_heads))
