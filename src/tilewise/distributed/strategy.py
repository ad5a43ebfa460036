"""How the ranks share a problem: heads, rows, or both; who holds which tokens; which keys travel. Chosen by modelled time of a forward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from tilewise.distributed.assign import TILE, Holdings, Owners, Work, deal, loads, needed_tiles, one_thread, owners_in_order, owners_of_tiles, tiles_of
from tilewise.distributed.traffic import Machine, Moved, Shape, copies_of, groups_per_node, head_bytes, key_tokens, per_rank
from tilewise.errors import InputError
from tilewise.tiles import Runs

Strategy = Literal["auto", "heads", "ulysses", "gather", "needed"]
Order = Literal["dealt", "contiguous"]
STRATEGIES = ("auto", "heads", "ulysses", "gather", "needed")
ROUNDS = (1, 2, 4, 8, 16, 32)  # chunks of a row group that are tried
CLOSE = 1.05  # times that differ by less are alike to a model
ALIKE = 1.01  # times within 1 % are no reason for more chunks, or for hot tiles
BALANCED = 1.05  # the largest load over the mean that is still even
NEARLY_ALL = 0.7  # of all keys: from there on an all-gather, which moves them in larger pieces, is the better collective
# How much longer computing in two stages takes, estimated: 16 of 132 multiprocessors are the collective's in the first, and parts are merged in fp32. Where
# the first stage is short, as in a causal sequence on 1024 ranks, 1.02 was measured; where all of it takes less than a millisecond, launches take most.
STAGED = 1.2
HOT_GROUPS = 4  # row groups from which on a tile may be hot: if more than a quarter of them need it


@dataclass(frozen=True, eq=False)
class Layout:
    """Who holds which tokens and which keys travel, with the modelled cost. Loads, bytes and times are sums over the layers of all masks, forward."""

    shape: Shape
    head_groups: int  # U: neighbouring ranks that share rows and split heads
    rounds: int  # k: chunks of a row group
    owners: Owners
    needed: tuple[Runs, ...]  # one per mask: the key tiles of every row group
    hot: tuple[Tensor, ...]  # one per mask: [tiles] bool, key tiles that go to all row groups
    transport: tuple[str, ...]  # one per mask: "none" (one row group), "needed" or "gather"
    loads: Tensor  # [ranks] float64: in full tiles of one head
    bound: float  # the dealing promised that the mean loads of two row groups differ by no more
    received_tiles: Tensor  # [masks, ranks] float64: key tiles that come from other row groups, for the heads of the rank
    sent_tiles: Tensor  # [masks, ranks] float64: likewise; a hot tile counts once
    bytes_network: Tensor  # [ranks] float64: the larger of received and sent
    bytes_node: Tensor  # [ranks] float64: likewise
    compute: Tensor  # [ranks] float64: seconds
    network: Tensor  # [ranks] float64: seconds
    before: Tensor  # [ranks] float64: the seconds of `network` that heads take to be split and put together
    node: Tensor  # [ranks] float64: seconds
    reason: str = ""  # why this one was chosen

    @property
    def ranks(self) -> int:
        return self.owners.ranks

    @property
    def groups(self) -> int:
        """R: row groups."""
        return self.ranks // self.head_groups

    @cached_property
    def holdings(self) -> Holdings:
        """The token ranges of every rank."""
        return self.owners.holdings()

    @cached_property
    def rows(self) -> Holdings:
        """The token ranges of every row group."""
        return self.owners.row_groups(self.head_groups).holdings()

    @cached_property
    def needs(self) -> tuple[Tensor, ...]:
        """One per mask: [row groups, tiles] bool, the key tiles that some query of the group attends to."""
        return tuple(needed.dense(tiles_of(self.owners.length)) for needed in self.needed)

    @property
    def imbalance(self) -> float:
        """The largest load over the mean."""
        mean = float(self.loads.mean())
        return float(self.loads.max()) / mean if mean else 1.0

    @property
    def received_share(self) -> Tensor:
        """[masks, ranks] keys received from other row groups, over all keys of all heads."""
        heads = self.shape.kv_heads_of_rank(self.head_groups) / self.shape.kv_heads
        return self.received_tiles * (TILE * heads / max(self.owners.length, 1))

    @property
    def compute_s(self) -> float:
        return float(self.compute.max())

    @property
    def network_s(self) -> float:
        return float(self.network.max())

    @property
    def node_s(self) -> float:
        return float(self.node.max())

    @property
    def time_s(self) -> float:
        """The slowest rank. What crosses the network is waited for; keys are hidden behind a computation in two stages where that takes less."""
        keys = self.network - self.before
        return float((torch.minimum(self.compute + keys, torch.maximum(STAGED * self.compute, keys)) + self.before + self.node).max())

    @property
    def time_in_turn_s(self) -> float:
        """The slowest rank, if nothing is hidden behind anything."""
        return float((self.compute + self.network + self.node).max())

    def stages(self, device_type: str) -> int:
        """Two where keys take longer to cross the network than computing in two stages costs. Inside a node there is little to hide."""
        return 2 if device_type == "cuda" and float((self.network - self.before).max()) > (STAGED - 1) * self.compute_s else 1

    @property
    def name(self) -> str:
        """The strategy in a few words."""
        words = {"needed": "needed keys", "gather": "all keys"}
        keys = " or ".join(dict.fromkeys(words[kind] for kind in self.transport if kind != "none"))
        ways = [f"heads over {self.head_groups}"] * (self.head_groups > 1) + [f"{keys} over {self.groups}"] * (self.groups > 1)
        return (" x ".join(ways) or "one rank") + (f", {self.rounds} chunks" if self.rounds > 1 else "")


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2f} ms"


def head_splits(ranks: int, heads: int, kv_heads: int) -> tuple[int, ...]:
    """Numbers of ranks that heads can be split over: each computes equally many, with whole key heads or all with the same one."""

    def works(parts: int) -> bool:
        if ranks % parts or heads % parts:
            return False
        return kv_heads % parts == 0 or (parts % kv_heads == 0 and (heads // kv_heads) % (heads // parts) == 0)

    return tuple(parts for parts in range(1, min(ranks, heads) + 1) if works(parts))


# -- the choice ------------------------------------------------------------------------------------------------------


def choose(
    works: Sequence[tuple[Work, int]],
    ranks: int,
    shape: Shape,
    machine: Machine,
    *,
    strategy: Strategy = "auto",
    rounds: int | None = None,
    head_groups: int | None = None,
    sizes: Sequence[int] | None = None,
    order: Order = "dealt",
) -> Layout:
    """The layout with the least modelled time for masks with their numbers of layers: one ownership for all, from their summed work.

    `strategy`: "heads" (or "ulysses") splits heads alone; "gather" and "needed" split rows, and heads where that pays, and move all keys or only
    needed ones. `rounds` and `head_groups` fix the chunks of a row group and the ranks that share rows. `sizes` are the tokens of every rank where
    the caller owns the order; `order="contiguous"` keeps it too, with equal parts.
    """
    _check(works, ranks, shape, strategy, rounds, sizes, order)
    splits = _splits(ranks, shape, strategy, head_groups)
    transport = strategy if strategy in ("gather", "needed") else None
    kept = 1 if sizes is not None or order == "contiguous" else rounds
    with one_thread():
        found = [
            modelled(works, owners, parts, shape, machine, rounds=chunks, bound=bound, transport=transport)
            for parts in splits
            for owners, chunks, bound in _ownerships(works, ranks, parts, shape, kept, sizes)
        ]
        return _best(found)


def _best(found: Sequence[Layout]) -> Layout:
    """The fastest. No model tells times apart that are 5 % from each other: of such, what would be fastest if nothing were hidden, then with the fewest chunks.

    Those that are out of balance count only if they save more time than that.
    """
    fastest = min(layout.time_s for layout in found)
    close = [layout for layout in found if layout.time_s <= fastest * CLOSE and layout.imbalance <= BALANCED]
    close = close or [layout for layout in found if layout.time_s <= fastest * CLOSE]
    least = min(layout.time_in_turn_s for layout in close)
    best = min((layout for layout in close if layout.time_in_turn_s <= least * ALIKE), key=lambda layout: (layout.rounds, layout.time_in_turn_s))
    told = f"{best.name}: {milliseconds(best.time_s)} modelled"
    others = [layout for layout in found if (layout.head_groups, layout.transport) != (best.head_groups, best.transport)]
    if others:
        second = min(others, key=lambda layout: layout.time_s)
        alike = second.time_s <= best.time_s * ALIKE
        told += f"; {second.name} " + ("takes as long, with more bytes, chunks or imbalance" if alike else f"would take {milliseconds(second.time_s)}")
    return replace(best, reason=told)


def _check(works: Sequence[tuple[Work, int]], ranks: int, shape: Shape, strategy: str, rounds: int | None, sizes: Sequence[int] | None, order: str) -> None:
    if ranks < 1 or not works:
        raise InputError(f"a layout needs at least one rank and one mask, got {ranks} ranks and {len(works)} masks")
    length = works[0][0].length
    for work, layers in works:
        if work.length != length:
            raise InputError(f"all masks must be of one length, got {length} and {work.length}; plan other lengths apart")
        if work.heads not in (1, shape.heads):
            raise InputError(f"a mask is for {work.heads} heads and the problem has {shape.heads}; give a mask of as many heads, or one alike for all")
        if layers < 1:
            raise InputError(f"the number of layers of a mask must be at least 1, got {layers}")
    if strategy not in STRATEGIES:
        raise InputError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if order not in ("dealt", "contiguous"):
        raise InputError(f"order must be 'dealt' or 'contiguous', got {order!r}")
    if rounds is not None and rounds < 1:
        raise InputError(f"rounds must be at least 1, got {rounds}")
    if rounds not in (None, 1) and (sizes is not None or order == "contiguous"):
        raise InputError(f"tokens that stay in their order have one chunk per row group, got rounds={rounds}; leave out rounds, or the order")
    if sizes is not None and (len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != length):
        raise InputError(f"sizes must be the tokens of each of {ranks} ranks, {length} in all; got {len(sizes)} numbers, {sum(sizes)} in all: {list(sizes)}")


def _splits(ranks: int, shape: Shape, strategy: str, head_groups: int | None) -> tuple[int, ...]:
    """The numbers of ranks to split heads over that are asked for and work."""
    possible = head_splits(ranks, shape.heads, shape.kv_heads)
    given = f"{shape.heads} heads on {shape.kv_heads} key heads and {ranks} ranks"
    if head_groups is not None and head_groups not in possible:
        raise InputError(f"head_groups={head_groups} does not work for {given}; these do: {', '.join(map(str, possible))}")
    asked = possible if head_groups is None else (head_groups,)
    if strategy in ("heads", "ulysses"):
        asked = tuple(parts for parts in asked if parts == ranks)
        if not asked:
            why = (
                f"with head_groups={head_groups}" if head_groups is not None and ranks in possible else f"heads can be split over {possible[-1]} ranks at most"
            )
            raise InputError(
                f"strategy={strategy!r} splits heads over all ranks: impossible for {given}, {why}; use strategy='auto', which combines heads and rows"
            )
    elif strategy != "auto" and ranks > 1:
        asked = tuple(parts for parts in asked if parts < ranks)
        if not asked:
            raise InputError(
                f"strategy={strategy!r} needs at least two row groups, and head_groups={head_groups} leaves one for {ranks} ranks; use a smaller one"
            )
    return asked


def _ownerships(
    works: Sequence[tuple[Work, int]], ranks: int, parts: int, shape: Shape, rounds: int | None, sizes: Sequence[int] | None
) -> Iterator[tuple[Owners, int, float]]:
    """(owners, chunks per row group, bound on the loads' spread per rank) to try for a split of heads."""
    length, groups = works[0][0].length, ranks // parts
    cost = torch.stack([layers * (shape.heads // work.heads) * work.cost.sum(0) for work, layers in works]).sum(0)  # [tiles]
    if sizes is not None:
        owners = owners_in_order(sizes)
        load = torch.stack([layers * (shape.heads // work.heads) * loads(work, owners, parts) for work, layers in works]).sum(0).view(groups, parts).mean(1)
        yield owners, 1, float(load.max() - load.min())
        return
    tried = (rounds,) if rounds is not None else [k for k in ROUNDS if k == 1 or (groups > 1 and k * groups <= len(cost))]
    for k in tried:
        dealt = deal(cost, groups, k)
        yield owners_of_tiles(dealt.owner, groups, parts, length), k, dealt.bound / parts


# -- the model -------------------------------------------------------------------------------------------------------


def modelled(
    works: Sequence[tuple[Work, int]],
    owners: Owners,
    head_groups: int,
    shape: Shape,
    machine: Machine,
    *,
    rounds: int,
    bound: float,
    transport: str | None = None,
) -> Layout:
    """The layout of an ownership, with its cost; which keys travel is chosen per mask unless a `transport` is given."""
    row_groups = owners.row_groups(head_groups)
    of_heads = head_bytes(owners, head_groups, shape, machine)
    load = torch.zeros(owners.ranks, dtype=torch.float64)
    bytes_network, bytes_node = torch.zeros_like(load), torch.zeros_like(load)
    exchanges = []
    for work, layers in works:
        exchange = _exchange(work, row_groups, head_groups, shape, machine, transport)
        exchanges.append(exchange)
        load += layers * (shape.heads // work.heads) * loads(work, owners, head_groups)
        bytes_network += layers * (of_heads.network + per_rank(exchange.bytes.network, head_groups))
        bytes_node += layers * (of_heads.node + per_rank(exchange.bytes.node, head_groups))
    return Layout(
        shape,
        head_groups,
        rounds,
        owners,
        needed=tuple(exchange.needed for exchange in exchanges),
        hot=tuple(exchange.hot for exchange in exchanges),
        transport=tuple(exchange.transport for exchange in exchanges),
        loads=load,
        bound=bound,
        received_tiles=torch.stack([per_rank(exchange.received, head_groups) for exchange in exchanges]),
        sent_tiles=torch.stack([per_rank(exchange.sent, head_groups) for exchange in exchanges]),
        bytes_network=bytes_network,
        bytes_node=bytes_node,
        compute=load * shape.flops_of_tile() / machine.flops,
        network=bytes_network / machine.network,
        before=sum(layers for _, layers in works) * of_heads.network / machine.network,
        node=bytes_node / machine.node,
    )


@dataclass(frozen=True, eq=False)
class _Exchange:
    """The keys of one mask that travel between row groups [groups]."""

    transport: str
    needed: Runs
    hot: Tensor  # [tiles] bool
    received: Tensor  # tiles
    sent: Tensor  # tiles
    bytes: Moved

    def seconds(self, machine: Machine) -> float:
        return float((self.bytes.network / machine.network + self.bytes.node / machine.node).max())


def _exchange(work: Work, row_groups: Owners, head_groups: int, shape: Shape, machine: Machine, transport: str | None) -> _Exchange:
    """The keys that travel for a mask: only needed ones, with or without hot tiles, or all of them if that is what most groups need."""
    needed = needed_tiles(work, row_groups)
    groups, tiles = row_groups.ranks, work.tiles
    beside = groups_per_node(head_groups, machine)
    of_token = shape.bytes_of(kv=shape.kv_heads_of_rank(head_groups))

    def moving(kind: str, hot: Tensor) -> _Exchange:
        received, sent = key_tokens(needed, row_groups, beside, hot)
        most = Moved(*(torch.maximum(there, back).double() * of_token for there, back in zip(received, sent, strict=True)))
        return _Exchange(kind, needed, hot, (received.network + received.node) / TILE, (sent.network + sent.node) / TILE, most)

    nothing, everything = torch.zeros(tiles, dtype=torch.bool), torch.ones(tiles, dtype=torch.bool)
    if groups == 1:
        return moving("none", nothing)
    if transport == "gather":
        return moving("gather", everything)
    found = moving("needed", nothing)
    others = work.length - row_groups.held().double().mean()  # tokens that a group would receive if it received all
    if transport is None and float(found.received.mean()) * TILE > NEARLY_ALL * float(others):
        return moving("gather", everything)
    hot = copies_of(needed, tiles) > groups / 4
    if groups >= HOT_GROUPS and bool(hot.any()):
        with_hot = moving("needed", hot)
        if with_hot.seconds(machine) * ALIKE < found.seconds(machine):
            return with_hot
    return found
