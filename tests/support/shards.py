"""What every rank of a shared sequence computes, one after the other in one process: nothing travels, so that it runs on one GPU, too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.cases import Case, Draw, Inputs, document_ids, function, made, sinks
from tests.support.error_rule import Results
from tilewise import masks
from tilewise.core.output import Output
from tilewise.core.problem import check_sinks, default_scale, traced_scores
from tilewise.distributed import shard
from tilewise.distributed.plan import Sizes, plan_of_rank
from tilewise.distributed.run import Call, problem_of
from tilewise.scores import Sinks


def by_shards(ranks: int, stages: int) -> Callable[[Case, Inputs, str], Results]:
    """Computes a case as so many ranks would."""

    def compute(case: Case, inputs: Inputs, engine: str) -> Results:
        return _Shards(case, inputs, engine).compute(ranks, stages)

    return compute


class _Shards:
    def __init__(self, case: Case, inputs: Inputs, engine: str) -> None:
        self.case, self.inputs, self.engine = case, inputs, engine
        self.query, self.key, self.value = [t.detach() for t in inputs.bhsd]
        scores = inputs.scores
        self.sinks = check_sinks([s.logits for s in scores if isinstance(s, Sinks)], self.query)
        inner = torch.float64 if self.query.dtype == torch.float64 else torch.float32
        self.score = traced_scores(tuple([s for s in scores if not isinstance(s, Sinks)]), inner, self.query.device)
        self.captures = () if self.score is None else self.score.captures

    @torch.no_grad()
    def compute(self, ranks: int, stages: int) -> Results:
        case, q = self.case, self.query
        out = torch.zeros(*q.shape[:3], case.values, dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:3], torch.nan, device=q.device)
        wide = [torch.zeros(t.shape, dtype=torch.float32, device=q.device) for t in (self.query, self.key, self.value)]
        leaves = self.inputs.leaves
        learned = {id(t): torch.zeros_like(t) for name, t in leaves.items() if name not in ("query", "key", "value")}
        sizes = Sizes(case.batch, case.heads, case.kv[1], case.head_dim, case.values)
        for rank in range(ranks):
            part = plan_of_rank(self.inputs.masking.given, rank, ranks, case.q_len, sizes, q.device, stages=stages).only
            self._rank(part, out, lse, wide, learned)
        gradients = dict(zip(("query", "key", "value"), [t.to(q.dtype) for t in wide], strict=True))
        gradients |= {name: learned[id(t)] for name, t in leaves.items() if id(t) in learned}
        return Results({"out": out} | ({"lse": lse} if case.returns_lse else {}), gradients)

    def _rank(self, part: Any, out: Tensor, lse: Tensor, wide: list[Tensor], learned: dict[int, Tensor]) -> None:
        case, whole = self.case, part.whole
        groups, mine = whole.team.head_groups, whole.team.head_group
        heads = slice(mine * case.heads // groups, (mine + 1) * case.heads // groups)
        kv_heads = slice(mine * case.kv[1] // groups, -(-(mine + 1) * case.kv[1] // groups))
        rows = whole.row_positions
        options = case.options
        scale = options.get("scale", default_scale(case.head_dim))
        call = Call(part, self.score, scale, options.get("dropout_p", 0.0), options.get("seed", 0), False, (self.engine, "a test"), True, {})
        keys = [torch.arange(case.q_len, device=rows.device)] if part.keys is None else [stage.positions for stage in part.keys.stages]
        problems = [
            problem_of(call, n, self.query[:, heads][:, :, rows], *[t[:, kv_heads][:, :, at] for t in (self.key, self.value)], self.sinks, self.captures)
            for n, at in enumerate(keys)
        ]
        engines = [shard.engine_for(p, call.backend, "mask") for p in problems]
        found = shard.merged([shard.forward(e, p) for e, p in zip(engines, problems, strict=True)], self.query.dtype)
        out[:, heads, rows], lse[:, heads, rows] = found.out, found.lse
        grad_out = self.inputs.grad_out[:, heads][:, :, rows] if "out" in case.through else torch.zeros_like(found.out)
        grad_lse = torch.where(found.lse == -torch.inf, 0.0, self.inputs.grad_lse[:, heads][:, :, rows]) if case.returns_lse else None
        wanted = frozenset([slot for slot, t in enumerate(self.captures) if t.requires_grad])
        gradients = [shard.backward(e, p, Output(found.out, found.lse, found.lse), grad_out, grad_lse, wanted) for e, p in zip(engines, problems, strict=True)]
        for at, g in zip(keys, gradients, strict=True):
            wide[1][:, kv_heads, at] = wide[1][:, kv_heads][:, :, at] + g.key
            wide[2][:, kv_heads, at] = wide[2][:, kv_heads][:, :, at] + g.value
        summed = shard.added(gradients)
        wide[0][:, heads, rows] += summed.query
        for slot, gradient in summed.captures.items():
            learned[id(self.captures[slot])] += gradient
        if self.sinks is not None and summed.sinks is not None and id(self.sinks) in learned:
            learned[id(self.sinks)][heads] += summed.sinks


def _documents(draw: Draw) -> Any:
    ids = document_ids(draw, draw.case.q_len)
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)


def _table(draw: Draw) -> list[Any]:
    table = draw.learned(draw.case.heads, 2 * draw.case.q_len)
    return [lambda s, b, h, q, kv: s + table[h, q - kv + draw.case.q_len]]


SIZES: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 700, "head_dim": 32, "through": ("out", "lse")}
SHARED = [
    Case("shared: full", **SIZES),
    Case("shared: causal", mask=function(masks.causal), **SIZES),
    Case("shared: window, dropout", mask=function(masks.causal & masks.sliding_window(150)), options={"dropout_p": 0.3, "seed": 5}, **SIZES),
    Case("shared: documents, learned bias", mask=made(_documents), score=_table, **SIZES),
    Case("shared: by head, sinks", mask=function(lambda b, h, q, kv: (q - kv).abs() <= h * 60 + 2), score=sinks, **SIZES),
]
