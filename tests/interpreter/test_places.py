"""Parts of a problem on the Triton engine: dropout by places in the whole, and parts in float32 that are merged by lse."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases import CAUSAL, Case, Draw
from tests.support.parts import Cutting, check_parts
from tilewise.core.places import Places
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.registry import engine_named

TRITON, REFERENCE = engine_named("triton"), engine_named("reference")
DROPOUT = {"dropout_p": 0.3, "seed": 2**40 + 1}


def by_head_and_distance(draw: Draw) -> list[Any]:
    table = draw.learned(draw.case.heads, 9, dtype=torch.float32)
    return [lambda s, b, h, q, kv: s + table[h, (q - kv) % 9]]


SIZES = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": 40}
CASES = [  # dQ added up in memory, and by programs of its own
    Case("parts", mask=CAUSAL, options=DROPOUT, through=("out", "lse"), v_dim=24, **SIZES),
    Case("parts with a learned score", score=by_head_and_distance, options=DROPOUT, **SIZES),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_make_the_whole(case: Case, dtype: torch.dtype) -> None:
    check_parts(case, "triton", Cutting(16), dtype)


def part(places: Places | None, q_len: int = 16, kv_len: int = 16, mask: Any = None, dtype: torch.dtype = torch.float32) -> Problem:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((1, 2, n, 16), generator=generator).to(dtype) for n in (q_len, kv_len, kv_len))
    return make_problem(query, key, value, mask, None, Options(dropout_p=0.5, seed=7))[0].replaced(places=places)


def at(first: int, length: int = 16) -> Tensor:
    return torch.arange(first, first + length)


OTHERS = {"queries": Places(at(128), at(0)), "keys": Places(at(0), at(128)), "batch": Places(at(0), at(0), batch=1), "head": Places(at(0), at(0), head=1)}


@pytest.mark.parametrize("what", OTHERS)
def test_a_plan_does_not_take_one_part_for_another(what: str) -> None:
    one, other = part(Places(at(0), at(0))), part(OTHERS[what])
    plan, grad_out = TRITON.plan(one), torch.ones_like(one.query)
    for p in (one, other, one):
        found, wanted = TRITON.forward(p, plan), REFERENCE.forward(p, REFERENCE.plan(p))
        torch.testing.assert_close(found.out, wanted.out, rtol=1e-5, atol=1e-5)
        ours, theirs = (engine.backward(p, plan, wanted, grad_out, None, frozenset()) for engine in (TRITON, REFERENCE))
        for name in ("query", "key", "value"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("q_len", [1, 16])
def test_decoding_and_rows_that_are_computed_again(q_len: int) -> None:
    """A NaN in a masked key makes kernels compute rows one by one."""
    keys = torch.cat([at(16, 32), at(1024, 8)])
    p = part(Places(at(64, q_len), keys, 2, 5), q_len, len(keys), mask=lambda b, h, q, kv: kv != 3, dtype=torch.float16).replaced(partial=True)
    p.value[:, :, 3] = torch.nan
    found, wanted = TRITON.forward(p, TRITON.plan(p)), REFERENCE.forward(p, REFERENCE.plan(p))
    assert found.out.dtype == torch.float32
    torch.testing.assert_close(found.out, wanted.out, rtol=2e-3, atol=2e-3)
    grad_out = torch.randn(wanted.out.shape, generator=torch.Generator().manual_seed(1)).half()
    gradients = [engine.backward(p, engine.plan(p), wanted, grad_out, None, frozenset()) for engine in (TRITON, REFERENCE)]
    for name in ("query", "key", "value"):
        ours, theirs = (getattr(g, name) for g in gradients)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=5e-3)


def test_scattered_tokens_are_refused() -> None:
    refused = TRITON.refuse(part(Places(at(8), at(0))))
    assert refused is not None and refused.endswith("got query 0 at position 8 instead of 0")
    assert TRITON.refuse(part(OTHERS["head"])) is None
