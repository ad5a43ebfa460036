"""torch's FlashAttention-2 kernel, called by itself, and that `auto` never reaches cuDNN's."""

import pytest
import torch
from torch import Tensor

import tilewise as tw


def tensors(shape: tuple[int, ...], kv_heads: int | None = None, kv_len: int | None = None) -> list[Tensor]:
    batch, heads, length, dim = shape
    kv = (batch, kv_heads or heads, kv_len or length, dim)
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in (shape, kv, kv)]


@pytest.mark.parametrize(
    ("shape", "kv_heads", "kv_len"),
    [((2, 4, 300, 64), 4, 300), ((1, 8, 130, 128), 2, 517), ((1, 2, 77, 256), 2, 77), ((4, 8, 1, 128), 2, 1000), ((1, 24, 4608, 128), 24, 4608)],
)
def test_fa2_agrees_with_the_definition(shape: tuple[int, ...], kv_heads: int, kv_len: int) -> None:
    inputs = tensors(shape, kv_heads, kv_len)
    options = {"enable_gqa": kv_heads != shape[1], "scale": 0.1}
    wanted = tw.attention(*[t.double() for t in inputs], backend="blocked", **options)
    wanted_gradients = torch.autograd.grad(wanted.square().sum(), inputs)
    for _ in range(3):  # the later ones are replays
        found = tw.attention(*inputs, backend="fa2", **options)
        torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)
        for a, b in zip(torch.autograd.grad(found.square().sum(), inputs), wanted_gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("shape", [(1, 2, 128, 64), (1, 24, 4608, 128), (4, 8, 1, 128), (2, 4, 300, 40), (1, 2, 64, 60)])
@pytest.mark.parametrize("backend", ["auto", "flash"])
def test_no_kernel_of_cudnn_runs_unless_it_is_named(shape: tuple[int, ...], backend: str) -> None:
    inputs = tensors(shape, kv_len=4096 if shape[2] == 1 else None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tw.attention(*inputs, backend=backend).sum().backward()
    assert not [event.key for event in profile.key_averages() if "cudnn" in event.key.lower()]


def test_inside_torch_compile_another_engine_serves() -> None:
    """Dynamo of some versions of torch does not trace the kernel."""
    inputs = tensors((1, 2, 128, 64))
    found, wanted = torch.compile(tw.attention, fullgraph=True)(*inputs), tw.attention(*inputs)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs), rtol=2e-2, atol=2e-2)
    with pytest.raises(Exception, match="cannot trace torch"):
        torch.compile(lambda *t: tw.attention(*t, backend="fa2"), fullgraph=True)(*inputs)


def test_auto_takes_the_hopper_engine_without_a_mask() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    assert tw.explain(*tensors((1, 24, 4608, 128))).engine == "cuda"
    assert tw.explain(*tensors((1, 2, 128, 64))).engine == "fa2"
    assert tw.explain(*tensors((4, 8, 1, 128), kv_len=4096)).engine == "fa2"
