"""print() of a traced value: the text, evaluated, is the same program again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewise.lang import trace_mask, trace_score
from tilewise.lang.expression import LONGEST

IDS = torch.arange(16)
LIMIT = torch.tensor(3)
TABLE = torch.zeros(4, 31)

MASKS: dict[str, Callable[..., Any]] = {
    "q >= kv": lambda b, h, q, kv: q >= kv,
    "(q >= kv) & (kv < 3)": lambda b, h, q, kv: (q >= kv) & (kv < 3),
    "(q >= kv) & (kv < 3) | (q == b)": lambda b, h, q, kv: (q >= kv) & (kv < 3) | (q == b),
    "(q >= kv) & ((kv < 3) | (q == b))": lambda b, h, q, kv: (q >= kv) & ((kv < 3) | (q == b)),
    "~(q > kv)": lambda b, h, q, kv: ~(q > kv),
    "(q < kv) == (q > h)": lambda b, h, q, kv: (q < kv) == (q > h),
    "(q < kv) ^ (q != h)": lambda b, h, q, kv: (q < kv) ^ (q != h),
    "q - (kv - 3) <= -2": lambda b, h, q, kv: q - (kv - 3) <= -2,
    "q - kv - 3 <= 2": lambda b, h, q, kv: q - kv - 3 <= 2,
    "q // 4 % 3 == kv // (4 % h)": lambda b, h, q, kv: q // 4 % 3 == kv // (4 % h),
    "(q - kv) ** 2 < (-q) ** 2": lambda b, h, q, kv: (q - kv) ** 2 < (-q) ** 2,
    "-q ** 2 < -(q - kv)": lambda b, h, q, kv: -(q**2) < -(q - kv),
    "q << 2 < (kv | h) >> 1": lambda b, h, q, kv: (q << 2) < ((kv | h) >> 1),
    "tensor0[q] == tensor0[kv]": lambda b, h, q, kv: IDS[q] == IDS[kv],
    "tensor0[tensor0[q + 1]] < tensor1": lambda b, h, q, kv: IDS[IDS[q + 1]] < LIMIT,
    "abs(q - kv).to(torch.float32) / 2 < 0.5": lambda b, h, q, kv: (q - kv).abs().float() / 2 < 0.5,
    "where(q < 3, q, kv) < 5": lambda b, h, q, kv: torch.where(q < 3, q, kv) < 5,
}
SCORES: dict[str, Callable[..., Any]] = {
    "tanh(score / 30.0) * 30.0": lambda score, b, h, q, kv: 30.0 * torch.tanh(score / 30.0),
    "score + tensor0[h, q - kv + 15]": lambda score, b, h, q, kv: score + TABLE[h, q - kv + 15],
}
TORCH = {name: getattr(torch, name) for name in ("abs", "where", "tanh")} | {"torch": torch}


@pytest.mark.parametrize("text", MASKS)
def test_mask(text: str) -> None:
    assert str_of(MASKS[text], trace_mask) == text
    tensors = {"tensor0": IDS, "tensor1": LIMIT}
    again = trace_mask(lambda b, h, q, kv: eval(text, {**TORCH, **tensors, "b": b, "h": h, "q": q, "kv": kv}))
    assert again.program.text == trace_mask(MASKS[text]).program.text


@pytest.mark.parametrize("text", SCORES)
def test_score(text: str) -> None:
    assert str_of(SCORES[text], lambda f: trace_score((f,))) == text
    again = trace_score((lambda score, b, h, q, kv: eval(text, {**TORCH, "tensor0": TABLE, "score": score, "b": b, "h": h, "q": q, "kv": kv}),))
    assert again.program.text == trace_score((SCORES[text],)).program.text


def str_of(function: Callable[..., Any], trace: Callable[[Any], Any]) -> str:
    found = []

    def printing(*symbols: Any) -> Any:
        result = function(*symbols)
        found.append(str(result))
        assert found[0] == repr(result) == f"{result}"
        return result

    trace(printing)
    return found[0]


def test_printing_shows_the_expression(capsys: pytest.CaptureFixture[str]) -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        print(q, q >= kv, TABLE[h])
        return q >= kv

    trace_mask(mask)
    assert capsys.readouterr().out == "q q >= kv row of shape (31,), torch.float32\n"


def test_long_expressions_are_cut_in_the_middle() -> None:
    """x * x of x * x of ...: written out, it would have 2^200 factors."""

    def squares(b: Any, h: Any, q: Any, kv: Any) -> Any:
        x = q
        for _ in range(200):
            x = x * x + 1
        return x < kv

    text = str_of(squares, trace_mask)
    assert text.endswith(" < kv") and "..." in text and len(text) < LONGEST + 10
