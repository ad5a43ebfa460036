"""Generated problems for the CUDA forward, on the emulated Hopper GPU: what tests/gpu/test_properties.py does by the thousand, in small."""

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

import tilewise as tw
from tests.support.cases import Case, make
from tests.support.error_rule import check_forward
from tests.support.hopper.emulator import MISSING, Emulator
from tests.support.structures import Range, check_problems, drawn_problems, drawn_structure

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

# Around the kernel's tiles of 64 to 192 queries and 48 to 256 keys.
MIDDLE = Range(st.one_of(st.sampled_from([1, 2, 127, 128, 129, 255, 256, 257]), st.integers(3, 330)), (8, 16, 40, 64, 80, 96, 128, 192, 256), 200_000, 40)
PROBLEMS = 3


@pytest.mark.parametrize("seed", range(12))
def test_the_cuda_forward_keeps_the_error_rule(emulator: Emulator, seed: int) -> None:
    structure = replace(drawn_structure(seed, MIDDLE, torch.float16, torch.bfloat16), strides="contiguous")  # TMA takes few others

    def run(case: Case) -> None:
        inputs = make(case, structure.dtype, structure.dtype, "cpu")
        if tw.explain(inputs.query, inputs.key, inputs.value, backend="cuda", **inputs.arguments()).engine is not None:
            check_forward(case, "cuda", "cpu", structure.dtype)

    check_problems(structure, drawn_problems(structure, 1000 * seed, PROBLEMS, MIDDLE), run)
