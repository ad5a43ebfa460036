"""Products in which what is not attended cannot be heard: 0 * NaN is NaN, so masked NaNs must be left out, not multiplied."""

import torch
from torch import Tensor


def mix(weights: Tensor, values: Tensor, attended: Tensor | None) -> Tensor:
    """weights @ values, where weights are 0 wherever `attended` is false and values there must not matter.

    `attended` is None where every element is. Finite values take the plain product.
    """
    finite = values.isfinite()
    if attended is None or bool(finite.all()):
        return weights @ values
    total = weights @ torch.where(finite, values, 0)
    heard = attended.to(weights.dtype)
    nan = heard @ values.isnan().to(weights.dtype) > 0
    above = heard @ values.isposinf().to(weights.dtype) > 0
    below = heard @ values.isneginf().to(weights.dtype) > 0
    total = torch.where(above, torch.inf, torch.where(below, -torch.inf, total))
    return torch.where(nan | (above & below), torch.nan, total)
