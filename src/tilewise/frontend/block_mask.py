"""BlockMask: torch's form of a tile map. Its index lists are computed only when they are read."""

from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey

from tilewise.core.map_cache import refuse_capture
from tilewise.core.recording import unrecorded
from tilewise.errors import InputError, MisuseError, UnsupportedError
from tilewise.frontend.block_lists import (
    BACKWARD,
    FORWARD,
    Blocks,
    blocks_of_tiles,
    check_both_or_neither,
    check_lists,
    drawn,
    list_of,
    list_of_tiles,
    runs_of,
    write_order,
)
from tilewise.frontend.block_slices import chosen, cropped, queries_of, sliced
from tilewise.lang import trace_mask
from tilewise.masks import MaskFunction
from tilewise.tiles import TileMap, from_block_mask, from_call, tile_map, trimmed

BLOCK = 128
COVERS_ALL = 1 << 30  # torch's block size for "no blocks at all": such a mask fits every length


def noop_mask(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    """The mask that allows everything."""
    return batch.new_ones((), dtype=torch.bool)


def sliced_mask_mod(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    """Placeholder for the mask_mod of a slice: the original would count positions from the start of the whole mask."""
    raise MisuseError(
        "Cannot use mask_mod from a sliced BlockMask: it counts positions from the start of the mask that was sliced. "
        "Set it from the original: sliced.mask_mod = shifted(original.mask_mod), or pass the slice on as it is"
    )


def _listed(name: str) -> Any:
    """A list as a property: computed on first read, replaced on assignment."""

    def read(self: "BlockMask") -> Tensor | None:
        return self._list(name)

    def assign(self: "BlockMask", value: Tensor | None) -> None:
        self._assign(name, value)

    return property(read, assign)


def _ordered(q_list: str) -> Any:
    """The order in which torch's deterministic kernels add up dQ, as a property: computed on first read if it was asked for, replaced on assignment."""

    def read(self: "BlockMask") -> Tensor | None:
        return self._write_order(q_list)

    def assign(self: "BlockMask", value: Tensor | None) -> None:
        self._orders[q_list] = value

    return property(read, assign)


class BlockMask:
    """Which blocks of the score matrix are computed, in torch's form.

    The mask is kept as a tilewise.TileMap. torch's lists (`kv_num_blocks`, `kv_indices`, ...) have a number for every
    block of the whole matrix, so they exist only once they are read; attention never reads them. They are what torch
    would list, contiguous tensors of their own, and the first `kv_num_blocks` entries of a row ascend. Assigning a list,
    `mask_mod` or `seq_lengths`, or writing into a list, changes the mask as it does in torch.
    """

    _TENSOR_ATTRS = (*FORWARD, *BACKWARD, "dq_write_order", "dq_write_order_full", "dq_kv_order")  # the leaves and the rest, for pytrees
    _CONTEXT_ATTRS = ("seq_lengths", "BLOCK_SIZE", "mask_mod", "dq_kv_order_spt")

    kv_num_blocks = _listed("kv_num_blocks")
    kv_indices = _listed("kv_indices")
    full_kv_num_blocks = _listed("full_kv_num_blocks")
    full_kv_indices = _listed("full_kv_indices")
    q_num_blocks = _listed("q_num_blocks")
    q_indices = _listed("q_indices")
    full_q_num_blocks = _listed("full_q_num_blocks")
    full_q_indices = _listed("full_q_indices")

    dq_write_order = _ordered("q_indices")  # these four are for torch's own kernels: stored, never used
    dq_write_order_full = _ordered("full_q_indices")
    dq_kv_order: Tensor | None
    dq_kv_order_spt: bool | None
    BLOCK_SIZE: tuple[int, int]
    seq_lengths: tuple[int, int]
    mask_mod: MaskFunction | None
    _tiles: TileMap | None  # None: the lists are the mask or, if there are no lists either, it has yet to be built from mask_mod
    _lists: dict[str, Tensor | None]
    _versions: dict[str, tuple[int, int]]  # of the derived lists: version and address, to notice writes and assignments to .data
    _orders: dict[str, Tensor | None]  # dq_write_order by the list that it orders

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
        check_lists(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        check_both_or_neither("q", full_q_num_blocks, full_q_indices)
        if dq_write_order_full is not None and dq_write_order is None:
            raise InputError("dq_write_order_full requires dq_write_order")
        self._start(seq_lengths, BLOCK_SIZE, noop_mask if mask_mod is None else mask_mod, tuple(kv_num_blocks.shape[:-1]))
        given = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, q_num_blocks, q_indices, full_q_num_blocks, full_q_indices)
        self._lists = dict(zip((*FORWARD, *BACKWARD), given, strict=True))
        self.dq_write_order, self.dq_write_order_full = dq_write_order, dq_write_order_full
        self.dq_kv_order, self.dq_kv_order_spt = dq_kv_order, dq_kv_order_spt

    def _start(self, seq_lengths: tuple[int, int], block: int | tuple[int, int], mask_mod: MaskFunction, batch: tuple[int, ...]) -> None:
        self.BLOCK_SIZE = (block, block) if isinstance(block, int) else (block[0], block[1])
        self.seq_lengths, self.mask_mod, self._batch = (seq_lengths[0], seq_lengths[1]), mask_mod, batch
        self._made_for, self._made_of = self.seq_lengths, mask_mod  # the first two, until the user assigns others
        self._separate = True  # full blocks are listed separately
        self._lists, self._versions, self._tiles = {}, {}, None
        self._of_function = False  # the tiles are those of a mask function, of which torch lists full blocks at the ends as partial
        self._bottom: Tensor | None = None  # [query blocks] of a slice of such a mask: which reach past the end of the queries
        self._device = torch.device("cpu")
        self._captured = False  # made while a CUDA graph was captured: never built for attention, which then goes by mask_mod
        self._without_mask = False  # a slice taken while compiling: the mask inside its blocks is unknown
        self._orders, self._wants_order = {}, False
        self.dq_kv_order = self.dq_kv_order_spt = None

    @classmethod
    def from_mask(
        cls, mask_mod: MaskFunction, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device, block: int | tuple[int, int], separate: bool
    ) -> "BlockMask":
        """The block mask of a function; while compiling, or capturing a CUDA graph, the build is deferred until it is needed."""
        made = cls.__new__(cls)
        made._start((q_len, kv_len), block, mask_mod, (batch, heads))
        made._separate, made._device, made._of_function = separate, device, True
        if not torch.compiler.is_compiling():
            made._captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if not made._captured:
                made._build()
        return made

    def _build(self) -> None:
        refuse_capture(self._device)
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
        check_lists(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        if dq_kv_order is not None and not isinstance(dq_kv_order, (bool, Tensor)):
            raise InputError(f"dq_kv_order must be a bool, a tensor or None, got {type(dq_kv_order).__name__}")
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

    # seq_lengths and mask_mod are plain attributes, not properties: Dynamo of torch 2.11 passes a property's setter by.

    @property
    def _lengths(self) -> tuple[int, int]:
        return (self.seq_lengths[0], self.seq_lengths[1])

    @property
    def _new_lengths(self) -> bool:
        return self._lengths != self._made_for

    @property
    def _mask_mod(self) -> MaskFunction:
        return noop_mask if self.mask_mod is None else self.mask_mod

    @property
    def _new_mask(self) -> bool:
        return self.mask_mod is not self._made_of

    def _list(self, name: str) -> Tensor | None:
        if name not in self._lists:
            with _versioned(), unrecorded():
                found = self._derived(name)
            self._lists[name] = found
            if found is not None:
                self._versions[name] = _version(found)
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
        """If a derived list was changed in place, the lists become the mask. A graph cannot tell, so while compiling every list that was read counts."""
        if self._tiles is not None and self._versions:
            lists = [(self._lists[name], version) for name, version in self._versions.items() if name in FORWARD]
            if any([t is not None and (torch.compiler.is_compiling() or _version(t) != version) for t, version in lists]):
                self._give_up_tiles()
                self._forget(BACKWARD)

    def wants_write_order(self, descending: bool) -> None:
        """Have dq_write_order computed when it is read."""
        self._wants_order, self.dq_kv_order_spt = True, descending

    def _write_order(self, q_list: str) -> Tensor | None:
        if q_list not in self._orders:
            indices = self._list(q_list) if self._wants_order else None
            self._orders[q_list] = None if indices is None else write_order(self.to_dense(), indices, bool(self.dq_kv_order_spt))
        return self._orders[q_list]

    def _dq_kv_order(self) -> Tensor | bool | None:
        return self.dq_kv_order_spt if self.dq_kv_order is None else self.dq_kv_order

    # -- as tiles and as lists ---------------------------------------------------------------------------------------

    def as_mask(self) -> TileMap | MaskFunction:
        """What attention runs on: a tile map; or mask_mod, if the mask was created inside a function being compiled or a CUDA graph being captured."""
        if self._tiles is None and "kv_indices" not in self._lists:
            if torch.compiler.is_compiling() or self._captured:
                return self._mask_mod
            self._build()
        self._notice_changes()
        if self._new_lengths and self._tiles is not None and self._lengths[1] > self._tiles.geometry.kv_len:
            self._give_up_tiles()  # mask_mod decides past the end of the keys: there, blocks are full no longer
        if self._tiles is None:
            tiles = from_block_mask(self)
            return replace(tiles, mask=None) if self._mask_mod is noop_mask else tiles
        if self._without_mask and not self._new_mask:
            sliced_mask_mod(None, None, None, None)
        tiles = self._tiles
        if self._new_lengths or (self._new_mask and tiles.geometry.q_len != self._lengths[0]):  # the latter: blocks that an index tensor chose
            tiles = cropped(tiles, *self._lengths)
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
            self._build()
        self._notice_changes()
        if self._tiles is not None:
            return blocks_of_tiles(self._tiles, self._separate, *self._over_ends(self._tiles))
        lists = [self._lists[name] for name in FORWARD]
        rows, listed = lists[1].shape[-2:]  # type: ignore[union-attr]  # kv_indices is never None
        columns = max(listed, -(-self._lengths[1] // self.BLOCK_SIZE[1]))  # lists may have less room than there are key blocks
        partial, full = trimmed(runs_of(columns, *lists[:2])), None if lists[2] is None else trimmed(runs_of(columns, *lists[2:]))
        return Blocks(partial, full, self._batch, rows, columns)

    def _derived(self, name: str) -> Tensor | None:
        if self._tiles is None and "kv_indices" not in self._lists:
            self._build()
        if name in BACKWARD:
            self._notice_changes()
        if self._tiles is None:
            found = list_of(name, self._blocks())
        else:
            found = list_of_tiles(name, self._tiles, self._separate, *self._over_ends(self._tiles))
        return None if found is None else found.expand(*self._batch, *found.shape[len(self._batch) :]).contiguous()

    def _over_ends(self, tiles: TileMap) -> tuple[Tensor, bool]:
        """[query blocks] whose full blocks are partial because they reach past the end of the queries; and whether the last column's do past the keys'."""
        g = tiles.geometry
        if not self._of_function:
            return torch.zeros(g.q_tiles, dtype=torch.bool, device=tiles.device), False
        bottom = torch.arange(1, g.q_tiles + 1, device=tiles.device) * self.BLOCK_SIZE[0] > g.q_len if self._bottom is None else self._bottom
        return bottom, g.kv_len % self.BLOCK_SIZE[1] != 0

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """The lengths, the lists, the block size and mask_mod in torch's order; `flatten` opens the pairs."""
        lengths, block = (self.seq_lengths, self.BLOCK_SIZE) if flatten else ((self.seq_lengths,), (self.BLOCK_SIZE,))
        lists = [self._list(name) for name in (*FORWARD, *BACKWARD)]
        return (*lengths, *lists, self.dq_write_order, self.dq_write_order_full, self.dq_kv_order, self.dq_kv_order_spt, *block, self.mask_mod)

    # -- other masks from it -----------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> "BlockMask":
        """The mask of some batch elements, heads and query blocks: integers, slices or 1-D index tensors; dimensions stay.

        As in torch from 2.14 on, `seq_lengths` has the queries of these blocks alone; an index tensor's blocks count whole.
        `mask_mod`, which counts from the start of the whole mask, cannot be called until it is assigned. Unlike in torch,
        the slice itself can be used for attention, with just its queries.
        """
        if len(self._batch) != 2:
            raise InputError(f"a BlockMask is sliced by batch, head and query block, but its lists have {len(self._batch)} leading dimension(s), not 2")
        picks = list(index) if isinstance(index, tuple) else [index]
        if len(picks) > 3:
            raise InputError(f"a BlockMask is indexed by batch, head and query block, got {len(picks)} indices")
        picks = [p.reshape(-1) if isinstance(p, Tensor) else p for p in picks] + [slice(None)] * (3 - len(picks))
        tiles = self.tile_map()
        g = tiles.geometry
        batch = tuple([len(chosen(p, n)) for p, n in zip(picks, self._batch, strict=False)])
        picks = [slice(None) if n == 1 else p for p, n in zip(picks, (g.batch, g.heads), strict=False)] + picks[2:]
        q_len, kv_len = self._lengths
        made = self._part((queries_of(picks[2], g.q_tiles, self.BLOCK_SIZE[0], q_len), kv_len), sliced_mask_mod, batch)
        if self._of_function and self._tiles is not None:
            made._of_function, made._bottom = True, self._over_ends(self._tiles)[0][chosen(picks[2], g.q_tiles)]
        if torch.compiler.is_compiling():
            made._tiles, made._without_mask = sliced(tiles, picks), True
        else:
            made._tiles = tiles[tuple(picks)]
        return made

    def _adjust(self, new_q_len: int, new_kv_len: int) -> "BlockMask":
        """The upper left corner of the mask, for other lengths."""
        made = self._part((new_q_len, new_kv_len), self._mask_mod, self._batch)
        tiles = self.tile_map()
        if tiles.given or tiles.mask is None:
            made._tiles = cropped(tiles, new_q_len, new_kv_len)
        else:
            made._tiles = from_call(tiles.mask, replace(tiles.geometry, q_len=new_q_len, kv_len=new_kv_len), tiles.name, tiles.device)
            made._of_function = self._of_function
        made._without_mask = self._without_mask
        return made

    def _part(self, lengths: tuple[int, int], mask_mod: MaskFunction, batch: tuple[int, ...]) -> "BlockMask":
        """A mask of some of the blocks, yet without them."""
        if self.dq_kv_order is not None:
            raise UnsupportedError("a BlockMask with a tensor dq_kv_order has no slices and no other lengths: make them from lists and orders")
        made = BlockMask.__new__(BlockMask)
        made._start(lengths, self.BLOCK_SIZE, mask_mod, batch)
        made._separate = self._separate if self._tiles is not None else self._lists.get("full_kv_num_blocks") is not None
        made._wants_order, made.dq_kv_order_spt = self._wants_order or self._orders.get("q_indices") is not None, self.dq_kv_order_spt
        if self._lists.get("q_indices", self) is None:
            made._lists = dict.fromkeys(BACKWARD)
        return made

    def to(self, device: torch.device | str) -> "BlockMask":
        """The mask on another device. Tensors that mask_mod captures move in the mask, not in `mask_mod` itself."""
        self._notice_changes()
        made = copy(self)
        made._lists = {name: None if t is None else t.to(device) for name, t in self._lists.items() if t is None or self._tiles is None}
        made._versions = {}
        made._tiles = None if self._tiles is None else self._tiles.to(device)
        made._bottom = None if self._bottom is None else self._bottom.to(device)
        made._orders = {name: None if t is None else t.to(device) for name, t in self._orders.items()}
        made.dq_kv_order = None if self.dq_kv_order is None else self.dq_kv_order.to(device)
        made._device = torch.device(device)
        return made

    def __copy__(self) -> "BlockMask":
        """Another mask with the same lists, as torch's: what is written into one is seen by both, what is assigned to one is its own."""
        made = BlockMask.__new__(BlockMask)
        made.__dict__.update(self.__dict__)
        made._lists, made._versions, made._orders = dict(self._lists), dict(self._versions), dict(self._orders)
        return made

    # -- as a pytree -------------------------------------------------------------------------------------------------

    def _flatten(self) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """The lists that there are, and the rest; for torch.utils._pytree.register_pytree_node. Tensors that mask_mod captures stay in it."""
        leaves, context = self._flatten_with_keys()
        return tuple([leaf for _, leaf in leaves]), context

    def _flatten_with_keys(self) -> tuple[tuple[tuple[GetAttrKey, Tensor], ...], tuple[Any, ...]]:
        found = [(name, getattr(self, name)) for name in self._TENSOR_ATTRS]
        missing = tuple([name for name, leaf in found if leaf is None])
        return tuple([(GetAttrKey(name), leaf) for name, leaf in found if leaf is not None]), (*[getattr(self, name) for name in self._CONTEXT_ATTRS], missing)

    @classmethod
    def _unflatten(cls, leaves: Any, context: tuple[Any, ...]) -> "BlockMask":
        *values, missing = context
        there = [name for name in cls._TENSOR_ATTRS if name not in missing]
        fields: dict[str, Any] = dict.fromkeys(missing) | dict(zip((*there, *cls._CONTEXT_ATTRS), (*leaves, *values), strict=True))
        return cls(**fields)

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
        """The percentage of blocks that are not computed. One that reaches over the end counts whole, as in torch from 2.14 on."""
        blocks = self._blocks()
        repeats = torch.Size(self._batch).numel() // max(blocks.groups, 1)
        rows, columns = (-(-length // size) for length, size in zip(self._lengths, self.BLOCK_SIZE, strict=True))
        computed, every = repeats * sum(runs.total() for runs in blocks.runs), torch.Size(self._batch).numel() * rows * columns
        return 100 * (1 - computed / every)

    def to_dense(self) -> Tensor:
        """(batch, heads, query blocks, key blocks), int32: 1 where a block is computed."""
        blocks = self._blocks()
        computed = torch.zeros((blocks.groups * blocks.rows, blocks.columns), dtype=torch.int32, device=self.device)
        for runs in blocks.runs:
            computed[runs.cells()] = 1
        return computed.view(*blocks.batch, blocks.rows, blocks.columns).expand(*self._batch, -1, -1).contiguous()

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
            drawings.append(f"{place}\n" + "".join(line + "\n" for line in drawn(blocks, place, *steps)))
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
            given = self._lists.get(name)
            shapes[name] = None if missing else torch.Size((*self._batch, *sizes[name.removeprefix("full_")])) if given is None else given.shape
        fields = shapes | {
            "BLOCK_SIZE": self.BLOCK_SIZE,
            "shape": self.shape,
            "sparsity": f"{self.sparsity():.2f}%",
            "mask_mod": getattr(self.mask_mod, "__name__", self.mask_mod),
        }
        return "BlockMask(\n" + ",\n".join([f"    {name}={value}" for name, value in fields.items()]) + "\n)"


def _version(tensor: Tensor) -> tuple[int, int]:
    return (0, 0) if torch.compiler.is_compiling() else (tensor._version, tensor.data_ptr())


def _versioned() -> AbstractContextManager[Any]:
    """Where tensors count their changes in place, as inference tensors do not."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)
