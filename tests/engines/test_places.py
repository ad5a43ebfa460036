"""Parts of a problem, as context parallelism computes them: dropout by places in the whole, and parts in float32 that are merged by lse."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.support.cases import CAUSAL, Case, Draw
from tests.support.parts import Cutting, check_parts
from tilewise.core.places import Places
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.base import Request
from tilewise.engines.cpp import missing
from tilewise.engines.fa2 import _refuse_tensors
from tilewise.engines.gluon.refusals import refuse_problem
from tilewise.engines.gpu.limits import NO_TRITON
from tilewise.engines.gpu.plan import GpuPlan
from tilewise.engines.gpu.structure import structure_key
from tilewise.engines.registry import engine_named
from tilewise.frontend.dispatch import must_choose

ENGINES = ["reference", "blocked", pytest.param("cpp", marks=pytest.mark.skipif(missing() is not None, reason=str(missing())))]
DROPOUT = {"dropout_p": 0.3, "seed": 2**40 + 1}


def by_head_and_distance(draw: Draw) -> list[Any]:
    table = draw.learned(draw.case.heads, 9, dtype=torch.float32)
    return [lambda s, b, h, q, kv: s + table[h, (q - kv) % 9]]


WHOLE = Case("parts of 1000 tokens", batch=1, heads=2, kv_heads=1, q_len=1000, mask=CAUSAL, score=by_head_and_distance, options=DROPOUT, through=("out", "lse"))
SMALL = Case("parts of other lengths", heads=4, kv_heads=2, q_len=150, kv_len=100, v_dim=24, options=DROPOUT)


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_make_the_whole(engine: str) -> None:
    check_parts(WHOLE, engine, Cutting(128), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_parts_of_other_lengths_than_tiles(engine: str, dtype: torch.dtype) -> None:
    check_parts(SMALL, engine, Cutting(16, ranks=3), dtype)


@pytest.mark.parametrize("engine", ["reference", "blocked"])
def test_tokens_in_any_order(engine: str) -> None:
    check_parts(SMALL, engine, Cutting(1), torch.float64)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_few_queries(engine: str) -> None:
    """Where the C++ engine decodes."""
    p = part(Places(torch.tensor([48, 49, 50]), torch.arange(128, 192), 2, 5), q_len=3, dtype=torch.bfloat16).replaced(partial=True, max_scores=True)
    found, wanted = (engine_named(name).forward(p, engine_named(name).plan(p)) for name in (engine, "reference"))
    assert found.out.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def part(places: Places | None, q_len: int = 64, kv_len: int = 64, dtype: torch.dtype = torch.float32, dropout_p: float = 0.5) -> Problem:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((1, 2, n, 16), generator=generator).to(dtype) for n in (q_len, kv_len, kv_len))
    return make_problem(query, key, value, None, None, Options(dropout_p=dropout_p, seed=7))[0].replaced(places=places)


def at(first: int, length: int = 64) -> Tensor:
    return torch.arange(first, first + length)


# -- the same plan for other places ----------------------------------------------------------------------------------

OTHERS = {"queries": Places(at(128), at(0)), "keys": Places(at(0), at(128)), "batch": Places(at(0), at(0), batch=1), "head": Places(at(0), at(0), head=1)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", OTHERS)
def test_a_plan_does_not_take_one_part_for_another(engine: str, what: str) -> None:
    e, one, other = engine_named(engine), part(Places(at(0), at(0))), part(OTHERS[what])
    plan = e.plan(one)
    grad_out = torch.ones_like(one.query)
    for p in (one, other, one):
        shared, fresh = (e.forward(p, by) for by in (plan, e.plan(p)))
        assert torch.equal(shared.out, fresh.out)
        gradients = [e.backward(p, by, fresh, grad_out, None, frozenset()) for by in (plan, e.plan(p))]
        for name in ("query", "key", "value"):
            assert torch.equal(*(getattr(g, name) for g in gradients))
    assert not torch.equal(e.forward(one, plan).out, e.forward(other, plan).out)


def test_what_the_structure_key_covers() -> None:
    """Tables are bound by address: what they hold is no part of it."""
    keys = [structure_key(p) for p in (part(None), part(Places(at(0), at(0))), part(OTHERS["batch"]), part(OTHERS["head"]), part(None).replaced(partial=True))]
    keys.append(structure_key(part(None).replaced(busy_sms=16)))
    assert len(set(keys)) == len(keys)
    assert structure_key(part(OTHERS["queries"])) == structure_key(part(OTHERS["keys"])) == keys[1]


@pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
def test_what_kernels_keys_cover() -> None:
    from tilewise.engines.gpu.kernel_cache import store_key
    from tilewise.engines.gpu.launch import request_of
    from tilewise.engines.triton import aot
    from tilewise.engines.triton.fitting import fit_key

    def key(p: Problem) -> str:
        return store_key(request_of(aot.forward_launches(p)[0]()[0], 90))

    whole, placed = (part(places, dtype=torch.bfloat16) for places in (None, OTHERS["head"]))
    assert len({key(p) for p in (whole, placed, whole.replaced(partial=True), placed.replaced(partial=True))}) == 4
    assert key(placed) == key(part(OTHERS["batch"], dtype=torch.bfloat16)) == key(part(OTHERS["keys"], dtype=torch.bfloat16))
    assert fit_key(whole, ("fwd",)) != fit_key(whole.replaced(partial=True), ("fwd",))


@pytest.mark.parametrize("engine", ENGINES)
def test_places_do_not_matter_without_dropout(engine: str) -> None:
    e, scattered = engine_named(engine), Places(torch.randperm(64), torch.randperm(64), 3, 5)
    p, plain = part(scattered, dropout_p=0.0), part(None, dropout_p=0.0)
    assert e.refuse(p) is None and structure_key(p) == structure_key(plain)
    assert torch.equal(e.forward(p, e.plan(p)).out, e.forward(plain, e.plan(plain)).out)


# -- refusals --------------------------------------------------------------------------------------------------------

SCATTERED = {
    "query 1 at position 2 instead of 1": Places(at(0, 128)[::2], at(0)),
    "query 0 at position 8 instead of 0": Places(at(8), at(0)),
    "key 20 at position 100 instead of 84": Places(at(0), torch.cat([at(0, 16), at(80, 4), at(100, 44)])),
}


@pytest.mark.parametrize("reason", SCATTERED)
def test_kernels_refuse_scattered_tokens(reason: str) -> None:
    p = part(SCATTERED[reason])
    refused = engine_named("cpp").refuse(p)
    assert refused is not None and "blocks of 16 positions" in refused and refused.endswith(reason)
    assert must_choose(p, Request("auto", "the test", True, True))[0].name == "blocked"


def test_a_shorter_last_block_is_not_scattered() -> None:
    assert part(Places(torch.cat([at(16, 32), at(96, 8)]), at(48, 3)), q_len=40, kv_len=3).places.scattered is None


def test_engines_that_know_no_parts_refuse_them() -> None:
    p = part(OTHERS["head"], dtype=torch.bfloat16)
    partial = part(None, dtype=torch.bfloat16, dropout_p=0.0).replaced(partial=True)
    native = engine_named("native")
    assert "a part of one" in str(native.refuse(p)) and "a part of one" in str(refuse_problem(p))
    assert "no lse" in str(native.refuse(partial)) and "lse" in str(_refuse_tensors(partial, (9, 0)))
    assert native.refuse(part(OTHERS["head"], dropout_p=0.0)) is None
    assert refuse_problem(partial) is None  # the Hopper kernels write fp32


def test_a_plan_follows_what_a_part_asks_for() -> None:
    p = part(None, dtype=torch.bfloat16, dropout_p=0.0)
    plan = GpuPlan(p)
    states = [plan._state("forward", q) for q in (p, p.replaced(partial=True), p.replaced(busy_sms=16))]
    assert len({str(state) for state in states}) == 3


def test_parts_do_not_pass_the_operator() -> None:
    from tilewise.engines.torch_op import arguments

    with pytest.raises(AssertionError):
        arguments("blocked", part(OTHERS["head"]))
    assert tw.attention(*(torch.randn(1, 1, 4, 8) for _ in range(3))).shape == (1, 1, 4, 8)
