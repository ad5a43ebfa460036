"""Thousands of generated problems on a GPU, forward and every gradient, held to the error rule:

    python -m pytest tests/gpu/test_properties.py -n 14

Each test is one structure, whose kernels are compiled once, and many problems of it. TILEWISE_PROPERTY_SEED draws others; a failure
names the seed, the structure and the problems. `-k "triton-17"` repeats one structure.
"""

import os

import pytest
import torch

import tilewise as tw
from tests.support.cases import Case, make
from tests.support.changing import CHANGES, check_changes
from tests.support.structures import LARGE, by_the_rule, check_problems, drawn, drawn_problems, drawn_structure

HALF = (torch.float16, torch.bfloat16)
ENGINES = {"triton": (*HALF, torch.float32), "gluon": HALF, "cuda": HALF}
STRUCTURES, PROBLEMS = 70, 40
VARIABLE = "TILEWISE_PROPERTY_SEED"
FIRST = int(os.environ.get(VARIABLE, "0")) * STRUCTURES


@pytest.mark.parametrize("number", range(STRUCTURES))
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_keeps_the_error_rule(engine: str, number: int) -> None:
    structure = drawn_structure(FIRST + number, LARGE, *ENGINES[engine])
    cases = drawn_problems(structure, 1000 * (FIRST + number), PROBLEMS, LARGE)  # seeds of their own: no two structures get the same sizes
    if not cases:
        pytest.skip(f"rows see so few keys that errors are luck: {structure}")
    print(f"repeat with {VARIABLE}={FIRST // STRUCTURES} pytest tests/gpu/test_properties.py -k '{engine}-{number}'; {len(cases)} problems of {structure}")
    check_problems(structure, [case for case in cases if serves(engine, case, structure.dtype)], by_the_rule(structure, engine, "cuda"))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("dtype", ENGINES["triton"])
def test_captures_that_change_between_calls(seed: int, dtype: torch.dtype) -> None:
    check_changes(drawn(CHANGES, FIRST + seed), "triton", "cuda", dtype)


def serves(engine: str, case: Case, dtype: torch.dtype) -> bool:
    inputs = make(case, dtype, dtype, "cuda")
    return tw.explain(inputs.query, inputs.key, inputs.value, backend=engine, **inputs.arguments()).engine is not None
