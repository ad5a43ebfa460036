"""Patches that the Hopper engine's copies bring from where they lie: which tokens they hold, in which order."""

from math import prod

import pytest
import torch

from tilewise import masks
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.gluon import GluonEngine
from tilewise.engines.gluon.patches import HEIGHT, grid_width, in_strips, tma_box, tma_view
from tilewise.frontend import token_order
from tilewise.frontend.token_order import TokenPermutation, ordering
from tilewise.lang import evaluate

SHAPES = [(8, 16), (16, 32), (24, 48), (128, 128)]


def problem(shape: tuple[int, ...], window: int = 13, length: int | None = None, dim: int = 16, **options: object) -> Problem:
    t = torch.randn((1, 2, length or prod(shape), dim), generator=torch.Generator().manual_seed(0))
    return make_problem(t, t, t, masks.neighborhood(shape, window), None, Options(**options))[0]


@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_box_holds_consecutive_tokens_of_a_strip(shape: tuple[int, int], tokens: int) -> None:
    """What `tma_coords` in kernels/primitives.py computes, on a tensor of the tokens' own numbers."""
    wide = shape[1]
    numbers = torch.arange(prod(shape)).view(1, 1, -1, 1)
    wanted = TokenPermutation(shape, (HEIGHT,)).permute(numbers, 2).flatten()
    seen, sizes = tma_view(numbers, wide), tma_box(tokens, 1, wide)
    for row in range(0, prod(shape), tokens):
        strip = row // (HEIGHT * wide)
        column, line = (row - strip * HEIGHT * wide) // HEIGHT, strip * HEIGHT
        block = seen[:, :, column : column + sizes[2], line : line + sizes[3]]
        assert block.shape[2:4] == sizes[2:4]
        assert block.flatten().tolist() == wanted[row : row + tokens].tolist()


def test_the_mask_is_that_of_the_tokens_in_strips() -> None:
    p = problem((128, 128))
    tokens = TokenPermutation((128, 128), (HEIGHT,)).permute(torch.arange(128 * 128).view(1, 1, -1, 1), 2).flatten()
    strips = in_strips(p)
    assert p.mask is not None and strips.mask is not None and strips is not p
    q, kv = torch.randint(128 * 128, (2, 4000), generator=torch.Generator().manual_seed(1))
    b = h = torch.zeros_like(q)
    found = evaluate(strips.mask, {"b": b, "h": h, "q": q, "kv": kv})
    assert torch.equal(found, evaluate(p.mask, {"b": b, "h": h, "q": tokens[q], "kv": tokens[kv]}))


def test_tensors_stay_where_they_are() -> None:
    p = problem((128, 128))
    strips = in_strips(p)
    assert strips.query is p.query and grid_width(p) == 128
    assert in_strips(strips) is strips
    said = ordering(GluonEngine(), p)
    assert not said.copied and said.permutation == TokenPermutation((128, 128), (8,))


def test_what_others_compute_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that the Triton engine's kernels compute, and calls that go through torch's operator, which knows of no grid."""
    p = problem((128, 128), 21, deterministic=True)
    assert not ordering(GluonEngine(), p).copied  # nobody wants a gradient
    p.query.requires_grad_()
    assert ordering(GluonEngine(), p) == ordering(GluonEngine(), p)._replace(copied=True)
    p = problem((128, 128), 21)
    p.query.requires_grad_()
    assert not ordering(GluonEngine(), p).copied
    monkeypatch.setattr(token_order, "is_plain", lambda problem: False)
    assert ordering(GluonEngine(), p).copied


@pytest.mark.parametrize(
    "p",
    [
        pytest.param(lambda: problem((120, 120)), id="columns that do not fill boxes"),
        pytest.param(lambda: problem((100, 128)), id="rows that do not fill strips"),
        pytest.param(lambda: problem((16, 32, 32), 7), id="three axes"),
        pytest.param(lambda: problem((128, 128), dim=256), id="a large head dim"),
        pytest.param(lambda: problem((128, 128), dropout_p=0.1), id="dropout"),
        pytest.param(lambda: problem((64, 64), 5), id="rows are as good"),
    ],
)
def test_otherwise_tokens_are_read_as_they_come(p: object) -> None:
    found = p()
    assert grid_width(found) is None and in_strips(found) is found
