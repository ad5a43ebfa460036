"""What an engine is: it refuses with a reason, or computes the forward and the backward of a problem."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.problem import Problem


class Output(NamedTuple):
    """out (B, H, Sq, Dv) in the query's dtype; lse and the highest score of each row (B, H, Sq), fp32 or fp64, natural logarithm."""

    out: Tensor
    lse: Tensor
    highest: Tensor


AGAIN = "again"  # where the memory of a remembered call has a short way, or None as long as its engine has left none
Again = Callable[[Tensor, Tensor, Tensor], Output | None]  # the forward of query, key and value like the problem's; None: take the long way


@dataclass
class Gradients:
    """Gradients of the inputs; those of the score's captures by slot."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None
    captures: dict[int, Tensor] = field(default_factory=dict)


class Engine(ABC):
    name: str
    summary: str
    copies_worth = 256  # keys that a query must be spared to pay for copies of query, key, value and output in another order: measured on a CPU

    @abstractmethod
    def refuse(self, problem: Problem) -> str | None:
        """Why this engine cannot serve the problem, with the values at fault; None if it can."""

    def says(self, problem: Problem) -> str:
        """What it does with a problem it serves."""
        return self.summary

    def tile(self, problem: Problem) -> tuple[int, int] | None:
        """Queries and keys of the tiles its forward leaves out where nothing is allowed; None if it computes everything."""
        return None

    def own_strips(self, problem: Problem) -> tuple[int, ...] | None:
        """The strips (order.py) in which it reads a grid's points by itself, without copies; None if it takes tokens as they come."""
        return None

    @abstractmethod
    def forward(self, problem: Problem) -> Output: ...

    @abstractmethod
    def backward(self, problem: Problem, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
        """`wanted` are the slots of the score's captures whose gradient is asked for."""


def scalar_seed(problem: Problem) -> int:
    assert problem.seed is not None
    return int(problem.seed)


def like_query(query: Tensor, v_dim: int) -> Tensor:
    """An empty (B, H, Sq, Dv) output whose dimensions lie in memory in the query's order."""
    contiguous = query.is_contiguous()
    if contiguous and query.shape[3] == v_dim:
        return torch.empty_like(query)  # the quickest way
    shape = (*query.shape[:3], v_dim)
    if contiguous:
        return query.new_empty(shape)
    strides = query.stride()
    order = sorted(range(4), key=lambda d: (-strides[d], d))
    out = query.new_empty([shape[d] for d in order])
    return out.permute([order.index(d) for d in range(4)])


def like_rows(query: Tensor) -> Tensor:
    """A (B, H, Sq) tensor of one number, to make contiguous float32 tensors of that shape from: the quickest way."""
    return torch.empty((), dtype=torch.float32, device=query.device).expand(query.shape[:3])


def on_boundaries(t: Tensor) -> bool:
    """Whether rows of consecutive elements begin on 16 bytes, as copies of 16 bytes need it. torch.compile knows no addresses: there, they are taken
    to be good, and an engine has to look again when it runs."""
    known = torch.compiler.is_compiling() or t.data_ptr() % 16 == 0
    return known and t.stride(3) == 1 and all([s * t.element_size() % 16 == 0 for s in t.stride()[:3]])
