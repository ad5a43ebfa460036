"""A case computed in parts, as context parallelism does it: each has some of the batch elements, heads, queries and keys, in an order of their own."""

from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.cases import Case, Inputs
from tests.support.error_rule import Results, check
from tilewise.core.output import Output
from tilewise.core.places import SQUARE, Places
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.registry import engine_named
from tilewise.lang import BoundProgram, gathered, shifted


class Cutting(NamedTuple):
    """How the tokens are cut: into chunks that stay whole, which are shuffled and dealt to some ranks. With chunks of one token nothing stays together."""

    chunk: int
    ranks: int = 2


def check_parts(case: Case, engine: str, cutting: Cutting, dtype: torch.dtype = torch.float32) -> None:
    """Hold a case to the error rule that an engine computes in parts."""
    __tracebackhide__ = True
    check(case, engine, dtype=dtype, computed=partial(by_parts, cutting=cutting))


@torch.no_grad()
def by_parts(case: Case, inputs: Inputs, engine: str, cutting: Cutting) -> Results:
    p = whole_problem(case, inputs)
    found = {name: torch.zeros(t.shape, dtype=p.inner_dtype) for name, t in inputs.leaves.items()}
    out = torch.zeros((p.batch, p.heads, p.q_len, p.v_dim), dtype=p.inner_dtype)
    lse = torch.zeros((p.batch, p.heads, p.q_len), dtype=p.inner_dtype)
    tokens = dealt(p.q_len, cutting), dealt(p.kv_len, cutting)
    for b in range(p.batch):
        for hk in range(p.kv_heads):
            for q in tokens[0]:
                merge(out, lse, p, engine, b, hk, q, tokens[1])
    out = out.to(p.dtype)
    d_lse = torch.where(lse == -torch.inf, 0.0, inputs.grad_lse) if case.returns_lse else None
    for b in range(p.batch):
        for hk in range(p.kv_heads):
            for q in tokens[0]:
                for kv in tokens[1]:
                    add_gradients(found, inputs, p, engine, b, hk, q, kv, out, lse, d_lse)
    gradients = {name: found[name].to(t.dtype) for name, t in inputs.leaves.items()}
    return Results({"out": out} | ({"lse": lse} if case.returns_lse else {}), gradients)


def whole_problem(case: Case, inputs: Inputs) -> Problem:
    return make_problem(*inputs.bhsd, inputs.masking.given, inputs.scores, Options(enable_gqa=True, **case.options))[0]


def dealt(length: int, cutting: Cutting) -> list[Tensor]:
    """The tokens of every rank. A last chunk that is no whole number of squares comes last on its rank."""
    chunks = torch.arange(length).split(cutting.chunk)
    order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(length)).tolist()
    hands = [[chunks[k] for k in order[rank :: cutting.ranks]] for rank in range(cutting.ranks)]
    return [torch.cat(sorted(hand, key=lambda chunk: len(chunk) % SQUARE if cutting.chunk > 1 else 0)) for hand in hands]


def part_of(p: Problem, b: int, hk: int, q: Tensor, kv: Tensor) -> Problem:
    """One batch element, one key head with its query heads, these queries and keys."""
    ratio = p.heads // p.kv_heads
    places = Places(q, kv, b, hk * ratio)
    query = p.query.detach()[b : b + 1, hk * ratio : (hk + 1) * ratio, q]
    key, value = (t.detach()[b : b + 1, hk : hk + 1, kv] for t in (p.key, p.value))
    mask, score = (None if call is None else in_whole(call, places) for call in (p.mask, p.score))
    return p.replaced(query=query, key=key, value=value, mask=mask, score=score, places=places if p.dropout_p > 0 else None, partial=True)


def in_whole(call: BoundProgram, places: Places) -> BoundProgram:
    """A mask or score of the whole problem, of a part's indices."""
    return gathered(gathered(shifted(shifted(call, "b", places.batch), "h", places.head), "q", places.query), "kv", places.key)


def merge(out: Tensor, lse: Tensor, p: Problem, engine: str, b: int, hk: int, q: Tensor, all_keys: list[Tensor]) -> None:
    """The rows of some queries, from a part for every rank's keys."""
    parts = [forward(engine, part_of(p, b, hk, q, kv)) for kv in all_keys]
    assert all(part.out.dtype == p.inner_dtype for part in parts)
    total = reduce(torch.logaddexp, [part.lse for part in parts])
    rows = sum(part.out * torch.where(part.lse == -torch.inf, 0.0, torch.exp(part.lse - total)).unsqueeze(-1) for part in parts)
    for h in range(parts[0].out.shape[1]):
        at = b, hk * parts[0].out.shape[1] + h, q
        out[at], lse[at] = rows[0, h], total[0, h]


def forward(engine: str, part: Problem) -> Output:
    served_by = engine_named(engine)
    assert served_by.refuse(part) is None
    return served_by.forward(part, served_by.plan(part))


def add_gradients(
    found: dict[str, Tensor], inputs: Inputs, p: Problem, engine: str, b: int, hk: int, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, d_lse: Tensor | None
) -> None:
    """What one part adds to the gradients of everything."""
    part, served_by, ratio = part_of(p, b, hk, q, kv), engine_named(engine), p.heads // p.kv_heads

    def rows(t: Tensor) -> Tensor:
        return t[b : b + 1, hk * ratio : (hk + 1) * ratio, q]

    output = Output(rows(out), rows(lse), rows(lse))
    grads = served_by.backward(part, served_by.plan(part), output, rows(inputs.grad_out), None if d_lse is None else rows(d_lse), p.learned)
    assert {g.dtype for g in (grads.query, grads.key, grads.value)} == {p.inner_dtype}
    for h in range(ratio):
        found["query"][b, hk * ratio + h, q] += grads.query[0, h]
    found["key"][b, hk, kv] += grads.key[0, 0]
    found["value"][b, hk, kv] += grads.value[0, 0]
    for name, leaf in inputs.leaves.items():
        for slot, gradient in grads.captures.items():
            if p.score is not None and p.score.captures[slot] is leaf:
                found[name] += gradient
