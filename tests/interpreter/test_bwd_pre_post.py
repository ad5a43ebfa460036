"""What stands around the Hopper backward, in Triton's interpreter: rows go into the order of strips and come back."""

import pytest
import torch

from tilewise.engines.gluon.patches import HEIGHT
from tilewise.frontend.token_order import TokenPermutation

SHAPE, HEADS = (16, 32), 2
TOKENS = SHAPE[0] * SHAPE[1]


def arranged(t: torch.Tensor, dim: int, patched: bool) -> torch.Tensor:
    return TokenPermutation(SHAPE, (HEIGHT,)).permute(t, dim).contiguous() if patched else t


def strides(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(t.stride())


@pytest.mark.parametrize("patched", [False, True])
def test_sums_of_rows_are_put_where_the_kernel_reads_them(patched: bool) -> None:
    from tilewise.engines.gluon.kernels import bwd_pre_post

    generator = torch.Generator().manual_seed(0)
    out, grad = (torch.randn((1, HEADS, TOKENS, 16), generator=generator) for _ in range(2))
    lse = torch.randn((1, HEADS, TOKENS), generator=generator)
    delta, lse_padded, delta_padded = torch.empty_like(lse), torch.empty(HEADS * TOKENS), torch.empty(HEADS * TOKENS)
    sums = torch.ones((HEADS * TOKENS, 64))
    bwd_pre_post.bwd_preprocess[(HEADS * TOKENS // 32,)](
        out,
        grad,
        lse,
        None,
        lse_padded,
        delta_padded,
        delta,
        sums,
        strides(out),
        strides(grad),
        HEADS,
        TOKENS,
        TOKENS,
        SHAPE[1],
        HAS_DLSE=False,
        PATCHED=patched,
        M=32,
        DV=16,
        DV_TRUE=16,
        D_SUM=64,
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
    any_ = strides(dq)
    rows = TOKENS // 128
    bwd_pre_post.bwd_postprocess[(2 * HEADS * rows,)](
        dq,
        dq,
        dq,
        dq,
        sums,
        sums,
        found,
        dq,
        dq,
        sums,
        nonfinite,
        None,
        *[any_] * 7,
        (None,) * 4,
        (0, 0),
        rows,
        (None,) * 4,
        (0, 0),
        rows,
        HEADS * rows,
        HEADS,
        1,
        TOKENS,
        TOKENS,
        TOKENS,
        SHAPE[1],
        (1.0, 1.0, 0.5),
        1.0,
        0,
        ((), (), (), ()),
        ((), (), (), ()),
        MASK=None,
        SCORE=None,
        DSCORE=None,
        MAPPED=False,
        GIVEN=False,
        PATCHED=patched,
        DROPOUT=False,
        ROWS_M=128,
        ROWS_N=128,
        COLUMNS_M=64,
        COLUMNS_N=128,
        D=64,
        DV=64,
        D_TRUE=64,
        DV_TRUE=64,
        D_SUM=64,
    )
    torch.testing.assert_close(found, 0.5 * dq)


def test_an_nonfinite_patch_is_done_again_where_its_tokens_lie() -> None:
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
    bwd_pre_post.bwd_postprocess[(4,)](
        *given,
        lse,
        delta,
        found,
        dq,
        dq,
        in_fragments(arranged_dq),
        nonfinite,
        None,
        *[strides(dq)] * 7,
        (None,) * 4,
        (0, 0),
        2,
        (None,) * 4,
        (0, 0),
        2,
        2,
        1,
        1,
        tokens,
        tokens,
        tokens,
        shape[1],
        (1.0, dim**-0.5 * 1.4426950408889634, dim**-0.5),
        1.0,
        0,
        ((), (), (), ()),
        ((), (), (), ()),
        MASK=None,
        SCORE=None,
        DSCORE=None,
        MAPPED=False,
        GIVEN=False,
        PATCHED=True,
        DROPOUT=False,
        ROWS_M=tile,
        ROWS_N=64,
        COLUMNS_M=64,
        COLUMNS_N=tile,
        D=dim,
        DV=dim,
        D_TRUE=dim,
        DV_TRUE=dim,
        D_SUM=64,
    )
    second = TokenPermutation(shape, (HEIGHT,)).permute(torch.arange(tokens).view(1, 1, -1, 1), 2).flatten()[tile:]
    torch.testing.assert_close(found[:, :, second], dq[:, :, second], rtol=1e-4, atol=1e-5)
