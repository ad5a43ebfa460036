"""Every engine on a real GPU, over the same cases, held to the same error rule:

    python -m pytest tests/gpu
"""

import pytest
import torch

from tests.cases import CASES, Case
from tests.error_rule import check

TYPED = [pytest.param(case, dtype, id=f"{case}-{str(dtype).removeprefix('torch.')}") for case in CASES for dtype in case.dtypes if dtype != torch.float64]


@pytest.mark.parametrize(("case", "dtype"), TYPED)
def test_triton(case: Case, dtype: torch.dtype) -> None:
    check(case, "triton", "cuda", dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocked(case: Case) -> None:
    check(case, "blocked", "cuda", case.dtypes[-1])


@pytest.mark.parametrize("case", [c for c in CASES if c.native], ids=str)
def test_native(case: Case) -> None:
    check(case, "native", "cuda", torch.float32 if torch.float32 in case.dtypes else case.dtypes[-1])
