"""Calls inside `with tilewise.distributed.context(plan):`, for models whose code cannot be touched.

The scope is the process's, not the thread's: autograd recomputes checkpointed layers on threads of its own. A process is one rank.
"""

from typing import Any, Protocol

from torch import Tensor

from tilewise.core.problem import Options


class SharedSequence(Protocol):
    """What takes the place of attention() where several ranks share a sequence."""

    local_length: int  # tokens of this rank

    def holds(self, query: Tensor, key: Tensor, layout: str, heads: int | None) -> bool:
        """Whether a call is of this rank's tokens to the whole sequence. Others (cross attention to keys that every rank has) run as they are."""

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, score: Any, options: Options, layout: str, heads: int | None, backend: str | None, lse: bool
    ) -> Any:
        """As tilewise.attention, with the plan's mask."""


scopes: list[SharedSequence] = []  # the innermost last
