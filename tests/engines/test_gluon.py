"""What the Hopper engine takes and refuses, as far as it can be told without a GPU."""

import pytest
import torch

from tilewise import masks, scores
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines import ENGINES, Request, engine_named
from tilewise.engines.gluon import GluonEngine
from tilewise.engines.gluon.config import backward_config, forward_config
from tilewise.engines.gluon.refusals import refuse_problem, tma_can_load
from tilewise.frontend.dispatch import reason_against


def problem(shape: tuple[int, ...] = (2, 4, 512, 64), v_dim: int | None = None, dtype: torch.dtype = torch.bfloat16, mask: object = None) -> Problem:
    query = torch.empty(shape, dtype=dtype, device="meta")
    value = torch.empty((*shape[:3], v_dim or shape[3]), dtype=dtype, device="meta")
    return make_problem(query, query, value, mask, None, Options())[0]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"dtype": torch.float32}, "either bfloat16 or float16, got torch.float32"),
        ({"shape": (1, 2, 512, 320)}, "up to 256, got 320 and 320"),
        ({"shape": (1, 2, 512, 60)}, "multiples of 8, got 60"),
        ({"v_dim": 20}, "multiples of 8, got 64 and 20"),
        ({"shape": (0, 2, 512, 64)}, "got none"),
    ],
)
def test_refusals_name_what_was_given(asked: dict[str, object], reason: str) -> None:
    assert reason in str(refuse_problem(problem(**asked)))


def test_what_the_copy_engine_can_describe() -> None:
    whole = torch.empty(2, 4, 64, 64, dtype=torch.bfloat16)
    assert tma_can_load(whole) and tma_can_load(whole.transpose(1, 2)) and tma_can_load(whole[..., 8:40]) and tma_can_load(whole[:, :, ::2])
    assert not tma_can_load(whole[..., 1:33])  # begins inside 16 bytes
    assert not tma_can_load(whole.transpose(2, 3))  # rows are not consecutive
    assert not tma_can_load(whole[:, :, :1].expand(2, 4, 64, 64))  # one row for all
    assert not tma_can_load(torch.empty(2, 4, 64, 60, dtype=torch.bfloat16)[..., :56])  # rows of 120 bytes


def test_what_torch_compile_does_not_know_does_not_stop_it() -> None:
    taken = torch.compile(lambda t: t + 1 if tma_can_load(t) else t, fullgraph=True, backend="eager")
    assert taken(torch.zeros(1, 2, 4, 64)).sum() == 512


@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (96, 96), (128, 64), (192, 128), (256, 256), (64, 256)])
def test_cuts_fit_shared_memory_and_hold_the_head_dims(dims: tuple[int, int]) -> None:
    p = problem((1, 2, 512, dims[0]), dims[1])
    cut = forward_config(p)
    rows, keys = cut.tile
    assert cut.d >= dims[0] and cut.dv >= dims[1]
    queries_bytes = 2 * rows * (cut.d + (cut.dv if cut.own_o_buffer else 0))
    assert queries_bytes + 2 * keys * (cut.k_stages * cut.d + cut.v_stages * cut.dv) <= 227 * 1024 - 1024
    back = backward_config(p)
    queries, keys = back.tile
    assert back.d >= max(dims)
    weights = (4 if back.is_wide else 2) * 2 * queries * keys  # dS, or P and dS, twice
    staged = 0 if back.is_wide else 2 * 4 * 64 * 64  # dQ
    assert 4 * back.d * (back.stages * queries + keys) + weights + staged <= 227 * 1024 - 1024


def test_a_score_that_only_multiplies_is_a_scale() -> None:
    query = torch.empty((1, 2, 512, 64), dtype=torch.bfloat16, device="meta")
    scored = [make_problem(query, query, query, None, score, Options())[0] for score in (None, lambda s, b, h, q, kv: s * 2, scores.alibi(2))]
    assert [forward_config(p).anchored for p in scored] == [True, True, False]


def test_small_problems_go_elsewhere_unless_it_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GluonEngine, "refuse", lambda self, p: refuse_problem(p))
    engine = engine_named("gluon")
    small, large = problem((1, 2, 128, 64), mask=masks.causal), problem((1, 16, 4096, 64), mask=masks.causal)

    def reason(p: Problem, backend: str) -> str | None:
        return reason_against(engine, p, Request(backend, "a test", False, False))

    assert "sooner" in str(reason(small, "flex")) and reason(small, "gluon") is None
    assert reason(large, "flex") is None and reason(large, "auto") is None


@pytest.mark.parametrize(
    ("asked", "reason"), [({"shape": (1, 2, 512, 256)}, None), ({"shape": (1, 2, 512, 64), "v_dim": 192}, None), ({"shape": (1, 2, 512, 128)}, None)]
)
def test_explain_tells_whose_the_backward_is(asked: dict[str, object], reason: str | None) -> None:
    said = engine_named("gluon").says(problem(**asked))
    assert said.endswith(f"the backward is the Triton engine's: {reason}" if reason else "(H100, H200)")


def test_a_deterministic_backward_is_the_triton_engines() -> None:
    assert "the same every time" in engine_named("gluon").says(problem().replaced(deterministic=True))


@pytest.mark.parametrize(
    ("shape", "mask", "wanted"),
    [
        ((1, 16, 16384, 128), masks.causal, (1, 1)),  # 128 MiB of sums
        ((1, 16, 131072, 128), masks.causal, (1, 8)),
        ((1, 6, 131072, 128), masks.causal, (1, 3)),
        ((8, 16, 16384, 128), None, (0, 8)),
        ((1, 16, 131072, 128), lambda b, h, q, kv: q - kv <= h, (1, 1)),  # parts would not know which head they begin with
        ((8, 16, 16384, 128), lambda b, h, q, kv: q - kv <= h, (0, 8)),
    ],
)
def test_large_backwards_go_in_parts(shape: tuple[int, ...], mask: object, wanted: tuple[int, int]) -> None:
    from tilewise.engines.gpu.bwd_chunks import chunking

    assert chunking(problem(shape, mask=mask), 128) == wanted


def test_every_engine_tells_the_tile_it_leaves_out() -> None:
    """Outside the interpreter, where the Triton engine looks its tiles up in a table."""
    for engine in ENGINES:
        tile = engine.tile(problem())
        assert tile is None if engine.name in ("native", "fa2", "reference") else all([side % 16 == 0 for side in tile or (1,)])
