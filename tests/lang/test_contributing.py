"""The example of CONTRIBUTING.md, followed: an operation needs one entry. And the list of functions in the docs is the language's."""

import re
from pathlib import Path

import pytest
import torch

from tests.support.contributing import check_example, example_operation
from tests.support.programs import assert_derives_as_autograd, grid, scores
from tilewise.engines.cpp import missing
from tilewise.engines.cxx import writer as cxx
from tilewise.engines.gpu import emit as gpu
from tilewise.lang import trace_score
from tilewise.lang.ops import OPS
from tilewise.lang.torch_functions import FUNCTIONS

ROOT = Path(__file__).parents[2]
ENGINES = ["reference", "blocked", pytest.param("cpp", marks=pytest.mark.skipif(missing() is not None, reason=str(missing())))]


def test_the_example_is_derived_as_autograd_does() -> None:
    with example_operation() as cube:
        call = trace_score((cube,), torch.float64)
        assert "cube" in call.program.text
        assert_derives_as_autograd(call, grid() | {"score": scores(torch.float64)})
    assert "cube" not in OPS


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_compute_the_example(engine: str) -> None:
    """Triton's turn is in tests/interpreter/test_operations.py."""
    check_example(engine)


def test_entries_say_which_operations_the_emitters_write_themselves() -> None:
    special = {name for name, op in OPS.items() if op.special}
    assert special == set(gpu.SPECIAL) | set(cxx.SPECIAL) | {"where", "cast"}  # these two convert their operands in a way of their own
    assert {name for name, op in OPS.items() if op.triton is None or op.cpp is None} <= special


def test_the_docs_list_every_function() -> None:
    table = (ROOT / "docs" / "masks.md").read_text().partition("### Torch's functions")[2].partition("\n## ")[0]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(FUNCTIONS)
