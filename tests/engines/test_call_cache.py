"""The call cache: a call is found again when nothing that matters has changed, and never otherwise."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import masks, scores
from tilewise.core import map_cache
from tilewise.core.map_cache import maps
from tilewise.core.weak_cache import WeakCache
from tilewise.frontend import call_cache
from tilewise.tiles import Geometry, TileMap
from tilewise.tiles.runs import from_dense

window = 3  # a global that a mask looks at


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    call_cache.forget()


def tensors(length: int = 24, dim: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, 2, length, dim, generator=generator) for _ in range(3)]


def attend(x: list[Tensor], **options: Any) -> Tensor:
    return tw.attention(*x, backend="blocked", **options)


def right(x: list[Tensor], **options: Any) -> Tensor:
    call_cache.forget()
    found = tw.attention(*x, backend="reference", **options)
    call_cache.forget()
    return found


def within(n: int) -> Tensor:
    """The mask (q - kv < n) & (q >= kv), as a tensor."""
    distance = torch.arange(24)[:, None] - torch.arange(24)
    return ((distance < n) & (distance >= 0))[None, None]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every problem that was made the long way."""
    made: list[int] = []
    original = tw.attention.__globals__["make_problem"]

    def counted(*args: Any) -> Any:
        made.append(1)
        return original(*args)

    monkeypatch.setitem(tw.attention.__globals__, "make_problem", counted)
    return made


LIKE: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"is_causal": True},
    "a mask of masks": lambda: {"mask": masks.causal & masks.sliding_window(5)},
    "a lambda": lambda: {"mask": lambda b, h, q, kv: q >= kv},
    "a partial": lambda: {"mask": partial(lambda n, b, h, q, kv: q - kv < n, 4)},
    "a score": lambda: {"score": scores.softcap(20.0)},
    "several scores": lambda: {"score": [scores.softcap(20.0), lambda s, b, h, q, kv: s * 0.5]},
    "options": lambda: {"scale": 0.3, "mask": masks.causal},
}


@pytest.mark.parametrize("name", LIKE)
def test_a_call_like_an_earlier_one_skips_the_long_way(traced: list[int], name: str) -> None:
    for _ in range(3):
        x = tensors()
        torch.testing.assert_close(attend(x, **LIKE[name]()), right(x, **LIKE[name]()))
        attend(x, **LIKE[name]())
    call_cache.forget()
    traced.clear()
    for _ in range(3):
        attend(tensors(), **LIKE[name]())
    assert len(traced) == 1


def test_captured_tensors_are_known_by_identity(traced: list[int]) -> None:
    x, ids = tensors(), torch.arange(24) // 6
    for _ in range(3):
        attend(x, mask=lambda b, h, q, kv: ids[q] == ids[kv])
    assert len(traced) == 1
    other = torch.arange(24) // 8
    found = attend(x, mask=(lambda ids: lambda b, h, q, kv: ids[q] == ids[kv])(other))
    torch.testing.assert_close(found, right(x, mask=masks.document(other)))


def test_a_captured_tensor_changed_in_place_counts() -> None:
    x, ids = tensors(), torch.arange(24) // 6
    mask = lambda b, h, q, kv: ids[q] == ids[kv]
    attend(x, mask=mask)
    ids.copy_(torch.arange(24) // 4)
    torch.testing.assert_close(attend(x, mask=mask), right(x, mask=masks.document(torch.arange(24) // 4)))


def test_numbers_are_known_by_value() -> None:
    x = tensors()
    for n in (2, 5, 2, 9):
        found = attend(x, mask=lambda b, h, q, kv, n=n: (q - kv < n) & (q >= kv))
        torch.testing.assert_close(found, right(x, mask=within(n)))


def test_a_global_that_changes_counts() -> None:
    global window  # noqa: PLW0603  (a global that changes is what is tested)
    x = tensors()

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv < window) & (q >= kv)

    for n in (3, 7, 1):
        window = n
        found = attend(x, mask=mask)
        torch.testing.assert_close(found, right(x, mask=within(window)))


def test_what_a_function_reads_from_objects_is_looked_at_every_time() -> None:
    class Settings:
        window = 2

    x, settings, table = tensors(), Settings(), [2]
    for n in (2, 6):
        settings.window, table[0] = n, n
        expected = right(x, mask=within(n))
        torch.testing.assert_close(attend(x, mask=lambda b, h, q, kv: (q - kv < settings.window) & (q >= kv)), expected)
        torch.testing.assert_close(attend(x, mask=lambda b, h, q, kv: (q - kv < table[0]) & (q >= kv)), expected)


def test_contents_read_while_tracing_are_read_every_time() -> None:
    x, n = tensors(), torch.tensor([2])
    mask = lambda b, h, q, kv: (q - kv < n.item()) & (q >= kv)
    for value in (2, 6):
        n.fill_(value)
        torch.testing.assert_close(attend(x, mask=mask), right(x, mask=within(value)))


def test_a_tensor_that_moved_counts() -> None:
    x, bias = tensors(), torch.zeros(24)
    score = lambda s, b, h, q, kv: s + bias[kv]
    attend(x, score=score)
    bias.data = torch.linspace(-3, 3, 24)
    torch.testing.assert_close(attend(x, score=score), right(x, score=lambda s, b, h, q, kv: s + torch.linspace(-3, 3, 24)[kv]))


def test_gradients_of_a_remembered_call() -> None:
    x = [t.requires_grad_() for t in tensors()]
    table = torch.randn(2, 24, requires_grad=True)
    score = lambda s, b, h, q, kv: s + table[h, kv]
    expected = torch.autograd.grad(right(x, score=score).square().sum(), [*x, table])
    for _ in range(3):
        for a, b in zip(torch.autograd.grad(attend(x, score=score).square().sum(), [*x, table]), expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("backend", ["blocked", "cpp"])
def test_gradients_of_a_remembered_call_with_all_that_a_problem_may_have(backend: str, return_lse: bool, traced: list[int]) -> None:
    """What is saved for the backward is taken apart and put together again: mask and score with tensors, some of which learn, sinks, a seed."""
    ids = torch.arange(24) // 9
    fixed, learned, logits = torch.linspace(-1, 1, 24), torch.linspace(0, 1, 24).requires_grad_(), torch.tensor([0.5, -1.0]).requires_grad_()
    mask = lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)
    options: dict[str, Any] = {"mask": mask, "score": [lambda s, b, h, q, kv: s * fixed[q] + learned[kv], scores.sinks(logits)], "dropout_p": 0.2, "seed": 7}

    def gradients(x: list[Tensor], backend: str) -> list[Tensor]:
        found = tw.attention(*x, backend=backend, return_lse=return_lse, **options)
        out, lse = found if return_lse else (found, None)
        loss = (out * out).sum() if lse is None else (out * out).sum() + lse.cos().sum()
        return [out, *torch.autograd.grad(loss, [*x, learned, logits])]

    made = []
    for step in range(3):
        with torch.no_grad():
            ids, logits = (ids + step) % 3, logits + step  # other tensors of the same kind
            learned += 1
        logits.requires_grad_()
        options["score"] = [options["score"][0], scores.sinks(logits)]
        x = [(t + step).requires_grad_() for t in tensors()]
        wanted = gradients(x, "reference")
        del traced[:]
        for _ in range(2):
            torch.testing.assert_close(gradients(x, backend), wanted, rtol=1e-4, atol=1e-4)
        made.append(len(traced))
    assert made == [1, 1, 1]  # the second call was a known one


def test_a_tensor_that_has_outlived_a_transform_of_torch_func_is_not_known(traced: list[int]) -> None:
    """Known calls enter autograd in a way that does not look for such tensors."""
    kept: list[Tensor] = []
    q, k, v = tensors()
    torch.func.grad(lambda t: kept.append(t * 1) or t.sum())(q)
    k.requires_grad_()
    wanted = torch.autograd.grad(attend([q, k, v]).sum(), k)
    del traced[:]
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(attend([kept[0], k, v]).sum(), k), wanted)
    assert len(traced) == 2


def test_dropout_draws_anew_and_repeats_with_its_seed() -> None:
    x = tensors()
    drawn = [attend(x, dropout_p=0.5) for _ in range(2)]
    assert not torch.equal(*drawn)
    assert torch.equal(attend(x, dropout_p=0.5, seed=3), attend(x, dropout_p=0.5, seed=3))
    assert not torch.equal(attend(x, dropout_p=0.5, seed=3), attend(x, dropout_p=0.5, seed=4))


def test_the_backend_and_the_options_count() -> None:
    x = tensors()
    attend(x, mask=masks.causal)
    with pytest.raises(tw.BackendError, match="unknown backend"):
        tw.attention(*x, mask=masks.causal, backend="blocker")
    with pytest.raises(tw.InputError, match="one dtype"):
        attend([x[0], x[1].double(), x[2]], mask=masks.causal)
    torch.testing.assert_close(attend(x, mask=masks.causal, scale=2.0), right(x, mask=masks.causal, scale=2.0))


def test_nothing_is_kept_alive() -> None:
    def call() -> weakref.ref[Tensor]:
        ids = torch.arange(24) // 6
        attend(tensors(), mask=lambda b, h, q, kv: ids[q] == ids[kv])
        return weakref.ref(ids)

    held = call()
    gc.collect()
    assert held() is None


def test_what_was_made_for_a_tensor_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training loop that brings new documents every step keeps the maps and the packed arguments of the last few, not of hundreds."""
    monkeypatch.setattr(map_cache, "MAX_VALUE_BYTES", -1)  # small ones are known by value, and serve the next tensor that holds the same
    query = torch.randn(1, 1, 64, 16)
    maps.clear()
    call_cache.forget()
    for step in range(20):
        ids = torch.arange(64) // (step + 2)
        tw.attention(query, query, query, mask=lambda b, h, q, kv, ids=ids: ids[q] == ids[kv], backend="blocked")
        del ids
        gc.collect()
    assert len(maps._maps) <= 2 and len(call_cache._calls) <= 2


def test_old_calls_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_calls", WeakCache(4))
    for length in range(10, 30):
        attend(tensors(length), is_causal=True)
    assert len(call_cache._calls) <= 4


def test_a_score_whose_tensor_moves_to_the_query_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bare tiles there is no mask to look at, only the score."""
    from tilewise.core import problem
    from tilewise.lang import BoundProgram

    def moved(call: BoundProgram | None, device: torch.device) -> BoundProgram | None:
        return None if call is None else BoundProgram(call.program, tuple([t.clone() for t in call.captures]), call.ints, call.floats)

    tiles = torch.tensor([[True, False], [True, True]])
    bare = TileMap(Geometry(1, 1, 24, 24, (16, 16)), from_dense(tiles & False), from_dense(tiles), None, given=True)
    bias, x = torch.randn(2), tensors()
    wanted = attend(x, mask=bare, score=lambda s, b, h, q, kv: s + bias[h])
    call_cache.forget()
    monkeypatch.setattr(problem, "in_memory", moved)
    assert torch.equal(attend(x, mask=bare, score=lambda s, b, h, q, kv: s + bias[h]), wanted)


def test_a_pass_is_bound_again_when_contents_changed_and_prepared_again_when_tuning_went_on() -> None:
    from tilewise.core.problem import Options, make_problem
    from tilewise.engines.gpu import tuning
    from tilewise.engines.gpu.plan import GpuPlan
    from tilewise.engines.gpu.structure import Pass

    class Counted(Pass):
        """Tells which one it is, and how often it was bound."""

        made = 0

        def __init__(self) -> None:
            Counted.made += 1
            self.number, self.bound = Counted.made, 0

        def bind(self, p: Any) -> "Counted":
            self.bound += 1
            bound = copy.copy(self)
            return bound

    limit, bias = torch.tensor(3), torch.zeros(64)
    score = lambda s, b, h, q, kv: s + bias[q]
    p = make_problem(*tensors(), lambda b, h, q, kv: q - kv < limit, score, Options())[0]
    plan = GpuPlan(p)

    def prepared(name: str = "pass", plan: Any = plan) -> tuple[int, int]:
        found = plan.prepared(name, p, "counted", Counted)
        return found.number, found.bound

    assert [prepared(), prepared(), prepared("another")] == [(1, 1), (1, 1), (2, 1)]
    with tuning.autotuned():
        assert prepared() == (3, 1)
    assert prepared() == (1, 2)
    limit += 1
    assert [prepared(), prepared()] == [(1, 3), (1, 3)]
    assert prepared(plan=GpuPlan(p)) == (1, 4)  # another call of the same structure
    p = p.replaced(score=p.score.with_captures((bias.clone(),)))  # as a saved tensor that comes back elsewhere
    assert [prepared(), prepared()] == [(1, 5), (1, 5)]
    p = p.replaced(scale=0.5)
    assert prepared(plan=GpuPlan(p)) == (4, 1)
    with torch.inference_mode():  # whose tensors have no version
        p = make_problem(*tensors(), lambda b, h, q, kv: q - kv < torch.tensor(3), None, Options())[0]
    assert [prepared()[1], prepared()[1]] == [1, 2]


LIBRARY = {
    "masks": [
        masks.causal,
        masks.causal_lower_right(64, 64),
        masks.sliding_window(4),
        masks.dilated_window(8, 2),
        masks.prefix_lm(4),
        masks.document(lengths=[30, 34]),
        masks.padding(torch.tensor([5])),
        masks.global_tokens(3),
        masks.block_diffusion(32, 8),
        masks.tree([-1, 0, 0, 1]),
        masks.neighborhood((8, 8), 3),
        masks.per_batch([masks.causal, masks.full], torch.tensor([1])),
        masks.shared_prefix([30, 34], [0, 0]),
        ~masks.causal,
        masks.causal & masks.sliding_window(4),
        masks.causal | masks.global_tokens(3),
    ],
    "scores": [
        scores.alibi(2),
        scores.softcap(3.0),
        scores.relative_bias(torch.zeros(2, 9)),
        scores.relative_bias(torch.zeros(32, 2), buckets="t5"),
        scores.bias(torch.zeros(64, 64)),
        scores.distance_decay(0.1),
        scores.sinks(torch.zeros(2)),
    ],
}


def test_calls_with_the_librarys_own_masks_and_scores_are_cached() -> None:
    from tilewise.core.problem import Options
    from tilewise.frontend.call_key import key_of

    x = torch.zeros(1, 2, 64, 8)
    for mask in LIBRARY["masks"]:
        assert key_of(x, x, x, mask, None, Options(), "cpp", False) is not None, mask
    for score in LIBRARY["scores"]:
        assert key_of(x, x, x, None, [score], Options(), "cpp", False) is not None, score


class Pass:
    """A forward that counts how often it is run and bound."""

    device = 0

    def __init__(self) -> None:
        self.runs = self.bound = 0

    def bind(self, p: Any) -> "Pass":
        self.bound += 1
        return self

    def run(self, *tensors: Any) -> str:
        self.runs += 1
        return "output"


@pytest.mark.parametrize("kind", ["plain", "captured", "given map"])
def test_replays_need_what_the_mask_depends_on_unchanged(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.core.problem import Options, make_problem
    from tilewise.engines.gpu import plan as plan_module
    from tilewise.engines.gpu.plan import FORWARD, GpuPlan

    monkeypatch.setattr(plan_module, "current_device", lambda: 0)
    limit, tiles = torch.tensor(3), torch.tensor([[True, False], [True, True]])
    bare = TileMap(Geometry(1, 1, 24, 24, (16, 16)), from_dense(tiles & False), from_dense(tiles), None, given=True)
    mask: Any = {"plain": masks.causal, "captured": lambda b, h, q, kv: q - kv < limit, "given map": bare}[kind]
    p = make_problem(*tensors(), mask, None, Options())[0]
    plan, ready = GpuPlan(p), Pass()
    plan.prepared(FORWARD, p, kind, lambda: ready)
    assert plan.replay(p.query, p.key, p.value, p.mask_sources) == "output" and ready.runs == 1
    for changed in p.mask_sources[:1]:
        changed += 0
        assert plan.replay(p.query, p.key, p.value, p.mask_sources) is None
    assert (kind == "plain") == (not p.mask_sources)


def test_decoding_is_prepared_once_though_its_mask_moves_on() -> None:
    """A cache that grows within its buffer: the kernel asks the mask itself, and no tile schedule is made from it."""
    from tilewise.core.problem import Options, make_problem
    from tilewise.engines.gpu.plan import FORWARD, GpuPlan

    length, key = torch.tensor(5), torch.zeros(1, 2, 128, 16)
    p = make_problem(torch.zeros(1, 2, 1, 16), key, key, lambda b, h, q, kv: kv < length, None, Options())[0]
    plan, made = GpuPlan(p), Pass()
    for _ in range(3):
        assert plan.prepared(FORWARD, p, "decoding", lambda: made).bound == 1
        length += 1


def test_passes_do_not_pile_up_and_the_forward_stays() -> None:
    from tilewise.core.problem import Options, make_problem
    from tilewise.engines.gpu.plan import FORWARD, MAX_PASSES, GpuPlan

    p = make_problem(*tensors(), None, None, Options())[0]
    plan = GpuPlan(p)
    first = plan.prepared(FORWARD, p, "piled", Pass)
    for n in range(3 * MAX_PASSES):
        last = plan.prepared(("backward", n), p, "piled", Pass)
    assert len(plan._passes) == MAX_PASSES
    assert plan.prepared(FORWARD, p, "piled", Pass) is first and first.bound == 1
    assert plan.prepared(("backward", 3 * MAX_PASSES - 1), p, "piled", Pass) is last and last.bound == 1


def test_structures_do_not_pile_up_and_those_in_use_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.core.problem import Options, make_problem
    from tilewise.engines.gpu import structure

    monkeypatch.setattr(structure, "MAX_STRUCTURES", 4)
    monkeypatch.setattr(structure, "_prepared", {})
    p = make_problem(*tensors(), None, None, Options())[0]
    kept = structure.prepared("kept", p, Pass)
    for n in range(12):
        structure.prepared(n, p, Pass)
        assert structure.prepared("kept", p, Pass) is kept
    assert len(structure._prepared) == 4


@pytest.mark.parametrize(("dtype", "inner"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)], ids=str)
def test_outputs_made_by_templates(dtype: torch.dtype, inner: torch.dtype) -> None:
    from tilewise.core.problem import Options, make_problem
    from tilewise.engines.base import EmptyOutputs

    for shape in ((2, 3, 5, 8), (1, 1, 1, 8), (3, 1, 7, 8), (2, 4, 1, 8)):
        query = torch.empty(shape, dtype=dtype)
        output, filled = EmptyOutputs(make_problem(query, query, query, None, None, Options())[0])(query)
        assert filled is output and output.out.shape == shape and output.out.dtype == dtype
        for rows in (output.lse, output.max_score):
            assert rows.shape == shape[:3] and rows.is_contiguous() and rows.dtype == inner


# -- torch's SDPA ----------------------------------------------------------------------------------------------------


SDPA_CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "causal": {"is_causal": True},
    "a causal mask": {"mask": lambda b, h, q, kv: q >= kv},
}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", SDPA_CALLS)
def test_a_known_call_of_native_is_torchs_alone(name: str, trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.engines.native import NativeEngine

    x = [t.requires_grad_(trains) for t in tensors()]
    options = SDPA_CALLS[name]
    call = lambda: tw.attention(*x, backend="native", **options)
    expected, once = right(x, **options), call()
    monkeypatch.setattr(NativeEngine, "forward", None)  # from here on, nobody comes by
    for _ in range(2):
        found = call()
        assert torch.equal(found, once)
        torch.testing.assert_close(found, expected)
        if trains:
            gradients = [torch.autograd.grad(out.square().sum(), x, retain_graph=True) for out in (found, expected)]
            torch.testing.assert_close(*gradients)


def test_grouped_heads_of_a_known_call_of_native() -> None:
    q, k = torch.randn(1, 4, 24, 8), torch.randn(1, 2, 24, 8)
    for _ in range(3):
        found = tw.attention(q, k, k, enable_gqa=True, backend="native")
        torch.testing.assert_close(found, tw.attention(q, k, k, enable_gqa=True, backend="reference"))


def test_masks_that_auto_gives_to_sdpa_are_looked_at_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, keys that were found to be finite go there; those of the next call may not be."""
    from tilewise.engines.cpp import CppEngine

    monkeypatch.setattr(CppEngine, "refuse", lambda self, p: "no compiler")
    q, k, v = tensors()
    broken = v.clone()
    broken[:, :, -1] = torch.nan
    for value, engine in ((v, "native"), (broken, "blocked"), (v, "native")):
        assert tw.explain(q, k, value, is_causal=True).engine == engine
        assert tw.attention(q, k, value, is_causal=True)[:, :, :-1].isfinite().all()


def test_replays_of_native_are_nobodys_business_and_leave_no_trace() -> None:
    """Interception and watch() ignore tilewise's own calls of SDPA, and see torch's again afterwards, errors included."""
    from tilewise.core.plan import Plan
    from tilewise.engines.native import NativeEngine, own_call

    x = tensors()
    tw.attention(*x, backend="native")
    with tw.intercept_sdpa("native"):
        found = [torch.nn.functional.scaled_dot_product_attention(*x) for _ in range(3)]
    assert all([torch.equal(f, found[0]) for f in found]) and not own_call.running
    from tilewise.core.problem import Options, make_problem

    plan: Plan = NativeEngine().plan(make_problem(*x, None, None, Options())[0])
    with pytest.raises(RuntimeError):
        plan.replay(x[0], x[1][..., :3], x[2], ())
    assert not own_call.running


def test_a_known_call_is_told_to_whoever_watches_or_logs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.frontend import dispatch
    from tilewise.frontend.dispatch import Served, observers

    monkeypatch.setattr(dispatch, "_logged", set())
    x = tensors()
    seen: list[Served] = []
    for backend in ("native", "blocked"):
        tw.attention(*x, backend=backend)
        observers.append(seen.append)
        try:
            tw.attention(*x, backend=backend)
        finally:
            observers.remove(seen.append)
        with caplog.at_level("INFO", logger="tilewise"):
            tw.attention(*x, backend=backend)
    assert [s.engine for s in seen] == ["native", "blocked"]
    assert [r.getMessage().split()[1] for r in caplog.records] == ["native", "blocked"]


def test_every_layers_sinks_make_the_same_call_and_are_their_own() -> None:
    from tilewise.core.problem import Options
    from tilewise.frontend.call_key import key_of

    x, one, other = torch.randn(1, 2, 24, 8), torch.tensor([0.0, 1.0]), torch.tensor([3.0, -2.0])

    def known(score: Any) -> Any:
        found = key_of(x, x, x, None, score, Options(), "cpp", False)
        assert found is not None
        return found.key

    assert known([scores.sinks(one)]) == known([scores.sinks(other)])
    assert known([scores.sinks(one)]) != known([scores.sinks(other.double())]) != known([scores.sinks(torch.zeros(4)[::2])])
    assert known([scores.sinks(one)]) != known([scores.sinks(other.clone().requires_grad_())])
    assert known([scores.sinks(one)]) != known([scores.sinks(torch.zeros(3)[1:])])  # otherwise aligned
    found = [tw.attention(x, x, x, score=scores.sinks(sinks), backend="cpp") for sinks in (one, other, one)]
    for sinks, out in zip((one, other, one), found, strict=True):
        torch.testing.assert_close(out, right([x, x, x], score=scores.sinks(sinks)), rtol=1e-5, atol=1e-5)


def test_a_tensor_that_is_both_a_bias_and_sinks() -> None:
    """Its two places may belong to two tensors in the next call."""
    x, both, other = torch.randn(1, 2, 24, 8), torch.tensor([0.0, 1.0]), torch.tensor([3.0, -2.0])

    def biased(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + both[h] * kv

    calls = [[biased, scores.sinks(sinks)][::order] for order in (1, -1) for sinks in (both, other, both)]
    found = [tw.attention(x, x, x, score=changes, backend="cpp") for changes in calls]
    for changes, out in zip(calls, found, strict=True):
        torch.testing.assert_close(out, right([x, x, x], score=changes), rtol=1e-5, atol=1e-5)
