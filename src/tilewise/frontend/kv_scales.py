"""Scales of keys and values that were stored as float8: what they were divided by, one number or one for each kv head.

Those of keys multiply the scores: a number as a part of the scale, others as the first score function. Those of values multiply the output, in the kernels
where values are in pages and the scale is a number.
"""

import math
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.problem import Options, default_scale
from tilewise.errors import InputError
from tilewise.scores import Score, as_scores

Scale = float | Tensor | None


class KvScales(NamedTuple):
    """Checked: numbers, or float32 tensors [kv heads] on the query's device."""

    key: Scale
    value: Scale

    def applied(self, query: Tensor, score: Any, options: Options) -> tuple[Any, Options]:
        """Scores and options with the keys' scale, of a query [B, H, Sq, D]."""
        if self.key is None:
            return score, options
        if isinstance(self.key, float):
            scale = default_scale(query.shape[3]) if options.scale is None else options.scale
            return score, options._replace(scale=self.key * scale)
        k_scale, ratio = self.key, query.shape[1] // self.key.shape[0]
        return [Score(lambda s, b, h, q, kv: s * k_scale[h // ratio], "k_scale"), *as_scores(score)], options

    def number_of_values(self) -> tuple[float, "KvScales"]:
        """The values' scale if it is a number, which kernels can apply, and what is left to others."""
        return (self.value, KvScales(self.key, None)) if isinstance(self.value, float) else (1.0, self)

    def of_output(self, out: Tensor) -> Tensor:
        """[B, H, Sq, Dv] times the scale of each head's values."""
        if self.value is None:
            return out
        if isinstance(self.value, float):
            return out * self.value
        return (out * self.value.repeat_interleave(out.shape[1] // self.value.shape[0]).view(1, -1, 1, 1)).to(out.dtype)


def kv_scales(k_scale: Any, v_scale: Any, kv_heads: int, device: torch.device) -> KvScales:
    return KvScales(checked_scale(k_scale, kv_heads, "k_scale", device), checked_scale(v_scale, kv_heads, "v_scale", device))


def checked_scale(given: Any, kv_heads: int, name: str, device: torch.device) -> Scale:
    """Raises unless it is a scale. What a tensor holds is not looked at: on a GPU that would wait for all work before."""
    if given is None:
        return None
    if type(given) is not bool and isinstance(given, Real):
        number = float(given)
        if not 0 < number < math.inf:
            raise InputError(f"{name} is what keys or values were divided by, a number above 0, got {given}")
        return number
    if not isinstance(given, Tensor) or not given.is_floating_point() or given.shape not in ((), (1,), (kv_heads,)):
        what = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise InputError(f"{name} must be a number, or a float tensor with one for each of the {kv_heads} kv heads, got {what}")
    return given.to(device=device, dtype=torch.float32).expand(kv_heads)
