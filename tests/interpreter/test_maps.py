"""Tile maps whose tiles a kernel has looked into, in Triton's interpreter: exactly those of the dense mask."""

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw
from tests.support.brute import check_map, dense_mask, states_of
from tests.support.looked_maps import looked_map, problem
from tests.tiles.test_build import BATCH, CASES, HEADS
from tests.tiles.test_properties import FLAGS, INTEGERS, SORTED, Expression, binary, leaf, random_masks, unary
from tilewise.core.map_cache import maps
from tilewise.core.problem import Problem
from tilewise.engines.gpu import tile_classifier
from tilewise.engines.gpu.generated import generated
from tilewise.engines.gpu.mods import bounds_of
from tilewise.engines.gpu.tile_classifier import kernel_map
from tilewise.lang import Bounds, point, steps
from tilewise.tiles import PARTIAL, Geometry, TileMap, build
from tilewise.tiles.runs import from_dense

WAYS = {"every tile": build.SEEN_WHOLE_ON_CPU, "those that bounds leave open": 0}  # most mask elements, or tiles, of which every tile is looked into


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_map_is_exact(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SEEN_WHOLE_ON_CPU", WAYS[way])
    monkeypatch.setattr(build, "BOUNDED_WHOLE", WAYS[way])
    for (q_len, kv_len), tile in (((97, 130), (32, 64)), ((65, 63), (48, 80)), ((1, 70), (16, 16))):
        mask = CASES[name].function(q_len, kv_len)
        found = looked_map(mask, BATCH, HEADS, (q_len, kv_len), tile, "cpu")
        uses = CASES[name].uses
        assert found.shape == (BATCH if "b" in uses else 1, HEADS if "h" in uses else 1, q_len, kv_len)
        check_map(found, dense_mask(mask, BATCH, HEADS, q_len, kv_len))


@pytest.mark.parametrize("tile", [(64, 128), (192, 128), (33, 65), (96, 40), (7, 200)], ids=str)
@pytest.mark.parametrize("allowed", [False, True])
def test_one_element_makes_a_tile_partial(tile: tuple[int, int], allowed: bool) -> None:
    """Wherever it lies: in every tile another, in the last ones, which the ends of the sequences cut, too. A look that ends too early takes it for what it
    has seen of it."""
    (m, n), generator = tile, torch.Generator().manual_seed(1)
    q_len, kv_len = 3 * m + m // 2 + 1, 4 * n + n // 3 + 1
    heights, widths = torch.tensor([m, m, m, m // 2 + 1]), torch.tensor([n, n, n, n, n // 3 + 1])
    row, column = ((torch.rand(4, 5, generator=generator) * sizes).long() for sizes in (heights[:, None], widths))
    row[0, 0], column[0, 0] = 0, 0  # first, last, and those next to the last
    row[0, 1], column[0, 1] = m - 1, n - 1
    row[0, 2], column[0, 2] = m - 2, n - 1
    row[0, 3], column[0, 3] = m - 1, n - 2
    row[3, 4], column[3, 4] = heights[3] - 1, widths[4] - 1
    mask = lambda b, h, q, kv: ((q % m == row[q // m, kv // n]) & (kv % n == column[q // m, kv // n])) == allowed
    found = looked_map(mask, 1, 1, (q_len, kv_len), tile, "cpu")
    assert (found.partial_tiles, found.full_tiles) == (20, 0)
    check_map(found, dense_mask(mask, 1, 1, q_len, kv_len))


LOOKED_INTO = {  # masks of which the kernel has no bounds: they load in two dimensions, or by an index that may be wrapped, or compute something else
    "tree",
    "cross",
    "loads of loads",
    "table of blocks",
    "table of blocks per head",
    "float arithmetic",
    "distances of points",
    "waves",
    "nan",
    "infinities",
    "negative index",
    "bits",
    "large numbers",
    "where",
}


def decided(p: Problem, tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Which tiles, of at least two keys, the kernel's bounds decide about, and how: a look that evaluates another mask takes the others for partial."""
    every_other_key = generated("mask", ["@triton.jit", "def mask(b, h, q, kv, p, i, f, s):", "    return -(kv % 2)"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tile_classifier, "mask_of", lambda p: every_other_key)
        maps.clear()
        made = kernel_map(p, tile)
    maps.clear()
    assert made is not None
    return made.dense() != PARTIAL, made.dense()


@pytest.mark.parametrize("name", CASES)
def test_bounds_in_the_kernel(name: str) -> None:
    """They decide what bounds in torch do, and rightly."""
    q_len, kv_len, tile = 97, 130, (16, 16)
    mask = CASES[name].function(q_len, kv_len)
    p = problem(mask, BATCH, HEADS, q_len, kv_len, "cpu")
    assert p.mask is not None and (bounds_of(p) is None) == (name in LOOKED_INTO)
    if name in LOOKED_INTO:
        return
    known, states = decided(p, tile)
    wanted = states_of(dense_mask(mask, BATCH, HEADS, q_len, kv_len), tile)
    assert torch.equal(torch.where(known, states, wanted), wanted)
    b, h, q, kv = torch.meshgrid(*[torch.arange(n) for n in known.shape], indexing="ij")
    box = {"b": point(b.double()), "h": point(h.double()), "q": steps(q, tile[0], q_len), "kv": steps(kv, tile[1], kv_len)}
    interval = Bounds(p.mask, p.device).over(box)
    assert bool((known | (interval.lo != interval.hi)).all())


few = st.integers(0, 6)
places = st.sampled_from([leaf("q"), leaf("kv"), leaf("b"), leaf("h")])
LOADS = [lambda i: INTEGERS[i.abs() % 20], lambda i: SORTED[i.clamp(0, 19)], lambda i: INTEGERS.int()[i.abs().clamp(max=19)]]
TWO = [operator.add, operator.sub, operator.mul, torch.minimum, torch.maximum, lambda x, y: x.abs() // (y.abs() + 1)]
arithmetic = st.recursive(
    places,
    lambda inner: st.one_of(
        st.builds(lambda f, x, y: binary(f)(x, y), st.sampled_from(TWO), inner, inner),
        st.builds(lambda x, c: unary(lambda v: v.abs() % (c + 1))(x), inner, few),
        st.builds(lambda x, c: unary(lambda v: c - v * 2)(x), inner, few),
    ),
    max_leaves=3,
)
COMPARED = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
truths = st.one_of(
    st.builds(lambda f, x, c: unary(lambda v: f(v, c))(x), st.sampled_from(COMPARED), arithmetic, few),
    st.builds(lambda f, g, x, y: binary(lambda v, w: f(g(v), w))(x, y), st.sampled_from(COMPARED), st.sampled_from(LOADS), arithmetic, arithmetic),
    st.builds(unary(lambda v: FLAGS[v.abs() % 7]), arithmetic),
)
followed = st.recursive(  # masks of which the kernel has bounds
    truths,
    lambda inner: st.one_of(
        st.builds(lambda f, x, y: binary(f)(x, y), st.sampled_from([operator.and_, operator.or_, operator.eq, operator.ne]), inner, inner),
        st.builds(unary(operator.invert), inner),
    ),
    max_leaves=3,
)
EXPRESSIONS = {
    "sum": lambda q, kv: q + kv - 9,
    "difference": lambda q, kv: q - kv,
    "product": lambda q, kv: (q - 3) * (kv - 4),
    "negative": lambda q, kv: -q,
    "absolute": lambda q, kv: (q - 6).abs(),
    "quotient": lambda q, kv: q // 3,
    "quotient of two": lambda q, kv: q // (kv + 1),
    "remainder": lambda q, kv: kv % 5,
    "remainder of two": lambda q, kv: q % (kv + 1),
    "minimum": lambda q, kv: torch.minimum(q - 4, kv),
    "maximum": lambda q, kv: torch.maximum(q - 4, kv - 6),
    "clamped": lambda q, kv: q.clamp(2, 5),
    "loaded": lambda q, kv: INTEGERS[q],
    "loaded, as int32": lambda q, kv: SORTED.int()[kv // 2],
}


@pytest.mark.parametrize("compare", COMPARED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_bounds_of_every_operation(name: str, compare: Any) -> None:
    """Compared with several numbers, and with as many intervals, so that every end of one decides about some tile."""
    mask = lambda b, h, q, kv: compare(EXPRESSIONS[name](q, kv), b - 2 + h * kv)
    p = problem(mask, 7, 2, 10, 10, "cpu")
    assert bounds_of(p) is not None
    known, states = decided(p, (3, 4))
    wanted = states_of(dense_mask(mask, 7, 2, 10, 10), (3, 4))
    assert torch.equal(torch.where(known, states, wanted), wanted) and bool(known.any())


@pytest.mark.parametrize("combine", [operator.and_, operator.or_, operator.eq, operator.ne], ids=lambda f: f.__name__)
def test_bounds_of_truths(combine: Any) -> None:
    mask = lambda b, h, q, kv: combine(q + b > 4, ~(kv + h < 7)) | FLAGS[b + 2]
    p = problem(mask, 4, 6, 10, 10, "cpu")
    assert bounds_of(p) is not None
    known, states = decided(p, (3, 4))
    wanted = states_of(dense_mask(mask, 4, 6, 10, 10), (3, 4))
    assert torch.equal(torch.where(known, states, wanted), wanted) and bool(known.any()) and not bool(known.all())


@settings(max_examples=40)
@given(followed, st.tuples(st.integers(1, 24), st.sampled_from([2, 8, 18, 24])), st.tuples(st.integers(3, 9), st.sampled_from([4, 6, 8])))
def test_bounds_of_random_masks(mask: Expression, lengths: tuple[int, int], tile: tuple[int, int]) -> None:
    p = problem(mask, 2, 2, *lengths, "cpu")
    assert bounds_of(p) is not None
    known, states = decided(p, tile)
    wanted = states_of(dense_mask(mask, 2, 2, *lengths), tile)
    assert torch.equal(torch.where(known, states, wanted), wanted)


@pytest.mark.parametrize("mask", [lambda x: x * x >= 101, lambda x: x * x <= 2**29, lambda x: (x - 2**15) * (x + 2**15) <= 0])
def test_numbers_of_long_stretches_are_taken_for_those_of_their_dtype(mask: Any) -> None:
    """Nothing is known of such a stretch but that; with wider limits, a product of two would wrap."""
    table = torch.arange(16 * 512, dtype=torch.int32) * 2**17 + 2**24

    def function(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return mask(table[kv * 16].clamp(min=0) // 65536)

    p = problem(function, 1, 1, 64, 512, "cpu")
    assert bounds_of(p) is not None
    known, states = decided(p, (64, 128))
    wanted = states_of(dense_mask(function, 1, 1, 64, 512), (64, 128))
    assert torch.equal(torch.where(known, states, wanted), wanted)


def test_bounds_of_long_stretches_of_a_tensor() -> None:
    """Those of up to 256 elements are looked over, and of longer ones nothing is known."""
    ids = torch.arange(1000) // 290
    mask = lambda b, h, q, kv: ids[(q * 2).clamp(max=999)] == ids[kv]
    for tile in ((128, 64), (256, 256), (16, 300)):
        check_map(looked_map(mask, 1, 1, (500, 1000), tile, "cpu"), dense_mask(mask, 1, 1, 500, 1000))


@settings(max_examples=40)
@given(random_masks, st.tuples(st.integers(1, 50), st.integers(1, 50)), st.tuples(st.integers(16, 40), st.integers(16, 70)))
def test_random_masks_have_exact_maps(mask: Expression, lengths: tuple[int, int], tile: tuple[int, int]) -> None:
    check_map(looked_map(mask, 2, 2, lengths, tile, "cpu"), dense_mask(mask, 2, 2, *lengths))


@pytest.mark.parametrize("shape", [(1, 1, 97, 130), (2, 1, 97, 130), (1, 3, 97, 130), (2, 3, 97, 130)], ids=str)
def test_dense_masks(shape: tuple[int, ...]) -> None:
    dense = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.02
    dense[:, :, :40, 30:100] = True
    found = looked_map(dense, 2, 3, (97, 130), (16, 32), "cpu")
    assert found.shape == shape and found.full_tiles > 0
    check_map(found, dense.expand(2, 3, -1, -1))


@pytest.mark.parametrize("queries", [40, 1])
def test_a_loaded_map_attends_as_the_saved_one(queries: int, tmp_path: Path) -> None:
    offsets = torch.tensor([40, -40, 3])
    tile_map = tw.tile_map(lambda b, h, q, kv: offsets[kv % 5] > offsets[q - 9], q_len=queries, kv_len=40, tile=(16, 16))
    tile_map.save(tmp_path / "map")
    x = torch.randn(1, 1, 40, 16, generator=torch.Generator().manual_seed(0))
    found = tw.attention(x[:, :, :queries], x, x, mask=tw.TileMap.load(tmp_path / "map"), backend="triton")
    torch.testing.assert_close(found, tw.attention(x[:, :, :queries], x, x, mask=tile_map, backend="reference"))


@pytest.mark.parametrize("tile", [(32, 32), (64, 64)], ids=["kernel tiles", "larger tiles"])
def test_a_given_map_changed_in_place(tile: tuple[int, int]) -> None:
    """Its schedules are made again, in both passes."""
    x = [torch.randn(1, 2, 128, 16, requires_grad=True) for _ in range(3)]
    size = 128 // tile[0]
    tiles = torch.eye(size, dtype=torch.bool)
    given_map = TileMap(Geometry(1, 1, 128, 128, tile), from_dense(tiles & False), from_dense(tiles), None, given=True)
    seen = []
    for column in (0, size - 1):
        given_map.full.start[0] = column  # the first row's only tile
        found, expected = (tw.attention(*x, mask=given_map, backend=backend) for backend in ("triton", "reference"))
        gradients = [torch.autograd.grad(out.square().sum(), x) for out in (found, expected)]
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*gradients)
        seen.append(found)
    assert not torch.equal(*seen)


def test_the_backward_of_decoding_follows_its_mask() -> None:
    """A forward of one query asks the mask itself; its backward has a tile schedule, which is made again."""
    lengths = torch.tensor([40, 200])
    query, key, value = (torch.randn(2, 2, n, 16, requires_grad=True) for n in (1, 256, 256))
    mask = lambda b, h, q, kv: kv < lengths[b]
    for changed in (lengths.clone(), torch.tensor([250, 3])):
        lengths.copy_(changed)
        found, expected = (tw.attention(query, key, value, mask=mask, backend=backend) for backend in ("triton", "reference"))
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(out.square().sum(), (query, key, value)) for out in (found, expected)]
        torch.testing.assert_close(*gradients)
