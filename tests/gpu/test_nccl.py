"""Ranks of a shared sequence on one GPU, for correctness of kernels, streams and collectives; no speed is measured by it."""

import pytest
import torch
from torch import distributed

from tests.distributed.spawned import COMPILING, spawn

NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # whoever asks whether there is a GPU must not begin to use it before the ranks are forked
NCCL = torch.cuda.nccl.version() if torch.cuda.is_available() and distributed.is_nccl_available() else (0, 0)
kernels = pytest.mark.parametrize("kernels", ["usual", "hopper"])


@kernels
@pytest.mark.skipif(torch.cuda.is_available() and NCCL < (2, 30), reason=f"NCCL {'.'.join(map(str, NCCL))} cannot have several ranks on one GPU, 2.30 can")
def test_two_ranks_on_one_gpu(kernels: str) -> None:
    """NCCL 2.30 has a switch for it, with few blocks for each rank and without multicast."""
    variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}
    spawn("tests.distributed.processes", "check_on_a_gpu", 2, kernels, backend="cpu:gloo,cuda:nccl", timeout=COMPILING, **variables, **NVML)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.skipif(torch.cuda.is_available() and NCCL == (0, 0), reason="this torch has no NCCL")
def test_one_rank_over_nccl(backend: str) -> None:
    spawn("tests.distributed.processes", "check_one_rank_over_nccl", 1, backend=backend, timeout=COMPILING, **NVML)


@kernels
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="this torch has no gloo")
def test_several_ranks_on_one_gpu_over_gloo(ranks: int, kernels: str) -> None:
    """gloo copies what travels through the CPU's memory; all else is as on several GPUs."""
    spawn("tests.distributed.processes", "check_on_a_gpu", ranks, kernels, timeout=COMPILING, **NVML)
