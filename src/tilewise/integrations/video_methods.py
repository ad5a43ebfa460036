"""Sparse attention of a video model's tokens, method by method: what a share to keep means for each, and the attention itself.

Tokens come frame after frame, then text. Text sees everything and is seen by everyone, as far as it is no padding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilewise import masks, sparse
from tilewise.attention import attention
from tilewise.cubes import cubes_for
from tilewise.frontend import mask_tensors
from tilewise.masks import Mask
from tilewise.masks.expressions import broadcast_load
from tilewise.masks.vision import radial_reach

TILE = 64  # tokens that a cube has at least, where the video has them

LEAST_REACH = 128  # radial's: with the size of a tile, hardly any tile is computed for a few pairs
SAMPLED = 32  # queries that say whether a head looks around or through time

Grid = tuple[int, int, int]
"""Frames, height and width in tokens."""


@dataclass
class Run:
    """One denoising run: what is chosen once for all its steps."""

    temporal: dict[int, Tensor] = field(default_factory=dict)  # by layer: the heads that look through time


@dataclass
class Call:
    """One call of a model: the tokens of its video, and what its layers share."""

    grid: Grid
    run: Run
    is_dense: bool
    _kept: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Those of the video."""
        return math.prod(self.grid)

    def once(self, what: Any, of: Any, make: Callable[[], Any]) -> Any:
        """What is made of an object that all layers are passed, such as a mask; made again if it is another."""
        found = self._kept.get(what)
        if found is None or found[0] is not of:
            found = self._kept[what] = of, make()
        return found[1]


@dataclass(frozen=True)
class Video:
    """The attention of one layer: (batch, heads, tokens, head dim) tensors, a mask of (batch or 1, 1, 1, tokens) booleans, and where it happens."""

    query: Tensor
    key: Tensor
    value: Tensor
    padding: Tensor | None
    scale: float | None
    call: Call
    layer: int

    @property
    def text(self) -> int:
        return self.query.shape[2] - self.call.tokens


@dataclass(frozen=True)
class Method:
    """A method with its numbers."""

    name: str
    keep: float
    cube: tuple[int, ...]

    def attend(self, video: Video) -> Tensor:
        """(batch, heads, tokens, head dim)"""
        return METHODS[self.name](self, video)


# -- cubes chosen from the data ----------------------------------------------------------------------------------------


def _top_k(method: Method, video: Video) -> Tensor:
    return _by_cubes(method, video, lambda scores: sparse.top_k(scores, math.ceil(method.keep * scores.shape[-1])))


def _top_p(method: Method, video: Video) -> Tensor:
    return _by_cubes(method, video, lambda scores: sparse.top_p(scores, method.keep))


def fitted(cube: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
    """A cube whose edges are no longer than the video, rounded up to a power of two: the rest would be empty. Where that leaves few tokens, as in a video of
    one frame, the others grow, because kernels want tiles of some size."""
    most = [1 << (n - 1).bit_length() for n in grid]
    edges = [min(edge, longest) for edge, longest in zip(cube, most, strict=True)]
    wanted = min(math.prod(cube), TILE)
    while math.prod(edges) < wanted and edges != most:
        grows = min([axis for axis in range(3) if edges[axis] < most[axis]], key=lambda axis: edges[axis])
        edges[grows] = min(2 * edges[grows], most[grows])
    return tuple(edges)


def _by_cubes(method: Method, video: Video, choose: Callable[[Tensor], Any]) -> Tensor:
    q, k, v, padding = video.query, video.key, video.value, video.padding
    order = cubes_for(q, video.call.grid, fitted(method.cube, video.call.grid), video.text)
    visible = None if padding is None else video.call.once("visible", padding, lambda: padding.flatten(1))
    return sparse.cube_attention(q, k, v, order, choose, visible=visible, scale=video.scale)


# -- rules -------------------------------------------------------------------------------------------------------------


def _radial(method: Method, video: Video) -> Tensor:
    frames, height, width = video.call.grid
    made = _radial_mask.__wrapped__ if torch.compiler.is_compiling() else _radial_mask
    return _by_rule(made(method.keep, frames, height * width, video.text, video.query.device), "radial", video)


def _spatial_temporal(method: Method, video: Video) -> Tensor:
    frames, height, width = video.call.grid
    reaches = reach_keeping(method.keep, frames), reach_keeping(method.keep, height * width)
    temporal = video.call.run.temporal.get(video.layer)
    if temporal is None or temporal.device != video.query.device:
        temporal = video.call.run.temporal[video.layer] = _looks_through_time(video, *reaches)
    mask = masks.spatial_temporal(frames, height * width, temporal, frame_reach=reaches[0], token_reach=reaches[1], text=video.text)
    return _by_rule(mask, video.layer, video)


def _by_rule(mask: Mask, name: Any, video: Video) -> Tensor:
    """`name` is what layers with the same mask have in common."""
    q, k, v, padding = video.query, video.key, video.value, video.padding
    if padding is not None:
        mask = video.call.once(name, padding, lambda: _with_padding(mask, padding, (q.shape[0], q.shape[1], q.shape[2], k.shape[2])))
    return attention(q, k, v, mask=mask, scale=video.scale)


def _with_padding(mask: Mask, padding: Tensor, sizes: tuple[int, int, int, int]) -> Mask:
    reading = mask_tensors.read(padding, sizes)
    hidden = broadcast_load(padding) if reading is None else reading.mask  # unread in compiled code
    return mask if hidden is None else mask & hidden


@lru_cache(maxsize=64)
def _radial_mask(keep: float, frames: int, tokens_per_frame: int, text: int, device: torch.device) -> Mask:
    decay = radial_decay(keep, frames, tokens_per_frame)
    with torch.inference_mode(False):
        return masks.radial(frames, tokens_per_frame, decay=decay, least=LEAST_REACH, text=text, device=device)


def radial_decay(keep: float, frames: int, tokens_per_frame: int) -> float:
    """The smallest decay, in steps of a twelfth of an octave, with which the radial mask allows at least this share of a video's pairs."""
    enough = keep * (frames * tokens_per_frame) ** 2
    decay, step = float(1 << frames.bit_length()), 2 ** (-1 / 12)  # from where everything is seen
    while decay * tokens_per_frame * frames > LEAST_REACH and radial_pairs(frames, tokens_per_frame, decay * step) >= enough:
        decay *= step
    return decay


def radial_pairs(frames: int, tokens_per_frame: int, decay: float) -> int:
    """How many pairs of a video's tokens the radial mask allows."""
    n = tokens_per_frame
    pairs = frames * n * n
    for distance in range(1, frames):
        reach = min(radial_reach(distance, n * decay, LEAST_REACH), n)
        around = n + (reach - 1) * (2 * n - reach) if reach else 0
        pairs += n * n + (2 * (frames - distance) - 1) * around  # of the pairs of frames, one is with the first, which is seen whole
    return pairs


def reach_keeping(keep: float, count: int) -> int:
    """The smallest reach to either side within which at least this share of the pairs of `count` places in a row are."""
    return next(reach for reach in range(count) if count + reach * (2 * count - reach - 1) >= keep * count * count)


@torch.inference_mode(False)  # the map of a mask that loads from an inference tensor is not kept
@torch.no_grad()
def _looks_through_time(video: Video, frame_reach: int, token_reach: int) -> Tensor:
    """(heads,): whether the places around its own in all frames have more of a head's attention than the frames around its own, by a sample of queries."""
    _, height, width = video.call.grid
    tokens = torch.arange(video.call.tokens, device=video.query.device)
    rows = tokens[:: max(1, len(tokens) // SAMPLED)]
    scale = video.query.shape[-1] ** -0.5 if video.scale is None else video.scale
    scores = scale * video.query[:, :, rows] @ video.key[:, :, : len(tokens)].transpose(-1, -2)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).mean(0)  # (heads, rows, tokens)
    frame, place = tokens // (height * width), tokens % (height * width)
    around = (frame[rows, None] - frame).abs() <= frame_reach
    through = (place[rows, None] - place).abs() <= token_reach
    return torch.where(through, weights, 0).sum((1, 2)) > torch.where(around, weights, 0).sum((1, 2))


METHODS: dict[str, Callable[[Method, Video], Tensor]] = {"top_k": _top_k, "top_p": _top_p, "radial": _radial, "spatial_temporal": _spatial_temporal}
