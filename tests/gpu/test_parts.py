"""Parts of outputs, in fp32, from the Hopper kernels; and kernels that leave multiprocessors to a collective."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import masks, scores
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.gpu.limits import sm_count
from tilewise.engines.reference import dense_attention
from tilewise.engines.registry import engine_named

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
engines = pytest.mark.parametrize("engine", ["cuda", "gluon"])
nothing_for_some = masks.Mask(lambda b, h, q, kv: (q % 5 > 0) & (q >= kv + 200), "later")  # whole tiles, and rows of others, attend nothing

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "full, uneven": {"lengths": (333, 517)},
    "causal": {"mask": masks.causal},
    "causal D64": {"mask": masks.causal, "dim": 64},
    "causal D256": {"mask": masks.causal, "dim": 256, "lengths": (333, 517)},
    "other V": {"dim": 96, "v_dim": 72, "mask": masks.causal},
    "fp16": {"mask": masks.causal, "dtype": torch.float16},
    "rows without keys": {"mask": nothing_for_some, "lengths": (600, 600)},
    "sinks": {"mask": masks.causal, "score": scores.sinks(torch.tensor([0.5, -1.0, 2.0, 0.0]))},
    "softcap": {"mask": masks.causal, "score": scores.softcap(20.0)},
    "other layout": {"mask": masks.causal, "transposed": True},
}


def problem(
    lengths: tuple[int, int] = (512, 512), dim: int = 128, v_dim: int | None = None, dtype: torch.dtype = torch.bfloat16, transposed: bool = False, **asked: Any
) -> Problem:
    torch.manual_seed(0)

    def drawn(heads: int, length: int, dim: int) -> Tensor:
        return torch.randn(2, length, heads, dim).transpose(1, 2) if transposed else torch.randn(2, heads, length, dim)

    q_len, kv_len = lengths
    shapes = ((4, q_len, dim), (2, kv_len, dim), (2, kv_len, v_dim or dim))
    mask, score = asked.pop("mask", None), asked.pop("score", None)
    score = scores.sinks(score.logits.cuda()) if isinstance(score, scores.Sinks) else score
    return make_problem(*[drawn(*shape).to("cuda", dtype) for shape in shapes], mask, score, Options(enable_gqa=True, **asked))[0]


def forward(engine: str, p: Problem) -> Any:
    served_by = engine_named(engine)
    assert served_by.refuse(p) is None, served_by.refuse(p)
    return served_by.forward(p, served_by.plan(p))


@engines
@pytest.mark.parametrize("name", CASES)
def test_a_part_is_what_is_rounded_elsewhere(engine: str, name: str) -> None:
    """In fp32, with lse as it is; near the reference; rounded, it has the bits of the whole problem's output."""
    p = problem(**CASES[name])
    whole, part = forward(engine, p), forward(engine, p.replaced(partial=True))
    assert part.out.dtype == torch.float32 and whole.out.dtype == p.dtype
    assert torch.equal(part.lse, whole.lse) and torch.equal(part.out.to(p.dtype), whole.out)
    assert not torch.equal(part.out, whole.out.float())  # it was not rounded on its way
    exact = dense_attention(p.replaced(query=p.query.double(), key=p.key.double(), value=p.value.double()))
    torch.testing.assert_close(part.out.double(), exact.out.double(), rtol=0, atol=1e-2)
    assert torch.equal(part.lse == -torch.inf, exact.lse == -torch.inf)


@engines
def test_a_nan_at_a_masked_key_stays_out_of_a_part(engine: str) -> None:
    """Rows that are computed again are written in fp32, too: by the fix-up, where the CUDA forward computes those of a whole by itself, in another order."""
    p = problem(mask=masks.causal)
    p.value[:, :, 400] = torch.nan
    whole, part = forward(engine, p), forward(engine, p.replaced(partial=True))
    assert bool(part.out[:, :, :400].isfinite().all()) and bool(part.out[:, :, 400:].isnan().all())
    torch.testing.assert_close(part.out[:, :, :400].to(p.dtype), whole.out[:, :, :400], rtol=2**-7, atol=1e-5)


@engines
def test_two_parts_make_a_whole(engine: str) -> None:
    """Keys in two halves, merged by lse, and their gradients: as near as the whole is."""
    from tilewise.distributed.shard import added, backward, merged

    p = problem(lengths=(1024, 1024), score=scores.softcap(20.0))
    served_by, whole, grad = engine_named(engine), forward(engine, p), torch.randn_like(p.query)
    halves = [p.replaced(key=p.key[:, :, at], value=p.value[:, :, at], partial=True) for at in (slice(0, 512), slice(512, None))]
    found = merged([forward(engine, half) for half in halves], p.dtype)
    torch.testing.assert_close(found.out, whole.out, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(found.lse, whole.lse, rtol=1e-5, atol=1e-5)
    expected = served_by.backward(p, served_by.plan(p), whole, grad, None, frozenset())
    gradients = [backward(served_by, half, found, grad, None, frozenset()) for half in halves]
    assert gradients[0].query.dtype == torch.float32
    keys, values = torch.cat([g.key for g in gradients], 2), torch.cat([g.value for g in gradients], 2)
    for mine, theirs in zip((added(gradients).query, keys, values), (expected.query, expected.key, expected.value), strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=3e-2, atol=3e-2 * float(theirs.abs().max()))


@engines
@pytest.mark.parametrize("name", ["full", "full, uneven", "causal", "causal D64", "causal D256", "fp16", "softcap"])
@pytest.mark.parametrize("partial", [False, True])
def test_fewer_multiprocessors_compute_the_same(engine: str, name: str, partial: bool) -> None:
    p = problem(**{"lengths": (5000, 700), **CASES[name]}).replaced(partial=partial)  # more query tiles than there are multiprocessors
    usual = forward(engine, p)
    for busy in (16, sm_count(p.device) - 3, 10_000):
        found = forward(engine, p.replaced(busy_sms=busy))
        assert torch.equal(found.out, usual.out) and torch.equal(found.lse, usual.lse)
    assert torch.equal(forward(engine, p).out, usual.out)


@engines
def test_one_plan_follows_the_multiprocessors_that_are_busy(engine: str) -> None:
    served_by, p = engine_named(engine), problem(lengths=(5000, 700))
    plan = served_by.plan(p)
    outs = [served_by.forward(p.replaced(busy_sms=busy), plan).out for busy in (0, 16, 100, 0)]
    assert all([torch.equal(out, outs[0]) for out in outs])


@engines
def test_a_collective_finds_multiprocessors_free(engine: str) -> None:
    """A kernel on another stream, started after the forward, ends before it does: the forward would otherwise hold every multiprocessor to its end. Other
    processes on the GPU may come between the two, so that one of a few attempts has to do."""
    p = problem(lengths=(32768, 32768)).replaced(busy_sms=16)
    forward(engine, p)
    assert any([_ends_before(partial(forward, engine, p)) for _ in range(5)])


def _ends_before(call: Callable[[], Any]) -> bool:
    """Whether small kernels on another stream, started after a call, end before it does."""
    other, ends = torch.cuda.Stream(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    x = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    call()
    ends[0].record()
    with torch.cuda.stream(other):
        for _ in range(8):
            x.add_(1.0)
        ends[1].record()
    torch.cuda.synchronize()
    return ends[1].elapsed_time(ends[0]) > 0  # milliseconds from the other stream's end to the call's


def test_shapes_of_stages_are_served_here() -> None:
    """A stage of a shared sequence that is large enough is served by a Hopper engine, with room for the collective."""
    from tilewise.distributed.plan import Sizes, plan_of_rank
    from tilewise.distributed.run import COLLECTIVE_SMS, Call, problem_of
    from tilewise.distributed.shard import engine_for

    part = plan_of_rank(masks.causal, 1, 4, 4 * 8192, Sizes(1, 8, 2, 128, 128), "cuda", stages=2).only
    assert part.keys is not None and len(part.stages) == 2
    call, q = Call(part, None, 0.1, 0.0, 0, False, ("auto", "a test"), True, {}), torch.randn(1, 8, 8192, 128, device="cuda", dtype=torch.bfloat16)
    busy = []
    for stage in part.stages:
        k, v = (torch.randn(1, 2, len(part.keys.stages[stage].positions), 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        p = problem_of(call, stage, q, k, v, None, ())
        engine = engine_for(p, call.backend, "causal")
        assert engine is not None and engine.name in ("cuda", "gluon") and p.partial
        busy.append(p.busy_sms)
    assert busy == [COLLECTIVE_SMS, 0]
