"""The plan: who holds which tokens of a sequence, what travels, and what each rank computes. Made once for a mask's layout, by all ranks together."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise._version import __version__
from tilewise.core.map_cache import contents_key
from tilewise.core.places import Places
from tilewise.core.problem import check_sizes, in_memory
from tilewise.distributed.agree import DETAILS, checksum, device_of, settle
from tilewise.distributed.assign import TILE, Work, one_thread, work_of, work_of_all
from tilewise.distributed.exchange import HeadExchange, KeyExchange, gather_rows, key_exchange, start_of
from tilewise.distributed.strategy import Layout, Order, Strategy, choose
from tilewise.distributed.team import Members, Team, members_of, team_of
from tilewise.distributed.traffic import Machine, Shape
from tilewise.errors import InputError, UnsupportedError
from tilewise.lang import BoundProgram, gathered, name_of, shifted
from tilewise.tiles import Extent, Geometry, TileMap, from_call, read_mask

Masks = Any  # one mask, or {name: mask} or {name: (mask, layers)}


@dataclass(frozen=True)
class Sizes:
    """What every call under a plan has in common; batch is None where any will do."""

    batch: int | None
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int


@dataclass(frozen=True, eq=False)
class MaskPlan:
    """The part of a plan that belongs to one mask: which keys this rank fetches for it, and the mask in terms of local tokens."""

    whole: "Plan"  # without its masks: a cycle of references would keep the process group and the maps until Python looks for cycles
    name: str
    keys: KeyExchange | None  # None: all keys are here
    masks: tuple[BoundProgram | None, ...]  # of the row group's queries and the keys of each stage
    bias: Tensor | None  # what an additive mask tensor adds to the scores, of the whole sequence
    causal: bool  # no query attends to a later one
    given: Any  # the mask as the user gave it
    sources: tuple[Tensor, ...]  # that the mask loads from, as the user has them
    contents: tuple[Any, ...] | None  # what their contents were known by when the plan was made; None if they may change unseen

    def check_unchanged(self) -> None:
        """Which keys a rank needs follows from what the mask's tensors held when the plan was made."""
        if self.contents is not None and contents_key(self.sources) != self.contents:
            raise InputError(f"a tensor that mask {self.name!r} loads from has changed since the plan was made: make another plan")

    @property
    def stages(self) -> range:
        return range(1 if self.keys is None else len(self.keys.stages))

    @property
    def first_head(self) -> int:
        """Of those this rank computes."""
        return self.whole.team.head_group * (self.whole.sizes.heads // self.whole.team.head_groups)

    @cached_property
    def places(self) -> tuple[Places, ...]:
        """Of each stage, for dropout."""
        keys = [torch.arange(self.whole.length, device=self.whole.device)] if self.keys is None else [stage.positions for stage in self.keys.stages]
        return tuple([Places(self.whole.row_positions, positions, head=self.first_head) for positions in keys])

    def placed(self, call: BoundProgram | None, stage: int) -> BoundProgram | None:
        """A program of the whole sequence in terms of what this rank computes in a stage."""
        if call is None:
            return None
        call = _placed(call, "q", self.whole.row_positions, self.whole.row_start)
        if self.keys is not None:
            keys = self.keys.stages[stage]
            call = _placed(call, "kv", keys.positions, keys.start)
        return shifted(call, "h", self.first_head)

    def __repr__(self) -> str:
        return f"<mask {self.name!r} of a plan of {self.whole.length} tokens on {self.whole.ranks} ranks>"


def _placed(call: BoundProgram, name: str, positions: Tensor, start: int | None) -> BoundProgram:
    """The program with an index replaced by a position: an offset where positions follow one another, which keeps what is known of the mask's shape."""
    if not len(positions):
        return call
    return gathered(call, name, positions) if start is None else shifted(call, name, start)


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """How the ranks of a group share one sequence.

    Attributes:
        length: Tokens of the whole sequence.
        positions: Where in the sequence this rank's tokens are, sorted.
        layout: Who holds what, the strategy and its modelled cost.
    """

    length: int
    sizes: Sizes
    team: Team
    layout: Layout
    positions: Tensor
    row_positions: Tensor  # of all ranks of this row group
    row_start: int | None  # the first of these if they follow one another
    head_exchange: HeadExchange | None
    device: torch.device
    number: int  # which plan of this process: the same on every rank
    maps: tuple[TileMap | None, ...]
    masks: dict[str, MaskPlan] = field(default_factory=dict)

    @property
    def local_length(self) -> int:
        """Tokens on this rank."""
        return len(self.positions)

    @property
    def rank(self) -> int:
        """This process among those that share the sequence."""
        return self.team.rank

    @property
    def ranks(self) -> int:
        """How many processes share the sequence."""
        return self.team.ranks

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a tensor of the whole sequence."""
        _check_tokens(tensor, dim, self.length, "the plan is for")
        return tensor.index_select(dim, self.positions.to(tensor.device))

    def unshard(self, tensor: Tensor, dim: int) -> Tensor:
        """The whole sequence, on every rank, of tensors that each hold their rank's tokens. Collective.

        The gradient of a rank's tokens is that of the own copy: right for a loss that every rank computes from the whole.
        """
        whole: Tensor = _unsharded(tensor, dim, self)
        return whole

    def positions_of(self, rank: int) -> Tensor:
        """Where in the sequence the tokens of a rank are."""
        return _positions(self.layout.holdings[rank])

    def __getitem__(self, name: str) -> MaskPlan:
        """The part of one of several masks."""
        if name not in self.masks:
            raise InputError(f"the plan has no mask {name!r}; it has {', '.join([repr(n) for n in self.masks])}")
        return self.masks[name]

    @property
    def only(self) -> MaskPlan:
        """The part of the only mask."""
        if len(self.masks) != 1:
            raise InputError(f"the plan has several masks; name one: plan[{next(iter(self.masks))!r}]. It has {', '.join([repr(n) for n in self.masks])}")
        return next(iter(self.masks.values()))

    def picture(self, path: str | Path) -> Path:
        """Write a picture of who holds which tokens and computes which tiles; the name's ending (.png, .svg, .pdf) chooses the format."""
        from tilewise.distributed.picture import picture

        return picture(self.layout, _works(self.maps, self.length), path, list(self.masks))

    def __str__(self) -> str:
        from tilewise.distributed.report import describe

        return describe(self.layout, list(self.masks))

    def __repr__(self) -> str:
        return f"<plan of {self.length} tokens on {self.ranks} ranks, masks {', '.join(self.masks)}; print(plan) tells more>"


_made = 0  # the number of the last plan: the same on every rank that took part in it


def plan(
    mask: Masks,
    *,
    length: int,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    v_dim: int | None = None,
    batch: int | None = None,
    group: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    strategy: Strategy = "auto",
    order: Order = "dealt",
    shard_sizes: Sequence[int] | None = None,
    head_groups: int | None = None,
    stages: int | None = None,
    machine: Machine | None = None,
) -> Plan:
    """Share a sequence among the ranks of a group. Collective: every rank calls it with the same arguments, and all get the same plan or the same error.

    Args:
        mask: As for tilewise.attention, of the whole sequence; None for full attention. Several masks of one model: {name: mask}, or
            {name: (mask, number of layers)} to weigh their work.
        length: Tokens of the whole sequence; any number.
        heads: Query heads of the model.
        head_dim: Of queries and keys.
        kv_heads: Key heads, where there are fewer.
        v_dim: Of values, where it differs.
        batch: Needed if the mask depends on the batch element.
        group: A ProcessGroup, a DeviceMesh of one dimension, or of two (rows, heads); by default all processes.
        dtype: Of the tensors that will travel, for the modelled cost; by default bfloat16 on GPUs, float32 on CPUs.
        device: Where calls will run; by default the current GPU if the group has a backend for it, else the CPU.
        strategy: "auto", or "heads" (Ulysses), "gather" (all keys to all), "needed" (each rank fetches the keys it attends to).
        order: "dealt" balances the work; "contiguous" gives each rank one stretch of the sequence.
        shard_sizes: Tokens of each rank, in order, where a client has cut the sequence already; contiguous, any numbers.
        head_groups: Neighbouring ranks that split the heads among them; 1 shares rows alone. By default the plan chooses, or the mesh says.
        stages: 2 attends to the own keys while those of others are on their way; 1 to all at once, which is less work and gives the bits of one process.
            By default 2 on GPUs where the network is modelled to take more than 0.2 of the computation's time.
        machine: Speeds for the modelled cost.
    """
    global _made  # noqa: PLW0603  # a count
    members = members_of(group)
    draft: _Draft | None = None
    error: Exception | None = None
    try:
        if stages not in (None, 1, 2):
            raise InputError(f"stages must be 1 or 2, got {stages}")
        draft = _Draft(
            mask, members, length, Sizes(batch, heads, heads if kv_heads is None else kv_heads, head_dim, head_dim if v_dim is None else v_dim), dtype, device
        )
        layout = draft.choose(strategy, order, shard_sizes, head_groups, machine)
    except Exception as found:  # whatever it is, the other ranks must hear of it
        error = found
    facts: dict[str, Any] = {"strategy": strategy, "order": order, "shard_sizes": shard_sizes, "head_groups": head_groups, "stages": stages, "machine": machine}
    if draft is not None:
        facts |= draft.facts
    _made = settle(members.groups, {"call": "plan", "tilewise": __version__, "torch": torch.__version__, **facts}, error, _made + 1)
    assert draft is not None
    made: Plan | None = None
    try:
        made = draft.finish(layout, stages or layout.stages(draft.device.type), _made)
    except Exception as found:  # memory may run out on one rank
        error = found
    settle(members.groups, {"call": "the end of a plan"}, error)
    assert made is not None
    return made


def plan_of_rank(
    mask: Masks, rank: int, ranks: int, length: int, sizes: Sizes, device: torch.device | str, *, layout: Layout | None = None, stages: int = 1
) -> Plan:
    """The plan of one rank of many, without a process group: nothing can travel, but what the rank computes can be tested and measured."""
    draft = _Draft(mask, Members((), ranks, rank, None), length, sizes, None, device)
    return draft.finish(layout or draft.choose("auto", "dealt", None, None, None), stages, 0)


class _Draft:
    """A plan being made. Nothing here waits for another rank before `finish`."""

    def __init__(self, mask: Masks, members: Members, length: int, sizes: Sizes, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        for name, number in {"length": length, **vars(sizes)}.items():
            if name == "batch" and number is None:
                continue
            if not isinstance(number, Integral) or int(number) < 1:
                raise InputError(f"{name} must be a whole number of at least 1, got {number!r}")
        if sizes.heads % sizes.kv_heads:
            raise InputError(f"heads must be a multiple of kv_heads, got {sizes.heads} and {sizes.kv_heads}")
        self.members, self.length, self.sizes = members, length, sizes
        self.device = torch.device(device) if device is not None else _device_of(members)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise InputError(f"dtype must be one of torch's, such as torch.bfloat16, got {dtype!r}")
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        named = _named(mask)
        self.given = {name: given for name, (given, _) in named.items()}
        self.sources: dict[str, tuple[Tensor, ...]] = {}
        self.readings = {name: (self._read(name, given), layers) for name, (given, layers) in named.items()}
        self.maps = tuple([self._map(call, name) for name, ((call, _), _) in self.readings.items()])
        self.facts: dict[str, Any] = {"length": length, "sizes": sizes, "dtype": dtype, "masks": list(self.readings)}
        for name, ((call, bias), layers) in self.readings.items():
            self.facts[f"mask {name}"] = shown(self.given[name]) if layers == 1 else f"{shown(self.given[name])} in {layers} layers"
            self.facts[f"{DETAILS}mask {name}"] = f"{_text(call)}{'' if bias is None else ' + ' + checksum(bias)}"

    def _read(self, name: str, mask: Any) -> tuple[BoundProgram | None, Tensor | None]:
        s = self.sizes
        extent = Extent(s.batch or 1, s.heads, self.length, self.length)
        check_sizes([mask], extent if s.batch is not None else extent._replace(batch=_batch_of(mask)))
        reading = read_mask(mask, extent, self.device)
        if reading.tiles is not None and reading.tiles.given:
            raise UnsupportedError("a map given as tiles (or a BlockMask) cannot be shared among ranks; pass its mask function instead")
        self.sources[name] = () if reading.call is None else reading.call.captures
        call = in_memory(reading.call, self.device)
        if call is not None and "b" in call.program.uses and s.batch is None:
            raise InputError("the mask depends on the batch element: pass batch=")
        return call, reading.bias

    def _map(self, call: BoundProgram | None, name: str) -> TileMap | None:
        if call is None:
            return None
        s = self.sizes
        return from_call(call, Geometry(s.batch or 1, s.heads, self.length, self.length, (TILE, TILE)), name, self.device)

    def choose(self, strategy: Strategy, order: Order, shard_sizes: Sequence[int] | None, head_groups: int | None, machine: Machine | None) -> Layout:
        s, m = self.sizes, self.members
        if m.head_groups is not None and head_groups not in (None, m.head_groups):
            raise InputError(f"head_groups={head_groups}, but the mesh has {m.head_groups} ranks in its last dimension")
        if shard_sizes is not None and not _sums_to(shard_sizes, m.ranks, self.length):
            raise InputError(f"shard_sizes must be {m.ranks} whole numbers, none of them negative, that sum to {self.length}, got {shard_sizes!r}")
        if machine is not None and not isinstance(machine, Machine):
            raise InputError(f"machine must be a tilewise.distributed.Machine, got {machine!r}")
        works = list(zip(_works(self.maps, self.length), [layers for _, layers in self.readings.values()], strict=True))
        shape = Shape(s.batch or 1, s.heads, s.kv_heads, s.head_dim, s.v_dim, self.dtype.itemsize)
        speeds = machine or Machine.of(self.device.type)
        return choose(works, m.ranks, shape, speeds, strategy=strategy, order=order, sizes=shard_sizes, head_groups=m.head_groups or head_groups)

    def finish(self, layout: Layout, stages: int, number: int) -> Plan:
        with one_thread():  # many small operations: waking threads for each would take longer
            return self._finished(layout, stages, number)

    def _finished(self, layout: Layout, stages: int, number: int) -> Plan:
        team = team_of(self.members, layout.head_groups)
        held = [_positions(rows) for rows in layout.rows]
        heads = None
        if team.head_groups > 1:
            lengths = [_count(layout.holdings[team.row * team.head_groups + u]) for u in range(team.head_groups)]
            heads = HeadExchange(team.heads, tuple(lengths), team.head_group)
        own = _positions(layout.holdings[team.rank]).to(self.device)
        bare = Plan(self.length, self.sizes, team, layout, own, held[team.row].to(self.device), start_of(held[team.row]), heads, self.device, number, self.maps)
        masks: dict[str, MaskPlan] = {}
        for k, (name, ((call, bias), _)) in enumerate(self.readings.items()):
            keys = None
            if team.row_groups > 1:
                gathers = layout.transport[k] == "gather"
                keys = key_exchange(team.rows, team.row, held, layout.needs[k].cpu(), layout.hot[k].cpu(), gathers, TILE, stages).to(self.device)
            sources = self.sources[name]
            part = MaskPlan(bare, name, keys, (), bias, _is_causal(self.maps[k]), self.given[name], sources, contents_key(sources))
            masks[name] = replace(part, masks=tuple([part.placed(call, stage) for stage in part.stages]))
        return replace(bare, masks=masks)


def _named(mask: Masks) -> dict[str, tuple[Any, int]]:
    if not isinstance(mask, Mapping):
        return {"mask": (mask, 1)}
    if not mask:
        raise InputError("a plan needs at least one mask, got {}; None is full attention")
    for name, given in mask.items():
        if isinstance(given, tuple) and not (len(given) == 2 and isinstance(given[1], Integral) and int(given[1]) >= 1):
            raise InputError(f"mask {name!r} must be a mask, or a pair of a mask and its number of layers, got {given!r}")
    return {str(name): given if isinstance(given, tuple) else (given, 1) for name, given in mask.items()}


def _sums_to(sizes: Any, ranks: int, length: int) -> bool:
    """Whether these are a whole number for each rank that make up the sequence."""
    try:
        numbers = [operator.index(n) for n in sizes]
    except TypeError:
        return False
    return len(numbers) == ranks and min(numbers) >= 0 and sum(numbers) == length


def _batch_of(mask: Any) -> int:
    """How many batch elements a mask of the library is made for; 1 where it does not matter."""
    return next((c.size for c in getattr(mask, "covers", ()) if c.axis == "b"), 1)


def _device_of(members: Members) -> torch.device:
    config = dist.get_backend_config(members.groups[0])
    if "cuda:" in config and "cuda:gloo" not in config and torch.cuda.is_available():  # gloo takes a few GPU tensors, and not these
        return torch.device("cuda", torch.cuda.current_device())
    return device_of(members.groups[0])


def shown(given: Any) -> str:
    """A mask or score as messages call it."""
    if given is None:
        return "none"
    if isinstance(given, Tensor):
        return f"a tensor of {given.dtype} {tuple(given.shape)}"
    return str(getattr(given, "name", "") or name_of(given).strip("'"))


def _check_tokens(tensor: Any, dim: int, tokens: int, whose: str) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"a tensor is needed, got {type(tensor).__name__}")
    if not -tensor.dim() <= dim < tensor.dim():
        raise InputError(f"dimension {dim} of a tensor of {tensor.dim()} dimensions, {tuple(tensor.shape)}, does not exist; which holds the tokens?")
    if tensor.shape[dim] != tokens:
        raise InputError(f"dimension {dim} of shape {tuple(tensor.shape)} has {tensor.shape[dim]} tokens; {whose} {tokens}")


def _text(call: BoundProgram | None) -> str:
    if call is None:
        return "none"
    return f"{call.program.text} {list(call.ints)} {list(call.floats)} {[checksum(t) for t in call.captures]}"


def _works(maps: Sequence[TileMap | None], length: int) -> list[Work]:
    return [work_of_all(length) if tiles is None else work_of(tiles) for tiles in maps]


def _is_causal(tiles: TileMap | None) -> bool:
    """Whether no query attends to a later one, as far as tiles can tell: those right of the diagonal are empty, and none on it is full."""
    if tiles is None or bool((tiles.full.start + tiles.full.count - 1 >= tiles.full.row_of_run() % tiles.geometry.q_tiles).any()):
        return False
    row = torch.cat([tiles.partial.row_of_run(), tiles.full.row_of_run()]) % tiles.geometry.q_tiles
    last = torch.cat([tiles.partial.start + tiles.partial.count, tiles.full.start + tiles.full.count]) - 1
    return bool((last <= row).all())


def _positions(ranges: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([torch.arange(a, b) for a, b in ranges]) if ranges else torch.empty(0, dtype=torch.int64)


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    return sum([b - a for a, b in ranges])


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it is not typed
def _unsharded(tensor: Tensor, dim: int, plan: Plan) -> Tensor:
    facts: dict[str, object] = {"call": f"unshard under plan {plan.number}"}
    error: Exception | None = None
    try:
        _check_tokens(tensor, dim, plan.local_length, "this rank holds")
        facts["dtype"] = tensor.dtype
        facts["shape"] = [size if at != dim % tensor.dim() else "tokens" for at, size in enumerate(tensor.shape)]
    except Exception as found:  # whatever it is, the other ranks must hear of it
        error = found
    settle(plan.team.everyone, facts, error)
    whole: Tensor = _Unshard.apply(tensor, dim % tensor.dim(), plan)
    return whole


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, plan: Plan) -> Tensor:
        ctx.dim, ctx.plan = dim, plan
        team, lengths = plan.team, [_count(held) for held in plan.layout.holdings]
        rows = tensor.movedim(dim, 0)
        if len(team.everyone) == 1:
            steps = [lengths]
        else:  # of a mesh: those of a row group, then all row groups
            u = team.head_groups
            steps = [lengths[team.row * u : (team.row + 1) * u], [sum(lengths[r * u : (r + 1) * u]) for r in range(team.row_groups)]]
        for group, sizes in zip(team.everyone, steps, strict=True):
            rows = gather_rows(rows, sizes, group).wait()
        where = torch.cat([plan.positions_of(r) for r in range(plan.ranks)]).to(rows.device)
        whole = torch.empty_like(rows).index_copy_(0, where, rows)
        return whole.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.plan.shard(grad, ctx.dim), None, None
