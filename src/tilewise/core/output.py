"""What engines return."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Output(NamedTuple):
    """out (B, H, Sq, Dv) in the problem's result_dtype; lse and the largest score of each row (B, H, Sq), fp32 or fp64, natural logarithm. The latter may be
    empty, or anything, where nobody asked for it (`Problem.max_scores`)."""

    out: Tensor
    lse: Tensor
    max_score: Tensor


@dataclass
class Gradients:
    """Gradients of the inputs; those of the score's captures by slot."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None
    captures: dict[int, Tensor] = field(default_factory=dict)
