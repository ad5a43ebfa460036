"""What the Triton engine does not do within the error rule yet, and what it refuses: one place, with reasons."""

import pytest
import torch

import tilewise as tw
from tests.support.cases import Case, make

# Scores are kept in base 2 and lse in base e: converting between them costs two roundings of lse, which a row with a single key shows.
FLOAT32_MISSES = {"window of one": "weights recomputed from lse are off by a few roundings where plain PyTorch has exactly 1"}


def refused(case: Case, device: str, dtype: torch.dtype, engine: str = "triton") -> None:
    """Skip a case that the engine refuses, with its reason."""
    inputs = make(case, dtype, dtype, device)
    said = tw.explain(inputs.query, inputs.key, inputs.value, backend=engine, **inputs.arguments())
    if said.engine is None:
        pytest.skip(next(v.reason for v in said.verdicts if v.engine == engine))
