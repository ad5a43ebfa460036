"""Lazy tensors in Triton's interpreter: see tests/attacks/test_lazy_tensors.py."""

from pathlib import Path
from typing import Any

import pytest

from tests.attacks import test_lazy_tensors as attacks


@pytest.mark.parametrize("make", [attacks.negated, attacks.zeros])
def test_everything_at_once(make: Any) -> None:
    attacks.test_everything_at_once("triton", make)


def test_given_tile_maps_and_their_masks(tmp_path: Path) -> None:
    attacks.test_given_tile_maps_and_their_masks("triton", tmp_path)
