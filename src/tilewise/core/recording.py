"""Work out of sight of selective activation checkpointing.

Its modes keep the results of operations in the forward, by operation and in order, and hand them out again when the backward repeats the region. What is
computed once and then remembered (the reading of a mask tensor, the trace of a mask, a plan) is not repeated, and would shift the results of all that follows.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NOTHING: AbstractContextManager[Any] = nullcontext()


def unrecorded() -> AbstractContextManager[Any]:
    """For work whose results outlive the call."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() == 0:
        return _NOTHING
    from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    checkpoints = any([isinstance(mode, (_CachedTorchDispatchMode, _CachingTorchDispatchMode)) for mode in _get_current_dispatch_mode_stack()])
    return _disable_current_modes() if checkpoints else _NOTHING
