"""Scores: changes to s = scale * q.k before the mask and the softmax.

A score is a function f(score, b, h, q, kv) that returns the new score; several apply in the order given:

    tw.attention(q, k, v, score=[scores.alibi(8), scores.softcap(30.0)])

Tensors they capture may require grad.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tilewise.errors import InputError
from tilewise.lang import BoundProgram, name_of, trace_score
from tilewise.masks.expressions import broadcast_load
from tilewise.masks.mask import is_causal_bias
from tilewise.named import Covers, Named, check_whole, counted, covers, is_whole, named

__all__ = ["Score", "ScoreFunction", "Sinks", "alibi", "alibi_slopes", "as_score", "bias", "distance_decay", "relative_bias", "sinks", "softcap"]

ScoreFunction = Callable[[Any, Any, Any, Any, Any], Any]
"""f(score, b, h, q, kv): the new score of query q and key kv in head h of batch element b."""


class Score(Named):
    """A score function with a name. It is traced wherever a plain function would be; if it is `fixed` and holds numbers alone, once."""

    _trace: tuple[torch.dtype, BoundProgram] | None = None  # and the precision of scores that it is for

    def __init__(self, function: ScoreFunction, label: str, *parameters: Any, covers: tuple[Covers, ...] = ()) -> None:
        self.function = function
        self.covers = covers
        self._label = label
        self._parameters = parameters

    @property
    def name(self) -> str:
        """What the score does, with its parameters: `softcap(30.0)`."""
        return f"{self._label}({', '.join(map(str, self._parameters))})" if self._parameters else self._label

    @counted
    def __call__(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.function(score, b, h, q, kv)

    def __repr__(self) -> str:
        return f"Score({self.name})"

    def traced(self, dtype: torch.dtype, device: torch.device) -> BoundProgram:
        """What trace_score makes of it alone."""
        if self._trace is not None and self._trace[0] == dtype and not torch.compiler.is_compiling():
            return self._trace[1]
        trace = trace_score((self,), dtype, device)
        if self.fixed and not trace.captures and not torch.compiler.is_compiling():
            self._trace = (dtype, trace)
        return trace


class Sinks(Score):
    """One logit per query head, which enters the softmax's denominator but has no value."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(_unchanged, "sinks")
        self.logits = logits


def _unchanged(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score


@named
def sinks(logits: Tensor) -> Sinks:
    """Attention sinks: softmax over the keys' scores and logits[h]; `lse` includes the sink."""
    if not isinstance(logits, Tensor) or logits.dim() != 1 or not logits.is_floating_point():
        given = f"{logits.dtype} of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise InputError(f"sinks takes one logit per query head, a float (H,) tensor, got {given}")
    return Sinks(logits)


@named
def alibi(heads: int | Tensor) -> Score:
    """score - slope[h] * (q - kv): slopes of the ALiBi paper for a number of heads, or a tensor of your own."""
    if not isinstance(heads, Tensor) and not is_whole(heads):
        raise InputError(f"alibi takes a number of heads or a float (H,) tensor, got {type(heads).__name__}")
    slopes = heads if isinstance(heads, Tensor) else alibi_slopes(heads)
    if slopes.dim() != 1 or not slopes.is_floating_point():
        raise InputError(f"alibi takes a number of heads or a float (H,) tensor, got {slopes.dtype} of shape {tuple(slopes.shape)}")
    return Score(lambda score, b, h, q, kv: score + slopes[h] * (kv - q), "alibi", slopes.shape[0], covers=covers("alibi", h=len(slopes)))


def alibi_slopes(heads: int) -> Tensor:
    """2^(-8/n), 2^(-16/n), ... for n heads; if n is no power of two, interleaved with the next power's, as in the paper."""
    if heads < 1:
        raise InputError(f"alibi takes at least one head, got {heads}")
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (k + 1) / power) for k in range(power)]
    slopes += [2.0 ** (-4.0 * (k + 1) / power) for k in range(0, 2 * (heads - power), 2)]
    return torch.tensor(slopes)


@named
def softcap(cap: float) -> Score:
    """cap * tanh(score / cap)."""
    if not cap > 0:
        raise InputError(f"softcap takes a positive cap, got {cap}")
    return Score(lambda score, b, h, q, kv: cap * torch.tanh(score / cap), "softcap", cap)


@named
def relative_bias(table: Tensor, *, buckets: str | None = None, bidirectional: bool = True, max_distance: int = 128) -> Score:
    """A learned bias by head and relative position.

    `table` is (H, 2 * reach + 1), entry reach + q - kv; farther positions use the edge. With buckets="t5" it is T5's
    (num_buckets, H) embedding, with `bidirectional` and `max_distance` as in T5.
    """
    if table.dim() != 2:
        raise InputError(f"relative_bias takes a 2-D table, got shape {tuple(table.shape)}")
    if buckets is None:
        if table.shape[1] % 2 == 0:
            raise InputError(f"relative_bias takes a (H, 2 * reach + 1) table, got shape {tuple(table.shape)}")
        reach = table.shape[1] // 2
        known = covers("relative_bias", h=len(table))
        return Score(lambda score, b, h, q, kv: score + table[h, (q - kv).clamp(-reach, reach) + reach], "relative_bias", reach, covers=known)
    if buckets != "t5":
        raise InputError(f"relative_bias: buckets is None or 't5', got {buckets!r}")
    check_whole("relative_bias", max_distance=max_distance)
    return t5_bias(table, t5_buckets(table.shape[0], max_distance, bidirectional).to(table.device))


@named
def t5_bias(table: Tensor, bucket_of: Tensor) -> Score:
    """relative_bias(table, buckets="t5"), with the buckets of relative positions that t5_buckets found."""
    reach = len(bucket_of) // 2

    def biased(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + table[bucket_of[(kv - q).clamp(-reach, reach) + reach], h]

    return Score(biased, "relative_bias", "t5", table.shape[0], covers=covers("relative_bias", h=table.shape[1]))


def t5_buckets(count: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bucket of every relative position kv - q from -max_distance to max_distance."""
    distance = torch.arange(-max_distance, max_distance + 1)
    offset = torch.zeros_like(distance)
    if bidirectional:
        count //= 2
        offset = (distance > 0).long() * count
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = count // 2
    if not 1 <= exact < max_distance:
        raise InputError(f"t5 buckets: half of {count} buckets per direction must be at least 1 and below max_distance={max_distance}")
    large = exact + (torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (count - exact)).long()
    return offset + torch.where(distance < exact, distance, large.clamp(max=count - 1))


@named
def bias(tensor: Tensor) -> Score:
    """score + tensor, broadcast from the right over (b, h, q, kv) as torch broadcasts."""
    if is_causal_bias(tensor):
        raise InputError("bias takes a tensor with contents; torch's CausalBias, which has none, goes to mask=")
    if not isinstance(tensor, Tensor) or not 1 <= tensor.dim() <= 4 or not tensor.is_floating_point():
        given = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InputError(f"bias takes a float tensor that broadcasts to (B, H, Sq, Skv), got {given}")
    load = broadcast_load(tensor)
    axes = zip(("b", "h", "q", "kv")[4 - tensor.dim() :], tensor.shape, strict=True)
    known = tuple([Covers("bias", axis, size) for axis, size in axes if size != 1])
    return Score(lambda score, b, h, q, kv: score + load(b, h, q, kv), "bias", *tensor.shape, covers=known)


@named
def distance_decay(rate: float | Tensor) -> Score:
    """score - rate * |q - kv|; `rate` may be one per head."""
    if isinstance(rate, Tensor) and rate.dim() == 1:
        known = covers("distance_decay", h=len(rate))
        return Score(lambda score, b, h, q, kv: score - rate[h] * (q - kv).abs(), "distance_decay", "per head", covers=known)
    if isinstance(rate, Tensor) and rate.dim() != 0:
        raise InputError(f"distance_decay takes a number, a 0-d tensor or one rate per head, got shape {tuple(rate.shape)}")
    return Score(lambda score, b, h, q, kv: score - rate * (q - kv).abs(), "distance_decay", "learned" if isinstance(rate, Tensor) else rate)


def as_score(function: ScoreFunction) -> Score:
    """A plain score function as a Score, to give it a name and to have what it captures copied with a module."""
    if isinstance(function, Score):
        return function
    if not callable(function):
        raise InputError(f"a score is a function of (score, b, h, q, kv), got {type(function).__name__}")
    return Score(function, name_of(function).strip("'"))


def as_scores(given: ScoreFunction | Sequence[ScoreFunction] | None) -> tuple[ScoreFunction, ...]:
    """One score, several, or none, as a tuple."""
    if given is None:
        return ()
    if isinstance(given, (list, tuple)):
        return tuple(given)
    return (cast(ScoreFunction, given),)
