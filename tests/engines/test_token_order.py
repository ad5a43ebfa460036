"""Tokens of a grid in patches: the same result from fewer tiles, wherever it pays and nowhere else."""

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.support.brute import check_map
from tilewise import masks, scores
from tilewise.core.map_cache import maps
from tilewise.core.problem import Options, make_problem
from tilewise.engines import engine_named
from tilewise.engines.base import Engine
from tilewise.frontend import call_cache, token_order
from tilewise.frontend.token_order import STRIPS, TokenPermutation, tiles_touched
from tilewise.lang import BoundProgram, evaluate, in_patches, trace_score
from tilewise.masks import Grid, Mask
from tilewise.tiles import Geometry, from_call

ORDERS = [
    ((16, 12), (8,)),
    ((13, 7), (4,)),
    ((5, 9), (8,)),
    ((6, 4, 3), (2, 2)),
    ((6, 4, 3), (4, 2)),
    ((6, 5, 7), (2, 3)),
    ((6, 5, 7), (4, 2)),
    ((5, 4, 3), (1, 2)),
    ((5, 4, 3), (8, 8)),
]


def listed(shape: tuple[int, ...], strips: tuple[int, ...]) -> Tensor:
    """The row-major indices of a grid's points in the order of strips, written out."""
    cuts = [[range(at, min(at + strip, size)) for at in range(0, size, strip)] for size, strip in zip(shape[:-1], strips, strict=True)]
    found: list[int] = []
    for spans in itertools.product(*cuts):
        for column in range(shape[-1]):
            for point in itertools.product(*spans):
                index = 0
                for place, size in zip((*point, column), shape, strict=True):
                    index = index * size + place
                found.append(index)
    return torch.tensor(found)


def rewritten(call: BoundProgram, shape: tuple[int, ...], strips: tuple[int, ...]) -> BoundProgram:
    return TokenPermutation(shape, strips).rewritten(call)


def dense(call: BoundProgram, length: int) -> Tensor:
    at = torch.arange(length)
    return torch.as_tensor(evaluate(call, {"q": at[:, None], "kv": at[None]})).expand(length, length)


# -- the order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "strips"), ORDERS, ids=str)
def test_index_in_patches(shape: tuple[int, ...], strips: tuple[int, ...]) -> None:
    call = trace_score((lambda s, b, h, q, kv: s + q,), torch.float64)
    at = torch.arange(prod(shape))
    found = evaluate(in_patches(call, "q", shape, strips), {"q": at, "score": torch.zeros(len(at), dtype=torch.float64)})
    assert torch.equal(found.long(), listed(shape, strips))


@pytest.mark.parametrize(("shape", "strips"), ORDERS, ids=str)
def test_mask_in_patches(shape: tuple[int, ...], strips: tuple[int, ...]) -> None:
    places, count = listed(shape, strips), prod(shape)
    ids = torch.arange(count) // 17
    for mask in (masks.neighborhood(shape, tuple(max(1, n // 2) for n in shape)), masks.causal, masks.sliding_window(5) & masks.document(ids), masks.full):
        call = mask.traced()
        assert torch.equal(dense(rewritten(call, shape, strips), count), dense(call, count)[places][:, places])


@pytest.mark.parametrize(("shape", "strips"), ORDERS, ids=str)
def test_maps_of_patches_are_exact(shape: tuple[int, ...], strips: tuple[int, ...]) -> None:
    call = rewritten(masks.neighborhood(shape, tuple(min(3, n) for n in shape)).traced(), shape, strips)
    for tile in ((8, 8), (16, 4)):
        check_map(from_call(call, Geometry(1, 1, prod(shape), prod(shape), tile), "mask", "cpu"), dense(call, prod(shape))[None, None])


@pytest.mark.parametrize(("shape", "strips"), ORDERS, ids=str)
def test_tensors_in_patches(shape: tuple[int, ...], strips: tuple[int, ...]) -> None:
    places, count, o = listed(shape, strips), prod(shape), TokenPermutation(shape, strips)
    for tensor in (torch.randn(2, 3, count, 4), torch.randn(2, count, 3, 4).transpose(1, 2), torch.randn(4, count, 2, 3).permute(2, 3, 1, 0)):
        there = o.permute(tensor, 2)
        back = o.unpermute(there, 2)
        assert torch.equal(there, tensor[:, :, places])
        assert torch.equal(back, tensor)
        assert there.stride() == back.stride() == tensor.stride()
    lse = torch.randn(2, 3, count)
    assert torch.equal(o.unpermute(lse[:, :, places], 2), lse)


def divisions(call: BoundProgram) -> int:
    return sum(i.op in ("mod", "floordiv") for i in call.program.instructions)


def test_rows_and_columns_are_given_not_divided_for() -> None:
    """The mask's own divisions by the grid's sizes are gone: what is left is the order's, of which half are by small powers of two."""
    height, width = 24, 40

    def own(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return ((q // width - kv // width).abs() <= 2) & ((q % width - kv % width).abs() <= 3)

    for mask in (masks.neighborhood((height, width), 5), masks.as_mask(own)):
        call = rewritten(mask.traced(), (height, width), (8,))
        assert divisions(call) == 2 * 4
    call = rewritten(masks.neighborhood((8, 6, 10), 3).traced(), (8, 6, 10), (4, 2))
    assert divisions(call) == 2 * 8


def test_one_program_for_all_grids_that_strips_divide_alike() -> None:
    def text(shape: tuple[int, ...], window: int, strips: tuple[int, ...]) -> str:
        return rewritten(masks.neighborhood(shape, window).traced(), shape, strips).program.text

    assert text((64, 64), 13, (8,)) == text((32, 50), 7, (8,))
    assert text((60, 60), 13, (8,)) == text((33, 47), 7, (8,)) != text((64, 64), 13, (8,))


# -- counting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [(64, 64), (128, 64), (64, 128), (192, 128)], ids=str)
@pytest.mark.parametrize(
    ("shape", "window"),
    [((32, 32), 7), ((64, 48), 13), ((50, 38), 9), ((37, 41), (5, 21)), ((32, 32), 32), ((8, 16, 16), 5), ((6, 13, 18), (3, 7, 5)), ((3, 24, 20), 3)],
    ids=str,
)
def test_counts_are_those_of_the_maps(shape: tuple[int, ...], window: Any, tile: tuple[int, int]) -> None:
    mask = masks.neighborhood(shape, window)
    assert mask.grid is not None
    for strips in [(1,) * (len(shape) - 1), *STRIPS[len(shape)]]:
        geometry = Geometry(1, 1, prod(shape), prod(shape), tile)
        real = from_call(rewritten(mask.traced(), shape, strips), geometry, "mask", "cpu").computed_tiles
        found = tiles_touched(mask.grid, strips, tile)
        assert real <= found <= 1.03 * real, (strips, found, real)


def test_counts_of_large_grids_are_near() -> None:
    mask = masks.neighborhood((96, 96), 13)
    assert mask.grid is not None
    for strips in [(1,), *STRIPS[2]]:
        real = from_call(rewritten(mask.traced(), (96, 96), strips), Geometry(1, 1, 96**2, 96**2, (64, 64)), "mask", "cpu").computed_tiles
        assert abs(tiles_touched(mask.grid, strips, (64, 64)) / real - 1) < 0.05


def test_the_case_it_is_for() -> None:
    """128 x 128 tokens, windows of 13 x 13: a tile of half a row touches 26 others, a patch at most 9."""
    grid = Grid((128, 128), (13, 13))
    assert tiles_touched(grid, (1,), (64, 64)) == 26 * 256
    strips, said = token_order.best(grid.shape, grid.window, (64, 64), Engine.min_keys_spared)
    assert strips == (8,)
    assert "in patches of 8x8, 6656 row by row" in said


# -- when ------------------------------------------------------------------------------------------------------------


def why(mask: Any, length: int = 128 * 128, engine: str = "cpp", **options: Any) -> str:
    """The order of a call, or why there is none."""
    q = torch.empty((1, 1, length, 8))
    found = token_order.ordering(engine_named(engine), make_problem(q, q, q, mask, None, Options(**options))[0])
    return str(found.permutation.strips) if found.permutation is not None else found.reason


def test_when() -> None:
    near = masks.neighborhood((128, 128), 13)
    assert why(near) == why(near & masks.causal) == why((lambda b, h, q, kv: q != kv) & near) == "(8,)"
    assert why(near | masks.neighborhood((128, 128), 3)) == "(8,)"
    assert why(near, is_causal=True) == "(8,)"
    assert why(near, engine="reference") == "reference skips no tiles"
    assert why(near, dropout_p=0.1) == "dropout is by place"
    assert why(masks.on_grid(near.function, (128, 128), 13), 100) == "the grid has 16384 points, the call 100 queries and 100 keys"
    assert why(masks.neighborhood(128 * 128, 13)) == "the grid has one axis"
    assert why(masks.neighborhood((32, 32), 7), 1024).endswith("too little for the copies it takes")
    for mask in (masks.causal, near | masks.causal, ~near, near & masks.neighborhood((64, 256), 13), lambda b, h, q, kv: q >= kv, None):
        assert why(mask) == "the mask is on no grid"


def test_grids_of_combined_masks() -> None:
    small, large = masks.neighborhood((16, 16), 3), masks.neighborhood((16, 16), (5, 7))
    assert (small & large).grid == Grid((16, 16), (3, 3))
    assert (small | large).grid == Grid((16, 16), (5, 7))
    assert (masks.causal & large).grid == large.grid


def test_on_grid() -> None:
    def plus(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return ((q // 128 == kv // 128) | (q % 128 == kv % 128)) & ((q - kv).abs() <= 5 * 129)

    mask = masks.on_grid(plus, (128, 128), 11)
    assert mask.grid == Grid((128, 128), (11, 11))
    assert mask.name == masks.as_mask(plus).name
    assert why(mask) == "(8,)"
    assert why(masks.on_grid(masks.neighborhood((128, 128), 13) | masks.global_tokens(3), (128, 128), 13)) == "(8,)"
    with pytest.raises(tw.InputError, match="on_grid: shape"):
        masks.on_grid(plus, (128, 128), 200)


def test_explain() -> None:
    q = torch.empty((1, 2, 64 * 64, 16))
    near = masks.neighborhood((64, 64), 13)
    said = tw.explain(q, q, q, mask=near, backend="cpp")
    assert said.order == "by patches; 484 tiles of 64 x 64 in patches of 8x8, 832 row by row"
    assert f"order of tokens: {said.order}" in str(said)
    assert said.computed_tiles == 2 * 220
    assert tw.explain(q, q, q, mask=near, dropout_p=0.5, backend="cpp").order == "as given; dropout is by place"
    assert tw.explain(q, q, q, mask=near, backend="math").order == "as given; reference skips no tiles"
    assert tw.explain(q, q, q, mask=masks.causal).order == ""


# -- the result ------------------------------------------------------------------------------------------------------


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TokenPermutation]]:
    """Small grids are put in patches too, whatever it costs; the orders taken are listed."""
    taken: list[TokenPermutation] = []
    original = TokenPermutation.rewritten

    def noted(self: TokenPermutation, call: BoundProgram) -> BoundProgram:
        taken.append(self)
        return original(self, call)

    monkeypatch.setattr(Engine, "min_keys_spared", -(10**9))
    monkeypatch.setattr(TokenPermutation, "rewritten", noted)
    call_cache.forget()
    yield taken
    call_cache.forget()


def tensors(length: int, heads: int = 2, kv_heads: int = 2, dtype: torch.dtype = torch.float64, batch: int = 1, v_dim: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((batch, heads, length, 8), (batch, kv_heads, length, 8), (batch, kv_heads, length, v_dim))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def check(inputs: list[Tensor], mask: Mask, engine: str, learned: tuple[Tensor, ...] = (), **options: Any) -> None:
    found = []
    for backend in (engine, "reference"):
        out, lse = tw.attention(*inputs, mask=mask, backend=backend, return_lse=True, **options)
        gradients = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), [*inputs, *learned])
        found.append((out, lse, *gradients))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert found[0][0].stride() == found[1][0].stride()


GRIDS: list[tuple[tuple[int, ...], Any]] = [
    ((16, 24), 5),
    ((40, 24), (7, 3)),
    ((13, 29), 5),
    ((5, 60), (5, 9)),
    ((60, 5), (9, 5)),
    ((1, 200), (1, 7)),
    ((200, 1), (7, 1)),
    ((8, 8, 8), 3),
    ((5, 7, 9), (3, 5, 3)),
    ((10, 9, 4), 4),
    ((1, 17, 19), (1, 5, 5)),
    ((2, 2, 64), (1, 2, 5)),
]


@pytest.mark.parametrize("engine", ["blocked", "cpp"])
@pytest.mark.parametrize(("shape", "window"), GRIDS, ids=str)
def test_equals_the_reference(shape: tuple[int, ...], window: Any, engine: str, always: list[TokenPermutation]) -> None:
    check(tensors(prod(shape)), masks.neighborhood(shape, window), engine)
    assert {o.shape for o in always} == {shape}


@pytest.mark.parametrize("options", [{"dilation": 2}, {"stride": (2, 3)}, {"is_causal": (True, False)}], ids=str)
def test_neighborhoods_as_natten_has_them(always: list[TokenPermutation], options: dict[str, Any]) -> None:
    check(tensors(16 * 24), masks.neighborhood((16, 24), 5, **options), "cpp")
    assert {o.shape for o in always} == {(16, 24)}


COMBINED: dict[str, Callable[[Mask, Tensor], dict[str, Any]]] = {
    "causal": lambda near, ids: {"mask": near & masks.causal},
    "is_causal": lambda near, ids: {"mask": near, "is_causal": True},
    "documents": lambda near, ids: {"mask": masks.document(ids) & near},
    "flat positions in a score": lambda near, ids: {"mask": near, "score": scores.distance_decay(0.01)},
    "global tokens": lambda near, ids: {"mask": masks.on_grid(near | masks.global_tokens(3), (16, 24), 7)},
    "nothing to attend": lambda near, ids: {"mask": near & (lambda b, h, q, kv: q % 5 != 0)},
    "scale": lambda near, ids: {"mask": near, "scale": 0.7},
}


@pytest.mark.parametrize("engine", ["blocked", "cpp"])
@pytest.mark.parametrize("name", COMBINED)
def test_combined(name: str, engine: str, always: list[TokenPermutation]) -> None:
    ids = torch.arange(16 * 24) // 50
    check(tensors(16 * 24, v_dim=5), engine=engine, **COMBINED[name](masks.neighborhood((16, 24), 7), ids))
    assert always


@pytest.mark.parametrize("engine", ["blocked", "cpp"])
@pytest.mark.parametrize("shape", [(16, 24), (13, 29)], ids=str)
def test_learned_scores_sinks_and_shared_heads(shape: tuple[int, ...], engine: str, always: list[TokenPermutation]) -> None:
    table, logits = torch.randn((4, prod(shape)), dtype=torch.float64, requires_grad=True), torch.randn(4, dtype=torch.float64, requires_grad=True)
    learned = [lambda s, b, h, q, kv: s + table[h, q] * table[h, kv], scores.sinks(logits)]
    check(tensors(prod(shape), 4, 2, batch=2), masks.neighborhood(shape, 5), engine, (table, logits), score=learned, enable_gqa=True)
    assert always


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_layouts(layout: str, always: list[TokenPermutation]) -> None:
    sizes = {"b": 2, "h": 3, "s": 16 * 24, "d": 8}
    inputs = [torch.randn([sizes[axis] for axis in layout], dtype=torch.float64, requires_grad=True) for _ in range(3)]
    check(inputs, masks.neighborhood((16, 24), 7), "cpp", layout=layout)
    flat = [torch.randn((2, 16 * 24, 3 * 8), dtype=torch.float64, requires_grad=True) for _ in range(3)]
    check(flat, masks.neighborhood((16, 24), 7), "cpp", heads=3)
    assert always


def test_keys_of_one_batch_element_for_all(always: list[TokenPermutation]) -> None:
    query, key, value = tensors(16 * 24, batch=3)
    inputs = [query, key.detach()[:1].requires_grad_(), value.detach()[:1].requires_grad_()]
    check(inputs, masks.neighborhood((16, 24), 7), "cpp")
    check([query, query, query.detach().requires_grad_()], masks.neighborhood((16, 24), 7), "cpp")
    assert always


def test_keys_of_one_head_for_all(always: list[TokenPermutation], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied once, unless a gradient is asked for of what each head has."""
    query, key, value = tensors(16 * 24, batch=2, kv_heads=1)
    shared = [query, key.expand(2, 2, -1, -1), value.expand(2, 2, -1, -1)]
    check(shared, masks.neighborhood((16, 24), 7), "cpp")
    copied: list[torch.Size] = []
    permute = TokenPermutation.permute

    def noted(self: TokenPermutation, tensor: Tensor, dim: int) -> Tensor:
        copied.append(tensor.shape)
        return permute(self, tensor, dim)

    monkeypatch.setattr(TokenPermutation, "permute", noted)
    with torch.no_grad():
        found, wanted = (tw.attention(*shared, mask=masks.neighborhood((16, 24), 7), backend=engine) for engine in ("cpp", "reference"))
    torch.testing.assert_close(found, wanted)
    assert always and sorted([shape[1] for shape in copied]) == [1, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, always: list[TokenPermutation]) -> None:
    """The order changes no more than the order of sums does."""
    inputs, mask = [t.detach() for t in tensors(40 * 24, dtype=dtype)], masks.neighborhood((40, 24), 7)
    found = tw.attention(*inputs, mask=mask, backend="cpp")
    assert always
    assert found.dtype == dtype
    torch.testing.assert_close(found, tw.attention(*inputs, mask=mask, backend="reference"), rtol=0.02, atol=0.01 if dtype == torch.bfloat16 else 1e-5)


def test_autocast(always: list[TokenPermutation]) -> None:
    inputs, mask = [t.detach() for t in tensors(16 * 24, dtype=torch.float32)], masks.neighborhood((16, 24), 7)
    with torch.autocast("cpu", torch.bfloat16):
        found = tw.attention(*inputs, mask=mask, backend="cpp")
        expected = tw.attention(*inputs, mask=mask, backend="reference")
    assert always
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)


def test_flex(always: list[TokenPermutation]) -> None:
    inputs, mask = tensors(16 * 24), masks.neighborhood((16, 24), 7)
    wanted = tw.flex.AuxRequest(lse=True, max_scores=True)
    with tw.attention_backend("cpp"):
        out, aux = tw.flex.flex_attention(*inputs, block_mask=mask, return_aux=wanted)
    with tw.attention_backend("reference"):
        expected, expected_aux = tw.flex.flex_attention(*inputs, block_mask=mask, return_aux=wanted)
    assert always
    torch.testing.assert_close((out, aux.lse, aux.max_scores), (expected, expected_aux.lse, expected_aux.max_scores))


# -- again and again -------------------------------------------------------------------------------------------------


def test_a_second_call_makes_nothing_anew(always: list[TokenPermutation], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    namespace = tw.attention.__globals__
    original = namespace["make_problem"]
    monkeypatch.setitem(namespace, "make_problem", lambda *args: made.append(1) or original(*args))
    inputs = tensors(16 * 24)

    def step() -> Tensor:
        out = tw.attention(*inputs, mask=masks.neighborhood((16, 24), 7), score=scores.softcap(20.0), backend="cpp")
        out.sum().backward()
        return out

    first = step()
    built = maps.built
    rewritten = token_order._rewritten.cache_info().misses
    assert len(made) == 1 and always
    for _ in range(3):
        assert torch.equal(step(), first)
    assert (len(made), token_order._rewritten.cache_info().misses, maps.built) == (1, rewritten, built)


def test_kernels_built_ahead_are_those_of_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.engines.cpp.libraries import Counts

    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    near = masks.neighborhood((64, 64), 13)
    own = lambda s, b, h, q, kv: s * 0.7531 + q  # a program that no other test has
    tw.build_kernels(masks=[near], scores=[own], head_dims=[64], dtypes=["fp32"], arch="cpu")
    before = Counts.built
    x = torch.randn((1, 1, 64 * 64, 64), requires_grad=True)
    assert tw.explain(x, x, x, mask=near, backend="cpp").order.startswith("by patches")
    tw.attention(x, x, x, mask=near, score=own, backend="cpp").sum().backward()
    assert Counts.built == before


def test_a_captured_tensor_changed_in_place_counts(always: list[TokenPermutation]) -> None:
    ids = torch.arange(16 * 24) // 50
    mask, inputs = masks.neighborhood((16, 24), 7) & masks.document(ids), [t.detach() for t in tensors(16 * 24)]
    for lengths in (50, 30):
        ids.copy_(torch.arange(16 * 24) // lengths)
        torch.testing.assert_close(tw.attention(*inputs, mask=mask, backend="cpp"), tw.attention(*inputs, mask=mask, backend="reference"))
    assert always


def test_nothing_is_kept_alive(always: list[TokenPermutation]) -> None:
    def call() -> list[weakref.ref[Tensor]]:
        ids, table = torch.arange(16 * 24) // 50, torch.randn(16 * 24)
        inputs = [t.detach() for t in tensors(16 * 24, dtype=torch.float32)]
        for _ in range(2):
            tw.attention(*inputs, mask=masks.neighborhood((16, 24), 7) & masks.document(ids), score=lambda s, b, h, q, kv: s + table[q], backend="cpp")
        return [weakref.ref(t) for t in (ids, table, *inputs)]

    held = call()
    gc.collect()
    assert always
    assert [ref() for ref in held] == [None] * 5


def test_one_function_on_two_grids(always: list[TokenPermutation]) -> None:
    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() <= 30

    inputs = [t.detach() for t in tensors(16 * 24)]
    expected = tw.attention(*inputs, mask=near, backend="reference")
    for shape in ((16, 24), (24, 16), (4, 8, 12)):
        torch.testing.assert_close(tw.attention(*inputs, mask=masks.on_grid(near, shape, 3), backend="cpp"), expected)
    assert {o.shape for o in always} == {(16, 24), (24, 16), (4, 8, 12)}


@pytest.fixture
def always_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Engine, "min_keys_spared", -(10**9))
    torch._dynamo.reset()
    yield


@pytest.mark.usefixtures("always_compiled")
@pytest.mark.parametrize("shape", [(13, 29), (5, 7, 9)], ids=str)
def test_compiled(shape: tuple[int, ...]) -> None:
    inputs = tensors(prod(shape))
    table = torch.randn((2, prod(shape)), dtype=torch.float64, requires_grad=True)
    near = masks.neighborhood(shape, 3)
    graphs: list[torch.fx.GraphModule] = []

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return tw.attention(q, k, v, mask=near & masks.causal, score=lambda s, b, h, i, j: s + table[h, i] * table[h, j], return_lse=True, backend="cpp")

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    found, expected = torch.compile(function, fullgraph=True, backend=backend)(*inputs), function(*inputs)
    assert any("unflatten" in str(node.target) for node in graphs[0].graph.nodes)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    leaves = [*inputs, table]
    for a, b in zip(*(torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves) for out, lse in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("always_compiled")
def test_compiled_for_sizes_that_vary() -> None:
    """One graph serves them all, in the order given: how many tiles there are is not known while compiling."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda mask, q, k, v: tw.attention(q, k, v, mask=mask, backend="cpp"), fullgraph=True, backend=counter)
    for shape in ((16, 24), (17, 22), (30, 12), (9, 40)):
        inputs, mask = tensors(prod(shape)), masks.neighborhood(shape, 5)
        torch.testing.assert_close(compiled(mask, *inputs), tw.attention(*inputs, mask=mask, backend="reference"))
    assert counter.frame_count <= 3


@pytest.mark.usefixtures("always_compiled")
@pytest.mark.parametrize("layout", ["bhsd", "sbhd"])
def test_compiled_where_strides_vary(layout: str) -> None:
    """Which dimension lies innermost is not known then: tokens stay as given."""
    mask = masks.neighborhood((12, 14), 5)
    compiled = torch.compile(lambda q: tw.attention(q, q, q, mask=mask, layout=layout, backend="cpp"), fullgraph=True, backend="eager", dynamic=True)
    for batch in (2, 3):
        q = torch.randn((batch, 2, 168, 16) if layout == "bhsd" else (168, batch, 2, 16))
        torch.testing.assert_close(compiled(q), tw.attention(q, q, q, mask=mask, layout=layout, backend="reference"))


@pytest.mark.parametrize("shape", ["12", (12, "a"), (12, 3.5), None])
def test_sizes_of_a_grid_are_whole_numbers(shape: Any) -> None:
    with pytest.raises(tw.InputError, match="whole numbers, one for each axis"):
        masks.neighborhood(shape, 3)


def test_sizes_of_a_grid_may_be_tensors() -> None:
    assert masks.neighborhood(torch.tensor([12, 14]), torch.tensor([5, 3])).grid == masks.neighborhood((12, 14), (5, 3)).grid


@pytest.mark.usefixtures("always_compiled")
def test_compiled_ahead_of_autograd() -> None:
    inputs = tensors(13 * 29)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q, k, v, mask=masks.neighborhood((13, 29), 5), backend="cpp")

    found, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs), function(*inputs)
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(out.sin().sum(), inputs) for out in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_watch_counts_the_tiles_that_are_computed() -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return tw.attention(q, q, q, mask=masks.neighborhood((64, 64), 13), backend="cpp")

    layer = Attention()
    with tw.watch(layer) as seen:
        layer(torch.zeros((1, 1, 64 * 64, 8)))
    assert [use.computed for use in seen.layers[0].uses] == [220]
