"""The Triton kernels in Triton's interpreter: the same cases as every engine, small tiles, held to the same error rule."""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.support.cases import CASES, MAPS, MASKS, Case
from tests.support.error_rule import check
from tests.support.triton_misses import FLOAT32_MISSES, refused
from tilewise import flex, masks, scores

LARGEST = 60_000  # score elements: the interpreter takes a few seconds for so many


def small(case: Case) -> bool:
    return case.name not in FLOAT32_MISSES and case.batch * case.heads * case.q_len * case.kv[2] <= LARGEST


def typed_cases() -> Iterator[Any]:
    """In float16 and in float32: 16-bit kernels take other ways than 32-bit ones. What a mask or a map allows knows nothing of the dtype: these take turns."""
    in_turn = cycle([(torch.float16,), (torch.float32,)])
    for case in filter(small, CASES):
        dtypes = next(in_turn) if case in MASKS or case in MAPS else (torch.float16, torch.float32)
        yield from (pytest.param(case, dtype, id=f"{case}-{dtype}") for dtype in dtypes if dtype in case.dtypes)


@pytest.mark.parametrize(("case", "dtype"), [*typed_cases()])
def test_engine(case: Case, dtype: torch.dtype) -> None:
    refused(case, "cpu", dtype)
    check(case, "triton", "cpu", dtype)


@pytest.mark.parametrize("scored", [False, True])
def test_bfloat16(scored: bool) -> None:
    case = next(c for c in CASES if c.mask is not None and (c.score is not None) == scored and torch.bfloat16 in c.dtypes and small(c))
    check(case, "triton", "cpu", torch.bfloat16)


@pytest.mark.parametrize("options", [{}, {"mask": masks.padding(torch.tensor([33, 290]))}, {"score": scores.alibi(6)}, {"dropout_p": 0.4, "seed": 5}], ids=str)
def test_decoding_agrees_with_the_reference(options: dict) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 2, 16), torch.randn(2, 2, 300, 16), torch.randn(2, 2, 300, 24)
    found, lse = tw.attention(query, key, value, enable_gqa=True, return_lse=True, backend="triton", **options)
    wanted, wanted_lse = tw.attention(query.double(), key.double(), value.double(), enable_gqa=True, return_lse=True, backend="reference", **options)
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, wanted_lse.float(), rtol=1e-5, atol=1e-5)


# -- scores and 16 bits ----------------------------------------------------------------------------------------------

ROUNDED = {
    "a rounding that lets gradients through": lambda s, b, h, q, kv: s + (torch.round(s) - s).detach(),
    "of a multiple": lambda s, b, h, q, kv: (8 * s + (torch.round(8 * s) - 8 * s).detach()) / 8,
    "a step": lambda s, b, h, q, kv: s + (s > 0),
    "what the score forbids": lambda s, b, h, q, kv: s + torch.where(s < -1.0, -torch.inf, 0.0),
    "a bias": lambda s, b, h, q, kv: kv * 0.01 + s - q * 0.02,
    "its negative": lambda s, b, h, q, kv: 1.0 - s,
}


def gradients(score: Any, engine: str, dtype: torch.dtype, size: float = 1.0, length: int = 48) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn((1, 1, length, 16), generator=generator).half().to(dtype).requires_grad_() for _ in range(3)]
    out = tw.attention(*inputs, score=score, backend=engine)
    return torch.autograd.grad(out, inputs, torch.randn(out.shape, generator=generator).half().to(dtype) * size)


@pytest.mark.parametrize("name", ROUNDED)
def test_scores_whose_slope_is_one_need_not_only_add(name: str) -> None:
    """lse may be subtracted before a score only where it adds something that does not depend on it."""
    found, wanted = gradients(ROUNDED[name], "triton", torch.float16), gradients(ROUNDED[name], "reference", torch.float64)
    for a, b in zip(found, wanted, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 4e-3


@pytest.mark.parametrize("cap", [1.0, 50.0, 2000.0])
def test_small_gradients_survive_a_softcap(cap: float) -> None:
    """Gradients of scores are rounded to 16 bits before numbers that were taken out of the score are multiplied in."""
    for score in ([scores.softcap(cap)], [lambda s, b, h, q, kv: s + 0.1, scores.softcap(cap)]):
        found, wanted = (gradients(score, engine, dtype, 1e-2, 256) for engine, dtype in (("triton", torch.float16), ("reference", torch.float64)))
        for a, b in zip(found, wanted, strict=True):
            assert float((a.double() - b).norm() / b.norm()) < 4e-3


# -- block masks and layouts -----------------------------------------------------------------------------------------


def test_a_written_block_list_and_a_query_whose_last_stride_is_not_1() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 1, 16, 64).transpose(2, 3).requires_grad_() for _ in range(3)]
    blocks = flex.create_block_mask(lambda b, h, q, kv: q >= kv, 2, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    with tw.attention_backend("triton"):
        whole = flex.flex_attention(*inputs, block_mask=blocks)
        blocks.full_kv_num_blocks[1] = 0
        found = flex.flex_attention(*inputs, block_mask=blocks)
    assert found.stride(-1) == whole.stride(-1) == 1
    torch.testing.assert_close(found[0], whole[0], rtol=1e-5, atol=1e-5)
    i, j = torch.arange(64)[:, None], torch.arange(64)
    wanted = tw.attention(*inputs, mask=torch.stack([i >= j, (i >= j) & (i // 16 == j // 16)])[:, None], backend="reference")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), inputs) for out in (found, wanted)), rtol=1e-4, atol=1e-4)
