"""torch's FlexAttention interface, served by tilewise: code written for it runs after changing the import.

Example:

    from tilewise.flex import flex_attention, create_block_mask
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor

from tilewise.attention import run
from tilewise.core.output import Output
from tilewise.core.problem import Options
from tilewise.errors import InputError, MisuseError, UnsupportedError
from tilewise.frontend.block_mask import BLOCK, COVERS_ALL, BlockMask, noop_mask, sliced_mask_mod
from tilewise.frontend.shared_sequence import scopes
from tilewise.lang import INDICES, evaluate, trace_mask, trace_score
from tilewise.masks import MaskFunction
from tilewise.scores import ScoreFunction
from tilewise.tiles import TileMap, from_block_mask

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]

logger = logging.getLogger("tilewise")


class AuxRequest(NamedTuple):
    """What flex_attention returns besides the output."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """(batch, heads, queries) each, in natural logarithm; None where it was not asked for."""

    lse: Tensor | None = None
    max_scores: Tensor | None = None


class FlexKernelOptions(TypedDict, total=False):
    """Tuning of torch's own kernels. tilewise takes it so that code runs unchanged; it has no effect."""

    num_warps: int
    num_stages: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_M1: int
    BLOCK_N1: int
    BLOCK_M2: int
    BLOCK_N2: int
    PRESCALE_QK: bool
    ROWS_GUARANTEED_SAFE: bool
    BLOCKS_ARE_CONTIGUOUS: bool
    WRITE_DQ: bool
    FORCE_USE_FLEX_ATTENTION: bool
    USE_TMA: bool
    kpack: int
    matrix_instr_nonkdim: int
    waves_per_eu: int
    BACKEND: Literal["AUTO", "TRITON", "FLASH", "TRITON_DECODE"]


BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")


# -- attention ---------------------------------------------------------------------------------------------------------


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: FlexKernelOptions | Mapping[str, Any] | None = None,
    *,
    return_aux: None = None,
) -> Tensor: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: FlexKernelOptions | Mapping[str, Any] | None = None,
    return_aux: None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: FlexKernelOptions | Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]: ...


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """torch's flex_attention: forward and backward, on every device, without torch.compile and under it.

    What torch's takes, this takes with the same meaning. tilewise.attention_backend and TILEWISE_BACKEND choose the engine.

    Args:
        query: (batch, heads, sequence, head dim).
        key: (batch, heads, sequence, head dim).
        value: (batch, heads, sequence, head dim).
        score_mod: f(score, b, h, q, kv), the new score.
        block_mask: A BlockMask, tilewise's or torch's, or anything else tilewise.attention takes as a mask.
        scale: 1 / sqrt(head dim) unless given.
        enable_gqa: Allow fewer key heads than query heads.
        return_lse: Return (output, lse).
        kernel_options: Checked, and without effect.
        return_aux: AuxRequest(lse=, max_scores=): return (output, AuxOutput).

    Returns:
        The output; or a pair, if `return_lse` or `return_aux` asks for one.
    """
    if return_lse and return_aux is not None:
        raise InputError("Cannot specify both return_lse and return_aux: return_aux=AuxRequest(lse=True) says it all")
    _check_kernel_options(kernel_options)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.is_nested:
            raise UnsupportedError(f"flex_attention does not support NestedTensor inputs, got one for {name}; tilewise.attention takes them")
        if tensor.dim() != 4:
            found = f"shape {tuple(tensor.shape)} for {name}"
            raise InputError(f"flex_attention takes (batch, heads, sequence, head dim) tensors, got {found}; tilewise.attention takes others")
    wanted = AuxRequest(lse=return_lse) if return_aux is None else return_aux
    options = Options(scale=scale, enable_gqa=enable_gqa, max_scores=wanted.max_scores)
    if len(scopes) > 0 and scopes[-1].holds(query, key, "bhsd", None):
        if wanted.max_scores:
            raise UnsupportedError("max_scores are not available for a sequence that several ranks share")
        out, lse = scopes[-1].attention(query, key, value, block_mask, score_mod, options, "bhsd", None, None, True)
        output = Output(out, lse, lse)
    else:
        output = run(query, key, value, mask_for(block_mask, query, key), score_mod, options, None, wanted.lse or wanted.max_scores)
    if return_lse:
        return output.out, output.lse
    if return_aux is None:
        return output.out
    return output.out, AuxOutput(output.lse if wanted.lse else None, output.max_score if wanted.max_scores else None)


def mask_for(block_mask: Any, query: Tensor, key: Tensor) -> Any:
    """A block mask as a tile map, after checking that it fits the call; other masks unchanged."""
    if not isinstance(block_mask, BlockMask) and not _is_torchs(block_mask):
        return block_mask
    if tuple(block_mask.BLOCK_SIZE) == (COVERS_ALL, COVERS_ALL):
        return block_mask.mask_mod
    device = block_mask.device if isinstance(block_mask, BlockMask) else block_mask.kv_num_blocks.device
    if device.type != query.device.type or device.index not in (None, query.device.index):
        raise MisuseError(f"Expect q/k/v and block_mask to be on the same device but got {query.device} and {device}.")
    mask = block_mask.as_mask() if isinstance(block_mask, BlockMask) else from_block_mask(block_mask)
    if not isinstance(mask, TileMap):
        _check_lengths(block_mask.seq_lengths, query, key)
        return mask
    if block_mask.mask_mod is sliced_mask_mod and mask.shape[2] != query.shape[2]:
        raise MisuseError(
            f"Cannot use mask_mod from a sliced BlockMask: the slice covers {mask.shape[2]} queries, the call has {query.shape[2]}. For other "
            "queries than those of the slice, set its mask_mod, shifted from the original's, and its seq_lengths"
        )
    _check_lengths(mask.shape[2:], query, key)
    return block_mask.mask_mod if _made_for_one(mask, query) else mask


def _is_torchs(mask: Any) -> bool:
    """Recognises torch's BlockMask by its attributes, without importing torch's module."""
    return not callable(mask) and hasattr(mask, "kv_num_blocks") and hasattr(mask, "kv_indices")


def _made_for_one(tiles: TileMap, query: Tensor) -> bool:
    """Whether a map built for one batch element or head is used for several, though its mask depends on b or h: then only the mask is right."""
    if tiles.given or tiles.mask is None:
        return False
    uses = tiles.mask.program.uses
    return any(size == 1 < needed and name in uses for name, size, needed in zip("bh", tiles.shape, query.shape, strict=False))


def _check_lengths(made_for: tuple[int, ...], query: Tensor, key: Tensor) -> None:
    used_for = (query.shape[2], key.shape[2])
    if used_for[0] > made_for[0] or used_for[1] > made_for[1]:
        raise InputError(
            "block_mask was created for a smaller length than you're using it for, you likely need to create a new block mask. "
            + _both_lengths(made_for, used_for)
        )
    if used_for[0] < made_for[0] or used_for[1] < made_for[1]:
        raise InputError(
            "block_mask was created for a larger length than you're using it for, you can either 1. create a new block mask with the correct length, "
            "or 2. crop it to its upper left corner with block_mask._adjust(q_len, kv_len), if that is what you mean. " + _both_lengths(made_for, used_for)
        )


def _both_lengths(made_for: tuple[int, ...], used_for: tuple[int, ...]) -> str:
    return f"It covers {made_for[0]} queries and {made_for[1]} keys, the call has {used_for[0]} and {used_for[1]}."


def _check_kernel_options(options: Any) -> None:
    if options is None:
        return
    if not isinstance(options, (dict, Mapping)):
        raise InputError(f"kernel_options must be a dict of FlexKernelOptions, got {type(options).__name__}")
    backend = options.get("BACKEND")
    if backend is not None and backend not in BACKENDS:
        raise InputError(f"Invalid BACKEND value {backend!r} in kernel_options. Must be one of {BACKENDS}")
    if backend is not None and options.get("FORCE_USE_FLEX_ATTENTION"):
        raise MisuseError("BACKEND cannot be combined with legacy FORCE_USE_FLEX_ATTENTION in kernel_options: give one of them")
    if options and not torch.compiler.is_compiling():
        _log_once("kernel_options tune torch's own kernels and have no effect on tilewise's")


@cache
def _log_once(message: str) -> None:
    logger.info(message)


# -- masks -------------------------------------------------------------------------------------------------------------


def create_block_mask(
    mask_mod: MaskFunction,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = BLOCK,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The BlockMask of f(b, h, q, kv), found by bounds: neither the score matrix nor a list of its blocks is formed.

    `B` and `H` may be None where the mask does not depend on them. `_compile` changes nothing: there is nothing to
    compile. `compute_dq_write_order` and `dq_kv_order` are for torch's own kernels: they change what `dq_write_order` gives
    when it is read, and nothing else.
    """
    if not callable(mask_mod):
        raise InputError(f"create_block_mask takes a function of (b, h, q, kv), got {type(mask_mod).__name__}")
    if not isinstance(dq_kv_order, bool):
        raise InputError(f"dq_kv_order must be a bool when using create_block_mask, got {type(dq_kv_order).__name__}")
    sizes = (1 if B is None else B, 1 if H is None else H)
    made = BlockMask.from_mask(mask_mod, *sizes, Q_LEN, KV_LEN, _device(device), BLOCK_SIZE, separate_full_blocks)
    if compute_dq_write_order:
        made.wants_write_order(dq_kv_order)
    return made


def create_mask(mod_fn: Callable[..., Any], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None) -> Tensor:
    """The dense boolean (B, H, Q_LEN, KV_LEN) tensor of a mask function; of a score function, where it does not give -inf to a score of 0."""
    where = _device(device)
    shape = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    ranges = [torch.arange(n, device=where).view([-1 if d == axis else 1 for d in range(4)]) for axis, n in enumerate(shape)]
    at = dict(zip(INDICES, ranges, strict=True))
    if _is_score_function(mod_fn):
        scores = evaluate(trace_score((mod_fn,), torch.float32, where), at | {"score": torch.zeros((1, 1, 1, 1), device=where)})
        allowed = ~torch.isneginf(torch.as_tensor(scores, device=where))
    else:
        allowed = torch.as_tensor(evaluate(trace_mask(mod_fn, where), at), device=where)
    return allowed.expand(shape).contiguous()


def _is_score_function(function: Callable[..., Any]) -> bool:
    """Score functions have five parameters without a default, mask functions four."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(1 for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)) == 5


def _device(device: Any) -> torch.device:
    """torch's default: the current accelerator if there is one, unless a device is given."""
    if device is not None:
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if accelerator is None else accelerator


def and_masks(*mask_mods: MaskFunction) -> MaskFunction:
    """The mask that allows what all of them allow."""
    _check_callable(mask_mods)

    def and_mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        allowed = b.new_ones((), dtype=torch.bool)
        for mask_mod in mask_mods:
            allowed = allowed & mask_mod(b, h, q, kv)
        return allowed

    return and_mask


def or_masks(*mask_mods: MaskFunction) -> MaskFunction:
    """The mask that allows what any of them allows."""
    _check_callable(mask_mods)

    def or_mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        allowed = b.new_zeros((), dtype=torch.bool)
        for mask_mod in mask_mods:
            allowed = allowed | mask_mod(b, h, q, kv)
        return allowed

    return or_mask


def _check_callable(mask_mods: tuple[Any, ...]) -> None:
    if not all(callable(m) for m in mask_mods):
        raise MisuseError(f"All inputs should be callable mask_mods: {mask_mods}")
