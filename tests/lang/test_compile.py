"""Under torch.compile a function is traced as it is without, and what it must not do is refused there too."""

# ruff: noqa: SIM300 - numbers on the left are part of what is tested

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.errors import TraceError
from tilewise.lang import BoundProgram, trace_score
from tilewise.lang.stand_ins import STANDS_IN

ROW = torch.zeros(5)


def compiled(function: Callable[..., Any], fullgraph: bool) -> Tensor:
    """The first tensor captured, with the function traced inside a compiled one."""
    torch._dynamo.reset()

    def traced(x: Tensor) -> Tensor:
        call: BoundProgram = trace_score((function,))
        return call.captures[0] + x

    return torch.compile(traced, backend="eager", fullgraph=fullgraph)(torch.zeros(()))


def assigns_an_item(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    ROW[0] = 1.0
    return s + ROW[q]


def assigns_by_operator(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    operator.setitem(ROW, slice(None), 1.0)
    return s + ROW[q]


def assigns_an_item_at_a_symbol(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    ROW[q] = 1.0
    return s + ROW[q]


def assigns_an_item_of_a_symbol(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    s[0] = 1.0
    return s + ROW[q]


def assigns_an_item_of_its_own(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    table = torch.zeros(5)
    table[0] = 1.0
    return s + table[q] + ROW[q]


def augments_an_item(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    ROW[1:] += 1.0
    return s + ROW[q]


def assigns_a_row(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    ROW[1:].fill_(1.0)
    return s + ROW[q]


def augments(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    table = ROW
    table += 1.0
    return s + table[q]


WRITES: dict[str, Callable[..., Any]] = {
    "method": lambda s, b, h, q, kv: s + ROW.add_(1)[q],
    "method of a method": lambda s, b, h, q, kv: s + ROW.mul(2).exp_()[q],
    "copy": lambda s, b, h, q, kv: s + ROW.copy_(ROW + 1)[q],
    "item": assigns_an_item,
    "item by an operator": assigns_by_operator,
    "item at a symbol": assigns_an_item_at_a_symbol,
    "item of a symbol": assigns_an_item_of_a_symbol,
    "item of its own": assigns_an_item_of_its_own,
    "item augmented": augments_an_item,
    "part": assigns_a_row,
    "initialisation": lambda s, b, h, q, kv: s + torch.nn.init.ones_(ROW)[q],
    "with a symbol": lambda s, b, h, q, kv: s + ROW.add_(s)[q],
    "out": lambda s, b, h, q, kv: s + torch.add(ROW, 1, out=ROW)[q],
    "inplace=True": lambda s, b, h, q, kv: s + F.elu(ROW - 1, inplace=True)[q],
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_to_a_captured_tensor_is_refused(name: str) -> None:
    for fullgraph, error in ((False, TraceError), (True, torch._dynamo.exc.Unsupported)):
        with pytest.raises(error):
            compiled(WRITES[name], fullgraph)
    assert torch.equal(ROW, torch.zeros(5))


def test_assignments_elsewhere_in_the_graph_are_allowed() -> None:
    torch._dynamo.reset()

    def traced(x: Tensor) -> Tensor:
        x[0] = 1.0
        call: BoundProgram = trace_score((lambda s, b, h, q, kv: s + x[q],))
        x[1] = 2.0
        return call.captures[0] + x

    assert torch.equal(torch.compile(traced, backend="eager", fullgraph=True)(torch.zeros(3)), torch.tensor([2.0, 4.0, 0.0]))


def test_an_augmented_assignment_leaves_the_captured_tensor_alone() -> None:
    assert torch.equal(compiled(augments, fullgraph=False), torch.ones(5))  # as without torch.compile, the name then means a new tensor
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(augments, fullgraph=True)
    assert torch.equal(ROW, torch.zeros(5))


COMPUTES: dict[str, Callable[..., Any]] = {
    "operators": lambda s, b, h, q, kv: s + (ROW * 2 - 1)[q],
    "methods": lambda s, b, h, q, kv: s + ROW.exp().add(1).view(5, 1)[q, 0],
    "functions": lambda s, b, h, q, kv: s + torch.softmax(F.relu(F.elu(ROW)), dim=-1)[q],
    "sizes": lambda s, b, h, q, kv: s + ROW.new_ones(ROW.shape[0], dtype=ROW.dtype, device=ROW.device)[q] * ROW.numel() * len(ROW) * ROW.dim(),
    "lists of tensors": lambda s, b, h, q, kv: s + torch.cat([ROW, torch.stack([ROW[0], ROW[1]])])[q],
    "operators of a library": lambda s, b, h, q, kv: s + torch.ops.aten.add(ROW, 1)[q] + torch.ops.aten.mul.Tensor(ROW, ROW)[q],
    "views": lambda s, b, h, q, kv: s + ROW.view(1, 5).T[1:, 0].float()[q] + ROW.data[q] + ROW.detach()[q],
    "no out": lambda s, b, h, q, kv: s + torch.add(ROW, 1, out=None)[q] + torch.add(q, 1, out=None),
    "rows": lambda s, b, h, q, kv: s + torch.dot(ROW.view(5, 1)[q], ROW.view(5, 1)[kv]) + (ROW.view(5, 1)[q] * ROW.view(5, 1)[kv]).sum(-1),
}


@pytest.mark.parametrize("name", COMPUTES)
def test_computing_with_a_captured_tensor_is_allowed(name: str) -> None:
    assert torch.equal(compiled(COMPUTES[name], fullgraph=True), trace_score((COMPUTES[name],)).captures[0])


# -- stand-ins ---------------------------------------------------------------------------------------------------------

needs_stand_ins = pytest.mark.skipif(not STANDS_IN, reason=f"torch {torch.__version__} cannot follow stand-ins: they are used from 2.11 on")
TABLE, ROWS, NUMBER = torch.zeros(5, 5), torch.zeros(5, 5, 3), torch.tensor(3)


def augmented(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    s += ROW[q]
    s -= 1
    s *= 2
    s /= 3
    s **= 2
    q //= 2
    q %= 3
    q |= 1
    q &= 7
    q ^= 2
    q <<= 1
    q >>= 1
    return s + q


SAME: dict[str, Callable[..., Any]] = {
    "comparisons": lambda s, b, h, q, kv: torch.where((q < 3) & (3 < kv) | (q <= 2) ^ (2 >= kv) & ~(q > kv) & (1 == h) & (h != 2) & (3 <= q), s, 0.0),
    "arithmetic": lambda s, b, h, q, kv: s * 2 - 1 + (1 - s) / 2 + 2 / s + q // 2 + 7 // (kv + 1) + q % 3 + 7 % (q + 1) + s**2 + 2**s + (-s) + (+s) + abs(s),
    "bits": lambda s, b, h, q, kv: s + ((q & 3) | (q ^ 1) << 1 >> 1) + (1 << q) + (64 >> q) + ~q,
    "loads": lambda s, b, h, q, kv: s + TABLE[q, kv] + TABLE[q][kv] + ROW[-1] + ROW[q - kv + NUMBER] + NUMBER * q + (NUMBER < q) + (q < NUMBER),
    "rows": lambda s, b, h, q, kv: s + (ROWS[b, q] * ROWS[b, kv]).sum() + ROWS[b][kv][2],
    "attributes": lambda s, b, h, q, kv: s + q.to(s.dtype) + torch.zeros((), dtype=s.dtype, device=s.device) + len(q.shape) + s.ndim + b.new_ones(()),
    "augmented assignments": augmented,
}


def text_of(call: BoundProgram) -> tuple[Any, ...]:
    return call.program.text, call.ints, call.floats


@needs_stand_ins
@pytest.mark.parametrize("name", SAME)
def test_the_program_is_that_of_eager_mode(name: str) -> None:
    torch._dynamo.reset()
    found, _ = torch.compile(lambda x: (text_of(trace_score((SAME[name],))), x + 1), backend="eager", fullgraph=True)(torch.zeros(1))
    assert found == text_of(trace_score((SAME[name],)))


def changes_in_place(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    s.add_(1)
    return s


PAST_THE_MODE: dict[str, Callable[..., Any]] = {
    "transposed": lambda s, b, h, q, kv: s.T,
    "data": lambda s, b, h, q, kv: s.data,
    "real": lambda s, b, h, q, kv: s + q.real,
    "unpacked": lambda s, b, h, q, kv: s + next(iter(ROWS[b, q])),
    "changed in place": changes_in_place,
    "branch": lambda s, b, h, q, kv: s if q > kv else -s,
    "item": lambda s, b, h, q, kv: s + q.item(),
}


@needs_stand_ins
@pytest.mark.parametrize("name", PAST_THE_MODE)
def test_no_stand_in_passes_for_a_captured_tensor(name: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"differs for every|in place|branch|item|not part of|endswith"):
        torch.compile(lambda x: (text_of(trace_score((PAST_THE_MODE[name],))), x + 1), backend="eager", fullgraph=True)(torch.zeros(1))
