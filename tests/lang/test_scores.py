"""Every score of the library against its definition in plain torch or plain Python."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.programs import BATCH, HEADS, KEYS, QUERIES, assert_derives_as_autograd, grid
from tilewise import scores
from tilewise.errors import InputError
from tilewise.lang import evaluate, trace_score

GIVEN = torch.randn(BATCH, HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(0))
DISTANCE = torch.arange(QUERIES)[:, None] - torch.arange(KEYS)  # q - kv


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def assert_means(score: scores.Score, expected: Tensor) -> None:
    found = torch.as_tensor(evaluate(trace_score((score,)), grid() | {"score": GIVEN}))
    torch.testing.assert_close(found, expected)


def test_alibi_lowers_by_slope_and_distance() -> None:
    slopes = torch.tensor([0.5, 0.25, 1.0])
    assert_means(scores.alibi(slopes), GIVEN - slopes.view(-1, 1, 1) * DISTANCE)
    assert_means(scores.alibi(HEADS), GIVEN - scores.alibi_slopes(HEADS).view(-1, 1, 1) * DISTANCE)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (12, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibi_slopes_are_the_papers(heads: int, slopes: list[float]) -> None:
    torch.testing.assert_close(scores.alibi_slopes(heads), torch.tensor(slopes))


def test_softcap_is_a_scaled_tanh() -> None:
    assert_means(scores.softcap(2.0), 2.0 * torch.tanh(GIVEN / 2.0))


def test_relative_bias_reads_the_table_and_stops_at_its_edge() -> None:
    table = randn(HEADS, 2 * 3 + 1)
    entries = (DISTANCE.clamp(-3, 3) + 3).expand(HEADS, -1, -1)
    expected = torch.stack([table[h][entries[h]] for h in range(HEADS)])
    assert_means(scores.relative_bias(table), GIVEN + expected)


def t5_bucket(relative: int, count: int, farthest: int, bidirectional: bool) -> int:
    """T5's rule for one relative position key - query: exact near by, logarithmic farther off, one bucket beyond."""
    first = 0
    if bidirectional:
        count //= 2
        first = count if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = max(-relative, 0)
    exact = count // 2
    if distance < exact:
        return first + distance
    steps = int(math.log(distance / exact) / math.log(farthest / exact) * (count - exact))
    return first + min(exact + steps, count - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("count", "farthest"), [(32, 128), (32, 100), (16, 64), (8, 20)])
def test_t5_buckets_are_t5s(count: int, farthest: int, bidirectional: bool) -> None:
    found = scores.t5_buckets(count, farthest, bidirectional).tolist()
    expected = [t5_bucket(r, count, farthest, bidirectional) for r in range(-farthest, farthest + 1)]
    assert found == expected


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_bias_holds_at_any_distance(bidirectional: bool) -> None:
    table = randn(16, HEADS)
    score = scores.relative_bias(table, buckets="t5", bidirectional=bidirectional, max_distance=20)
    call = trace_score((score,))
    positions = [0, 1, 5, 19, 20, 21, 300, 5000]
    at = {"b": torch.tensor([[0]]), "h": torch.tensor([[2]]), "q": torch.tensor(positions)[:, None], "kv": torch.tensor(positions)}
    found = evaluate(call, at | {"score": torch.zeros(1, 1)})
    expected = torch.tensor([[table[t5_bucket(kv - q, 16, 20, bidirectional), 2].item() for kv in positions] for q in positions])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "shape", [(KEYS,), (QUERIES, KEYS), (1, KEYS), (QUERIES, 1), (HEADS, 1, 1), (BATCH, 1, 1, KEYS), (BATCH, HEADS, QUERIES, KEYS)], ids=str
)
def test_bias_broadcasts_as_torch_does(shape: tuple[int, ...]) -> None:
    tensor = randn(*shape)
    assert_means(scores.bias(tensor), GIVEN + tensor)


def test_distance_decay_by_number_tensor_and_head() -> None:
    rates = torch.tensor([0.1, 0.2, 0.7])
    assert_means(scores.distance_decay(0.3), GIVEN - 0.3 * DISTANCE.abs())
    assert_means(scores.distance_decay(torch.tensor(0.3)), GIVEN - 0.3 * DISTANCE.abs())
    assert_means(scores.distance_decay(rates), GIVEN - rates.view(-1, 1, 1) * DISTANCE.abs())


def test_sinks_leave_the_score_alone_and_carry_their_logits() -> None:
    logits = randn(HEADS)
    sinks = scores.sinks(logits)
    assert_means(sinks, GIVEN)
    assert sinks.logits is logits


def test_several_scores_apply_in_order() -> None:
    call = trace_score(scores.as_scores([scores.distance_decay(0.5), scores.softcap(1.0)]))
    found = evaluate(call, grid() | {"score": GIVEN})
    torch.testing.assert_close(found, torch.tanh(GIVEN - 0.5 * DISTANCE.abs()))


def test_as_scores_takes_one_several_or_none() -> None:
    one = scores.softcap(1.0)
    assert scores.as_scores(None) == ()
    assert scores.as_scores(one) == (one,)
    assert scores.as_scores([one, one]) == (one, one)
    assert scores.as_scores((one,)) == (one,)


LEARNED: dict[str, Callable[[], scores.Score]] = {
    "alibi": lambda: scores.alibi(randn(HEADS).double().requires_grad_()),
    "relative_bias": lambda: scores.relative_bias(randn(HEADS, 7).double().requires_grad_()),
    "t5": lambda: scores.relative_bias(randn(16, HEADS).double().requires_grad_(), buckets="t5"),
    "bias": lambda: scores.bias(randn(BATCH, 1, QUERIES, KEYS).double().requires_grad_()),
    "distance_decay": lambda: scores.distance_decay(torch.tensor(0.3, dtype=torch.float64, requires_grad=True)),
    "softcap": lambda: scores.softcap(1.5),
}


@pytest.mark.parametrize("name", LEARNED)
def test_derivatives_of_scores_are_autograds(name: str) -> None:
    assert_derives_as_autograd(trace_score((LEARNED[name](),), torch.float64), grid() | {"score": GIVEN.double()})


def test_names_carry_parameters() -> None:
    assert scores.alibi(8).name == "alibi(8)"
    assert scores.softcap(30.0).name == "softcap(30.0)"
    assert scores.relative_bias(randn(2, 7)).name == "relative_bias(3)"
    assert scores.relative_bias(randn(32, 2), buckets="t5").name == "relative_bias(t5, 32)"
    assert scores.distance_decay(0.5).name == "distance_decay(0.5)"
    assert scores.sinks(randn(2)).name == "sinks"
    assert repr(scores.softcap(30.0)) == "Score(softcap(30.0))"


BAD: dict[str, Callable[[], Any]] = {
    "a fraction of a head": lambda: scores.alibi(2.5),
    "a bool for heads": lambda: scores.alibi(True),
    "a fraction of a distance": lambda: scores.relative_bias(torch.zeros(32, 2), buckets="t5", max_distance=64.5),
    "no heads": lambda: scores.alibi(0),
    "2-d slopes": lambda: scores.alibi(randn(2, 2)),
    "integer slopes": lambda: scores.alibi(torch.arange(3)),
    "no cap": lambda: scores.softcap(0.0),
    "negative cap": lambda: scores.softcap(-1.0),
    "cap not a number": lambda: scores.softcap(math.nan),
    "1-d table": lambda: scores.relative_bias(randn(5)),
    "even table": lambda: scores.relative_bias(randn(2, 6)),
    "other buckets": lambda: scores.relative_bias(randn(2, 7), buckets="log"),
    "too few buckets": lambda: scores.relative_bias(randn(2, 4), buckets="t5"),
    "too few buckets one way": lambda: scores.relative_bias(randn(1, 4), buckets="t5", bidirectional=False),
    "distance below the exact buckets": lambda: scores.relative_bias(randn(32, 4), buckets="t5", max_distance=8),
    "integer bias": lambda: scores.bias(torch.arange(3)),
    "0-d bias": lambda: scores.bias(torch.tensor(1.0)),
    "5-d bias": lambda: scores.bias(torch.zeros(1, 1, 1, 1, 1)),
    "2-d rates": lambda: scores.distance_decay(randn(2, 2)),
    "2-d sinks": lambda: scores.sinks(randn(2, 2)),
    "integer sinks": lambda: scores.sinks(torch.arange(3)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_input_errors(name: str) -> None:
    with pytest.raises(InputError):
        BAD[name]()


def test_a_score_of_numbers_is_traced_once_and_one_of_tensors_every_time() -> None:
    cap, cpu = scores.softcap(2.0), torch.device("cpu")
    first = cap.traced(torch.float32, cpu)
    assert cap.traced(torch.float32, cpu) is first
    wide = cap.traced(torch.float64, cpu)  # another program: scores are kept in float64
    assert wide.program.text != first.program.text and cap.traced(torch.float32, cpu).program.text == first.program.text
    slopes = scores.alibi(torch.ones(3))
    assert slopes.traced(torch.float32, cpu) is not slopes.traced(torch.float32, cpu)
    own = scores.as_score(lambda score, b, h, q, kv: score * 2)
    assert own.traced(torch.float32, cpu) is not own.traced(torch.float32, cpu)
