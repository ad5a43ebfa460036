"""A small grammar of masks and scores, as strategies of hypothesis.

A part is a structure: operators and ranks. The numbers in it (windows, lengths, tables) are drawn with a case's other contents,
so that one part gives many problems that share their kernels.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from tests.support.cases import Draw, document_ids


class Part(NamedTuple):
    """A mask or score in words, and how to make its function from drawn tensors and numbers."""

    text: str
    build: Callable[[Draw], Callable[..., Any]]

    def __repr__(self) -> str:
        return self.text


# -- masks -----------------------------------------------------------------------------------------------------------


def fixed(text: str, f: Callable[..., Any]) -> Part:
    return Part(text, lambda draw: f)


def documents(draw: Draw) -> Callable[..., Any]:
    q_ids, kv_ids = draw.integers(3, draw.case.batch, draw.case.q_len), draw.integers(3, draw.case.kv[2])
    return lambda b, h, q, kv: q_ids[b, q] == kv_ids[kv]


def packed_documents(draw: Draw) -> Callable[..., Any]:
    q_ids, kv_ids = document_ids(draw, draw.case.q_len), document_ids(draw, draw.case.kv[2])
    return lambda b, h, q, kv: q_ids[q] == kv_ids[kv]


def table(draw: Draw) -> Callable[..., Any]:
    seen = draw.coins(5, 7)
    return lambda b, h, q, kv: seen[q // 16 % 5, kv // 16 % 7]


def listed(draw: Draw) -> Callable[..., Any]:
    """Each query's own list of key blocks, as block-sparse attention has."""
    lists = draw.integers(9, draw.case.heads, draw.case.q_len, 3)
    return lambda b, h, q, kv: (lists[h, q] == (kv // 16).unsqueeze(-1)).any(-1)


def near(draw: Draw) -> Callable[..., Any]:
    n = draw.number(0, 200)
    return lambda b, h, q, kv: (q - kv).abs() <= n


def behind(draw: Draw) -> Callable[..., Any]:
    n = draw.number(-50, 200)
    return lambda b, h, q, kv: q - kv < n - 30 * h


def padded(draw: Draw) -> Callable[..., Any]:
    n = draw.number(0, 200)
    return lambda b, h, q, kv: kv < n + 20 * b


def striped(times: int, period: int) -> Part:
    return fixed(f"(q + {times} kv) % {period} < 3", lambda b, h, q, kv: (q + times * kv) % period < 3)


def blocks(size: int) -> Part:
    return fixed(f"q // {size} == kv // {size}", lambda b, h, q, kv: q // size == kv // size)


ATOMS = st.one_of(
    st.just(fixed("q >= kv", lambda b, h, q, kv: q >= kv)),
    st.just(fixed("true", lambda b, h, q, kv: (q >= 0) & (kv >= 0))),
    st.just(Part("documents", documents)),
    st.just(Part("packed documents", packed_documents)),
    st.just(Part("table", table)),
    st.just(Part("listed", listed)),
    st.just(Part("|q - kv| <= n", near)),
    st.just(Part("q - kv < n - 30 h", behind)),
    st.just(Part("kv < n + 20 b", padded)),
    st.builds(striped, st.integers(-3, 3), st.integers(1, 9)),
    st.builds(blocks, st.integers(1, 40)),
)


def joined(operator: str) -> Callable[[tuple[Part, Part]], Part]:
    def join(parts: tuple[Part, Part]) -> Part:
        def build(draw: Draw) -> Callable[..., Any]:
            f, g = (p.build(draw) for p in parts)
            if operator == "&":
                return lambda *at: f(*at) & g(*at)
            return lambda *at: f(*at) | g(*at)

        return Part(f"({parts[0].text} {operator} {parts[1].text})", build)

    return join


def negated(part: Part) -> Part:
    def build(draw: Draw) -> Callable[..., Any]:
        f = part.build(draw)
        return lambda *at: ~f(*at)

    return Part(f"~{part.text}", build)


def combined(inner: st.SearchStrategy[Part]) -> st.SearchStrategy[Part]:
    return st.one_of(st.tuples(inner, inner).map(joined("&")), st.tuples(inner, inner).map(joined("|")), inner.map(negated))


MASKS = st.recursive(ATOMS, combined, max_leaves=4)

# -- scores ----------------------------------------------------------------------------------------------------------

# What a step captures has the problem's dtype (None), or one of its own: then torch's promotion decides what the step is computed in.
Dtype = torch.dtype | None
DTYPES: tuple[Dtype, ...] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def by_head(draw: Draw, dtype: Dtype) -> Callable[..., Any]:
    gain = draw.learned(draw.case.batch, draw.case.heads, dtype=dtype)
    return lambda s, b, h, q, kv: s * (1.0 + 0.25 * gain[b, h])


def by_query(draw: Draw, dtype: Dtype) -> Callable[..., Any]:
    bias = draw.learned(draw.case.heads, draw.case.q_len, dtype=dtype)
    return lambda s, b, h, q, kv: s + bias[h, q] * torch.tanh(s)


def by_key(draw: Draw, dtype: Dtype) -> Callable[..., Any]:
    bias = draw.learned(draw.case.kv[2], dtype=dtype)
    return lambda s, b, h, q, kv: s + bias[kv] - bias[-1 - kv]


def apart(draw: Draw, dtype: Dtype) -> Callable[..., Any]:
    left, right = draw.learned(draw.case.q_len, 3, dtype=dtype, size=0.5), draw.learned(draw.case.kv[2], 3, dtype=dtype, size=0.5)
    return lambda s, b, h, q, kv: s - 0.25 * (left[q] - right[kv]).pow(2).sum(-1)


def relative(draw: Draw, dtype: Dtype) -> Callable[..., Any]:
    bias = draw.learned(13, dtype=dtype)
    return lambda s, b, h, q, kv: s + bias[(q - kv) % 13]


def sloped(draw: Draw, dtype: Dtype) -> Callable[..., Any]:
    slopes = draw.learned(draw.case.heads, dtype=dtype)
    return lambda s, b, h, q, kv: s + slopes[h] * ((kv - q) / 64)


def gained(draw: Draw, dtype: Dtype) -> Callable[..., Any]:
    """Two tensors of different dtypes, unless both have the problem's; slopes are products of both."""
    other = None if dtype is None else DTYPES[DTYPES.index(dtype) - 1]
    gain, power = draw.learned(draw.case.heads, dtype=dtype, size=0.5), draw.learned(draw.case.kv[2], dtype=other, size=0.5)
    return lambda s, b, h, q, kv: s * gain[h] * power[kv]


def wave(draw: Draw, dtype: Dtype) -> Callable[..., Any]:
    return lambda s, b, h, q, kv: torch.where((q + kv) % 2 == 0, s, torch.sin(s) + 0.01 * (q - kv))


def forbidding(draw: Draw, dtype: Dtype) -> Callable[..., Any]:
    return lambda s, b, h, q, kv: torch.where((q * 3 + kv) % 5 == 0, -float("inf"), s)


def capped(draw: Draw, dtype: Dtype) -> Callable[..., Any]:
    return lambda s, b, h, q, kv: 2.0 * torch.tanh(s / 2.0)


def step(f: Callable[..., Any], dtype: Dtype = None) -> Part:
    return Part(f.__name__ if dtype is None else f"{f.__name__} by {str(dtype).removeprefix('torch.')}", lambda draw: f(draw, dtype))


FORBIDDING = step(forbidding)


def forbidding_last(steps: list[Part]) -> list[Part]:
    """The sine of -inf is NaN, and gradients of NaN scores are nobody's business."""
    return sorted(steps, key=lambda part: part is FORBIDDING)


def steps_of(*learning: Callable[..., Any], fixed: list[Part]) -> st.SearchStrategy[Part]:
    """A step that captures tensors of the problem's dtype or of others, or one that captures none."""
    typed = [step(f, dtype) for f in learning for dtype in DTYPES]
    return st.sampled_from([*[step(f) for f in learning], *fixed]) | st.sampled_from(typed)


# What a score may see inside packed sequences is the distance and the head: absolute positions and b mean something else there.
BY_DISTANCE = steps_of(relative, sloped, fixed=[step(capped)])
STEPS = steps_of(relative, sloped, by_head, by_query, by_key, apart, gained, fixed=[step(capped), step(wave), FORBIDDING])
SCORES = st.lists(STEPS, max_size=2).map(forbidding_last)
