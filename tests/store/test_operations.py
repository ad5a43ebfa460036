"""A score by each function of torch, and its derivative, compiled for GPUs without one: alone in a small kernel, so that it takes seconds."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.operation_scores import SCORES
from tilewise.engines.codegen import Layout
from tilewise.engines.facts import Extents, Facts
from tilewise.engines.gpu.limits import NO_TRITON
from tilewise.lang import derive, trace_score

pytestmark = pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))

KERNEL = """
@triton.jit
def kernel(p_x, p_y, f, i):
    o_q, o_kv = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    x = tl.load(p_x + o_q * 16 + o_kv)
    tl.store(p_y + o_q * 16 + o_kv, score_mod(x, 0, 0, o_q, o_kv, (), i, f, ()) + dscore(x, 0, 0, o_q, o_kv, (), i, f, ()))
"""


def everything(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return sum((function(s, b, h, q, kv) for function in SCORES.values()), s)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("precise", [False, True], ids=["16 bits", "32 bits"])
def test_every_function_compiles(arch: int, precise: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tilewise.engines.gpu.emit import Writer, dscore_source, score_source
    from tilewise.engines.gpu.generated import generated

    call = trace_score((everything,), torch.float32)
    layouts: tuple[Layout, ...] = ()
    value, slope = (
        Writer(p, Facts(p, call, Extents(1, 1, 16, 16)), layouts, precise, False) for p in (call.program, derive(call.program, frozenset()).program)
    )
    kernel = generated("kernel", [*score_source(value), "", *dscore_source(slope), *KERNEL.splitlines()]).function()
    signature = {"p_x": "*fp32", "p_y": "*fp32", "f": ("fp32",) * len(call.floats), "i": ("i32",) * len(call.ints)}
    built = triton.compile(ASTSource(fn=kernel, signature=signature), target=GPUTarget("cuda", arch, 32))
    assert f".target sm_{arch}" in built.asm["ptx"] and len(built.asm["cubin"]) > 0


def test_the_hardwares_tanh_is_not_given_float64() -> None:
    """It would read the lower half of each number."""
    from tilewise.engines.gpu.emit import Writer

    table = torch.zeros(16, dtype=torch.float64)
    for function in (torch.tanh, lambda x: functional.gelu(x, approximate="tanh")):
        call = trace_score((lambda s, b, h, q, kv, f=function: s + f(table[kv]),), torch.float32)
        lines = Writer(call.program, Facts(call.program, call, Extents(1, 1, 16, 16)), (Layout(True, False),), False, False).lines
        assert any("tanh" in line for line in lines) and not any("fast_tanh" in line for line in lines)
