"""The operation that CONTRIBUTING.md adds as an example."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import tilewise as tw
from tilewise.lang.ops import OPS

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@contextmanager
def example_operation() -> Iterator[Callable[..., Any]]:
    """A score by the guide's operation, which is gone afterwards."""
    section = GUIDE.read_text().partition("## Adding an operation to the language")[2].partition("\n## ")[0]
    defined: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(block, defined)
    try:
        yield lambda s, b, h, q, kv: s + 0.1 * defined["FUNCTIONS"]["cube"](s)
    finally:
        del OPS["cube"]


def check_example(engine: str) -> None:
    """The engine computes the example, and its gradients, as the reference computes what it stands for."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn((1, 1, 24, 16), generator=generator, requires_grad=True) for _ in range(3)]
    with example_operation() as cube:
        found = tw.attention(*inputs, score=cube, backend=engine)
        gradients = torch.autograd.grad(found.sum(), inputs)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    wanted = tw.attention(*exact, score=lambda s, b, h, q, kv: s + 0.1 * s * s * s, backend="reference")
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients, torch.autograd.grad(wanted.sum(), exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
