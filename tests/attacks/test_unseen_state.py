"""Functions that read something a call's key cannot see: the next call must see it too."""

import builtins
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.attacks import state
from tilewise.frontend import call_cache

LIMIT = WIDTH = 3
HELD = torch.arange(64)


def helper(q: Any, kv: Any) -> Any:
    return q - kv < helper.limit


def bare() -> None:
    """Holds attributes."""


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    call_cache.forget()
    state.limit = 3
    helper.limit = 3
    bare.size = bare.WIDTH = 3
    HELD.limit = HELD.e = 3
    yield
    if hasattr(torch, "tilewise_limit"):
        del torch.tilewise_limit


def imported_inside(b: Any, h: Any, q: Any, kv: Any) -> Any:
    from tests.attacks import state

    return q - kv < state.limit


def reading(path: Path) -> Callable[..., Any]:
    def within(b: Any, h: Any, q: Any, kv: Any) -> Any:
        with open(path) as file:
            return q - kv < int(file.read())

    return within


def set_state(value: int, path: Path) -> None:
    state.limit = value
    helper.limit = value
    bare.size = bare.WIDTH = value
    HELD.limit = HELD.e = value
    torch.tilewise_limit = value
    globals()["LIMIT"] = value
    path.write_text(str(value))


FUNCTIONS: dict[str, Callable[[Path], Callable[..., Any]]] = {
    "a module imported inside": lambda path: imported_inside,
    "an attribute of a helper": lambda path: lambda b, h, q, kv: helper(q, kv),
    "an attribute of a helper, named like one of a tensor": lambda path: lambda b, h, q, kv: q - kv < bare.size,
    "an attribute of a helper, named like a global": lambda path: lambda b, h, q, kv: q - kv < bare.WIDTH,
    "an attribute of a captured tensor, named like one of math": lambda path: lambda b, h, q, kv: (q - kv < HELD.e) & (HELD[q] >= 0),
    "an attribute of a captured tensor": lambda path: lambda b, h, q, kv: (q - kv < HELD.limit) & (HELD[q] >= 0),
    "an attribute set on torch": lambda path: lambda b, h, q, kv: q - kv < torch.tilewise_limit,
    "globals": lambda path: lambda b, h, q, kv: q - kv < globals()["LIMIT"],
    "eval": lambda path: lambda b, h, q, kv: q - kv < eval("LIMIT"),
    "a global": lambda path: lambda b, h, q, kv: q - kv < LIMIT,
    "a file": reading,
}


@pytest.mark.parametrize("engine", ["cpp", "blocked"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_reads_is_read_again(name: str, engine: str, tmp_path: Path) -> None:
    path = tmp_path / "limit"
    function = FUNCTIONS[name](path)
    x = torch.randn(1, 1, 64, 8)
    outputs = []
    for limit in (3, 3, 9, 9):
        set_state(limit, path)
        found, wanted = (tw.attention(x, x, x, mask=function, backend=backend) for backend in (engine, "reference"))
        torch.testing.assert_close(found, wanted)
        outputs.append(found)
    assert torch.equal(outputs[0], outputs[1]) and not torch.allclose(outputs[1], outputs[2])


@pytest.mark.parametrize("engine", ["cpp", "blocked"])
def test_the_mode_of_gradients_is_asked_again(engine: str) -> None:
    x = torch.randn(1, 1, 64, 8)
    attend = lambda: tw.attention(x, x, x, mask=lambda b, h, q, kv: q - kv < (3 if torch.is_grad_enabled() else 9), backend=engine)
    with_gradients = attend()
    with torch.no_grad():
        assert not torch.allclose(attend(), with_gradients)
    assert torch.equal(attend(), with_gradients)


def test_builtins_are_what_they_are() -> None:
    """The names that are allowed are names of Python's own, of torch's functions that can be traced, or of what a tensor is known by."""
    from tilewise.frontend.call_key import SAFE_NAMES

    for name in (
        "eval",
        "exec",
        "open",
        "globals",
        "locals",
        "vars",
        "getattr",
        "setattr",
        "input",
        "id",
        "hash",
        "__import__",
        "is_grad_enabled",
        "grad",
        "data",
        "item",
    ):
        assert name not in SAFE_NAMES
        assert hasattr(builtins, name) or hasattr(torch, name) or hasattr(torch.Tensor, name)


def test_a_plain_attribute_of_a_captured_tensor_costs_no_cached_call() -> None:
    """Frameworks mark parameters (`_is_hf_initialized`)."""
    bias, x = torch.nn.Parameter(torch.randn(64)), torch.randn(1, 1, 64, 8)
    bias.marked = True
    for _ in range(2):
        tw.attention(x, x, x, score=lambda s, b, h, q, kv: s + bias[kv], backend="blocked")
    assert len(call_cache._calls) == 1
