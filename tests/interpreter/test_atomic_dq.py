"""dQ that is added up in memory by the programs of key tiles, in Triton's interpreter."""

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise import masks, scores
from tilewise.core.problem import Options, make_problem
from tilewise.engines.gpu import bwd_chunks
from tilewise.engines.gpu.workspace import Workspace
from tilewise.engines.registry import engine_named
from tilewise.engines.triton import run
from tilewise.tiles import Geometry
from tilewise.tiles.runs import from_dense

HALF = torch.float16


def tensors(batch: int, heads: int, length: int, dim: int, kv_heads: int | None = None, keys: int | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, length, dim), *[(batch, kv_heads or heads, keys or length, dim)] * 2]
    return [torch.randn(shape, generator=generator).to(HALF).requires_grad_() for shape in shapes]


def gradients(inputs: list[torch.Tensor], backend: str, **options: Any) -> tuple[torch.Tensor, ...]:
    out, lse = tw.attention(*inputs, backend=backend, enable_gqa=True, return_lse=True, **options)
    return torch.autograd.grad((out.float() ** 2).sum() + lse.sum(), inputs)


class Counted:
    """A function of the kernels that counts its calls."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        return self.function(*arguments, **named)


@pytest.fixture
def recomputed(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """What computes the rows of a dQ again that holds NaN or Inf."""
    from tilewise.engines.triton.kernels import backward

    counted = Counted(backward.dq_rows)
    monkeypatch.setattr(backward, "dq_rows", counted)
    return counted


CASES: dict[str, Any] = {
    "full": ((1, 2, 64, 32), {}),
    "tails of both": ((1, 2, 70, 48), {}),
    "causal, shared keys": ((2, 4, 97, 16, 2), {"mask": masks.causal}),
    "fewer keys": ((1, 2, 80, 16, 2, 33), {"mask": lambda b, h, q, kv: q >= kv}),
    "softcap": ((1, 2, 50, 16), {"mask": masks.causal, "score": scores.softcap(5.0)}),
    "dropout": ((1, 2, 50, 16), {"dropout_p": 0.3, "seed": 7}),
}


@pytest.mark.parametrize("name", CASES)
def test_sums_come_out_as_the_reference_has_them_and_need_no_care(name: str, recomputed: Counted) -> None:
    shape, options = CASES[name]
    inputs = tensors(*shape)
    for found, wanted in zip(gradients(inputs, "triton", **options), gradients(inputs, "reference", **options), strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)
    assert recomputed.calls == 0


def test_scores_far_below_0_need_no_care_though_keys_past_the_end_would_weigh_more(recomputed: Counted) -> None:
    """Every score is about -300; past the end k is 0, and exp(0 + 300) would be infinite."""
    query, key, value = tensors(1, 1, 40, 16, keys=41)
    with torch.no_grad():
        query.fill_(10.0), key.fill_(-8.0).add_(torch.randn(key.shape).to(HALF) / 100)
    wanted = gradients([query, key, value], "reference")
    for found, right in zip(gradients([query, key, value], "triton"), wanted, strict=True):
        torch.testing.assert_close(found.float(), right.float(), rtol=2e-2, atol=2e-2)
    assert recomputed.calls == 0


def test_sums_begin_at_zero_whatever_was_in_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors(1, 2, 70, 48)
    wanted = gradients(inputs, "triton", mask=masks.causal)
    monkeypatch.setattr(Workspace, "allocate", lambda self: torch.full_like(self._like, 255))  # NaN, in every float
    for found, whole in zip(gradients(inputs, "triton", mask=masks.causal), wanted, strict=True):
        assert torch.equal(found, whole)


def test_masked_nan_stays_where_it_is_by_care(recomputed: Counted) -> None:
    inputs = tensors(1, 1, 64, 16)
    with torch.no_grad():
        inputs[1][0, 0, 60:] = torch.nan
    found, wanted = (gradients(inputs, backend, mask=masks.causal) for backend in ("triton", "reference"))
    assert recomputed.calls > 0
    torch.testing.assert_close(found[0][:, :, :60].float(), wanted[0][:, :, :60].float(), rtol=2e-2, atol=2e-2)
    assert found[0][:, :, 60:].isnan().all()


@pytest.mark.parametrize(("options", "added"), [({}, True), ({"deterministic": True}, False), ({"dtype": torch.float32}, False), ({"dim": 160}, False)])
def test_which_backwards_add(options: dict[str, Any], added: bool) -> None:
    dim, dtype = options.pop("dim", 64), options.pop("dtype", HALF)
    t = torch.empty(1, 2, 32, dim, dtype=dtype, device="meta")
    problem = make_problem(t, t, t, None, None, Options(**options))[0]
    assert run.adds_dq_atomically(problem, frozenset()) == added
    assert not run.adds_dq_atomically(problem, frozenset({0}))  # gradients of captures are made by the programs of query tiles


def test_large_ones_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors(1, 4, 40, 16, 2)
    wanted = gradients(inputs, "triton", mask=masks.causal)
    monkeypatch.setattr(bwd_chunks, "MAX_SUMS_BYTES", 2 * 128 * 16 * 4)
    counted = Counted(run.run_backward)
    monkeypatch.setattr(run, "run_backward", counted)
    for found, whole in zip(gradients(inputs, "triton", mask=masks.causal), wanted, strict=True):
        torch.testing.assert_close(found, whole)
    assert counted.calls == 2


def test_rows_too_far_apart_are_refused() -> None:
    def problem(stride: int) -> Any:
        t = torch.empty_strided((1, 1, 300, 64), (0, 0, stride, 1), dtype=HALF, device="meta")
        return make_problem(t, t, t, None, None, Options())[0]

    engine = engine_named("triton")
    assert engine.refuse(problem(2**22 - 1)) is None
    assert "query's strides are (0, 0, 4300000, 1)" in str(engine.refuse(problem(4_300_000)))


def test_given_tiles_keep_their_size_after_a_map_whose_tiles_are_as_large() -> None:
    """A map made of a mask is cut as the kernels like, given tiles never are mixed with their neighbours: what fits the one says nothing of the other."""
    inputs = tensors(1, 2, 48, 16)
    tile = (16, 16)
    geometry = Geometry(1, 1, 48, 48, tile)
    tw.attention(*inputs, mask=tw.tile_map(masks.causal, q_len=48, kv_len=48, tile=tile), backend="triton")
    full = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0]], dtype=torch.bool)
    inside = masks.as_mask(lambda b, h, q, kv: (q + kv) % 3 != 0).traced()
    given = tw.TileMap(geometry, from_dense(full.mT), from_dense(full & ~full.mT), inside, given=True)
    found, wanted = (gradients(inputs, backend, mask=given) for backend in ("triton", "reference"))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)


def test_bare_tiles_are_given_though_nobody_says_so() -> None:
    """Tiles of 16 rows, which the kernels' own of 32 would mix, and go past the sums of dQ with."""
    inputs = tensors(1, 1, 130, 16)
    geometry = Geometry(1, 1, 130, 130, (16, 16))
    full = torch.rand((geometry.q_tiles, geometry.kv_tiles), generator=torch.Generator().manual_seed(0)) < 0.5
    bare = tw.TileMap(geometry, from_dense(torch.zeros_like(full)), from_dense(full))
    assert bare.given
    allowed = full.repeat_interleave(16, 0).repeat_interleave(16, 1)[:130, :130]
    found, wanted = gradients(inputs, "triton", mask=bare), gradients(inputs, "reference", mask=allowed)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)
