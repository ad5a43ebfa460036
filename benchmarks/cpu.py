"""The C++ engine on this machine's own cores, beside torch's SDPA, compiled flex_attention and sgemm.

Everything that is compared runs in turn, in one process; a time is the median over the rounds. Maps, masks and kernels are built before.
"""

import os

# Some virtual machines announce AMX and let torch's bf16 products crash; oneDNN reads this once, before its first product. SDPA is not kept from AMX by it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from common import _busy_elsewhere, arguments, progress, report, table, time_text
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import tilewise as tw
from tilewise import masks, scores

HEADS = 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TARGETS = {("fp32", "forward"): 1.0, ("fp32", "backward"): 1.2, ("bf16", "forward"): 1.0, ("bf16", "backward"): 3.0}
FLEX_TARGET, SGEMM_TARGET, DECODE_TARGET, WINDOW_TARGET = 2.0, 0.6, 1.0, 20.0


def in_turn(functions: list[Callable[[], Any]], seconds: float = 2.0, least: int = 3) -> list[float]:
    """Median milliseconds of each, called one after the other, round after round."""
    for f in functions:
        f()
    times: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + seconds
    while len(times[0]) < least or time.perf_counter() < end:
        for f, taken in zip(functions, times, strict=True):
            begin = time.perf_counter()
            f()
            taken.append(1e3 * (time.perf_counter() - begin))
    return [median(taken) for taken in times]


def inputs(length: int, dim: int, dtype: torch.dtype, heads: int = HEADS, queries: int | None = None, kv_heads: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, length if queries is None else queries, dim), *[(1, heads if kv_heads is None else kv_heads, length, dim)] * 2]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def verdict(ratio: float, target: float) -> str:
    return f"{ratio:.2f}" if ratio >= target else f"{ratio:.2f} (below {target:g})"


# -- sections ----------------------------------------------------------------------------------------------------------


def beside_sdpa() -> str:
    parts, shares = [], []
    square = [torch.randn(2048, 2048) for _ in range(2)]
    for name, dtype in DTYPES.items():
        rows = []
        for dim in (64, 128):
            for length in (1024, 4096):
                for causal in (False, True):
                    progress(f"SDPA {name} D{dim} S{length} {'causal' if causal else 'full'}")
                    q, k, v = inputs(length, dim, dtype)
                    mask = masks.causal if causal else None
                    with torch.no_grad():
                        calls = [
                            lambda q=q, k=k, v=v, m=mask: tw.attention(q, k, v, mask=m, backend="cpp"),
                            lambda q=q, k=k, v=v, c=causal: scaled_dot_product_attention(q, k, v, is_causal=c),
                            lambda: square[0] @ square[1],
                        ]
                        ours, theirs, sgemm = in_turn(calls)
                    flops = 4e-6 * HEADS * length**2 * dim * (0.5 if causal else 1)
                    rate = 2e-6 * 2048**3 / sgemm
                    if name == "fp32" and not causal:
                        shares.append(f"D{dim} S{length} {flops / ours / rate:.0%} of {rate:.0f} GFLOP/s")
                    outs = [tw.attention(q, k, v, mask=mask, backend="cpp"), scaled_dot_product_attention(q, k, v, is_causal=causal)]
                    grad = torch.randn_like(outs[0])
                    back = in_turn([lambda o=o, g=grad, t=(q, k, v): torch.autograd.grad(o, t, g, retain_graph=True) for o in outs])
                    rows.append(
                        [
                            f"D{dim} S{length} {'causal' if causal else 'full'}",
                            f"{time_text(ours)} ({flops / ours:.0f})",
                            time_text(theirs),
                            verdict(theirs / ours, TARGETS[name, "forward"]),
                            f"{time_text(back[0])} ({2.5 * flops / back[0]:.0f})",
                            time_text(back[1]),
                            verdict(back[1] / back[0], TARGETS[name, "backward"]),
                        ]
                    )
        header = [name, "forward (GFLOP/s)", "SDPA", "ratio", "backward (GFLOP/s)", "SDPA", "ratio"]
        targets = f"Targets: forward {TARGETS[name, 'forward']:g}, backward {TARGETS[name, 'backward']:g}."
        parts.append(f"{targets}\n\n{table(header, rows)}")
    share = f"Full fp32 forward as a share of torch's sgemm of 2048 x 2048 in the same rounds (target {SGEMM_TARGET:.0%}): {'; '.join(shares)}."
    return "## Beside SDPA\n\nBatch 1, 8 heads.\n\n" + "\n\n".join(parts) + f"\n\n{share}"


def short_sequences() -> str:
    """Lengths that do not fill tiles: text encoders (77), vision transformers (197, 257), small images."""
    rows = []
    for dim in (64, 128):
        for length in (64, 77, 128, 197, 257, 304):
            q, k, v = inputs(length, dim, torch.float32)
            grad = torch.randn_like(q)
            calls = [lambda q=q, k=k, v=v: tw.attention(q, k, v, backend="cpp"), lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v)]
            with torch.no_grad():
                ours, theirs = in_turn(calls, seconds=0.5)
            steps = in_turn([lambda f=f, t=(q, k, v), g=grad: torch.autograd.grad(f(), t, g) for f in calls], seconds=0.5)
            found = [f"{1e3 * ours:.0f} µs", f"{1e3 * theirs:.0f} µs", verdict(theirs / ours, 1.0)]
            rows.append([f"D{dim} S{length}", *found, *[f"{1e3 * t:.0f} µs" for t in steps], verdict(steps[1] / steps[0], 1.0)])
    header = ["fp32", "forward", "SDPA", "ratio", "forward and backward", "SDPA", "ratio"]
    return "## Short sequences\n\nBatch 1, 8 heads, full. Target: 1.\n\n" + table(header, rows)


def beside_flex(length: int = 4096, dim: int = 64) -> str:
    slopes = torch.tensor([2.0 ** -(h + 1) for h in range(HEADS)])
    ids = torch.arange(length) // (length // 8)
    causal = lambda b, h, q, kv: q >= kv
    window = lambda b, h, q, kv: (q >= kv) & (q - kv <= 256)
    document = lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])
    alibi = lambda s, b, h, q, kv: s + slopes[h] * (kv - q)
    softcap = lambda s, b, h, q, kv: 20.0 * torch.tanh(s / 20.0)
    cases: dict[str, tuple[Any, Any, Any, Any]] = {  # torch's mask and score, ours
        "causal": (causal, None, masks.causal, None),
        "causal, window 256": (window, None, window, None),
        "causal, 8 documents": (document, None, document, None),
        "causal, ALiBi": (causal, alibi, masks.causal, alibi),
        "causal, softcap 20": (causal, softcap, masks.causal, scores.softcap(20.0)),
    }
    rows = []
    for name, (mask_mod, score_mod, mask, score) in cases.items():
        progress(f"compiled flex: {name}")
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False)
        q, k, v = (t.detach() for t in inputs(length, dim, torch.float32))
        blocks = create_block_mask(mask_mod, None, None, length, length, device="cpu")
        with torch.no_grad():
            ours, theirs = in_turn(
                [
                    lambda q=q, k=k, v=v, m=mask, s=score: tw.attention(q, k, v, mask=m, score=s, backend="cpp"),
                    lambda q=q, k=k, v=v, s=score_mod, f=compiled, b=blocks: f(q, k, v, score_mod=s, block_mask=b),
                ]
            )
        rows.append([name, time_text(ours), time_text(theirs), verdict(theirs / ours, FLEX_TARGET)])
    return f"## Beside compiled flex_attention\n\nfp32, batch 1, 8 heads, D{dim}, S{length}, forward. Target: {FLEX_TARGET:g}.\n\n" + table(
        ["mask and score", "tilewise", "torch flex, compiled", "ratio"], rows
    )


def decoding() -> str:
    rows = []
    for name, dtype in DTYPES.items():
        for heads, kv_heads, dim in ((32, 8, 128), (8, 8, 64)):
            q, k, v = (t.detach() for t in inputs(4096, dim, dtype, heads, 1, kv_heads))
            with torch.no_grad():
                ours, theirs = in_turn(
                    [
                        lambda q=q, k=k, v=v: tw.attention(q, k, v, enable_gqa=True, backend="cpp"),
                        lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, enable_gqa=True),
                    ]
                )
            rows.append([f"{name}, {heads} heads over {kv_heads}, D{dim}", f"{ours:.2f} ms", f"{theirs:.2f} ms", verdict(theirs / ours, DECODE_TARGET)])
    return f"## Decoding\n\n1 query, 4096 keys. Target: {DECODE_TARGET:g}.\n\n" + table(["", "tilewise", "SDPA", "ratio"], rows)


def long_window(length: int = 16384) -> str:
    q, k, v = (t.detach() for t in inputs(length, 64, torch.float32))
    mask = masks.causal & masks.sliding_window(256)
    with torch.no_grad():
        windowed, full = in_turn([lambda: tw.attention(q, k, v, mask=mask, backend="cpp"), lambda: tw.attention(q, k, v, backend="cpp")], least=3)
    return (
        f"## A window over a long sequence\n\nfp32, 8 heads, D64, S{length}, forward: causal window 256 {time_text(windowed)}, full {time_text(full)}: "
        f"{full / windowed:.1f} times as long (target {WINDOW_TARGET:g})."
    )


TIMES = """
import json, sys, time, torch, tilewise as tw
from tilewise import masks, scores
q = torch.randn(1, 2, 128, 64)
tw.attention(q, q, q, mask=masks.causal, backend="blocked")
begin = time.perf_counter()
tw.attention(q, q, q, mask=masks.causal, score=scores.softcap(20.0), backend="cpp")
print(json.dumps(time.perf_counter() - begin))
"""


def building() -> str:
    """First use in a fresh process: nothing in the store, then everything."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TILEWISE_CACHE_DIR": folder + "/store", "PYTHONPATH": os.pathsep.join(sys.path)}
        cold, *warm = [
            json.loads(subprocess.run([sys.executable, "-c", TIMES], capture_output=True, text=True, check=True, env=environment).stdout) for _ in range(4)
        ]
    return (
        f"## Building\n\nA first forward call with a mask and a score, all compiled: {cold:.2f} s (target under 3 s). In another process, from the store: "
        f"{1e3 * median(warm):.0f} ms (target under 50 ms)."
    )


def host_time() -> str:
    q, k, v = (torch.randn(1, 2, 16, 16) for _ in range(3))
    with torch.no_grad():
        ours, masked, theirs = in_turn(
            [
                lambda: [tw.attention(q, k, v, backend="cpp") for _ in range(100)],
                lambda: [tw.attention(q, k, v, mask=masks.causal, backend="cpp") for _ in range(100)],
                lambda: [scaled_dot_product_attention(q, k, v) for _ in range(100)],
            ],
            seconds=1.0,
        )
    return f"## A tiny call\n\n2 heads, 16 tokens, D16, fp32: plain {10 * ours:.0f} µs, causal {10 * masked:.0f} µs, SDPA {10 * theirs:.0f} µs a call."


def main() -> None:
    options = arguments(__doc__, ("--quick", "leave out compiled flex_attention and the long sequence"))
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    begin, before = time.perf_counter(), _busy_elsewhere()
    sections = [beside_sdpa(), short_sequences(), decoding(), host_time(), building()]
    if not options.quick:
        sections += [beside_flex(), long_window()]
    busy = (_busy_elsewhere() - before) / (time.perf_counter() - begin)
    note = f"Other processes used {busy:.2f} cores on average while this ran. Ratios above 1: tilewise is faster."
    report(__file__, options, "The C++ engine on a CPU", [note, *sections])


if __name__ == "__main__":
    main()
