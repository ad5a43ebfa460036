"""The lazy tensors of tests/attacks/test_lazy_tensors.py on a GPU, with the Triton engine."""

from tests.attacks.test_lazy_tensors import *  # noqa: F403  (every test of that file)
from tests.gpu.test_faults import on_the_gpu as on_the_gpu
