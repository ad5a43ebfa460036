"""The error rule: how far an engine may be from the truth.

The truth is the reference engine's dense attention in fp64. Plain PyTorch (dense, in the input's dtype, through autograd)
sets the measure: the largest error of an engine is at most 2 times plain PyTorch's, 3 times for gradients, plus one
rounding of the truth; the same holds for the root of the mean square. NaN and Inf are compared exactly, place by place.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from tests.support.cases import Case, Inputs, make, to_bhsd
from tilewise.core.problem import Options, make_problem
from tilewise.engines.dropout import dropout_keep, keep_scale
from tilewise.engines.reference import dense_attention
from tilewise.scores import Sinks

FORWARD, GRADIENT = 2.0, 3.0

# Plain PyTorch's own error is partly luck. In fp32 it is measured in several orders of summation; where a gradient has few
# elements, over several draws of the case. The mean over few elements is luck, too: only the largest counts.
ORDERS, DRAWS, FEW = 6, 6, 32

# Everything looser than the rule, with its reason.
LOOSER = {
    # The truth has fp64's own rounding, so there is nothing to measure the error by: this share of the largest value is
    # allowed, and plain PyTorch, which shares no code with the reference, has to be as near.
    "float64": 1e-12,
    # The largest fp32 gradient error, times the factor (the RMS keeps to it): a backward that takes sum(dO * O) where autograd
    # takes sum(P * dP) is off by other roundings in the first rows of a causal mask. torch's own SDPA is at 2.7 of 3 there.
    "float32 gradients": 1.5,
    # A gradient that is 0 because two numbers cancel (of the query, with one key to attend; of a bias that is the same for a
    # whole row). Plain PyTorch happens to subtract a number from itself, an engine subtracts two roundings of it. This many
    # fp32 roundings of the largest gradient are allowed, and one in the dtype, in which the backward gets the output.
    "cancelled": 8,
}


@dataclass
class Results:
    """What one computation gives: outputs and gradients by name, in any dtype."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def check(
    case: Case,
    engine: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    computed: Callable[[Case, Inputs, str], Results] | None = None,
) -> None:
    """Run a case on an engine, as `computed` does it if it is given, and hold it to the rule."""
    __tracebackhide__ = True  # the message says it all
    tested = (computed or by_engine)(case, make(case, dtype, dtype, device, seed), engine)
    truth, plain = (_measured_last if device == "cpu" else _measured)(case, dtype, device, seed, torch.is_grad_enabled())

    @cache
    def other_draws() -> list[tuple[Results, Results]]:
        seeds = range(seed + 1, seed + DRAWS)
        return [(by_plain_torch(case, make(case, dtype, dtype, device, n)), by_reference(case, make(case, dtype, torch.float64, device, n))) for n in seeds]

    def in_other_draws(name: str) -> Tensor:
        return _errors_of_gradient(name, other_draws())

    for name, exact in truth.outputs.items():
        hold(name, tested.outputs[name], exact, errors_of([(p.outputs[name], t.outputs[name]) for p, t in plain]), FORWARD)
    largest = max((_largest(g) for g in truth.gradients.values()), default=0.0)
    for name, exact in truth.gradients.items():
        measure = _errors_of_gradient(name, plain)
        found = tested.gradients[name]
        if found.dtype == torch.float64 != dtype:  # a float64 capture of a narrower problem: as exact as the problem
            found = found.float()
        hold_gradient(f"gradient of {name}", found, exact, measure, largest, partial(in_other_draws, name))


def check_forward(case: Case, engine: str, device: str, dtype: torch.dtype) -> None:
    """The rule on outputs alone, where an engine's backward cannot run."""
    __tracebackhide__ = True
    with torch.no_grad():
        check(case, engine, device, dtype)


def _measured(case: Case, dtype: torch.dtype, device: str, seed: int, gradients: bool) -> tuple[Results, list[tuple[Results, Results]]]:
    """The truth, and plain PyTorch's results, each beside the truth; `gradients`: whether they have any, as the mode is."""
    truth = by_reference(case, make(case, dtype, torch.float64, device, seed))
    orders = range(ORDERS if dtype == torch.float32 else 1)
    return truth, [(by_plain_torch(case, make(case, dtype, dtype, device, seed), order), truth) for order in orders]


_measured_last = lru_cache(maxsize=1)(_measured)  # engines that take a case in turn are held to the same truth, computed once


def check_float64(case: Case, engine: str) -> None:
    """A float64 problem, whose captures keep their own dtypes: the engine gives what the reference engine gives, to fp64's last digits and one rounding of
    each gradient to its dtype. The truth of `check` is no measure here: what torch rounds to 16 bits is rounded in both, and far from it."""
    __tracebackhide__ = True
    tested, expected = (by_engine(case, make(case, torch.float64, torch.float64, typed=True), name) for name in (engine, "reference"))
    for found, exact in ((tested.outputs, expected.outputs), (tested.gradients, expected.gradients)):
        for name, wanted in exact.items():
            room = 1e-10 if wanted.dtype == torch.float64 else 2 * torch.finfo(wanted.dtype).eps
            torch.testing.assert_close(found[name], wanted, rtol=room, atol=min(room, 1e-6), equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")


def _errors_of_gradient(name: str, results: list[tuple[Results, Results]]) -> Tensor:
    return errors_of([(plain.gradients[name], truth.gradients[name]) for plain, truth in results])


def hold_gradient(name: str, tested: Tensor, exact: Tensor, measure: Tensor, largest: float, in_other_draws: Callable[[], Tensor]) -> None:
    """The rule on a gradient. `in_other_draws` gives plain PyTorch's errors in other draws of the case: what counts where elements are few."""
    __tracebackhide__ = True
    try:
        hold(name, tested, exact, measure, GRADIENT, largest)
    except AssertionError:
        if not 0 < exact.numel() < FEW or tested.dtype == torch.float64:
            raise
        hold(name, tested, exact, torch.cat([measure, in_other_draws()]), GRADIENT, largest)


def hold(name: str, tested: Tensor, exact: Tensor, measure: Tensor, factor: float, largest: float | None = None) -> None:
    """The rule on one tensor. `measure` holds plain PyTorch's errors, `largest` the largest gradient of the case where this is a gradient."""
    __tracebackhide__ = True
    assert tested.shape == exact.shape, f"{name}: shape {tuple(tested.shape)}, not {tuple(exact.shape)}"
    assert_same_places(name, tested, exact)
    error, truth = errors_of([(tested, exact)]), exact[exact.isfinite()]
    if tested.dtype == torch.float64:
        room = LOOSER["float64"] * max(1.0, _largest(truth))
        assert _largest(error) <= room, f"{name}: error {_largest(error):.3g} where {room:.3g} is allowed"
        assert _largest(measure) <= room, f"{name}: plain PyTorch is {_largest(measure):.3g} from the reference: one of them is wrong"
        return
    eps, inner = torch.finfo(tested.dtype).eps, torch.finfo(torch.float32).eps
    slack, looser = 0.0, 1.0
    if largest is not None and _largest(truth) <= inner * largest:
        slack = (LOOSER["cancelled"] * inner + eps) * largest
    if largest is not None and tested.dtype == torch.float32:
        looser = LOOSER["float32 gradients"]
    for size, what, times in ((_largest, "largest", factor * looser), (_rms, "RMS", factor)):
        if size is _rms and truth.numel() < FEW:
            continue
        room = times * size(measure) + eps / 2 * size(truth) + slack
        assert size(error) <= room, f"{name}: {what} error {size(error):.3g}, plain PyTorch's is {size(measure):.3g}, {room:.3g} is allowed"


def errors_of(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Of (found, exact) pairs, wherever both are finite."""
    return torch.cat([(found.double() - exact).abs()[found.isfinite() & exact.isfinite()] for found, exact in pairs])


def assert_same_places(name: str, tested: Tensor, exact: Tensor) -> None:
    """NaN, +Inf and -Inf in the same places; a value that only the dtype's range makes infinite counts as infinite."""
    exact = exact.to(tested.dtype)
    for kind, places in (("NaN", torch.isnan), ("+Inf", torch.isposinf), ("-Inf", torch.isneginf)):
        differ = (places(tested) != places(exact)).nonzero()
        assert not len(differ), f"{name}: {kind} differs in {len(differ)} places, first at {differ[0].tolist()}"


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def _rms(t: Tensor) -> float:
    return float(t.double().square().mean().sqrt()) if t.numel() else 0.0


# -- three ways to compute a case ------------------------------------------------------------------------------------


def by_engine(case: Case, inputs: Inputs, engine: str) -> Results:
    if inputs.masking.offsets is not None:
        return _by_varlen(case, inputs, inputs.masking.offsets, engine)
    found = tw.attention(inputs.query, inputs.key, inputs.value, backend=engine, **inputs.arguments())
    out, lse = found if case.returns_lse else (found, None)
    return finish(case, inputs, to_bhsd(out, case.layout, case.heads), lse)


def _by_varlen(case: Case, inputs: Inputs, offsets: Tensor, engine: str) -> Results:
    tokens_first = [t.squeeze(0).transpose(0, 1) for t in inputs.bhsd]
    found = tw.varlen_attention(
        *tokens_first, offsets, score=inputs.scores or None, enable_gqa=True, return_lse=case.returns_lse, backend=engine, **case.options
    )
    out, lse = found if case.returns_lse else (found, None)
    return finish(case, inputs, out.transpose(0, 1).unsqueeze(0), None if lse is None else lse.unsqueeze(0))


def by_reference(case: Case, inputs: Inputs) -> Results:
    """Dense attention in fp64, the definition of right."""
    options = Options(enable_gqa=True, **case.options)
    problem, _ = make_problem(*inputs.bhsd, inputs.masking.given, inputs.scores, options)
    out, lse, _ = dense_attention(problem)
    return finish(case, inputs, out, lse if case.returns_lse else None)


def by_plain_torch(case: Case, inputs: Inputs, order: int = 0) -> Results:
    """What one would write without tilewise: every step in the input's dtype, masks and scores called on index tensors.

    An order other than 0 shuffles queries, keys and features first, which changes nothing but the roundings.
    """
    shuffled = _Order(case, order, inputs.query.device)
    q, k, v = inputs.bhsd
    ratio = case.heads // case.kv[1] if case.kv[1] else 1
    k, v = (t.expand(case.batch, -1, -1, -1).repeat_interleave(ratio, 1) for t in (k, v))
    q, k, v = q[..., shuffled.q, :][..., shuffled.d], k[..., shuffled.kv, :][..., shuffled.d], v[..., shuffled.kv, :]
    b, h, i, j = inputs.draw.indices()
    at = b, h, i[:, :, shuffled.q], j[..., shuffled.kv]
    scale = case.options.get("scale", 1 / math.sqrt(case.head_dim))
    s = q @ k.transpose(-1, -2) * scale
    for score in inputs.scores:
        if not isinstance(score, Sinks):
            s = score(s, *at).to(q.dtype)
    if inputs.masking.bias is not None:
        s = s + shuffled.table(inputs.masking.bias).to(q.dtype)
    allowed = torch.ones((), dtype=torch.bool, device=q.device) if inputs.masking.allowed is None else shuffled.table(inputs.masking.allowed)
    if case.options.get("is_causal"):
        allowed = allowed & (at[2] >= at[3])
    s = torch.where(allowed, s, -torch.inf).expand(case.batch, case.heads, case.q_len, case.kv[2])
    for score in inputs.scores:
        if isinstance(score, Sinks):
            s = torch.cat([s, score.logits.to(q.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    out, lse = _softmax_and_mix(case, s, v, (b, h, shuffled.q, shuffled.kv))
    back = torch.argsort(shuffled.q)
    return finish(case, inputs, out[..., back, :], lse[..., back] if case.returns_lse else None)


class _Order:
    """An order of queries, keys and features; 0 is the one they come in."""

    def __init__(self, case: Case, order: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(order)
        sizes = (case.q_len, case.kv[2], case.head_dim)
        self.q, self.kv, self.d = ((torch.randperm(n, generator=generator) if order else torch.arange(n)).to(device) for n in sizes)

    def table(self, t: Tensor) -> Tensor:
        """A tensor that broadcasts to (batch, heads, queries, keys), in this order."""
        if t.dim() >= 1 and t.shape[-1] > 1:
            t = t[..., self.kv]
        return t[..., self.q, :] if t.dim() >= 2 and t.shape[-2] > 1 else t


def _softmax_and_mix(case: Case, s: Tensor, v: Tensor, at: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    some = (s > -torch.inf).any(-1, keepdim=True)
    s = torch.where(some, s, 0.0)  # softmax of nothing is NaN, whose gradient no later `where` undoes
    inner = torch.float64 if s.dtype == torch.float64 else torch.float32
    lse = torch.where(some, s.to(inner).logsumexp(-1, keepdim=True), -torch.inf).squeeze(-1)
    weights = torch.where(some, torch.softmax(s, -1), 0.0)[..., : case.kv[2]]
    p = case.options.get("dropout_p", 0.0)
    if p > 0:
        weights = torch.where(dropout_keep(p, case.options["seed"], *(i.flatten() for i in at)), weights * keep_scale(p), 0.0)
    return weights @ v, lse


def finish(case: Case, inputs: Inputs, out: Tensor, lse: Tensor | None) -> Results:
    """Outputs, and the gradients of what the case asks for, if gradients are on."""
    outputs = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    if not torch.is_grad_enabled():
        return Results(outputs, {})
    roots: list[tuple[Tensor, Any]] = []
    if "out" in case.through:
        roots.append((out, inputs.grad_out))
    if lse is not None:
        roots.append((lse, torch.where(lse == -torch.inf, 0.0, inputs.grad_lse)))
    found = torch.autograd.grad([r for r, _ in roots], list(inputs.leaves.values()), [g for _, g in roots], allow_unused=True)
    gradients = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(inputs.leaves.items(), found, strict=True)}
    return Results(outputs, gradients)
