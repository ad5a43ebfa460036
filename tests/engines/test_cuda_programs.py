"""Scores as CUDA C++ against the torch interpreter. They call functions that the CPU's programs have by the same names, so a C++ compiler takes them too."""

import ctypes
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.test_cpp_programs import drawn
from tests.support.generated import captures, function_of
from tests.support.programs import trace_value
from tilewise import scores
from tilewise.engines.codegen import Layout
from tilewise.engines.cpp import compiler, missing
from tilewise.engines.cuda.emit import Writer, score_source
from tilewise.engines.facts import Extents, Facts
from tilewise.lang import BoundProgram, interpret, trace_score

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

B, H, Q, KV, ROW, COLUMN, KEYS = 1, 2, 20, 61, 5, 2, 32  # 16 keys past the end; a thread's first row, its place among four, keys of a tile
ROWS = (ROW, ROW + 8)
C_TYPES = {torch.bool: "uint8_t", torch.float16: "half", torch.bfloat16: "bfloat", torch.float32: "float", torch.float64: "double"}
PRELUDE = """
#include "program.h"
#define DEV INLINE
#define NS (KEYS / 2)
INLINE i32 min(i32 a, i32 b) { return a < b ? a : b; }
template <typename T> INLINE T fetch(const T* p) { return *p; }
"""


def source(call: BoundProgram, k: int) -> str:
    """One function program_k(captures, ints, floats, places, scores [tiles, NS]), for all key tiles of a thread."""
    layouts = tuple(Layout(t.dim() > 0 and t.stride(-1) == 1, False) for t in call.captures)
    inside, anywhere = (Writer(call.program, Facts(call.program, call, Extents(B + 1, H + 1, Q + n, KV + n)), layouts) for n in (0, 256))
    types = [C_TYPES.get(t.dtype, f"int{8 * t.element_size()}_t" if t.dtype is not torch.uint8 else "uint8_t") for t in call.captures]
    places = sum(2 * t.dim() for t in call.captures)
    fields = [f"const {type}* p_{n};" for n, type in enumerate(types)]
    fields += [f"i64 i_{n};" for n in range(len(call.ints))] + [f"float f_{n};" for n in range(len(call.floats))] + [f"i64 s_{n};" for n in range(places)]
    fills = [f"a.p_{n} = (const {type}*)p[{n}];" for n, type in enumerate(types)]
    fills += [f"a.{kind}_{n} = {kind}[{n}];" for kind, many in (("i", call.ints), ("f", call.floats), ("s", range(places))) for n in range(len(many))]
    return f"""
namespace at_{k} {{
struct Args {{ i32 n_q, n_kv; float score_scale; {" ".join(fields)} }};
{score_source(inside, anywhere).replace('#line 1 "score"', "")}
extern "C" __attribute__((visibility("default"))) void program_{k}(void* const* p, const i64* i, const float* f, const i64* s, float (*tiles)[NS]) {{
    Args a; a.n_q = {Q}; a.n_kv = {KV}; a.score_scale = 1;
    {" ".join(fills)}
    Score score;
    score.begin(a, {B}, {H}, {ROW});
    for (i32 first = 0; first < {KV}; first += KEYS) score.apply(a, *tiles++, first + {2 * COLUMN}, first + KEYS <= {KV} && {ROW + 8} < {Q});
}}
}}
"""


def columns() -> torch.Tensor:
    """The keys that a thread holds of all tiles, in its order."""
    return torch.tensor([first + 8 * j + 2 * COLUMN + e for first in range(0, KV, KEYS) for j in range(KEYS // 8) for e in range(2)])


def given() -> torch.Tensor:
    return torch.randint(-12, 13, (2, len(columns())), generator=torch.Generator().manual_seed(0)) / 4.0


def interpreted(call: BoundProgram) -> torch.Tensor | None:
    """[2, columns]; None where torch raises. Keys past the end are computed as the last: nobody looks at them."""
    at = {
        "b": torch.tensor([[B]]),
        "h": torch.tensor([[H]]),
        "q": torch.tensor(ROWS).view(2, 1),
        "kv": columns().clamp(max=KV - 1).view(1, -1),
        "score": given(),
    }
    try:
        (found,) = interpret(call.program, call, at)
    except RuntimeError:
        return None
    return torch.as_tensor(found).float().expand(2, len(columns()))


def computed(library: ctypes.CDLL, k: int, call: BoundProgram) -> torch.Tensor:
    by_tile = given().view(2, -1, KEYS // 8, 2)  # rows, tiles, j, e
    tiles = by_tile.permute(1, 2, 0, 3).contiguous().float()  # a thread's order: s[4 j + 2 r + e]
    arrays: list[Any] = [
        (ctypes.c_void_p * len(call.captures))(*[t.data_ptr() for t in call.captures]),
        (ctypes.c_int64 * len(call.ints))(*call.ints),
        (ctypes.c_float * len(call.floats))(*call.floats),
        (places := [x for t in call.captures for x in (*t.shape, *t.stride())]) and (ctypes.c_int64 * len(places))(*places),
    ]
    getattr(library, f"program_{k}")(*[array or None for array in arrays], ctypes.c_void_p(tiles.data_ptr()))
    return tiles.permute(2, 0, 1, 3).reshape(2, -1)


def disagreeing(calls: list[BoundProgram]) -> list[int]:
    text = PRELUDE.replace("KEYS", str(KEYS)) + "".join([source(call, k) for k, call in enumerate(calls)]).replace("KEYS", str(KEYS))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "programs.so"
        path.write_bytes(compiler.compiled(text, ("-O1", "-ffp-contract=off")))
        library = ctypes.CDLL(str(path))
    wrong, real = [], columns() < KV
    for k, call in enumerate(calls):
        wanted = interpreted(call)
        assert wanted is not None
        if not torch.allclose(computed(library, k, call)[:, real], wanted[:, real], rtol=1e-4, atol=1e-5, equal_nan=True):
            wrong.append(k)
    return wrong


def test_generated_programs() -> None:
    found = [(tree, trace_value(function_of(tree, captures(seed)), torch.float32)) for tree, seed in drawn()]
    found = [(tree, call) for tree, call in found if interpreted(call) is not None]
    assert len(found) > 75
    wrong = disagreeing([call for _, call in found])
    assert not wrong, f"{len(wrong)} of {len(found)} programs differ, the first: {min([str(found[k][0]) for k in wrong], key=len)}"


NAMED = {
    "alibi": lambda: scores.alibi(8),
    "softcap": lambda: scores.softcap(3.0),
    "relative bias that reaches every key": lambda: scores.relative_bias(torch.randn(8, 2 * KV - 1)),
    "relative bias": lambda: scores.relative_bias(torch.randn(8, 21, dtype=torch.bfloat16)),
    "t5": lambda: scores.relative_bias(torch.randn(32, 8), buckets="t5"),
    "bias": lambda: scores.bias(torch.randn(2, 8, Q, KV, dtype=torch.float16)),
    "bias by key": lambda: scores.bias(torch.randn(KV)),
    "bias by strides": lambda: scores.bias(torch.randn(KV, Q).t()),
    "decay": lambda: scores.distance_decay(0.1),
    "no loads past the end": lambda: lambda s, b, h, q, kv: s + TABLE[q, kv],
}
TABLE = torch.randn(Q, KV)


@pytest.mark.parametrize("name", NAMED)
def test_scores(name: str) -> None:
    call = trace_score((NAMED[name](),), torch.float32)
    assert disagreeing([call]) == []


def test_a_key_is_part_of_a_loads_instruction() -> None:
    """Where no index can leave its table, one address serves all columns of a row, and a float made of a key's place costs one addition."""
    texts = {}
    for name in ("alibi", "relative bias that reaches every key"):
        call = trace_score((NAMED[name](),), torch.float32)
        layouts = tuple(Layout(True, False) for _ in call.captures)
        texts[name] = score_source(*(Writer(call.program, Facts(call.program, call, Extents(1, 8, Q + n, KV + n)), layouts) for n in (0, 256)))
    assert "multiply_add((float)(0 + c), " in texts["alibi"] and "apply_inside" not in texts["alibi"]
    inside, anywhere = texts["relative bias that reaches every key"].split("Distance distance_anywhere")
    assert " + (0 - c))" in inside and "greater" not in inside and "greater" in anywhere
