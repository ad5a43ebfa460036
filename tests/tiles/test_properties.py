"""Random masks from a grammar: the map is exact whatever the mask, the lengths, the tiles and the chunks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.support.brute import check_map, dense_mask, elements_of
from tilewise.tiles import build, look, runs

BATCH, HEADS = 2, 2
Expression = Callable[[Any, Any, Any, Any], Any]  # of b, h, q, kv

INTEGERS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4])
SORTED = INTEGERS.sort().values
TABLE = torch.arange(35).view(5, 7) * 13 % 17
FLOATS = torch.tensor([0.5, -1.25, 3.0, float("inf"), 0.0, -float("inf"), 2.5, float("nan"), 7.75])
FLAGS = torch.tensor([True, True, False, True, False, False, True])

small = st.integers(-20, 20)
positive = st.integers(1, 12)


def leaf(name: str) -> Expression:
    at = ["b", "h", "q", "kv"].index(name)
    return lambda *place: place[at]


def unary(f: Callable[[Any], Any]) -> Callable[[Expression], Expression]:
    return lambda x: lambda *place: f(x(*place))


def binary(f: Callable[[Any, Any], Any]) -> Callable[[Expression, Expression], Expression]:
    return lambda x, y: lambda *place: f(x(*place), y(*place))


def grow_integers(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    two = [
        binary(lambda x, y: x + y),
        binary(lambda x, y: x - y),
        binary(lambda x, y: x * y),
        binary(torch.minimum),
        binary(torch.maximum),
        binary(lambda x, y: torch.where(x > y, x, -y)),
        binary(lambda x, y: x ^ y),
    ]
    loads = [lambda i: INTEGERS[i % 40 - 20], lambda i: SORTED[i.clamp(0, 19)], lambda i: TABLE[i % 5, (i // 3) % 7]]
    return st.one_of(
        st.builds(lambda f, x, y: f(x, y), st.sampled_from(two), inner, inner),
        st.builds(lambda x, c: unary(lambda v: v + c)(x), inner, small),
        st.builds(lambda x, c: unary(lambda v: v * c)(x), inner, small),
        st.builds(lambda x, c: unary(lambda v: v // c)(x), inner, positive),
        st.builds(lambda x, c: unary(lambda v: v % c)(x), inner, positive),
        st.builds(lambda x, c: unary(lambda v: v >> c)(x), inner, st.integers(0, 4)),
        st.builds(unary(abs), inner),
        st.builds(binary(lambda v, w: TABLE[v % 5, w % 7]), inner, inner),
        st.builds(lambda f, x: unary(f)(x), st.sampled_from(loads), inner),
    )


integers = st.recursive(st.sampled_from([leaf("q"), leaf("kv"), leaf("q"), leaf("kv"), leaf("b"), leaf("h")]), grow_integers, max_leaves=5)


def grow_floats(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    one = [torch.sqrt, torch.exp, torch.tanh, torch.sin, torch.floor, torch.sigmoid, lambda v: v * 0.3 - 1.7, lambda v: 1.5 / v]
    two = [binary(lambda x, y: x + y), binary(lambda x, y: x * y), binary(lambda x, y: x - y), binary(torch.maximum), binary(lambda x, y: x / y)]
    return st.one_of(st.builds(lambda f, x: unary(f)(x), st.sampled_from(one), inner), st.builds(lambda f, x, y: f(x, y), st.sampled_from(two), inner, inner))


floats = st.recursive(
    st.one_of(
        st.builds(unary(lambda v: v / 4), integers), st.builds(unary(lambda v: v.float()), integers), st.builds(unary(lambda v: FLOATS[v % 9]), integers)
    ),
    grow_floats,
    max_leaves=3,
)


SIGNS = st.sampled_from([torch.lt, torch.le, torch.eq, torch.ne, torch.gt, torch.ge])
of_integers = st.one_of(
    st.builds(lambda f, x, y: binary(f)(x, y), SIGNS, integers, integers),
    st.builds(lambda f, x, c: unary(lambda v: f(v, c))(x), SIGNS, integers, small),
    st.builds(unary(lambda v: FLAGS[v % 7]), integers),
)
of_floats = st.one_of(
    st.builds(lambda f, pair: binary(f)(*pair), SIGNS, st.one_of(st.tuples(floats, floats), st.tuples(integers, floats))),
    st.builds(lambda f, x, c: unary(lambda v: f(v, c))(x), SIGNS, floats, st.floats(-4, 4, width=32)),
)


def grow_masks(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    two = [binary(lambda x, y: x & y), binary(lambda x, y: x | y), binary(lambda x, y: x ^ y)]
    return st.one_of(
        st.builds(lambda f, x, y: f(x, y), st.sampled_from(two), inner, inner),
        st.builds(unary(lambda v: ~v), inner),
        st.builds(lambda c, x, y: lambda *place: torch.where(c(*place), x(*place), y(*place)), inner, inner, inner),
    )


random_masks = st.recursive(st.one_of(of_integers, of_floats), grow_masks, max_leaves=4)
integer_masks = st.recursive(of_integers, grow_masks, max_leaves=4)  # alike wherever they are evaluated: the last bit of an exp is not
lengths = st.tuples(st.integers(0, 40), st.integers(0, 40))
tiles = st.tuples(st.integers(1, 17), st.integers(1, 17))


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "ON_CPU", build.Grain(grid=20, part=7, looked=9))
    monkeypatch.setattr(look, "CHUNK_ELEMENTS", 500)
    monkeypatch.setattr(runs, "LOOSE", 20)


def examples(count: int) -> settings:
    return settings(max_examples=count, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@examples(150)
@example(lambda b, h, q, kv: q >= kv, (33, 40), (4, 5))
@given(random_masks, lengths, tiles)
def test_random_masks_have_exact_maps(mask: Expression, lengths: tuple[int, int], tile: tuple[int, int]) -> None:
    found = tw.tile_map(mask, batch=BATCH, heads=HEADS, q_len=lengths[0], kv_len=lengths[1], tile=tile)
    dense = dense_mask(mask, BATCH, HEADS, *lengths)
    check_map(found, dense)
    assert torch.equal(elements_of(found).expand_as(dense), dense)


@examples(100)
@given(random_masks, lengths, tiles, st.data())
def test_slices_of_random_maps_are_maps_of_the_slices(mask: Expression, lengths: tuple[int, int], tile: tuple[int, int], data: st.DataObject) -> None:
    found = tw.tile_map(mask, batch=BATCH, heads=HEADS, q_len=lengths[0], kv_len=lengths[1], tile=tile)
    count = found.geometry.q_tiles
    picked = data.draw(st.lists(st.integers(0, count - 1), max_size=4) if count else st.just([]))
    part = found[:, :, torch.tensor(picked, dtype=torch.int64)]
    tokens = torch.tensor([min(t * tile[0] + k, lengths[0] - 1) for t in picked for k in range(tile[0])], dtype=torch.int64)[: part.shape[2]]
    missing = len(picked) * tile[0] - part.shape[2]
    assert missing == (count * tile[0] - lengths[0] if picked and picked[-1] == count - 1 else 0)
    dense = dense_mask(mask, BATCH, HEADS, *lengths)[:, :, tokens]
    check_map(part, dense)
    assert torch.equal(elements_of(part).expand_as(dense), dense)


@examples(100)
@given(random_masks, lengths, tiles, tiles)
def test_maps_can_be_cut_anew(mask: Expression, lengths: tuple[int, int], tile: tuple[int, int], other: tuple[int, int]) -> None:
    found = tw.tile_map(mask, batch=BATCH, heads=HEADS, q_len=lengths[0], kv_len=lengths[1], tile=tile)
    again = tw.tile_map(mask, batch=BATCH, heads=HEADS, q_len=lengths[0], kv_len=lengths[1], tile=other)
    assert found.recut(other) == again
