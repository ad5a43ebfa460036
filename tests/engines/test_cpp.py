"""The C++ engine: decoding, threads, what is compiled when, and a compiler that is missing or fails."""

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.support.cases import CASES
from tests.support.error_rule import check
from tilewise import masks, scores
from tilewise.core import store
from tilewise.engines.cpp import compiler, kernels, missing, run
from tilewise.engines.cpp.libraries import Counts, key_of
from tilewise.engines.cpp.threads import POOL
from tilewise.frontend import call_cache

available = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def q_k_v(heads: int = 2, length: int = 200, dim: int = 16, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, length, dim, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


# -- decoding --------------------------------------------------------------------------------------------------------

DECODING: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"mask": masks.padding(torch.tensor([33, 290]))},
    "window": {"mask": lambda b, h, q, kv: kv > 1100 + q},
    "nothing": {"mask": lambda b, h, q, kv: kv < 0},
    "alibi": {"score": scores.alibi(6)},
    "softcap and sinks": {"score": [scores.softcap(2.0), scores.sinks(torch.linspace(-1, 1, 6))]},
    "bias": {"score": scores.bias(torch.linspace(-2, 2, 2 * 1200).view(2, 1, 1, 1200))},
    "dropout": {"dropout_p": 0.4, "seed": 5},
}


@available
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", DECODING)
def test_decoding_agrees_with_the_reference(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(shape).to(dtype) for shape in ((2, 6, 2, 40), (2, 2, 1200, 40), (2, 2, 1200, 24)))
    options = DECODING[name] | {"enable_gqa": True, "return_lse": True}
    found, lse = tw.attention(query, key, value, backend="cpp", **options)
    wanted, wanted_lse = tw.attention(query.double(), key.double(), value.double(), backend="reference", **options)
    near = {torch.float64: 1e-12, torch.float32: 3e-5}.get(dtype, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(found.double(), wanted, rtol=near, atol=near)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=max(near, 1e-5) if dtype != torch.float64 else near, atol=1e-5)


@available
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_decoding_does_not_hear_masked_keys(value: float) -> None:
    query, key = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 700, 16)
    spoilt = key.clone()
    spoilt[:, :, 650:] = value
    clean, found = (tw.attention(query, k, k, mask=lambda b, h, q, kv: kv < 650, backend="cpp") for k in (key, spoilt))
    assert torch.equal(clean, found)
    assert tw.attention(query, spoilt, spoilt, backend="cpp").isnan().all()


# -- tiles that are not full -----------------------------------------------------------------------------------------

LEARNED = torch.linspace(-1, 1, 150).requires_grad_()
TAILS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "a score that learns": {"score": scores.bias(LEARNED)},
    "dropout": {"dropout_p": 0.3, "seed": 2},
}


@available
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", TAILS)
def test_what_lies_in_unused_lanes_is_not_looked_at(name: str, dtype: torch.dtype) -> None:
    """Of a tile's lanes only some are computed where queries end. Scratch memory is full of NaN from the call before."""
    torch.manual_seed(0)
    drowned = [torch.full((1, 2, 128, 24), torch.nan, dtype=dtype, requires_grad=True) for _ in range(3)]
    for queries in (1, 8, 15, 16, 17, 32, 33, 64 + 1, 64 + 31, 64 + 33, 128):
        given = [torch.randn(1, 2, length, 24).to(dtype).requires_grad_() for length in (queries, 150, 150)]
        grad, found = torch.randn(1, 2, queries, 24).to(dtype), {}
        learned = [LEARNED] if "score" in TAILS[name] else []
        tw.attention(*drowned, backend="cpp").sum().backward()
        for engine, tensors in (("cpp", given), ("reference", [t.detach().double().requires_grad_() for t in given])):
            out = tw.attention(*tensors, backend=engine, **TAILS[name])
            found[engine] = [out, *torch.autograd.grad(out, [*tensors, *learned], grad.to(out.dtype))]
        near = {torch.float64: 1e-11, torch.float32: 2e-5}.get(dtype, 3e-2)
        for ours, wanted in zip(found["cpp"], found["reference"], strict=True):
            torch.testing.assert_close(ours.double(), wanted.double(), rtol=near, atol=near)


# -- keys and values in panels ---------------------------------------------------------------------------------------


@available
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["causal", "alibi, then softcap", "gqa 6 over 2, mask per head", "strides: sliced", "head dim 59", "bare tiles"])
def test_panels_give_the_same_bits(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in CASES if c.name == name)
    found = []
    for bytes_read in (0, 2**62):
        monkeypatch.setattr(run, "PACKING_BYTES", bytes_read)
        call_cache.forget()
        check(case, "cpp", "cpu", dtype)
        generator = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(2, heads, 330, 24, generator=generator).to(dtype) for heads in (6, 2, 2))
        value[0, 1, 70, 3], value[1, 0, 200] = torch.inf, torch.nan
        found += [tw.attention(query, key, value, mask=masks.causal, enable_gqa=True, backend="cpp")]
        found += [tw.attention(query, key, value, enable_gqa=True, backend="cpp")]
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(found[:2], found[2:], strict=True))


@available
def test_memory_that_is_kept_holds_nothing_that_is_read() -> None:
    """A large call leaves NaN behind; a smaller one after it finds them in its workspace."""
    spoilt = [torch.full((1, 2, 300, 48), torch.nan, dtype=d, requires_grad=True) for d in (torch.float32, torch.bfloat16)]
    inputs = [q_k_v(length=n, dtype=d) for d in (torch.float32, torch.bfloat16) for n in (65, 200)]
    mask = lambda b, h, q, kv: (q >= kv) & (q < 100)  # the last blocks of queries attend to nothing
    fresh = [_gradients(*tensors, mask) for tensors in inputs]
    for t in spoilt:
        assert all(g.isnan().all() for g in _gradients(t, t, t, None))
    again = [_gradients(*tensors, mask) for tensors in inputs]
    assert all(torch.equal(a, b) for x, y in zip(fresh, again, strict=True) for a, b in zip(x, y, strict=True))
    assert all(g.isfinite().all() for x in again for g in x)


def _gradients(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, ...]:
    out = tw.attention(query, key, value, mask=mask, backend="cpp")
    return torch.autograd.grad(out, (query, key, value), torch.ones_like(out))


# -- bfloat16 without products of pairs -------------------------------------------------------------------------------


@available
@pytest.mark.parametrize("name", ["causal", "alibi, then softcap", "gqa 6 over 2, mask per head", "strides: sliced", "head dim 59", "bare tiles"])
def test_bfloat16_on_plain_vectors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "in_pairs", lambda dtype: False)
    kernels.kernel.cache_clear()
    call_cache.forget()  # plans hold kernels
    try:
        check(next(c for c in CASES if c.name == name), "cpp", "cpu", torch.bfloat16)
    finally:
        kernels.kernel.cache_clear()
        call_cache.forget()


# -- threads ---------------------------------------------------------------------------------------------------------


def everything(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Output and gradients of a problem with an uneven map, dropout and a learned table that every head adds to."""
    table = torch.linspace(-1, 1, 31, dtype=torch.float32).requires_grad_()
    q, k, v = q_k_v(4, 300, 32, dtype)
    mask, options = masks.causal & masks.sliding_window(150), {"dropout_p": 0.1, "seed": 3, "return_lse": True}
    out, lse = tw.attention(q, k, v, mask=mask, score=lambda s, b, h, i, j: s + table[(i - j) % 31], backend="cpp", **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad([out, lse], [q, k, v, table], [torch.ones_like(out), torch.ones_like(lse)])]


@available
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_every_time_with_any_number_of_threads(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    try:
        first = everything(dtype)
        for threads in (1, 2, 3, 7, 1, 2):
            torch.set_num_threads(threads)
            assert all(torch.equal(a, b) for a, b in zip(first, everything(dtype), strict=True)), f"{threads} threads"
    finally:
        torch.set_num_threads(before)


@available
def test_several_threads_call_at_once() -> None:
    wanted, found = everything(), []
    threads = [threading.Thread(target=lambda: found.append(everything())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(a, b) for one in found for a, b in zip(wanted, one, strict=True))


@available
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_has_threads_of_its_own() -> None:
    script = """
import os, sys, torch, tilewise as tw
q = torch.randn(1, 4, 512, 64)
torch.set_num_threads(2)
wanted = tw.attention(q, q, q, backend="cpp")
child = os.fork()
if child == 0:
    found = tw.attention(q, q, q, backend="cpp")
    torch.set_num_threads(1)  # torch's own threads do not survive a fork
    os._exit(0 if torch.equal(found, wanted) else 1)
status = os.waitpid(child, 0)[1]
assert torch.equal(tw.attention(q, q, q, backend="cpp"), wanted)
sys.exit(os.waitstatus_to_exitcode(status))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr


# -- what is compiled ------------------------------------------------------------------------------------------------


@available
def test_another_length_window_batch_or_layout_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(window: int, length: int, batch: int, lengths: list[int]) -> None:
        mask = masks.causal & masks.sliding_window(window) & masks.document(lengths=lengths)
        q = torch.randn(batch, 2, length, 16, requires_grad=True)
        tw.attention(q, q, q, mask=mask, score=scores.softcap(float(window)), backend="cpp").sum().backward()

    run(30, 200, 1, [50, 150])
    before = Counts.built
    run(31, 200, 1, [120, 80])
    run(100, 333, 2, [300, 30, 3])
    run(7, 64, 3, [64])
    assert Counts.built == before


@available
def test_building_ahead_for_the_cpu(tmp_path: Path) -> None:
    script = """
import json, sys, torch, tilewise as tw
from tilewise import masks, scores
from tilewise.engines.cpp.libraries import Counts
first = tw.build_kernels([masks.causal], [scores.softcap(30.0)], [64], ["fp32"], "cpu")
second = tw.build_kernels([masks.causal], [scores.softcap(5.0)], [128], ["fp32"], "cpu")
before = Counts.built
q = torch.randn(1, 2, 200, 64, requires_grad=True)
tw.attention(q, q, q, mask=masks.causal, score=scores.softcap(10.0), backend="cpp").sum().backward()
print(json.dumps([first.wanted, first.compiled, second.compiled, Counts.built - before]))
"""
    environment = os.environ | {store.VARIABLE: str(tmp_path / "store")}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300, env=environment)
    wanted, compiled, again, at_run = json.loads(ran.stdout)
    assert wanted == 6 and compiled == 5  # the pool was built to see whether the compiler works
    assert again == 0 and at_run == 0


@available
@pytest.mark.parametrize("variable", [compiler.COMPILER, compiler.TARGET])
def test_what_is_compiled_in_another_way_is_kept_apart(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = key_of(POOL)
    monkeypatch.setenv(variable, "haswell" if variable == compiler.TARGET else f"{fake_compiler(tmp_path / 'bin', 'exit 1')}/g++")
    assert key_of(POOL) != usual


def test_a_compiler_that_is_named_but_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.COMPILER, "no-such-compiler")
    with pytest.raises(compiler.CompilerError, match="TILEWISE_CXX names 'no-such-compiler', which is no program that can be run"):
        compiler.identity()


@available
def test_a_processor_that_the_compiler_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.TARGET, "abacus")
    with pytest.raises(compiler.CompilerError, match="abacus"):
        compiler.compiled(POOL.source, POOL.extra)


# -- a compiler that is missing or fails -----------------------------------------------------------------------------

PLAIN = """
import json, logging, sys, torch, tilewise as tw
from tilewise import masks
from tilewise.engines.cpp.libraries import Counts
q = torch.ones(1, 2, 70, 16, requires_grad=True)
said = []
for name in ("auto", "flex", "cpp"):
    try:
        out = tw.attention(q, q, q, mask=masks.sliding_window(5), backend=name)
        out.sum().backward()
        said.append(tw.explain(q, q, q, mask=masks.sliding_window(5), backend=name).engine)
    except tw.BackendError as error:
        said.append(str(error))
print(json.dumps([said, Counts.built, Counts.loaded]))
"""


def in_a_process(folder: Path, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {store.VARIABLE: str(folder / "store")} | variables
    return subprocess.Popen([sys.executable, "-c", PLAIN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def fake_compiler(folder: Path, text: str) -> str:
    folder.mkdir()
    path = folder / "g++"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(folder)


FAULTS = {
    "none": (None, "no C++ compiler was found"),
    "fails": ("echo 'cc1plus: error: out of patience' >&2; exit 1", "out of patience"),
    "lies": ("exit 0", "ended with 0"),
    "speaks no UTF-8": (r"printf 'error: \\377\\376 no\\n' >&2; exit 1", "no"),
    "writes rubbish": ('for last; do :; done; echo rubbish > "$last"', "could not be loaded"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_without_a_working_compiler_blocked_serves(fault: str, tmp_path: Path) -> None:
    text, reason = FAULTS[fault]
    path = str(tmp_path) if text is None else fake_compiler(tmp_path / "bin", text)
    process = in_a_process(tmp_path, PATH=path, **{compiler.COMPILER: ""})
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    (auto, flex, cpp), _, _ = json.loads(stdout)
    assert (auto, flex) == ("blocked", "blocked")
    assert reason in cpp and cpp.startswith("backend 'cpp' (from the backend argument) cannot serve")
    assert stderr.count("plain torch operations") == 1 and reason in stderr, stderr
    assert "install" in stderr or fault == "writes rubbish"


@available
def test_a_program_that_does_not_compile_is_served_by_blocked_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tilewise.engines import cpp
    from tilewise.engines.cpp import libraries

    compiled, tried = compiler.compiled, []

    def fails_on_powers(source: str, extra: tuple[str, ...]) -> bytes:
        tried.append(source)
        if "integer_power" in source:
            raise compiler.CompilerError("the C++ compiler ran out of disk")
        return compiled(source, extra)

    def bad(b, h, i, j):
        return (i**3 + j) % 5 > 1

    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "store"))
    monkeypatch.setattr(compiler, "compiled", fails_on_powers)
    monkeypatch.setattr(libraries, "_failed", {})
    q = torch.randn(1, 1, 40, 8)
    for _ in range(3):
        torch.testing.assert_close(tw.attention(q, q, q, mask=bad, backend="cpp"), tw.attention(q, q, q, mask=bad, backend="reference"))
    assert len([source for source in tried if "integer_power" in source]) == 1
    assert caplog.text.count("ran out of disk") == 1 and "calls with this program are served by tiles of plain torch" in caplog.text
    assert "pow - " in caplog.text  # which program
    assert cpp.missing() is None
    built = libraries.Counts.built
    tw.attention(q, q, q, mask=lambda b, h, i, j: (i * 37 + j * 43) % 5 > 1, backend="cpp")
    assert libraries.Counts.built > built


@available
def test_cold_processes_at_once_build_once(tmp_path: Path) -> None:
    processes = [in_a_process(tmp_path) for _ in range(3)]
    outputs = [p.communicate(timeout=300) for p in processes]
    assert all(p.returncode == 0 for p in processes), outputs
    counts = [json.loads(stdout)[1:] for stdout, _ in outputs]
    assert all(json.loads(stdout)[0] == ["cpp", "cpp", "cpp"] for stdout, _ in outputs)
    assert sum(built for built, _ in counts) == 4, counts  # pool, forward, mask, backward


@available
def test_a_damaged_library_is_built_again(tmp_path: Path) -> None:
    for _ in range(2):
        process = in_a_process(tmp_path)
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        assert json.loads(stdout)[1] == 4
        for path in (tmp_path / "store").glob(f"*{store.ENDING}"):
            path.write_bytes(path.read_bytes()[:-100])
