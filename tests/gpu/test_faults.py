"""The faults of tests/engines/test_faults.py on a GPU, with the Triton engine."""

from collections.abc import Iterator

import pytest
import torch

from tests.engines.test_faults import *  # noqa: F403  (every test of that file)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tensors that a test makes lie on the GPU; what no engine takes part in, or another one, is tested elsewhere."""
    if request.node.callspec.params.get("engine") != "triton" if hasattr(request.node, "callspec") else True:
        pytest.skip("tests/engines runs it")
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)
