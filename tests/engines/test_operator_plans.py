"""Which calls of the operators share a plan: everything that the call cache's key covers makes another, and nothing else does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import tilewise as tw
from tilewise import masks, scores
from tilewise.core.map_cache import maps
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines import packed_call
from tilewise.engines.operator_plans import plan_of
from tilewise.engines.packed_call import PackedCall, packed
from tilewise.engines.torch_op import arguments

LENGTH, DIM = 8, 16


def tensor(length: int = LENGTH, dtype: torch.dtype = torch.float32, offset: int = 0) -> Tensor:
    size = 2 * length * DIM
    return torch.zeros(size + 64, dtype=dtype)[offset : offset + size].view(1, 2, length, DIM)


IDS, TABLE, SINKS = torch.zeros(LENGTH, dtype=torch.int64), torch.zeros(LENGTH), torch.zeros(2)
# The key holds ids and addresses: what a change makes must not take the place of what went before it.
BASE = [tensor(), tensor(), tensor()]


def asked(
    given: list[Tensor] | None = None, ids: Tensor = IDS, table: Tensor = TABLE, sinks: Tensor = SINKS, seed: Any = 3, width: int = 5, **options: Any
) -> Any:
    q, k, v = given or BASE
    mask = lambda b, h, i, j: (ids[i] == ids[j]) & (i - j < width)
    score = [lambda s, b, h, i, j: s + table[j], scores.sinks(sinks)]
    problem, _ = make_problem(q, k, v, mask, score, Options(dropout_p=0.5, seed=seed, **options))
    return plan(problem)


def plan(problem: Problem) -> Any:
    return plan_of(PackedCall(packed(arguments("blocked", problem))))  # an engine that makes a new plan every time it is asked


@pytest.fixture(autouse=True)
def forgotten() -> None:
    maps.clear()


def filled() -> Any:
    IDS.fill_(1)
    TABLE.fill_(1.0)
    BASE[0].fill_(1.0)
    return asked()


def without_grad() -> Any:
    with torch.no_grad():
        return asked()


def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return asked(deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)


def with_tf32() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return asked()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


ALIKE: dict[str, Callable[[], Any]] = {
    "the same": asked,
    "other addresses": lambda: asked([tensor(), tensor(), tensor()]),
    "other contents": filled,
    "sinks elsewhere": lambda: asked(sinks=torch.zeros(2)),
    "another seed": lambda: asked(seed=torch.tensor(4)),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "scale": lambda: asked(scale=0.5),
    "an integer of the mask": lambda: asked(width=6),
    "length": lambda: asked([tensor(6), BASE[1], BASE[2]]),
    "length of the keys": lambda: asked([BASE[0], tensor(6), tensor(6)]),
    "dtype": lambda: asked([tensor(dtype=torch.float64) for _ in range(3)]),
    "query's strides": lambda: asked([tensor().view(1, LENGTH, 2, DIM).transpose(1, 2), BASE[1], BASE[2]]),
    "value's strides": lambda: asked([BASE[0], BASE[1], tensor().view(1, LENGTH, 2, DIM).transpose(1, 2)]),
    "query's alignment": lambda: asked([tensor(offset=1), BASE[1], BASE[2]]),
    "key's alignment": lambda: asked([BASE[0], tensor(offset=2), BASE[2]]),
    "value's alignment": lambda: asked([BASE[0], BASE[1], tensor(offset=3)]),
    "a gradient of the query": lambda: asked([tensor().requires_grad_(), BASE[1], BASE[2]]),
    "a gradient of the value": lambda: asked([BASE[0], BASE[1], tensor().requires_grad_()]),
    "grad mode": without_grad,
    "deterministic": lambda: asked(deterministic=True),
    "torch's switch for that": deterministic,
    "TF32": with_tf32,
    "another mask tensor": lambda: asked(ids=IDS.clone()),
    "a mask tensor of another dtype": lambda: asked(ids=IDS.int()),
    "another score tensor": lambda: asked(table=TABLE.clone()),
    "a score tensor that learns": lambda: asked(table=TABLE.clone().requires_grad_()),
    "sinks that learn": lambda: asked(sinks=torch.zeros(2, requires_grad=True)),
    "sinks of another dtype": lambda: asked(sinks=SINKS.double()),
}


@pytest.mark.parametrize("name", ALIKE)
def test_calls_that_share_a_plan(name: str) -> None:
    first = asked()
    assert ALIKE[name]() is first


@pytest.mark.parametrize("name", OTHERS)
def test_calls_that_do_not(name: str) -> None:
    first = asked()
    assert OTHERS[name]() is not first
    assert asked() is first


def unseen(ids: Tensor) -> Callable[[], Any]:
    return lambda: plan(make_problem(*BASE, masks.document(ids), None, Options())[0])


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(LENGTH, dtype=torch.int64)


NEVER: dict[str, Callable[[], Any]] = {
    "a Parameter": unseen(Parameter(IDS.clone(), requires_grad=False)),
    "an inference tensor": unseen(inference()),
    "given tiles": lambda: plan(make_problem(*BASE, tw.tile_map(masks.causal, q_len=LENGTH, kv_len=LENGTH), None, Options())[0]),
}


@pytest.mark.parametrize("name", NEVER)
def test_plans_that_are_not_kept(name: str) -> None:
    assert NEVER[name]() is not NEVER[name]()


def test_plans_go_with_the_maps_and_with_the_masks_tensors() -> None:
    first = asked()
    maps.clear()
    assert asked() is not first
    ids = IDS.clone()
    kept, address = asked(ids=ids), id(ids)
    del ids
    others = [IDS.clone() for _ in range(50)]
    reused = [t for t in others if id(t) == address]  # with luck, one has its place
    assert all(asked(ids=t) is not kept for t in reused or others[:1])


@pytest.mark.parametrize("engine", ["cpp", "blocked", "reference"])
def test_the_operator_follows_what_tensors_hold(engine: str) -> None:
    torch.manual_seed(0)
    ids, table = torch.arange(300) // 50, torch.randn(300)
    for step in range(3):
        q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))
        mask, score = masks.document(ids), lambda s, b, h, i, j: s + table[j]
        found = torch.ops.tilewise.attention_forward(*packed(arguments(engine, make_problem(q, k, v, mask, score, Options())[0])))[0]
        torch.testing.assert_close(found, tw.attention(q, k, v, mask=mask, score=score, backend="reference"))
        ids.copy_(torch.arange(300) // (20 + 30 * step))
        table.copy_(torch.randn(300))


@pytest.mark.parametrize("name", ["Parameter", "map"])
def test_a_call_is_unpacked_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no plan is kept, one is made of the problem that is computed. Of a given map that costs a GPU's time."""
    limits = Parameter(torch.arange(40), requires_grad=False)
    given = tw.tile_map(masks.causal, q_len=40, kv_len=40, tile=(16, 8))
    q = torch.randn(1, 2, 40, 8)
    mask = given if name == "map" else lambda b, h, q, kv: limits[q] >= kv
    problem, _ = make_problem(q, q, q, mask, None, Options())
    count, original = [], packed_call.unpacked
    monkeypatch.setattr(packed_call, "unpacked", lambda *given: count.append(1) or original(*given))
    given_arguments = packed(arguments("cpp", problem))
    out, lse, _ = torch.ops.tilewise.attention_forward(*given_arguments)
    torch.ops.tilewise.attention_backward(*given_arguments, out, lse, out, None, [])
    torch.testing.assert_close(out, tw.attention(q, q, q, mask=masks.causal, backend="reference"))
    assert len(count) == 2
