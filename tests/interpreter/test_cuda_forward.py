"""The CUDA engine's forward on an emulated Hopper GPU (tests/support/hopper): what its kernel computes, held to the error rule, and that it waits for all it
needs, however late that comes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.support.bands import BANDS, FAR, band, band_case
from tests.support.cases import HEADS, LAYOUTS, MAPS, MASKS, NOTHING, OPTIONS, SCORES, SIZES, TENSORS, Case, function, made
from tests.support.error_rule import check_forward
from tests.support.hopper.emulator import EAGER, LATE, MISSING, RANDOM, Emulator, Timing
from tests.support.triton_misses import refused
from tilewise import masks, scores
from tilewise.core.problem import Options, make_problem
from tilewise.engines import engine_named

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def check(emulator: Emulator, case: Case, dtype: torch.dtype = torch.bfloat16) -> None:
    __tracebackhide__ = True
    before = emulator.launches
    check_forward(case, "cuda", "cpu", dtype)
    assert emulator.launches == before + 1 and emulator.marked == 0


# -- what it computes --------------------------------------------------------------------------------------------------

FEW = [*LAYOUTS, *HEADS, *SIZES, *OPTIONS, *NOTHING, *MASKS[::5], *TENSORS[::10], *MAPS[::3], *SCORES[::2]]  # of others only the map or the score differs


@pytest.mark.parametrize("case", [case for case in FEW if torch.bfloat16 in case.dtypes], ids=str)
def test_cases_of_all_engines(emulator: Emulator, case: Case) -> None:
    refused(case, "cpu", torch.bfloat16, "cuda")
    check(emulator, case)


FORMS: dict[str, Any] = {"full": None, "band": function(masks.causal & masks.sliding_window(190)), "mapped": made(lambda draw: masks.document(documents(draw)))}
SHAPES = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (72, 200), (8, 24)]
EXTRAS: dict[str, dict[str, Any]] = {
    "sinks": {"score": lambda draw: [scores.sinks(draw.normal(4))]},
    "ALiBi": {"score": lambda draw: [scores.alibi(4)]},
    "softcap": {"score": lambda draw: [scores.softcap(20.0)]},
    "relative bias": {"score": lambda draw: [scores.relative_bias(draw.normal(4, 129))]},
    "dropout": {"options": {"dropout_p": 0.3, "seed": 2**33 + 7}},
}


def documents(draw: Any) -> Tensor:
    return torch.arange(draw.case.q_len, device=draw.device) * 7 // 900


def case(name: str, dims: tuple[int, int], form: str, length: int = 330, **more: Any) -> Case:
    sizes = {"heads": 4, "kv_heads": 2, "batch": 1, "q_len": length, "head_dim": dims[0], "v_dim": dims[1]}
    return Case(f"{name} {dims} {form} {length}", mask=FORMS[form], **{**sizes, "through": ("out", "lse"), **more})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dims", SHAPES, ids=str)
def test_head_dims(emulator: Emulator, dims: tuple[int, int], form: str) -> None:
    check(emulator, case("plain", dims, form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EXTRAS)
def test_what_a_call_may_ask_beside(emulator: Emulator, name: str, form: str) -> None:
    dim = (64, 128, 256)[(list(FORMS).index(form) + list(EXTRAS).index(name)) % 3]
    check(emulator, case(name, (dim, dim), form, **EXTRAS[name]))


def test_registers_kept_for_a_score_do_not_change_the_tiles_of_a_map(emulator: Emulator) -> None:
    both = {"score": lambda draw: [scores.alibi(4)], "options": {"dropout_p": 0.3, "seed": 5}}
    check(emulator, case("ALiBi and dropout", (64, 256), "mapped", **both))


@pytest.mark.parametrize("form", FORMS)
def test_lse_where_all_scores_are_equal(emulator: Emulator, form: str) -> None:
    """Plain PyTorch is all but exact then, and so is what begins its sums at 2^-64."""
    check(emulator, case("scale 0", (64, 64), form, options={"scale": 0.0}))


@pytest.mark.parametrize(
    ("dim", "form", "extra"), [(64, "band", None), (64, "full", "softcap"), (128, "full", None), (128, "mapped", "ALiBi"), (256, "band", "sinks")]
)
def test_float16(emulator: Emulator, dim: int, form: str, extra: str | None) -> None:
    check(emulator, case(f"float16 {extra}", (dim, dim), form, **EXTRAS.get(str(extra), {})), torch.float16)


@pytest.mark.parametrize(("dims", "form"), [((64, 64), "band"), ((128, 128), "full"), ((72, 200), "mapped")], ids=str)
def test_parts_are_what_is_rounded_elsewhere(emulator: Emulator, dims: tuple[int, int], form: str) -> None:
    query, key, value = (torch.randn(1, heads, 330, dim).bfloat16() for heads, dim in ((4, dims[0]), (2, dims[0]), (2, dims[1])))
    mask = {"full": None, "band": masks.causal, "mapped": masks.document(torch.arange(330) // 100)}[form]
    p = make_problem(query, key, value, mask, None, Options(enable_gqa=True))[0]
    engine = engine_named("cuda")
    whole, part = (engine.forward(q, engine.plan(q)) for q in (p, p.replaced(partial=True)))
    assert part.out.dtype == torch.float32 and torch.equal(part.out.bfloat16(), whole.out) and torch.equal(part.lse, whole.lse)
    assert not torch.equal(part.out, whole.out.float())


@pytest.mark.parametrize(("dim", "lengths"), [(64, (600, 300)), (64, (257, 1)), (128, (400, 400)), (128, (200, 600)), (256, (300, 300))], ids=str)
def test_bands(emulator: Emulator, dim: int, lengths: tuple[int, int]) -> None:
    for limits in BANDS:
        check(emulator, band_case(dim, lengths, limits, batch=1, heads=2, kv_heads=1))


@pytest.mark.parametrize("form", FORMS)
def test_few_programs_take_many_tiles(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    from tilewise.engines.gpu import limits

    monkeypatch.setattr(limits, "sm_count", lambda device: 2)
    check(emulator, case("on few", (64, 64), form, 400, batch=2, heads=6, kv_heads=3))


@pytest.mark.parametrize("length", [250, 400, 1100], ids=["a pair", "no pairs", "one tile of the last pair missing"])
def test_programs_in_pairs(emulator: Emulator, length: int) -> None:
    for dims in ((96, 96), (128, 128)):
        check(emulator, case("pairs", dims, "full", length, heads=2, kv_heads=1))


# -- rows that go out of hand ------------------------------------------------------------------------------------------


def inputs(dim: int, length: int = 600) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dim)
    return [torch.randn(1, heads, length, dim, generator=generator).bfloat16() for heads in (2, 1, 1)]


def attended(tensors: list[Tensor], engine: str, **options: Any) -> Tensor:
    return tw.attention(*tensors, enable_gqa=True, backend=engine, **options)


@pytest.mark.parametrize("low", [-FAR, -300])
@pytest.mark.parametrize("dim", [64, 128])
def test_maxima_that_rise_along_the_keys(emulator: Emulator, dim: int, low: int) -> None:
    """From the diagonal down, far beyond what the first tile's maximum leaves room for."""
    q, k, v = inputs(dim)
    q, k = 6 * q, k * torch.linspace(3.0, 0.1, 600).bfloat16()[:, None]
    found, wanted = (attended(given, engine, mask=band(low, 0)) for given, engine in (([q, k, v], "cuda"), ([t.double() for t in (q, k, v)], "reference")))
    assert (found - wanted).norm() <= 4e-3 * wanted.norm()  # roundings of weights and outputs, 2.3e-3 and 1.7e-3
    assert emulator.marked == 0


def test_what_is_not_finite_is_computed_again(emulator: Emulator) -> None:
    """A NaN beyond the band reaches rows through the products of whole tiles; they are computed again, and none of it is left."""
    q, k, v = inputs(128, length=10)
    k[:, :, 6:], v[:, :, 6:] = math.nan, math.nan
    out = attended([q, k, v], "cuda", mask=masks.causal)
    assert emulator.marked == 2 * 10
    assert out[:, :, :6].isfinite().all() and out[:, :, 6:].isnan().all()


SPOILT: dict[str, tuple[Any, Any, int]] = {  # key and value from a row on, which nobody attends or some do, and how many queries are computed again
    "NaN": (math.nan, math.nan, 330 - 256),  # those of the tile in which it lies
    "infinite values": (0.0, math.inf, 330 - 256),
    "infinite keys": (math.inf, 0.0, 330 - 300),  # those that attend it: masked scores are never looked at
}


@pytest.mark.parametrize("extra", [None, "sinks", "window", "cross"])
@pytest.mark.parametrize("name", SPOILT)
def test_rows_computed_again_are_the_references(emulator: Emulator, name: str, extra: str | None) -> None:
    dims = {None: (128, 128), "sinks": (64, 64), "window": (256, 256), "cross": (72, 200)}[extra]
    generator = torch.Generator().manual_seed(1)
    lengths = (330, 200 if extra == "cross" else 330)
    q, k, v = (
        torch.randn(2, h, n, d, generator=generator).bfloat16() for h, n, d in ((4, lengths[0], dims[0]), (2, lengths[1], dims[0]), (2, lengths[1], dims[1]))
    )
    at = lengths[1] - 30
    for t, value in zip((k, v), SPOILT[name], strict=False):
        t[1, 1, at:] = value if value else t[1, 1, at:]
    mask = None if extra == "cross" else masks.causal & masks.sliding_window(100) if extra == "window" else masks.causal
    score = scores.sinks(torch.randn(4, generator=generator)) if extra == "sinks" else None
    options: dict[str, Any] = {"mask": mask, "score": score, "return_lse": True}
    found, wanted = (attended([q, k, v], engine, **options) for engine in ("cuda", "reference"))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=2e-2, atol=2e-2, equal_nan=True)
    assert emulator.marked >= 2 * (330 if extra == "cross" and name != "infinite keys" else SPOILT[name][2])


@pytest.mark.parametrize("extra", [None, "sinks", "window"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_queries_that_are_not_finite_end_at_once(emulator: Emulator, value: float, extra: str | None) -> None:
    """All that such a row gives is NaN, so of its keys a few are read; others are as they were."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 2, 330, 96, generator=generator).bfloat16() for _ in range(3))
    q[1, 1, 300:, 5] = value
    k[..., 5] = k[..., 5].abs()  # scores of infinite queries are all positive
    mask = masks.causal & masks.sliding_window(100) if extra == "window" else masks.causal
    options = {"mask": mask, "score": scores.sinks(torch.randn(2, generator=generator)) if extra == "sinks" else None, "return_lse": True}
    found, wanted = (attended([q, k, v], engine, **options) for engine in ("cuda", "reference"))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=2e-2, atol=2e-2, equal_nan=True)
    assert found[0][1, 1, 300:].isnan().all() and emulator.marked == 30


@pytest.mark.parametrize("sink", [math.nan, math.inf, -math.inf])
def test_sinks_that_are_no_numbers_where_nothing_is_attended(emulator: Emulator, sink: float) -> None:
    """Queries 0 to 99 attend nothing but the sink, for 64 of them not even their tile's others do."""
    q, k, v = (torch.randn(1, 2, 260, 64, generator=torch.Generator().manual_seed(0)).bfloat16() for _ in range(3))
    options = {"mask": band(-FAR, -100), "score": scores.sinks(torch.tensor([sink, 0.0])), "return_lse": True}
    found, wanted = (attended([q, k, v], engine, **options) for engine in ("cuda", "reference"))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=2e-2, atol=2e-2, equal_nan=True)


REACHING: dict[str, tuple[int, int, Any]] = {  # tables that end where the distances do
    "by a causal mask": (50, 64, masks.causal),
    "by no mask": (330, 128, None),
}


@pytest.mark.parametrize("name", REACHING)
def test_tables_of_distances_are_read_inside(emulator: Emulator, name: str) -> None:
    """Also for rows of a tile beyond the last query, of which nothing is stored."""
    length, dim, mask = REACHING[name]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, dim, generator=generator).bfloat16() for _ in range(3))
    score = scores.relative_bias(torch.randn(1, 2 * length - 1, generator=generator))
    found, wanted = (attended(given, engine, mask=mask, score=score) for given, engine in (([q, k, v], "cuda"), ([t.double() for t in (q, k, v)], "reference")))
    assert (found - wanted).norm() <= 4e-3 * wanted.norm()


# -- when things happen ------------------------------------------------------------------------------------------------

TIMINGS = [Timing(EAGER), Timing(LATE), *[Timing(RANDOM, seed) for seed in range(4)]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_same_bits_whatever_comes_late(emulator: Emulator, dim: int, form: str) -> None:
    tensors = inputs(dim)
    mask = {"full": None, "band": masks.causal & masks.sliding_window(200), "mapped": masks.document(torch.arange(600) // 130)}[form]
    found = []
    for timing in TIMINGS:
        emulator.timing = timing
        found.append(tw.attention(*tensors, mask=mask, enable_gqa=True, return_lse=True, backend="cuda"))
    assert emulator.launches == len(TIMINGS) and emulator.marked == 0
    assert all([torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1]) for out, lse in found])
