"""Faults that reviewers found: buffers of compiled code, default devices, threads, inference mode."""

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import masks
from tilewise.engines import fa2
from tilewise.integrations import step_masks
from tilewise.integrations.traced_mask import TracedMask

LONG = 4096  # ids of so many tokens are not known by their values (map_cache.MAX_VALUE_BYTES)


@pytest.mark.parametrize("backend", ["cpp", "blocked"])
def test_a_buffer_that_compiled_code_uses_again_is_another_mask(backend: str) -> None:
    """Inductor writes the second ids where the first were: the same tensor, of the same version."""

    def both(q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        ids = x // 512
        first = tw.attention(q, q, q, mask=lambda b, h, i, j: ids[i] == ids[j], backend=backend)
        others = (x + (first[0, 0, :, 0] > 1e9).long()) // 1024
        return first, tw.attention(q, q, q, mask=lambda b, h, i, j: others[i] == others[j], backend=backend)

    q, x = torch.randn(1, 1, LONG, 8, generator=torch.Generator().manual_seed(0)), torch.arange(LONG)
    with torch.no_grad():
        for found, wanted in zip(torch.compile(both)(q, x), both(q, x), strict=True):
            torch.testing.assert_close(found, wanted)


ON_META = """
import torch
with torch.device("meta"):
    import tilewise
q = torch.randn(1, 2, 70, 16, requires_grad=True)
out = tilewise.attention(q, q, q, is_causal=True, backend="blocked")
wanted, = torch.autograd.grad(out.sum(), q, retain_graph=True)
found, = torch.autograd.grad(out.sum(), q, create_graph=True)
assert torch.equal(found, wanted)
"""


def test_it_may_be_imported_under_another_default_device() -> None:
    subprocess.run([sys.executable, "-c", ON_META], check=True)


def test_threads_make_masks_for_transformers() -> None:
    errors: list[BaseException] = []
    interval = sys.getswitchinterval()

    def work() -> None:
        try:
            for _ in range(500):
                for mask in [TracedMask(masks.causal, (1, 1, 4, 4)) for _ in range(3)]:
                    mask.use()
        except RuntimeError as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors


def test_inference_mode_decodes_in_the_same_buffers() -> None:
    pytest.importorskip("transformers")
    from tilewise.integrations.transformers import make_mask

    step_masks._kept.clear()
    made: set[int] = set()
    with torch.inference_mode():
        for step in range(3):
            keep = torch.ones(2, 32, dtype=torch.bool)
            keep[:, :3] = False
            mask: Any = make_mask(2, 1, 32, q_offset=torch.tensor(10 + step), attention_mask=keep, device=torch.device("cpu"))
            made.add(id(mask.mask))
            del mask
    assert len(made) == 1 and len(step_masks._kept) == 1


def test_inference_tensors_may_be_masks_in_training() -> None:
    with torch.inference_mode():
        ids = torch.arange(40) // 7
    q = torch.randn(1, 2, 40, 8, requires_grad=True)
    mask = lambda b, h, i, j: ids[i] == ids[j]
    (found,) = torch.autograd.grad(tw.attention(q, q, q, mask=mask, backend="blocked").square().sum(), q)
    (wanted,) = torch.autograd.grad(tw.attention(q, q, q, mask=mask, backend="reference").square().sum(), q)
    torch.testing.assert_close(found, wanted)


def test_tensors_of_torch_func_have_no_address_to_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.core.problem import Options, Problem, make_problem
    from tilewise.engines.base import rows_are_aligned

    said: list[str | None] = []

    def ask(t: Tensor) -> Tensor:
        assert rows_are_aligned(t)
        p = make_problem(t, t, t, None, None, Options())[0]
        monkeypatch.setattr(Problem, "device", property(lambda self: torch.device("cuda")))
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        said.append(fa2.Fa2Engine().refuse(p))
        return t.sum()

    torch.func.grad(ask)(torch.ones(1, 1, 4, 8))
    assert "torch.func" in str(said[0])
