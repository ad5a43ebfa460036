"""The CUDA forward compiled without a GPU: every variant, and what the compiler made of its loop."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.machine_code import loops_of_products, machine_code
from tests.support.operation_scores import SCORES
from tilewise import masks, scores
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.cuda import nvrtc
from tilewise.engines.facts import Extents, Facts
from tilewise.engines.gluon import NO_GLUON
from tilewise.lang import trace_score

MISSING = NO_GLUON or nvrtc.refusal()
pytestmark = [pytest.mark.skipif(MISSING is not None, reason=str(MISSING)), pytest.mark.usefixtures("empty_store")]


def problem(dim: int, mask: object = None, dtype: torch.dtype = torch.bfloat16, score: object = None, v_dim: int | None = None, **more: object) -> Problem:
    query, key, value = (torch.empty(1, heads, 512, n, dtype=dtype, device="meta") for heads, n in ((4, dim), (2, dim), (2, v_dim or dim)))
    partial = bool(more.pop("partial", False))
    return make_problem(query, key, value, mask, score, Options(enable_gqa=True, **more))[0].replaced(partial=partial)


SCORED = {"alibi": scores.alibi(4), "softcap": scores.softcap(30.0), "relative bias": scores.relative_bias(torch.zeros(4, 129))}
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"{dim} {dtype}": {"dim": dim, "dtype": dtype} for dim in (64, 128) for dtype in (torch.bfloat16, torch.float16)},
    **{f"{dim} {v_dim}": {"dim": dim, "v_dim": v_dim} for dim, v_dim in ((256, 256), (96, 96), (192, 192), (192, 128), (72, 200), (8, 24))},
    **{f"sinks {dim}": {"dim": dim, "score": scores.sinks(torch.zeros(4))} for dim in (64, 256)},
    **{f"{name} {dim}": {"dim": dim, "score": score} for dim in (64, 128, 256) for name, score in SCORED.items()},
    **{f"dropout {dim}": {"dim": dim, "dropout_p": 0.1, "seed": 1} for dim in (64, 128, 256)},
    **{f"ALiBi, dropout {dim}": {"dim": dim, "v_dim": 256, "score": scores.alibi(4), "dropout_p": 0.1, "seed": 1} for dim in (64, 256)},
    "negative scale": {"dim": 128, "dtype": torch.float16, "scale": -1.0},
    **{f"part {dim} {v_dim}": {"dim": dim, "v_dim": v_dim, "partial": True} for dim, v_dim in ((64, 64), (128, 128), (256, 256), (72, 200))},
}


@pytest.mark.parametrize("mask", [None, masks.causal, masks.document(torch.arange(512) // 100)], ids=["full", "band", "mapped"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_loop_hides_softmax_under_the_products(name: str, mask: object) -> None:
    """No product is serialised (C75xx are ptxas' warnings of that); nothing spills but in the producer, and little there; the exponentials stand between the
    products and the wait for P V."""
    from tilewise.engines.cuda import aot
    from tilewise.engines.gpu.kernel_cache import load_or_build
    from tilewise.engines.gpu.launch import request_of

    launches = [make()[0] for make in aot.forward_launches(problem(mask=mask, **VARIANTS[name]))]
    forwards = [launch for launch in launches if launch.kernel == "cuda_fwd"]
    first = forwards[0].constants["C"]
    alone = mask is not None or first.warpgroups == 3 or first.scored or first.dropout
    assert [launch.constants["C"].cluster for launch in forwards] == ([1] if alone else [2, 1])  # programs in pairs, and alone
    for launch in forwards:
        files = load_or_build(request_of(launch, 90), launch.table)
        log, config = files["log"].decode(), launch.constants["C"]
        assert "C75" not in log and f"Used {168 if config.warpgroups == 2 else 128} registers" in log
        assert nvrtc.spilled_bytes(log) <= 128
        code = machine_code(launch, 90)
        (body,) = [body for body in loops_of_products(code) if "MUFU.EX2" in body]
        assert not re.search(r"\b(?:LDL|STL)\b", body) and len(re.findall(r"\bR2UR\b", body)) <= (config.banded and config.dropout and config.dv == 256)
        products = config.d // 16 + config.block_n // 16
        assert body.count("HGMMA") == products and len(re.findall("WARPGROUP.DEPBAR", body)) == 2  # a serialised kernel waits for every product
        scores_awaited, weights_awaited = (m.start() for m in re.finditer("WARPGROUP.DEPBAR", body))
        assert body.rindex("HGMMA") < scores_awaited
        assert len(re.findall("MUFU.EX2", body[scores_awaited:weights_awaited])) >= config.block_n // (4 if config.dropout else 2)  # it moves some with Philox


def test_every_function_compiles() -> None:
    """A score by each function of torch, alone in a small kernel."""
    from tilewise.engines.cuda.emit import Writer, score_source
    from tilewise.engines.cuda.source import FOLDER
    from tilewise.engines.cxx import HEADERS

    def everything(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return sum((function(s, b, h, q, kv) for function in SCORES.values()), s)

    call = trace_score((everything,), torch.float32)
    numbers = [f"long long i_{n};" for n in range(len(call.ints))] + [f"float f_{n};" for n in range(len(call.floats))]
    kernel = """
extern "C" __global__ void kernel(Args a, float* x) {
    float s[NS];
    for (int i = 0; i < NS; i++) s[i] = x[i];
    Score score;
    score.begin(a, 0, 0, 0);
    score.apply(a, s, 0, true);
    for (int i = 0; i < NS; i++) x[i] = s[i];
}"""
    text = "\n".join(
        [
            "#define FP16 0\n#define NS 4",
            (FOLDER / "primitives.cuh").read_text(),
            f"struct Args {{ int n_q; float score_scale; {' '.join(numbers)} }};",
            *[path.read_text() for path in (FOLDER / "program.cuh", HEADERS / "operations.h")],
            score_source(*[Writer(call.program, Facts(call.program, call, Extents(1, 1, 16, 16)), ())] * 2),
            kernel,
        ]
    )
    binary, log = nvrtc.compiled(text, "everything.cu")
    assert len(binary) > 0 and "warning" not in log


def test_facts_are_what_the_driver_needs() -> None:
    from tilewise.engines.cuda import aot
    from tilewise.engines.gpu.driver import places_of
    from tilewise.engines.gpu.kernel_cache import load_or_build
    from tilewise.engines.gpu.launch import request_of

    launch = aot.forward_launches(problem(128))[0]()[0]
    facts = json.loads(load_or_build(request_of(launch, 90), launch.table)["facts"])
    assert facts["name"] == "forward" and facts["warps"] == 12 and facts["boxes"] == [[[1, 1, 128, 64], 3], [[1, 1, 176, 64], 3], [[1, 1, 176, 64], 3]]
    assert places_of([*facts["types"], *["*extra"] * facts["extra_pointers"]])[1] % 64 == 0  # the driver reads the whole struct


def test_errors_are_the_compilers_own_words() -> None:
    with pytest.raises(nvrtc.CompileError, match=r'wrong.cu\(1\): error: identifier "nonsense" is undefined'):
        nvrtc.compiled("__global__ void f() { nonsense; }", "wrong.cu")


def test_what_does_not_compile_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.engines.cuda import source

    given: list[str] = []
    monkeypatch.setattr(source, "_failed", {})
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--std=c++1"))
    compiled = nvrtc.compiled
    monkeypatch.setattr(nvrtc, "compiled", lambda text, name: given.append(text) or compiled(text, name))
    said = []
    for text in ("int x;", "int x;", "int y;"):
        with pytest.raises(nvrtc.CompileError) as raised:
            source._compiled(text, "forward.cu")
        said.append(str(raised.value))
    assert given == ["int x;", "int y;"] and said[0] == said[1]


def test_kernels_of_the_store_are_not_compiled_again(tmp_path: Path) -> None:
    script = """
import torch
from tests.store.test_cuda import problem
from tilewise.engines.cuda import aot
from tilewise.engines.gpu.kernel_cache import Counts
from tilewise.engines.gpu.aot import build
build(aot.forward_launches(problem(64))[0](), 90)
print(Counts.built, Counts.loaded)
"""
    said = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split() for _ in range(2)]
    assert said == [["1", "0"], ["0", "1"]] or said == [["0", "1"], ["0", "1"]]  # another test may have built it


@pytest.mark.parametrize(
    ("asked", "forward"),
    [
        ({"mask": masks.causal}, "cuda_fwd"),
        ({"mask": masks.causal & masks.sliding_window(100)}, "cuda_fwd"),
        ({"mask": masks.causal, "score": scores.alibi(4)}, "cuda_fwd"),
        ({"score": scores.alibi(4)}, "hopper_fwd"),
        ({"mask": masks.document(torch.arange(512) // 100)}, "cuda_fwd"),
        ({"mask": masks.causal, "score": scores.alibi(4), "dropout_p": 0.1, "seed": 1}, "cuda_fwd"),
    ],
)
def test_the_forward_that_serves_is_the_one_that_is_built(asked: dict[str, Any], forward: str) -> None:
    from tilewise.tools.build import _hopper_forward

    built = {launch.kernel for make in _hopper_forward(problem(64, **asked)) for launch in make()}
    assert built & {"cuda_fwd", "hopper_fwd"} == {forward}
