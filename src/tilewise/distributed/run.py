"""attention() on a rank's tokens of a sequence that several ranks share.

    forward:   agree -> heads to their ranks -> needed keys to this rank -> attend -> agree -> heads back
    backward:  agree -> heads of dO to their ranks -> needed keys again -> differentiate -> agree -> dK, dV to their owners -> heads back -> sums of captures

All collectives of a pass are in one autograd function: autograd runs no backward that a rank's loss does not need, and the other ranks would wait for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from tilewise.core.output import Gradients, Output
from tilewise.core.problem import (
    Options,
    Problem,
    autocast,
    check_dropout,
    check_scale,
    check_seed,
    check_sinks,
    check_sizes,
    check_tensors,
    default_scale,
    from_bhsd,
    in_memory,
    kv_heads_of,
    to_bhsd,
    traced_scores,
)
from tilewise.core.recording import unrecorded
from tilewise.distributed import shard
from tilewise.distributed.agree import DETAILS, settle
from tilewise.distributed.plan import MaskPlan, Plan, shown
from tilewise.distributed.wire import Wire
from tilewise.engines import Engine
from tilewise.errors import InputError, UnsupportedError
from tilewise.frontend.dispatch import check_name, requested_backend
from tilewise.lang import BoundProgram
from tilewise.memory import resolved
from tilewise.scores import ScoreFunction, Sinks, as_scores
from tilewise.scores import bias as additive_bias
from tilewise.tiles import Extent

Captures = Literal["summed", "partial"]
COLLECTIVE_SMS = 16  # thread blocks of an exchange across nodes: NCCL has as many channels there by default, two for each of 8 network cards


@dataclass(frozen=True, eq=False)
class Call:
    """One call of attention(), checked, without its differentiable tensors."""

    plan: MaskPlan
    score: BoundProgram | None  # of the whole sequence
    scale: float
    dropout_p: float
    seed: int
    deterministic: bool
    backend: tuple[str, str]
    sums_captures: bool  # their gradients, over the ranks
    facts: dict[str, object]  # what every rank must ask for alike


class Tensors(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    captures: tuple[Tensor, ...]  # of the score


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Plan | MaskPlan,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    layout: str = "bhsd",
    heads: int | None = None,
    backend: str | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool | None = None,
    seed: int | Tensor | None = None,
    captures: Captures = "summed",
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Plan | MaskPlan,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    layout: str = "bhsd",
    heads: int | None = None,
    backend: str | None = None,
    return_lse: Literal[True],
    deterministic: bool | None = None,
    seed: int | Tensor | None = None,
    captures: Captures = "summed",
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Plan | MaskPlan,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    layout: str = "bhsd",
    heads: int | None = None,
    backend: str | None = None,
    return_lse: bool,
    deterministic: bool | None = None,
    seed: int | Tensor | None = None,
    captures: Captures = "summed",
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Plan | MaskPlan,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    layout: str = "bhsd",
    heads: int | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    seed: int | Tensor | None = None,
    captures: Captures = "summed",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this rank's tokens to the whole sequence. Collective, forward and backward.

    query, key and value hold the tokens `plan.positions`, in this order. The plan's mask and `score` see positions of the whole sequence, all heads and
    all batch elements: they are what one process would use. Tensors a score captures (learned biases, sinks) are the same on every rank.

    Args:
        query: (batch, heads, local tokens, head dim), or in `layout`.
        key: Like the query; fewer heads if the plan says so.
        value: Like the key.
        plan: From tilewise.distributed.plan; `plan[name]` where it has several masks.
        score: As in tilewise.attention.
        scale: 1 / sqrt(head dim) unless given.
        dropout_p: Dropout of the weights: the same elements on any number of ranks.
        layout: As in tilewise.attention.
        heads: Of 3-D tensors, as in tilewise.attention.
        backend: As in tilewise.attention, for what each rank computes.
        return_lse: Also return the logarithm of each row's sum of exponentials.
        deterministic: Gradients with the same bits in every run on as many ranks.
        seed: For dropout; without one, the ranks agree on one that torch's generator draws.
        captures: The gradients of tensors a score captures are "summed" over the ranks, or "partial": what this rank's tokens add, as those of any other
            parameter, for DDP, FSDP or code of your own to sum.

    Returns:
        The output of the local tokens; with `return_lse`, the output and the lse.
    """
    if not isinstance(plan, (Plan, MaskPlan)):
        raise InputError(f"plan must be what tilewise.distributed.plan returns, or one of its masks, plan[name]; got {type(plan).__name__}")
    whole = plan if isinstance(plan, Plan) else plan.whole
    options = Options(scale, dropout_p, deterministic=deterministic, seed=seed)
    return attend(whole, lambda: plan.only if isinstance(plan, Plan) else plan, query, key, value, score, options, layout, heads, backend, return_lse, captures)


def attend(
    plan: Plan,
    part_of: Callable[[], MaskPlan],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Any,
    options: Options,
    layout: str,
    heads: int | None,
    backend: str | None,
    return_lse: bool,
    captures: Captures,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention() of the mask that `part_of` finds, or an error of which all ranks hear."""
    call: Call | None = None
    tensors: Tensors | None = None
    error: Exception | None = None
    drawn = 0
    try:
        if not all([isinstance(t, Tensor) for t in (query, key, value)]):
            raise InputError(f"query, key and value must be torch tensors, got {', '.join([type(t).__name__ for t in (query, key, value)])}")
        kv_heads = kv_heads_of(query, key, heads)
        qkv = to_bhsd(query, layout, heads, "query"), to_bhsd(key, layout, kv_heads, "key"), to_bhsd(value, layout, kv_heads, "value")
        with unrecorded():
            call, tensors = _checked(part_of(), qkv, score, options, backend, return_lse, captures)
        drawn = _seed(options.seed) if call.dropout_p > 0 else 0
    except Exception as found:  # whatever it is, the other ranks must hear of it
        error = found
    facts: dict[str, object] = {"call": "attention"} if call is None else call.facts | {"seed": "drawn" if options.seed is None else drawn}
    agreed = settle(plan.team.everyone, facts, error, drawn)
    assert call is not None and tensors is not None
    out, lse = _ContextParallel.apply(replace(call, seed=agreed), *tensors[:4], *tensors.captures)
    out = from_bhsd(out, layout, flat=query.dim() == 3)
    return (out, lse) if return_lse else out


attend = torch.compiler.disable(attend)  # its collectives follow what ranks say to each other, so torch.compile leaves it to Python


def _checked(
    part: MaskPlan, qkv: tuple[Tensor, Tensor, Tensor], score: Any, options: Options, backend: str | None, lse: bool, sums: Captures
) -> tuple[Call, Tensors]:
    """The call and its tensors, or an InputError. Nothing here waits for another rank."""
    whole = part.whole
    part.check_unchanged()
    if sums not in ("summed", "partial"):
        raise InputError(f"captures must be 'summed' or 'partial', got {sums!r}")
    check_tensors(*qkv, enable_gqa=True)
    query, key, value = [resolved(t) for t in autocast(*qkv)]
    _check_shapes(whole, query, key, value)
    given = list(as_scores(score))
    extent = Extent(query.shape[0], whole.sizes.heads, whole.length, whole.length)
    check_sizes(given, extent)
    sinks = check_sinks([s.logits for s in given if isinstance(s, Sinks)], query)
    functions = [s for s in given if not isinstance(s, Sinks)] + ([] if part.bias is None else [additive_bias(part.bias)])
    inner = torch.float64 if query.dtype == torch.float64 else torch.float32
    program = in_memory(traced_scores(tuple(functions), inner, query.device), query.device)
    captures = () if program is None else program.captures
    named = requested_backend(backend)
    check_name(*named)
    bare = None if program is None else program.with_captures(())
    deterministic = torch.are_deterministic_algorithms_enabled() if options.deterministic is None else bool(options.deterministic)
    tensors = Tensors(query, key, value, sinks, captures)
    wanted = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (*tensors[:4], *captures)]
    scale = default_scale(query.shape[3]) if options.scale is None else check_scale(options.scale)
    dropout_p = check_dropout(options.dropout_p)
    facts: dict[str, object] = {
        "call": f"attention under plan {whole.number}, mask {part.name}",
        "batch size": query.shape[0],
        "dtype": query.dtype,
        "score": ", ".join([shown(s) for s in functions]) or "none",
        f"{DETAILS}score": bare and f"{bare.program.text} {list(bare.ints)} {list(bare.floats)} {[(t.dtype, list(t.shape)) for t in captures]}",
        "sinks": sinks is not None,
        "scale": scale,
        "dropout_p": dropout_p,
        "deterministic": deterministic,
        "return_lse": lse,
        "backend": named[0],
        "gradients of captures": sums,
        "which of query, key, value, sinks and captures want a gradient": wanted,
    }
    return Call(part, bare, scale, dropout_p, 0, deterministic, named, sums == "summed", facts), tensors


def _check_shapes(plan: Plan, query: Tensor, key: Tensor, value: Tensor) -> None:
    s, tokens = plan.sizes, plan.local_length
    batch = query.shape[0] if s.batch is None else s.batch
    expected = (
        ("query", query, (batch, s.heads, tokens, s.head_dim)),
        ("key", key, (batch, s.kv_heads, tokens, s.head_dim)),
        ("value", value, (batch, s.kv_heads, tokens, s.v_dim)),
    )
    for name, tensor, shape in expected:
        if tuple(tensor.shape) != shape:
            raise InputError(
                f"{name} has (batch, heads, tokens, head dim) {tuple(tensor.shape)}; the plan is for {shape} on this rank, which holds {tokens} of "
                f"{plan.length} tokens (plan.shard cuts a whole tensor)"
            )
    if query.device.type != plan.device.type:
        raise InputError(f"the plan is for {plan.device}, the tensors are on {query.device}; pass device= to tilewise.distributed.plan")


def _seed(seed: int | Tensor | None) -> int:
    """On the CPU's generator: a seed has to travel, and nothing should wait for the GPU."""
    check_seed(seed)
    number = int(torch.randint(0, 2**62, (), device="cpu")) if seed is None else int(seed)
    if not 0 <= number < 2**63:
        raise InputError(f"seed must be from 0 to 2**63 - 1, got {number}")
    return number


# Saved first, and unlike what attention on one rank saves there: torch.utils.checkpoint then refuses to go on with a layer that was computed again outside of
# tilewise.distributed.context, of local tokens alone.
_MARK = torch.empty(0, dtype=torch.uint8)


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *captures: Tensor) -> tuple[Tensor, Tensor]:
        part, wire = call.plan, Wire(call.plan)
        q, k, v = wire.split_heads(query, key, value)  # (B, heads of this rank, tokens of the row group, D)
        fetched = wire.fetch(k, v)
        engines: list[Engine | None] = []
        output: Output | None = None
        error: Exception | None = None
        try:
            outputs = []
            for stage in part.stages:
                problem = problem_of(call, stage, q, *fetched(stage), sinks, captures)
                engines.append(shard.engine_for(problem, call.backend, part.name))
                outputs.append(shard.forward(engines[-1], problem))
            output = shard.merged(outputs, q.dtype)
        except Exception as found:  # the other ranks must hear of it
            error = found
        settle(part.whole.team.everyone, {"call": "the end of a forward"}, error)
        assert output is not None
        ctx.set_materialize_grads(False)
        ctx.call, ctx.engines = call, engines
        ctx.save_for_backward(_MARK, q, k, v, sinks, output.out, output.lse, *captures)
        return wire.join_heads(output.out), wire.join_lse(output.lse)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        part, wire, everyone = call.plan, Wire(call.plan), call.plan.whole.team.everyone
        given = {"gradients of out and lse": (grad_out is not None, grad_lse is not None)}
        saved: tuple[Tensor, ...] = ()
        error: Exception | None = None
        try:
            part.check_unchanged()
            saved = ctx.saved_tensors  # torch looks whether they have been changed, and hooks may fail
            if torch.is_grad_enabled():  # create_graph=True
                raise UnsupportedError("attention to a sequence that ranks share cannot be differentiated twice")
        except Exception as refused:  # the other ranks must hear of it
            error = refused
        settle(everyone, call.facts | given | {"call": f"backward of {call.facts['call']}"}, error)
        _, q, k, v, sinks, out, lse, *captures = saved
        fetched = wire.fetch(k, v)
        d_out = torch.zeros_like(out) if grad_out is None else wire.split_out(grad_out)
        d_lse = None if grad_lse is None else wire.split_lse(grad_lse)
        wanted = frozenset([slot for slot, needed in enumerate(ctx.needs_input_grad[5:]) if needed])
        found: list[Gradients] = []
        try:
            for stage in part.stages:
                problem = problem_of(call, stage, q, *fetched(stage), sinks, tuple(captures))
                found.append(shard.backward(ctx.engines[stage], problem, Output(out, lse, lse), d_out, d_lse, wanted))
        except Exception as raised:  # the other ranks must hear of it
            error = raised
        settle(everyone, {"call": "the end of a backward"}, error)
        d_key, d_value = wire.give_back([(g.key, g.value) for g in found], call.deterministic)
        summed = shard.added(found)
        gradients = wire.join_gradients(summed.query, d_key, d_value, q.dtype)
        d_sinks = None if sinks is None or not ctx.needs_input_grad[4] else wire.of_all_heads(summed.sinks, sinks)
        d_captures = [summed.captures.get(slot, torch.zeros_like(t)) if slot in wanted else None for slot, t in enumerate(captures)]
        if call.sums_captures:
            d_sinks, *d_captures = [None if gradient is None else wire.sum(gradient) for gradient in (d_sinks, *d_captures)]
        return (None, *gradients, d_sinks, *d_captures)


def problem_of(call: Call, stage: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, captures: tuple[Tensor, ...]) -> Problem:
    """What this rank computes in a stage."""
    part, first = call.plan, call.plan.first_head
    problem = Problem(
        query=query,
        key=key,
        value=value,
        mask=part.masks[stage],
        tiles=None,
        score=None if call.score is None else part.placed(call.score.with_captures(captures), stage),
        sinks=None if sinks is None or stage > 0 else sinks.detach()[first : first + query.shape[1]],
        scale=call.scale,
        dropout_p=call.dropout_p,
        seed=torch.full((), call.seed, dtype=torch.int64, device=query.device) if call.dropout_p > 0 else None,
        deterministic=call.deterministic,
        places=part.places[stage] if call.dropout_p > 0 else None,
        partial=len(part.stages) > 1,
        busy_sms=COLLECTIVE_SMS if stage + 1 < len(part.stages) else 0,  # the keys of the next stage are on their way
    )
    return problem.replaced(mask=None, score=None) if problem.is_empty else problem
