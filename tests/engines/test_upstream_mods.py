"""Every mask and score of torch's own FlexAttention tests and of attention-gym on the CPU's engines; tests/gpu has the others."""

import pytest
import torch

from tests.support.cases import Case
from tests.support.error_rule import check
from tests.support.upstream_cases import UPSTREAM_CASES


@pytest.mark.parametrize("case", UPSTREAM_CASES, ids=str)
def test_blocked(case: Case) -> None:
    check(case, "blocked", "cpu", torch.bfloat16)
