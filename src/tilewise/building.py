"""Building kernels ahead of time, for any architecture, on a machine with or without a GPU."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

from tilewise import store
from tilewise.attention import problem_of_call
from tilewise.errors import BackendError, InputError
from tilewise.problem import Options, Problem
from tilewise.scores import as_scores

HEADS, LENGTH = 2, 4096  # sizes are arguments of a kernel, not part of it; these only have to be plausible
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class BuildReport:
    """How many kernels were wanted, and how many of them had to be compiled."""

    wanted: int
    compiled: int
    folder: str

    def __str__(self) -> str:
        return f"{self.wanted} kernels in {self.folder}: {self.compiled} compiled, {self.wanted - self.compiled} already there"


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

    masks, scores   what attention() takes as mask= and score=, or None
    arch            "sm_80", "sm_90", ...; the GPU of this machine unless given
    backward        also the kernels of the backward pass
    decode          also those for a single query over a long cache
    progress        called with (done, total, what was built)

    What is there already is not built again. Kernels do not depend on lengths, batch sizes, window sizes or captured contents.
    """
    from tilewise.engines.triton import MISSING

    if MISSING is not None:
        raise BackendError(f"Could not compile flex_attention kernels: {MISSING}")
    from tilewise.engines.triton import ahead
    from tilewise.engines.triton.launch import Counts

    architectures = [_architecture(a) for a in ([arch] if arch is None or isinstance(arch, str) else arch)]
    wanted = []
    for dtype in dtypes:
        for dim in head_dims:
            for mask in masks:
                for score in scores:
                    problem = _problem(mask, score, dim, _dtype(dtype), LENGTH)
                    launches = ahead.forward_launches(problem)
                    if backward:
                        launches += ahead.backward_launches(problem, _learned(problem))
                    if decode:
                        launches += ahead.forward_launches(_problem(mask, score, dim, _dtype(dtype), 1))
                    wanted += [(launch, a) for launch in launches for a in architectures]
    before = Counts.built
    _build_all(wanted, ahead.build, progress)
    return BuildReport(len(wanted), Counts.built - before, str(store.kernel_root()))


def build_flex_attention_kernels(arch: str | None = None) -> BuildReport:
    """The kernels most models use: plain and causal, head dims 64 and 128, bf16 and fp16. A no-op when they are there."""
    from tilewise.masks import causal

    return build_kernels(masks=[None, causal], dtypes=("bf16", "fp16"), arch=arch)


def _build_all(wanted: list[Any], build: Callable[..., str], progress: Callable[[int, int, str], None] | None) -> None:
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(_build_one, build, make, arch) for make, arch in wanted]
        for done, future in enumerate(as_completed(futures), 1):
            try:
                what = future.result()
            except Exception as error:
                for other in futures:
                    other.cancel()
                raise BackendError(f"Could not compile flex_attention kernels: {type(error).__name__}: {error}") from error
            if progress is not None:
                progress(done, len(futures), what)


def _build_one(build: Callable[..., str], make: Callable[[], Any], arch: int) -> str:
    return build(make(), arch)


def _problem(mask: Any, score: Any, dim: int, dtype: torch.dtype, q_len: int) -> Problem:
    query = torch.empty(1, HEADS, q_len, dim, dtype=dtype, device="meta")
    key = torch.empty(1, HEADS, LENGTH, dim, dtype=dtype, device="meta")
    return problem_of_call(query, key, key, mask, list(as_scores(score)) or None, Options(), "bhsd", None)[0]


def _learned(problem: Problem) -> frozenset[int]:
    return frozenset() if problem.score is None else frozenset(k for k, t in enumerate(problem.score.captures) if t.requires_grad)


def _architecture(name: str | None) -> int:
    if name is None:
        if not torch.cuda.is_available():
            raise InputError("no GPU here: say which architecture to build for, arch='sm_80' (A100), 'sm_89' (4090, L40S), 'sm_90' (H100, H200), ...")
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor
    digits = name.removeprefix("sm_").removesuffix("a")
    if not digits.isdigit() or int(digits) < 80:
        raise InputError(f"an architecture is 'sm_80' or newer, got {name!r}")
    return int(digits)


def _dtype(name: str | torch.dtype) -> torch.dtype:
    if isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]
