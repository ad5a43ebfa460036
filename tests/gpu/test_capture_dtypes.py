"""Captures of other dtypes than the problem's on a GPU, with the Triton engine: see tests/engines/test_capture_dtypes.py."""

from tests.engines.test_capture_dtypes import *  # noqa: F403  (every test of that file)
from tests.gpu.test_faults import on_the_gpu as on_the_gpu
