"""Block masks where only a GPU tells: CUDA graphs, and lists on the device."""

import pytest
import torch

from tilewise import flex


def causal(b, h, q, kv):  # type: ignore[no-untyped-def]  # as users write them
    return q >= kv


def test_a_block_mask_is_made_while_a_graph_is_captured() -> None:
    query, key, value = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def step() -> tuple[flex.BlockMask, torch.Tensor]:
        mask = flex.create_block_mask(causal, None, None, 300, 300, device="cuda")
        return mask, flex.flex_attention(query, key, value, block_mask=mask)

    _, wanted = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flex.create_block_mask(lambda b, h, q, kv: q > kv + 1, None, None, 300, 300, device="cuda")  # for no call at all
        mask, out = step()
        with pytest.raises(RuntimeError, match="captured"):
            mask.kv_indices  # noqa: B018 - reading it is what is tested
    graph.replay()
    assert torch.equal(out, wanted)
    assert torch.equal(flex.flex_attention(query, key, value, block_mask=mask), wanted)
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 3]]]  # the last row of blocks reaches past the end: none of them is full


def test_a_written_list_is_honoured() -> None:
    query, key, value = (torch.randn(2, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = flex.create_block_mask(causal, 2, 2, 256, 256, device="cuda")
    before = flex.flex_attention(query, key, value, block_mask=mask)
    mask.kv_num_blocks[1] = 0
    mask.full_kv_num_blocks[1] = 0
    after = flex.flex_attention(query, key, value, block_mask=mask)
    assert after[1].count_nonzero() == 0
    torch.testing.assert_close(after[0], before[0], rtol=2e-2, atol=2e-2)
