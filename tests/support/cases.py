"""The cases every engine is tested over: named data, the same for every engine, dtype and device.

A case is drawn from its name alone, so three computations see the same numbers: the engine under test and plain torch in
the case's dtype, and the reference in fp64 (`Draw.computed`). Masks and scores come from factories that take a `Draw`;
a mask also comes as a dense tensor made by plain torch, so that nothing of tilewise's own reading of masks is taken on trust.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import tilewise as tw
from tilewise import masks, scores
from tilewise.tiles import Geometry
from tilewise.tiles.runs import from_dense

LOW, SINGLE, DOUBLE = (torch.float16, torch.bfloat16), (torch.float32,), (torch.float64,)
DTYPES = LOW + SINGLE + DOUBLE


class Masking(NamedTuple):
    """A mask as the user gives it; what it allows, densely; and what it adds to the scores."""

    given: Any
    allowed: Tensor | None = None
    bias: Tensor | None = None
    offsets: Tensor | None = None  # where packed sequences begin; the call then is varlen_attention's


@dataclass(frozen=True, eq=False)
class Case:
    """What is asked of attention(). Sizes are those of (batch, heads, sequence, head dim), whatever the layout."""

    name: str
    batch: int = 2
    heads: int = 2
    kv_heads: int | None = None
    kv_batch: int | None = None
    q_len: int = 37
    kv_len: int | None = None
    head_dim: int = 16
    v_dim: int | None = None
    layout: str = "bhsd"  # or "flat": (batch, sequence, heads * head dim)
    strides: str = "contiguous"
    grad_strides: str = "contiguous"
    mask: "Callable[[Draw], Masking] | None" = None
    score: "Callable[[Draw], list[Any]] | None" = None
    options: Mapping[str, Any] = field(default_factory=dict)  # scale, is_causal, dropout_p, seed
    through: tuple[str, ...] = ("out",)  # what the gradient comes from: out, lse
    dtypes: tuple[torch.dtype, ...] = DTYPES
    native: bool = False  # torch's SDPA can express it

    @property
    def kv(self) -> tuple[int, int, int]:
        """Batch, heads and length of the keys."""
        sizes = ((self.kv_batch, self.batch), (self.kv_heads, self.heads), (self.kv_len, self.q_len))
        batch, heads, length = (default if given is None else given for given, default in sizes)
        return batch, heads, length

    @property
    def values(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def returns_lse(self) -> bool:
        return "lse" in self.through

    def __str__(self) -> str:
        return self.name


class Draw:
    """Random numbers of one case: rounded to `stored`, then computed with in `computed`. Where that is float64, for the truth, captures that have dtypes
    of their own are float64 too, unless the draw is `typed`."""

    def __init__(self, case: Case, stored: torch.dtype, computed: torch.dtype, device: str, seed: int = 0, typed: bool = False) -> None:
        self.case, self.stored, self.computed, self.device, self.typed = case, stored, computed, device, typed
        self.generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()) + seed)
        self.leaves: dict[str, Tensor] = {}

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """`dtype` where it is not the case's own."""
        stored = self.stored if dtype is None else dtype
        computed = self.computed if dtype is None or (self.computed == torch.float64 and not self.typed) else dtype
        return torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu").to(stored).to(computed).to(self.device)

    def learned(self, *shape: int, dtype: torch.dtype | None = None, size: float = 1.0) -> Tensor:
        leaf = (self.normal(*shape, dtype=dtype) * size).detach().requires_grad_()
        self.leaves[f"capture {len(self.leaves)}"] = leaf
        return leaf

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator, device="cpu").to(self.device)

    def number(self, low: int, high: int) -> int:
        """One Python number from low to high."""
        return int(torch.randint(low, high + 1, (), generator=self.generator, device="cpu"))

    def coins(self, *shape: int, chance: float = 0.6) -> Tensor:
        return (torch.rand(shape, generator=self.generator, device="cpu") < chance).to(self.device)

    def tensor(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def indices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """b, h, q, kv as tensors that broadcast to (batch, heads, queries, keys)."""
        sizes = (self.case.batch, self.case.heads, self.case.q_len, self.case.kv[2])
        b, h, q, kv = (torch.arange(n, device=self.device).view([-1 if d == axis else 1 for d in range(4)]) for axis, n in enumerate(sizes))
        return b, h, q, kv


# -- inputs ----------------------------------------------------------------------------------------------------------


class View(NamedTuple):
    """How a tensor lies in memory: the shape of the tensor that is really stored, and the view of it that is passed."""

    stored: Callable[[list[int]], list[int]]
    view: Callable[[Tensor, list[int]], Tensor]


STRIDES = {
    "contiguous": View(lambda s: s, lambda t, s: t),
    "last stride not 1": View(lambda s: [*s[:-2], s[-1], s[-2]], lambda t, s: t.transpose(-1, -2)),
    "reversed": View(lambda s: s[::-1], lambda t, s: t.permute(*range(t.dim() - 1, -1, -1))),
    "sliced": View(lambda s: [*s[:-2], s[-2] + 3, s[-1] + 3], lambda t, s: t[..., 1 : s[-2] + 1, 1 : s[-1] + 1]),
    "every other": View(lambda s: [*s[:-2], 2 * s[-2], 2 * s[-1]], lambda t, s: t[..., ::2, 1::2]),
    "expanded": View(lambda s: [1, 1, *s[2:]], lambda t, s: t.expand(s)),
    "one number": View(lambda s: [1] * len(s), lambda t, s: t.expand(s)),
}


def shape_in(layout: str, batch: int, heads: int, length: int, dim: int) -> list[int]:
    if layout == "flat":
        return [batch, length, heads * dim]
    sizes = {"b": batch, "h": heads, "s": length, "d": dim}
    return [sizes[letter] for letter in layout]


def to_bhsd(tensor: Tensor, layout: str, heads: int) -> Tensor:
    if layout == "flat":
        return tensor.unflatten(2, (heads, -1)).transpose(1, 2) if tensor.numel() else tensor.view(tensor.shape[0], heads, 0, tensor.shape[2] // heads)
    return tensor.permute([layout.index(letter) for letter in "bhsd"])


@dataclass
class Inputs:
    """One call, drawn: tensors in the user's layout, and everything a gradient is asked for."""

    draw: Draw
    query: Tensor
    key: Tensor
    value: Tensor
    masking: Masking
    scores: list[Any]
    grad_out: Tensor  # (batch, heads, queries, V's head dim)
    grad_lse: Tensor
    leaves: dict[str, Tensor]

    @property
    def bhsd(self) -> tuple[Tensor, Tensor, Tensor]:
        case = self.draw.case
        return to_bhsd(self.query, case.layout, case.heads), to_bhsd(self.key, case.layout, case.kv[1]), to_bhsd(self.value, case.layout, case.kv[1])

    def arguments(self) -> dict[str, Any]:
        """What attention() gets besides the tensors and the backend."""
        case = self.draw.case
        options = dict(case.options)
        options |= {"layout": "bhsd", "heads": case.heads} if case.layout == "flat" else {"layout": case.layout}
        return options | {"mask": self.masking.given, "score": self.scores or None, "enable_gqa": case.kv[1] != case.heads, "return_lse": case.returns_lse}


def make(case: Case, stored: torch.dtype, computed: torch.dtype, device: str = "cpu", seed: int = 0, typed: bool = False) -> Inputs:
    draw = Draw(case, stored, computed, device, seed, typed)
    view = STRIDES[case.strides]
    kv_batch, kv_heads, kv_len = case.kv
    tensors: list[Tensor] = []
    for name, sizes in (
        ("query", (case.batch, case.heads, case.q_len, case.head_dim)),
        ("key", (kv_batch, kv_heads, kv_len, case.head_dim)),
        ("value", (kv_batch, kv_heads, kv_len, case.values)),
    ):
        shape = shape_in(case.layout, *sizes)
        draw.leaves[name] = draw.normal(*view.stored(shape)).requires_grad_()
        tensors.append(view.view(draw.leaves[name], shape))
    out_shape = [case.batch, case.heads, case.q_len, case.values]
    grad_view = STRIDES[case.grad_strides]
    grad_out = grad_view.view(draw.normal(*grad_view.stored(out_shape)), out_shape)
    grad_lse = draw.normal(*out_shape[:3], dtype=torch.float64 if stored == torch.float64 else torch.float32)
    with torch.device(device):  # plain PyTorch wants what a mask or score captures beside the indices; an engine would move it there
        masking = Masking(None) if case.mask is None else case.mask(draw)
        score = [] if case.score is None else case.score(draw)
    return Inputs(draw, tensors[0], tensors[1], tensors[2], masking, score, grad_out, grad_lse, draw.leaves)


# -- masks -----------------------------------------------------------------------------------------------------------


def function(f: Callable[..., Any]) -> Callable[[Draw], Masking]:
    """A mask that needs nothing drawn."""
    return lambda draw: by_function(draw, f)


def made(f: Callable[[Draw], Any]) -> Callable[[Draw], Masking]:
    """A mask function or a Mask made from what is drawn."""
    return lambda draw: by_function(draw, f(draw))


def by_function(draw: Draw, f: Callable[..., Any], given: Any = None) -> Masking:
    return Masking(f if given is None else given, torch.as_tensor(f(*draw.indices()), device=draw.device))


def dense(*dims: str, chance: float = 0.6) -> Callable[[Draw], Masking]:
    """A boolean tensor; dims are "b", "h", "q", "kv" or "1"."""

    def draw_mask(draw: Draw) -> Masking:
        given = draw.coins(*sizes_of(draw, dims), chance=chance)
        return Masking(given, given[:, None, None, :] if dims == ("b", "kv") else given)

    return draw_mask


def sizes_of(draw: Draw, dims: tuple[str, ...]) -> list[int]:
    case = draw.case
    sizes = {"b": case.batch, "h": case.heads, "q": case.q_len, "kv": case.kv[2], "1": 1}
    return [sizes[d] for d in dims]


def additive(*dims: str, blocked: float | None = None, rows: bool = False, learned: bool = False) -> Callable[[Draw], Masking]:
    """A float tensor that is added; `blocked` (-inf, -10000) in a third of the places, and in whole rows."""

    def draw_mask(draw: Draw) -> Masking:
        shape = sizes_of(draw, dims)
        given = draw.learned(*shape) if learned else draw.normal(*shape)
        if blocked is not None:
            where = draw.coins(*shape, chance=0.33)
            if rows:
                where[..., ::5, :] = True
            given = torch.where(where, blocked, given)
        return Masking(given, None, given[:, None, None, :] if dims == ("b", "kv") else given)

    return draw_mask


def mapped(f: Callable[..., Any], tile: tuple[int, int]) -> Callable[[Draw], Masking]:
    """A TileMap made from a mask."""

    def build(draw: Draw) -> Masking:
        case = draw.case
        given = tw.tile_map(f, batch=case.batch, heads=case.heads, q_len=case.q_len, kv_len=case.kv[2], tile=tile, device=draw.device)
        return by_function(draw, f, given)

    return build


def bare_tiles(tile: tuple[int, int], *, by_batch: bool = False, by_head: bool = False, inside: Callable[..., Any] | None = None) -> Callable[[Draw], Masking]:
    """A TileMap given as tiles chosen at random; a mask decides inside the partial ones, if there is one."""

    def build(draw: Draw) -> Masking:
        case = draw.case
        geometry = Geometry(case.batch if by_batch else 1, case.heads if by_head else 1, case.q_len, case.kv[2], tile)
        shape = (geometry.batch, geometry.heads, geometry.q_tiles, geometry.kv_tiles)
        full = draw.coins(*shape, chance=0.4)
        partial = ~full & draw.coins(*shape, chance=0.5) if inside is not None else torch.zeros_like(full)
        runs = [from_dense(t.flatten(0, 2)) for t in (partial, full)]
        call = None if inside is None else masks.as_mask(inside).traced()

        def spread(t: Tensor) -> Tensor:
            return t.repeat_interleave(tile[0], 2).repeat_interleave(tile[1], 3)[:, :, : case.q_len, : case.kv[2]]

        allowed = spread(full)
        if inside is not None:
            allowed = allowed | (spread(partial) & inside(*draw.indices()))
        return Masking(tw.TileMap(geometry, runs[0], runs[1], call, given=True), allowed)

    return build


def block_mask(f: Callable[..., Any], block: int | tuple[int, int], *, batch: bool = False, heads: bool = False) -> Callable[[Draw], Masking]:
    """torch's own BlockMask."""

    def build(draw: Draw) -> Masking:
        case = draw.case
        given = create_block_mask(f, case.batch if batch else None, case.heads if heads else None, case.q_len, case.kv[2], device=draw.device, BLOCK_SIZE=block)
        return by_function(draw, f, given)

    return build


def packed_sequences(draw: Draw) -> Masking:
    """Sequences of random lengths, some of them empty, packed end to end."""
    tokens = draw.case.q_len
    cuts = torch.sort(draw.integers(tokens + 1, 4)).values
    offsets = torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), tokens)]).int()
    ids = torch.searchsorted(offsets, torch.arange(tokens, device=draw.device), right=True)
    return by_function(draw, lambda b, h, q, kv: ids[q] == ids[kv])._replace(offsets=offsets)


def document_ids(draw: Draw, length: int, *lead: int) -> Tensor:
    """Sorted ids: documents of random lengths, packed."""
    return torch.sort(draw.integers(4, *lead, length), -1).values


def random_blocks(draw: Draw) -> Callable[..., Any]:
    """A mask that looks up which blocks of 10 tokens see each other."""
    seen = draw.coins(15, 15, chance=0.3)
    return lambda b, h, q, kv: seen[q // 10, kv // 10] | (q == kv)


def within(reach: Tensor) -> Callable[..., Any]:
    return lambda b, h, q, kv: (q - kv).abs() <= reach


def per_head(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv).abs() <= h * 20 + 2


def some_rows_nothing(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q % 3 != 0) & (q >= kv)


# -- scores ----------------------------------------------------------------------------------------------------------


def slopes(draw: Draw) -> Any:
    return scores.alibi(draw.learned(draw.case.heads, size=0.0625))


def halved(draw: Draw) -> list[Any]:
    table = draw.learned(draw.case.heads, draw.case.q_len)
    return [lambda s, b, h, q, kv: (s * 3.0 + table[h, q - kv]) / 2.0]


def several_loads(draw: Draw) -> list[Any]:
    table = draw.learned(64)
    return [lambda s, b, h, q, kv: s + table[q % 64] - 0.5 * table[kv % 64] * table[(q + kv) % 64]]


def by_load(draw: Draw) -> list[Any]:
    where, table = draw.integers(7, draw.case.q_len), draw.learned(7)
    return [lambda s, b, h, q, kv: s + table[where[q]]]


def zero_dim(draw: Draw) -> list[Any]:
    gain = draw.learned()
    return [lambda s, b, h, q, kv: s * gain + gain]


def two_tables(draw: Draw) -> list[Any]:
    rows, columns = draw.learned(draw.case.heads, draw.case.q_len), draw.learned(draw.case.kv[2])
    return [lambda s, b, h, q, kv: s + rows[h, q], lambda s, b, h, q, kv: s + columns[kv] * 0.5]


def batch_and_head(draw: Draw) -> list[Any]:
    table = draw.learned(draw.case.batch, draw.case.heads)
    return [lambda s, b, h, q, kv: s * torch.sigmoid(table[b, h])]


def negative_index(draw: Draw) -> list[Any]:
    table = draw.learned(2 * draw.case.q_len)
    return [lambda s, b, h, q, kv: s + table[q - kv]]


def reused(draw: Draw) -> list[Any]:
    table = draw.learned(draw.case.heads, 9)
    return [scores.relative_bias(table), lambda s, b, h, q, kv: s + table[h, 4] * (q - kv) / 50.0]


def ignores_score(draw: Draw) -> list[Any]:
    table = draw.learned(draw.case.heads)
    return [lambda s, b, h, q, kv: -((q - kv) ** 2) * 0.0005 * table[h]]


def in_float32(draw: Draw) -> list[Any]:
    table = draw.learned(draw.case.heads, draw.case.kv[2], dtype=torch.float32)
    return [lambda s, b, h, q, kv: s + table[h, kv]]


def frozen(draw: Draw) -> list[Any]:
    table = draw.normal(draw.case.heads, draw.case.q_len)
    return [lambda s, b, h, q, kv: s + table[h, q]]


def forbids(draw: Draw) -> list[Any]:
    """A score may also forbid, by -inf."""
    return [lambda s, b, h, q, kv: torch.where((q + kv) % 3 == 0, -float("inf"), s)]


def sinks(draw: Draw) -> list[Any]:
    return [scores.sinks(draw.learned(draw.case.heads))]


def no_sink_in_a_head(draw: Draw) -> list[Any]:
    logits = draw.learned(draw.case.heads)
    with torch.no_grad():
        logits[0] = -float("inf")
    return [scores.sinks(logits)]


def t5(draw: Draw) -> list[Any]:
    return [scores.relative_bias(draw.learned(16, draw.case.heads), buckets="t5", max_distance=40)]


# -- the list --------------------------------------------------------------------------------------------------------

LONG = {"q_len": 150, "head_dim": 8, "batch": 1}  # two tiles of the blocked engine
CAUSAL, WINDOW = function(masks.causal), function(masks.sliding_window(16))

LAYOUTS = [
    Case("layout bhsd", native=True),
    Case("layout bshd", layout="bshd", native=True),
    Case("layout hbsd", layout="hbsd", native=True),
    Case("layout sbhd", layout="sbhd", native=True),
    Case("layout flat", layout="flat", native=True),
    Case("layout flat, gqa, other V", layout="flat", heads=4, kv_heads=2, v_dim=8, mask=CAUSAL, native=True),
    Case("layout sbhd, gqa, other V", layout="sbhd", heads=4, kv_heads=2, v_dim=8, kv_len=50, mask=CAUSAL),
    Case("layout bshd, lse", layout="bshd", through=("out", "lse"), mask=CAUSAL),
    Case("layout flat, lse", layout="flat", through=("lse",)),
    Case("layout hbsd, batch of 1 in K and V", layout="hbsd", batch=3, kv_batch=1),
]
HEADS = [
    Case("gqa 4 over 2", heads=4, kv_heads=2, mask=CAUSAL, native=True, **LONG),
    Case("gqa 4 over 1", heads=4, kv_heads=1, mask=CAUSAL, native=True, **LONG),
    Case("gqa 6 over 2", heads=6, kv_heads=2, mask=CAUSAL, native=True, **LONG),
    Case("gqa 7 over 1", heads=7, kv_heads=1, native=True, **LONG),
    Case("gqa 6 over 2, mask per head", heads=6, kv_heads=2, mask=function(per_head), **LONG),
    Case("gqa 4 over 2, score per head", heads=4, kv_heads=2, score=lambda draw: [slopes(draw)], **LONG),
    Case("one head", heads=1, native=True),
]
SIZES = [
    Case("V narrower", v_dim=8, native=True),
    Case("V wider", head_dim=8, v_dim=40, native=True),
    Case("more keys", kv_len=130, native=True),
    Case("fewer keys", q_len=130, kv_len=37, native=True),
    Case("causal, more keys", kv_len=130, mask=CAUSAL, native=True),
    Case("causal, fewer keys", q_len=130, kv_len=37, mask=CAUSAL, native=True),
    Case("batch of 1 in K and V", batch=3, kv_batch=1, mask=CAUSAL),
    Case("no queries", q_len=0, kv_len=5),
    Case("no keys", q_len=5, kv_len=0),
    Case("nothing at all", q_len=0),
    Case("no queries, flat", q_len=0, kv_len=5, layout="flat"),
    Case("no keys, causal, score", q_len=5, kv_len=0, mask=CAUSAL, score=two_tables, through=("out", "lse"), dtypes=SINGLE),
    Case("no batch", batch=0),
    Case("no heads", heads=0),
    Case("one query, one key", q_len=1, native=True),
    Case("one query", q_len=1, kv_len=150, native=True),
    Case("one key", q_len=37, kv_len=1, native=True),
    Case("one query, causal", q_len=1, kv_len=37, mask=CAUSAL),
    *[Case(f"length {n}", q_len=n, batch=1, head_dim=8, mask=CAUSAL, native=True) for n in (37, 127, 128, 255, 257, 383)],
    *[Case(f"head dim {n}", head_dim=n, batch=1, native=True) for n in (1, 17, 24, 40, 59, 64, 111, 257)],
    Case("head dim 512", head_dim=512, batch=1, heads=1, v_dim=3),
]
MEMORY = [
    *[Case(f"strides: {name}", strides=name, native=True) for name in STRIDES if name not in ("contiguous", "one number")],
    *[Case(f"strides of bshd: {name}", strides=name, layout="bshd", mask=CAUSAL, score=two_tables) for name in ("last stride not 1", "sliced", "reversed")],
    *[Case(f"grad-output: {name}", grad_strides=name, mask=CAUSAL) for name in ("last stride not 1", "sliced", "expanded", "one number")],
    Case("grad-output of bshd: reversed", grad_strides="reversed", layout="bshd"),
]
OPTIONS = [
    Case("scale 0.5", options={"scale": 0.5}, native=True),
    Case("scale 0", options={"scale": 0.0}, mask=CAUSAL),
    Case("scale negative", options={"scale": -0.3}, native=True),
    *[Case(f"dropout {p}", options={"dropout_p": p, "seed": 7}, heads=4, kv_heads=2, **LONG) for p in (0.1, 0.5, 0.9, 1.0)],
    Case("dropout, causal, lse", options={"dropout_p": 0.3, "seed": 2**40 + 1}, mask=CAUSAL, through=("out", "lse"), **LONG),
    Case("dropout, score, sinks", options={"dropout_p": 0.3, "seed": 0}, score=lambda draw: [*two_tables(draw), *sinks(draw)], **LONG),
    Case("dropout, tiles left out", options={"dropout_p": 0.3, "seed": 3}, mask=bare_tiles((32, 64)), **LONG),
    Case("lse alone", through=("lse",), mask=CAUSAL, **LONG),
    Case("out and lse", through=("out", "lse"), **LONG),
    Case("lse, score, rows with nothing", through=("out", "lse"), mask=function(some_rows_nothing), score=two_tables, **LONG),
    Case("lse, V wider", through=("lse",), v_dim=24),
    Case("sinks", score=sinks, **LONG),
    Case("sinks, causal, gqa", score=sinks, heads=4, kv_heads=2, mask=CAUSAL, **LONG),
    Case("sinks, rows with nothing", score=sinks, mask=function(some_rows_nothing), through=("out", "lse"), **LONG),
    Case("a sink of -inf, rows with nothing", score=no_sink_in_a_head, mask=function(some_rows_nothing), through=("out", "lse"), **LONG),
    Case("sinks after scores", score=lambda draw: [scores.softcap(2.0), *sinks(draw), scores.alibi(2)], mask=CAUSAL),
]
NOTHING = [
    Case("rows with nothing", mask=function(some_rows_nothing), **LONG),
    Case("a batch element with nothing", mask=made(lambda draw: masks.padding(draw.tensor([37, 0])))),
    Case("nothing for anyone", mask=function(~masks.full), through=("out", "lse")),
    Case("nothing in a whole tile row", mask=function(lambda b, h, q, kv: q >= 128), **LONG),
    Case("nothing, dense", mask=dense("q", "kv", chance=0.0), native=True),
    Case("nothing by the score", score=lambda draw: [lambda s, b, h, q, kv: torch.where(q % 2 == 0, s, -float("inf"))]),
]
MASKS = [
    Case("full", mask=function(masks.full)),
    Case("causal", mask=CAUSAL, native=True, **LONG),
    Case("causal lower right", mask=made(lambda draw: masks.causal_lower_right(70, 150)), q_len=70, kv_len=150, head_dim=8),
    Case("window", mask=WINDOW, **LONG),
    Case("window to the left", mask=function(masks.sliding_window(40, 0)), **LONG),
    Case("window of one", mask=function(masks.sliding_window(0)), **LONG),
    Case("dilated window", mask=function(masks.dilated_window(40, 3)), **LONG),
    Case("documents", mask=made(lambda draw: masks.document(document_ids(draw, 150))), **LONG),
    Case("documents by batch", mask=made(lambda draw: masks.document(document_ids(draw, 150, 2))), q_len=150, head_dim=8),
    Case("documents by length, causal", mask=made(lambda draw: masks.document(lengths=draw.tensor([10, 0, 90, 50])) & masks.causal), **LONG),
    Case("documents across", q_len=70, kv_len=150, head_dim=8, mask=made(lambda draw: masks.document(document_ids(draw, 70), document_ids(draw, 150)))),
    Case("padding", mask=made(lambda draw: masks.padding(draw.tensor([150, 20]))), q_len=150, head_dim=8),
    Case("per head", mask=function(per_head), **LONG),
    Case("per batch and head", mask=function(lambda b, h, q, kv: (q + b * 7) % 13 >= (kv + h) % 11), q_len=150, head_dim=8),
    Case("prefix", mask=function(masks.prefix_lm(50)), **LONG),
    Case("prefix by batch", mask=made(lambda draw: masks.prefix_lm(draw.tensor([10, 140]))), q_len=150, head_dim=8),
    Case("global tokens and window", mask=function(masks.global_tokens(3) | masks.sliding_window(8)), **LONG),
    Case("marked global tokens", mask=made(lambda draw: masks.global_tokens(draw.coins(150, chance=0.05)) | masks.sliding_window(8)), **LONG),
    Case("shared prefix", mask=made(lambda draw: masks.shared_prefix([50, 30, 40, 30], [0, 0, 0, 3])), **LONG),
    Case("block diffusion", mask=function(masks.block_diffusion(75, 10)), **LONG),
    Case("tree", mask=made(lambda draw: masks.tree([-1, 0, 0, 1, 1, 2], prefix=20)), q_len=6, kv_len=26),
    Case("neighborhood", mask=function(masks.neighborhood(150, 9)), **LONG),
    Case("neighborhood 2-D", mask=function(masks.neighborhood((10, 15), (3, 5))), **LONG),
    Case("neighborhood 3-D", mask=function(masks.neighborhood((5, 5, 6), (3, 3, 2))), **LONG),
    Case("sliding tile", mask=function(masks.sliding_tile((4, 6, 6), (2, 6, 2), (2, 2, 2), text=6)), **LONG),
    Case("radial", mask=made(lambda draw: masks.radial(6, 24, least=4, text=6)), **LONG),  # its table lies where it is made
    Case("cross", mask=made(lambda draw: masks.cross(draw.tensor([[0, 20], [20, 60], [10, 70]]), 50)), q_len=70, kv_len=150, head_dim=8),
    Case("chosen by batch", mask=made(lambda draw: masks.per_batch([masks.causal, masks.full], draw.tensor([1, 0]))), q_len=150, head_dim=8),
    Case("combined", mask=function((masks.causal & masks.sliding_window(30)) | ~masks.sliding_window(120)), **LONG),
    Case("function with captures", mask=made(random_blocks), **LONG),
    Case("function of a 0-d tensor", mask=made(lambda draw: within(draw.tensor(20))), **LONG),
]
BROADCAST = ("q kv", "1 1 q kv", "b 1 q kv", "1 h q kv", "b h q kv", "h q kv", "b 1 1 kv", "b 1 q 1", "1 kv", "q 1", "kv", "b kv")
TENSORS = [
    *[Case(f"dense {dims}", mask=dense(*dims.split()), q_len=140, kv_len=150, head_dim=8, native=dims.endswith("q kv")) for dims in BROADCAST],
    *[Case(f"additive {dims}", mask=additive(*dims.split()), q_len=140, kv_len=150, head_dim=8) for dims in BROADCAST],
    Case("additive -inf", mask=additive("q", "kv", blocked=-torch.inf), **LONG),
    Case("additive -inf rows", mask=additive("b", "1", "q", "kv", blocked=-torch.inf, rows=True), **LONG),
    Case("additive -10000", mask=additive("q", "kv", blocked=-10000.0, rows=True), **LONG),
    Case("additive -inf, padding", mask=additive("b", "kv", blocked=-torch.inf), q_len=40, kv_len=150),
    Case("additive, learned", mask=additive("1", "h", "q", "kv", learned=True), **LONG),
    Case("additive and a score", mask=additive("q", "kv", blocked=-torch.inf), score=two_tables, **LONG),
]
MAPS = [
    Case("map of causal", mask=mapped(masks.causal, (128, 128)), **LONG),
    Case("map of small tiles", mask=mapped(masks.causal & masks.sliding_window(30), (32, 16)), **LONG),
    Case("map per head", mask=mapped(per_head, (64, 64)), q_len=150, head_dim=8),
    Case("bare tiles", mask=bare_tiles((32, 64)), **LONG),
    Case("bare tiles as large as the engine's", mask=bare_tiles((128, 128), by_head=True), batch=1, q_len=300, head_dim=8),
    Case("bare tiles larger than the engine's", mask=bare_tiles((256, 128), by_head=True), batch=1, q_len=300, head_dim=8),
    Case("bare tiles that do not divide the engine's", mask=bare_tiles((48, 80), by_batch=True, by_head=True), q_len=150, head_dim=8),
    Case("bare tiles with a mask inside", mask=bare_tiles((32, 32), by_head=True, inside=lambda b, h, q, kv: (q + kv) % 3 != 0), **LONG),
    Case("BlockMask", mask=block_mask(lambda b, h, q, kv: q >= kv, 128), **LONG),
    Case("BlockMask of small blocks", mask=block_mask(lambda b, h, q, kv: (q - kv).abs() < 20, (32, 64)), **LONG),
    Case("BlockMask per batch and head", mask=block_mask(lambda b, h, q, kv: q + 40 * b >= kv + 10 * h, 64, batch=True, heads=True), q_len=150, head_dim=8),
]
CAUSAL_TOO = [
    Case("is_causal", options={"is_causal": True}, native=True, **LONG),
    Case("is_causal and a function", options={"is_causal": True}, mask=function(lambda b, h, q, kv: (q - kv) % 2 == 0), **LONG),
    Case("is_causal and a mask", options={"is_causal": True}, mask=function(masks.sliding_window(20)), **LONG),
    Case("is_causal and a dense mask", options={"is_causal": True}, mask=dense("b", "1", "q", "kv"), **LONG),
    Case("is_causal and padding", options={"is_causal": True}, mask=dense("b", "kv"), q_len=150, head_dim=8),
    Case("is_causal and an additive mask", options={"is_causal": True}, mask=additive("q", "kv"), **LONG),
    Case("is_causal and an additive mask with -inf", options={"is_causal": True}, mask=additive("h", "q", "kv", blocked=-torch.inf), **LONG),
    Case("is_causal and a score", options={"is_causal": True}, score=two_tables, **LONG),
]
SCORES = [
    Case("softcap", score=lambda draw: [scores.softcap(2.0)], **LONG),
    Case("alibi, then softcap", score=lambda draw: [slopes(draw), scores.softcap(3.0)], **LONG),
    Case("softcap, then alibi", score=lambda draw: [scores.softcap(3.0), slopes(draw)], mask=CAUSAL, **LONG),
    Case("alibi of the paper, 6 heads", heads=6, mask=CAUSAL, score=lambda draw: [scores.alibi(6)], **LONG),
    Case("times a number", score=lambda draw: [lambda s, b, h, q, kv: s * 2], mask=CAUSAL, **LONG),
    Case("times a negative number", score=lambda draw: [lambda s, b, h, q, kv: s * -0.5], **LONG),
    Case("a learned bias, times a number", score=halved, mask=CAUSAL, **LONG),
    Case("squared", score=lambda draw: [lambda s, b, h, q, kv: s * s * 0.3], **LONG),
    Case("trigonometric", score=lambda draw: [lambda s, b, h, q, kv: torch.sin(s) + torch.cos(kv * 0.1)], **LONG),
    Case("silu and where", score=lambda draw: [lambda s, b, h, q, kv: torch.where(q >= kv, torch.nn.functional.silu(s), s - 1.0)], **LONG),
    Case("relative bias", score=lambda draw: [scores.relative_bias(draw.learned(2, 21))], mask=CAUSAL, **LONG),
    Case("relative bias of T5", score=t5, **LONG),
    Case("bias, 4-D", score=lambda draw: [scores.bias(draw.learned(2, 2, 37, 37))]),
    Case("bias, broadcast", score=lambda draw: [scores.bias(draw.learned(2, 1, 150))], **LONG),
    Case("distance decay", score=lambda draw: [scores.distance_decay(draw.learned(2, size=0.0625)), scores.distance_decay(0.01)], **LONG),
    Case("distance decay by one number", score=lambda draw: [scores.distance_decay(draw.learned(size=0.0625))], dtypes=SINGLE + DOUBLE, **LONG),
    Case("two learned tables", score=two_tables, mask=CAUSAL, **LONG),
    Case("several loads of one tensor", score=several_loads, mask=CAUSAL, **LONG),
    Case("one tensor in two scores", score=reused, **LONG),
    Case("indexed by a load", score=by_load, **LONG),
    Case("0-d capture", score=zero_dim, **LONG),
    Case("gate by batch and head", score=batch_and_head, q_len=150, head_dim=8),
    Case("negative indices", score=negative_index, **LONG),
    Case("score ignored", score=ignores_score, **LONG),
    Case("float32 capture", score=in_float32, mask=CAUSAL, **LONG),
    Case("capture without gradient", score=frozen, **LONG),
    Case("score forbids", score=forbids, through=("out", "lse"), **LONG),
    Case("learned, rows with nothing", score=two_tables, mask=function(some_rows_nothing), **LONG),
    Case("learned, gqa, dropout", heads=4, kv_heads=2, score=reused, options={"dropout_p": 0.2, "seed": 5}, **LONG),
    Case("learned, gqa, window, sinks", heads=4, kv_heads=2, score=lambda draw: [*reused(draw), *sinks(draw)], mask=WINDOW, **LONG),
]

CASES = LAYOUTS + HEADS + SIZES + MEMORY + OPTIONS + NOTHING + MASKS + TENSORS + MAPS + CAUSAL_TOO + SCORES
