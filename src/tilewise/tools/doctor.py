"""The doctor: versions, GPU, toolchain and store, and every engine run on a real problem against the reference."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch

import tilewise
from tilewise import masks, scores
from tilewise.attention import problem_of_call
from tilewise.core import store
from tilewise.core.problem import Options
from tilewise.engines import ENGINES, Engine, Request
from tilewise.engines.gpu.limits import NO_TRITON
from tilewise.frontend.dispatch import VARIABLE, names, reason_against, requested_backend
from tilewise.tools.words import counted

OPTIONAL = ("triton", "numpy", "typer", "rich", "matplotlib", "diffusers", "transformers", "accelerate")
REPORT = "this should work; please open an issue with the output of `tilewise doctor --report`"


@dataclass(frozen=True)
class Finding:
    """One line of the report. status: ok, note (nothing is wrong, but something is slower or absent), problem."""

    what: str
    status: str
    detail: str
    fix: str = ""


def examine(tell: Callable[[int, int, str], None]) -> list[Finding]:
    """Every finding; tell(done, total, what is examined now)."""
    engines = {f"{engine.name} on {device}": partial(_engine, engine, device) for device in _devices() for engine in ENGINES}
    steps: dict[str, Callable[[], list[Finding]]] = {
        "versions": _versions,
        "GPU": _gpu,
        "toolchain": _toolchain,
        "kernel store": _store,
        "backend": _backend,
    } | engines
    found: list[Finding] = []
    for done, (what, step) in enumerate(steps.items()):
        tell(done, len(steps), f"examining {what}")
        found += step()
    return found


def healthy(findings: list[Finding]) -> bool:
    return all(f.status != "problem" for f in findings)


def _devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def _versions() -> list[Finding]:
    found = [
        Finding("tilewise", "ok", tilewise.__version__),
        Finding("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("CPU", "ok", f"{counted(os.cpu_count() or 1, 'core')}, {torch.backends.cpu.get_cpu_capability()}"),
        Finding("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, {counted(torch.get_num_threads(), 'thread')}"),
    ]
    for name in OPTIONAL:
        try:
            found.append(Finding(name, "ok", metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append(Finding(name, "note", "not installed"))
    return found


def _gpu() -> list[Finding]:
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return [Finding("GPU", "note", "this torch is built without CUDA")]
        return [Finding("GPU", "note", f"torch is built for CUDA {torch.version.cuda}, but finds no GPU or driver", "see nvidia-smi and the driver's version")]
    found = []
    for k in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(k)
        old = (p.major, p.minor) < (8, 0)
        detail = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB, {counted(p.multi_processor_count, 'SM')}"
        found.append(Finding(f"GPU {k}", "note" if old else "ok", detail, "older than Ampere: no fused kernels" if old else ""))
    return found


def _toolchain() -> list[Finding]:
    return [_triton(), _nvrtc(), _compiler(), _half_products()]


def _triton() -> Finding:
    if NO_TRITON is None:
        return Finding("Triton kernels", "ok", "can be compiled")
    return Finding("Triton kernels", "note", NO_TRITON, "pip install --upgrade triton" if torch.cuda.is_available() else "")  # a CPU has no use for them


def _nvrtc() -> Finding:
    """The compiler of the CUDA engine, which Hopper GPUs alone have a use for."""
    from tilewise.engines.cuda import nvrtc

    reason = nvrtc.refusal()
    if reason is not None:
        return Finding("NVRTC", "note", reason)
    major, minor = nvrtc.version()
    return Finding("NVRTC", "ok", f"{major}.{minor}, {nvrtc.found_at()}")


def _compiler() -> Finding:
    """Whether the C++ compiler works."""
    from tilewise.engines.cpp import compiler, missing, pairs

    reason = missing()
    if reason is not None:
        return Finding("C++ compiler", "note", reason, compiler.INSTALL)
    unit = pairs.unit()
    products = "" if unit is None else f"; bfloat16 products run on {unit.name}"
    return Finding("C++ compiler", "ok", f"{compiler.find()} {compiler.target()}{products}")


def _half_products() -> Finding:
    """torch's own bfloat16 matmul on the CPU, tried in a subprocess: on some virtual machines it kills the process."""
    product = "import torch; a = torch.ones((64, 64), dtype=torch.bfloat16); a @ a"
    try:
        done = subprocess.run([sys.executable, "-c", product], capture_output=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("torch's bfloat16 on cpu", "note", f"could not be tried: {error}")
    if done.returncode == 0:
        return Finding("torch's bfloat16 on cpu", "ok", "matrix products work")
    detail = f"a matrix product kills Python (exit code {done.returncode}): the processor reports instructions that it cannot run"
    return Finding("torch's bfloat16 on cpu", "note", detail, "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16; tilewise's C++ engine needs no remedy")


def _store() -> list[Finding]:
    root = store.kernel_root()
    damaged = len(store.damaged())
    detail = f"{root}: {counted(len(store.entries()), 'kernel')}, {store.size() / 2**20:.1f} MiB of at most {store.most_bytes() / 2**20:.0f}"
    if damaged:
        again = "it will be built again" if damaged == 1 else "they will be built again"
        return [Finding("kernel store", "note", f"{detail}, {damaged} damaged ({again})", "tilewise cache clear")]
    return [Finding("kernel store", "ok", detail)]


def _backend() -> list[Finding]:
    name, source = requested_backend(None)
    if name not in names():
        return [Finding("backend", "problem", f"{source} is {name!r}; allowed are {', '.join(names())}", f"unset {VARIABLE}")]
    return [Finding("backend", "ok", f"{name!r}, from {source}")]


def _engine(engine: Engine, device: str) -> list[Finding]:
    """A masked, scored forward and backward (where the engine takes masks and scores), compared with the reference in float64."""
    title = f"{engine.name} on {device}"
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    plain = engine.name == "native"
    unmasked = engine.name == "fa2"
    mask: Any = None if unmasked else masks.causal if plain else masks.causal & masks.sliding_window(50)
    score = None if plain or unmasked else scores.softcap(20.0)
    query, key, value = (torch.randn(1, 2, 150, 64, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    problem, _ = problem_of_call(query, key, value, mask, score, Options(), "bhsd", None)
    refusal = reason_against(engine, problem, Request(engine.name, "doctor", False, False))
    if refusal is not None:
        return [Finding(title, "note", refusal)]
    try:
        error = _error([query, key, value], mask, score, engine.name)
    except Exception as failure:  # any failure is a finding
        return [Finding(title, "problem", f"{type(failure).__name__}: {failure}", REPORT)]
    allowed = 16 * torch.finfo(dtype).eps
    if not error <= allowed:
        return [Finding(title, "problem", f"differs from the reference by {error:.1e}, allowed {allowed:.1e}", REPORT)]
    return [Finding(title, "ok", f"agrees with the reference, forward and backward, within {error:.1e}")]


def _error(inputs: list[torch.Tensor], mask: Any, score: Any, backend: str) -> float:
    """Largest relative error of output and gradients."""
    exact_inputs = [t.detach().double().cpu().requires_grad_() for t in inputs]
    found: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    for tensors, name, results in ((inputs, backend, found), (exact_inputs, "reference", wanted)):
        out = tilewise.attention(*tensors, mask=mask, score=score, backend=name)
        results += [out, *torch.autograd.grad(out.square().sum(), tensors)]
    return max(float((a.detach().double().cpu() - b.detach()).norm() / b.detach().norm()) for a, b in zip(found, wanted, strict=True))
