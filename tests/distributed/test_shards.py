"""What ranks of a shared sequence compute, one after the other in this process, by the error rule."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.cases import problems
from tests.support.cases import Case
from tests.support.error_rule import check
from tests.support.shards import SHARED, by_shards
from tilewise import masks, scores
from tilewise.core.problem import traced_scores
from tilewise.distributed.plan import Sizes, plan_of_rank
from tilewise.distributed.run import COLLECTIVE_SMS, Call, problem_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_shards(case: Case, stages: int, dtype: torch.dtype) -> None:
    check(case, "flex", dtype=dtype, computed=by_shards(3, stages))


@pytest.mark.parametrize("case", SHARED[-1:], ids=str)
def test_heads_and_rows(case: Case) -> None:
    check(case, "blocked", computed=by_shards(4, 1))


class _NoWaiting(TorchDispatchMode):
    """Fails where the host asks a tensor for a number, for which it would wait on a GPU."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_calls_with_a_score_do_not_wait() -> None:
    """What positions are like is known from the plan: a score is placed in every call."""
    score = traced_scores((scores.alibi(2),), torch.float32, torch.device("cpu"))
    assert score is not None
    for stages in (1, 2):
        part = plan_of_rank(masks.causal, 1, 3, 1000, Sizes(1, 2, 2, 8, 8), "cpu", stages=stages).only
        assert part.keys is not None
        for stage in part.stages:
            with _NoWaiting():
                part.placed(score, stage)


def test_the_first_of_two_stages_leaves_multiprocessors_to_the_exchange() -> None:
    for stages, busy in ((1, [0]), (2, [COLLECTIVE_SMS, 0])):
        part = plan_of_rank(masks.causal, 1, 3, 1000, Sizes(1, 2, 2, 8, 8), "cpu", stages=stages).only
        assert part.keys is not None
        call, q = Call(part, None, 1.0, 0.0, 0, False, ("auto", "a test"), True, {}), torch.randn(1, 2, len(part.whole.row_positions), 8)
        keys = [torch.randn(1, 2, len(stage.positions), 8) for stage in part.keys.stages]
        problems = [problem_of(call, n, q, k, k, None, ()) for n, k in enumerate(keys)]
        assert [p.busy_sms for p in problems] == busy and [p.partial for p in problems] == [stages == 2] * stages


@settings(max_examples=12, deadline=None)
@given(problems(), st.integers(1, 5), st.integers(1, 2))
def test_generated_masks_and_scores(case: Case, ranks: int, stages: int) -> None:
    check(case, "blocked", computed=by_shards(ranks, stages))
