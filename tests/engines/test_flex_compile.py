"""tilewise.flex under torch.compile: block masks from outside and made inside, and a decoding step that compiles once."""

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.flex_problems import LISTS, MASKS, B, D, H, assert_close, causal_blocks, chosen_blocks, dense, gradients, numbers, tensors
from tilewise import flex as ours

pytestmark = pytest.mark.usefixtures("torchs_flex_runs_eagerly", "seeded", "one_thread")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_gradients(function: Callable[..., Tensor], inputs: list[Tensor], *rest: Any) -> tuple[list[Tensor], list[Tensor]]:
    def with_lse(run: Callable[..., Tensor]) -> list[Tensor]:
        return gradients(lambda *leaves: (run(*leaves, *rest), torch.zeros(1, dtype=torch.float64)), inputs)

    return with_lse(torch.compile(function, backend="aot_eager", fullgraph=True)), with_lse(function)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("made_by", ["tilewise", "torch", "lists"])
@pytest.mark.parametrize("way", ["argument", "closure"])
def test_compiling_with_a_block_mask_from_outside(made_by: str, way: str) -> None:
    n = 200
    mask, bias = MASKS["document and causal"](n), numbers(H)
    counts, indices = chosen_blocks(2, 2, 1)
    made = {
        "tilewise": lambda: ours.create_block_mask(mask, B, None, n, n, device="cpu"),
        "torch": lambda: theirs.create_block_mask(mask, B, None, n, n, device="cpu"),
        "lists": lambda: ours.BlockMask.from_kv_blocks(counts, indices, seq_lengths=(n, n)),
    }[made_by]()

    def by_argument(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
        return ours.flex_attention(q, k, v, lambda s, b, h, i, j: s * 2 + bias[h], block_mask, kernel_options={"BLOCK_M": 64})

    def by_closure(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ours.flex_attention(q, k, v, lambda s, b, h, i, j: s * 2 + bias[h], made)

    found = compiled_gradients(by_argument, list(tensors(n)), made) if way == "argument" else compiled_gradients(by_closure, list(tensors(n)))
    for mine, other in zip(*found, strict=True):
        assert_close(mine, other)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiling_the_making_of_a_block_mask() -> None:
    n = 200
    mask = MASKS["document"](n)

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ours.flex_attention(q, k, v, block_mask=ours.create_block_mask(mask, B, H, n, n, device=q.device))

    for mine, other in zip(*compiled_gradients(inside, list(tensors(n))), strict=True):
        assert_close(mine, other)
    made, eager = (f(mask, B, H, 256, 256, "cpu") for f in (torch.compile(ours.create_block_mask, backend="eager"), ours.create_block_mask))
    assert all(torch.equal(getattr(made, name), getattr(eager, name)) for name in LISTS)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiling_a_decoding_step_compiles_once() -> None:
    n = 512
    _, k, v = tensors(n)
    whole = ours.create_block_mask(MASKS["causal"](n), None, None, n, n, device="cpu")

    def step(q: Tensor, position: Tensor, block_mask: ours.BlockMask) -> Tensor:
        part = block_mask[:, :, position // block_mask.BLOCK_SIZE[0]]
        part.mask_mod = lambda b, h, i, j: block_mask.mask_mod(b, h, i + position[0], j)
        part.seq_lengths = (1, n)
        out, aux = ours.flex_attention(q, k, v, block_mask=part, return_aux=ours.AuxRequest(lse=True))
        return out + 0 * aux.lse[..., None]

    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for position in (3, 200, 511):
        q = torch.randn(B, H, 1, D, dtype=torch.float64)
        assert_close(compiled(q, torch.tensor([position]), whole), dense(q, k[:, :, : position + 1], v[:, :, : position + 1])[0])
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_a_slice_taken_while_compiling_wants_its_mask_mod() -> None:
    whole = causal_blocks(256)

    def untouched(q: Tensor) -> Tensor:
        return ours.flex_attention(q, q, q, block_mask=whole[:, :, :1])

    with pytest.raises(Exception, match="sliced BlockMask"):
        torch.compile(untouched, backend="eager", fullgraph=True)(torch.randn(1, 1, 128, D))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("name", "dynamic"), [("lengths of a batch", None), ("window", None), ("length", True)])
def test_a_block_mask_that_is_made_anew_compiles_as_often_as_torchs(name: str, dynamic: bool | None) -> None:
    """However many blocks it has: none, one or many, partial or full."""

    def graphs(module: Any) -> int:
        torch._dynamo.reset()
        torch.manual_seed(0)
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(module.flex_attention, dynamic=dynamic, fullgraph=True, backend=counter)
        for size in (300, 900, 130):
            n = size if name == "length" else 400
            x, ends = torch.randn(2, 1, n, 8), torch.randint(1, n, (2,))
            mask = {
                "lengths of a batch": lambda b, h, i, j: (i >= j) & (j < ends[b]),  # noqa: B023 - used before the next round
                "window": lambda b, h, i, j: (i >= j) & (i - j < size),  # noqa: B023 - used before the next round
                "length": lambda b, h, i, j: (i >= j) & (j < ends[b]),  # noqa: B023 - used before the next round
            }[name]
            blocks = module.create_block_mask(mask, 2 if "b" in name else None, None, n, n, device="cpu")
            if module is ours:
                assert_close(compiled(x, x, x, block_mask=blocks), ours.flex_attention(x, x, x, block_mask=blocks))
            else:
                compiled(x, x, x, block_mask=blocks)
        return int(counter.frame_count)

    assert graphs(ours) <= graphs(theirs)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("made", ["sliced", "unpickled"])
def test_compiling_with_a_block_mask_whose_program_was_never_asked(made: str) -> None:
    """What a program uses is found while compiling, too."""
    q, k, v = tensors(256)
    whole = ours.create_block_mask(local_mask, B, H, 256, 256, device="cpu", BLOCK_SIZE=64)
    given = whole[:, :, 1:3] if made == "sliced" else pickle.loads(pickle.dumps(whole))
    rows = slice(64, 192) if made == "sliced" else slice(0, 256)
    compiled = torch.compile(ours.flex_attention, backend="eager", fullgraph=True)
    expected = ours.flex_attention(q, k, v, block_mask=whole)[:, :, rows]
    assert_close(compiled(q[:, :, rows], k, v, block_mask=given), expected)


def local_mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < 100)
