"""Questions about sizes. torch.compile and torch.export cannot answer them all: what depends on a tensor's contents is known when the graph runs."""

from collections.abc import Sequence
from typing import Any

import torch


def equal(a: Any, b: Any) -> bool:
    """a == b; false where it cannot be known yet. Whoever asks must be right then, too."""
    if not torch.compiler.is_compiling():
        return bool(a == b)
    from torch.fx.experimental import symbolic_shapes  # imports sympy

    known = getattr(symbolic_shapes, "guard_or_false", symbolic_shapes.guard_size_oblivious)  # new in torch 2.8
    return bool(known(a == b))


def less(a: Any, b: Any) -> bool:
    """a < b; false where it cannot be known yet."""
    if not torch.compiler.is_compiling():
        return bool(a < b)
    from torch.fx.experimental import symbolic_shapes  # imports sympy

    known = getattr(symbolic_shapes, "guard_or_false", symbolic_shapes.guard_size_oblivious)  # new in torch 2.8
    return bool(known(a < b))


def broadcasts(shape: Sequence[Any], sizes: Sequence[Any]) -> bool:
    """Whether a tensor of this shape stands for one of these sizes, aligned to the right as torch does."""
    pairs = zip(reversed(shape), reversed(sizes), strict=False)
    if not torch.compiler.is_compiling():
        return len(shape) <= len(sizes) and not any([have not in (1, want) for have, want in pairs])
    return len(shape) <= len(sizes) and all([equal(have, 1) or equal(have, want) for have, want in pairs])
