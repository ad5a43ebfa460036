"""Which engine serves a call, who decided it, and what is said about it."""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import masks, scores
from tilewise.core import folders
from tilewise.engines import ENGINES, Engine
from tilewise.engines.cpp import CppEngine, missing
from tilewise.engines.native import NativeEngine
from tilewise.frontend import dispatch
from tilewise.frontend.dispatch import INTENTS, VARIABLE, candidates

NAMES = [e.name for e in ENGINES]


def q_k_v(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(shape or (1, 2, 40, 8), dtype=dtype) for _ in range(3))
    return q, k, v


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engines that really ran, in order."""
    ran: list[str] = []

    def watch(engine: Engine, method: str) -> None:
        original = getattr(engine, method)

        def watched(*args: Any, **options: Any) -> Any:
            ran.append(engine.name)
            return original(*args, **options)

        monkeypatch.setattr(engine, method, watched)

    for engine in ENGINES:
        watch(engine, "forward")
    return ran


# -- who decides -----------------------------------------------------------------------------------------------------


def test_argument_beats_scope_beats_variable_beats_auto(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = q_k_v()
    tw.attention(q, k, v)
    monkeypatch.setenv(VARIABLE, "reference")
    tw.attention(q, k, v)
    with tw.attention_backend("blocked"):
        tw.attention(q, k, v)
        tw.attention(q, k, v, backend="native")
    tw.attention(q, k, v)
    assert served == [tw.explain(q, k, v, backend="auto").engine, "reference", "blocked", "native", "reference"]


def test_explain_names_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = q_k_v()
    assert tw.explain(q, k, v).source == "the default"
    monkeypatch.setenv(VARIABLE, "math")
    assert (tw.explain(q, k, v).backend, tw.explain(q, k, v).source) == ("math", VARIABLE)
    with tw.attention_backend("flex"):
        assert (tw.explain(q, k, v).backend, tw.explain(q, k, v).source) == ("flex", "attention_backend(...)")
        assert tw.explain(q, k, v, backend="auto").source == "the backend argument"
    monkeypatch.setenv(VARIABLE, "")
    assert tw.explain(q, k, v).source == "the default"


def test_unknown_names_list_the_allowed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = q_k_v()
    allowed = ", ".join([*INTENTS, *NAMES])
    with pytest.raises(tw.BackendError, match=rf"unknown backend 'cudnn' \(from the backend argument\); allowed are {allowed}"):
        tw.attention(q, k, v, backend="cudnn")
    with pytest.raises(tw.BackendError, match=r"unknown backend 'fast' \(from attention_backend\)"), tw.attention_backend("fast"):
        pass
    monkeypatch.setenv(VARIABLE, "Auto")
    with pytest.raises(tw.BackendError, match=rf"unknown backend 'Auto' \(from {VARIABLE}\)"):
        tw.attention(q, k, v)
    assert issubclass(tw.BackendError, RuntimeError)


@pytest.mark.parametrize(("name", "said"), [("tirton", "; did you mean 'triton'?"), ("Auto", "; did you mean 'auto'?"), ("x", "reference"), (3, "reference")])
def test_a_name_like_another_is_asked_about(name: Any, said: str) -> None:
    with pytest.raises(tw.BackendError) as error:
        tw.attention(*q_k_v(), backend=name)
    assert str(error.value).endswith(said)


def test_scopes_nest_and_are_restored_after_exceptions() -> None:
    q, k, v = q_k_v()
    with tw.attention_backend("flex"):
        with pytest.raises(ZeroDivisionError), tw.attention_backend("math"):
            assert tw.explain(q, k, v).backend == "math"
            raise ZeroDivisionError
        assert tw.explain(q, k, v).backend == "flex"
    assert tw.explain(q, k, v).source == "the default"


def test_a_scope_is_its_threads_own() -> None:
    q, k, v = q_k_v()
    seen: dict[str, str] = {}
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait(10)
        seen["before"] = tw.explain(q, k, v).backend
        with tw.attention_backend("native"):
            seen["within"] = tw.explain(q, k, v).backend
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with tw.attention_backend("math"):
        inside.set()
        done.wait(10)
        seen["here"] = tw.explain(q, k, v).backend
    thread.join()
    assert seen == {"before": "auto", "within": "native", "here": "math"}


# -- intents ---------------------------------------------------------------------------------------------------------


def test_every_intent_has_known_candidates() -> None:
    wanted = {
        "auto": ["native", "fa2", "cuda", "gluon", "triton", "cpp", "blocked"],
        "flex": ["cuda", "gluon", "triton", "cpp", "blocked"],
        "flash": ["fa2", "cuda", "gluon", "triton", "cpp", "native", "blocked"],
        "math": ["reference"],
    }
    assert {intent: [e.name for e in candidates(intent)] for intent in INTENTS} == wanted
    assert all([[e.name for e in candidates(name)] == [name] for name in NAMES])


def test_flex_serves_any_mask_and_score(served: list[str]) -> None:
    q, k, v = q_k_v()
    tw.attention(q, k, v, mask=lambda b, h, i, j: (i + j) % 3 == 0, score=[scores.softcap(2.0), scores.sinks(torch.zeros(2))], backend="flex")
    assert served[0] in [e.name for e in candidates("flex")]


def test_flash_serves_plain_and_causal(served: list[str]) -> None:
    q, k, v = q_k_v()
    tw.attention(q, k, v, backend="flash")
    tw.attention(q, k, v, is_causal=True, backend="flash")
    tw.attention(q, k, v, mask=masks.causal, backend="flash")
    tw.attention(q, k, v, mask=lambda b, h, i, j: i >= j, backend="flash")
    tw.attention(q, k, v, return_lse=True, dropout_p=0.2, seed=1, backend="flash")
    assert set(served) <= {e.name for e in candidates("flash")} and len(served) == 5


@pytest.mark.parametrize("options", [{"score": scores.softcap(1.0)}, {"score": scores.sinks(torch.zeros(2))}, {"mask": torch.zeros(40, 40)}])
def test_flash_refuses_scores(options: dict[str, Any]) -> None:
    with pytest.raises(tw.BackendError, match=r"'flash' \(from the backend argument\) cannot serve .* without a score or sinks; use 'flex'"):
        tw.attention(*q_k_v(), backend="flash", **options)


def test_flash_refuses_other_masks() -> None:
    for mask in (masks.sliding_window(3), torch.ones(40, 40, dtype=torch.bool), tw.tile_map(masks.causal, q_len=40, kv_len=40)):
        with pytest.raises(tw.BackendError, match="plain or causal attention; use 'flex' for other masks"):
            tw.attention(*q_k_v(), mask=mask, backend="flash")


def test_math_is_the_reference(served: list[str]) -> None:
    tw.attention(*q_k_v(), score=scores.softcap(2.0), backend="math")
    assert served == ["reference"]


# -- native ----------------------------------------------------------------------------------------------------------

NATIVE_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "score": ({"score": scores.softcap(1.0)}, "SDPA takes no score function or sinks"),
    "sinks": ({"score": scores.sinks(torch.zeros(2))}, "SDPA takes no score function or sinks"),
    "additive mask": ({"mask": torch.zeros(40, 40)}, "SDPA takes no score function or sinks"),
    "window": ({"mask": masks.sliding_window(3)}, "SDPA takes no mask but causal"),
    "map": ({"mask": tw.tile_map(masks.causal, q_len=40, kv_len=40)}, "SDPA takes no tile map"),
    "lse": ({"return_lse": True}, "SDPA does not return lse"),
    "seed": ({"dropout_p": 0.5, "seed": 3}, "SDPA's dropout takes no seed"),
}


@pytest.mark.parametrize("name", NATIVE_REFUSALS)
def test_native_refuses_with_a_reason(name: str) -> None:
    options, reason = NATIVE_REFUSALS[name]
    with pytest.raises(tw.BackendError, match=rf"backend 'native' .* cannot serve \(1, 2, 40, 8\) float32 on cpu\. native: {reason}"):
        tw.attention(*q_k_v(), backend="native", **options)


def test_gradients_that_take_more_shared_memory_than_small_gpus_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.core.problem import Options, make_problem
    from tilewise.engines import triton

    class OnGpu:
        """A problem as it is on a GPU that is not here."""

        def __init__(self, dim: int, dtype: torch.dtype, learns: bool) -> None:
            tensors = [torch.zeros(1, 1, 4, dim, dtype=dtype, requires_grad=learns) for _ in range(3)]
            self._problem = make_problem(*tensors, None, [], Options())[0]
            self.device = torch.device("cuda")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._problem, name)

    def reason(capability: tuple[int, int], dim: int = 320, dtype: torch.dtype = torch.float32, learns: bool = True) -> str | None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return triton.TritonEngine().refuse(OnGpu(dim, dtype, learns))

    monkeypatch.setattr(triton, "NO_TRITON", None)
    monkeypatch.setattr(triton, "cannot_launch", lambda: None)
    assert "got 320 for sm_89, which has 99 KiB; bfloat16 and float16 take less" in (reason((8, 9)) or "")
    assert reason((12, 0)) is not None
    assert all(r is None for r in (reason((8, 0)), reason((9, 0)), reason((8, 9), 256), reason((8, 9), dtype=torch.bfloat16), reason((8, 9), learns=False)))


@pytest.mark.parametrize("lengths", [(0, 4), (4, 0)])
def test_native_refuses_empty_problems(lengths: tuple[int, int]) -> None:
    q, (k, v) = torch.randn(1, 2, lengths[0], 8), torch.randn(2, 1, 2, lengths[1], 8)
    with pytest.raises(tw.BackendError, match="SDPA does not define empty problems"):
        tw.attention(q, k, v, backend="native")


def test_native_drops_by_torchs_own_numbers(served: list[str]) -> None:
    """Only when asked for by name, and repeatable by torch.manual_seed."""
    q, k, v = q_k_v()
    torch.manual_seed(0)
    first = tw.attention(q, k, v, dropout_p=0.5, backend="native")
    torch.manual_seed(0)
    assert torch.equal(first, tw.attention(q, k, v, dropout_p=0.5, backend="native"))
    tw.attention(q, k, v, dropout_p=0.5)
    assert served[:2] == ["native", "native"] and served[2] != "native"


def test_auto_does_not_hand_masked_keys_to_sdpa(served: list[str]) -> None:
    q, k, v = q_k_v()
    tw.attention(q, k, v, mask=torch.ones(40, 40, dtype=torch.bool))
    said = {e.engine: e.reason for e in tw.explain(q, k, v, mask=torch.ones(40, 40, dtype=torch.bool)).verdicts}
    assert served[0] != "native" and "NaN in masked keys" in said["native"]


# -- nothing is silently dropped -------------------------------------------------------------------------------------

EVERYTHING: dict[str, dict[str, Any]] = {
    "mask": {"mask": lambda b, h, i, j: (i - j).abs() < 3},
    "dense mask": {"mask": torch.rand(40, 40) > 0.5},
    "additive mask": {"mask": torch.randn(40, 40)},
    "score": {"score": lambda s, b, h, i, j: s * 2 - j * 0.1},
    "sinks": {"score": scores.sinks(torch.ones(2))},
    "scale": {"scale": 0.01},
    "dropout": {"dropout_p": 0.5, "seed": 1},
    "is_causal": {"is_causal": True},
    "all": {
        "mask": masks.sliding_window(9),
        "score": [scores.softcap(1.0), scores.sinks(torch.ones(2))],
        "scale": 2.0,
        "dropout_p": 0.2,
        "seed": 2,
        "is_causal": True,
    },
}


@pytest.mark.parametrize("backend", [*INTENTS, *NAMES])
@pytest.mark.parametrize("name", EVERYTHING)
def test_an_argument_counts_or_is_refused(name: str, backend: str) -> None:
    q, k, v = q_k_v()
    expected = tw.attention(q, k, v, backend="reference", **EVERYTHING[name])
    assert not torch.allclose(expected, tw.attention(q, k, v, backend="reference"))
    try:
        found = tw.attention(q, k, v, backend=backend, **EVERYTHING[name])
    except tw.BackendError as error:
        assert f"backend {backend!r} (from the backend argument) cannot serve (1, 2, 40, 8) float32 on cpu. " in str(error)
        assert str(error).split(". ", 1)[1]  # a reason follows
        return
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", [*INTENTS, *NAMES])
def test_lse_is_returned_or_refused(backend: str) -> None:
    q, k, v = q_k_v()
    try:
        out, lse = tw.attention(q, k, v, return_lse=True, backend=backend)
    except tw.BackendError as error:
        assert "lse" in str(error) or "CUDA" in str(error) or "Triton is not installed" in str(error)
        return
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.mT / 8**0.5, -1))
    assert out.shape == q.shape


# -- what is said ----------------------------------------------------------------------------------------------------


def test_explanation_fields() -> None:
    q, k, v = (torch.randn(2, 3, 300, 16, dtype=torch.float64) for _ in range(3))
    found = tw.explain(q, k, v, mask=masks.causal & masks.sliding_window(20), backend="blocked")
    assert (found.problem, found.mask) == ("(2, 3, 300, 16) float64 on cpu", "causal & sliding_window(20)")
    assert (found.backend, found.engine) == ("blocked", "blocked")
    assert [v.engine for v in found.verdicts] == NAMES
    by_name = {v.engine: v for v in found.verdicts}
    assert by_name["blocked"].verdict == "chosen" and by_name["native"].verdict == "not considered"
    assert by_name["reference"].reason.endswith("used only when named")
    assert (found.computed_tiles, found.skipped_tiles) == (6 * 5, 6 * 4)  # tiles of 128: three on the diagonal, two beside it
    pairs = 128 * 128 + 2 * 128 * 128 + 44 * 128 + 44 * 44
    assert found.flops == 2 * (16 + 16) * 6 * pairs


def test_explanation_verdicts() -> None:
    q, k, v = q_k_v()
    found = {v.engine: v for v in tw.explain(q, k, v, mask=masks.sliding_window(3)).verdicts}
    assert found["native"].verdict == "refused" and found["native"].reason.startswith("SDPA takes no mask")
    plain = {v.engine: v for v in tw.explain(q, k, v).verdicts}
    assert plain["native"].verdict == "chosen" and (plain["blocked"].verdict, plain["blocked"].reason) == ("available", "lower priority")
    nobody = tw.explain(q, k, v, score=scores.softcap(1.0), backend="native")
    assert nobody.engine is None and "no engine can serve this" in str(nobody)


def test_explanation_text() -> None:
    q, k, v = q_k_v(1, 2, 300, 8)
    text = str(tw.explain(q, k, v, mask=masks.causal, backend="flex"))
    assert "attention (1, 2, 300, 8) float32 on cpu, mask causal" in text
    assert "backend 'flex' (from the backend argument): engine " in text
    assert "tiles of 128 x 128: 12 of 18 computed (33.3% skipped)" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["engine", "verdict", "reason"] in lines
    assert all(any(line and line[0] == name for line in lines) for name in NAMES)


def test_explanation_of_layouts_lengths_and_nested() -> None:
    flat = torch.randn(2, 40, 16)
    assert tw.explain(flat, flat, flat, heads=2).problem == "(2, 2, 40, 8) float32 on cpu"
    q, k = torch.randn(2, 7, 3, 8), torch.randn(2, 9, 3, 8)
    assert tw.explain(q, k, k, layout="bshd").problem == "(2, 3, 7, 8) over 9 keys float32 on cpu"
    nested = torch.nested.nested_tensor([torch.randn(5, 2, 8), torch.randn(200, 2, 8)], layout=torch.jagged)
    assert tw.explain(nested, nested, nested, layout="bshd").problem == "(1, 2, 205, 8) float32 on cpu"


def test_explain_changes_nothing() -> None:
    """Not even torch's random numbers."""
    q, k, v = q_k_v()
    state = torch.get_rng_state()
    tw.explain(q, k, v, dropout_p=0.5)
    assert torch.equal(state, torch.get_rng_state())


def test_backends_lists_intents_then_engines() -> None:
    found = tw.backends()
    assert list(found) == [*INTENTS, *NAMES]
    assert all(isinstance(text, str) and text for text in found.values())


def test_one_info_line_says_what_was_chosen(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_logged", set())
    q, k, v = q_k_v()
    with caplog.at_level(logging.INFO, logger="tilewise"):
        tw.attention(q, k, v, mask=masks.causal & masks.sliding_window(3))
    (record,) = caplog.records
    chosen = tw.explain(q, k, v, mask=masks.causal & masks.sliding_window(3)).engine
    assert record.name == "tilewise" and record.levelno == logging.INFO
    message = record.getMessage()
    assert message.startswith(f"using {chosen} for (1, 2, 40, 8) float32 on cpu, mask causal & sliding_window(3); skipped ")
    assert "native (SDPA takes no mask" in message


def test_a_line_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_logged", set())
    monkeypatch.setattr(dispatch, "MOST_LOGGED", 2)
    q, k, v = q_k_v()
    with caplog.at_level(logging.INFO, logger="tilewise"):
        for backend in ("math", "math", "blocked", "blocked", "math", "native", "math"):
            tw.attention(q, k, v, backend=backend)
    assert [message.split()[1] for message in caplog.messages] == ["reference", "blocked", "native", "reference"]  # the third line was one too many to remember


def test_nothing_is_logged_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="tilewise"):
        tw.attention(*q_k_v(), mask=masks.causal)
    assert not caplog.records


# -- options that cost an engine -------------------------------------------------------------------------------------


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """What has been warned of since."""
    monkeypatch.setattr(folders, "_warned", set())
    with caplog.at_level(logging.WARNING, logger="tilewise"):
        yield lambda: [r.getMessage() for r in caplog.records]


COSTLY: dict[str, dict[str, Any]] = {"dropout_p": {"dropout_p": 0.1}, "return_lse=True": {"return_lse": True}}


@pytest.mark.parametrize("option", COSTLY)
def test_an_option_that_costs_an_engine_is_told_once(option: str, warnings: Callable[[], list[str]]) -> None:
    for length in (40, 41):
        tw.attention(*q_k_v(1, 2, length, 8), **COSTLY[option])
    served = tw.explain(*q_k_v(), **COSTLY[option]).engine
    (message,) = warnings()
    assert message.startswith(f"{option} rules out 'native'; using {served!r}.")


def test_deterministic_tells_which_engine_it_costs(monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]) -> None:
    monkeypatch.setattr(NativeEngine, "refuse", lambda self, p: "not repeatable" if p.deterministic else None)
    tw.attention(*q_k_v(), deterministic=True)
    assert [m.split(";")[0] for m in warnings()] == ["deterministic=True rules out 'native'"]


def test_a_map_tells_which_engine_it_costs(monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]) -> None:
    monkeypatch.setattr(CppEngine, "refuse", lambda self, p: "odd tiles" if p.tiles is not None else None)
    tw.attention(*q_k_v(), mask=tw.tile_map(masks.sliding_window(9), q_len=40, kv_len=40), backend="flex")
    assert [m.split(";")[0] for m in warnings()] == ["the given tile map rules out 'cpp'"]


SILENT: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a mask": {"mask": masks.sliding_window(9)},
    "a mask and dropout": {"mask": masks.sliding_window(9), "dropout_p": 0.1},
    "a score and lse": {"score": scores.softcap(3.0), "return_lse": True},
    "a named engine": {"dropout_p": 0.1, "backend": "blocked"},
    "determinism that costs nothing": {"deterministic": True},
}


@pytest.mark.parametrize("name", SILENT)
def test_what_costs_nothing_is_not_told(name: str, warnings: Callable[[], list[str]]) -> None:
    tw.attention(*q_k_v(), **SILENT[name])
    assert warnings() == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_inputs_without_a_mask_on_a_cpu(dtype: torch.dtype) -> None:
    """torch's SDPA takes several times as long for their gradients, and on some machines ends the process."""
    q = torch.zeros((1, 2, 64, 16), dtype=dtype)
    found = tw.explain(q, q, q)
    if tw.explain(q, q, q, backend="cpp").engine == "cpp":  # there is a compiler
        assert found.engine == "cpp" and "16-bit" in next(v.reason for v in found.verdicts if v.engine == "native")
    assert tw.explain(q, q, q, backend="native").engine == "native"


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_float32_inputs_without_a_mask_on_a_cpu() -> None:
    """SDPA gets what is short, and float64."""

    def engine(queries: int, keys: int, dim: int = 16, dtype: torch.dtype = torch.float32, learns: bool = False) -> str | None:
        q, k = (torch.zeros((1, 2, length, dim), dtype=dtype, requires_grad=learns) for length in (queries, keys))
        with torch.no_grad():
            assert tw.explain(q, k, k).engine == tw.explain(q.detach(), k.detach(), k.detach()).engine
        return tw.explain(q, k, k).engine

    assert [engine(64, 64), engine(64, 64, 128), engine(63, 64), engine(64, 63), engine(64, 64, dtype=torch.float64)] == ["cpp"] * 2 + ["native"] * 3
    assert [engine(192, 64, 64, learns=True), engine(320, 64, 65, learns=True)] == ["cpp"] * 2
    assert [engine(191, 64, 64, learns=True), engine(319, 64, 65, learns=True), engine(320, 63, learns=True)] == ["native"] * 3


def test_graphs_keep_sdpa_for_float32_without_a_mask() -> None:
    graphs = []
    compiled = torch.compile(lambda q: tw.attention(q, q, q), fullgraph=True, backend=lambda graph, inputs: (graphs.append(graph.code), graph.forward)[1])
    compiled(torch.zeros(1, 2, 320, 16))
    assert len(graphs) == 1 and "tilewise" not in graphs[0] and "scaled_dot_product_attention" in graphs[0]


def test_what_is_no_tensor_is_told_so() -> None:
    q = torch.zeros((1, 2, 8, 16))
    with pytest.raises(tw.InputError, match=r"must be torch tensors, got Tensor, ndarray, ndarray; torch\.from_numpy"):
        tw.attention(q, q.numpy(), q.numpy())
