"""Reads whatever a user may pass as a mask into one form."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InputError, TraceError
from tilewise.lang import BoundProgram, name_of, trace_mask
from tilewise.masks import Grid, Mask
from tilewise.masks.expressions import broadcast_load
from tilewise.masks.mask import is_causal_bias
from tilewise.masks.sequence import of_causal_bias
from tilewise.memory import can_be_looked_at, check_dense
from tilewise.sizes import broadcasts
from tilewise.tiles.chosen import MOST_TILES, ChosenTiles, mark, nothing_chosen, tiles_of
from tilewise.tiles.geometry import FULL, PARTIAL, Geometry, check_cut
from tilewise.tiles.runs import Runs, trimmed
from tilewise.tiles.tilemap import TileMap, from_call, from_chosen


class MaskReading(NamedTuple):
    """A mask as a traced program or as given tiles, and separately the `bias` that an additive mask adds to the scores."""

    call: BoundProgram | None = None
    tiles: TileMap | None = None
    bias: Tensor | None = None
    name: str = "none"
    grid: Grid | None = None


class Extent(NamedTuple):
    """The lengths a mask is read for."""

    batch: int
    heads: int
    q_len: int
    kv_len: int


def read_mask(mask: Any, extent: Extent, device: Any) -> MaskReading:
    """A function, a Mask, a TileMap, torch's BlockMask, or a boolean or additive tensor."""
    if hasattr(mask, "as_mask"):  # tilewise.flex.BlockMask
        mask = mask.as_mask()
    if is_causal_bias(mask):
        mask = of_causal_bias(mask)
    if mask is None:
        return MaskReading()
    if isinstance(mask, TileMap):
        return MaskReading(mask.mask, _fitting(mask, extent), None, mask.name)
    if isinstance(mask, Mask):
        return MaskReading(mask.traced(), None, None, mask.name if not torch.compiler.is_compiling() else "mask", mask.grid)
    if isinstance(mask, Tensor):
        return _read_tensor(mask, extent)
    if hasattr(mask, "kv_num_blocks") and hasattr(mask, "kv_indices"):
        tiles = from_block_mask(mask)
        return MaskReading(tiles.mask, _fitting(tiles, extent), None, tiles.name)
    if not callable(mask):
        raise InputError(
            f"mask must be a function of (b, h, q, kv), a tilewise mask, a TileMap, a BlockMask, or a boolean or additive tensor, got {type(mask).__name__}"
        )
    return MaskReading(trace_mask(mask, device), None, None, "function" if torch.compiler.is_compiling() else name_of(mask).strip("'"))


def _fitting(tiles: TileMap, extent: Extent) -> TileMap:
    batch, heads, q_len, kv_len = tiles.shape
    if q_len < extent.q_len or kv_len < extent.kv_len:
        raise InputError(
            "block_mask was created for a smaller length than you're using it for, you likely need to create a new block mask. "
            f"It covers {q_len} queries and {kv_len} keys, the call has {extent.q_len} and {extent.kv_len}."
        )
    if q_len > extent.q_len or kv_len > extent.kv_len:
        raise InputError(
            f"the tile map covers {q_len} queries and {kv_len} keys, but the call has {extent.q_len} and {extent.kv_len}; "
            "build it for these lengths, or slice it"
        )
    if batch not in (1, extent.batch) or heads not in (1, extent.heads):
        raise InputError(f"the tile map is for batch {batch} and {heads} heads, the call has batch {extent.batch} and {extent.heads} heads")
    return tiles


def _read_tensor(mask: Tensor, extent: Extent) -> MaskReading:
    check_dense(mask, "mask")
    shape = tuple(mask.shape)
    name = f"tensor{list(shape)}"
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(f"a mask tensor must be boolean (true: attend) or floating point (added to the scores), got {mask.dtype}")
    whole = (extent.batch, extent.heads, extent.q_len, extent.kv_len)
    if mask.dim() == 2:
        padding, square = shape == (extent.batch, extent.kv_len), shape == (extent.q_len, extent.kv_len)
        if padding and square and extent.batch != 1:
            raise InputError(f"a 2-D mask of shape {shape} may mean (batch, keys) or (queries, keys) here; write mask[:, None, None, :] or mask[None, None]")
        if padding and not square:
            mask = mask[:, None, None, :]
    if not broadcasts(mask.shape, whole):
        raise InputError(f"a mask tensor of shape {shape} does not broadcast to (batch, heads, queries, keys) = {whole}, nor is it (batch, keys)")
    if mask.is_floating_point():
        return MaskReading(_allowed_by_additive(mask), None, mask, name)
    return MaskReading(trace_mask(broadcast_load(mask)), None, None, name)


def _allowed_by_additive(mask: Tensor) -> BoundProgram | None:
    """The boolean mask of an additive one: tiles that are all -inf can be skipped."""
    if mask.requires_grad or not can_be_looked_at(mask):
        return None
    allowed = mask.detach() != float("-inf")
    return trace_mask(broadcast_load(allowed)) if not bool(allowed.all()) else None


def from_block_mask(block_mask: Any) -> TileMap:
    """torch's BlockMask (or anything with its attributes) as given tiles: its lists say which are computed, its mask_mod masks inside partial ones."""
    (q_len, kv_len), (q_tile, kv_tile) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    rows = -(-q_len // q_tile)
    counts, indices = _block_lists(block_mask.kv_num_blocks, block_mask.kv_indices, rows)
    geometry = Geometry(counts.shape[0], counts.shape[1], q_len, kv_len, (q_tile, kv_tile))
    full_counts, full_indices = None, None
    if block_mask.full_kv_num_blocks is not None:
        full_counts, full_indices = _block_lists(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, rows)
        if full_counts.shape != counts.shape:
            raise InputError(f"kv_num_blocks has shape {tuple(counts.shape)}, full_kv_num_blocks {tuple(full_counts.shape)}; they must be the same")
    mask = None if block_mask.mask_mod is None else trace_mask(block_mask.mask_mod, counts.device)
    if torch.compiler.is_compiling() or geometry.total > MOST_TILES:  # slices are made of runs: while compiling, what becomes of the tiles is not known
        partial = _runs(counts, indices, geometry)
        full = _no_runs(geometry, counts.device) if full_counts is None or full_indices is None else _runs(full_counts, full_indices, geometry)
        return TileMap(geometry, partial, full, mask, "block_mask", given=True)
    states, most = nothing_chosen(geometry, counts.device), indices.shape[3]
    mark(states, indices, counts, PARTIAL)
    if full_counts is not None and full_indices is not None:
        mark(states, full_indices, full_counts, FULL)
        most += full_indices.shape[3]
    return from_chosen(geometry, ChosenTiles(tiles_of(states), min(most, geometry.kv_tiles)), mask, "block_mask")


def _runs(counts: Tensor, indices: Tensor, geometry: Geometry) -> Runs:
    """Outside torch.compile, sizes may depend on contents."""
    runs = Runs(*torch.ops.tilewise.runs_of_blocks(counts, indices, geometry.kv_tiles))
    return runs if torch.compiler.is_compiling() else trimmed(runs)


def _no_runs(geometry: Geometry, device: torch.device) -> Runs:
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    return Runs(torch.zeros(geometry.rows + 1, dtype=torch.int32, device=device), nothing, nothing)


def _block_lists(counts: Tensor, indices: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The lists with batch and head dimensions, cut to the query blocks that seq_lengths covers."""
    counts = counts.reshape((1,) * (3 - counts.dim()) + counts.shape)
    indices = indices.reshape((1,) * (4 - indices.dim()) + indices.shape)
    if counts.shape[2] < rows:
        raise InputError(f"the block mask has lists for {counts.shape[2]} query blocks, but its seq_lengths ask for {rows}")
    return counts[:, :, :rows], indices[:, :, :rows]


def tile_map(
    mask: Any,
    *,
    batch: int | None = None,
    heads: int | None = None,
    q_len: int,
    kv_len: int,
    device: torch.device | str | None = None,
    tile: tuple[int, int] = (128, 128),
) -> TileMap:
    """Which tiles of the score matrix a mask leaves empty, partial or full, without ever forming the matrix.

    `batch` and `heads` are needed only if the mask depends on b or h. The map lies on `device`, by default where the
    tensors the mask captures are.
    """
    check_cut("tile_map", q_len, kv_len, tile)
    extent = Extent(1 if batch is None else batch, 1 if heads is None else heads, q_len, kv_len)
    if isinstance(mask, Mask) and 0 not in extent:
        several = {axis: size for axis, size in (("b", extent.batch), ("h", extent.heads)) if size > 1}  # one may stand for all
        mask.check_sizes({"q": q_len, "kv": kv_len} | several)
    try:
        reading = read_mask(mask, extent, device)
    except TraceError:
        if 0 not in (q_len, kv_len):
            raise
        reading = MaskReading()  # an empty map needs no mask, and tensors that the mask loads from may be empty
    if reading.tiles is not None:
        return reading.tiles.recut(tile) if device is None else reading.tiles.recut(tile).to(device)
    call = reading.call if reading.call is not None else trace_mask(lambda b, h, q, kv: True)
    for index, given, argument in (("b", batch, "batch"), ("h", heads, "heads")):
        if index in call.program.uses and given is None:
            raise InputError(f"the mask {reading.name} depends on {index}: tell tile_map how many there are with {argument}=")
    from tilewise.tiles.build import device_of

    where = device_of(call) if device is None else torch.device(device)
    return from_call(call, Geometry(*extent, (tile[0], tile[1])), reading.name, where)
