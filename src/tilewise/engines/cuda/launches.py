"""The arguments of the CUDA forward, from a problem and its tensors."""

from typing import Any, NamedTuple

from torch import Tensor

from tilewise.core.output import Output
from tilewise.core.problem import Problem
from tilewise.engines.cuda import nvrtc
from tilewise.engines.cuda.config import ForwardConfig, band_for, forward_config
from tilewise.engines.cuda.mods import score_of
from tilewise.engines.cuda.source import CudaKernel
from tilewise.engines.gluon import config as gluon
from tilewise.engines.gluon.launches import heads_at_a_time, heads_per_group, hopper_tiles
from tilewise.engines.gluon.tile_schedule import HopperSchedule, hopper_schedule, query_axis
from tilewise.engines.gpu.arguments import dropout_arguments, seed_of, shape_arguments
from tilewise.engines.gpu.driver import map_address_offset
from tilewise.engines.gpu.kernel_args import Strides
from tilewise.engines.gpu.launch import Launch, TmaTensor, score_captures
from tilewise.engines.gpu.limits import free_sms
from tilewise.engines.gpu.mods import mod_arguments, scales
from tilewise.engines.gpu.tile_schedule import TileSchedule
from tilewise.lang import Band

FORWARD = CudaKernel("forward")
LAST_ITEMS = 3  # query tiles a program has of the last group of heads, at least: by simulation, D256 S8192 then loses 2 % to idle programs instead of 10 %
NO_SCHEDULE = HopperSchedule(TileSchedule(0, mapped=False))


class Tiles(NamedTuple):
    """The tensors of a HopperSchedule, by the names they have in kernels/forward.cu; None without a map."""

    order: Any
    visited: Any
    masked: Any
    offsets: Any
    starts: Any
    stops: Any
    first_bits: Any
    bits: Any


class Limits(NamedTuple):
    """A band's, by the names they have in kernels/forward.cu: query q sees keys q + low to q + high. None for other masks."""

    low: Any = None
    high: Any = None


class Score(NamedTuple):
    """What a score function is given, by the names it has in generated functions (emit.py)."""

    p: Any  # captures
    i: Any  # integers
    f: Any  # floats
    s: Any  # sizes and strides of the captures


class Compiler(NamedTuple):
    """What compiles the kernel: part of its key."""

    version: tuple[int, int]
    options: tuple[str, ...]


def schedule_of(p: Problem) -> HopperSchedule:
    """The same that the Gluon forward walks; none for a band, whose tiles the kernel finds by itself."""
    return NO_SCHEDULE if band_for(p) is not None else hopper_schedule(p, query_axis(gluon.forward_config(p)))


def band_density(p: Problem, band: Band) -> float:
    """The share of the keys that a query sees, at most."""
    return min(1.0, max(0, band.high - band.low + 1) / p.kv_len)


def heads_before_last_group(heads: int, group: int, tiles: int, programs: int) -> int:
    """Of groups of this size. Programs end together if what they draw last is short, so the last group is large: the longest tiles of a small one would still
    run when nothing else is left."""
    last = -(-LAST_ITEMS * programs // max(tiles, 1))
    return max(heads - last, 0) // group * group


def fwd_launch(p: Problem, output: Output, counter: Tensor) -> Launch:
    schedule = schedule_of(p)
    return fwd_launch_with(p, output, counter, schedule, forward_config(p, schedule.mapped))


def map_address(p: Problem) -> int:
    """Where a tensor map holds its tensor's address, for repair.cuh. Who builds ahead has no driver to ask."""
    return map_address_offset() or 0 if p.device.type == "cuda" else 0


def needs_fixup(p: Problem) -> bool:
    """Whether rows that are not finite are left to a launch that follows."""
    return not forward_config(p, schedule_of(p).mapped).repairs


def fwd_launch_with(p: Problem, output: Output, counter: Tensor, schedule: HopperSchedule, config: ForwardConfig) -> Launch:
    heads, tiles, band = p.batch * p.heads, -(-p.q_len // config.block_m), band_for(p)
    group = heads_per_group(p, schedule) if band is None else heads_at_a_time(p, band_density(p, band))
    group = min(group * (p.heads // p.kv_heads), heads)
    items = heads * -(-tiles // config.cluster)  # what programs, or pairs of them, take at a time
    return Launch(
        "cuda_fwd",
        FORWARD,
        min(items, free_sms(p) // config.cluster) * config.cluster,
        {
            "q": TmaTensor(p.query, (1, 1, config.block_m, 64)),
            "k": TmaTensor(p.key, (1, 1, config.block_n, 64)),
            "v": TmaTensor(p.value, (1, 1, config.block_n, 64)),
            "out": output.out,
            "lse": output.lse,
            "max_score": output.max_score,  # only the fix-up, which is given the same tensors, looks for maxima
            "counter": counter,
            "sinks": p.sinks,
            "seed": seed_of(p),
        },
        {
            "tiles": Tiles(*schedule.tensors),
            "limits": Limits() if band is None else Limits(*band.clamped),
            "s_batch": schedule.strides[0],
            "s_head": schedule.strides[1],
            **shape_arguments(p),
            "n_tiles": tiles,
            "n_bh": heads,
            "n_group": group,
            "n_body": heads_before_last_group(heads, group, tiles, free_sms(p)),
            "scale": scales(p)[1],
            "score_scale": scales(p)[0],
            **dropout_arguments(p),
            "s_out": Strides(output.out.stride()),
            "score": Score(*mod_arguments(p)["score"]),
            "map_address": map_address(p),
        },
        {"C": config, "SCORE": score_of(p), "COMPILER": Compiler(nvrtc.version(), nvrtc.OPTIONS)},
        config.warps,
        1,
        sources=(*((hopper_tiles(query_axis(gluon.forward_config(p))),) if band is None else ()), score_captures),
    )
