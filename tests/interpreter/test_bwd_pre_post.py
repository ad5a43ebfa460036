"""The kernels before and after the Hopper backward, in Triton's interpreter: rows are permuted into the order of strips and back."""

import pytest
import torch

from tilewise.engines.gluon.kernel_args import PostprocessArgs, PostprocessConstants, PostprocessTensors, PreprocessArgs, PreprocessConstants, PreprocessTensors
from tilewise.engines.gluon.patches import HEIGHT
from tilewise.engines.gpu.kernel_args import AttentionConstants, BwdStrides, Mods, PreprocessStrides, Schedule, Shape, Strides
from tilewise.frontend.token_order import TokenPermutation

SHAPE, HEADS = (16, 32), 2
TOKENS = SHAPE[0] * SHAPE[1]


def arranged(t: torch.Tensor, dim: int, patched: bool) -> torch.Tensor:
    return TokenPermutation(SHAPE, (HEIGHT,)).permute(t, dim).contiguous() if patched else t


def strides(t: torch.Tensor) -> Strides:
    return Strides(t.stride())


def constants(m: int, n: int, dim: int) -> AttentionConstants:
    flags = {"mapped": False, "given": False, "dropout": False, "placed": False, "sinks": False, "upcast": False}
    return AttentionConstants(m, n, dim, dim, dim, dim, **flags, precision="ieee", stages=1, masked_stages=1, page=0, anchored=False)


def postprocess_args(like: torch.Tensor, tiles: int, grid_width: int, scale: tuple[float, float, float]) -> PostprocessArgs:
    """Of tensors with this one's shape, without a mask. There are as many key tiles as query tiles."""
    heads, tokens = like.shape[1:3]
    everything = Schedule(None, None, None, None, (0, 0))
    mods = Mods(scale, 1.0, 0, ((), (), (), ()), ((), (), (), ()))
    shape = Shape(heads, 1, tokens, tokens)
    return PostprocessArgs(BwdStrides(*[strides(like)] * 7), everything, tiles, everything, tiles, heads * tiles, shape, tokens, grid_width, mods)


@pytest.mark.parametrize("patched", [False, True])
def test_sums_of_rows_are_put_where_the_kernel_reads_them(patched: bool) -> None:
    from tilewise.engines.gluon.kernels import bwd_pre_post

    generator = torch.Generator().manual_seed(0)
    out, grad = (torch.randn((1, HEADS, TOKENS, 16), generator=generator) for _ in range(2))
    lse = torch.randn((1, HEADS, TOKENS), generator=generator)
    delta, lse_padded, delta_padded = torch.empty_like(lse), torch.empty(HEADS * TOKENS), torch.empty(HEADS * TOKENS)
    sums = torch.ones((HEADS * TOKENS, 64))
    bwd_pre_post.bwd_preprocess[(HEADS * TOKENS // 32,)](
        PreprocessTensors(out, grad, lse, None, lse_padded, delta_padded, delta, sums),
        PreprocessArgs(PreprocessStrides(strides(out), strides(grad)), HEADS, TOKENS, TOKENS, SHAPE[1]),
        C=PreprocessConstants(has_dlse=False, patched=patched, m=32, dv=16, dv_true=16, d_sum=64),
    )
    wanted = (out * grad).sum(-1)
    torch.testing.assert_close(delta, wanted)
    torch.testing.assert_close(delta_padded.view(1, HEADS, TOKENS), arranged(wanted, 2, patched))
    torch.testing.assert_close(lse_padded.view(1, HEADS, TOKENS), arranged(lse * 1.4426950408889634, 2, patched))
    assert not sums.any()


def in_fragments(rows: torch.Tensor) -> torch.Tensor:
    """[heads * tokens, 64] as backward.fragment_order leaves each 64 x 64."""
    parts = rows.view(-1, 4, 2, 8, 1, 8, 4, 2)  # part, (warp, half, lane / 4), (part, group, lane % 4, pair)
    return parts.permute(0, 4, 1, 5, 3, 6, 2, 7).reshape(-1)


@pytest.mark.parametrize("patched", [False, True])
def test_sums_of_dq_come_back(patched: bool) -> None:
    from tilewise.engines.gluon.kernels import bwd_pre_post

    dq = torch.randn((1, HEADS, TOKENS, 64), generator=torch.Generator().manual_seed(0))
    sums = in_fragments(arranged(dq, 2, patched).reshape(-1, 64))
    found = torch.zeros_like(dq)
    nonfinite = torch.zeros((HEADS * TOKENS // 128, 2), dtype=torch.int32)
    rows = TOKENS // 128
    tiles = constants(128, 128, 64), constants(64, 128, 64)
    bwd_pre_post.bwd_postprocess[(2 * HEADS * rows,)](
        PostprocessTensors(dq, dq, dq, dq, sums, sums, found, dq, dq, sums, nonfinite, None),
        postprocess_args(dq, rows, SHAPE[1], (1.0, 1.0, 0.5)),
        MASK=None,
        SCORE=None,
        DSCORE=None,
        C=PostprocessConstants(*tiles, patched=patched, d_sum=64),
    )
    torch.testing.assert_close(found, 0.5 * dq)


def test_a_nonfinite_patch_is_recomputed_where_its_tokens_lie() -> None:
    """NaN in one patch of the sums: rows of dQ that it holds are computed from the inputs."""
    from tilewise.engines.gluon.kernels import bwd_pre_post

    shape, dim, tile = (8, 16), 16, 64
    tokens = shape[0] * shape[1]
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn((1, 1, tokens, dim), generator=generator, dtype=torch.float64).requires_grad_() for _ in range(4))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    dq = torch.autograd.grad(out, q, grad)[0].float()
    lse, delta = (q @ k.mT / dim**0.5).logsumexp(-1).detach().float(), (out * grad).sum(-1).detach().float()
    arranged_dq = TokenPermutation(shape, (HEIGHT,)).permute(torch.nn.functional.pad(dq, (0, 64 - dim)), 2).reshape(-1, 64)
    arranged_dq[tile:] = torch.nan  # the second patch
    found = torch.zeros_like(dq)
    nonfinite = torch.tensor([[0, 0], [0, 0]], dtype=torch.int32)
    given = [t.detach().float() for t in (q, k, v, grad)]
    tiles = constants(tile, 64, dim), constants(64, tile, dim)
    bwd_pre_post.bwd_postprocess[(4,)](
        PostprocessTensors(*given, lse, delta, found, dq, dq, in_fragments(arranged_dq), nonfinite, None),
        postprocess_args(dq, 2, shape[1], (1.0, dim**-0.5 * 1.4426950408889634, dim**-0.5)),
        MASK=None,
        SCORE=None,
        DSCORE=None,
        C=PostprocessConstants(*tiles, patched=True, d_sum=64),
    )
    second = TokenPermutation(shape, (HEIGHT,)).permute(torch.arange(tokens).view(1, 1, -1, 1), 2).flatten()[tile:]
    torch.testing.assert_close(found[:, :, second], dq[:, :, second], rtol=1e-4, atol=1e-5)
