"""diffusers' context parallelism: from what its dispatcher passes on every rank to a plan of tilewise.distributed, and a call under it.

    every call:  what this rank has -> one all-gather of a few numbers -> a plan that is known -> tilewise.distributed.attention
    a new plan:  agree -> gather the mask -> tilewise.distributed.plan

diffusers' hooks own the order: the tokens are those of rank 0, then those of rank 1, and so on, and a mask counts them so. In a joint model each rank has a
part of the text and a part of the image; where every token attends to every other, their order does not matter.
"""

import hashlib
from collections import OrderedDict
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tilewise import distributed, masks
from tilewise.core.problem import check_tensors
from tilewise.distributed.agree import checksum, device_of, settle
from tilewise.distributed.exchange import gather_rows
from tilewise.distributed.strategy import head_splits
from tilewise.errors import InputError, UnsupportedError
from tilewise.frontend import mask_tensors
from tilewise.integrations.diffusers_masks import four_dimensional
from tilewise.scores import Score

KEPT = 16  # plans of a group


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it is not typed
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, config: Any, *, is_causal: bool, enable_gqa: bool, return_lse: bool, **options: Any
) -> Any:
    """Attention of this rank's queries to the keys of all ranks. Tensors are (batch, sequence, heads, head dim), the lse is (batch, sequence, heads).

    `config` is diffusers' ContextParallelConfig; `options` go to tilewise.distributed.attention. Collective, and an error of one rank is raised by all.
    """
    group = config._flattened_mesh.get_group()
    own: _Own | None = None
    error: Exception | None = None
    try:
        own = _Own(query, key, value, attn_mask, is_causal, enable_gqa, config)
    except Exception as found:  # whatever it is, the other ranks must hear of it
        error = found
    told = _told(FAILED if own is None else own.numbers, group)
    plans = _plans.setdefault(group, OrderedDict())
    planned = plans.get(told)
    if planned is None:
        settle((group,), {} if own is None else own.facts, error)
        assert own is not None
        planned = plans[told] = own.plan(told, config)
        if len(plans) > KEPT:
            plans.popitem(last=False)
    plans.move_to_end(told)
    length = query.shape[1]
    if planned.crosses:
        query, key, value = _side_by_side(query, key, value)
    out, lse = distributed.attention(query, key, value, plan=planned.plan, score=planned.score, layout="bshd", return_lse=True, **options)
    return (out[:, :length], lse.transpose(1, 2)[:, :length]) if return_lse else out[:, :length]


class _Numbers(NamedTuple):
    """What a rank tells the others before each call."""

    failed: int
    queries: int
    keys: int
    mask_rows: int  # 0: there is no mask
    mask_columns: int
    facts: int  # a digest of what must be alike on all ranks
    mask: int  # a digest of the mask's contents, taken in every call: torch.distributed writes into tensors unseen


FAILED = _Numbers(1, 0, 0, 0, 0, 0, 0)


class _Planned(NamedTuple):
    plan: distributed.Plan
    score: Score | None  # what an additive mask adds
    crosses: bool  # queries and keys are other tokens: see _side_by_side


# The plans of a group, by what all its ranks told: their lengths, the shapes and contents of their masks, and facts (all else that _Own.plan reads). So a plan
# follows from its key. Every rank of the group makes the same calls and compares the same keys: all find a plan, or none does, and all drop the same one.
# Scale, dropout, determinism, engine and seed are no part of a plan: tilewise.distributed.attention compares them in every call.
_plans: WeakKeyDictionary[ProcessGroup, OrderedDict[tuple[_Numbers, ...], _Planned]] = WeakKeyDictionary()


def _told(own: _Numbers, group: ProcessGroup) -> tuple[_Numbers, ...]:
    """What every rank says, in the order of ranks."""
    rows = gather_rows(torch.tensor([own], dtype=torch.int64, device=device_of(group)), [1] * dist.get_world_size(group), group).wait()
    return tuple([_Numbers(*row) for row in rows.tolist()])


class _Own:
    """A call as this rank sees it, checked. Making one waits for no other rank."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, is_causal: bool, enable_gqa: bool, config: Any) -> None:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != 4:
                raise InputError(f"{name} must be (batch, sequence, heads, head dim), got shape {tuple(tensor.shape)}")
        check_tensors(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), enable_gqa)
        if mask is not None and not isinstance(mask, Tensor):
            raise UnsupportedError(f"under context parallelism a mask must be a tensor, got {type(mask).__name__}")
        if mask is not None and mask.requires_grad:
            raise UnsupportedError("under context parallelism a mask that requires grad would get no gradient; detach it, or use one device")
        self.batch, _, self.heads, self.head_dim = query.shape
        self.kv_heads, self.v_dim = value.shape[2:]
        self.dtype, self.device, self.is_causal = query.dtype, query.device, is_causal
        self.mask: Tensor | None = None if mask is None else four_dimensional(mask, self.batch, self.heads, query.shape[1], mask.shape[-1] if mask.dim() else 0)
        self.facts: dict[str, object] = {
            "call": "attention of diffusers",
            "batch, heads, head dim": (self.batch, self.heads, self.head_dim),
            "key heads, value's head dim": (self.kv_heads, self.v_dim),
            "dtype": self.dtype,
            "device": self.device.type,
            "is_causal": is_causal,
            "mask": "none" if self.mask is None else f"{self.mask.dtype} of batch {self.mask.shape[0]}, heads {self.mask.shape[1]}",
            "ring and ulysses degree": (config.ring_degree, config.ulysses_degree),
        }
        rows, columns = (0, 0) if self.mask is None else self.mask.shape[2:]
        facts, contents = _number(str(self.facts)), 0 if self.mask is None else _number(checksum(self.mask))
        self.numbers = _Numbers(0, query.shape[1], key.shape[1], rows, columns, facts, contents)

    def plan(self, told: tuple[_Numbers, ...], config: Any) -> _Planned:
        """The plan of what all ranks told. Collective."""
        queries, keys = [n.queries for n in told], [n.keys for n in told]
        crosses = queries != keys
        sizes = [q + k for q, k in zip(queries, keys, strict=True)] if crosses else queries
        group = config._flattened_mesh.get_group()
        with torch.inference_mode(False), torch.no_grad():  # a plan may outlive the mode it was made in
            reading = mask_tensors.Reading()
            error: Exception | None = None
            try:
                given = None if self.mask is None else _whole(self.mask, told, group)
                reading = self._read(given, queries, keys)
            except Exception as found:  # the other ranks must hear of it
                error = found
            settle((group,), {"call": "reading a mask of diffusers"}, error)
            made = distributed.plan(
                reading.mask,
                length=sum(sizes),
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                v_dim=self.v_dim,
                batch=self.batch,
                group=self._group(len(told), crosses, config),
                dtype=self.dtype,
                device=self.device,
                strategy="needed" if crosses else "auto",
                shard_sizes=sizes,
            )
        return _Planned(made, reading.score, crosses)

    def _read(self, mask: Tensor | None, queries: list[int], keys: list[int]) -> mask_tensors.Reading:
        """What a mask of all queries and keys means for the tokens of the plan, with is_causal."""
        if mask is not None:
            mask_tensors.check(mask, (self.batch, self.heads, sum(queries), sum(keys)))
        causal, length = masks.causal, sum(queries)
        if queries != keys:
            places = _Places(queries, keys, self.device)
            mask, causal, length = places.spread(mask), places.causal(), places.length
        reading = mask_tensors.Reading() if mask is None else mask_tensors.read(mask, (self.batch, self.heads, length, length))
        assert reading is not None  # it may be read: it is a copy, and outside torch.compile
        if not self.is_causal:
            return reading
        return mask_tensors.Reading(causal if reading.mask is None else reading.mask & causal, reading.score)

    def _group(self, ranks: int, crosses: bool, config: Any) -> Any:
        """Heads over the ulysses degree, rows over the ring degree; where heads cannot be split so, or nothing but keys has to travel, the plan chooses."""
        splits = config.ulysses_degree in head_splits(ranks, self.heads, self.kv_heads)
        return config._mesh["ring", "ulysses"] if splits and not crosses else config._flattened_mesh


# -- masks -------------------------------------------------------------------------------------------------------------


def _whole(mask: Tensor, told: tuple[_Numbers, ...], group: ProcessGroup) -> Tensor:
    """The mask of all queries and keys, a copy. Its last two dimensions have the local length, the whole one, or 1. Collective."""
    queries, keys = [n.queries for n in told], [n.keys for n in told]
    rows, columns = [n.mask_rows for n in told], [n.mask_columns for n in told]
    local_rows, local_columns = rows == queries and max(rows) > 1, columns == keys
    if local_rows and local_columns:
        raise InputError(
            f"a mask of local queries x local keys, here {rows} x {columns} on the ranks in order, does not say which keys of other ranks a query attends to; "
            f"pass padding as (batch, local keys), or a mask of all {sum(keys)} keys"
        )
    for name, found, lengths, local in (("queries", rows, queries, local_rows), ("keys", columns, keys, local_columns)):
        if not local and set(found) not in ({1}, {sum(lengths)}):
            raise InputError(f"a mask must be of the local {name}, {lengths} on the ranks in order, or of all {sum(lengths)}; got {found}")
    if local_rows or local_columns:
        dim, lengths = (2, queries) if local_rows else (3, keys)
        return gather_rows(mask.movedim(dim, 0), lengths, group).wait().movedim(0, dim)
    return mask.clone()


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


# -- cross attention ---------------------------------------------------------------------------------------------------
# A plan is of one sequence. So each rank's tokens are its queries and then its keys: a query's own key and a key's own query are zeros, and the mask
# hides the former. Tiles without a key are neither sent nor computed.


def _side_by_side(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys = query.shape[1], key.shape[1]
    pad = torch.nn.functional.pad
    return pad(query, (0, 0, 0, 0, 0, keys)), pad(key, (0, 0, 0, 0, queries, 0)), pad(value, (0, 0, 0, 0, queries, 0))


class _Places:
    """Where the queries and the keys of all ranks are in such a sequence."""

    def __init__(self, queries: list[int], keys: list[int], device: torch.device) -> None:
        self._is_key = torch.cat([torch.arange(q + k, device=device) >= q for q, k in zip(queries, keys, strict=True)])
        self.length = len(self._is_key)

    def spread(self, mask: Tensor | None) -> Tensor:
        """A mask of queries and keys as one of tokens. Queries that are none may attend to anything: nobody looks at what they get."""
        given = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._is_key.device) if mask is None else mask
        hidden = False if given.dtype == torch.bool else -torch.inf
        batch, heads, rows, _ = given.shape
        columns = given.new_full((batch, heads, rows, self.length), hidden)
        columns[..., self._is_key] = given
        if rows == 1:
            return columns
        whole = given.new_full((batch, heads, self.length, self.length), hidden)
        whole[:, :, ~self._is_key] = columns
        return whole

    def causal(self) -> masks.Mask:
        """Query i attends to keys 0 to i."""
        is_key = self._is_key.long()
        place = torch.where(self._is_key, is_key.cumsum(0), (1 - is_key).cumsum(0))
        return masks.as_mask(lambda b, h, q, kv: place[q] >= place[kv])
