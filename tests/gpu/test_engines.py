"""Every engine on a real GPU, over the same cases, held to the same error rule:

python -m pytest tests/gpu
"""

import pytest
import torch

import tilewise as tw
from tests.support.cases import CASES, Case
from tests.support.error_rule import check
from tests.support.triton_misses import FLOAT32_MISSES, refused

TYPED = [pytest.param(case, dtype, id=f"{case}-{str(dtype).removeprefix('torch.')}") for case in CASES for dtype in case.dtypes if dtype != torch.float64]


@pytest.mark.parametrize(("case", "dtype"), TYPED)
def test_triton(case: Case, dtype: torch.dtype) -> None:
    refused(case, "cuda", dtype)
    if dtype == torch.float32 and case.name in FLOAT32_MISSES:
        pytest.skip(FLOAT32_MISSES[case.name])
    check(case, "triton", "cuda", dtype)


@pytest.mark.parametrize("engine", ["gluon", "cuda"])
@pytest.mark.parametrize(("case", "dtype"), [typed for typed in TYPED if typed.values[1] != torch.float32])
def test_hopper(engine: str, case: Case, dtype: torch.dtype) -> None:
    refused(case, "cuda", dtype, engine)
    check(case, engine, "cuda", dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocked(case: Case) -> None:
    check(case, "blocked", "cuda", case.dtypes[-1])


@pytest.mark.parametrize("is_causal", [False, True])
def test_native_is_torchs_own(is_causal: bool) -> None:
    query, key, value = torch.randn(3, 2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    assert torch.equal(tw.attention(query, key, value, is_causal=is_causal, backend="native"), wanted)


def test_what_torchs_kernels_cannot_read_goes_to_another_engine() -> None:
    query = torch.randn(1, 2, 40, 67, device="cuda", dtype=torch.bfloat16)[..., 1:65]
    assert tw.explain(query, query, query).engine == "triton"
    wanted = tw.attention(query.double(), query.double(), query.double(), backend="reference")
    torch.testing.assert_close(tw.attention(query, query, query).double(), wanted, rtol=2e-2, atol=2e-2)
