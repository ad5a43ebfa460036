"""What torch puts around a call: compile, autocast, checkpoint, threads, dispatch modes, inference, function transforms."""

import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from tilewise import masks, scores
from tilewise.core.map_cache import maps
from tilewise.core.problem import Options, make_problem
from tilewise.engines import ENGINES, arguments
from tilewise.engines.blocked import BlockedEngine
from tilewise.engines.cpp import CppEngine
from tilewise.engines.packed_call import packed, unpacked
from tilewise.engines.reference import ReferenceEngine
from tilewise.engines.torch_op import SCORE_CAPTURES

LENGTH = 40
DOCUMENTS = torch.arange(LENGTH) // 10
TABLE = torch.randn(2, LENGTH, generator=torch.Generator().manual_seed(5)).requires_grad_()
MAP = tw.tile_map(masks.causal & masks.sliding_window(9), q_len=LENGTH, kv_len=LENGTH, tile=(16, 8))


def tensors(*shape: int, count: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape or (1, 2, LENGTH, 8), generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(count)]


def gradients(out: Any, sources: list[Tensor]) -> tuple[Tensor, ...]:
    """Of every output, weighted unevenly."""
    outs = out if isinstance(out, tuple) else (out,)
    loss = sum((o * torch.linspace(0.5, 1.5, o.numel()).view(o.shape)).square().sum() for o in outs)
    return torch.autograd.grad(loss, sources, allow_unused=True)


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


# -- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def forget_compilations() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def with_new_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask over a tensor made inside the compiled function."""
    later = DOCUMENTS + 1
    return tw.attention(q, k, v, mask=lambda b, h, i, j: later[i] == later[j], backend="blocked")


COMPILED: dict[str, Callable[..., Any]] = {
    "plain": tw.attention,
    "blocked": lambda q, k, v: tw.attention(q, k, v, backend="blocked"),
    "cpp": lambda q, k, v: tw.attention(q, k, v, backend="cpp"),
    "function with captures": lambda q, k, v: tw.attention(q, k, v, mask=lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j)),
    "capture made inside": with_new_tensor,
    "masks": lambda q, k, v: tw.attention(q, k, v, mask=masks.causal & masks.sliding_window(7)),
    "documents": lambda q, k, v: tw.attention(q, k, v, mask=masks.document(DOCUMENTS)),
    "is_causal": lambda q, k, v: tw.attention(q, k, v, is_causal=True, mask=masks.sliding_window(5)),
    "learned score": lambda q, k, v: tw.attention(q, k, v, score=[scores.softcap(3.0), lambda s, b, h, i, j: s + TABLE[h, i] * TABLE[h, j]]),
    "sinks": lambda q, k, v: tw.attention(q, k, v, score=scores.sinks(TABLE[:, 0])),
    "dropout": lambda q, k, v: tw.attention(q, k, v, dropout_p=0.3, seed=5),
    "dropout, unseeded": lambda q, k, v: tw.attention(q, k, v, dropout_p=0.3),
    "map": lambda q, k, v: tw.attention(q, k, v, mask=MAP),
    "lse": lambda q, k, v: tw.attention(q, k, v, mask=masks.causal, return_lse=True),
    "dense mask": lambda q, k, v: tw.attention(q, k, v, mask=DOCUMENTS[:, None] == DOCUMENTS),
    "additive mask": lambda q, k, v: tw.attention(q, k, v, mask=torch.where(DOCUMENTS < 3, 0.0, -torch.inf)[None]),
    "flat": lambda q, k, v: tw.attention(*(t.transpose(1, 2).flatten(2) for t in (q, k, v)), heads=2, is_causal=True),
    "packed": lambda q, k, v: tw.varlen_attention(*(t[0].transpose(0, 1) for t in (q, k, v)), torch.tensor([0, 10, 25, 40]), is_causal=True),
    "sdpa": lambda q, k, v: tw.functional.scaled_dot_product_attention(q, k, v, DOCUMENTS[:, None] == DOCUMENTS),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_is_eager(name: str) -> None:
    function, inputs = COMPILED[name], tensors()
    torch.manual_seed(0)
    eager = function(*inputs)
    torch.manual_seed(0)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
    assert_equal(compiled, eager)
    found, expected = (gradients(out, [*inputs, TABLE]) for out in (compiled, eager))
    assert (expected[3] is not None) == (name in ("learned score", "sinks"))
    assert_equal(found, expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler: g++ was not found")
def test_compiled_by_inductor() -> None:
    inputs = tensors()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.gelu(COMPILED["learned score"](q * 0.5, k, v)) + q

    eager, compiled = layer(*inputs), torch.compile(layer, fullgraph=True)(*inputs)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(gradients(compiled, [*inputs, TABLE]), gradients(eager, [*inputs, TABLE]))


def test_new_lengths_compile_once_more() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    table = torch.randn(2, 99)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q, k, v, mask=masks.sliding_window(8), score=lambda s, b, h, i, j: s + table[h, i])

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for length in (40, 50, 33, 90, 17):
        inputs = tensors(1, 2, length, 8)
        out, expected = compiled(*inputs), function(*inputs)
        assert_equal(out, expected)
        assert_equal(gradients(out, inputs), gradients(expected, inputs))
    assert counter.frame_count <= 2  # once for the first length, once for all lengths


def test_new_windows_compile_once_more() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    inputs = tensors()

    def function(reach: int) -> Tensor:
        return tw.attention(*inputs, mask=masks.sliding_window(reach))

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for reach in (3, 4, 9, 12):
        assert_equal(compiled(reach), function(reach))
    assert counter.frame_count <= 2


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engines that really ran, in order."""
    names: list[str] = []
    for engine in (BlockedEngine, CppEngine, ReferenceEngine):
        forward = engine.forward

        def counted(self: Any, problem: Any, plan: Any, forward: Any = forward) -> Any:
            names.append(self.name)
            return forward(self, problem, plan)

        monkeypatch.setattr(engine, "forward", counted)
    return names


def test_the_scope_reaches_a_compiled_function(ran: list[str]) -> None:
    inputs = tensors()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q, k, v, mask=masks.sliding_window(5))

    for scope in (nullcontext(), tw.attention_backend("math"), nullcontext(), tw.attention_backend("flex")):
        with scope:
            function(*inputs)
        maps.clear()  # and plans with them: one that is kept runs the forward by itself
    assert ran[0] == ran[2] and ran[1] == "reference" and ran[3] != "reference" and len(ran) == 4


def test_export() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return tw.attention(q, k, v, mask=masks.causal, score=scores.softcap(2.0), backend="blocked")

    length = torch.export.Dim("length", min=2, max=1000)
    exported = torch.export.export(Layer(), tuple(t.detach() for t in tensors()), dynamic_shapes=({2: length},) * 3)
    longer = tensors(1, 2, 77, 8)
    assert_equal(exported.module()(*longer), Layer()(*longer))


# -- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["blocked", "cpp", "reference", "native"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_a_cast_of_the_inputs(dtype: torch.dtype, engine: str) -> None:
    """And of nothing else: inside an engine every product keeps the precision the engine wrote down."""
    inputs = tensors()
    cast = [t.detach().to(dtype).requires_grad_() for t in inputs]
    with torch.autocast("cpu", dtype=dtype):
        out = tw.attention(*inputs, is_causal=True, backend=engine)
    expected = tw.attention(*cast, is_causal=True, backend=engine)
    assert_equal(out, expected)
    assert_equal([g.to(dtype) for g in gradients(out, inputs)], list(gradients(expected, cast)))


def test_autocast_keeps_the_score_precise() -> None:
    inputs = tensors()
    score = [scores.softcap(3.0), lambda s, b, h, i, j: s + TABLE[h, i] * TABLE[h, j]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = tw.attention(*inputs, score=score, return_lse=True, backend="blocked")
    expected, expected_lse = tw.attention(*(t.bfloat16() for t in inputs), score=score, return_lse=True, backend="blocked")
    assert_equal((out, lse), (expected, expected_lse))
    assert lse.dtype == torch.float32


def test_autocast_of_a_compiled_function() -> None:
    inputs = tensors()
    compiled = torch.compile(COMPILED["masks"], fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = compiled(*inputs), COMPILED["masks"](*inputs)
    assert_equal(out, expected)
    assert_equal(gradients(out, inputs), gradients(expected, inputs))


def test_autocast_joins_mixed_dtypes() -> None:
    q, k, v = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tw.attention(q, k.bfloat16(), v.half(), backend="blocked")
    assert out.dtype == torch.bfloat16
    for gradient, source in zip(gradients(out, [q, k, v]), (q, k, v), strict=True):
        assert gradient.dtype == source.dtype and gradient.abs().sum() > 0


def test_autocast_leaves_float64() -> None:
    q, k, v = tensors(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(tw.attention(q, k, v, backend="blocked"), tw.attention(q, k, v, backend="blocked"))


# -- checkpoint, threads, modes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_repeats_unseeded_dropout(reentrant: bool) -> None:
    inputs = tensors()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q, k, v, mask=masks.causal, dropout_p=0.4, backend="blocked")

    torch.manual_seed(3)
    expected = gradients(layer(*inputs), inputs)
    torch.manual_seed(3)
    assert_equal(gradients_by_backward(checkpoint(layer, *inputs, use_reentrant=reentrant), inputs), expected)


def gradients_by_backward(out: Tensor, sources: list[Tensor]) -> tuple[Tensor | None, ...]:
    """As gradients(), through .backward(): reentrant checkpoints know no other way."""
    for source in sources:
        source.grad = None
    (out * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).square().sum().backward()
    return tuple(source.grad for source in sources)


def test_checkpoint_of_learned_scores() -> None:
    inputs = tensors()
    expected = gradients(COMPILED["learned score"](*inputs), [*inputs, TABLE])
    assert_equal(gradients(checkpoint(COMPILED["learned score"], *inputs, use_reentrant=False), [*inputs, TABLE]), expected)


def test_eight_threads_at_once() -> None:
    """New masks, scores and lengths on every thread: the caches behind them are shared."""
    found: dict[int, Any] = {}

    def work(number: int) -> Any:
        length = 130 + number % 3
        q, k, v = tensors(1, 2, length, 8, seed=number)
        ids = torch.arange(length) // (20 + number % 4)
        score = [scores.softcap(2.0 + number % 2)]
        return [(out := tw.attention(q, k, v, mask=masks.document(ids), score=score, backend="blocked")).detach(), *gradients(out, [q, k, v])]

    def run(number: int) -> None:
        found[number] = [work(number) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        expected = work(number)
        for got in found[number]:
            assert_equal(got, expected)


@pytest.mark.parametrize("engine", ["blocked", "cpp", "reference"])
def test_under_a_dispatch_mode(engine: str) -> None:
    """A TorchDispatchMode sees one operator each way, which then runs below autograd."""
    inputs = tensors()
    expected = gradients(tw.attention(*inputs, mask=masks.causal, backend=engine), inputs)
    with FlopCounterMode(display=False):
        assert_equal(gradients(tw.attention(*inputs, mask=masks.causal, backend=engine), inputs), expected)


@pytest.mark.parametrize("engine", ["blocked", "cpp", "reference", "native"])
def test_inference_mode(engine: str) -> None:
    expected = tw.attention(*tensors(), is_causal=True, backend=engine).detach()
    with torch.inference_mode():
        q, k, v = tensors()
        assert_equal(tw.attention(q, k, v, is_causal=True, backend=engine), expected)


def test_maps_of_inference_tensors_follow_their_contents() -> None:
    """Changes to an inference tensor leave no trace, so no map of one may be remembered."""
    with torch.inference_mode():
        q, k, v = tensors(1, 1, 300, 8)
        ids = torch.zeros(300, dtype=torch.int64)
        mask = masks.document(ids)
        tw.attention(q, k, v, mask=mask, backend="blocked")
        ids[150:] = 1
        assert_equal(tw.attention(q, k, v, mask=mask, backend="blocked"), tw.attention(q, k, v, mask=masks.document(ids.clone()), backend="blocked"))


def test_maps_follow_tensors_changed_in_place() -> None:
    q, k, v = (t.detach() for t in tensors(1, 1, 300, 8))
    ids = torch.zeros(300, dtype=torch.int64)
    mask = masks.document(ids)
    before = tw.attention(q, k, v, mask=mask, backend="blocked")
    ids[150:] = 1
    after = tw.attention(q, k, v, mask=mask, backend="blocked")
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, tw.attention(q, k, v, mask=mask, backend="reference"))


@pytest.mark.parametrize("what", ["query", "mask", "score", "seed"])
def test_a_tensor_changed_before_the_backward_is_an_error(what: str) -> None:
    """Else the backward would be that of another problem."""
    q, k, v = tensors()
    ids, bias, seed = torch.arange(LENGTH) // 10, torch.randn(LENGTH), torch.tensor(3)
    out = tw.attention(q, k, v, mask=masks.document(ids), score=lambda s, b, h, i, j: s + bias[j], dropout_p=0.5, seed=seed, backend="blocked")
    with torch.no_grad():
        {"query": q, "mask": ids, "score": bias, "seed": seed}[what].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_fake_tensors_have_the_right_shapes_and_strides() -> None:
    q, k, v = (t.detach().transpose(1, 2) for t in tensors(2, 9, 3, 8))
    real = tw.attention(q, k, v[..., :5], mask=masks.causal, return_lse=True, backend="blocked")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = tw.attention(*(mode.from_tensor(t) for t in (q, k, v[..., :5])), mask=masks.causal, return_lse=True, backend="blocked")
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


# -- the operators ---------------------------------------------------------------------------------------------------

PROBLEMS: dict[str, Callable[[list[Tensor]], tuple[Any, Any, Options]]] = {
    "plain": lambda leaves: (None, None, Options()),
    "mask": lambda leaves: (masks.document(torch.arange(9) // 3) & masks.sliding_window(2), None, Options(deterministic=True)),
    "learned score": lambda leaves: (masks.causal, [lambda s, b, h, i, j: s * 0.5 + leaves[0][h, i]], Options(scale=0.3)),
    "sinks": lambda leaves: (None, scores.sinks(leaves[1]), Options()),
    "map": lambda leaves: (tw.tile_map(masks.causal, q_len=9, kv_len=9, tile=(4, 4)), None, Options()),
    "dropout": lambda leaves: (None, None, Options(dropout_p=0.5, seed=3)),
    "largest scores": lambda leaves: (masks.causal, None, Options(max_scores=True)),
}


@pytest.mark.parametrize("engine", [e.name for e in ENGINES if e.name in ("blocked", "cpp", "reference")])
@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck(name: str, engine: str) -> None:
    q, k, v = tensors(2, 2, 9, 4)
    q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    leaves = [torch.randn(2, 9, requires_grad=True), torch.randn(2, requires_grad=True)]
    problem, _ = make_problem(q, k, v, *PROBLEMS[name](leaves))
    given = arguments(engine, problem)
    torch.library.opcheck(torch.ops.tilewise.attention.default, given)

    detached = packed(torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, given))
    torch.library.opcheck(torch.ops.tilewise.attention_forward.default, detached)
    out, lse, largest = torch.ops.tilewise.attention_forward(*detached)
    assert len(largest) == (name == "largest scores")
    wanted = list(range(len(given[SCORE_CAPTURES])))
    for grad_lse in (None, torch.randn_like(lse)):
        torch.library.opcheck(torch.ops.tilewise.attention_backward.default, (*detached, out, lse, torch.randn_like(out), grad_lse, wanted))


@pytest.mark.parametrize("name", PROBLEMS)
def test_packed_arguments_are_read_back(name: str) -> None:
    leaves = [torch.randn(2, 9), torch.randn(2)]
    problem, _ = make_problem(*(t.detach() for t in tensors(2, 2, 9, 4)), *PROBLEMS[name](leaves))
    engine, found = unpacked(*packed(arguments("cpp", problem)))
    assert engine.name == "cpp"
    assert arguments("cpp", found)[14:] == arguments("cpp", problem)[14:]
    for mine, other in zip(tree_leaves(arguments("cpp", found)), tree_leaves(arguments("cpp", problem)), strict=True):
        assert mine is other if isinstance(other, Tensor) else mine == other


@pytest.mark.parametrize("number", [0.1, -0.0, 5e-324, float("inf"), float("nan"), 1 / 3])
def test_floats_keep_every_bit(number: float) -> None:
    q, k, v = (t.detach() for t in tensors(1, 1, 4, 4))
    problem, _ = make_problem(q, k, v, lambda b, h, i, j: i * number < j, lambda s, b, h, i, j: s * number, Options(scale=number if number == number else None))
    _, found = unpacked(*packed(arguments("cpp", problem)))
    for mine, other in ((found.mask, problem.mask), (found.score, problem.score)):
        assert mine is not None and other is not None
        assert struct.pack(f"{len(other.floats)}d", *mine.floats) == struct.pack(f"{len(other.floats)}d", *other.floats)
        assert mine.program.text == other.program.text
    assert struct.pack("d", found.scale) == struct.pack("d", problem.scale)


def test_one_recipe_serves_other_tensors_and_integers() -> None:
    """A recipe is read once: nothing of the first call may be in the second."""

    def asked(length: int, fill: int) -> tuple[Any, ...]:
        q, k, v = (t.detach() for t in tensors(1, 1, length, 4))
        ids = torch.full((length,), fill)
        return packed(arguments("blocked", make_problem(q, k, v, lambda b, h, i, j: (ids[i] == ids[j]) & (j < length), None, Options())[0]))

    first, second = asked(4, 1), asked(6, 2)
    assert first[4] == second[4]
    unpacked(*first)
    _, found = unpacked(*second)
    assert found.mask is not None and found.mask.captures[0] is second[3][0] and list(found.mask.ints) == second[5] != first[5]
    assert found.query is second[0]


TAGGED = {"attention_forward": True, "attention_backward": True, "attention_forward_in_graphs": False, "attention_backward_in_graphs": False}


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch knows no such tag")
@pytest.mark.parametrize("name", TAGGED)
def test_inductor_is_told_which_operators_to_keep_out_of_its_cuda_graphs(name: str) -> None:
    assert (torch.Tag.cudagraph_unsafe in getattr(torch.ops.tilewise, name).default.tags) == TAGGED[name]


@pytest.mark.parametrize("name", ["plain", "map"])
@pytest.mark.parametrize("can", [True, False])
def test_graphs_hold_the_operators_that_the_engine_allows(can: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given tiles are never captured: to read them waits for the device."""
    monkeypatch.setattr(BlockedEngine, "is_capturable", lambda self, problem: can)
    mask = PROBLEMS[name]([])[0]
    found: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if "attention" in str(node.target))
        return graph

    q, k, v = tensors(2, 2, 9, 4)
    compiled = torch.compile(lambda q, k, v: tw.attention(q, k, v, mask=mask, backend="blocked"), backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    out = compiled(q, k, v)
    assert_equal(torch.autograd.grad(out.sum(), q)[0], torch.autograd.grad(tw.attention(q, k, v, mask=mask, backend="blocked").sum(), q)[0])
    ending = "_in_graphs.default" if can and name == "plain" else ".default"
    assert found == [f"tilewise.attention_forward{ending}", f"tilewise.attention_backward{ending}"]


# -- derivatives that there are not: none is silently wrong (test_transforms.py has those of torch.func) --------------------


@pytest.mark.parametrize("engine", ["blocked", "cpp", "reference"])
def test_a_second_derivative_is_an_error(engine: str) -> None:
    q, k, v = tensors()
    out = tw.attention(q, k, v, backend=engine)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    assert gradient.requires_grad  # else a penalty on it would silently count for nothing
    assert_equal(gradient.detach(), torch.autograd.grad(tw.attention(q, k, v, backend=engine).sum(), q)[0])
    with pytest.raises(tw.BackendError, match="cannot be differentiated twice"):
        (out.sum() + gradient.square().sum()).backward()
    (gradient,) = torch.autograd.grad(tw.attention(q, k, v, backend=engine).sum(), q, create_graph=True)
    with pytest.raises(tw.BackendError, match="cannot be differentiated twice"):
        torch.autograd.grad(gradient.sum(), k)


def test_forward_mode_is_an_error() -> None:
    q, k, v = (t.detach() for t in tensors())
    with pytest.raises(tw.BackendError, match="forward-mode"):
        torch.func.jvp(lambda q: tw.attention(q, k, v, backend="blocked"), (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(tw.BackendError, match="forward-mode"):
        table = torch.autograd.forward_ad.make_dual(TABLE.detach(), torch.ones_like(TABLE))
        tw.attention(q, k, v, score=lambda s, b, h, i, j: s + table[h, i], backend="blocked")


# -- TF32 --------------------------------------------------------------------------------------------------------------

OLD, NEW = "torch.backends.cuda.matmul.allow_tf32", "torch.backends.cuda.matmul.fp32_precision"
SWITCHES = {f"{OLD} = True": True, f"{NEW} = 'tf32'": True, f"{OLD} = True; {NEW} = 'ieee'": False}  # what a program sets -> whether TF32 is allowed then


@pytest.mark.parametrize("line", SWITCHES)
def test_every_way_to_allow_tf32_is_understood(line: str) -> None:
    if "fp32_precision" in line and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("torch has had fp32_precision since 2.9")
    program = f"import torch, tilewise\n{line}\nq = torch.ones(1, 1, 4, 8)\ntilewise.attention(q, q, q, mask=tilewise.masks.causal)\n"
    program += "from tilewise.engines.gpu.config import dot_precision\nprint(dot_precision(torch.float32) == 'tf32')"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert ran.stdout.strip() == str(SWITCHES[line]), ran.stderr
