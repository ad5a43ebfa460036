"""What travels between ranks for an assignment, in tokens and bytes, over the network and inside a node."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.distributed.assign import TILE, Owners, is_needed, tiles_of
from tilewise.errors import InputError
from tilewise.tiles import Runs


@dataclass(frozen=True)
class Machine:
    """What modelled times are made of. Never measured: all ranks must come to the same plan."""

    flops: float  # of a rank's kernels, in a forward pass, per second
    network: float  # bytes per second and rank, between nodes
    node: float  # bytes per second and rank, inside a node
    ranks_per_node: int

    def __post_init__(self) -> None:
        if min(self.flops, self.network, self.node, self.ranks_per_node) <= 0:
            raise InputError(f"the numbers of a Machine must be above 0, got {self}")

    @staticmethod
    def of(device_type: str) -> "Machine":
        """A usual one: "cuda" is a Hopper node of 8 GPUs with NVLink and a network of 400 Gbit/s per GPU; all else is taken for a CPU."""
        return MACHINES.get(device_type, MACHINES["cpu"])


MACHINES = {"cuda": Machine(flops=540e12, network=45e9, node=360e9, ranks_per_node=8), "cpu": Machine(flops=0.5e12, network=1e9, node=5e9, ranks_per_node=8)}


@dataclass(frozen=True)
class Shape:
    """The tensors of one attention call over the whole sequence."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    element_size: int  # bytes

    def __post_init__(self) -> None:
        if min(self.batch, self.heads, self.kv_heads, self.head_dim, self.v_dim, self.element_size) < 1:
            raise InputError(f"sizes must be at least 1, got {self}")
        if self.heads % self.kv_heads:
            raise InputError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")

    def kv_heads_of_rank(self, head_groups: int) -> int:
        """Key heads that a rank computes with; where ranks outnumber them, several have the same one."""
        return max(1, self.kv_heads // head_groups)

    def bytes_of(self, q: int = 0, kv: int = 0, out: int = 0) -> int:
        """Of one token with so many heads of queries, of keys and values, of outputs."""
        return self.batch * self.element_size * (q * self.head_dim + kv * (self.head_dim + self.v_dim) + out * self.v_dim)

    def flops_of_tile(self) -> int:
        """Of a full tile of one head, all batch elements, forward: two products, a multiply and an add for each pair and feature."""
        return self.batch * TILE * TILE * 2 * (self.head_dim + self.v_dim)


class Moved(NamedTuple):
    """What every sender or receiver moves [ranks or row groups]: between nodes, and inside them."""

    network: Tensor
    node: Tensor


def per_rank(of_groups: Tensor, head_groups: int) -> Tensor:
    """[ranks] what is said of row groups, for each of their ranks."""
    return of_groups[:, None].expand(-1, head_groups).flatten()


# -- rows: key tiles between row groups ------------------------------------------------------------------------------


def copies_of(needed: Runs, tiles: int) -> Tensor:
    """[tiles] how many row groups need each key tile."""
    steps = torch.zeros(tiles + 1, dtype=torch.int64)
    ones = torch.ones(len(needed.start), dtype=torch.int64)
    steps.index_add_(0, needed.start.long(), ones).index_add_(0, (needed.start + needed.count).long(), -ones)
    return steps.cumsum(0)[:tiles]


def groups_per_node(head_groups: int, machine: Machine) -> int:
    """Row groups that lie in one node together; a group that does not fit into nodes evenly is taken to have no other beside it."""
    return machine.ranks_per_node // head_groups if machine.ranks_per_node % head_groups == 0 else 1


def key_tokens(needed: Runs, row_groups: Owners, beside: int, hot: Tensor) -> tuple[Moved, Moved]:
    """(received, sent) key tokens of every row group, where `beside` consecutive groups share a node.

    Tiles go to the groups that need them, one copy to each; `hot` [tiles] ones go to all groups, and their owner sends them once.
    """
    groups, tiles = row_groups.ranks, tiles_of(row_groups.length)
    tile, tokens, owner = row_groups.tile, row_groups.tokens, row_groups.rank
    neighbours = (owner // beside * beside)[:, None] + torch.arange(beside)  # [pieces, beside]: groups of the owner's node
    goes = (is_needed(needed, neighbours, tile[:, None], tiles) | hot[tile][:, None]) & (neighbours < groups)
    stays = (goes & (neighbours == owner[:, None])).any(1)  # needed where it lies
    goes &= neighbours != owner[:, None]
    # Received: all that is needed or hot, without what lies there already.
    of_tile = torch.zeros(tiles, dtype=torch.int64).index_add_(0, tile, tokens)
    before = torch.nn.functional.pad((of_tile * ~hot).cumsum(0), (1, 0))  # [tiles + 1] cold tokens before each tile
    of_run = before[(needed.start + needed.count).long()] - before[needed.start.long()]
    total = _added(of_run, needed.row_of_run(), groups) + (of_tile * hot).sum() - _added(tokens * stays, owner, groups)
    inside = _added((tokens[:, None] * goes).flatten(), neighbours.clamp(max=groups - 1).flatten(), groups)
    # Sent: a copy for every group that needs it and does not hold it.
    cold = ~hot[tile]
    copies = copies_of(needed, tiles)[tile] - stays.long()
    sent_inside = _added(tokens * cold * goes.sum(1), owner, groups)
    once = _added(tokens * ~cold, owner, groups) if groups > 1 else torch.zeros(groups, dtype=torch.int64)
    sent_outside = _added(tokens * cold * copies, owner, groups) - sent_inside
    if groups > beside:
        sent_outside = sent_outside + once
    else:
        sent_inside = sent_inside + once
    return Moved(total - inside, inside), Moved(sent_outside, sent_inside)


def _added(values: Tensor, at: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=values.dtype).index_add_(0, at, values)


# -- heads: queries, keys, values and outputs between the ranks of a row group ----------------------------------------


def head_bytes(owners: Owners, head_groups: int, shape: Shape, machine: Machine) -> Moved:
    """Bytes that a rank sends or receives, whichever are more, so that each of `head_groups` neighbours gets its heads of all their tokens, and back."""
    if head_groups == 1:
        return Moved(torch.zeros(owners.ranks), torch.zeros(owners.ranks))
    own = owners.held()
    others = per_rank(owners.row_groups(head_groups).held(), head_groups) - own
    heads = shape.heads // head_groups
    there = shape.bytes_of(q=heads, kv=shape.kv_heads_of_rank(head_groups))  # of a token, to one rank
    back = shape.bytes_of(out=heads)
    moved = torch.maximum(others * there + own * (head_groups - 1) * back, own * (head_groups - 1) * there + others * back)
    rank = torch.arange(owners.ranks)
    first = torch.maximum(rank // head_groups * head_groups, rank // machine.ranks_per_node * machine.ranks_per_node)
    last = torch.minimum((rank // head_groups + 1) * head_groups, (rank // machine.ranks_per_node + 1) * machine.ranks_per_node)
    inside = moved.double() * (last - first - 1) / (head_groups - 1)  # the share of its peers that are in the rank's node
    return Moved(moved - inside, inside)
