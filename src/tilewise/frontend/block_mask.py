"""BlockMask: torch's form of a tile map. Its index lists are computed only when they are read."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InputError, MisuseError
from tilewise.lang import trace_mask
from tilewise.masks import MaskFunction
from tilewise.tiles import Geometry, Runs, TileMap, from_block_mask, from_call, tile_map, trimmed
from tilewise.tiles.runs import from_stretches

BLOCK = 128
COVERS_ALL = 1 << 30  # torch's block size for "no blocks at all": such a mask fits every length
FORWARD = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
BACKWARD = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
SHADES = " ░█"


def noop_mask(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    """The mask that allows everything."""
    return batch.new_ones((), dtype=torch.bool)


def sliced_mask_mod(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    """Placeholder for the mask_mod of a slice: the original would count positions from the start of the whole mask."""
    raise MisuseError(
        "Cannot use mask_mod from a sliced BlockMask: it counts positions from the start of the mask that was sliced. "
        "Set it from the original: sliced.mask_mod = shifted(original.mask_mod), or pass the slice on as it is"
    )


@dataclass(frozen=True)
class Blocks:
    """The blocks behind the lists: rows are batch x query blocks."""

    partial: Runs
    full: Runs | None  # None if full blocks are not listed separately
    batch: tuple[int, ...]
    rows: int
    columns: int

    @property
    def groups(self) -> int:
        return torch.Size(self.batch).numel()

    @property
    def runs(self) -> tuple[Runs, ...]:
        return (self.partial,) if self.full is None else (self.partial, self.full)


def _listed(name: str) -> Any:
    """A list as a property: computed on first read, replaced on assignment."""

    def read(self: "BlockMask") -> Tensor | None:
        return self._list(name)

    def assign(self: "BlockMask", value: Tensor | None) -> None:
        self._assign(name, value)

    return property(read, assign)


class BlockMask:
    """Which blocks of the score matrix are computed, in torch's form.

    The mask is kept as a tilewise.TileMap. torch's lists (`kv_num_blocks`, `kv_indices`, ...) have a number for every
    block of the whole matrix, so they exist only once they are read; attention never reads them. They have torch's
    shapes and dtypes, and the first `kv_num_blocks` entries of a row ascend. Assigning a list, `mask_mod` or
    `seq_lengths`, or changing a list in place, changes the mask as it does in torch.

    One difference: a block that reaches past the end of the sequence and allows everything before it is full here and
    partial in torch. Results are the same.
    """

    kv_num_blocks = _listed("kv_num_blocks")
    kv_indices = _listed("kv_indices")
    full_kv_num_blocks = _listed("full_kv_num_blocks")
    full_kv_indices = _listed("full_kv_indices")
    q_num_blocks = _listed("q_num_blocks")
    q_indices = _listed("q_indices")
    full_q_num_blocks = _listed("full_q_num_blocks")
    full_q_indices = _listed("full_q_indices")

    BLOCK_SIZE: tuple[int, int]
    dq_write_order: Tensor | None  # these four are for torch's own kernels: stored, never used
    dq_write_order_full: Tensor | None
    dq_kv_order: Tensor | None
    dq_kv_order_spt: bool | None
    _tiles: TileMap | None  # None: the lists are the mask or, if there are no lists either, it has yet to be built from mask_mod
    _lists: dict[str, Tensor | None]
    _versions: dict[str, int]  # of the derived lists, to notice changes in place

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None,
        full_kv_indices: Tensor | None,
        q_num_blocks: Tensor | None,
        q_indices: Tensor | None,
        full_q_num_blocks: Tensor | None,
        full_q_indices: Tensor | None,
        BLOCK_SIZE: int | tuple[int, int] = BLOCK,
        mask_mod: MaskFunction | None = None,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | None = None,
        dq_kv_order_spt: bool | None = None,
    ) -> None:
        _check_lists(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        self._start(seq_lengths, BLOCK_SIZE, noop_mask if mask_mod is None else mask_mod, tuple(kv_num_blocks.shape[:-1]))
        given = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, q_num_blocks, q_indices, full_q_num_blocks, full_q_indices)
        self._lists = dict(zip((*FORWARD, *BACKWARD), given, strict=True))
        self.dq_write_order, self.dq_write_order_full = dq_write_order, dq_write_order_full
        self.dq_kv_order, self.dq_kv_order_spt = dq_kv_order, dq_kv_order_spt

    def _start(self, seq_lengths: tuple[int, int], block: int | tuple[int, int], mask_mod: MaskFunction, batch: tuple[int, ...]) -> None:
        self.BLOCK_SIZE = (block, block) if isinstance(block, int) else (block[0], block[1])
        self._lengths, self._mask_mod, self._batch = (seq_lengths[0], seq_lengths[1]), mask_mod, batch
        self._new_lengths = self._new_mask = False  # assigned by the user
        self._separate = True  # full blocks are listed separately
        self._lists, self._versions, self._tiles = {}, {}, None
        self._device = torch.device("cpu")
        self._without_mask = False  # a slice taken while compiling: the mask inside its blocks is unknown
        self.dq_write_order = self.dq_write_order_full = self.dq_kv_order = self.dq_kv_order_spt = None

    @classmethod
    def from_mask(
        cls, mask_mod: MaskFunction, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device, block: int | tuple[int, int], separate: bool
    ) -> "BlockMask":
        """The block mask of a function; while compiling, the build is deferred until it is needed."""
        made = cls.__new__(cls)
        made._start((q_len, kv_len), block, mask_mod, (batch, heads))
        made._separate, made._device = separate, device
        if not torch.compiler.is_compiling():
            made._build()
        return made

    def _build(self) -> None:
        size, lengths = self.BLOCK_SIZE, self._lengths
        tile = [min(n, -(-max(length, 1) // BLOCK) * BLOCK) for n, length in zip(size, lengths, strict=True)]  # no larger than the sequence
        self._tiles = tile_map(
            self._mask_mod, batch=self._batch[0], heads=self._batch[1], q_len=lengths[0], kv_len=lengths[1], device=self._device, tile=(tile[0], tile[1])
        )

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = BLOCK,
        mask_mod: MaskFunction | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | bool | None = None,
    ) -> "BlockMask":
        """A mask of chosen blocks: query block r computes the first kv_num_blocks[..., r] entries of kv_indices[..., r, :].

        `mask_mod` decides inside these blocks, but not inside the full ones. The q lists are derived when they are read.
        """
        _check_lists(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
        if seq_lengths is None:
            seq_lengths = (kv_indices.shape[-2] * block[0], kv_indices.shape[-1] * block[1])
        made = cls(
            seq_lengths,
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            None,
            None,
            None,
            None,
            block,
            mask_mod,
            dq_write_order=dq_write_order,
            dq_write_order_full=dq_write_order_full,
            dq_kv_order=None if isinstance(dq_kv_order, bool) else dq_kv_order,
            dq_kv_order_spt=dq_kv_order if isinstance(dq_kv_order, bool) else None,
        )
        if compute_q_blocks:
            made._forget(BACKWARD)
        return made

    # -- what the user may assign ------------------------------------------------------------------------------------

    @property
    def mask_mod(self) -> MaskFunction:
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, function: MaskFunction | None) -> None:
        self._mask_mod, self._new_mask = noop_mask if function is None else function, True

    @property
    def seq_lengths(self) -> tuple[int, int]:
        return self._lengths

    @seq_lengths.setter
    def seq_lengths(self, lengths: tuple[int, int]) -> None:
        self._lengths, self._new_lengths = (lengths[0], lengths[1]), True

    def _list(self, name: str) -> Tensor | None:
        if name not in self._lists:
            found = self._derived(name)
            self._lists[name] = found
            if found is not None and not found.is_inference():
                self._versions[name] = found._version
        return self._lists[name]

    def _assign(self, name: str, value: Tensor | None) -> None:
        if name in FORWARD:  # from now on, the lists are the mask
            self._give_up_tiles()
            self._forget(BACKWARD)
        self._lists[name] = value
        if name == "kv_num_blocks" and value is not None:
            self._batch = tuple(value.shape[:-1])

    def _give_up_tiles(self) -> None:
        self._versions = {}
        for name in FORWARD:
            self._list(name)
        self._tiles, self._versions = None, {}

    def _forget(self, names: tuple[str, ...]) -> None:
        for name in names:
            self._lists.pop(name, None)

    def _notice_changes(self) -> None:
        """If a derived list was changed in place, the lists become the mask."""
        if self._tiles is not None and self._versions and not torch.compiler.is_compiling():
            lists = [(name, self._lists[name], version) for name, version in self._versions.items() if name in FORWARD]
            if any(t is not None and t._version != version for _, t, version in lists):
                self._give_up_tiles()
                self._forget(BACKWARD)

    # -- as tiles and as lists ---------------------------------------------------------------------------------------

    def as_mask(self) -> TileMap | MaskFunction:
        """What attention runs on: a tile map; or mask_mod, if the mask was created inside a function being compiled."""
        if self._tiles is None and "kv_indices" not in self._lists:
            if torch.compiler.is_compiling():
                return self._mask_mod
            self._build()
        self._notice_changes()
        if self._tiles is None:
            tiles = from_block_mask(self)
            return replace(tiles, mask=None) if self._mask_mod is noop_mask else tiles
        if self._without_mask and not self._new_mask:
            sliced_mask_mod(None, None, None, None)
        tiles = self._tiles
        if self._new_lengths:
            tiles = _cropped(tiles, *self._lengths)
        if self._new_mask:
            mask = None if self._mask_mod is noop_mask else trace_mask(self._mask_mod, tiles.device)
            tiles = replace(tiles, mask=mask, given=True)
        return tiles

    def tile_map(self) -> TileMap:
        """The mask as a tile map."""
        tiles = self.as_mask()
        if not isinstance(tiles, TileMap):
            raise MisuseError("a BlockMask that is made inside a compiled function has no blocks yet; make it outside to look at them")
        return tiles

    def _blocks(self) -> Blocks:
        """The blocks as the lists have them."""
        if self._tiles is None and "kv_indices" not in self._lists:
            self.tile_map()
        self._notice_changes()
        if self._tiles is None:
            lists = [self._lists[name] for name in FORWARD]
            rows, columns = lists[1].shape[-2:]  # type: ignore[union-attr]  # kv_indices is never None
            return Blocks(_runs(*lists[:2]), None if lists[2] is None else _runs(*lists[2:]), self._batch, rows, columns)
        g, partial, full = self._tiles.geometry, trimmed(self._tiles.partial), trimmed(self._tiles.full)
        if not self._separate:
            together = from_stretches([(r.row_of_run(), r.start.long(), r.count.long()) for r in (partial, full)], g.rows)
            return Blocks(together, None, (g.batch, g.heads), g.q_tiles, g.kv_tiles)
        return Blocks(partial, full, (g.batch, g.heads), g.q_tiles, g.kv_tiles)

    def _derived(self, name: str) -> Tensor | None:
        blocks = self._blocks()
        runs = blocks.full if name.startswith("full_") else blocks.partial
        if runs is None:
            return None
        rows, columns = blocks.rows, blocks.columns
        if name in BACKWARD:
            runs, rows, columns = runs.transpose(blocks.groups, columns), columns, rows
        if name.endswith("num_blocks"):
            return _counts(runs).view(*blocks.batch, rows).expand(*self._batch, rows)
        return _indices(runs, columns).view(*blocks.batch, rows, columns).expand(*self._batch, rows, columns)

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """The lengths, the lists, the block size and mask_mod in torch's order; `flatten` opens the pairs."""
        lengths, block = (self.seq_lengths, self.BLOCK_SIZE) if flatten else ((self.seq_lengths,), (self.BLOCK_SIZE,))
        lists = [self._list(name) for name in (*FORWARD, *BACKWARD)]
        return (*lengths, *lists, self.dq_write_order, self.dq_write_order_full, self.dq_kv_order, self.dq_kv_order_spt, *block, self.mask_mod)

    # -- other masks from it -----------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> "BlockMask":
        """The mask of some batch elements, heads and query blocks: integers, slices or 1-D index tensors; dimensions stay.

        As in torch, `seq_lengths` stays that of the whole mask, and `mask_mod`, which counts from its start, cannot be
        called until it is assigned. Unlike in torch, the slice itself can be used for attention, with just its queries.
        """
        if len(self._batch) != 2:
            raise InputError(f"a BlockMask is sliced by batch, head and query block, but its lists have {len(self._batch)} leading dimension(s), not 2")
        picks = list(index) if isinstance(index, tuple) else [index]
        if len(picks) > 3:
            raise InputError(f"a BlockMask is indexed by batch, head and query block, got {len(picks)} indices")
        picks = [p.reshape(-1) if isinstance(p, Tensor) else p for p in picks] + [slice(None)] * (3 - len(picks))
        tiles = self.tile_map()
        g = tiles.geometry
        batch = tuple([len(_chosen(p, n)) for p, n in zip(picks, self._batch, strict=False)])
        picks = [slice(None) if n == 1 else p for p, n in zip(picks, (g.batch, g.heads), strict=False)] + picks[2:]
        sliced = BlockMask.__new__(BlockMask)
        sliced._start(self._lengths, self.BLOCK_SIZE, sliced_mask_mod, batch)
        sliced._separate = self._separate
        if torch.compiler.is_compiling():
            sliced._tiles, sliced._without_mask = _sliced(tiles, picks), True
        else:
            sliced._tiles = tiles[tuple(picks)]
        return sliced

    def _adjust(self, new_q_len: int, new_kv_len: int) -> "BlockMask":
        """The upper left corner of the mask, for other lengths."""
        tiles = self.tile_map()
        if tiles.given or tiles.mask is None:
            tiles = _cropped(tiles, new_q_len, new_kv_len)
        else:
            tiles = from_call(tiles.mask, replace(tiles.geometry, q_len=new_q_len, kv_len=new_kv_len), tiles.name, tiles.device)
        made = BlockMask.__new__(BlockMask)
        made._start((new_q_len, new_kv_len), self.BLOCK_SIZE, self._mask_mod, self._batch)
        made._separate, made._tiles, made._without_mask = self._separate, tiles, self._without_mask
        return made

    def to(self, device: torch.device | str) -> "BlockMask":
        """The mask on another device. Tensors that mask_mod captures move in the mask, not in `mask_mod` itself."""
        self._notice_changes()
        made = BlockMask.__new__(BlockMask)
        made.__dict__.update(self.__dict__)
        made._lists = {} if self._tiles is not None else {name: None if t is None else t.to(device) for name, t in self._lists.items()}
        made._versions = {}
        made._tiles = None if self._tiles is None else self._tiles.to(device)
        made._device = torch.device(device)
        return made

    # -- looking at it -----------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        if self._tiles is not None:
            return self._tiles.device
        counts = self._lists.get("kv_num_blocks")
        return self._device if counts is None else counts.device

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, heads, query length, key length)"""
        return (*self._batch, *self.seq_lengths)

    def numel(self) -> int:
        """Elements of the whole score matrix."""
        return torch.Size(self.shape).numel()

    def sparsity(self) -> float:
        """The percentage of elements outside the computed blocks. Blocks count whole, as in torch: below 0 is possible for short lengths."""
        blocks = self._blocks()
        repeats = torch.Size(self._batch).numel() // max(blocks.groups, 1)
        computed = repeats * sum(runs.total() for runs in blocks.runs) * self.BLOCK_SIZE[0] * self.BLOCK_SIZE[1]
        return 100 * (1 - computed / self.numel())

    def to_dense(self) -> Tensor:
        """(batch, heads, query blocks, key blocks), int32: 1 where a block is computed."""
        blocks = self._blocks()
        computed = torch.zeros((blocks.groups * blocks.rows, blocks.columns), dtype=torch.int32, device=self.device)
        for runs in blocks.runs:
            computed[runs.cells()] = 1
        return computed.view(*blocks.batch, blocks.rows, blocks.columns).expand(*self._batch, -1, -1)

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """The mask in characters, for `limit` batch elements and heads: at most `grid_size` cells a side, or -1 for all blocks."""
        largest = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
        blocks = self._blocks()
        steps = [1 if most < 1 else max(1, -(-n // most)) for n, most in zip((blocks.rows, blocks.columns), largest, strict=True)]
        drawings = []
        for number, place in enumerate(product(*map(range, self._batch))):
            if number == limit:
                drawings += [
                    "...",
                    "To print out more, set BlockMask.to_string(limit=N)",
                    "You can also index (BlockMask[batch, head]) to choose a specific batch or head",
                ]
                break
            drawings.append(f"{place}\n" + "".join(line + "\n" for line in _drawn(blocks, place, *steps)))
        return "\n".join(drawings)

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%, \n{self.to_string().strip()}\n)"

    def __repr__(self) -> str:
        blocks = self._blocks()
        sizes = {
            "kv_num_blocks": (blocks.rows,),
            "kv_indices": (blocks.rows, blocks.columns),
            "q_num_blocks": (blocks.columns,),
            "q_indices": (blocks.columns, blocks.rows),
        }
        shapes: dict[str, Any] = {}
        for name in (*FORWARD, *BACKWARD):
            missing = (name in self._lists and self._lists[name] is None) or (name.startswith("full_") and blocks.full is None)
            shapes[name] = None if missing else torch.Size((*self._batch, *sizes[name.removeprefix("full_")]))
        fields = shapes | {
            "BLOCK_SIZE": self.BLOCK_SIZE,
            "shape": self.shape,
            "sparsity": f"{self.sparsity():.2f}%",
            "mask_mod": getattr(self.mask_mod, "__name__", self.mask_mod),
        }
        return "BlockMask(\n" + ",\n".join([f"    {name}={value}" for name, value in fields.items()]) + "\n)"


def _check_lists(counts: Tensor, indices: Tensor, full_counts: Tensor | None, full_indices: Tensor | None) -> None:
    if indices.dim() < 2:
        raise MisuseError(f"BlockMask must have at least 2 dimensions, got kv_indices of shape {tuple(indices.shape)}")
    if (full_counts is None) != (full_indices is None):
        raise InputError("full_kv_num_blocks and full_kv_indices must be both provided or omitted")
    for name, few, many in (("", counts, indices), ("full_", full_counts, full_indices)):
        if few is not None and many is not None and few.shape != many.shape[:-1]:
            raise InputError(f"{name}kv_num_blocks has shape {tuple(few.shape)}, {name}kv_indices {tuple(many.shape)}; the second has one dimension more")


# -- runs and lists ----------------------------------------------------------------------------------------------------


def _runs(counts: Tensor | None, indices: Tensor | None) -> Runs:
    assert counts is not None and indices is not None
    return trimmed(Runs(*torch.ops.tilewise.runs_of_blocks(counts, indices, indices.shape[-1])))


def _counts(runs: Runs) -> Tensor:
    """[rows] how many blocks each row has."""
    return torch.zeros(runs.rows, dtype=torch.int32, device=runs.device).index_add_(0, runs.row_of_run(), runs.count)


def _indices(runs: Runs, columns: int) -> Tensor:
    """[rows, columns] the row's blocks in ascending order, then the others."""
    outside = torch.ones((runs.rows, columns), dtype=torch.bool, device=runs.device)
    outside[runs.cells()] = False
    return torch.argsort(outside, dim=1, stable=True).int()


def _restricted(offsets: Tensor, start: Tensor, count: Tensor, rows: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The given rows within the first columns, padded with zeros to a size that does not depend on the contents."""
    picked = trimmed(Runs(offsets, start, count)).select(rows)
    row, first = picked.row_of_run(), picked.start.long()
    stop = (first + picked.count.long()).clamp(max=columns)
    inside = first < stop
    runs = from_stretches([(row[inside], first[inside], (stop - first)[inside])], len(rows))
    padding = torch.zeros(_most_runs(len(rows), columns) - len(runs.start), dtype=torch.int32, device=start.device)
    return runs.offsets, torch.cat([runs.start, padding]), torch.cat([runs.count, padding])


def _most_runs(rows: int, columns: int) -> int:
    return rows * ((columns + 1) // 2)


_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define("restricted_runs(Tensor offsets, Tensor start, Tensor count, Tensor rows, SymInt columns) -> (Tensor, Tensor, Tensor)")
_library.impl("restricted_runs", _restricted, "CompositeExplicitAutograd")


@torch.library.register_fake("tilewise::restricted_runs", lib=_library)  # type: ignore[untyped-decorator]  # torch has no type for it
def _restricted_sizes(offsets: Tensor, start: Tensor, count: Tensor, rows: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    most = _most_runs(rows.shape[0], columns)
    return offsets.new_empty((rows.shape[0] + 1,)), start.new_empty((most,)), count.new_empty((most,))


def _restrict(tiles: TileMap, b: Tensor, h: Tensor, q: Tensor, geometry: Geometry) -> TileMap:
    """The tiles of these batch elements, heads and query tiles, within the new geometry's keys, as bare tiles."""
    g = tiles.geometry
    rows = ((b[:, None, None] * g.heads + h[None, :, None]) * g.q_tiles + q[None, None, :]).flatten()
    partial, full = (Runs(*torch.ops.tilewise.restricted_runs(r.offsets, r.start, r.count, rows, geometry.kv_tiles)) for r in (tiles.partial, tiles.full))
    if not torch.compiler.is_compiling():
        partial, full = trimmed(partial), trimmed(full)
    return TileMap(geometry, partial, full, tiles.mask, tiles.name, given=True)


def _cropped(tiles: TileMap, q_len: int, kv_len: int) -> TileMap:
    """The same tiles under other lengths."""
    g = tiles.geometry
    geometry = replace(g, q_len=q_len, kv_len=kv_len)
    if geometry.q_tiles > g.q_tiles:
        raise InputError(f"a BlockMask with {g.q_tiles} query blocks of {g.tile[0]} cannot be used for {q_len} queries")
    b, h, q = (torch.arange(n, device=tiles.device) for n in (g.batch, g.heads, geometry.q_tiles))
    return _restrict(tiles, b, h, q, geometry)


def _sliced(tiles: TileMap, picks: list[Any]) -> TileMap:
    """tiles[picks] for torch.compile, where an index tensor's contents are unknown; the mask no longer fits the positions."""
    g = tiles.geometry
    b, h, q = (_chosen(p, n).to(tiles.device) for p, n in zip(picks, (g.batch, g.heads, g.q_tiles), strict=True))
    geometry = replace(g, batch=len(b), heads=len(h), q_len=min(len(q) * g.tile[0], g.q_len))
    return replace(_restrict(tiles, b, h, q, geometry), mask=None)


def _chosen(pick: Any, size: int) -> Tensor:
    if isinstance(pick, int):
        pick = slice(pick, pick + 1 if pick != -1 else None)
    return torch.arange(size, device=pick.device if isinstance(pick, Tensor) else None)[pick]


def _drawn(blocks: Blocks, place: tuple[int, ...], row_step: int, column_step: int) -> Iterator[str]:
    """The lines of a drawing: a cell is blank if none of its blocks are computed, black if all are."""
    group = 0
    for at, size in zip(place, blocks.batch, strict=True):
        group = group * size + (at if size > 1 else 0)
    edges = torch.tensor([*range(0, blocks.columns, column_step), blocks.columns])
    heights = torch.tensor([min(row_step, blocks.rows - r) for r in range(0, blocks.rows, row_step)])
    covered = torch.zeros((len(heights), len(edges) - 1), dtype=torch.int64)
    for runs in blocks.runs:
        rows = runs.select(torch.arange(group * blocks.rows, (group + 1) * blocks.rows, device=runs.device)).to("cpu")
        start, stop = rows.start.long()[:, None], (rows.start + rows.count).long()[:, None]
        overlap = (torch.minimum(stop, edges[1:]) - torch.maximum(start, edges[:-1])).clamp(min=0)
        covered.index_add_(0, rows.row_of_run() // row_step, overlap)
    whole = heights[:, None] * (edges[1:] - edges[:-1])
    shades = (covered > 0).long() + (covered == whole).long()
    for line in shades.tolist():
        yield "".join(2 * SHADES[shade] for shade in line)
