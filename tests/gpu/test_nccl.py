"""Several ranks on one GPU over NCCL, for correctness of streams and collectives; no speed is measured by it."""

import pytest
import torch

from tests.distributed.spawned import spawn


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.nccl.version() < (2, 30), reason="this NCCL cannot have several ranks on one GPU")
def test_two_ranks_on_one_gpu() -> None:
    """NCCL 2.30 has a switch for it, with few blocks for each rank and without multicast."""
    variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}
    spawn("tests.distributed.processes", "check_on_a_gpu", 2, backend="cpu:gloo,cuda:nccl", **variables)
