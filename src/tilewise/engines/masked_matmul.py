"""A matrix product that ignores NaN and Inf in masked positions, which a weight of 0 does not: 0 * NaN is NaN."""

import torch
from torch import Tensor


def masked_matmul(weights: Tensor, values: Tensor, attended: Tensor | None) -> Tensor:
    """weights @ values, [..., M, K] @ [..., K, N], for weights that are 0 wherever `attended` [..., M, K] is false: values there have no effect.

    `attended` is None if every position is. If all values are finite, this is the plain product.
    """
    finite = values.isfinite()
    if attended is None or bool(finite.all()):
        return weights @ values
    total = weights @ torch.where(finite, values, 0)
    attends = attended.to(weights.dtype)
    nan = attends @ values.isnan().to(weights.dtype) > 0
    above = attends @ values.isposinf().to(weights.dtype) > 0
    below = attends @ values.isneginf().to(weights.dtype) > 0
    total = torch.where(above, torch.inf, torch.where(below, -torch.inf, total))
    return torch.where(nan | (above & below), torch.nan, total)
