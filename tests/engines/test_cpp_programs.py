"""Programs as C++ against the torch interpreter, which defines them: many generated ones, compiled together."""

import ctypes
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.generated import ROUNDING, WAVES, captures, function_of, trees
from tests.support.programs import trace_value
from tilewise.engines.codegen import Layout
from tilewise.engines.cpp import compiler, missing
from tilewise.engines.cpp.emit import BY_KEY, BY_QUERY, Axes, Writer, score_source
from tilewise.engines.cpp.mods import call_arrays
from tilewise.engines.facts import Extents, Facts
from tilewise.lang import BoundProgram, interpret

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LANES, ROWS = 64, 5
PROGRAMS = 150
B, H = 1, 2


def drawn() -> list[tuple[Any, int]]:
    """Trees and seeds of their captures, the same every time."""
    found: list[tuple[Any, int]] = []

    @settings(max_examples=PROGRAMS, database=None)
    @given(st.sampled_from("iffb").flatmap(lambda kind: trees(kind, 3)), st.integers(0, 3))
    def collect(tree: Any, seed: int) -> None:
        found.append((tree, seed))

    collect()
    return found


def inputs(axes: Axes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    row, lane = torch.arange(ROWS).view(-1, 1), torch.arange(LANES).view(1, -1)
    score = torch.randint(-12, 13, (ROWS, LANES), generator=generator) / 4.0
    b, h = torch.tensor([[B]]), torch.tensor([[H]])  # with dimensions, as engines give them: torch promotes types of other tensors by those that have some
    return {"b": b, "h": h, axes.row: row, axes.lane: lane, "score": score}


def writer(call: BoundProgram, axes: Axes) -> Writer:
    layouts = tuple(Layout(t.dim() > 0 and t.stride(-1) == 1, False) for t in call.captures)
    return Writer(call.program, Facts(call.program, call, Extents(B + 1, H + 1, 64, 64)), layouts, axes)


def interpreted(call: BoundProgram, axes: Axes) -> torch.Tensor | None:
    """None where torch raises: a division of integers by 0, say."""
    try:
        (found,) = interpret(call.program, call, inputs(axes))
    except RuntimeError:
        return None
    return torch.as_tensor(found).float().expand(ROWS, LANES)


@pytest.mark.parametrize("axes", [BY_QUERY, BY_KEY], ids=lambda a: a.name)
def test_generated_programs(axes: Axes) -> None:
    check(drawn(), axes)


@pytest.mark.parametrize("axes", [BY_QUERY, BY_KEY], ids=lambda a: a.name)
def test_an_integer_has_no_negative_zero(axes: Axes) -> None:
    """-0.5 as an integer is 0, and as a float again 0, not -0: what is divided by it has the sign it had."""
    check([(("//", ("score",), ("cast", "int64", ("score",))), 0)], axes)


@pytest.mark.parametrize("axes", [BY_QUERY, BY_KEY], ids=lambda a: a.name)
def test_zero_divided_by_a_negative_number_is_negative(axes: Axes) -> None:
    """-0, as torch has it: atan2 tells it from 0."""
    zero = ("*", ("score",), ("number", 0.0))
    check([(("atan2", ("//", zero, ("number", -0.3)), ("-", zero, ("number", 1.0))), 0)], axes)


ODD, SOME = ("load", "odd", ("index", "kv")), ("load", "slopes", ("index", "q"))
OF_ONE = (*ROUNDING, *WAVES, "tan", "asin", "acos", "atanh", "isfinite", "isnan", "isinf")
OF_TWO = ("+", "-", "*", "/", "minimum", "maximum", "clamp_min", "clamp_max", "atan2", "logaddexp")


@pytest.mark.parametrize("axes", [BY_QUERY, BY_KEY], ids=lambda a: a.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_function_of_odd_numbers(dtype: str, axes: Axes) -> None:
    """0, -0, infinities, NaN, the smallest and the largest, in every precision."""
    odd, some = ("cast", dtype, ODD), ("cast", dtype, SOME)
    one = [((name, x), seed) for name in OF_ONE for x in (odd, some) for seed in range(2)]
    two = [((name, x, y), 0) for name in OF_TWO for x, y in ((odd, some), (some, odd), (("score",), odd))]
    remainders = [(("fmod", x, ("number", n)), 0) for x in (("score",), some) for n in (0.75, -2.0, 0.0, float("inf"), float("nan"))]
    check([*one, *two, *remainders, (("fmod", ("score",), some), 0)], axes)


@pytest.mark.parametrize("axes", [BY_QUERY, BY_KEY], ids=lambda a: a.name)
def test_remainders_of_quotients_out_of_range(axes: Axes) -> None:
    """-3e38 / 0.25 is no float32, but has a remainder: the same on every processor."""
    check([((op, ODD, y), seed) for op in ("fmod", "%") for y in (("score",), ("number", 0.3), SOME) for seed in range(2)], axes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_beside_16_bits_are_rounded_where_torch_rounds_them(dtype: str) -> None:
    """A remainder, or a comparison, of what was rounded and of what was not have nothing in common."""
    some = ("cast", dtype, ("*", SOME, ("load", "slopes", ("index", "kv"))))
    numbers = [("number", n) for n in (0.3, 1.1, 257, -0.7)]
    second = [((op, some, n), 0) for op in ("+", "-", "*", "/", "//", "%", "fmod", "**", "<", "<=", "==", "clamp_min") for n in numbers]
    first = [((op, n, some), 0) for op in ("+", "-", "*", "%", "**", ">", "!=") for n in numbers]
    rounded = ("cast", dtype, ("*", ("cast", "float32", ("==", SOME, SOME)), ("number", 0.3)))
    check([*second, *first, (("==", rounded, ("number", 0.3)), 0), (("*", some, ("load", "scale")), 0), (("%", some, ("load", "scale")), 0)], BY_QUERY)


def check(programs: list[tuple[Any, int]], axes: Axes) -> None:
    calls, sources = [], []
    for tree, seed in programs:
        call = trace_value(function_of(tree, captures(seed)), torch.float32)
        if interpreted(call, axes) is None:
            continue
        source = score_source([writer(call, axes)], "float")
        sources.append(re.sub(rf"void {axes.name}\(", f"void program_{len(calls)}(", source))
        calls.append((tree, call))
    assert len(calls) > len(programs) // 2
    data = compiler.compiled("\n".join(sources), ("-O1", "-ffp-contract=off"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "programs.so"
        path.write_bytes(data)
        library = ctypes.CDLL(str(path))
    different = [str(tree) for k, (tree, call) in enumerate(calls) if not agrees(library, k, call, axes)]
    assert not different, f"{len(different)} of {len(calls)} programs differ, the first: {min(different, key=len)}"


def agrees(library: ctypes.CDLL, k: int, call: BoundProgram, axes: Axes) -> bool:
    arguments = (ctypes.c_int64 * 6)()
    arrays = call_arrays(call)
    arguments[:] = (0, 0, *arrays.values)
    tile = inputs(axes)["score"].float().contiguous()
    function = getattr(library, f"program_{k}")
    function.restype = None
    function(arguments, *(ctypes.c_int64(x) for x in (B, H, 0, ROWS, 0, LANES - 1)), ctypes.c_void_p(tile.data_ptr()))
    wanted = interpreted(call, axes)
    assert wanted is not None
    return torch.allclose(tile, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
