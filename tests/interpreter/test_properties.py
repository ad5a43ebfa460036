"""Generated problems in Triton's interpreter: what tests/gpu/test_properties.py does by the thousand, in small."""

import pytest
import torch

from tests.support.changing import CHANGES, check_changes
from tests.support.structures import SMALL, by_the_rule, check_problems, drawn, drawn_problems, drawn_structure

PROBLEMS = 3


@pytest.mark.parametrize("seed", range(10))
def test_triton_keeps_the_error_rule(seed: int) -> None:
    structure = drawn_structure(seed, SMALL, torch.float16, torch.bfloat16, torch.float32)
    cases = drawn_problems(structure, seed, PROBLEMS, SMALL)
    check_problems(structure, cases, by_the_rule(structure, "triton", "cpu"))


@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float32), (1, torch.float16)])
def test_captures_that_change_between_calls(seed: int, dtype: torch.dtype) -> None:
    check_changes(drawn(CHANGES, seed), "triton", "cpu", dtype)
