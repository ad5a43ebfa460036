"""The Triton kernels in Triton's interpreter: the same cases as every engine, small tiles, held to the same error rule."""

import pytest
import torch

import tilewise as tw
from tests.cases import CASES, Case
from tests.error_rule import check
from tests.triton_misses import FLOAT32_MISSES, refused
from tilewise import masks, scores

LARGEST = 60_000  # score elements: the interpreter takes a few seconds for so many


def small(case: Case) -> bool:
    return case.name not in FLOAT32_MISSES and case.batch * case.heads * case.q_len * case.kv[2] <= LARGEST


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)  # 16-bit kernels take other ways than 32-bit ones
@pytest.mark.parametrize("case", [c for c in CASES if small(c)], ids=str)
def test_engine(case: Case, dtype: torch.dtype) -> None:
    if dtype not in case.dtypes:
        pytest.skip(f"the case is not for {dtype}")
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
