"""What an engine is: it refuses with a reason, or computes the forward and the backward of a problem."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.nn import Parameter

from tilewise.core.output import Gradients, Output
from tilewise.core.plan import Plan
from tilewise.core.problem import Problem

ALIGNED_NUMBERS = 64  # where parts of one piece of memory begin: 256 bytes


class Request(NamedTuple):
    """What was asked of an engine beyond the problem itself."""

    backend: str
    source: str  # where the backend was named
    needs_lse: bool
    seeded: bool  # the user fixed the dropout's seed


class Engine(ABC):
    name: str
    summary: str
    serves: ClassVar[Mapping[str, int]] = {}  # the intents ("auto", "flex", ...) it may be chosen for, and its place in the order in which engines are asked
    is_fused: ClassVar[bool] = True  # masked NaN stays out, and on a CPU it is at least as fast as torch's SDPA: native defers to it
    takes_dense_mask: ClassVar[bool] = False  # Problem.dense_mask
    takes_masks: ClassVar[bool] = True  # Problem.mask
    takes_pages: ClassVar[bool] = False  # Problem.pages
    looks_at_contents: ClassVar[bool] = False  # unless named, it may serve a masked problem because of what the tensors hold: the choice is not remembered
    is_torch_function: ClassVar[bool] = False  # forward() is made of torch's own operations: autograd and torch.compile see through it, backward() is theirs
    rounds_key_gradients: ClassVar[bool] = False  # those of keys and values have the query's dtype, also of a part (Problem.partial)
    min_keys_spared: ClassVar[int] = 256  # keys that a query must be spared to pay for permuted copies of query, key, value and output: measured on a CPU

    @abstractmethod
    def refuse(self, problem: Problem) -> str | None:
        """Why this engine cannot serve the problem, with the values at fault; None if it can."""

    def refuse_request(self, problem: Problem, request: Request) -> str | None:
        """Why it cannot give what was asked for beyond the problem; None if it can."""
        return None

    def defers(self, problem: Problem, others: "tuple[Engine, ...]") -> str | None:
        """Why another engine should serve a problem that this one could, unless it was asked for by name; `others` are the other candidates."""
        return None

    def says(self, problem: Problem) -> str:
        """What it does with a problem it serves."""
        return self.summary

    def tile(self, problem: Problem) -> tuple[int, int] | None:
        """Queries and keys of the tiles its forward leaves out where nothing is allowed; None if it computes everything."""
        return None

    def own_strips(self, problem: Problem) -> tuple[int, ...] | None:
        """The strips (frontend/token_order.py) in which it reads a grid's points by itself, without copies; None if it takes tokens as they come."""
        return None

    def plan(self, problem: Problem) -> Plan:
        """What it keeps for calls like this one."""
        return Plan()

    def is_capturable(self, problem: Problem) -> bool:
        """Whether inductor may capture a call like this one in its CUDA graphs, whose replays then follow what tensors contain; then `run_in_graphs` is how."""
        return False

    def run_in_graphs(self, device: torch.device, problem: Callable[[], Problem], call: Callable[[Plan | None], Any]) -> Any:
        """A call of the operator that inductor may put into its CUDA graphs: with a plan of its own, or None for any that is kept."""
        return call(None)

    @abstractmethod
    def forward(self, problem: Problem, plan: Plan) -> Output: ...

    @abstractmethod
    def backward(self, problem: Problem, plan: Plan, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
        """`wanted` are the slots of the score's captures whose gradient is asked for."""


def scalar_seed(problem: Problem) -> int:
    assert problem.seed is not None
    return int(problem.seed)


def like_query(query: Tensor, v_dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty (B, H, Sq, Dv) output whose dimensions lie in memory in the query's order, but for the last: as in torch, its stride is always 1. In the query's
    dtype unless another is given."""
    contiguous = query.is_contiguous()
    if contiguous and query.shape[3] == v_dim:
        return torch.empty_like(query, dtype=dtype)  # the quickest way
    shape = (*query.shape[:3], v_dim)
    if contiguous:
        return query.new_empty(shape, dtype=dtype)
    strides = query.stride()
    order = [*sorted(range(3), key=lambda d: (-strides[d], d)), 3]
    out = query.new_empty([shape[d] for d in order], dtype=dtype)
    return out.permute([order.index(d) for d in range(4)])


def attend_nothing(problem: Problem) -> Output:
    """The output where there are no keys (or no queries): out is 0, lse is -inf or, with a sink, the sink's logit."""
    p = problem
    lse = torch.full(p.query.shape[:3], -torch.inf, dtype=p.inner_dtype, device=p.device)  # [B, H, Sq]
    max_score = lse.clone()
    if p.sinks is not None:
        lse = p.sinks.to(p.inner_dtype).view(1, -1, 1).expand_as(lse).contiguous()
    return Output(like_query(p.query, p.v_dim, p.result_dtype).zero_(), lse, max_score)


NONE_WANTED: frozenset[int] = frozenset()  # of the score's captures: no gradient is asked for
NOTHING = torch.empty(0, device="cpu"), torch.empty(0, device="cpu")  # lse and max_score where there are none


class EmptyOutputs:
    """Makes empty outputs for queries that are laid out like the first, in as few and as quick calls of torch as there are."""

    def __init__(self, problem: Problem) -> None:
        query = problem.query
        out, like = like_query(query, problem.v_dim, problem.result_dtype), torch.empty_like(query)
        self._is_like_query = (out.shape, out.stride(), out.dtype) == (like.shape, like.stride(), like.dtype)
        self._shape, self._strides, self._dtype, self._device = tuple(out.shape), out.stride(), out.dtype, query.device
        self._rows = one_number(problem).expand(query.shape[:3])
        half = -(-self._rows.numel() // ALIGNED_NUMBERS) * ALIGNED_NUMBERS
        self._both, self._half_bytes = one_number(problem).expand(2 * half), half * self._rows.itemsize

    def __call__(self, query: Tensor, needs_lse: bool = True) -> tuple[Output, tuple[Tensor, Tensor, Tensor | int]]:
        """An output, and what kernels are to fill. They write lse and max_score, needed or not: where they are not, to one piece of memory, which is free again
        when what keeps it alive here is gone."""
        out = self.out(query)
        if needs_lse:
            output = Output(out, self.rows(), self.rows())
            return output, output
        room = torch.empty_like(self._both)
        return Output(out, *NOTHING), (out, room, room.data_ptr() + self._half_bytes)

    def out(self, query: Tensor) -> Tensor:
        if self._is_like_query:
            return torch.empty_like(query)
        return torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._device)

    def rows(self) -> Tensor:
        """For lse, or for the largest scores."""
        return torch.empty_like(self._rows)


def one_number(problem: Problem) -> Tensor:
    """To make contiguous tensors of any shape from, for lse and max_score: the quickest way."""
    return torch.empty((), dtype=problem.inner_dtype, device=problem.device)


def rows_are_aligned(t: Tensor) -> bool:
    """Whether rows of consecutive elements begin on 16 bytes, as loads of 16 bytes need it. torch.compile and torch.func know no addresses: there,
    they are taken to be good, and an engine has to look again when it runs."""
    known = torch.compiler.is_compiling() or peek_interpreter_stack() is not None or t.data_ptr() % 16 == 0
    return known and t.stride(3) == 1 and all([s * t.element_size() % 16 == 0 for s in t.stride()[:3]])


def sinks_gradient(problem: Problem, output: Output, delta: Tensor) -> Tensor | None:
    """-sum over batch and rows of delta * exp(sink - lse): the sink's weight in the softmax, times the shared part of dS."""
    if problem.sinks is None:
        return None
    sinks = problem.sinks.to(output.lse.dtype).view(1, -1, 1)
    weight = torch.where(output.lse == -torch.inf, 0.0, torch.exp(sinks - output.lse))
    return -(weight * delta).sum((0, 2)).to(problem.sinks.dtype)


PLAIN = (Tensor, Parameter)


def is_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether nothing but eager autograd watches these tensors: no torch.compile, fake tensors, tensor subclasses or torch.func transforms."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all([type(t) in PLAIN for t in tensors])
