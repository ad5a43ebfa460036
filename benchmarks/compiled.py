"""What attention costs the host in compiled code: a layer of a tiny `torch.compile`d model, beside the same with torch's SDPA.

    python benchmarks/compiled.py [--save] [--threads N] [--quick] [--profile]

On a GPU, the time in which the host hands a layer over, by default and with `mode="reduce-overhead"` (CUDA graphs); on a CPU, the time it takes. A model is
8 layers of attention and a product, so what torch does once for a compiled function counts for an eighth. Implementations take turns, and every figure is the
least of many.
"""

import cProfile
import pstats
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import arguments, progress, report, table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tilewise as tw
from tilewise import masks

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
BACKEND = "flex"  # what `auto` takes where it does not hand a call to SDPA
SHAPES = {"tiny": (1, 2, 128, 64), "small": (1, 8, 512, 64)} if ON_GPU else {"tiny": (1, 2, 16, 16), "small": (1, 4, 128, 64)}
MODES: tuple[str | None, ...] = (None, "reduce-overhead") if ON_GPU else (None,)
LAYERS = 8
ROUNDS, CALLS = 60, 5
PROFILED, SHOWN = 50, 15  # calls, functions

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return tw.attention(q, k, v, backend=BACKEND)


def causal(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return tw.attention(q, k, v, mask=masks.causal, backend=BACKEND)


def documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return tw.attention(q, k, v, mask=masks.causal & masks.document(ids), backend=BACKEND)


def sdpa(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v)


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


FUNCTIONS: dict[str, Attend] = {"SDPA": sdpa, "SDPA, causal": sdpa_causal, "plain": plain, "causal": causal, "documents": documents}


def job(attend: Attend, shape: tuple[int, ...], mode: str | None, trains: bool) -> Callable[[], None]:
    """One call of the compiled model, and of its backward if it trains."""
    inputs = [torch.randn(shape, dtype=DTYPE, device=DEVICE, requires_grad=trains) for _ in range(3)]
    ids = torch.arange(shape[2], device=DEVICE) // 50

    def model(x: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        for _ in range(LAYERS):
            x = attend(x * 0.5, k, v, ids)
        return x

    compiled = torch.compile(model, fullgraph=True, mode=mode)
    gradient = torch.ones(shape, dtype=DTYPE, device=DEVICE)

    def call() -> None:
        if mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*inputs, ids)
        if trains:
            torch.autograd.grad(out, inputs, gradient)

    for _ in range(5):  # compile, warm up, capture
        call()
    return call


def microseconds(jobs: list[Callable[[], None]]) -> list[float]:
    least = [float("inf")] * len(jobs)
    for _ in range(ROUNDS):
        for n, call in enumerate(jobs):
            if ON_GPU:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            least[n] = min(least[n], (time.perf_counter() - begin) / CALLS / LAYERS * 1e6)
    return least


def section(mode: str | None, trains: bool, quick: bool, profile: bool) -> str:
    rows: list[list[str]] = []
    for name, shape in list(SHAPES.items())[: 1 if quick else None]:
        progress(f"{mode or 'default'}, {'training' if trains else 'inference'}, {name}")
        torch._dynamo.reset()
        with torch.set_grad_enabled(trains):
            jobs = [job(attend, shape, mode, trains) for attend in FUNCTIONS.values()]
            found = microseconds(jobs)
            for function, call in zip(FUNCTIONS, jobs, strict=True):
                if profile:
                    print(f"\n{mode or 'default'}, {'training' if trains else 'inference'}, {name}: {function}, {PROFILED} calls of {LAYERS} layers")
                    show_profile(call)
        base: dict[str, float] = dict(zip(FUNCTIONS, found, strict=True))
        cells = [f"{us:.0f}" if f.startswith("SDPA") else f"{us:.0f} ({us / base['SDPA' if f == 'plain' else 'SDPA, causal']:.2f})" for f, us in base.items()]
        rows.append([f"{name} {shape}", *cells])
    title = f"## {'Forward and backward' if trains else 'Forward'}, mode {mode or 'default'}"
    return f"{title}\n\n{table(['microseconds a layer (beside SDPA)', *FUNCTIONS], rows)}"


def show_profile(call: Callable[[], None]) -> None:
    """The functions that take most of the host's time by themselves, Python's and C's; on a GPU, of forwards alone: backwards run in a thread of autograd's."""
    watch = cProfile.Profile()
    watch.enable()
    for _ in range(PROFILED):
        call()
    watch.disable()
    pstats.Stats(watch).sort_stats("tottime").print_stats(SHOWN)


def main() -> None:
    options: Any = arguments(__doc__ or "", ("--quick", "the smallest shape only"), ("--profile", "also print where the host's time goes"))
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    sections = [section(mode, trains, options.quick, options.profile) for mode in MODES for trains in (False, True)]
    report(__file__, options, "Compiled attention: the host's time", [f"On: {torch.cuda.get_device_name() if ON_GPU else 'the CPU'}, {DTYPE}.", *sections])


if __name__ == "__main__":
    main()
