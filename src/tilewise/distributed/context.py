"""`with context(plan):` lets tilewise.attention and the integrations find the plan, for models whose code cannot be touched."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tilewise.core.folders import warn_once
from tilewise.core.problem import LAYOUTS, Options
from tilewise.distributed.plan import MaskPlan, Plan
from tilewise.distributed.run import attend
from tilewise.errors import InputError
from tilewise.frontend.shared_sequence import scopes


@contextmanager
def context(plan: Plan | MaskPlan) -> Iterator[None]:
    """Inside the block, calls of tilewise.attention whose queries and keys are this rank's tokens attend to the whole sequence, with the plan's mask; so do
    those of tilewise's flex_attention and scaled_dot_product_attention. Torch's own scaled_dot_product_attention does not, unless
    tilewise.intercept_sdpa() or integrations.route(model) brings its calls here.

    The mask of such a call must be None, or the one the plan was made of: one made of local tokens would mean something else. Of a plan with several masks,
    transformers' layers take the one named like their type ("full_attention", "sliding_attention"). Where activations are checkpointed, the backward
    has to run inside the block too. Gradients of tensors that scores capture (sinks, learned biases) are this rank's part, as those of all other parameters:
    DDP and FSDP average them.
    """
    scopes.append(_Scope(plan))
    try:
        yield
    finally:
        scopes.pop()


class _Scope:
    def __init__(self, plan: Plan | MaskPlan) -> None:
        self._whole = plan if isinstance(plan, Plan) else plan.whole
        self.local_length = self._whole.local_length
        self._parts = plan.masks if isinstance(plan, Plan) else {plan.name: plan}

    def holds(self, query: Tensor, key: Tensor, layout: str, heads: int | None) -> bool:
        at = 1 if heads is not None else LAYOUTS[layout][2] if layout in LAYOUTS else 2
        if not query.dim() > at < key.dim() or query.shape[at] != key.shape[at]:
            return False
        if query.shape[at] != self.local_length:
            warn_once(
                f"inside tilewise.distributed.context, {query.shape[at]} tokens attend to one another on this rank alone, because the plan gives it "
                f"{self.local_length}. That is right for a text encoder, say; tokens of the shared sequence must be those of plan.shard"
            )
        return bool(query.shape[at] == self.local_length)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, score: Any, options: Options, layout: str, heads: int | None, backend: str | None, lse: bool
    ) -> Any:
        return attend(
            self._whole, lambda: self._part(mask, options.is_causal), query, key, value, score, options, layout, heads, backend, lse, captures="partial"
        )

    def _part(self, mask: Any, is_causal: bool) -> MaskPlan:
        if isinstance(mask, str):
            if mask not in self._parts:
                raise InputError(f"the plan has no mask {mask!r}; it has {', '.join([repr(n) for n in self._parts])}")
            return self._parts[mask]
        found = [part for part in self._parts.values() if mask is None or mask is part.given]
        if not found:
            raise InputError("inside tilewise.distributed.context the plan's mask is used: pass mask=None, or the mask (or its name) that the plan was made of")
        if len(found) > 1:
            raise InputError(f"the plan has several masks: pass mask= with one of them, or its name: {', '.join([repr(n) for n in self._parts])}")
        if is_causal and not found[0].causal:
            raise InputError(f"is_causal=True, but the plan's mask {found[0].name!r} lets queries attend to later keys: make the plan with masks.causal & mask")
        return found[0]
