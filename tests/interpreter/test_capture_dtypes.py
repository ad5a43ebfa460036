"""Captures of other dtypes than the problem's in Triton's interpreter: see tests/engines/test_capture_dtypes.py."""

import pytest
import torch

from tests.engines import test_capture_dtypes as engines


@pytest.mark.parametrize("size", [1, 300])
@pytest.mark.parametrize("captured", [*engines.HALF, torch.float64])
def test_derivatives_have_the_scores_digits_and_range(captured: torch.dtype, size: int) -> None:
    engines.test_derivatives_have_the_scores_digits_and_range("triton", torch.float32, captured, size)


def test_float64_captures_in_narrower_problems() -> None:
    engines.test_float64_captures_in_narrower_problems("triton", torch.float16)
