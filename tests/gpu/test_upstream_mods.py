"""Every mask and score of torch's own FlexAttention tests and of attention-gym, forward and backward by the error rule, on a GPU."""

import pytest
import torch

from tests.support.cases import Case
from tests.support.error_rule import check
from tests.support.triton_misses import refused
from tests.support.upstream_cases import UPSTREAM_CASES

ENGINES = ["triton", "gluon", "cuda"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", UPSTREAM_CASES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_engine(engine: str, case: Case, dtype: torch.dtype) -> None:
    refused(case, "cuda", dtype, engine)
    check(case, engine, "cuda", dtype)
