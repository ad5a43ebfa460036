"""Masks and scores kept in modules, on a GPU: calls are replayed, and the allocator gives the same addresses again and again."""

import copy

import pytest
import torch
from torch import Tensor, nn

import tilewise as tw
from tests.gpu.test_fused import fused
from tilewise import masks, scores

TOKENS = 512


def tensors() -> list[Tensor]:
    return [torch.randn(1, 2, TOKENS, 64, generator=torch.Generator().manual_seed(n)).to("cuda", torch.bfloat16) for n in range(3)]


def check(mask: object, score: object, engine: str) -> None:
    with torch.no_grad():
        for _ in range(2):
            found, wanted = (tw.attention(*tensors(), mask=mask, score=score, backend=backend) for backend in (engine, "reference"))
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


@fused
@pytest.mark.parametrize("parameter", [False, True])
def test_documents_in_memory_that_is_used_again(parameter: bool, engine: str) -> None:
    ids = torch.zeros(TOKENS, dtype=torch.int64, device="cuda")
    held = nn.Parameter(ids, requires_grad=False) if parameter else ids
    mask = masks.document(held)
    for length in (8, 100, 64, 200, 31):
        held.data = torch.arange(TOKENS, device="cuda") // length
        check(mask, None, engine)


@fused
def test_swapped_and_copied_tables(engine: str) -> None:
    layer = tw.nn.RelativeBias(2, 8, device="cuda")
    kept = scores.relative_bias(layer.table)
    for step in range(4):
        torch.utils.swap_tensors(layer.table, nn.Parameter(torch.randn(2, 17, device="cuda") * step))
        check(masks.causal, kept, engine)
        check(masks.causal, copy.deepcopy(kept), engine)
        layer.load_state_dict({"table": torch.randn(2, 17, device="cuda")}, assign=True)
        check(masks.causal, layer(), engine)
        layer.table = kept._sources[0][0]
