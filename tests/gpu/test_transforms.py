"""torch.func and batched gradients on a GPU, with the Triton engine: see tests/engines/test_transforms.py."""

from tests.engines.test_transforms import *  # noqa: F403  (every test of that file)
from tests.gpu.test_faults import on_the_gpu as on_the_gpu
