"""Modules for attention whose masks and scores follow them.

A score holds the very tensor it was made of: one that was made once, when a module was, does not see that the module has been given other parameters
(`load_state_dict(assign=True)`, `module.table = ...`, torch.func.functional_call). The modules here own their parameters and make the score from them at every
forward, which takes a few microseconds; the call cache serves such calls like any others:

    self.bias = tilewise.nn.RelativeBias(heads=8, reach=128)
    ...
    out = tilewise.attention(q, k, v, score=self.bias())
"""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter, init

from tilewise import scores
from tilewise.attention import attention
from tilewise.errors import InputError
from tilewise.masks import as_mask
from tilewise.scores import Score, ScoreFunction, as_scores

__all__ = ["ALiBi", "Attention", "RelativeBias", "Sinks", "T5Bias"]


class Attention(Module):
    """tilewise.attention with a mask and scores of its own, and without parameters but theirs: projections are yours.

    Arguments that are not listed are those of tilewise.attention.

    Args:
        mask: As for tilewise.attention. A module is called without arguments at every forward and returns the mask.
        score: As for tilewise.attention. Modules among the scores, those of tilewise.nn or your own, are called likewise. Functions are copied with what they
            capture when the module is deep-copied.
        dropout_p: In training only.
    """

    mask: Any

    def __init__(
        self,
        *,
        mask: Any = None,
        score: Module | ScoreFunction | Sequence[Module | ScoreFunction] | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        enable_gqa: bool = False,
        layout: str = "bhsd",
        heads: int | None = None,
        backend: str | None = None,
        deterministic: bool | None = None,
    ) -> None:
        super().__init__()
        if isinstance(mask, Tensor) and not isinstance(mask, Parameter):
            self.register_buffer("mask", mask, persistent=False)
        else:
            self.mask = as_mask(mask) if callable(mask) and not isinstance(mask, Module) else mask
        self.scores = ModuleList([s if isinstance(s, Module) else _Given(s) for s in as_scores(score)])
        self.dropout_p = dropout_p
        self.options: dict[str, Any] = {
            "scale": scale,
            "is_causal": is_causal,
            "enable_gqa": enable_gqa,
            "layout": layout,
            "heads": heads,
            "backend": backend,
            "deterministic": deterministic,
        }

    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Any = None,
        score: ScoreFunction | Sequence[ScoreFunction] | None = None,
        return_lse: Literal[False] = False,
        seed: int | Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Any = None,
        score: ScoreFunction | Sequence[ScoreFunction] | None = None,
        return_lse: Literal[True],
        seed: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Any = None,
        score: ScoreFunction | Sequence[ScoreFunction] | None = None,
        return_lse: bool,
        seed: int | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]: ...

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Any = None,
        score: ScoreFunction | Sequence[ScoreFunction] | None = None,
        return_lse: bool = False,
        seed: int | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """A mask given here and its own both have to allow; scores given here come after its own."""
        own = self.mask() if isinstance(self.mask, Module) else self.mask
        if own is not None and mask is not None:
            mask = as_mask(own) & mask
        dropout_p = self.dropout_p if self.training else 0.0
        changes = [*[made() for made in self.scores], *as_scores(score)]
        return attention(
            query,
            key,
            value,
            mask=own if mask is None else mask,
            score=changes if changes else None,
            dropout_p=dropout_p,
            return_lse=return_lse,
            seed=seed,
            **self.options,
        )

    def extra_repr(self) -> str:
        said = {"mask": None if isinstance(self.mask, (Module, Tensor)) else self.mask, "dropout_p": self.dropout_p} | self.options
        return ", ".join([f"{name}={value}" for name, value in said.items() if value not in (None, False, 0.0, "bhsd")])


class _Given(Module):
    """A score function among modules."""

    def __init__(self, function: ScoreFunction) -> None:
        super().__init__()
        self.score = scores.as_score(function)

    def forward(self) -> Score:
        return self.score

    def extra_repr(self) -> str:
        return self.score.name


class RelativeBias(Module):
    """A learned bias by head and relative position, up to `reach` away; farther positions use the edge. It starts at 0."""

    def __init__(self, heads: int, reach: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if heads < 1 or reach < 0:
            raise InputError(f"RelativeBias takes at least 1 head and a reach of at least 0, got {heads} and {reach}")
        self.table = Parameter(torch.empty(heads, 2 * reach + 1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.zeros_(self.table)

    def forward(self) -> Score:
        return scores.relative_bias(self.table)

    def extra_repr(self) -> str:
        return f"heads={self.table.shape[0]}, reach={self.table.shape[1] // 2}"


class T5Bias(Module):
    """T5's learned bias by head and bucket of relative positions. `table` is (buckets, heads), as T5's `relative_attention_bias.weight`. It starts at 0."""

    bucket_of: Tensor

    def __init__(
        self, heads: int, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True, *, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self.table = Parameter(torch.empty(buckets, heads, device=device, dtype=dtype))
        self.register_buffer("bucket_of", None, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.zeros_(self.table)
        self.bucket_of = scores.t5_buckets(self.table.shape[0], self.max_distance, self.bidirectional).to(self.table.device)

    def forward(self) -> Score:
        return scores.t5_bias(self.table, self.bucket_of)

    def extra_repr(self) -> str:
        return f"heads={self.table.shape[1]}, buckets={self.table.shape[0]}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


class ALiBi(Module):
    """score - slope[h] * (q - kv), with the slopes of the ALiBi paper in a buffer: nothing is learned."""

    slopes: Tensor

    def __init__(self, heads: int, *, device: Any = None) -> None:
        super().__init__()
        self.register_buffer("slopes", scores.alibi_slopes(heads).to(device), persistent=False)

    def reset_parameters(self) -> None:
        self.slopes = scores.alibi_slopes(len(self.slopes)).to(self.slopes.device)

    def forward(self) -> Score:
        return scores.alibi(self.slopes)

    def extra_repr(self) -> str:
        return f"heads={len(self.slopes)}"


class Sinks(Module):
    """One learned logit per query head in the softmax's denominator. It starts at 0."""

    def __init__(self, heads: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.logits = Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.zeros_(self.logits)

    def forward(self) -> scores.Sinks:
        return scores.sinks(self.logits)

    def extra_repr(self) -> str:
        return f"heads={len(self.logits)}"
