"""What ranks of a shared sequence compute, one after the other on one GPU, by the error rule."""

import pytest
import torch

from tests.support.cases import Case
from tests.support.error_rule import check
from tests.support.shards import SHARED, by_shards


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("engine", ["flex", "triton"])
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_shards(case: Case, engine: str, stages: int) -> None:
    check(case, engine, device="cuda", dtype=torch.bfloat16, computed=by_shards(3, stages))


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_shards_by_the_hopper_kernels(case: Case, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave small problems to Triton's, as these are."""
    monkeypatch.setattr("tilewise.engines.gluon.WORTH_IT", 0)
    check(case, "flex", device="cuda", dtype=torch.bfloat16, computed=by_shards(3, stages))
