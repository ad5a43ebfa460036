"""Masks of models that see: what tokens of a video see of other frames, and text of images."""

import math
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InputError
from tilewise.masks.checks import integers
from tilewise.masks.expressions import at_most
from tilewise.masks.mask import Mask
from tilewise.named import check_whole, covers, named


@named
def radial(frames: int, tokens_per_frame: int, *, decay: float = 1.0, least: int = 128, text: int = 0, device: torch.device | str | None = None) -> Mask:
    """Radial attention: a token of a video sees the tokens around its own place in every frame, half as many for every doubling of the distance in frames.

    Its own frame and the first one it sees whole. Tokens come frame after frame, then `text` tokens, which see everything and are seen by everyone.

    decay   the reach within the next frame, as a share of the tokens of a frame
    least   the reach never falls below this; where it would, every so many frames are left out instead. With 1 it is the formula of the paper, with the size
            of a tile hardly any tile is computed for a few pairs
    device  where a small table of reaches lies: made where the tokens are, it is not copied there in every call
    """
    check_whole("radial", frames=frames, tokens_per_frame=tokens_per_frame, least=least, text=text)
    if frames < 1 or tokens_per_frame < 1 or decay <= 0 or least < 1 or text < 0:
        raise InputError(
            "radial takes at least 1 frame, 1 token per frame, a decay above 0, a least reach of at least 1 and text of at least 0, "
            f"got {frames}, {tokens_per_frame}, {decay}, {least}, {text}"
        )
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"radial: device={str(device)!r}, but torch finds no GPU here; leave it out, and the mask's table is made on the CPU")
    reach = torch.tensor([tokens_per_frame, *(radial_reach(distance, tokens_per_frame * decay, least) for distance in range(1, frames))], device=device)
    video = frames * tokens_per_frame

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        apart = (q // tokens_per_frame - kv // tokens_per_frame).abs()
        seen = ((q % tokens_per_frame - kv % tokens_per_frame).abs() < reach[apart.clamp(max=frames - 1)]) | (kv < tokens_per_frame)
        return seen | (q >= video) | (kv >= video) if text else seen

    said = [f"decay {decay:g}"] if decay != 1.0 else []
    return Mask(near, "radial", frames, tokens_per_frame, *said, f"least {least}", covers=covers("radial", q=video + text, kv=video + text))


def radial_reach(distance: int, first: float, least: int) -> int:
    """How many places on either side are seen in a frame so far away, the own one included; 0 where the frame is left out."""
    reach = first / (1 << (distance.bit_length() - 1))
    if reach >= least:
        return math.floor(reach)
    return 0 if distance % math.ceil(least / reach) else least


@named
def spatial_temporal(frames: int, tokens_per_frame: int, temporal: Tensor, *, frame_reach: int = 0, token_reach: int = 0, text: int = 0) -> Mask:
    """Heads of a video model that look around, and heads that look through time (Sparse VideoGen).

    Head h sees the whole of all frames up to `frame_reach` away from its own; where `temporal[h]` is true, the places up to `token_reach` from its own in every
    frame. The tokens of a video come frame after frame, then `text` tokens, which see everything and are seen by everyone.
    """
    check_whole("spatial_temporal", frames=frames, tokens_per_frame=tokens_per_frame, frame_reach=frame_reach, token_reach=token_reach, text=text)
    if frames < 1 or tokens_per_frame < 1 or min(frame_reach, token_reach, text) < 0:
        raise InputError(
            "spatial_temporal takes at least 1 frame, 1 token per frame, and reaches and text of at least 0, "
            f"got {frames}, {tokens_per_frame}, {frame_reach}, {token_reach}, {text}"
        )
    if not isinstance(temporal, Tensor) or temporal.dtype != torch.bool or temporal.dim() != 1:
        raise InputError("spatial_temporal takes a boolean (heads,) tensor, true for the heads that look through time")
    video = frames * tokens_per_frame

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        around = at_most((q // tokens_per_frame - kv // tokens_per_frame).abs(), frame_reach)
        through = at_most((q % tokens_per_frame - kv % tokens_per_frame).abs(), token_reach)
        seen = (around & ~temporal[h]) | (through & temporal[h])
        return seen | (q >= video) | (kv >= video) if text else seen

    known = covers("spatial_temporal", h=temporal.shape[0], q=video + text, kv=video + text)
    return Mask(near, "spatial_temporal", frames, tokens_per_frame, f"{temporal.shape[0]} heads", covers=known)


@named
def cross(intervals: Tensor, tokens_per_image: int) -> Mask:
    """Text queries attend to images: image n is seen by queries from intervals[n, 0] up to before intervals[n, 1]."""
    spans = integers(intervals, 2, "cross")
    count = spans.shape[0]
    check_whole("cross", tokens_per_image=tokens_per_image)
    if spans.shape[1] != 2 or tokens_per_image < 1:
        raise InputError(f"cross takes (images, 2) intervals and at least 1 token per image, got {tuple(spans.shape)} and {tokens_per_image}")

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        image = (kv // tokens_per_image).clamp(0, count - 1)
        return (q >= spans[image, 0]) & (q < spans[image, 1])

    return Mask(visible, "cross", f"{count} images", covers=covers("cross", kv=count * tokens_per_image))
