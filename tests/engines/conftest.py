"""What tests of tilewise.flex share; they ask for it by name."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.attention.flex_attention as theirs


@pytest.fixture
def torchs_flex_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The tensors are small: threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
