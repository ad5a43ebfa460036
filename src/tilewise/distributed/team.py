"""The ranks that share a sequence: process groups along heads and along rows.

Rank p = row * head_groups + head_group: the ranks of one row group are neighbours and share its tokens, each with some of the heads.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tilewise.distributed.agree import Groups
from tilewise.errors import InputError, MisuseError


@dataclass(frozen=True)
class Members:
    """What a user named as the group: all ranks of it, and how many of them share heads if a mesh of two dimensions says so."""

    groups: Groups  # that together reach every rank, the innermost first
    ranks: int
    rank: int
    head_groups: int | None  # None: the plan chooses


class GroupHandle:
    """A process group that is not kept alive by who holds this: destroy_process_group has to end its threads before Python ends, or they end the process."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = ref(group)

    def __call__(self) -> ProcessGroup:
        group = self._group()
        if group is None:
            raise MisuseError("the process group of this plan has been destroyed; make another plan")
        return group


@dataclass(frozen=True)
class Team:
    """The groups that exchange along each dimension; None along one of a single rank."""

    handles: tuple[GroupHandle, ...]  # of `everyone`
    ranks: int
    rank: int
    head_groups: int
    heads: GroupHandle | None  # the ranks of this row group
    rows: GroupHandle | None  # the ranks with the same heads in every row group

    @property
    def everyone(self) -> Groups:
        """The groups that together reach every rank, the innermost first."""
        return tuple([handle() for handle in self.handles])

    @property
    def row_groups(self) -> int:
        return self.ranks // self.head_groups

    @property
    def row(self) -> int:
        return self.rank // self.head_groups

    @property
    def head_group(self) -> int:
        return self.rank % self.head_groups


def members_of(group: Any) -> Members:
    """`group`: a ProcessGroup, a DeviceMesh of one dimension, of two (rows, heads: the last is the one inside a node), or None for all processes."""
    if not dist.is_available() or not dist.is_initialized():
        raise InputError("torch.distributed is not initialised: start the processes with torchrun and call torch.distributed.init_process_group first")
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, ProcessGroup):
        return Members((group,), dist.get_world_size(group), dist.get_rank(group), None)
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim == 1:
            return members_of(group.get_group())
        if group.ndim == 2:
            rows, heads = group.get_group(0), group.get_group(1)
            count = dist.get_world_size(heads)
            return Members((heads, rows), dist.get_world_size(rows) * count, dist.get_rank(rows) * count + dist.get_rank(heads), count)
        raise InputError(f"a mesh of one dimension, or of two (rows, heads), can share a sequence, got {group.ndim} dimensions; name one: mesh['cp']")
    raise InputError(f"group must be a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")


# Subgroups of a group, by the number of head groups. The key covers all: which ranks are in a subgroup follows from these two. torch keeps them until they are
# destroyed, and this goes with their group.
_subgroups: WeakKeyDictionary[ProcessGroup, dict[int, tuple[GroupHandle, GroupHandle]]] = WeakKeyDictionary()


def team_of(members: Members, head_groups: int) -> Team:
    """The groups for a number of head groups. Collective where they have to be made."""
    m = members
    handles = tuple([GroupHandle(group) for group in m.groups])
    heads: GroupHandle | None
    rows: GroupHandle | None
    if not handles:  # a rank that is only looked at
        heads = rows = None
    elif m.head_groups is not None:
        heads, rows = handles
    elif head_groups in (1, m.ranks):
        heads = rows = handles[0]
    else:
        made = _subgroups.setdefault(m.groups[0], {})
        if head_groups not in made:
            made[head_groups] = _made_groups(m, head_groups)
        heads, rows = made[head_groups]
    return Team(handles, m.ranks, m.rank, head_groups, heads if head_groups > 1 else None, rows if head_groups < m.ranks else None)


def _made_groups(members: Members, head_groups: int) -> tuple[GroupHandle, GroupHandle]:
    everyone = dist.get_process_group_ranks(members.groups[0])
    row, place = divmod(members.rank, head_groups)
    neighbours, others = everyone[row * head_groups : (row + 1) * head_groups], everyone[place::head_groups]
    # Only their members make them: the processes outside `group` know nothing of it.
    heads, rows = [GroupHandle(dist.new_group(ranks, use_local_synchronization=True)) for ranks in (neighbours, others)]
    return heads, rows
