"""Masks and scores as users of torch's FlexAttention write them: those of its own test suite and of attention-gym.

Tensors that they capture lie on the device that is torch's default while this file is executed.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from tests.support.approximate_tanh import TanhApprox

B, H, S = 2, 4, 64
RANDOM = torch.Generator().manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RANDOM, device="cpu").to(torch.get_default_device())


def randint(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=RANDOM, device="cpu").to(torch.get_default_device())


# -- masks -----------------------------------------------------------------------------------------------------------

DOCUMENTS = torch.cat([torch.full((n,), k) for k, n in enumerate((10, 23, 1, 30))])
STARTS = torch.tensor([0, 10, 33, 34])
OFFSETS = torch.tensor([3, -5])
OFFSET = torch.tensor(7)
LENGTHS = torch.tensor([40, 64])
GLOBAL = torch.arange(S) % 17 == 0
PREFIX_OF = torch.tensor([0, 0, 0, 0])
SPANS = torch.tensor([[0, 20], [20, 50], [10, 64], [63, 64]])
PARENTS = [-1, 0, 0, 1, 1, 2, 5, 5, 3]
ENTER, LEAVE = torch.zeros(S, dtype=torch.long), torch.zeros(S, dtype=torch.long)


def number_the_tree() -> None:
    """Enter and leave times of a depth-first walk: an ancestor's interval holds its descendants'."""
    clock = 0

    def visit(node: int) -> None:
        nonlocal clock
        ENTER[node], clock = clock, clock + 1
        for child, parent in enumerate(PARENTS):
            if parent == node:
                visit(child)
        LEAVE[node], clock = clock, clock + 1

    visit(0)
    for rest in range(len(PARENTS), S):
        ENTER[rest], LEAVE[rest], clock = clock, clock + 1, clock + 2


number_the_tree()


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() <= 9


def dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    distance = torch.abs(q_idx - kv_idx)
    return (distance <= 20) & (torch.remainder(distance, 4) == 0)


def prefix_lm(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.logical_or(kv_idx < LENGTHS[b] // 4, q_idx >= kv_idx)


def packed(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Documents one after another; within each, positions start at 0."""

    def packed_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_logical = q_idx - STARTS[DOCUMENTS[q_idx]]
        kv_logical = kv_idx - STARTS[DOCUMENTS[kv_idx]]
        return (DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]) & inner(b, h, q_logical, kv_logical)

    return packed_mask


def shared_prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    of_prefix = DOCUMENTS[kv_idx] == PREFIX_OF[DOCUMENTS[q_idx]]
    return ((DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]) | of_prefix) & (q_idx >= kv_idx)


def block_diffusion(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    half, block = S // 2, 8
    q_clean, kv_clean = q_idx >= half, kv_idx >= half
    q_block = torch.where(q_clean, (q_idx - half) // block, q_idx // block)
    kv_block = torch.where(kv_clean, (kv_idx - half) // block, kv_idx // block)
    diagonal = (q_block == kv_block) & (q_clean == kv_clean)
    offset = (q_block > kv_block) & kv_clean & ~q_clean
    clean = (q_block >= kv_block) & kv_clean & q_clean
    return diagonal | offset | clean


def tree(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (ENTER[kv_idx] <= ENTER[q_idx]) & (LEAVE[q_idx] <= LEAVE[kv_idx])


def natten(place: Callable[[Any], tuple[Any, Any]], width: int = 8, kernel: int = 3) -> Callable[..., Any]:
    def natten_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        (q_x, q_y), (kv_x, kv_y) = place(q_idx), place(kv_idx)
        center_x = q_x.clamp(kernel // 2, width - 1 - kernel // 2)
        center_y = q_y.clamp(kernel // 2, width - 1 - kernel // 2)
        return ((center_x - kv_x).abs() <= kernel // 2) & ((center_y - kv_y).abs() <= kernel // 2)

    return natten_mask


def by_row(index: Any) -> tuple[Any, Any]:
    return index // 8, index % 8


def by_tile(index: Any) -> tuple[Any, Any]:
    tile, inside = index // 16, index % 16
    return tile // 2 * 4 + inside // 4, tile % 2 * 4 + inside % 4


def by_morton(index: Any) -> tuple[Any, Any]:
    x, y = 0, 0
    for bit in range(3):
        x = x | ((index >> (2 * bit + 1)) & 1) << bit
        y = y | ((index >> (2 * bit)) & 1) << bit
    return x, y


def sliding_tiles(counts: tuple[int, ...], reach: int, per_tile: int, text: int = 0) -> Callable[..., Any]:
    def tiles_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_tile, kv_tile = q_idx // per_tile, kv_idx // per_tile
        near = q_tile.new_ones((), dtype=torch.bool)
        for count in reversed(counts):
            center = (q_tile % count).clamp(reach, count - 1 - reach)
            near = near & ((center - kv_tile % count).abs() <= reach)
            q_tile, kv_tile = q_tile // count, kv_tile // count
        image = S - text
        return (near & (q_idx < image) & (kv_idx < image)) | (q_idx >= image) | (kv_idx >= image)

    return tiles_mask


def vision_cross(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    span = SPANS[kv_idx // 16]
    return (q_idx >= span[0]) & (q_idx < span[1])


def batchified(*choices: Callable[..., Any]) -> Callable[..., Any]:
    def batched_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        allowed = b.new_zeros((), dtype=torch.bool)
        for k, mask in enumerate(choices):
            allowed = allowed | ((b == k) & mask(b, h, q_idx, kv_idx))
        return allowed

    return batched_mask


MASKS: dict[str, Callable[..., Any]] = {
    # torch's own test suite
    "noop": noop_mask,
    "causal": causal,
    "inverse causal": lambda b, h, q, kv: q <= kv,
    "sliding window": lambda b, h, q, kv: (q >= kv) & (q - kv <= 13),
    "global and causal": lambda b, h, q, kv: (kv < 3) | (q >= kv),
    "causal with an offset": lambda b, h, q, kv: q + OFFSET >= kv,
    "causal with an offset by batch": lambda b, h, q, kv: q + OFFSETS[b] >= kv,
    "document": lambda b, h, q, kv: DOCUMENTS[q] == DOCUMENTS[kv],
    "document causal": lambda b, h, q, kv: (DOCUMENTS[q] == DOCUMENTS[kv]) & causal(b, h, q, kv),
    "padded causal": lambda b, h, q, kv: (kv < LENGTHS[b]) & (q < LENGTHS[b]) & (q >= kv),
    "batch flip": lambda b, h, q, kv: torch.where(b % 2 == 0, q >= kv, q <= kv),
    "tail only": lambda b, h, q, kv: kv >= S - 5,
    "and_masks": and_masks(causal, noop_mask, window),
    "or_masks": or_masks(and_masks(causal, window), lambda b, h, q, kv: kv < 4),
    # attention-gym
    "dilated window": dilated,
    "global tokens and window": or_masks(window, lambda b, h, q, kv: GLOBAL[q] | GLOBAL[kv]),
    "prefix-LM": prefix_lm,
    "packed causal": packed(causal),
    "packed prefix": packed(lambda b, h, q, kv: (kv < 5) | (q >= kv)),
    "shared prefix": shared_prefix,
    "block diffusion": block_diffusion,
    "tree": tree,
    "natten": natten(by_row),
    "natten of tiles": natten(by_tile, kernel=5),
    "natten in Morton order": natten(by_morton),
    "sliding tiles 2-D": sliding_tiles((4, 4), 1, 4),
    "sliding tiles 3-D with text": sliding_tiles((2, 3, 2), 0, 4, text=16),
    "vision cross": vision_cross,
    "batchify": batchified(causal, and_masks(window, noop_mask)),
    "spatial video": lambda b, h, q, kv: q // 16 == kv // 16,
    "temporal video": lambda b, h, q, kv: (q % 16 == kv % 16) & (q >= kv),
}

# -- scores ----------------------------------------------------------------------------------------------------------

SLOPES = torch.exp2(-torch.arange(1, H + 1) * 8.0 / H)
HEAD_BIAS, ALL_BIAS, BATCH_BIAS = randn(H), randn(B, H, S, S), randn(B)
ROW_BIAS, RELATIVE, TABLE = randn(B, S), randn(2 * S), randn(H, 2 * S)
STACKED, BUFFERS = randn(3, B, H, S), [randn(H) for _ in range(18)]
ROWS, COLUMNS, DEPTHS = randn(15), randn(15), randn(7)
POINTS = randn(S, 2)
PATHS, PATH_BIAS, EDGE = randint(6, S, S), randn(H, 6), randn(S, S)
T5_TABLE = randn(32, H)
Q_ROPE, K_ROPE = randn(B, H, S, 8), randn(B, H // 2, S, 8)


def softcap_approx(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 20 * TanhApprox.apply(score / 20)


def positions_3d(index: Any) -> tuple[Any, Any, Any]:
    return index // 16, index // 4 % 4, index % 4


def relative_3d(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    (q_z, q_y, q_x), (k_z, k_y, k_x) = positions_3d(q_idx), positions_3d(kv_idx)
    return score + DEPTHS[q_z - k_z + 3] + DEPTHS[q_y - k_y + 3] * DEPTHS[q_x - k_x + 3]


def euclidean(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    x, y = POINTS[q_idx, 0] - POINTS[kv_idx, 0], POINTS[q_idx][1] - POINTS[kv_idx][1]
    return score - torch.sqrt(x**2 + y**2 + 1e-6) * 0.5


def sandwich(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    total = torch.zeros_like(score)
    for k in range(6):
        total = total + torch.cos((q_idx - kv_idx) / 10000 ** (k / 6))
    return score + total * 8 / H * (h + 1)


def t5_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    buckets, farthest = 16, 128
    relative = kv_idx - q_idx
    side = (relative > 0).to(torch.long) * buckets
    distance = torch.abs(relative)
    exact = buckets // 2
    far = exact + (torch.log(torch.max(distance, torch.ones_like(distance)).float() / exact) / math.log(farthest / exact) * (buckets - exact)).to(torch.long)
    far = torch.min(far, torch.full_like(far, buckets - 1))
    return score + T5_TABLE[side + torch.where(distance < exact, distance, far), h]


def many_buffers(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    for buffer in BUFFERS:
        score = score + buffer[h]
    return score


def composed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    capped = 30 * torch.tanh(score / 30)
    return torch.where(q_idx >= kv_idx, capped + SLOPES[h] * (kv_idx - q_idx), -float("inf"))


SCORES: dict[str, Callable[..., Any]] = {
    # torch's own test suite
    "identity": lambda s, b, h, q, kv: s,
    "times two": lambda s, b, h, q, kv: s * 2,
    "squared": lambda s, b, h, q, kv: s * s,
    "causal": lambda s, b, h, q, kv: torch.where(q >= kv, s, float("-inf")),
    "inverse causal": lambda s, b, h, q, kv: torch.where(q <= kv, s, float("-inf")),
    "relative bias": lambda s, b, h, q, kv: s + (q - kv),
    "relative causal": lambda s, b, h, q, kv: torch.where(q <= kv, s + (q - kv), float("-inf")),
    "alibi": lambda s, b, h, q, kv: s + (kv - q) * torch.exp2(-((h + 1) * 8.0 / H)),
    "windowed": lambda s, b, h, q, kv: torch.where((q >= kv) & (q - kv <= 8), s, -torch.inf),
    "trigonometric": lambda s, b, h, q, kv: torch.sin(s) + torch.cos(s) * torch.sin(q * 0.1),
    "head offset": lambda s, b, h, q, kv: s * HEAD_BIAS[h],
    "silu": lambda s, b, h, q, kv: torch.nn.functional.silu(s),
    "natten": lambda s, b, h, q, kv: torch.where(natten(by_row)(b, h, q, kv), s, float("-inf")),
    "bias of all": lambda s, b, h, q, kv: s + ALL_BIAS[b, h, q, kv],
    "bias by head": lambda s, b, h, q, kv: s + HEAD_BIAS[h],
    "relative position 1-D": lambda s, b, h, q, kv: s + RELATIVE[q - kv + S],
    "relative position 2-D": lambda s, b, h, q, kv: s + ROWS[q // 8 - kv // 8 + 7] + COLUMNS[q % 8 - kv % 8 + 7],
    "relative position 3-D": relative_3d,
    "euclidean distance": euclidean,
    "sequence mask": lambda s, b, h, q, kv: torch.where(DOCUMENTS[q] == DOCUMENTS[kv], s, float("-inf")),
    "index by several": lambda s, b, h, q, kv: s + ROW_BIAS[b][q],
    "index in odd ways": lambda s, b, h, q, kv: s + STACKED[2][b, h][q] + STACKED[b][b][h, kv],
    "document causal": lambda s, b, h, q, kv: torch.where((DOCUMENTS[q] == DOCUMENTS[kv]) & (q >= kv), s, float("-inf")),
    "composed": composed,
    "soft cap": lambda s, b, h, q, kv: 20.0 * torch.tanh(s / 20.0),
    "distance decay": lambda s, b, h, q, kv: s * torch.exp(-0.1 * (q - kv).abs().float()),
    "head scale": lambda s, b, h, q, kv: s * SLOPES[h],
    "bias by batch": lambda s, b, h, q, kv: s + BATCH_BIAS[b],
    "two buffers": lambda s, b, h, q, kv: s + BATCH_BIAS[b] * HEAD_BIAS[h],
    "many buffers": many_buffers,
    # attention-gym
    "soft cap, approximate": softcap_approx,
    "sandwich": sandwich,
    "graph": lambda s, b, h, q, kv: s + PATH_BIAS[h, PATHS[q, kv]] + EDGE[q, kv],
    "T5": t5_bias,
    "MLA rope": lambda s, b, h, q, kv: s + torch.dot(Q_ROPE[b, h, q], K_ROPE[b, h // 2, kv]),
}

# -- learned scores --------------------------------------------------------------------------------------------------


def learned(*shape: int) -> Tensor:
    return randn(*shape).double().requires_grad_()


L_HEAD, L_BATCH_HEAD, L_RELATIVE, L_TABLE, L_SQUARE = learned(H), learned(B, H), learned(2 * S), learned(H, 2 * S), learned(S, S)
L_ROWS, L_COLUMNS, L_WINDOW, L_GLOBAL = learned(S), learned(S), learned(2 * 4 + 1), learned(S)
PERMUTED = torch.randperm(S, generator=RANDOM, device="cpu").to(torch.get_default_device())

LEARNED: dict[str, Callable[..., Any]] = {
    "alibi": lambda s, b, h, q, kv: s + torch.exp(L_HEAD[h]) * (kv - q),
    "position table": lambda s, b, h, q, kv: s + L_TABLE[h, q - kv + S],
    "relative 1-D": lambda s, b, h, q, kv: s + L_RELATIVE[torch.abs(q - kv)],
    "absolute 2-D": lambda s, b, h, q, kv: s + L_SQUARE[q, kv],
    "by head": lambda s, b, h, q, kv: s + L_HEAD[h],
    "by batch and head": lambda s, b, h, q, kv: s + L_BATCH_HEAD[b, h],
    "multiplicative": lambda s, b, h, q, kv: s * L_ROWS[q] * L_COLUMNS[kv],
    "local window": lambda s, b, h, q, kv: torch.where((q - kv).abs() <= 4, s + L_WINDOW[torch.clamp(q - kv + 4, 0, 8)], float("-inf")),
    "global tokens": lambda s, b, h, q, kv: torch.where(GLOBAL[kv], s + L_GLOBAL[kv], s),
    "indirect index": lambda s, b, h, q, kv: s + L_ROWS[PERMUTED[q]],
    "symmetric": lambda s, b, h, q, kv: s + L_SQUARE[q, kv] + L_SQUARE[kv, q],
    "flipped index": lambda s, b, h, q, kv: s + L_SQUARE[kv, S - 1 - q],
    "head gate": lambda s, b, h, q, kv: s * torch.sigmoid(L_HEAD[h]),
    "two reads of one tensor": lambda s, b, h, q, kv: s + L_ROWS[q] * L_ROWS[kv],
    "ignores the score": lambda s, b, h, q, kv: L_ROWS[q] - L_COLUMNS[kv],
}
