"""Which forwards take maxima only until every row has one, and keep them as anchors for all later keys (docs/kernels/softmax.md). Nothing here needs Triton."""

import torch

from tilewise.core.problem import Problem
from tilewise.engines.gpu.mods import inner_score


def is_anchored(p: Problem) -> bool:
    """bfloat16 has float32's range, in which weights may grow; float16 has no room for that, and float32 would lose accuracy. A score function can make
    weights rise by any factor from one tile to the next, for every row; one that only multiplies is a scale."""
    return p.dtype == torch.bfloat16 and not p.max_scores and inner_score(p) is None
