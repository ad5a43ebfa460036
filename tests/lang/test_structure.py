"""A program is its structure: what may vary from call to call is in its arguments, and its text is enough to rebuild it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.programs import grid
from tilewise import masks, scores
from tilewise.lang import BoundProgram, evaluate, gathered, parse, shifted, trace_mask, trace_score


def text(function: Callable[..., Any]) -> str:
    return trace_mask(function).program.text


def windowed(ids: Tensor, reach: int) -> Callable[..., Any]:
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (q - kv <= reach)


DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 2])


def test_contents_lengths_and_numbers_do_not_change_the_text() -> None:
    usual = text(windowed(DOCUMENTS, 3))
    assert text(windowed(DOCUMENTS + 5, 3)) == usual
    assert text(windowed(torch.zeros(4096, dtype=torch.int64), 3)) == usual
    assert text(windowed(DOCUMENTS, -1_000_000)) == usual
    assert text(windowed(DOCUMENTS[::2], 3)) == usual


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (masks.sliding_window(4), masks.sliding_window(1024)),
        (masks.sliding_window(4, 4), masks.sliding_window(4, 0)),
        (masks.document(DOCUMENTS), masks.document(lengths=[3, 9, 1])),
        (masks.prefix_lm(3), masks.prefix_lm(700)),
        (masks.neighborhood((4, 6), 3), masks.neighborhood((30, 50), (7, 9))),
        (masks.block_diffusion(16, 4), masks.block_diffusion(2048, 32)),
    ],
    ids=lambda m: m.name,
)
def test_a_mask_of_the_library_keeps_its_text_for_other_parameters(one: masks.Mask, other: masks.Mask) -> None:
    assert one.traced().program.text == other.traced().program.text


def test_a_score_keeps_its_text_for_other_parameters() -> None:
    assert trace_score((scores.softcap(20.0),)).program.text == trace_score((scores.softcap(50.0),)).program.text
    assert trace_score((scores.alibi(4),)).program.text == trace_score((scores.alibi(32),)).program.text


def test_another_structure_dtype_or_rank_changes_the_text() -> None:
    table = torch.zeros(2, 7, dtype=torch.int64)
    variants = {
        "usual": text(windowed(DOCUMENTS, 3)),
        "comparison": text(lambda b, h, q, kv: (DOCUMENTS[q] == DOCUMENTS[kv]) & (q - kv < 3)),
        "operands": text(lambda b, h, q, kv: (DOCUMENTS[kv] == DOCUMENTS[q]) & (kv - q <= 3)),
        "dtype": text(windowed(DOCUMENTS.int(), 3)),
        "rank": text(lambda b, h, q, kv: (table[b, q] == table[b, kv]) & (q - kv <= 3)),
        "float for int": text(lambda b, h, q, kv: (DOCUMENTS[q] == DOCUMENTS[kv]) & (q - kv <= 3.0)),
        "two captures": text(lambda b, h, q, kv: (DOCUMENTS[q] == table[0][kv]) & (q - kv <= 3)),
    }
    assert len(set(variants.values())) == len(variants)


def test_the_scores_dtype_is_part_of_the_text() -> None:
    function = scores.softcap(3.0)
    assert trace_score((function,), torch.float32).program.text != trace_score((function,), torch.float64).program.text


def test_a_number_as_exponent_is_part_of_the_text() -> None:
    squared, cubed = (trace_score((lambda s, b, h, q, kv, n=n: s**n,)) for n in (2, 3))
    assert squared.program.text != cubed.program.text


CALLS = {
    "mask": trace_mask(windowed(DOCUMENTS, 3)),
    "constant": trace_mask(lambda b, h, q, kv: True),
    "torch's noop": trace_mask(lambda b, h, q, kv: b.new_ones((), dtype=torch.bool)),
    "score": trace_score((scores.softcap(20.0), scores.alibi(4), lambda s, b, h, q, kv: torch.where(q < kv, s.half(), -(s**0.5)))),
    "literals": trace_score((lambda s, b, h, q, kv: s ** float("inf") + s**-2 + s**1e-30,)),
    "float64": trace_score((scores.bias(torch.zeros(2, 1, 5, 7)),), torch.float64),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_text_rebuilds_the_program(name: str) -> None:
    program = CALLS[name].program
    assert parse.__wrapped__(program.text) == program


def test_what_the_result_does_not_need_is_dropped() -> None:
    unused, table = torch.arange(9), torch.arange(7)

    def with_leftovers(b: Any, h: Any, q: Any, kv: Any) -> Any:
        _ = unused[q] * 17 + h / 2.5
        return table[q] + 3 > kv

    wasteful, lean = trace_mask(with_leftovers), trace_mask(lambda b, h, q, kv: table[q] + 3 > kv)
    assert wasteful.program == lean.program
    assert wasteful.captures == (table,)
    assert (wasteful.ints, wasteful.floats) == ((3,), ())


def test_equal_subexpressions_are_written_once() -> None:
    call = trace_mask(lambda b, h, q, kv: (DOCUMENTS[q] == DOCUMENTS[kv]) | (DOCUMENTS[q] > DOCUMENTS[kv]) & (DOCUMENTS[q] != q - kv) & (q - kv > b))
    operations = [i.op for i in call.program.instructions]
    assert operations.count("load") == 2
    assert operations.count("sub") == 1
    assert len(set(call.program.instructions)) == len(call.program.instructions)


def test_a_program_knows_what_it_depends_on() -> None:
    assert trace_mask(masks.causal).program.uses == {"q", "kv"}
    assert trace_mask(masks.padding(torch.tensor([3, 4]))).program.uses == {"b", "kv"}
    assert trace_mask(masks.full).program.uses == set()
    assert trace_score((scores.softcap(3.0),)).program.uses == {"score"}


def allowed(call: BoundProgram, **inputs: Tensor) -> Tensor:
    return torch.as_tensor(evaluate(call, inputs))


def test_a_shifted_program_sees_positions_moved() -> None:
    at = grid()
    call = trace_mask(windowed(DOCUMENTS, 1))
    moved = shifted(call, "q", 2)
    assert torch.equal(allowed(moved, **at), allowed(call, **at | {"q": at["q"] + 2}))
    assert shifted(call, "q", 0) is call
    assert shifted(call, "h", 5) is call
    assert shifted(call, "q", 3).program.text == moved.program.text


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_gathered_program_looks_its_positions_up_in_64_bits(dtype: torch.dtype) -> None:
    at = grid()
    positions = torch.tensor([5, 0, 70_000, 3, 2], dtype=dtype)
    call = trace_mask(lambda b, h, q, kv: q * q * (kv + 1) > 70_000 * 70_000 - 1)
    moved = gathered(call, "q", positions)
    assert torch.equal(allowed(moved, **at), allowed(call, **at | {"q": positions.long()[at["q"]]}))
    assert gathered(call, "h", positions) is call


def test_tracing_inside_torch_compile_gives_the_same_text() -> None:
    def both(ids: Tensor, bias: Tensor, reach: int) -> tuple[str, str]:
        mask = (masks.document(ids) & masks.sliding_window(reach)).traced()
        score = trace_score((scores.softcap(30.0), lambda s, b, h, q, kv: torch.relu(s) + bias[h, q - kv + 7].float()))
        return mask.program.text, score.program.text

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    for reach in (3, 4, 5):
        given = (DOCUMENTS, torch.zeros(3, 15), reach)
        assert compiled(*given) == both(*given)
