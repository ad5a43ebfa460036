"""Which forwards take maxima only until every row has one, and keep them as anchors for all later keys (docs/kernels/softmax.md). Nothing here needs Triton."""

import torch

from tilewise.core.problem import Problem

ENABLED = False
SCORED = False  # whether problems with a score function are anchored too: it can make weights rise by any factor from one tile to the next


def is_anchored(p: Problem) -> bool:
    """bfloat16 has float32's range, in which weights may grow; float16 has no room for that, and float32 would lose accuracy."""
    return ENABLED and p.dtype == torch.bfloat16 and (SCORED or p.score is None)
