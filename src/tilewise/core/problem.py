"""The problem: what one call asks for, checked. Every argument check lives here."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.pages import Pages, gathered
from tilewise.core.places import Places
from tilewise.errors import InputError, TraceError
from tilewise.lang import INDICES, BoundProgram, trace_mask, trace_score
from tilewise.masks import Grid, causal
from tilewise.masks.expressions import broadcast_load
from tilewise.masks.mask import is_causal_bias
from tilewise.masks.sequence import of_causal_bias
from tilewise.memory import check_dense, moved, resolved
from tilewise.named import Named, is_whole
from tilewise.scores import Score, ScoreFunction, Sinks, as_scores
from tilewise.scores import bias as additive_bias
from tilewise.sizes import equal
from tilewise.tiles import Extent, TileMap, read_mask

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # keys and values may be: every one of DTYPES holds their numbers exactly

# Where batch, heads, sequence and head dim lie in each layout.
LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "hbsd": (1, 0, 2, 3), "sbhd": (1, 2, 0, 3)}
_BACK = {layout: tuple([places.index(d) for d in range(4)]) for layout, places in LAYOUTS.items()}


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention call. Tensors are (batch, heads, sequence, head dim) views, whatever layout they came in; keys and values in pages are (pages, heads, rows
    of a page, head dim)."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: BoundProgram | None
    tiles: TileMap | None  # a map that the user gave
    score: BoundProgram | None
    sinks: Tensor | None  # [H] logits in the softmax's denominator
    scale: float
    dropout_p: float
    seed: Tensor | None  # one int64, where there is dropout
    deterministic: bool
    dense_mask: Tensor | None = None  # a mask tensor for engines with takes_dense_mask, unchanged: it is not traced, and no part of `mask`
    grid: Grid | None = None  # of which the tokens are the points, in row-major order; only where the mask says so
    places: Places | None = None  # of this part in a larger problem, by which dropout is drawn; None: it is the whole
    pages: Pages | None = None  # which of them hold the keys and values of each batch element; None: they lie in order. Only without gradients
    max_scores: bool = False  # the largest score of each row is asked for (Output.max_score), which is otherwise anything, or empty
    partial: bool = False  # the output is one part of a row's, to be merged with others by lse; a backward is given the whole row's out and lse
    busy_sms: int = 0  # multiprocessors that a collective may want meanwhile: a kernel that would hold all of them to its end leaves as many free

    def replaced(self, **fields: Any) -> "Problem":
        """The same problem but for these fields. `dataclasses.replace` takes several times as long."""
        other = object.__new__(Problem)
        own = other.__dict__
        own.update(self.__dict__)
        own.update(fields)  # one by one is quicker than both at once
        return other

    @property
    def bare(self) -> "Problem":
        """The same problem without `tensors`, which `of` puts back."""
        return self.replaced(query=None, key=None, value=None, sinks=None, score=None if self.score is None else self.score.with_captures(()))

    def of(self, tensors: Sequence[Tensor]) -> "Problem":
        """The problem of these `tensors`, from a bare one."""
        query, key, value, *others = tensors
        if not others:
            return self.replaced(query=query, key=key, value=value)
        count = self.capture_count
        score, sinks = None if self.score is None else self.score.with_captures(tuple(others[:count])), others[count] if len(others) > count else None
        return self.replaced(query=query, key=key, value=value, score=score, sinks=sinks)

    @property
    def capture_count(self) -> int:
        """Of the score, bare or not."""
        return 0 if self.score is None else len(self.score.program.captures)

    def without_pages(self) -> "Problem":
        """The same problem with keys and values in order, in the query's dtype: copies."""
        if self.pages is None:
            return self
        return self.replaced(key=gathered(self.key, self.pages, self.dtype), value=gathered(self.value, self.pages, self.dtype), pages=None)

    @property
    def given_tiles(self) -> TileMap | None:
        """A map that is itself the mask: what it leaves out is masked. Any other map only saves finding out what the mask says."""
        return self.tiles if self.tiles is not None and self.tiles.given else None

    @property
    def mask_sources(self) -> tuple[Tensor, ...]:
        """The tensors whose contents the mask depends on."""
        return mask_sources(self.mask, self.tiles)

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def q_len(self) -> int:
        return self.query.shape[2]

    @property
    def kv_len(self) -> int:
        return self.key.shape[2] if self.pages is None else self.pages.capacity

    @property
    def head_dim(self) -> int:
        return self.query.shape[3]

    @property
    def v_dim(self) -> int:
        return self.value.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def inner_dtype(self) -> torch.dtype:
        """The precision scores, softmax and sums are kept in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def result_dtype(self) -> torch.dtype:
        """Of the output and the gradients of query, key and value. Parts of them are not rounded before they are added up (but see
        `Engine.rounds_key_gradients`)."""
        return self.inner_dtype if self.partial else self.dtype

    @property
    def dropout_places(self) -> Places | None:
        """Without dropout, places do not matter."""
        return None if self.places is None or self.dropout_p == 0 else self.places

    @property
    def tensors(self) -> list[Tensor]:
        """Those a gradient can be asked for."""
        captures = () if self.score is None else self.score.captures
        return [self.query, self.key, self.value, *captures, *([] if self.sinks is None else [self.sinks])]

    @property
    def learned(self) -> frozenset[int]:
        """The score's captures that want a gradient, by slot."""
        return frozenset() if self.score is None else frozenset(k for k, t in enumerate(self.score.captures) if t.requires_grad)

    @property
    def flops(self) -> int:
        """Of a forward in which everything is attended."""
        return 2 * self.batch * self.heads * self.q_len * self.kv_len * (self.head_dim + self.v_dim)

    @property
    def is_empty(self) -> bool:
        """Whether no query meets a key. A size that torch.export does not know counts as one that is not 0."""
        return any([equal(size, 0) for size in (self.batch, self.heads, self.q_len, self.kv_len)])

    @property
    def is_causal_only(self) -> bool:
        return self.mask is not None and self.tiles is None and self.mask.program.text == CAUSAL_TEXT

    def describe(self) -> str:
        kv = "" if self.kv_len == self.q_len else f" over {self.kv_len} keys"
        return f"{tuple(self.query.shape)}{kv} {str(self.dtype).removeprefix('torch.')} on {self.device.type}"


def mask_sources(mask: BoundProgram | None, tiles: TileMap | None) -> tuple[Tensor, ...]:
    captures = () if mask is None else mask.captures
    return captures if tiles is None or not tiles.given else (*captures, *tiles.tensors)


CAUSAL_TEXT = trace_mask(causal.function).program.text


class DenseMask(NamedTuple):
    """A mask tensor that is to be handed to torch's SDPA as it is: boolean, or added to the scores, and broadcast as torch does."""

    tensor: Tensor


class Options(NamedTuple):
    """What a call asks for besides its tensors."""

    scale: float | None = None
    dropout_p: float = 0  # not 0.0, here and wherever it is a default: torch.compile(dynamic=True) takes that for a number that varies, and compiles twice
    is_causal: bool = False
    enable_gqa: bool = False
    deterministic: bool | None = None
    seed: int | Tensor | None = None
    max_scores: bool = False

    def of_plain_values(self) -> "Options":
        """The same with numbers and truth values of Python's own: they are part of a key, and a tensor or an array may change. Symbols stay."""
        scale, dropout_p, is_causal, enable_gqa, deterministic, _, _ = plain = self
        if (
            not torch.compiler.is_compiling()
            and (scale is None or type(scale) is float)
            and type(dropout_p) in (float, int)
            and type(is_causal) is type(enable_gqa) is bool
            and (deterministic is None or type(deterministic) is bool)
        ):
            return self  # as almost every call's
        if plain.scale is not None and type(plain.scale) is not float:
            plain = plain._replace(scale=check_scale(plain.scale))
        if torch.compiler.is_compiling():
            return plain
        if type(plain.dropout_p) is not float and type(plain.dropout_p) is not int:
            plain = plain._replace(dropout_p=check_dropout(_number(plain.dropout_p, "dropout_p")))
        if type(plain.is_causal) is not bool or type(plain.enable_gqa) is not bool or type(plain.deterministic) not in (bool, type(None)):
            chosen = None if plain.deterministic is None else _truth(plain.deterministic, "deterministic")
            is_causal, enable_gqa = _truth(plain.is_causal, "is_causal"), _truth(plain.enable_gqa, "enable_gqa")
            plain = plain._replace(is_causal=is_causal, enable_gqa=enable_gqa, deterministic=chosen)
        return plain

    def without_causal(self) -> "Options":
        return self._replace(is_causal=False)


def make_problem(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, score: ScoreFunction | Sequence[ScoreFunction] | None, options: Options, pages: Pages | None = None
) -> tuple[Problem, str]:
    """The problem of (batch, heads, sequence, head dim) tensors, and its mask's name."""
    if pages is not None:
        check_paged_tensors(query, key, value)
        query, key, value = [resolved(t) for t in (query, key, value)]
    else:
        if has_float8(query, key, value):
            key, value = widened(query, key, value)
        check_tensors(query, key, value, options.enable_gqa)
        query, key, value = [resolved(t) for t in autocast(query, key, value)]
        key, value = broadcast_batch(query, key, value)
    extent = Extent(query.shape[0], query.shape[1], query.shape[2], key.shape[2] if pages is None else pages.capacity)
    dense, mask = (mask.tensor, None) if isinstance(mask, DenseMask) else (None, mask)
    if is_causal_bias(mask):
        mask = of_causal_bias(mask)
    if any([equal(size, 0) for size in extent]):
        mask, score = _learned(mask, score, query.device)
    else:
        check_sizes([mask, *as_scores(score)], extent)
    reading = read_mask(mask, extent, query.device)
    call, name = reading.call, reading.name
    if options.is_causal:
        call, name = _with_causal(mask, call, reading.tiles, name, query.device)
    scores = list(as_scores(score))
    if reading.bias is not None:
        scores.append(additive_bias(reading.bias))
    sinks = [s.logits for s in scores if isinstance(s, Sinks)]
    functions = tuple([s for s in scores if not isinstance(s, Sinks)])
    inner = torch.float64 if query.dtype == torch.float64 else torch.float32
    program = traced_scores(functions, inner, query.device)
    problem = Problem(
        query=query,
        key=key,
        value=value,
        mask=in_memory(call, query.device),
        tiles=_same_device(reading.tiles, query.device),
        score=in_memory(program, query.device),
        sinks=check_sinks(sinks, query),
        scale=default_scale(query.shape[3]) if options.scale is None else check_scale(options.scale),
        dropout_p=check_dropout(options.dropout_p),
        seed=seed_tensor(options.seed, options.dropout_p, query.device),
        deterministic=torch.are_deterministic_algorithms_enabled() if options.deterministic is None else options.deterministic,
        dense_mask=dense if dense is None or dense.dtype == torch.bool else dense.to(query.dtype),
        grid=reading.grid,
        pages=pages,
        max_scores=options.max_scores,
    )
    return problem, name if dense is None else f"tensor{list(dense.shape)}"


# -- tensors ---------------------------------------------------------------------------------------------------------


def to_bhsd(tensor: Tensor, layout: str, heads: int | None, name: str) -> Tensor:
    """A view as (batch, heads, sequence, head dim)."""
    if layout not in LAYOUTS:
        raise InputError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if layout == "bhsd" and heads is None and tensor.dim() == 4:
        return tensor
    if tensor.dim() == 3:
        if heads is None:
            raise InputError(f"{name} has 3 dimensions {tuple(tensor.shape)}: pass heads= for (batch, sequence, heads * head dim), or a 4-D tensor")
        if heads < 1 or tensor.shape[2] % heads:
            raise InputError(f"{name} has {tensor.shape[2]} features, which {heads} heads do not divide")
        apart: Tensor = tensor.unflatten(2, (heads, tensor.shape[2] // heads))
        return apart.transpose(1, 2)
    if tensor.dim() != 4:
        raise InputError(f"{name} must have 4 dimensions (layout {layout!r}), or 3 with heads=, got shape {tuple(tensor.shape)}")
    if heads is not None:
        raise InputError(f"heads= is for 3-D tensors (batch, sequence, heads * head dim); {name} has shape {tuple(tensor.shape)}")
    return tensor.permute(*LAYOUTS[layout])  # quicker than a tuple


def from_bhsd(tensor: Tensor, layout: str, flat: bool) -> Tensor:
    """The way back of to_bhsd for the output."""
    if flat:
        return tensor.transpose(1, 2).flatten(2)
    if layout == "bhsd":
        return tensor
    return tensor.permute(*_BACK[layout])


def kv_heads_of(query: Tensor, key: Tensor, heads: int | None) -> int | None:
    """How many heads 3-D keys and values have, given the query's: the key's head dim is the query's, the value's may differ."""
    if heads is None or query.dim() != 3 or key.dim() != 3:
        return heads
    head_dim = query.shape[2] // max(heads, 1)
    return key.shape[2] // head_dim if head_dim and key.shape[2] % head_dim == 0 else heads


def check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    named = (("query", query), ("key", key), ("value", value))
    _check_memory(named)
    if len({t.dtype for _, t in named}) > 1 and not _autocast_dtype(query):
        given = ", ".join([f"{n} {t.dtype}" for n, t in named])
        raise InputError(f"query, key and value must have one dtype (key and value may also be float8_e4m3fn or float8_e5m2), got {given}")
    for name, tensor in named:
        if tensor.dtype not in DTYPES:
            raise InputError(
                f"{name} has dtype {tensor.dtype}; allowed are float16, bfloat16, float32 and float64, and for key and value float8_e4m3fn and float8_e5m2"
            )
    if key.shape[0] != value.shape[0] or key.shape[0] not in (query.shape[0], 1):
        raise _mismatch("key and value must have the query's batch size, or 1", query, key, value)
    if key.shape[1] != value.shape[1] or key.shape[2] != value.shape[2]:
        raise _mismatch("key and value must have the same heads and length", query, key, value)
    if query.shape[3] != key.shape[3]:
        raise _mismatch("query and key must have the same head dim", query, key, value)
    _check_head_dims(query, value)
    check_heads(query.shape[1], key.shape[1], enable_gqa)


def check_paged_tensors(query: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    """Of a query (batch, heads, queries, head dim) and pages (pages, kv heads, page size, head dim)."""
    named = (("query", query), ("k_pages", k_pages), ("v_pages", v_pages))
    _check_memory(named)
    if query.dtype not in DTYPES:
        raise InputError(f"query has dtype {query.dtype}; allowed are float16, bfloat16, float32 and float64")
    for name, tensor in named[1:]:
        if tensor.dtype not in (query.dtype, *FLOAT8):
            raise InputError(f"{name} must have the query's dtype {query.dtype}, or float8_e4m3fn or float8_e5m2, got {tensor.dtype}")
    if k_pages.dtype != v_pages.dtype:
        raise InputError(f"k_pages and v_pages must have one dtype, got {k_pages.dtype} and {v_pages.dtype}")
    if k_pages.shape[:3] != v_pages.shape[:3] or k_pages.shape[3] != query.shape[3]:
        pages = ", ".join([f"{n} {tuple(t.transpose(1, 2).shape)}" for n, t in named[1:]])
        raise InputError(f"k_pages and v_pages must have as many pages, rows and heads, and k_pages the query's head dim {query.shape[3]}, got {pages}")
    _check_head_dims(query, v_pages)
    check_heads(query.shape[1], k_pages.shape[1], enable_gqa=True)


def _check_memory(named: tuple[tuple[str, Tensor], ...]) -> None:
    for name, tensor in named:
        check_dense(tensor, name)
    if len({t.device for _, t in named}) > 1:
        *names, last = [n for n, _ in named]
        raise InputError(f"{', '.join(names)} and {last} must be on one device, got " + ", ".join([f"{n} on {t.device}" for n, t in named]))


def _check_head_dims(query: Tensor, value: Tensor) -> None:
    for name, size in (("query and key", query.shape[3]), ("value", value.shape[3])):
        if size < 1:
            raise InputError(f"head dims must be at least 1, got {size} for {name}")


def _mismatch(rule: str, query: Tensor, key: Tensor, value: Tensor) -> InputError:
    shapes = ", ".join([f"{n} {tuple(t.shape)}" for n, t in (("query", query), ("key", key), ("value", value))])
    return InputError(f"{rule}, got (batch, heads, sequence, head dim) {shapes}")


def check_heads(heads: int, kv_heads: int, enable_gqa: bool) -> None:
    if heads == kv_heads:
        return
    divides = kv_heads != 0 and heads % kv_heads == 0
    if not enable_gqa:
        advice = "Try setting enable_gqa=True for GQA." if divides else "Even for GQA (enable_gqa=True) query heads must be a multiple of kv heads."
        raise InputError(f"Expect query and key/value to have the same number of heads but got Hq={heads} and Hkv={kv_heads}. {advice}")
    if not divides:
        raise InputError(f"Expect number of query heads to be a multiple of kv heads for GQA but got Hq={heads} and Hkv={kv_heads}.")


def _autocast_dtype(query: Tensor) -> torch.dtype | None:
    kind = query.device.type
    if kind == "meta":
        return None
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return None


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _autocast_dtype(query)
    return (query, key, value) if dtype is None else (query.to(dtype), key.to(dtype), value.to(dtype))


def has_float8(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether keys or values are float8, beside a query that is not."""
    return (key.dtype in FLOAT8 or value.dtype in FLOAT8) and query.dtype in DTYPES


def widened(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """float8 keys and values in the query's dtype."""
    return key.to(query.dtype) if key.dtype in FLOAT8 else key, value.to(query.dtype) if value.dtype in FLOAT8 else value


def broadcast_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    if key.shape[0] == query.shape[0]:
        return key, value
    return key.expand(query.shape[0], -1, -1, -1), value.expand(query.shape[0], -1, -1, -1)


# -- masks, scores, dropout ------------------------------------------------------------------------------------------


def _learned(mask: Any, score: Any, device: torch.device) -> tuple[Any, list[ScoreFunction]]:
    """What is left of mask and score where no query meets a key: tensors that learn, whose gradients are 0. There is nothing to decide, and tensors that others
    load from may be empty."""
    bias = mask if isinstance(mask, Tensor) and mask.requires_grad else None
    return bias, [s for s in as_scores(score) if isinstance(s, Sinks) or _learns(s, device)]


def _learns(score: ScoreFunction, device: torch.device) -> bool:
    try:
        captures = trace_score((score,), torch.float32, device).captures
    except TraceError:  # a tensor without elements, say
        return False
    return any([t.requires_grad and t.numel() > 0 for t in captures])


def _with_causal(mask: Any, call: BoundProgram | None, tiles: TileMap | None, name: str, device: torch.device) -> tuple[BoundProgram, str]:
    """is_causal on top of whatever mask was given."""
    if tiles is not None:
        raise InputError("is_causal=True with a map of tiles: build the map from `masks.causal & mask` instead")
    if call is None:
        return causal.traced(), "causal"
    if callable(mask):
        return trace_mask(lambda b, h, q, kv: mask(b, h, q, kv) & (q >= kv), device), f"{name} & causal"
    allowed = broadcast_load(call.captures[0])
    return trace_mask(lambda b, h, q, kv: allowed(b, h, q, kv) & (q >= kv), device), f"{name} & causal"


def traced_scores(functions: tuple[ScoreFunction, ...], dtype: torch.dtype, device: torch.device) -> BoundProgram | None:
    if len(functions) == 1 and type(functions[0]) is Score:
        return functions[0].traced(dtype, device)
    return trace_score(functions, dtype, device) if functions else None


def in_memory(call: BoundProgram | None, device: torch.device) -> BoundProgram | None:
    """Captured tensors follow the query to its device, and are resolved there."""
    if call is None or not call.captures:
        return call
    captures = tuple([moved(t, device, "a tensor that a mask or score captures") for t in call.captures])
    same = all([t is original for t, original in zip(captures, call.captures, strict=True)])
    return call if same else call.with_captures(captures)


def _same_device(tiles: TileMap | None, device: torch.device) -> TileMap | None:
    if tiles is not None and tiles.device.type != device.type:
        raise InputError(f"Expect q/k/v and block_mask to be on the same device but got {device} and {tiles.device}; move the map with .to({str(device)!r})")
    return tiles


def check_sizes(given: list[Any], extent: Extent) -> None:
    """Masks and scores of this library know how many batch elements, heads, queries and keys they are made for."""
    sizes = dict(zip(INDICES, extent, strict=True))
    for function in given:
        if isinstance(function, Named):
            function.check_sizes(sizes)


def check_sinks(sinks: list[Tensor], query: Tensor) -> Tensor | None:
    if not sinks:
        return None
    if len(sinks) > 1:
        raise InputError(f"at most one scores.sinks can be given, got {len(sinks)}")
    if sinks[0].shape != (query.shape[1],):
        raise InputError(f"sinks must have one logit per query head: {query.shape[1]}, got shape {tuple(sinks[0].shape)}")
    check_dense(sinks[0], "sinks")
    return moved(sinks[0], query.device, "sinks")


def default_scale(head_dim: int) -> float:
    """Of a number: torch.compile(dynamic=True) may have a symbol, and would compile everything twice to get rid of it."""
    return 1.0 / math.sqrt(operator.index(head_dim))


def check_scale(scale: Any) -> float:
    """A number of whatever library; torch's symbols pass as they are."""
    if isinstance(scale, (float, int, torch.SymFloat, torch.SymInt)):
        symbol: Any = scale
        return symbol if torch.compiler.is_compiling() else float(scale)
    if isinstance(scale, Tensor) and (scale.requires_grad or torch.compiler.is_compiling()):  # its gradient would be lost, or its value is not known yet
        raise InputError("scale must be a number, got a tensor that is learned or compiled; such a scale is a score: score=lambda s, b, h, q, kv: s * scale")
    return _number(scale, "scale")


def _number(value: Any, name: str) -> float:
    """A number of whatever library as one of Python's."""
    if isinstance(value, (str, bytes)) or getattr(value, "shape", ()) != ():
        raise InputError(f"{name} must be a number (or an array or tensor of no dimensions), got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last: a tensor without contents
        raise InputError(f"{name} must be a number, got {type(value).__name__} {value!r}") from None


def _truth(value: Any, name: str) -> bool:
    if isinstance(value, (str, bytes)) or getattr(value, "shape", ()) != ():
        raise InputError(f"{name} must be True or False, got {value!r}")
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):  # the last: a tensor without contents
        raise InputError(f"{name} must be True or False, got {type(value).__name__} {value!r}") from None


def check_dropout(p: Any) -> float:
    p = p if isinstance(p, (float, int)) else _number(p, "dropout_p")
    if not 0.0 <= p <= 1.0:
        raise InputError(f"dropout_p must be from 0 to 1, got {p}")
    return 0.0 if p == 0 else float(p)


def check_seed(seed: Any) -> None:
    """Raises unless it is None, a whole number of whatever library, or a tensor of one."""
    if seed is None or type(seed) is int:
        return
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64:
            raise InputError(f"seed must be an int or a tensor with one int64, got {seed.dtype} of shape {tuple(seed.shape)}")
    elif not is_whole(seed):
        raise InputError(f"seed must be an int or a tensor with one int64, got {type(seed).__name__} {seed!r}")


def seed_tensor(seed: int | Tensor | None, dropout_p: float, device: torch.device) -> Tensor | None:
    """The seed as a tensor; without one, torch's own generator draws it, so that torch.manual_seed repeats it.

    It is drawn on the device: in a captured CUDA graph every replay draws another, and no copy waits for the host.
    """
    check_seed(seed)
    if dropout_p == 0.0:
        return None
    if seed is None:
        return torch.randint(0, 2**62, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return resolved(seed.reshape(()))
    if not 0 <= seed < 2**63:
        raise InputError(f"seed must be from 0 to 2**63 - 1, got {seed}")
    return torch.full((), seed, dtype=torch.int64, device=device)
