"""What Triton and NVRTC would leave for a Hopper GPU runs on an emulated one (tests/support/hopper)."""

from tests.support.hopper.fixture import emulator as emulator
