"""Dense and causal attention, single precision, grouped heads, programmed masks and scores."""

import argparse
import math
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

import tilewise
from gpu_rows.peers import Peer, flash_names, flash_peers, our_names, ours, row, sdpa, tensors, torch_flex, unable
from tilewise import masks, scores

TOKENS, WIDTH = 16384, 2048  # tokens in all; heads x head dim


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
    length = 16384
    heads, dim = PROGRAMMED
    table = [["work, B1 H16 S16384 D128 (forward / backward TFLOP/s)", *our_names(args), *([] if args.no_flex else ["torch flex"]), *flash_names(args)]]
    inputs = tensors(1, heads, length, dim)
    for name, (mask, score) in programs(length).items():
        pairs = allowed_pairs(mask, length)
        peers = [*ours(args, mask, score), *([] if args.no_flex else [Peer("flex", torch_flex(mask, score, length))])]
        peers += flash_peers(args, True, WINDOWS[name]) if name in WINDOWS else [Peer(flash, unable) for flash in flash_names(args)]
        table.append(row(f"{name} ({pairs / length**2:.3f})", peers, inputs, 4 * heads * dim * pairs, rep=args.rep))
    return table


PROGRAMMED = (16, 128)  # heads and head dim
WINDOWS = {"causal": -1, "causal window 1024": 1023}  # what FlashAttention can express: keys to the left


def programs(length: int) -> dict[str, tuple[Any, Any]]:
    """Masks and scores, as a user writes them, by name."""
    heads = PROGRAMMED[0]
    lengths = torch.tensor([3000, 1200, 700, 4096, 2500, 388, 1500, 3000])
    ids = masks.ids_of_lengths(lengths).to("cuda")
    slopes = scores.alibi_slopes(heads).cuda()
    relative = torch.randn(heads, 2 * length - 1, device="cuda") * 0.1
    side = math.isqrt(length)
    causal: Any = lambda b, h, q, kv: q >= kv
    return {
        "causal": (masks.causal, None),
        "causal window 1024": (lambda b, h, q, kv: (q >= kv) & (q - kv < 1024), None),
        "causal document (8)": (lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), None),
        "prefix-LM 4096": (lambda b, h, q, kv: (kv < 4096) | (q >= kv), None),
        "neighborhood 13x13": (masks.neighborhood((side, side), 13), None),
        "ALiBi + causal": (causal, lambda s, b, h, q, kv: s + slopes[h] * (kv - q)),
        "softcap 30 + causal": (causal, lambda s, b, h, q, kv: 30.0 * torch.tanh(s / 30.0)),
        "relative bias + causal": (causal, lambda s, b, h, q, kv: s + relative[h, q - kv + length - 1]),
    }


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
