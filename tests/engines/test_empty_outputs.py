"""Outputs that a prepared pass makes: laid out as like_query says, and no memory shared by what kernels write."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.recorded_launches import record
from tilewise.core.problem import Options, make_problem
from tilewise.engines.base import EmptyOutputs, like_query
from tilewise.engines.gpu.workspace import ALIGNED_BYTES, Part, Workspace

LAYOUTS: dict[str, Tensor] = {
    "contiguous": torch.empty(2, 3, 5, 8),
    "transposed": torch.empty(2, 5, 3, 8).transpose(1, 2),
    "sequence first": torch.empty(5, 2, 3, 8).permute(1, 2, 0, 3),
    "heads first": torch.empty(3, 2, 5, 8).transpose(0, 1),
    "of a fused projection": torch.empty(2, 5, 3, 3, 8)[:, :, 1].transpose(1, 2),
    "of a fused projection, by features": torch.empty(2, 5, 3, 24)[..., 8:16].transpose(1, 2),
    "cut in the sequence": torch.empty(2, 3, 9, 8)[:, :, 2:7],
    "head dim not last": torch.empty(2, 3, 8, 5).transpose(2, 3),
    "every second feature": torch.empty(2, 3, 5, 16)[..., ::2],
    "one batch for all": torch.empty(1, 3, 5, 8).expand(2, -1, -1, -1),
    "one head for all": torch.empty(2, 5, 1, 8).transpose(1, 2).expand(-1, 3, -1, -1),
    "one query": torch.empty(2, 1, 3, 8).transpose(1, 2),
    "one head": torch.empty(2, 5, 1, 8).transpose(1, 2),
    "one of all": torch.empty(1, 1, 1, 8).transpose(1, 2),
    "one batch, strided oddly": torch.empty(1, 5, 3, 8).transpose(1, 2).as_strided((1, 3, 5, 8), (7, 8, 24, 1)),
}


@pytest.mark.parametrize("v_dim", [8, 16])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("needs_lse", [True, False])
def test_outputs_are_laid_out_as_like_query_says(name: str, v_dim: int, needs_lse: bool) -> None:
    query = LAYOUTS[name]
    key, value = torch.empty(2, 3, 6, 8)[: query.shape[0], : query.shape[1]], torch.empty(2, 3, 6, v_dim)[: query.shape[0], : query.shape[1]]
    outputs = EmptyOutputs(make_problem(query, key, value, None, None, Options())[0])
    output, (out, lse, max_score) = outputs(query, needs_lse)
    wanted = like_query(query, v_dim)
    assert (out.shape, out.stride(), out.dtype) == (wanted.shape, wanted.stride(), wanted.dtype) and out is output.out
    rows, addresses = query.shape[:3].numel(), sorted([lse.data_ptr(), max_score if isinstance(max_score, int) else max_score.data_ptr()])
    assert addresses[0] + 4 * rows <= addresses[1] and not any([address % 16 for address in addresses])
    if needs_lse:
        assert output.lse is lse and output.max_score is max_score and lse.shape == max_score.shape == query.shape[:3]
    else:
        assert output.lse.numel() == output.max_score.numel() == 0 and lse.numel() * 4 >= addresses[1] - addresses[0] + 4 * rows


def test_the_parts_of_a_workspace_share_no_memory() -> None:
    workspace = Workspace(torch.device("cpu"), Part((3, 5)), None, Part((7,), torch.float16), Part((2, 2, 2), torch.int32))
    memory = workspace.allocate()
    tensors, parts = workspace.tensors(memory), workspace.parts(memory)
    assert parts[1] is None and tensors[1] is None
    assert [(t.shape, t.dtype) for t in tensors if t is not None] == [((3, 5), torch.float32), ((7,), torch.float16), ((2, 2, 2), torch.int32)]
    assert parts == [None if t is None else t.data_ptr() for t in tensors]
    begins = [part - memory.data_ptr() for part in parts if part is not None]
    assert begins == [0, ALIGNED_BYTES, 2 * ALIGNED_BYTES] and memory.numel() == 3 * ALIGNED_BYTES


@pytest.mark.parametrize(("backend", "queries"), [("triton", 64), ("triton", 1), ("gluon", 64), ("cuda", 64)])
def test_a_replayed_call_makes_lse_only_where_it_is_asked_for(backend: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import tilewise as tw
    from tilewise.engines.gluon import NO_GLUON
    from tilewise.frontend import call_cache

    if NO_GLUON is not None:
        pytest.skip(NO_GLUON)
    record(monkeypatch)
    replayed: list[Any] = []
    whole = call_cache.CachedCall.replay
    monkeypatch.setattr(call_cache.CachedCall, "replay", lambda *given: replayed.append(whole(*given)) or replayed[-1])
    query, key = torch.zeros(2, 4, queries, 64, dtype=torch.bfloat16), torch.zeros(2, 2, 128, 64, dtype=torch.bfloat16)
    for return_lse in (False, True):
        for _ in range(2):
            tw.attention(query, key, key, enable_gqa=True, backend=backend, return_lse=return_lse)
    assert [output.lse.shape for output in replayed] == [(0,), query.shape[:3]]
