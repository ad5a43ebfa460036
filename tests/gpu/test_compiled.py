"""torch.compile on a GPU: inductor, and the CUDA graphs that `mode="reduce-overhead"` captures and replays around attention."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import tilewise as tw
from tilewise import masks, scores
from tilewise.engines import torch_op

LENGTH, HEADS = 256, 2


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(length: int = LENGTH, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(1, HEADS, length, 64, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


def documents(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2], device=q.device) // 50


def own_document(q: Tensor) -> Callable[..., Any]:
    document = documents(q)
    return lambda b, h, i, j: (document[i] == document[j]) & (i >= j)


TABLE = torch.randn(HEADS, 2 * 400, generator=torch.Generator().manual_seed(3))

TOUR: dict[str, Callable[..., Any]] = {
    "plain": tw.attention,
    "causal": lambda q, k, v: tw.attention(q, k, v, mask=masks.causal),
    "softcap": lambda q, k, v: tw.attention(q, k, v, mask=masks.sliding_window(32), score=scores.softcap(5.0)),
    "document": lambda q, k, v: tw.attention(q, k, v, mask=own_document(q)),
    "captured size": lambda q, k, v: tw.attention(q, k, v, mask=lambda b, h, i, j: (j < q.size(-2) - 3) & (abs(i - j) <= q.shape[2] // 4)),
}


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def assert_compiled_is_eager(compiled: Callable[..., Any], function: Callable[..., Any], inputs: list[Tensor], more: tuple[Tensor, ...] = ()) -> None:
    torch.compiler.cudagraph_mark_step_begin()
    found, expected = compiled(*inputs), function(*inputs)
    grad = torch.randn_like(expected)
    sources = [*inputs, *more]
    got, wanted = torch.autograd.grad(found, sources, grad), torch.autograd.grad(expected, sources, grad)
    for mine, other in zip((found, *got), (expected, *wanted), strict=True):
        assert_close(mine.detach().clone(), other)


@pytest.mark.parametrize("name", TOUR)
def test_with_lengths_that_vary(name: str) -> None:
    compiled = torch.compile(TOUR[name], fullgraph=True, dynamic=True)
    for length in (256, 400):
        assert_compiled_is_eager(compiled, TOUR[name], tensors(length))


@pytest.mark.parametrize("name", TOUR)
def test_beside_cuda_graphs(name: str) -> None:
    """Inductor captures what is around attention."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.gelu(TOUR[name](q * 0.5, k, v)) + q

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):  # warm-up, capture, and replays with other contents
        assert_compiled_is_eager(compiled, layer, tensors(seed=seed))


def test_a_learned_table_beside_cuda_graphs() -> None:
    table = TABLE.to("cuda").requires_grad_()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q * 0.5, k, v, is_causal=True, score=lambda s, b, h, i, j: s + table[h, i - j + LENGTH])

    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        assert_compiled_is_eager(compiled, function, tensors(seed=seed), (table,))
        with torch.no_grad():
            table.mul_(0.5)


# -- attention inside CUDA graphs ------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recipes of the operators that run: a replay of a graph runs none."""
    found: list[str] = []
    original = torch_op.unpacked

    def counted(query: Tensor, key: Tensor, value: Tensor, others: list[Tensor], recipe: str, ints: list[int]) -> Any:
        found.append(recipe)
        return original(query, key, value, others, recipe, ints)

    monkeypatch.setattr(torch_op, "unpacked", counted)
    return found


@pytest.fixture
def skips() -> Callable[[], int]:
    """How often inductor gave up on a CUDA graph since the test began."""
    before = counters["inductor"]["cudagraph_skips"]
    return lambda: counters["inductor"]["cudagraph_skips"] - before


class Block(torch.nn.Module):
    def __init__(self, mask_of: Callable[[Tensor], Any], score: Any = None) -> None:
        super().__init__()
        self.project, self.out = (torch.nn.Linear(HEADS * 64, size, device="cuda", dtype=torch.bfloat16) for size in (3 * HEADS * 64, HEADS * 64))
        self.mask_of, self.score = mask_of, score

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, 64)).permute(2, 0, 3, 1, 4)
        return x + self.out(tw.attention(q, k, v, mask=self.mask_of(given), score=self.score, backend="flex").transpose(1, 2).flatten(2))


def ids_of(step: int) -> Tensor:
    """Another layout of documents at every step."""
    return (torch.arange(LENGTH, device="cuda") + 7 * step) // (40 + 30 * step)


def lengths_of(step: int) -> Tensor:
    return torch.tensor([LENGTH - 20 * step, 30 + 10 * step], device="cuda")


INSIDE: dict[str, tuple[Callable[[Tensor], Any], Callable[[int], Tensor]]] = {
    "plain": (lambda given: None, ids_of),
    "causal": (lambda given: masks.causal, ids_of),
    "window": (lambda given: masks.causal & masks.sliding_window(50), ids_of),
    "documents": (lambda given: masks.causal & masks.document(given), ids_of),
    "padding": (masks.padding, lengths_of),
    "left padding": (lambda given: masks.causal & (lambda b, h, i, j: j >= given[b]), lambda step: torch.tensor([5 * step, 100], device="cuda")),
}


@pytest.mark.parametrize("way", ["new tensors", "in place"])
@pytest.mark.parametrize("name", INSIDE)
def test_training_steps_are_captured(name: str, way: str, calls: list[str], skips: Callable[[], int]) -> None:
    """Two layers; masks follow what their tensors hold at every replay. Inductor itself checks that nothing else stays in the graphs' memory."""
    mask_of, given_of = INSIDE[name]
    torch.manual_seed(0)
    model = torch.nn.ModuleList([Block(mask_of), Block(mask_of)])

    def step(x: Tensor, given: Tensor) -> Tensor:
        for block in model:
            x = block(x, given)
        return x

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    kept = given_of(0)
    for n in range(7):
        x = torch.randn(2, LENGTH, HEADS * 64, device="cuda", dtype=torch.bfloat16)
        given = kept.copy_(given_of(n)) if way == "in place" else given_of(n)
        found = []
        torch.compiler.cudagraph_mark_step_begin()
        for function in (compiled, step):
            model.zero_grad(set_to_none=True)
            if function is compiled:
                calls.clear()
            out = function(x, given)
            out.float().square().mean().backward()
            if function is compiled and n >= 4:
                assert calls == [], f"step {n} was not replayed"
            found.append([out.detach().clone(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]])
        for mine, other in zip(*found, strict=True):
            assert_close(mine, other)
    assert skips() == 0


def test_a_graph_with_a_learned_score(calls: list[str], skips: Callable[[], int]) -> None:
    table = TABLE.to("cuda").requires_grad_()
    bias = lambda s, b, h, i, j: s + table[h, i - j + LENGTH]

    def function(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return tw.attention(q * 0.5, k, v, mask=masks.causal & masks.document(ids), score=bias, backend="flex")

    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for n in range(6):
        inputs, ids = tensors(seed=n), ids_of(n)
        calls.clear()
        torch.compiler.cudagraph_mark_step_begin()
        found = compiled(*inputs, ids)
        got = [t.clone() for t in torch.autograd.grad(found.float().square().sum(), [*inputs, table])]
        assert n < 4 or calls == []
        expected = function(*inputs, ids)
        for mine, other in zip(got, torch.autograd.grad(expected.float().square().sum(), [*inputs, table]), strict=True):
            assert_close(mine, other)
        with torch.no_grad():
            table.mul_(0.5)
    assert skips() == 0


def test_two_forwards_before_their_backwards() -> None:
    """The second's documents must not become those of the first's backward."""
    function = lambda q, k, v, ids: tw.attention(q * 0.5, k, v, mask=masks.causal & masks.document(ids), backend="flex")
    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for n in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        pairs = [(tensors(seed=n + k), ids_of(n + 3 * k)) for k in range(2)]
        outs = [compiled(*inputs, ids) for inputs, ids in pairs]
        got = [torch.autograd.grad(out.float().square().sum(), inputs) for out, (inputs, _) in zip(outs, pairs, strict=True)]
        for grads, (inputs, ids) in zip(got, pairs, strict=True):
            for mine, other in zip(grads, torch.autograd.grad(function(*inputs, ids).float().square().sum(), inputs), strict=True):
                assert_close(mine.clone(), other)


@pytest.mark.parametrize("padded", [False, True])
def test_static_cache_decoding(padded: bool, skips: Callable[[], int]) -> None:
    """transformers compiles decoding with a static cache by itself, with mode="reduce-overhead"."""
    transformers = pytest.importorskip("transformers")
    from tilewise.integrations import transformers as client

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=200, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64, pad_token_id=0
    )
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.float32).eval()  # in 16 bits, two tokens may well be equally likely
    ids = torch.randint(1, 200, (2, 100), device="cuda")
    keep = torch.ones_like(ids)
    if padded:
        keep[1, :37] = 0
    client.register()
    try:
        model.set_attn_implementation("tilewise")

        def generated(**options: Any) -> Tensor:
            found: Tensor = model.generate(ids * keep, attention_mask=keep, max_new_tokens=24, do_sample=False, eos_token_id=None, **options)
            return found

        with tw.attention_backend("flex"):
            expected = generated(cache_implementation="dynamic")
            assert torch.equal(generated(cache_implementation="static"), expected)
            assert torch.equal(generated(cache_implementation="static"), expected)
    finally:
        client.unregister()
    assert skips() == 0


@pytest.mark.parametrize("name", ["causal", "documents", "padding"])
def test_an_eager_training_step_is_captured(name: str) -> None:
    """torch.cuda.graph, without torch.compile: what is replayed follows what the mask's tensors hold."""
    mask_of, given_of = INSIDE[name]
    torch.manual_seed(0)
    block, x, given = Block(mask_of), torch.randn(2, LENGTH, HEADS * 64, device="cuda", dtype=torch.bfloat16), given_of(0)

    def step() -> list[Tensor]:
        out = block(x, given)
        return [out, *torch.autograd.grad(out.float().square().mean(), list(block.parameters()))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for n in range(1, 5):
        given.copy_(given_of(n))
        x.copy_(torch.randn_like(x))
        graph.replay()
        found = [t.clone() for t in captured]
        for mine, other in zip(found, step(), strict=True):
            assert_close(mine, other)


# -- attention beside CUDA graphs ------------------------------------------------------------------------------------


def test_block_masks_beside_cuda_graphs() -> None:
    compiled = torch.compile(tw.flex.flex_attention, fullgraph=True, mode="reduce-overhead")
    q, k, v = (t.detach() for t in tensors(1024))
    for seed in range(4):
        end = torch.tensor(200 * (seed + 1), device="cuda")
        blocks = tw.flex.create_block_mask(lambda b, h, i, j: (i >= j) & (j < end), None, None, 1024, 1024, device="cuda")  # noqa: B023 - used before the next round
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(compiled(q, k, v, block_mask=blocks).clone(), tw.flex.flex_attention(q, k, v, block_mask=blocks))


def test_block_masks_made_anew_are_one_graph() -> None:
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(tw.flex.flex_attention, fullgraph=True, backend=counter)
    q, k, v = (t.detach() for t in tensors(1024))
    for seed in range(4):
        ends = torch.randint(1, 1024, (1,), generator=torch.Generator().manual_seed(seed)).to("cuda")
        blocks = tw.flex.create_block_mask(lambda b, h, i, j: (i >= j) & (j < ends[b]), 1, None, 1024, 1024, device="cuda")  # noqa: B023 - used before the next round
        assert_close(compiled(q, k, v, block_mask=blocks), tw.flex.flex_attention(q, k, v, block_mask=blocks))
    assert counter.frame_count == 1
