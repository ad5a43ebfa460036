"""Random problems from a small grammar of masks and scores: the blocked engine agrees with the reference."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Case, Draw, Masking, by_function
from tests.error_rule import by_engine, by_reference, check, make


class Part(NamedTuple):
    """A mask or score in words, and how to make its function from drawn tensors."""

    text: str
    build: Callable[[Draw], Callable[..., Any]]


# -- masks -----------------------------------------------------------------------------------------------------------


def atom(text: str, f: Callable[..., Any]) -> Part:
    return Part(text, lambda draw: f)


def documents(draw: Draw) -> Callable[..., Any]:
    q_ids, kv_ids = draw.integers(3, draw.case.batch, draw.case.q_len), draw.integers(3, draw.case.kv[2])
    return lambda b, h, q, kv: q_ids[b, q] == kv_ids[kv]


def table(draw: Draw) -> Callable[..., Any]:
    seen = draw.coins(5, 7)
    return lambda b, h, q, kv: seen[q // 16 % 5, kv // 16 % 7]


ATOMS = st.one_of(
    st.just(atom("q >= kv", lambda b, h, q, kv: q >= kv)),
    st.just(atom("true", lambda b, h, q, kv: (q >= 0) & (kv >= 0))),
    st.just(Part("documents", documents)),
    st.just(Part("table", table)),
    st.integers(0, 200).map(lambda n: atom(f"|q - kv| <= {n}", lambda b, h, q, kv: (q - kv).abs() <= n)),
    st.integers(-50, 200).map(lambda n: atom(f"q - kv < {n} - 30 h", lambda b, h, q, kv: q - kv < n - 30 * h)),
    st.integers(0, 200).map(lambda n: atom(f"kv < {n} + 20 b", lambda b, h, q, kv: kv < n + 20 * b)),
    st.tuples(st.integers(-3, 3), st.integers(1, 9)).map(
        lambda t: atom(f"(q + {t[0]} kv) % {t[1]} < 3", lambda b, h, q, kv: (q + t[0] * kv) % t[1] < 3)
    ),
    st.integers(1, 40).map(lambda n: atom(f"q // {n} == kv // {n}", lambda b, h, q, kv: q // n == kv // n)),
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


def by_head(draw: Draw) -> Callable[..., Any]:
    gain = draw.learned(draw.case.batch, draw.case.heads)
    return lambda s, b, h, q, kv: s * (1.0 + 0.25 * gain[b, h])


def by_query(draw: Draw) -> Callable[..., Any]:
    bias = draw.learned(draw.case.heads, draw.case.q_len)
    return lambda s, b, h, q, kv: s + bias[h, q] * torch.tanh(s)


def by_key(draw: Draw) -> Callable[..., Any]:
    bias = draw.learned(draw.case.kv[2])
    return lambda s, b, h, q, kv: s + bias[kv] - bias[-1 - kv]


def relative(draw: Draw) -> Callable[..., Any]:
    bias = draw.learned(13)
    return lambda s, b, h, q, kv: s + bias[(q - kv) % 13]


def wave(draw: Draw) -> Callable[..., Any]:
    return lambda s, b, h, q, kv: torch.where((q + kv) % 2 == 0, s, torch.sin(s) + 0.01 * (q - kv))


def forbidding(draw: Draw) -> Callable[..., Any]:
    return lambda s, b, h, q, kv: torch.where((q * 3 + kv) % 5 == 0, -float("inf"), s)


STEPS = [Part(f.__name__, f) for f in (by_head, by_query, by_key, relative, wave, forbidding)]
SCORES = st.lists(st.sampled_from(STEPS), max_size=2)

# -- problems --------------------------------------------------------------------------------------------------------

LENGTHS = st.one_of(st.sampled_from([1, 2, 127, 128, 129, 200, 257]), st.integers(1, 270))
MANY = st.one_of(st.sampled_from([32, 127, 128, 129, 200, 257]), st.integers(32, 270))
LAYOUTS, STRIDES = ("bhsd", "bshd", "hbsd", "sbhd"), ("contiguous", "last stride not 1", "reversed", "sliced", "every other")


@st.composite
def problems(draw: st.DrawFn, many: bool = False) -> Case:
    """`many`: nothing so small that an error is a matter of luck, and not of the engine."""
    lengths = MANY if many else LENGTHS
    ratio, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    mask = draw(st.none() | MASKS)
    steps = draw(SCORES)
    name = f"{mask.text if mask else 'no mask'}; {', '.join(s.text for s in steps) or 'no score'}"

    def masking(source: Draw) -> Masking:
        assert mask is not None
        return by_function(source, mask.build(source))

    case = Case(
        name,
        batch=draw(st.integers(1, 2)),
        heads=ratio * kv_heads,
        kv_heads=kv_heads,
        q_len=draw(lengths),
        kv_len=draw(lengths),
        head_dim=draw(st.sampled_from([8, 17] if many else [1, 3, 8, 17])),
        v_dim=draw(st.sampled_from([8, 20] if many else [1, 4, 20])),
        layout=draw(st.sampled_from(LAYOUTS)),
        strides=draw(st.sampled_from(STRIDES)),
        grad_strides=draw(st.sampled_from(STRIDES)),
        mask=masking if mask else None,
        score=(lambda source: [s.build(source) for s in steps]) if steps else None,
        options=draw(st.fixed_dictionaries({}, optional={
            "scale": st.sampled_from([0.0, 0.1, -0.5]),
            "is_causal": st.booleans(),
        })) | draw(st.sampled_from([{}] if many else [{}, {"dropout_p": 0.4, "seed": 9}])),
        through=draw(st.sampled_from([("out",), ("lse",), ("out", "lse")])),
    )  # fmt: skip
    return case


@settings(max_examples=150)
@given(problems())
def test_blocked_is_the_reference_in_float64(case: Case) -> None:
    blocked = by_engine(case, make(case, torch.float64, torch.float64), "blocked")
    truth = by_reference(case, make(case, torch.float64, torch.float64))
    for tested, exact in ((blocked.outputs, truth.outputs), (blocked.gradients, truth.gradients)):
        for name, expected in exact.items():
            torch.testing.assert_close(tested[name], expected, rtol=1e-10, atol=1e-10, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")


@settings(max_examples=40)
@given(problems(many=True), st.sampled_from([torch.float16, torch.bfloat16]))
def test_blocked_keeps_the_error_rule_in_half_precision(case: Case, dtype: torch.dtype) -> None:
    check(case, "blocked", "cpu", dtype)


@settings(max_examples=50)
@given(problems())
def test_the_reference_is_plain_torch(case: Case) -> None:
    """Plain PyTorch calls masks and scores on index tensors: it shares no code with the reference."""
    check(case, "reference", "cpu", torch.float64)
