"""Random problems by the thousand, grouped by structure: what kernels are compiled for.

Problems of one structure differ in everything that compiles nothing: lengths, batch, heads, layout, windows, documents, seeds. Both
are drawn by hypothesis from a seed, so that a failure names the seed, the structure and the problem that repeat it.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.cases import Case, Draw, Masking, bare_tiles, by_function, make, mapped, packed_sequences
from tests.support.error_rule import check, check_float64
from tests.support.grammar import BY_DISTANCE, MASKS, SCORES, Part
from tilewise import scores

T = TypeVar("T")
SHOWN = 5  # failures of a structure that are told in full

LAYOUTS = ("bhsd", "bshd", "hbsd", "sbhd", "flat")
STRIDES = ("contiguous", "contiguous", "contiguous", "last stride not 1", "reversed", "sliced", "every other")
THROUGH = (("out",), ("out",), ("out", "lse"), ("lse",))
SCALES = (None, None, None, 0.1, -0.5)
TILE = (32, 64)  # of given maps
FEW_IN_HALF = 4  # keys seen by a row on average


@dataclass(frozen=True)
class Range:
    """How large the problems are: lengths, head dims, score elements in all; and keys of a row, and rows, below which float32 errors are luck."""

    lengths: st.SearchStrategy[int]
    head_dims: tuple[int, ...]
    most_elements: int
    few: int


# For Triton's interpreter, whose tiles are 32 x 32, and for a CPU; and for a GPU, whose tiles are 128 x 128 at most.
SMALL = Range(st.one_of(st.sampled_from([0, 1, 2, 31, 32, 33, 64, 65]), st.integers(3, 70)), (1, 8, 16, 17, 24), 3_000, 8)
LARGE = Range(
    st.one_of(st.sampled_from([0, 1, 2, 127, 128, 129, 255, 256, 257, 383, 512]), st.integers(3, 400), st.integers(400, 900)),
    (1, 8, 16, 17, 40, 64, 64, 64, 80, 96, 128, 128, 128, 192, 256),
    3_000_000,
    40,
)


@dataclass(frozen=True)
class Structure:
    dtype: torch.dtype
    head_dim: int
    v_dim: int
    form: str  # what the mask is given as: "none", "function", "map", "tiles" (chosen at random), "packed" (sequences)
    mask: Part | None
    steps: tuple[Part, ...]
    sinks: bool
    is_causal: bool
    dropout: bool
    deterministic: bool
    scale: float | None
    through: tuple[str, ...]
    strides: str
    grad_strides: str

    def __str__(self) -> str:
        mask = {"none": "no mask", "tiles": "given tiles", "packed": "packed sequences", "map": f"map of {self.mask}"}.get(self.form, str(self.mask))
        words = [str(self.dtype).removeprefix("torch."), f"D{self.head_dim}", f"V{self.v_dim}", mask, *[s.text for s in self.steps]]
        words += [name for name in ("sinks", "is_causal", "dropout", "deterministic") if getattr(self, name)]
        words += [] if self.scale is None else [f"scale {self.scale}"]
        return ", ".join([*words, f"through {' and '.join(self.through)}", f"strides {self.strides}", f"grad strides {self.grad_strides}"])


@st.composite
def structures(draw: st.DrawFn, sizes: Range, dtypes: tuple[torch.dtype, ...]) -> Structure:
    form = draw(st.sampled_from(("none", "function", "function", "function", "function", "map", "tiles", "packed")))
    dtype = draw(st.sampled_from(dtypes))
    steps = draw(st.lists(BY_DISTANCE, max_size=2) if form == "packed" else SCORES)
    return Structure(
        dtype=dtype,
        head_dim=draw(st.sampled_from(sizes.head_dims)),
        v_dim=draw(st.sampled_from(sizes.head_dims)),
        form=form,
        mask=draw(MASKS) if form in ("function", "map") else None,
        steps=tuple(steps),
        sinks=draw(st.sampled_from((False, False, True))),
        is_causal=form in ("none", "function", "packed") and draw(st.booleans()),
        dropout=draw(st.sampled_from((False, False, True))),
        deterministic=draw(st.sampled_from((False, False, True))),
        scale=draw(st.sampled_from(SCALES if dtype == torch.float32 else (*SCALES, 0.0))),
        through=draw(st.sampled_from(THROUGH)),
        strides=draw(st.sampled_from(STRIDES)),
        grad_strides=draw(st.sampled_from(STRIDES)),
    )


@st.composite
def problems(draw: st.DrawFn, structure: Structure, sizes: Range) -> Case:
    kv_heads, ratio, q_len = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(sizes.lengths)
    packed = structure.form == "packed"
    options: dict[str, Any] = {} if structure.scale is None else {"scale": structure.scale}
    options |= {name: True for name in ("is_causal", "deterministic") if getattr(structure, name)}
    if structure.dropout:
        chances = (0.1, 0.5) if structure.dtype == torch.float32 else (0.1, 0.5, 0.9)  # few keys are left of 0.9: see is_luck
        options |= {"dropout_p": draw(st.sampled_from(chances)), "seed": draw(st.integers(0, 2**40))}
    return Case(
        f"{structure}, numbers {draw(st.integers(0, 2**30))}",
        batch=1 if packed else draw(st.integers(1, 3)),
        heads=ratio * kv_heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=q_len if packed else draw(sizes.lengths),
        head_dim=structure.head_dim,
        v_dim=structure.v_dim,
        layout=draw(st.sampled_from(LAYOUTS)),
        strides=structure.strides,
        grad_strides=structure.grad_strides,
        mask=None if structure.form == "none" else lambda source: masking_of(structure, source),
        score=(lambda source: scores_of(structure, source)) if structure.steps or structure.sinks else None,
        options=options,
        through=structure.through,
    )


def masking_of(structure: Structure, draw: Draw) -> Masking:
    if structure.form == "packed":
        return packed_sequences(draw)
    if structure.form == "tiles":
        return bare_tiles(TILE, by_head=True)(draw)
    assert structure.mask is not None
    f = structure.mask.build(draw)
    return by_function(draw, f) if structure.form == "function" else mapped(f, TILE)(draw)


def scores_of(structure: Structure, draw: Draw) -> list[Any]:
    found: list[Any] = [step.build(draw) for step in structure.steps]
    return [*found, scores.sinks(draw.learned(draw.case.heads))] if structure.sinks else found


def elements(case: Case) -> int:
    return case.batch * case.heads * case.q_len * case.kv[2]


# -- drawing and checking --------------------------------------------------------------------------------------------


def drawn(strategy: st.SearchStrategy[T], seed: int) -> T:
    """An example of a strategy, the same for the same seed. The first that hypothesis tries is always the simplest; this is the second."""
    found: list[T] = []

    @hypothesis.seed(seed)
    @settings(max_examples=2, database=None, phases=[Phase.generate], derandomize=False, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(example: T) -> None:
        found.append(example)

    collect()
    return found[-1]


def drawn_structure(seed: int, sizes: Range, *dtypes: torch.dtype) -> Structure:
    return drawn(structures(sizes, dtypes), seed)


def drawn_problems(structure: Structure, seed: int, count: int, sizes: Range) -> list[Case]:
    """At most `count`; fewer where most that are drawn are a matter of luck."""
    fitting = problems(structure, sizes).filter(lambda case: elements(case) <= sizes.most_elements)
    tried = (drawn(fitting, seed + number) for number in range(3 * count))
    return list(itertools.islice((case for case in tried if not is_luck(structure, case, sizes)), count))


def is_luck(structure: Structure, case: Case, sizes: Range) -> bool:
    """Whether rows see so few keys, or keys so few rows, that sums cancel or have no roundings, and plain PyTorch happens to be exact
    (see error_rule and triton_misses)."""
    few = sizes.few if structure.dtype == torch.float32 else FEW_IN_HALF
    if elements(case) == 0:
        return False
    if structure.dtype == torch.float32 and case.q_len < few:
        return True
    inputs = make(case, structure.dtype, structure.dtype)
    allowed = torch.ones((), dtype=torch.bool) if inputs.masking.allowed is None else inputs.masking.allowed
    if structure.is_causal:
        allowed = allowed & (torch.arange(case.q_len)[:, None] >= torch.arange(case.kv[2]))
    keys = allowed.expand(case.batch, case.heads, case.q_len, case.kv[2]).sum(-1)
    heard = keys if structure.sinks else keys[keys > 0]  # a row with nothing to attend is exactly 0, but with a sink it is not
    return len(heard) > 0 and float(heard.double().mean()) < few


def check_problems(structure: Structure, cases: list[Case], run: Callable[[Case], None]) -> None:
    """Every problem, and then one failure that tells how many were wrong, and which."""
    __tracebackhide__ = True
    wrong: list[str] = []
    for number, case in enumerate(cases):
        try:
            run(case)
        except Exception as error:  # whatever it is, the other problems of the structure have kernels already and can be tried
            wrong.append(f"problem {number}, {shape_of(case)}:\n    {type(error).__name__}: {error}")
    shown = "\n  ".join(wrong[:SHOWN])
    assert not wrong, f"{len(wrong)} of {len(cases)} problems of the structure {structure} are wrong:\n  {shown}"


def by_the_rule(structure: Structure, engine: str, device: str) -> Callable[[Case], None]:
    return lambda case: check_float64(case, engine) if structure.dtype == torch.float64 else check(case, engine, device, structure.dtype)


def shape_of(case: Case) -> str:
    numbers = case.name.rpartition("numbers ")[2]
    return (
        f"B{case.batch} H{case.heads}/{case.kv_heads} {case.q_len}x{case.kv_len} {case.layout} numbers {numbers}"
        f"{''.join(f' {name}={value}' for name, value in case.options.items())}"
    )
