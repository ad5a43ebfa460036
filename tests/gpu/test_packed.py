"""Packed sequences on a GPU: index tensors are made once for a layout, without waiting for the device."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.frontend import call_cache, packing

LENGTHS = [300, 700, 24]


def tokens(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(1024, 4, 64, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3)]


def offsets(lengths: list[int], device: str = "cuda") -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def wanted(given: list[Tensor], lengths: list[int]) -> Tensor:
    parts = zip(*[t.double().split(lengths) for t in given], strict=True)
    return torch.cat([tw.attention(*[t[None] for t in part], layout="bshd", is_causal=True, backend="blocked")[0] for part in parts])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_layers_make_one_call(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cu, given = offsets(LENGTHS, device), tokens()
    expected = wanted(given, LENGTHS)  # calls of its own, one for each length
    call_cache.forget()
    planned: list[Any] = []  # calls that were not known
    keep = call_cache.keep
    monkeypatch.setattr(call_cache, "keep", lambda *call: planned.append(call) or keep(*call))
    for _ in range(3):
        found = tw.varlen_attention(*given, cu, is_causal=True)
        torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
    assert len(planned) == len(call_cache._calls) == 1
    cu.copy_(offsets([500, 500, 24], device))
    torch.testing.assert_close(tw.varlen_attention(*given, cu, is_causal=True).double(), wanted(given, [500, 500, 24]), rtol=2e-2, atol=2e-2)


def test_new_offsets_are_looked_at_without_waiting() -> None:
    given, cu = tokens(), offsets(LENGTHS)
    packed = packing.Packed(*given, cu, cu)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            cu[1] += step
            packing.within_sequences(packed, None, None, True)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_another_stream_makes_its_own() -> None:
    given, cu = tokens(), offsets(LENGTHS)
    first = tw.varlen_attention(*given, cu, is_causal=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        second = tw.varlen_attention(*given, cu, is_causal=True)
    torch.cuda.synchronize()
    assert torch.equal(first, second)


WRONG = """
import torch, tilewise as tw
q = torch.randn(64, 2, 64, device="cuda", dtype=torch.bfloat16)
tw.varlen_attention(q, q, q, torch.tensor([0, 40, 20], device="cuda"))
torch.cuda.synchronize()
"""


def test_wrong_offsets_end_in_torchs_assert() -> None:
    """In a process of its own: such an assert ends all use of the GPU."""
    run = subprocess.run([sys.executable, "-c", WRONG], capture_output=True, text=True, check=False)
    assert run.returncode != 0 and "cu_seqlens_q must start at 0" in run.stdout + run.stderr and "assert" in run.stderr.lower()
