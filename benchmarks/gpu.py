"""tilewise beside its peers on one GPU, in one run: dense and causal, the same in single precision, grouped heads, programmed masks and
scores, tiles chosen from data, decoding, keys and values in pages, memory, cold starts; its tile maps.

    python benchmarks/gpu.py [dense] [single] [grouped] [masks] [sparse] [decode] [paged] [splits] [host] [maps] [memory] [cold]
                             [--quick] [--save] [--engines gluon triton] [--no-flex] [--fa3 FOLDER] [--fa4 FOLDER]

TFLOP/s count the unmasked work only; a backward counts 2.5 times its forward. Peers take turns within a row, each time in another
order, and every figure is the median of several turns, because a card at its power limit moves by a few percent with what ran before.
"""

import argparse
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
from common import in_subprocess

import tilewise
from tilewise import masks, scores
from tilewise.core import map_cache
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.gpu.device_map import is_made_on_device
from tilewise.engines.gpu.tile_schedule import key_schedule, query_schedule
from tilewise.engines.triton import run
from tilewise.engines.triton.config import table_config

TOKENS, WIDTH = 16384, 2048  # tokens in all; heads x head dim
TURNS = 3
RESULTS = Path(__file__).parent / "results" / "gpu"  # one file for each part


class Peer:
    """A way to compute a row: forward(q, k, v) -> out. Each may bring its own layout."""

    def __init__(self, name: str, forward: Callable[..., Tensor], tokens_first: bool = False) -> None:
        self.name = name
        self.forward = forward
        self.tokens_first = tokens_first


def measure(peer: Peer, inputs: tuple[Tensor, ...], backward: bool) -> list[Callable[[], Any]]:
    """Closures to time: the forward, and the backward if asked."""
    q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_() if peer.tokens_first else t for t in inputs)
    jobs: list[Callable[[], Any]] = [lambda: _no_grad(peer.forward, q, k, v)]
    if backward:
        out = peer.forward(q, k, v)
        grad = torch.randn_like(out)
        jobs.append(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    return jobs


def _no_grad(f: Callable[..., Any], *args: Any) -> Any:
    with torch.no_grad():
        return f(*args)


def row(title: str, peers: list[Peer], inputs: tuple[Tensor, ...], flops: float, backward: bool = True, rep: int = 100) -> list[str]:
    """One line of a table: forward / backward TFLOP/s of every peer."""
    jobs, failed = {}, {}
    for peer in peers:
        try:
            jobs[peer.name] = measure(peer, inputs, backward)
            for job in jobs[peer.name]:
                job()
        except Exception as error:  # a peer that cannot run says why in its cell
            jobs.pop(peer.name, None)
            failed[peer.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    times: dict[str, list[list[float]]] = {name: [[] for _ in found] for name, found in jobs.items()}
    names = list(jobs)
    for turn in range(TURNS):
        begin = turn * len(names) // TURNS
        for name in names[begin:] + names[:begin]:  # who runs after a peer that heats the card less has an advantage: not always the same
            for k, job in enumerate(jobs[name]):
                times[name][k].append(do_bench(job, warmup=25, rep=rep, return_mode="median"))
    cells = [title]
    for peer in peers:
        if peer.name in failed:
            cells.append("-")
            print(f"  {title}: {peer.name} failed: {failed[peer.name]}", flush=True)
            continue
        medians = [statistics.median(t) for t in times[peer.name]]
        rates = [flops * weight / ms / 1e9 for ms, weight in zip(medians, (1.0, 2.5), strict=False)]
        cells.append(" / ".join(f"{r:.0f}" for r in rates))
    print("  ".join(f"{c:>14s}" if n else f"{c:34s}" for n, c in enumerate(cells)), flush=True)
    return cells


def sdpa(backend: SDPBackend, causal: bool, **options: Any) -> Callable[..., Tensor]:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **options)

    return forward


def torch_flex(mask: Any = None, score: Any = None, length: int = 0) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = create_block_mask(mask, None, None, length, length, device="cuda") if mask is not None else None
    return lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=block_mask)


def flash_names(args: argparse.Namespace) -> list[str]:
    return [name for name, folder in (("FA3", args.fa3), ("FA4", args.fa4)) if folder]


def flash_peers(args: argparse.Namespace, causal: bool, left: int = -1) -> list[Peer]:
    """FlashAttention of the generations that a folder was given for: plain, causal, or causal with `left` keys to the left."""
    load = {"FA3": lambda: flash3(args.fa3), "FA4": lambda: flash4(args.fa4)}

    def forward(name: str) -> Callable[..., Tensor]:
        function = load[name]()
        return lambda q, k, v: function(q, k, v, causal, left)

    return [Peer(name, forward(name), tokens_first=True) for name in flash_names(args)]


@lru_cache(maxsize=1)
def flash4(folder: str) -> Callable[..., Any]:
    """FlashAttention-4 in CuTe's language, from a folder of unpacked wheels; tensors are (batch, sequence, heads, dim)."""
    sys.path[:0] = [folder, *[os.path.join(folder, "nvidia_cutlass_dsl", part) for part in ("dsl_packages", "python_packages")]]
    from flash_attn.cute import flash_attn_func

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int) -> Tensor:
        found = flash_attn_func(q, k, v, causal=causal, **({"window_size": (left, 0)} if left >= 0 else {}))
        return found[0] if isinstance(found, tuple) else found  # some versions return lse too

    return forward


@lru_cache(maxsize=1)
def flash3(folder: str) -> Callable[..., Any]:
    """FlashAttention-3 as its operators, from an unpacked folder; tensors are (batch, sequence, heads, dim)."""
    import ctypes
    import glob

    for library in glob.glob(folder + "/**/libcudart.so.12", recursive=True):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(glob.glob(folder + "/**/flash_attn_3/_C.so", recursive=True)[0])

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int) -> Tensor:
            out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=causal, window_size_left=left, window_size_right=0 if left >= 0 else -1)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.options = (causal, left)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            q, k, v, out, lse = ctx.saved_tensors
            causal, left = ctx.options
            dq, dk, dv, *_ = torch.ops.flash_attn_3.bwd(
                grad, q, k, v, out, lse, is_causal=causal, window_size_left=left, window_size_right=0 if left >= 0 else -1
            )
            return dq, dk, dv, None, None

    return Function.apply


def tensors(
    batch: int, heads: int, length: int, dim: int, kv_heads: int | None = None, kv_len: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    def make(h: int, n: int) -> Tensor:
        return torch.randn(batch, h, n, dim, device="cuda", dtype=dtype, requires_grad=True)

    return make(heads, length), make(kv_heads or heads, kv_len or length), make(kv_heads or heads, kv_len or length)


def our_names(args: argparse.Namespace) -> list[str]:
    return [f"tilewise {engine}" for engine in args.engines]


def ours(args: argparse.Namespace, mask: Any, score: Any, **options: Any) -> list[Peer]:
    def forward(engine: str) -> Callable[..., Tensor]:
        return lambda q, k, v: tilewise.attention(q, k, v, mask=mask, score=score, backend=engine, **options)

    return [Peer(f"tilewise {engine}", forward(engine)) for engine in args.engines]


def dense(args: argparse.Namespace) -> list[list[str]]:
    flex = [] if args.no_flex else ["torch flex"]
    table = [["work (forward / backward TFLOP/s)", *our_names(args), "cuDNN", "FA2", *flex, *flash_names(args)]]
    for dim in args.dims:
        for length in args.lengths:
            for causal in (False, True):
                heads, batch = WIDTH // dim, max(1, TOKENS // length)
                inputs = tensors(batch, heads, length, dim)
                mask = masks.causal if causal else None
                peers = [
                    *ours(args, mask, None),
                    Peer("cuDNN", sdpa(SDPBackend.CUDNN_ATTENTION, causal)),
                    Peer("FA2", sdpa(SDPBackend.FLASH_ATTENTION, causal)),
                    *([] if args.no_flex else [Peer("flex", torch_flex(mask, None, length))]),
                    *flash_peers(args, causal),
                ]
                flops = 4 * batch * heads * length * length * dim * (0.5 if causal else 1.0)
                table.append(row(f"{'causal' if causal else 'full'} D{dim} S{length}", peers, inputs, flops, rep=args.rep))
    return table


def single(args: argparse.Namespace) -> list[list[str]]:
    """float32, which the Triton engine computes."""
    length = 4096
    flex = [] if args.no_flex else ["torch flex"]
    table = [["float32, B1 S4096 (forward / backward TFLOP/s)", "tilewise triton", "SDPA, memory-efficient", *flex]]
    for dim in args.dims:
        for causal in (False, True):
            heads, mask = WIDTH // dim, masks.causal if causal else None
            peers = [
                Peer("tilewise triton", partial(tilewise.attention, mask=mask, backend="triton")),
                Peer("SDPA, memory-efficient", sdpa(SDPBackend.EFFICIENT_ATTENTION, causal)),
                *([] if args.no_flex else [Peer("flex", torch_flex(mask, None, length))]),
            ]
            flops = 4 * heads * length * length * dim * (0.5 if causal else 1.0)
            inputs = tensors(1, heads, length, dim, dtype=torch.float32)
            table.append(row(f"{'causal' if causal else 'full'} D{dim}", peers, inputs, flops, rep=args.rep))
    return table


def grouped(args: argparse.Namespace) -> list[list[str]]:
    """Query heads that share key heads, beside as many of each: the work is the same."""
    batch, heads, length, dim = 2, 32, 8192, 128
    table = [["causal, B2 S8192 D128 (forward / backward TFLOP/s)", *our_names(args), "cuDNN", *flash_names(args)]]
    for kv_heads in (32, 8):
        peers = [*ours(args, masks.causal, None, enable_gqa=True), Peer("cuDNN", sdpa(SDPBackend.CUDNN_ATTENTION, True, enable_gqa=True))]
        peers += flash_peers(args, True)
        flops = 2 * batch * heads * length * length * dim
        table.append(row(f"{heads} heads on {kv_heads}", peers, tensors(batch, heads, length, dim, kv_heads), flops, rep=args.rep))
    return table


def programmed(args: argparse.Namespace) -> list[list[str]]:
    heads, length, dim = 16, 16384, 128
    lengths = torch.tensor([3000, 1200, 700, 4096, 2500, 388, 1500, 3000])
    ids = masks.ids_of_lengths(lengths).to("cuda")
    slopes = scores.alibi_slopes(heads).cuda()
    relative = torch.randn(heads, 2 * length - 1, device="cuda") * 0.1
    side = math.isqrt(length)
    causal: Any = lambda b, h, q, kv: q >= kv
    work = {
        "causal": (masks.causal, None),
        "causal window 1024": (lambda b, h, q, kv: (q >= kv) & (q - kv < 1024), None),
        "causal document (8)": (lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), None),
        "prefix-LM 4096": (lambda b, h, q, kv: (kv < 4096) | (q >= kv), None),
        "neighborhood 13x13": (masks.neighborhood((side, side), 13), None),
        "ALiBi + causal": (causal, lambda s, b, h, q, kv: s + slopes[h] * (kv - q)),
        "softcap 30 + causal": (causal, lambda s, b, h, q, kv: 30.0 * torch.tanh(s / 30.0)),
        "relative bias + causal": (causal, lambda s, b, h, q, kv: s + relative[h, q - kv + length - 1]),
    }
    table = [["work, B1 H16 S16384 D128 (forward / backward TFLOP/s)", *our_names(args), *([] if args.no_flex else ["torch flex"]), *flash_names(args)]]
    inputs = tensors(1, heads, length, dim)
    for name, (mask, score) in work.items():
        pairs = allowed_pairs(mask, length)
        peers = [*ours(args, mask, score), *([] if args.no_flex else [Peer("flex", torch_flex(mask, score, length))])]
        windows = {"causal": -1, "causal window 1024": 1023}
        peers += flash_peers(args, True, windows[name]) if name in windows else [Peer(flash, _unable) for flash in flash_names(args)]
        table.append(row(f"{name} ({pairs / length**2:.3f})", peers, inputs, 4 * heads * dim * pairs, rep=args.rep))
    return table


def sparse(args: argparse.Namespace) -> list[list[str]]:
    """The video of a large model, with a quarter and a tenth of its tiles chosen at random by every head, beside all of them. Lists are new in every layer and
    step: how long the GPU takes from lists to both passes' schedules, transposed ones included, and the host for a whole forward with new lists. torch flex
    gets the same lists as full blocks; its transposed lists are made by torch's operations."""
    heads, length, dim, tile = 40, 75600, 128, 128
    tiles, engine = -(-length // tile), args.engines[0]
    peers = ["forward ms", "of dense", "backward ms", "of dense", "lists: GPU ms", "host ms of a call"]
    flex = [] if args.no_flex else ["flex forward ms", "flex backward ms", "flex lists: GPU ms"]
    table = [[f"{heads} heads of {dim}, {length} tokens, tiles of {tile}, {engine}", *peers, *flex]]
    inputs = tensors(1, heads, length, dim)
    compiled = torch.compile(flex_attention, dynamic=False)
    whole: list[float] = []
    for keep in (1.0, 0.25, 0.1):
        entries = math.ceil(keep * tiles)
        indices = torch.rand(1, heads, tiles, tiles, device="cuda").topk(entries, -1).indices.int() if keep < 1 else None

        def ours(q: Tensor, k: Tensor, v: Tensor, indices: Tensor | None = indices) -> Tensor:
            chosen = None if indices is None else tilewise.TileMap.from_lists(indices, q_len=length, kv_len=length, tile=(tile, tile))
            return tilewise.attention(q, k, v, mask=chosen, backend=engine)

        times = both_passes_ms(ours, inputs)
        whole = whole or times
        shares = [f"{ms / all_tiles:.3f}" for ms, all_tiles in zip(times, whole, strict=True)]
        cells = [f"{100 * keep:.0f} %", f"{times[0]:.1f}", shares[0], f"{times[1]:.1f}", shares[1]]
        cells.append("-" if indices is None else f"{lists_ms(indices, inputs, length, tile, engine):.3f}")
        cells.append(f"{handed_over(partial(_no_grad, ours, *inputs), 3) / 1e3:.3f}")
        if flex and indices is None:
            cells += ["-"] * len(flex)
        elif flex:
            blocks = flex_blocks(indices, length, tile, tiles)
            theirs = both_passes_ms(lambda q, k, v, blocks=blocks: compiled(q, k, v, block_mask=blocks), inputs)
            cells += [f"{ms:.1f}" for ms in theirs] + [f"{gpu_ms(partial(flex_blocks, indices, length, tile, tiles)):.3f}"]
        print("  ".join(f"{c:>10s}" for c in cells), flush=True)
        table.append(cells)
    print(markdown(table))
    return table


def flex_blocks(indices: Tensor, length: int, tile: int, tiles: int) -> BlockMask:
    """As many columns whatever is kept, so that torch compiles one kernel."""
    counts = torch.full(indices.shape[:3], indices.shape[3], dtype=torch.int32, device="cuda")
    padded = functional.pad(indices, (0, tiles - indices.shape[3]))
    nothing = torch.zeros_like(counts), torch.zeros_like(padded)
    return BlockMask.from_kv_blocks(*nothing, counts, padded, BLOCK_SIZE=tile, seq_lengths=(length, length))


def lists_ms(indices: Tensor, inputs: tuple[Tensor, ...], length: int, tile: int, engine: str) -> float:
    def schedules() -> None:
        chosen = tilewise.TileMap.from_lists(indices, q_len=length, kv_len=length, tile=(tile, tile))
        SCHEDULES[engine](make_problem(*inputs, chosen, None, Options())[0])

    return gpu_ms(schedules)


def gpu_ms(call: Callable[[], Any], turns: int = 7) -> float:
    """Of a call that is handed over while the GPU is busy."""
    call()
    times = []
    for _ in range(turns):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(10_000_000)  # cycles
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def both_passes_ms(forward: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[float]:
    out = forward(*inputs)
    grad = torch.randn_like(out)
    backward = partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)
    return [gpu_ms(partial(_no_grad, forward, *inputs), 5), gpu_ms(backward, 5)]


def _unable(*_: Any) -> Tensor:
    raise NotImplementedError("cannot express it")


def allowed_pairs(mask: Any, length: int) -> int:
    """How many (q, kv) pairs a mask allows, counted in strips."""
    kv = torch.arange(length, device="cuda")
    total = 0
    call = tilewise.lang.trace_mask(mask)
    for start in range(0, length, 1024):
        q = torch.arange(start, start + 1024, device="cuda")[:, None]
        zero = torch.zeros((1, 1), dtype=torch.int64, device="cuda")
        total += int(torch.as_tensor(tilewise.lang.evaluate(call, {"b": zero, "h": zero, "q": q, "kv": kv[None, :]})).sum())
    return total


DECODED = [(heads, batch, length) for heads in (16, 32) for batch in (1, 8, 64) for length in (2048, 8192, 32768)]  # query heads on 8 key heads, D128


def decode(args: argparse.Namespace) -> list[list[str]]:
    """One token: all keys attended; an eighth of them padding, on the left; the first half of a buffer written. SDPA gets a mask tensor for the last two."""
    kinds = ["tilewise", "flash", "ratio", "cuDNN", "ratio", "tilewise, padded", "SDPA", "ratio", "tilewise, static", "SDPA", "ratio"]
    table = [["decode on 8 key heads, D128 (TB/s of keys and values attended)", *kinds]]
    for heads, batch, length in [(32, 1, 32768), (32, 16, 8192), (32, 64, 4096)] if args.quick else DECODED:
        sets, turns = _caches(heads, batch, length)
        visible = torch.ones(batch, length, dtype=torch.bool, device="cuda")
        visible[:, : length // 8] = False
        position = torch.tensor(length // 2 - 1, device="cuda")
        written = (torch.arange(length, device="cuda") <= position)[None, None, None]

        def times(forward: Callable[..., Tensor], sets: Any = sets, turns: Any = turns) -> float:
            return statistics.median(graphed(lambda: forward(*sets[next(turns) % len(sets)])) for _ in range(TURNS))

        def mine(mask: Any) -> Callable[..., Tensor]:
            return partial(tilewise.attention, mask=mask, enable_gqa=True, backend="flex")

        def torch_by(kernel: SDPBackend) -> Callable[..., Tensor]:
            def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                with sdpa_kernel(kernel):
                    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

            return forward

        def theirs(mask: Tensor) -> Callable[..., Tensor]:
            return partial(functional.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)

        bytes_read = 2 * batch * 8 * length * 128 * 2
        cells = [f"B{batch} H{heads} KV {length}"]
        for share, one, *others in (
            (1.0, mine(None), torch_by(SDPBackend.FLASH_ATTENTION), torch_by(SDPBackend.CUDNN_ATTENTION)),
            (7 / 8, mine(lambda b, h, q, kv, visible=visible: visible[b, kv]), theirs(visible[:, None, None])),
            (1 / 2, mine(lambda b, h, q, kv, position=position: q + position >= kv), theirs(written)),
        ):
            ours, *rates = [share * bytes_read / times(f) / 1e9 for f in (one, *others)]
            cells += [f"{ours:.2f}", *[cell for rate in rates for cell in (f"{rate:.2f}", f"{ours / rate:.2f}")]]
        print("  ".join(f"{c:>14s}" for c in cells), flush=True)
        table.append(cells)
    return table


def _caches(heads: int, batch: int, length: int) -> tuple[list[tuple[Tensor, ...]], Any]:
    """Queries, keys and values, several times where they would fit a cache of the GPU, and a counter."""
    count = max(1, 2**28 // (batch * 8 * length * 128 * 4))
    return [tuple(t.detach() for t in tensors(batch, heads, 1, 128, 8, length)) for _ in range(count)], iter(range(10**9))


PAGED = [(1, 131072), *[(batch, length) for batch in (1, 16, 64) for length in (4096, 8192, 32768) if batch * length <= 2**20]]


def paged(args: argparse.Namespace) -> list[list[str]]:
    """One token over all keys, which lie in pages in a random order, beside the same keys in order (tokens before heads, as pages have them) and torch's own
    paged attention, where this version has one."""
    sizes = (1, 16, 64, 256)
    columns = [f"page {size}, ratio" for size in sizes]
    table = [["decode, 32 query heads on 8, D128 (TB/s)", "in order", *columns, "float8, page 64", "of bf16, page 64", "torch, page 256"]]
    for batch, length in [(1, 32768), (1, 131072), (16, 8192), (64, 4096)] if args.quick else PAGED:
        query = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
        lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        bytes_read = 2 * batch * 8 * length * 128 * 2
        count = max(1, 2**28 // bytes_read)  # of caches, several where one would fit the GPU's cache

        def rate(calls: list[Callable[[], Any]], size: float = bytes_read) -> float:
            turns = itertools.cycle(calls)

            def one() -> None:
                next(turns)()

            return size / statistics.median(graphed(one) for _ in range(TURNS)) / 1e9

        caches = [[torch.randn(batch * length, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(count)]
        in_order = rate(
            [partial(tilewise.attention, query, *[t.view(batch, length, 8, 128).transpose(1, 2) for t in kv], enable_gqa=True, backend="flex") for kv in caches]
        )
        cells, rates = [f"B{batch} KV {length}", f"{in_order:.2f}"], {}
        for size in sizes:
            numbers = torch.randperm(batch * length // size, device="cuda").to(torch.int32).view(batch, -1)
            rates[size] = rate([partial(tilewise.paged_attention, query, *[t.view(-1, size, 8, 128) for t in kv], numbers, lengths) for kv in caches])
            cells.append(f"{rates[size] / in_order:.2f}")
        numbers = torch.randperm(batch * length // 64, device="cuda").to(torch.int32).view(batch, -1)
        narrow = [[t.view(-1, 64, 8, 128).to(torch.float8_e4m3fn) for t in kv] for kv in caches]
        half = rate([partial(tilewise.paged_attention, query, *kv, numbers, lengths, k_scale=0.5, v_scale=2.0) for kv in narrow], bytes_read / 2)
        cells += [f"{half:.2f}", f"{2 * half / rates[64]:.2f}", _torch_paged(query, caches, batch, length, rate)]
        print("  ".join(f"{c:>14s}" for c in cells), flush=True)
        table.append(cells)
    return table


def _torch_paged(query: Tensor, caches: list[list[Tensor]], batch: int, length: int, rate: Callable[..., float]) -> str:
    """torch's varlen_attn with a block table."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return "-"
    numbers = torch.randperm(batch * length // 256, device="cuda").to(torch.int32).view(batch, -1)
    offsets = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    used, tokens = torch.full((batch,), length, device="cuda", dtype=torch.int32), query.squeeze(2)
    try:
        calls = [
            partial(varlen_attn, tokens, *[t.view(-1, 256, 8, 128) for t in kv], offsets, None, 1, length, seqused_k=used, block_table=numbers) for kv in caches
        ]
        return f"{rate(calls):.2f}"
    except (TypeError, RuntimeError) as error:  # this version takes no pages
        return f"- ({type(error).__name__})"


def splits(args: argparse.Namespace) -> list[list[str]]:
    """How long decoding takes by the number of splits of the keys, beside the number that is chosen: what triton/run.best_split_count goes by."""
    from tilewise.engines.triton import run

    tried = (1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 64)
    table = [["decode on 8 key heads, D128 (us by splits)", "chosen", *map(str, tried)]]
    for _, batch, length in [d for d in DECODED if d[0] == 32]:
        sets, turns = _caches(32, batch, length)
        p = make_problem(*sets[0], None, None, Options(enable_gqa=True))[0]
        cells = [f"B{batch} KV {length}", str(run.split_count(p))]
        for count in [n for n in tried if 64 * n <= length]:
            ready = (run.DecodeWhole(p) if count == 1 else run.Decode(p, count)).bind(p)

            def call(ready: Any = ready, sets: Any = sets, turns: Any = turns) -> Any:
                return ready.run(*sets[next(turns) % len(sets)], None, None)

            cells.append(f"{1000 * statistics.median(graphed(call) for _ in range(TURNS)):.1f}")
        cells += [""] * (len(table[0]) - len(cells))
        print("  ".join(f"{c:>10s}" for c in cells), flush=True)
        table.append(cells)
    return table


def host(args: argparse.Namespace) -> list[list[str]]:
    """Host time of a tiny call: how long the host takes to hand it over, whatever the GPU does."""
    q, k, v = (t.detach() for t in tensors(1, 2, 128, 64))
    inputs = tensors(1, 2, 128, 64)
    function: Any = lambda b, h, i, j: i >= j
    theirs = functional.scaled_dot_product_attention(*inputs)
    flex = torch_flex(function, None, 128)
    work: dict[str, Callable[[], Any]] = {
        "SDPA": lambda: functional.scaled_dot_product_attention(q, k, v),
        "torch flex": lambda: flex(q, k, v),
        "SDPA, backward": lambda: torch.autograd.grad(theirs, inputs, theirs, retain_graph=True),
    }
    for engine in args.engines:
        name, call = f"tilewise {engine}", partial(tilewise.attention, q, k, v, backend=engine)
        ours = tilewise.attention(*inputs, mask=masks.causal, backend=engine)
        work[name] = call
        work[f"{name}, a mask"] = partial(call, mask=masks.causal)
        work[f"{name}, a function"] = partial(call, mask=function)
        work[f"{name}, backward"] = partial(torch.autograd.grad, ours, inputs, ours, retain_graph=True)
    table = [["host time of a tiny call", "microseconds"]]
    for name, call in work.items():
        table.append([name, f"{min(handed_over(call) for _ in range(20)):.0f}"])
        print("  ".join(table[-1]), flush=True)
    return table


def maps(args: argparse.Namespace) -> list[list[str]]:
    """Tile schedules of both passes, as an engine makes them before its kernels: of layouts that it has not seen, and of a mask of positions alone."""
    table = [["tile schedules, forward and backward", "GPU ms", "host ms", "peak MiB"]]
    count = 20
    work = {
        "causal documents (20), 16384 tokens": [problem(16384, masks.causal & masks.document(documents(16384, 20))) for _ in range(count)],
        "window 4096 and documents (20), 32768 tokens": [
            problem(32768, masks.sliding_window(4096) & masks.document(documents(32768, 20))) for _ in range(count)
        ],
        "padding, 4 x 4096 tokens": [problem(4096, masks.padding(torch.randint(1, 4097, (4,)).cuda()), batch=4) for _ in range(count)],
        "causal, 131072 tokens, made once": [problem(131072, masks.causal)] * count,
        "radial of 21 frames, 75600 tokens, made once": [problem(75600, masks.radial(21, 3600))] * count,
    }
    for name, problems in work.items():
        for engine in args.engines:
            if engine not in SCHEDULES:
                continue
            scheduled(problems[0], engine)  # compiles
            gpu, host, peaks = zip(*(scheduled(p, engine) for p in problems), strict=True)
            table.append([f"{name}, {engine}", f"{statistics.median(gpu):.3f}", f"{statistics.median(host):.3f}", f"{max(peaks) / 2**20:.1f}"])
            print("  ".join(table[-1]), flush=True)
    return table


def triton_schedules(p: Problem) -> None:
    key, query = (table_config(role, p) for role in ("dkdv_atomic_dq", run.fwd_role(p)))
    query_schedule(p, (query.m, query.n))
    key_schedule(p, (key.m, key.n))
    query_schedule(p, (key.m, key.n))


def hopper_schedules(p: Problem) -> None:
    from tilewise.engines.gluon.config import backward_config, forward_config
    from tilewise.engines.gluon.tile_schedule import hopper_schedule, key_axis, query_axis

    hopper_schedule(p, query_axis(forward_config(p)))
    hopper_schedule(p, key_axis(backward_config(p)))


SCHEDULES = {"triton": triton_schedules, "gluon": hopper_schedules, "cuda": hopper_schedules}


def scheduled(p: Problem, engine: str) -> tuple[float, float, int]:
    """GPU ms, host ms and bytes that schedules take which are not there yet. The GPU is kept busy until all of it is handed over, unless the host has to wait
    for results: then both are the time until everything is there."""
    map_cache.maps.clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if is_made_on_device(p):
        torch.cuda._sleep(10_000_000)  # cycles
    begin.record()
    started = time.perf_counter()
    SCHEDULES[engine](p)
    host = (time.perf_counter() - started) * 1e3
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), host, torch.cuda.max_memory_allocated() - before


def problem(length: int, mask: Any, batch: int = 1) -> Problem:
    query = torch.empty(batch, 1, length, 64, device="cuda", dtype=torch.bfloat16)
    return make_problem(query, query, query, mask, None, Options())[0]


def documents(length: int, count: int) -> Tensor:
    """Ids of documents of random lengths."""
    cuts = torch.randperm(length - 1)[: count - 1] + 1
    return torch.searchsorted(cuts.sort().values, torch.arange(length), right=True).cuda()


def handed_over(call: Callable[[], Any], count: int = 100) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count * 1e6


def graphed(f: Callable[[], Any]) -> float:
    """ms of one call, replayed from a CUDA graph so that the host does not count."""
    for _ in range(3):
        f()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            f()
    return do_bench(graph.replay, warmup=10, rep=60, return_mode="median") / 10


def memory(args: argparse.Namespace) -> list[list[str]]:
    """The peak of a causal forward and backward, masks and maps included, beyond the tensors that any of them needs."""
    heads, length, dim = 16, 32768 if args.quick else 131072, 128
    inputs = tensors(1, heads, length, dim)
    results = 5 * inputs[0].nbytes  # out, its gradient, and those of q, k and v

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch_flex(masks.causal, None, length)(q, k, v)  # its block mask counts, as our map does

    peers: dict[str, Callable[..., Tensor]] = {
        **{peer.name: peer.forward for peer in ours(args, masks.causal, None)},
        "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, True),
        "FA2": sdpa(SDPBackend.FLASH_ATTENTION, True),
        "torch flex": flex,
    }
    table = [[f"causal forward + backward, B1 H{heads} S{length} D{dim} bf16", "beyond the tensors (MiB)", "share of the tensors"]]
    for name, forward in peers.items():
        try:
            extra = peak_growth(forward, inputs) - results
            cells = [name, f"{extra / 2**20:.0f}", f"{extra / (results + 3 * inputs[0].nbytes):.3f}"]
        except Exception as error:  # out of memory, most likely; the cell says so
            cells = [name, f"{type(error).__name__}", "-"]
        print("  ".join(f"{c:>14s}" for c in cells), flush=True)
        table.append(cells)
    return table


def peak_growth(forward: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> int:
    """Bytes by which torch's allocations, at their largest during both passes, exceed those before."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = forward(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def cold(args: argparse.Namespace) -> list[list[str]]:
    """How long a mask and score that nobody has seen take to the end of their first backward; then again from what was stored."""
    table = [["first forward + backward of a new (mask, score) in a fresh process, B1 H16 S4096 D128", "nothing stored (s)", "stored (s)"]]
    for name in (*args.engines, "torch flex"):
        with tempfile.TemporaryDirectory() as folder:
            seconds = [in_subprocess(Path(__file__), "cold_seconds", name, folder) for _ in range(2)]
        table.append([name, *[f"{s:.1f}" for s in seconds]])
        print("  ".join(table[-1]), flush=True)
    return table


def cold_seconds(name: str, folder: str) -> float:
    """In a process of its own: seconds of the first call, from what is stored in a folder. Imports and the GPU's own start do not count."""
    for variable in ("TILEWISE_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        os.environ[variable] = str(Path(folder) / variable.lower())
    inputs = tensors(1, 16, 4096, 128)
    torch.autograd.grad(inputs[0].sum(), inputs[0], torch.ones((), device="cuda", dtype=torch.bfloat16))  # torch's own imports for gradients
    mask: Any = lambda b, h, q, kv: (q >= kv) & ((q - kv < 700) | (kv % 64 < 3))
    score: Any = lambda s, b, h, q, kv: 20.0 * torch.tanh(s / 20.0) - 0.01 * (q - kv)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    if name == "torch flex":
        out = torch_flex(mask, score, 4096)(*inputs)
    else:
        out = tilewise.attention(*inputs, mask=mask, score=score, backend=name)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def markdown(table: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["dense", "single", "grouped", "masks", "sparse", "decode", "paged", "splits", "host", "maps", "memory", "cold"]
    parser.add_argument("parts", nargs="*", choices=[*names, []], help="what to measure; everything unless given")
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    own = ["gluon", "triton"] if hopper else ["triton"]
    parser.add_argument("--engines", nargs="+", default=own, help="the tilewise engines to measure; the first where one will do")
    parser.add_argument("--no-flex", action="store_true", help="leave out torch flex, which compiles for ten seconds a row")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", help="2048 8192 16384 unless given; 8192 if quick")
    parser.add_argument("--quick", action="store_true", help="one length, shorter measurements")
    parser.add_argument("--fa3", help="folder with FlashAttention-3's library, to measure it too")
    parser.add_argument("--fa4", help="folder with FlashAttention-4's wheels, unpacked, to measure it too")
    parser.add_argument("--save", action="store_true", help="write each part to benchmarks/results/gpu")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU here, or a torch without CUDA; benchmarks/cpu.py and benchmarks/anywhere.py need none")
    args.rep = 40 if args.quick else 100
    args.lengths = args.lengths or ([8192] if args.quick else [2048, 8192, 16384])
    parts = {
        "dense": dense,
        "single": single,
        "grouped": grouped,
        "masks": programmed,
        "sparse": sparse,
        "decode": decode,
        "paged": paged,
        "splits": splits,
        "host": host,
        "maps": maps,
        "memory": memory,
        "cold": cold,
    }
    versions = f"torch {torch.__version__}, Triton {__import__('triton').__version__}, tilewise {tilewise.__version__}"
    header = f"{torch.cuda.get_device_name()}, {versions}, bf16 unless said otherwise"
    print(header)
    command = "python " + " ".join("FOLDER" if word in (args.fa3, args.fa4) else word for word in sys.argv)
    for name in args.parts or parts:
        table = markdown(parts[name](args))
        if args.save:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{name}.md").write_text(f"# tilewise and its peers on a GPU: {name}\n\n{header}\n\n`{command}`\n\n{table}\n")


if __name__ == "__main__":
    main()
