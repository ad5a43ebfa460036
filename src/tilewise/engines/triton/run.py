"""How a problem becomes kernel launches."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewise.engines.base import Gradients, Output, like_query
from tilewise.engines.dropout import keep_scale, threshold
from tilewise.engines.triton import interpreted
from tilewise.engines.triton.config import Config, choose, padded, smaller
from tilewise.engines.triton.launch import Aligned, Launch, OutOfSharedMemory, Strides, start
from tilewise.engines.triton.mods import mask_of, mod_arguments, scatter_of, score_of, slope_of
from tilewise.engines.triton.walks import column_tiles, row_tiles
from tilewise.problem import Problem

DECODE_ROWS, DECODE_KEYS = 64, 32  # decoding: at most so many packed rows, at least so many keys per query
PROGRAMS_PER_PROCESSOR, TILES_PER_SPLIT, MOST_SPLITS, FEW_PROCESSORS = 4, 4, 128, 4


def forward(p: Problem) -> Output:
    out = like_query(p.query, p.v_dim)
    lse = torch.empty((p.batch, p.heads, p.q_len), dtype=torch.float32, device=p.device)
    highest = torch.empty_like(lse)
    if p.query.numel() == 0 or p.key.numel() == 0:
        return _nothing_to_attend(p, out, lse, highest)
    if is_decoding(p):
        _decode(p, out, lse, highest)
    else:
        fitted("forward", p, lambda config: _forward(p, out, lse, highest, config))
    return Output(out, lse, highest)


def gradient_buffers(p: Problem, wanted: frozenset[int]) -> list[Tensor]:
    """Where the shares of the captures' gradients are added up, with more digits than they have; others stand in as they are."""
    if p.score is None:
        return []
    wide = torch.float64 if p.dtype == torch.float32 else torch.float32
    return [torch.zeros_like(t, dtype=wide) if k in wanted else t for k, t in enumerate(p.score.captures)]


def _decode(p: Problem, out: Tensor, lse: Tensor, highest: Tensor) -> None:
    shares: list[Splits] = []

    def make(config: Config) -> Launch:
        shares.append(_splits(p, config))
        return _split(p, shares[-1], config)

    fitted("decode", p, make)
    start(_combine(p, shares[-1], out, lse, highest), p.device)


def backward(p: Problem, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
    gradients: list[Tensor] = []
    if p.score is not None:
        captures = tuple(t.contiguous() if k in wanted else t for k, t in enumerate(p.score.captures))
        p = replace(p, score=replace(p.score, captures=captures))
        gradients = gradient_buffers(p, wanted)
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (p.query, p.key, p.value))
    delta = torch.zeros((p.batch, p.heads, p.q_len), dtype=torch.float32, device=p.device)
    if p.query.numel() and p.key.numel():
        start(_sums(p, output, grad_out, grad_lse, delta), p.device)
        fitted("keys", p, lambda config: _keys(p, output.lse, grad_out, delta, dk, dv, config))
        fitted("queries", p, lambda config: _queries(p, output.lse, grad_out, delta, dq, gradients, wanted, config))
    else:
        delta = delta if grad_lse is None else delta - grad_lse
        for t in (dq, dk, dv):
            t.zero_()
    sinks = None
    if p.sinks is not None:
        weight = torch.where(output.lse == -torch.inf, 0.0, torch.exp(p.sinks.float().view(1, -1, 1) - output.lse))
        sinks = -(weight * delta).sum((0, 2)).to(p.sinks.dtype)
    captured = {k: gradients[k].to(p.score.captures[k].dtype) for k in wanted} if p.score is not None else {}
    return Gradients(dq, dk, dv, sinks, captured)


# -- configurations that fit -----------------------------------------------------------------------------------------

_fitting: dict[Any, Config] = {}


def fitted(kernel: str, p: Problem, make: Callable[[Config], Launch]) -> None:
    """Start a kernel with the best configuration whose shared memory the GPU has; what did not fit is not tried again."""
    score = "" if p.score is None else p.score.program.text
    tile = None if p.tiles is None else p.tiles.tile
    key = (kernel, p.head_dim, p.v_dim, p.dtype, p.mask is None, score, tile, p.device)
    config: Config | None = _fitting.get(key) or choose(kernel, p)
    while config is not None:
        try:
            start(make(config), p.device)
        except OutOfSharedMemory:
            config = smaller(config)
            continue
        _fitting[key] = config
        return
    raise RuntimeError(f"no configuration of the {kernel} kernel fits this GPU for {p.describe()}")


# -- kernels -----------------------------------------------------------------------------------------------------------


def _forward(p: Problem, out: Tensor, lse: Tensor, highest: Tensor, config: Config) -> Launch:
    tiles = row_tiles(p, config)
    return Launch(
        "forward",
        p.batch * p.heads * tiles.count,
        {
            "p_q": p.query, "p_k": p.key, "p_v": p.value, "p_out": out, "p_lse": lse, "p_highest": highest, "p_sinks": p.sinks, "p_seed": seed_of(p),
            "s_q": strides(p.query), "s_k": strides(p.key), "s_v": strides(p.value), "s_out": strides(out),
            **tiles.arguments, **shape_arguments(p), "n_tiles": tiles.count, "scale": float(p.scale), **dropout_arguments(p),
            **mod_arguments(p),
        },
        {
            "MASK": mask_of(p), "SCORE": score_of(p), "MAPPED": tiles.mapped, "SINKS": p.sinks is not None, "DROPOUT": p.dropout_p > 0,
            **size_constants(p, config), "MASKED_STAGES": config.masked_stages,
        },
        config.warps, config.stages,
    )  # fmt: skip


@dataclass(frozen=True)
class Splits:
    """Where the programs of a decoding step leave their shares: [batch * kv heads, splits, rows]."""

    acc: Tensor
    highest: Tensor
    total: Tensor
    count: int


def _splits(p: Problem, config: Config) -> Splits:
    count = split_count(p, -(-p.kv_len // config.n))
    shape = (p.batch * p.kv_heads, count, p.heads // p.kv_heads * p.q_len)
    acc = torch.empty((*shape, p.v_dim), dtype=torch.float32, device=p.device)
    return Splits(acc, acc.new_empty(shape), acc.new_empty(shape), count)


def _split(p: Problem, parts: Splits, config: Config) -> Launch:
    rows = p.heads // p.kv_heads * p.q_len
    return Launch(
        "split",
        p.batch * p.kv_heads * parts.count,
        {
            "p_q": p.query, "p_k": p.key, "p_v": p.value, "p_acc": parts.acc, "p_m": parts.highest, "p_l": parts.total, "p_seed": seed_of(p),
            "s_q": strides(p.query), "s_k": strides(p.key), "s_v": strides(p.value), **shape_arguments(p),
            "n_splits": parts.count, "per_split": -(-p.kv_len // (config.n * parts.count)), "scale": float(p.scale), "threshold": threshold(p.dropout_p),
            **mod_arguments(p),
        },
        {"MASK": mask_of(p), "SCORE": score_of(p), "DROPOUT": p.dropout_p > 0, **size_constants(p, config), "M": max(16, 1 << (rows - 1).bit_length())},
        config.warps, config.stages,
    )  # fmt: skip


def _combine(p: Problem, parts: Splits, out: Tensor, lse: Tensor, highest: Tensor) -> Launch:
    return Launch(
        "combine",
        p.batch * p.heads * p.q_len,
        {
            "p_acc": parts.acc, "p_m": parts.highest, "p_l": parts.total, "p_out": out, "p_lse": lse, "p_highest": highest, "p_sinks": p.sinks,
            "s_out": strides(out), "n_heads": p.heads, "ratio": p.heads // p.kv_heads, "n_q": p.q_len, "n_splits": parts.count, "keep_scale": dropout_scale(p),
        },
        {"SINKS": p.sinks is not None, "SPLITS": MOST_SPLITS, "DV": padded(p.v_dim), "DV_TRUE": p.v_dim},
        4, 1,
    )  # fmt: skip


def _sums(p: Problem, output: Output, grad_out: Tensor, grad_lse: Tensor | None, delta: Tensor) -> Launch:
    rows = 32
    return Launch(
        "sums",
        p.batch * p.heads * -(-p.q_len // rows),
        {
            "p_out": output.out, "p_do": grad_out, "p_dlse": None if grad_lse is None else grad_lse.float().contiguous(), "p_delta": delta,
            "s_out": strides(output.out), "s_do": strides(grad_out), "n_heads": p.heads, "n_q": p.q_len,
        },
        {"HAS_DLSE": grad_lse is not None, "M": rows, "DV": padded(p.v_dim), "DV_TRUE": p.v_dim},
        4, 1,
    )  # fmt: skip

def _keys(p: Problem, lse: Tensor, grad_out: Tensor, delta: Tensor, dk: Tensor, dv: Tensor, config: Config) -> Launch:
    tiles = column_tiles(p, config)
    return Launch(
        "keys",
        p.batch * p.kv_heads * tiles.count,
        {
            "p_q": p.query, "p_k": p.key, "p_v": p.value, "p_do": grad_out, "p_lse": lse, "p_delta": delta, "p_dk": dk, "p_dv": dv, "p_seed": seed_of(p),
            "s_q": strides(p.query), "s_k": strides(p.key), "s_v": strides(p.value), "s_do": strides(grad_out), "s_dk": strides(dk), "s_dv": strides(dv),
            **tiles.arguments, **shape_arguments(p), "n_tiles": tiles.count, "scale": float(p.scale), **dropout_arguments(p),
            **mod_arguments(p),
        },
        {
            "MASK": mask_of(p), "SCORE": score_of(p), "SLOPE": slope_of(p), "MAPPED": tiles.mapped, "DROPOUT": p.dropout_p > 0,
            **size_constants(p, config), "MASKED_STAGES": config.masked_stages,
        },
        config.warps, config.stages,
    )  # fmt: skip

def _queries(
    p: Problem, lse: Tensor, grad_out: Tensor, delta: Tensor, dq: Tensor, gradients: list[Tensor], wanted: frozenset[int], config: Config
) -> Launch:
    tiles = row_tiles(p, config)
    return Launch(
        "queries",
        p.batch * p.heads * tiles.count,
        {
            "p_q": p.query, "p_k": p.key, "p_v": p.value, "p_do": grad_out, "p_lse": lse, "p_delta": delta, "p_dq": dq, "p_seed": seed_of(p),
            "s_q": strides(p.query), "s_k": strides(p.key), "s_v": strides(p.value), "s_do": strides(grad_out), "s_dq": strides(dq),
            **tiles.arguments, **shape_arguments(p), "n_tiles": tiles.count, "scale": float(p.scale), **dropout_arguments(p),
            **mod_arguments(p), "score_g": tuple(gradients),
        },
        {
            "MASK": mask_of(p), "SCORE": score_of(p), "SLOPE": slope_of(p), "SCATTER": scatter_of(p, wanted), "MAPPED": tiles.mapped,
            "DROPOUT": p.dropout_p > 0, **size_constants(p, config), "MASKED_STAGES": config.masked_stages,
        },
        config.warps, config.stages,
    )  # fmt: skip


def is_decoding(p: Problem) -> bool:
    """Few query rows over many keys: too few tiles to fill a GPU unless the keys are split."""
    return p.tiles is None and p.heads // p.kv_heads * p.q_len <= DECODE_ROWS and p.kv_len >= DECODE_KEYS * p.q_len


def split_count(p: Problem, tiles: int) -> int:
    """Enough programs to fill the GPU a few times over, each with a few key tiles at least."""
    processors = torch.cuda.get_device_properties(p.device).multi_processor_count if p.device.type == "cuda" else FEW_PROCESSORS
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // (p.batch * p.kv_heads))
    return max(1, min(wanted, tiles // TILES_PER_SPLIT, MOST_SPLITS))


def _nothing_to_attend(p: Problem, out: Tensor, lse: Tensor, highest: Tensor) -> Output:
    """No keys at all: outputs are 0; the sink, where there is one, is the whole sum."""
    lse = lse.fill_(-torch.inf) if p.sinks is None else p.sinks.float().view(1, -1, 1).expand_as(lse).contiguous()
    return Output(out.zero_(), lse, highest.fill_(-torch.inf))


# -- arguments -------------------------------------------------------------------------------------------------------


def strides(t: Tensor) -> tuple[int, ...]:
    """(batch, head, sequence, dim) strides; `Aligned` where rows can be loaded 16 bytes at a time."""
    whole = 16 // t.element_size()
    found = t.stride()
    if found[3] == 1 and t.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in found[:3]) and whole:
        return Aligned(found)
    return Strides(found)


def seed_of(p: Problem) -> Tensor | None:
    return None if p.seed is None else p.seed.to(p.device)


def shape_arguments(p: Problem) -> dict[str, int]:
    return {"n_heads": p.heads, "ratio": p.heads // p.kv_heads, "n_q": p.q_len, "n_kv": p.kv_len}


def dropout_scale(p: Problem) -> float:
    return float(keep_scale(p.dropout_p)) if p.dropout_p > 0 else 1.0


def dropout_arguments(p: Problem) -> dict[str, Any]:
    return {"keep_scale": dropout_scale(p), "threshold": threshold(p.dropout_p)}


def size_constants(p: Problem, config: Config) -> dict[str, Any]:
    precise = "tf32" if p.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {
        "M": config.m, "N": config.n, "D": padded(p.head_dim), "DV": padded(p.v_dim), "D_TRUE": p.head_dim, "DV_TRUE": p.v_dim,
        "PRECISION": precise, "UPCAST": interpreted() and p.dtype == torch.bfloat16,
    }  # fmt: skip
