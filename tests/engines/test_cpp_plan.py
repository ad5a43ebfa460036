"""The C++ engine's plan: passes are made once for calls that are alike, again when what they hold has changed, and never serve another call."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import masks, scores
from tilewise.engines.cpp import missing, run
from tilewise.engines.cpp.plan import CppPlan
from tilewise.engines.cpp.workspace import Workspace, _spare, give_back
from tilewise.frontend import call_cache
from tilewise.tiles import Geometry, TileMap
from tilewise.tiles.runs import from_dense

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LENGTH = 100
IDS = torch.arange(LENGTH) // 30
REPLAYED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"mask": masks.causal},
    "documents": {"mask": masks.document(IDS) & masks.causal},
    "softcap": {"mask": masks.sliding_window(20), "score": scores.softcap(5.0)},
}


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    call_cache.forget()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that were made, by name."""
    names: list[str] = []
    for name in ("Forward", "Backward"):
        original = getattr(run, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> Any:
            names.append(name)
            return original(*args)

        monkeypatch.setattr(run, name, counted)
    return names


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tensors(seed: int = 0, queries: int = LENGTH, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 2, n, 16, generator=generator).to(dtype).requires_grad_(grad) for n in (queries, LENGTH, LENGTH)]


def check(x: list[Tensor], **options: Any) -> Tensor:
    """The output and, where they are wanted, the gradients are the reference's."""
    found, right = (tw.attention(*x, backend=backend, **options) for backend in ("cpp", "reference"))
    torch.testing.assert_close(found, right, atol=2e-2 if found.dtype == torch.bfloat16 else 1e-5, rtol=1e-2 if found.dtype == torch.bfloat16 else 1e-5)
    if found.requires_grad:
        grad = torch.randn_like(right)
        for a, b in zip(*[torch.autograd.grad(out, x, grad) for out in (found, right)], strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    return found


def within(ids: Tensor) -> Callable[..., Any]:
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)


def some_ids() -> Tensor:
    return torch.arange(LENGTH) // 30


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"mask": masks.causal},
    "documents": lambda: {"mask": within(some_ids())},
    "score": lambda: {"score": scores.softcap(5.0)},
    "sinks": lambda: {"score": scores.sinks(torch.tensor([0.5, -1.0]))},
}


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", OPTIONS)
def test_passes_are_made_once(name: str, grad: bool, made: list[str]) -> None:
    options = OPTIONS[name]()
    for seed in range(3):  # other tensors at other places
        check(tensors(seed, grad=grad), **options)
    assert made == ["Forward", "Backward"][: 1 + grad]


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_mask_contents_changed_in_place(grad: bool, made: list[str]) -> None:
    ids, x = some_ids(), tensors(grad=grad)
    mask = within(ids)
    before = check(x, mask=mask)
    ids.copy_(torch.arange(LENGTH) // 45)
    assert not torch.equal(before, check(x, mask=mask))
    assert made == ["Forward", "Backward"][: 1 + grad] * 2


def test_memory_of_a_capture_replaced(made: list[str]) -> None:
    ids, x = some_ids(), tensors()
    mask = within(ids)
    before = check(x, mask=mask)
    ids.data = torch.arange(LENGTH) // 45
    assert not torch.equal(before, check(x, mask=mask))
    assert len(made) == 2


def test_another_capture(made: list[str]) -> None:
    x = tensors()
    results = [check(x, mask=within(torch.arange(LENGTH) // size)) for size in (30, 45)]
    assert not torch.equal(*results)
    assert len(made) == 2


def test_a_score_that_learns_in_place(made: list[str]) -> None:
    table = torch.nn.Parameter(torch.linspace(-1, 1, LENGTH))
    x, score = tensors(grad=True), lambda s, b, h, q, kv: s + table[kv]
    for _ in range(3):
        results = [tw.attention(*x, score=score, backend=backend) for backend in ("cpp", "reference")]
        gradients = [torch.autograd.grad(out.sum(), [*x, table]) for out in results]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            table += 1 + torch.arange(LENGTH) % 3
    assert made == ["Forward", "Backward"]


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_a_given_map_changed_in_place(grad: bool, made: list[str]) -> None:
    tiles, x = torch.tensor([[True, False], [True, True]]), tensors(grad=grad)
    given = TileMap(Geometry(1, 1, LENGTH, LENGTH, (64, 64)), from_dense(tiles & False), from_dense(tiles), None, given=True)
    before = check(x, mask=given)
    given.full.start[0] = 1  # the first row's only tile
    assert not torch.equal(before, check(x, mask=given))
    assert made == ["Forward", "Backward"][: 1 + grad] * 2


CHANGES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "dtype": lambda x: [t.bfloat16() for t in x],
    "strides": lambda x: [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x],
    "strides of the query": lambda x: [x[0].transpose(2, 3).contiguous().transpose(2, 3), *x[1:]],
    "requires_grad": lambda x: [t.clone().requires_grad_() for t in x],
    "requires_grad of one": lambda x: [x[0], x[1].clone().requires_grad_(), x[2]],
    "fewer keys": lambda x: [x[0], x[1][:, :, :60], x[2][:, :, :60]],
    "fewer queries": lambda x: [x[0][:, :, :3], x[1], x[2]],
    "one head": lambda x: [t[:, :1] for t in x],
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_calls_have_passes_of_their_own(name: str, made: list[str]) -> None:
    x = tensors()
    for mask in (None, masks.causal, within(some_ids())):
        check(x, mask=mask)
        before = made.count("Forward")
        changed = CHANGES[name](x)
        wants = [t for t in changed if t.requires_grad]
        found, right = (tw.attention(*changed, mask=mask, backend=backend) for backend in ("cpp", "reference"))
        torch.testing.assert_close(found, right, atol=2e-2 if found.dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
        if wants:
            for a, b in zip(*[torch.autograd.grad(out.sum(), wants) for out in (found, right)], strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        assert made.count("Forward") == before + 1


@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_is_asked_for_every_time(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, asked = tensors(grad=True), []

    def recording(pack: Callable[..., bytes]) -> Callable[..., bytes]:
        def recorded(*values: int) -> bytes:
            asked.append(values[0])
            return pack(*values)

        return recorded

    monkeypatch.setattr(run, "pack_forward", recording(run.pack_forward))
    monkeypatch.setattr(run, "pack_backward", recording(run.pack_backward))
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        check(x, mask=masks.causal)
    assert asked == [1, 1, 2, 2, 3, 3]
    assert made == ["Forward", "Backward"]


@pytest.mark.parametrize("queries", [LENGTH, 2], ids=["forward", "decoding"])
def test_a_known_call_makes_no_lse_where_none_is_asked_for(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, given, pack = tensors(queries=queries), [], run.pack_forward
    monkeypatch.setattr(run, "pack_forward", lambda *values: given.append([value != 0 for value in values[5:7]]) or pack(*values))
    right, right_lse = tw.attention(*x, mask=masks.causal, backend="reference", return_lse=True)
    for _ in range(3):
        torch.testing.assert_close(tw.attention(*x, mask=masks.causal, backend="cpp"), right, atol=1e-5, rtol=1e-5)
        out, lse = tw.attention(*x, mask=masks.causal, backend="cpp", return_lse=True)
        torch.testing.assert_close((out, lse), (right, right_lse), atol=1e-5, rtol=1e-5)
    wanted, unwanted = [True, False], [False, False]  # lse, the largest scores
    assert given == [wanted, wanted, *[unwanted, wanted] * 2]  # the first call of a kind is not a replay


def test_seeds_and_sinks_are_no_part_of_a_pass(made: list[str]) -> None:
    x, logits = tensors(), torch.tensor([0.5, -1.0])
    results = [check(x, dropout_p=0.3, seed=seed, score=scores.sinks(logits)) for seed in (1, 2)]
    logits += 1
    results.append(check(x, dropout_p=0.3, seed=2, score=scores.sinks(logits)))
    assert not any(torch.equal(results[k], results[k + 1]) for k in range(2))
    assert made == ["Forward"]


def test_gradients_laid_out_otherwise(made: list[str]) -> None:
    """The gradient of the output is anybody's, and saved tensors come back with other strides from offloading."""
    x = tensors(grad=True)
    right = tw.attention(*x, backend="reference")
    grad = torch.randn_like(right)
    wanted = torch.autograd.grad(right, x, grad)
    turned = lambda t: t.transpose(2, 3).contiguous().transpose(2, 3) if t.dim() == 4 else t
    for unpacked in (lambda t: t, turned, lambda t: t):
        for given in (grad, turned(grad), grad[:, :1].expand_as(grad), grad):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpacked):
                out = tw.attention(*x, backend="cpp")
                found = torch.autograd.grad(out, x, given)
            if torch.equal(given, grad):
                for a, b in zip(found, wanted, strict=True):
                    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert made.count("Forward") == 1
    assert made.count("Backward") == 6  # two layouts of saved tensors, three of the gradient


# -- decoding --------------------------------------------------------------------------------------------------------


def test_decoding_reads_a_mask_that_changes_without_a_new_pass(made: list[str]) -> None:
    lengths = torch.tensor([40, 70])
    mask = masks.padding(lengths)
    results = []
    for _ in range(3):
        results.append(check(tensors(queries=1), mask=mask))
        lengths += 1
    assert made == ["Forward"]
    assert not torch.equal(results[0], results[1])


def test_the_backward_of_decoding_sees_a_mask_that_changes(made: list[str]) -> None:
    """Only the score learns, so the forward decodes; the backward has a schedule, made from the mask's contents."""
    lengths, table, x = torch.tensor([40, 70]), torch.zeros(LENGTH, requires_grad=True), tensors(queries=1)
    mask, score = masks.padding(lengths), lambda s, b, h, q, kv: s + table[kv]
    for _ in range(3):
        results = [tw.attention(*x, mask=mask, score=score, backend=backend) for backend in ("cpp", "reference")]
        a, b = [torch.autograd.grad(out.square().sum(), table)[0] for out in results]
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
        lengths += 25
    assert made.count("Backward") == 3


def test_buffers_lie_in_the_memory_that_was_borrowed() -> None:
    """The addresses are remembered from one call to the next; calls at the same time have memory of their own each."""
    workspace = Workspace(10, 0, 100, 64)
    first, second = [workspace.borrow()[0] for _ in range(2)]
    assert first is not None and second is not None and first is not second
    for memory in (first, first, second, first):
        _spare.clear()
        give_back(memory)
        borrowed, buffers = workspace.borrow()
        assert borrowed is memory and memory.numel() >= 256
        assert buffers[1] == 0 and [buffers[n] - memory.data_ptr() for n in (0, 2, 3)] == [0, 64, 192]


@pytest.fixture
def through(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each backward that was not replayed."""
    found: list[str] = []
    backward = CppPlan.backward

    def counted(*args: Any) -> Any:
        found.append("backward")
        return backward(*args)

    monkeypatch.setattr(CppPlan, "backward", counted)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", REPLAYED)
def test_the_second_backward_is_replayed(name: str, dtype: torch.dtype, through: list[str]) -> None:
    def step(seed: int) -> tuple[Tensor, ...]:
        x = tensors(seed, dtype=dtype, grad=True)
        return torch.autograd.grad(tw.attention(*x, backend="cpp", **REPLAYED[name]), x, tensors(seed + 100, dtype=dtype)[0])

    step(0)
    assert len(through) == 1
    replayed = [step(seed) for seed in (1, 2)]
    assert len(through) == 1
    for seed, found in zip((1, 2), replayed, strict=True):
        call_cache.forget()
        assert all(torch.equal(a, b) for a, b in zip(found, step(seed), strict=True))
    assert len(through) == 3


@pytest.mark.parametrize("what", ["the gradient of lse", "sinks", "dropout", "a learned score", "a score with a table"])
def test_what_needs_a_problem_is_not_replayed(what: str, through: list[str]) -> None:
    table = torch.zeros(2, LENGTH, requires_grad=what == "a learned score")
    asked: dict[str, Any] = {
        "sinks": {"score": scores.sinks(torch.zeros(2))},
        "dropout": {"dropout_p": 0.5, "seed": 1},
        "a learned score": {"score": lambda s, b, h, q, kv: s + table[h, kv]},
        "a score with a table": {"score": lambda s, b, h, q, kv: s + table[h, kv]},
    }.get(what, {"mask": masks.causal})
    for times in (1, 2, 3):
        x = tensors(times, grad=True)
        found = tw.attention(*x, backend="cpp", return_lse=what == "the gradient of lse", **asked)
        torch.autograd.backward(found, [torch.ones_like(t) for t in found] if isinstance(found, tuple) else torch.ones_like(found))
        assert len(through) == times
