"""The plan: what an engine keeps between "what is asked" (Problem) and "run", for calls that are alike.

What makes a repeated call quick is kept in three layers. Each has its key in one place, with the reason why it is complete:

    call        frontend/call_key.py           CallKey        -> CachedCall (call_cache.py): engine, problem without its tensors, plan
    contents    core/map_cache.py              contents_key   -> tile maps, and the launches that hold a map's addresses
    structure   engines/gpu/kernel_cache.py    KernelRequest  -> compiled kernels
                engines/triton/fitting.py      FitKey         -> tile sizes that fit the GPU
                engines/gpu/mods.py            key in _function -> generated mask and score functions
                engines/cpp/libraries.py       Unit           -> compiled C++

A plan lives as long as the cached call it belongs to, or for one call where that cannot be remembered.
"""

from collections.abc import Hashable

from torch import Tensor

from tilewise.core.output import Output


class Plan:
    """What one engine has prepared for calls that are alike. Engines that prepare nothing use this one."""

    by_name = False  # the engine was asked for by name: where it finds out late that it cannot serve, it raises instead of handing the call on

    def replay(self, query: Tensor, key: Tensor, value: Tensor, mask_sources: tuple[Tensor, ...], needs_lse: bool = True) -> Output | None:
        """The forward of a call like an earlier one, from its tensors alone (`mask_sources` as Problem has them); None where the engine has to run. lse and
        max_score may be empty where they are not needed."""
        return None

    def replay_backward(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, mask_sources: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The gradients of query, key and value of a call like an earlier one, where nothing else is wanted and only the output has a gradient; None where the
        engine has to run."""
        return None


def layouts(query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor) -> tuple[Hashable, ...]:
    """Shapes, dtypes and strides of what a backward is given: part of the name of whatever holds them packed. Saved tensors may come back otherwise laid out
    than they went (offloading does that), and the gradient of the output is anybody's."""
    return (
        query.shape,
        key.shape,
        value.shape,
        out.shape,
        lse.shape,
        query.dtype,
        key.dtype,
        value.dtype,
        out.dtype,
        lse.dtype,
        grad_out.dtype,
        query.stride(),
        key.stride(),
        value.stride(),
        out.stride(),
        lse.stride(),
        grad_out.stride(),
    )
