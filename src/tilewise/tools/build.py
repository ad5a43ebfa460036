"""Builds kernels ahead of time: for this machine's CPU, and for any GPU architecture, with or without a GPU."""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from tilewise.attention import problem_of_call
from tilewise.core import store
from tilewise.core.problem import Options, Problem
from tilewise.engines import engine_named
from tilewise.engines.gpu.limits import NO_TRITON
from tilewise.errors import BackendError, InputError
from tilewise.frontend.token_order import best_permutation, token_permute
from tilewise.masks import Mask
from tilewise.named import Named
from tilewise.scores import as_scores
from tilewise.tools.words import counted

HEADS, LENGTH = 2, 4096  # kernels take sizes as arguments, so these only have to be plausible
CPU, CPP = "cpu", "cpp"  # an architecture, and its engine
__all__ = ["BuildReport", "build_flex_attention_kernels", "build_kernels"]

Build = Callable[[], str]  # builds one kernel and returns its name
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class BuildReport:
    """How many kernels were wanted, and how many of them had to be compiled."""

    wanted: int
    compiled: int
    folder: str

    def __str__(self) -> str:
        return f"{counted(self.wanted, 'kernel')} in {self.folder}: {self.compiled} compiled, {self.wanted - self.compiled} already there"


def build_kernels(
    masks: Sequence[Any] = (None,),
    scores: Sequence[Any] = (None,),
    head_dims: Sequence[int] = (64, 128),
    dtypes: Sequence[str | torch.dtype] = ("bf16",),
    arch: str | Sequence[str] | None = None,
    *,
    backward: bool = True,
    decode: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> BuildReport:
    """Compile the kernels for every combination of mask, score, head dim and dtype into the kernel store.

    Kernels that are in the store already are not built again. Kernels do not depend on lengths, batch sizes, window sizes or captured contents.

    Args:
        masks: What attention() takes as mask=, or None.
        scores: What attention() takes as score=, or None.
        head_dims: Of queries, keys and values.
        dtypes: "bf16", "fp16", "fp32", or torch's.
        arch: "sm_80", "sm_90", ..., or "cpu" for this machine's own; the GPU of this machine unless given.
        backward: Also the kernels of the backward pass.
        decode: Also those for a single query over a long cache.
        progress: Called with (done, total, what was built).
    """
    names = [arch] if arch is None or isinstance(arch, str) else list(arch)
    gpus = [_architecture(a) for a in names if a != CPU]
    problems = [_problem(mask, score, dim, _dtype(dtype), LENGTH) for dtype in dtypes for dim in head_dims for mask in masks for score in scores]
    wanted: list[Build] = []
    if gpus:
        singles = [_problem(mask, score, dim, _dtype(dtype), 1) for dtype in dtypes for dim in head_dims for mask in masks for score in scores]
        decoding = [p for p in singles if p.q_len == 1]  # a mask may be made for more queries
        wanted += _for_gpus(problems, decoding if decode else [], gpus, backward)
    if CPU in names:
        wanted += _for_cpu(problems, backward)
    before = _built()
    _build_all(wanted, progress)
    return BuildReport(len(wanted), _built() - before, str(store.kernel_root()))


def _built() -> int:
    """Kernels compiled so far."""
    from tilewise.engines.cpp import libraries

    if NO_TRITON is not None:
        return libraries.Counts.built
    from tilewise.engines.gpu import kernel_cache

    return libraries.Counts.built + kernel_cache.Counts.built


def _for_gpus(problems: list[Problem], singles: list[Problem], architectures: list[int], backward: bool) -> list[Build]:
    if NO_TRITON is not None:
        raise BackendError(f"Could not compile flex_attention kernels: {NO_TRITON}")
    from tilewise.engines.triton import aot

    found: list[Build] = []
    for arch in architectures:
        launches = []
        for problem in problems:
            launches += _launches(problem, arch, backward)
        for problem in singles:
            launches += aot.forward_launches(problem)
        found += [partial(_build_launch, launch, arch) for launch in launches]
    return found


def _launches(problem: Problem, arch: int, backward: bool) -> list[Callable[[], Any]]:
    """The launches of calls like this problem on this architecture. On Hopper, small calls run on the Triton engine; large ones have Gluon's backward, and a
    forward in CUDA C++ where that serves and its compiler is there."""
    from tilewise.engines.gluon import ARCHITECTURE, NO_GLUON
    from tilewise.engines.gluon.refusals import refuse_backward, refuse_problem
    from tilewise.engines.triton import aot, too_wide

    mine = _in_order(problem, "triton")
    refusal = too_wide(mine, arch) if backward else None
    if refusal is not None:
        raise BackendError(f"Could not compile flex_attention kernels: {refusal}, and backward=False (--forward-only) leaves gradients out")
    launches = aot.forward_launches(mine) + (aot.backward_launches(mine, mine.learned) if backward else [])
    if arch == ARCHITECTURE and NO_GLUON is None and refuse_problem(problem) is None:
        from tilewise.engines.gluon import aot as hopper

        launches += _hopper_forward(problem)
        mine = _in_order(problem, "gluon")
        if backward and refuse_backward(mine, bool(mine.learned)) is None:
            launches += hopper.backward_launches(mine)
    return launches


def _hopper_forward(problem: Problem) -> list[Callable[[], Any]]:
    from tilewise.engines.cuda import aot as cuda
    from tilewise.engines.cuda import nvrtc
    from tilewise.engines.cuda.refusals import faster_elsewhere, refuse_problem
    from tilewise.engines.gluon import aot as gluon

    if (problem.dropout_p > 0 or faster_elsewhere(problem) is None) and refuse_problem(problem) is None and nvrtc.refusal() is None:
        return cuda.forward_launches(_in_order(problem, "cuda"))
    return gluon.forward_launches(_in_order(problem, "gluon"))


def _in_order(problem: Problem, engine: str) -> Problem:
    """The problem with its tokens in the order in which an engine computes them: on a grid, possibly in patches."""
    permutation = None if problem.grid is None else best_permutation(engine_named(engine), problem)
    return problem if permutation is None else token_permute(permutation, problem)


def _build_launch(make: Callable[[], Any], arch: int) -> str:
    from tilewise.engines.gpu import aot

    return aot.build(make(), arch)


def _for_cpu(problems: list[Problem], backward: bool) -> list[Build]:
    from tilewise.engines.cpp import aot, missing

    reason = missing()
    if reason is not None:
        raise BackendError(f"Could not compile flex_attention kernels: {reason}")
    units = {unit: name for p in problems for name, unit in aot.units(_in_order(p, CPP), backward, p.learned)}
    return [partial(aot.build, name, unit) for unit, name in units.items()]


def build_flex_attention_kernels(arch: str | None = None) -> BuildReport:
    """The kernels most models use: plain and causal, head dims 64 and 128, bf16 and fp16. A no-op when they are there."""
    from tilewise.masks import causal

    return build_kernels(masks=[None, causal], dtypes=("bf16", "fp16"), arch=arch)


def _build_all(wanted: list[Build], progress: Callable[[int, int, str], None] | None) -> None:
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(build) for build in wanted]
        for done, future in enumerate(as_completed(futures), 1):
            try:
                what = future.result()
            except Exception as error:  # compilers may raise anything; the message says what
                for other in futures:
                    other.cancel()
                raise BackendError(f"Could not compile flex_attention kernels: {type(error).__name__}: {error}") from error
            if progress is not None:
                progress(done, len(futures), what)


def _problem(mask: Any, score: Any, dim: int, dtype: torch.dtype, q_len: int) -> Problem:
    """A problem of the sizes that the mask and the scores are made for, if they are for certain sizes."""
    grid = mask.grid if isinstance(mask, Mask) else None
    length = LENGTH if grid is None else prod(grid.shape)
    sizes = {"b": 1, "h": HEADS, "q": length if q_len == LENGTH else q_len, "kv": length}
    functions = list(as_scores(score))
    for function in (mask, *functions):
        if isinstance(function, Named):
            sizes.update({known.axis: known.size for known in function.covers})
    query, key = (torch.empty(sizes["b"], sizes["h"], sizes[axis], dim, dtype=dtype, device="meta") for axis in ("q", "kv"))
    return problem_of_call(query, key, key, mask, functions or None, Options(), "bhsd", None)[0]


def _architecture(name: str | None) -> int:
    if name is None:
        if not torch.cuda.is_available():
            raise InputError("no GPU here: say which architecture to build for, arch='cpu', 'sm_80' (A100), 'sm_89' (4090, L40S), 'sm_90' (H100, H200), ...")
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor
    digits = name.removeprefix("sm_").removesuffix("a")
    if not re.fullmatch("[0-9]{2,3}", digits) or int(digits) < 80:
        meant = re.fullmatch("sm[-_ ]?([0-9]{2,3})a?", name.lower())
        advice = f"; did you mean 'sm_{meant.group(1)}'?" if meant is not None and int(meant.group(1)) >= 80 else ""
        raise InputError(f"an architecture is 'cpu', or 'sm_80' or newer, got {name!r}{advice}")
    return int(digits)


def _dtype(name: str | torch.dtype) -> torch.dtype:
    if isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]
