"""The C++ engine over the same cases as every engine, held to the same error rule."""

import pytest
import torch

from tests.cases import CASES, Case
from tests.error_rule import check

TYPED = [pytest.param(case, dtype, id=f"{case}-{str(dtype).removeprefix('torch.')}") for case in CASES for dtype in case.dtypes]


@pytest.mark.parametrize(("case", "dtype"), TYPED)
def test_engine(case: Case, dtype: torch.dtype) -> None:
    check(case, "cpp", "cpu", dtype)
