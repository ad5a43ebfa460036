"""What travels, and how: tokens between the ranks that hold them and those that need them.

Messages are (tokens, numbers) matrices: whatever belongs to a token lies side by side, so that one collective carries queries, keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tilewise.distributed.team import GroupHandle

# torch 2.13 has a new name for it, and warns of the old one.
_all_gather_rows = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class Arriving:
    """Rows that a collective is bringing."""

    def __init__(self, rows: Tensor, work: Any, lengths: Sequence[int] | None = None) -> None:
        self._rows, self._work, self._lengths = rows, work, lengths

    def wait(self) -> Tensor:
        """The rows, for whatever the current stream does next."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._lengths is None or not len(self._rows):
            return self._rows
        shares = self._rows.chunk(len(self._lengths))  # of as many rows each, padding included
        return torch.cat([share[:length] for share, length in zip(shares, self._lengths, strict=True)])


def all_to_all(rows: Tensor, sends: Sequence[int], receives: Sequence[int], group: ProcessGroup) -> Arriving:
    """Row stretch r of the input (sends[r] rows) goes to rank r; the result has receives[r] rows from each, in the order of ranks."""
    received = rows.new_empty((sum(receives), *rows.shape[1:]))
    return Arriving(received, dist.all_to_all_single(received, rows.contiguous(), list(receives), list(sends), group=group, async_op=True))


def gather_rows(rows: Tensor, lengths: Sequence[int], group: ProcessGroup) -> Arriving:
    """The rows of all ranks, lengths[r] of rank r, in the order of ranks. Shares travel padded to the longest."""
    longest = max(lengths)
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = rows.new_empty((longest * len(lengths), *rows.shape[1:]))
    return Arriving(gathered, _all_gather_rows(gathered, padded, group=group, async_op=True), lengths)


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """Between the ranks of a row group: from some tokens with all heads to all its tokens with some heads, and back."""

    group: GroupHandle | None  # None of a rank that is only looked at, where nothing travels
    lengths: tuple[int, ...]  # tokens of each of its ranks, which hold consecutive parts of its tokens
    rank: int

    def split(self, by_head_group: Tensor) -> Tensor:
        """(head groups, own tokens, numbers) -> (tokens of the row group, numbers)"""
        own = self.lengths[self.rank]
        return all_to_all(by_head_group.flatten(0, 1), [own] * len(self.lengths), self.lengths, _there(self.group)).wait()

    def join(self, rows: Tensor) -> Tensor:
        """(tokens of the row group, numbers) -> (head groups, own tokens, numbers)"""
        own = self.lengths[self.rank]
        back = all_to_all(rows, self.lengths, [own] * len(self.lengths), _there(self.group)).wait()
        return back.view(len(self.lengths), own, *back.shape[1:])


@dataclass(frozen=True, eq=False)
class Stage:
    """Keys that are attended to in one go, in the order of the sequence."""

    order: Tensor  # [keys] rows of the pool
    positions: Tensor  # [keys] where in the sequence they are
    start: int | None  # the first position if they follow one another: known here, so that no call has to wait for a GPU to tell


@dataclass(frozen=True, eq=False)
class KeyExchange:
    """Between row groups: the keys and values that the own queries attend to.

    They come from a pool of three parts: the own tokens, those that other ranks sent to this one, and those that go to everybody ("hot"). In one stage, all
    are attended to together; in two, the own ones while the others are on their way.
    """

    group: GroupHandle | None  # None of a rank that is only looked at, where nothing travels
    rank: int
    own_tokens: int
    send_index: Tensor  # rows of the own tokens to send, by destination
    sends: tuple[int, ...]  # how many go to each rank
    receives: tuple[int, ...]
    hot_index: Tensor  # rows of the own tokens that go to everybody
    hot: tuple[int, ...]  # how many each rank has of these
    stages: tuple[Stage, ...]
    moves: bool  # whether anything but hot tokens travels, on any rank
    gathers: bool  # the hot ones by one all-gather; else by a broadcast from each rank that has some

    def to(self, device: torch.device) -> "KeyExchange":
        stages = tuple([Stage(stage.order.to(device), stage.positions.to(device), stage.start) for stage in self.stages])
        return replace(self, send_index=self.send_index.to(device), hot_index=self.hot_index.to(device), stages=stages)

    def fetch(self, own: Tensor) -> "Fetch":
        """Start the exchange of (own tokens, numbers)."""
        arriving = []
        if self.moves:
            arriving.append(all_to_all(own.index_select(0, self.send_index), self.sends, self.receives, _there(self.group)))
        return Fetch(self, own, [*arriving, *self._fetch_hot(own)])

    def _fetch_hot(self, own: Tensor) -> list[Arriving]:
        """The hot tokens of each rank, in the order of ranks."""
        if not any(self.hot):
            return []
        mine = own.index_select(0, self.hot_index)
        if self.gathers:
            return [gather_rows(mine, self.hot, _there(self.group))]
        shares = [mine if rank == self.rank else own.new_empty((count, *own.shape[1:])) for rank, count in enumerate(self.hot)]
        ranks = [dist.get_global_rank(_there(self.group), rank) for rank in range(len(shares))]
        return [Arriving(s, dist.broadcast(s, r, group=_there(self.group), async_op=True) if len(s) else None) for r, s in zip(ranks, shares, strict=True)]

    def give_back(self, grads: Sequence[Tensor], deterministic: bool) -> Tensor:
        """(keys of a stage, numbers) each -> (own tokens, numbers): the gradients of all ranks, added in the order of ranks.

        A deterministic sum of hot tokens' gradients is added up where they belong; else the collective's tree adds them on the way.
        """
        sizes = [self.own_tokens, sum(self.receives), sum(self.hot)]
        pool = grads[0].new_zeros((sum(sizes), *grads[0].shape[1:]))
        for stage, rows in zip(self.stages, grads, strict=True):
            pool.index_copy_(0, stage.order, rows)
        own, others, hot = pool.split(sizes)
        found: Tensor = own.clone()
        if self.moves:
            back = all_to_all(others, self.receives, self.sends, _there(self.group)).wait()
            for index, share in zip(self.send_index.split(list(self.sends)), back.split(list(self.sends)), strict=True):
                _add_rows(found, index, share)
        if any(self.hot):
            self._give_back_hot(found, hot, deterministic)
        return found

    def _give_back_hot(self, found: Tensor, hot: Tensor, deterministic: bool) -> None:
        shares = hot.split(list(self.hot))
        if self.gathers or deterministic:
            mine, ranks = self.hot[self.rank], len(self.hot)
            back = all_to_all(hot, self.hot, [mine] * ranks, _there(self.group)).wait()
            for share in back.split([mine] * ranks):
                _add_rows(found, self.hot_index, share)
            return
        for rank, share in enumerate(shares):
            if len(share):
                summed = share.contiguous()
                dist.reduce(summed, dist.get_global_rank(_there(self.group), rank), group=_there(self.group))
                if rank == self.rank:
                    _add_rows(found, self.hot_index, summed)


class Fetch:
    """An exchange under way."""

    def __init__(self, exchange: KeyExchange, own: Tensor, arriving: list[Arriving]) -> None:
        self._exchange, self._own, self._arriving = exchange, own, arriving

    def rows(self, stage: int) -> Tensor:
        """(keys of the stage, numbers)"""
        order = self._exchange.stages[stage].order
        if len(self._exchange.stages) == 1:
            return torch.cat([self._own, *[a.wait() for a in self._arriving]]).index_select(0, order)
        if stage == 0:
            return self._own.index_select(0, order)
        return torch.cat([self._own[:0], *[a.wait() for a in self._arriving]]).index_select(0, order - self._exchange.own_tokens)


def _there(group: GroupHandle | None) -> ProcessGroup:
    assert group is not None, "a plan of one rank alone has nobody to exchange with"
    return group()


def _add_rows(to: Tensor, index: Tensor, rows: Tensor) -> None:
    """No index stands twice in `index`: the sum does not depend on an order."""
    if len(index):
        to.index_add_(0, index, rows)


def start_of(positions: Tensor) -> int | None:
    """The first of positions that follow one another (they are sorted, and none stands twice); None of others, and where there are none."""
    if not len(positions) or int(positions[-1] - positions[0]) != len(positions) - 1:
        return None
    return int(positions[0])


def key_exchange(
    group: GroupHandle | None, rank: int, held: Sequence[Tensor], needs: Tensor, hot: Tensor, gathers: bool, tile: int, stages: int = 1
) -> KeyExchange:
    """Of the positions `held` by each row group (sorted), what the row group `rank` sends and receives.

    needs: [row groups, tiles] bool. hot: [tiles] bool, the tiles that go to everybody. Both are the same on every rank, so what one sends another expects.
    """
    own, nothing = held[rank], held[rank].new_empty(0)
    tiles = [positions // tile for positions in held]
    cold = needs & ~hot
    sent = [cold[r][tiles[rank]].nonzero().flatten() if r != rank else nothing for r in range(len(held))]
    received = [held[r][cold[rank][tiles[r]]] if r != rank else nothing for r in range(len(held))]
    hot_rows = [hot[at].nonzero().flatten() for at in tiles] if bool(hot.any()) else [nothing] * len(held)
    hot_positions = [held[r][rows] for r, rows in enumerate(hot_rows)]
    hot_positions[rank] = torch.full_like(hot_positions[rank], -1)  # those are among the own ones
    pool = torch.cat([own, *received, *hot_positions])
    wanted = ((pool >= 0) & needs[rank][pool.clamp(min=0) // tile]).nonzero().flatten()
    order = wanted[torch.argsort(pool[wanted])]
    near = order < len(own)
    orders = [order] if stages == 1 else [order[near], order[~near]]
    return KeyExchange(
        group=group,
        rank=rank,
        own_tokens=len(own),
        send_index=torch.cat(sent),
        sends=tuple([len(s) for s in sent]),
        receives=tuple([len(r) for r in received]),
        hot_index=hot_rows[rank],
        hot=tuple([len(rows) for rows in hot_rows]),
        stages=tuple([Stage(o, pool[o], start_of(pool[o])) for o in orders]),
        moves=bool(cold.any()),
        gathers=gathers,
    )
