"""Random problems from a small grammar of masks and scores: the CPU's engines agree with the reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cases import Case, Draw, Masking, by_function
from tests.support.changing import CHANGES, check_changes
from tests.support.error_rule import check, check_float64
from tests.support.grammar import MASKS, SCORES
from tests.support.structures import SMALL, by_the_rule, check_problems, drawn_problems, drawn_structure

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
    name = f"{mask.text if mask else 'no mask'}; {', '.join(s.text for s in steps) or 'no score'}; numbers {draw(st.integers(0, 999))}"

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
        options=draw(st.fixed_dictionaries({}, optional={"scale": st.sampled_from([0.0, 0.1, -0.5]), "is_causal": st.booleans()}))
        | draw(st.sampled_from([{}] if many else [{}, {"dropout_p": 0.4, "seed": 9}])),
        through=draw(st.sampled_from([("out",), ("lse",), ("out", "lse")])),
    )
    return case


@settings(max_examples=120)
@given(problems())
def test_blocked_is_the_reference_in_float64(case: Case) -> None:
    check_float64(case, "blocked")


@settings(max_examples=40)
@given(problems(many=True), st.sampled_from([torch.float16, torch.bfloat16]))
def test_blocked_keeps_the_error_rule_in_half_precision(case: Case, dtype: torch.dtype) -> None:
    check(case, "blocked", "cpu", dtype)


@settings(max_examples=50)
@given(problems())
def test_the_reference_is_plain_torch(case: Case) -> None:
    """Plain PyTorch calls masks and scores on index tensors: it shares no code with the reference."""
    check(case, "reference", "cpu", torch.float64)


@pytest.mark.parametrize("engine", ["blocked", "cpp"])
@pytest.mark.parametrize("seed", range(12))
def test_every_problem_of_a_structure_keeps_the_error_rule(engine: str, seed: int) -> None:
    """Given maps, packed sequences and sinks too, by the code that tests/gpu uses, and in float64."""
    structure = drawn_structure(seed, SMALL, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    check_problems(structure, drawn_problems(structure, seed, 10, SMALL), by_the_rule(structure, engine, "cpu"))


@pytest.mark.parametrize("engine", ["blocked", "cpp"])
@settings(max_examples=6)
@given(changes=CHANGES, dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]))
def test_captures_that_change_between_calls(engine: str, changes: list[Any], dtype: torch.dtype) -> None:
    check_changes(changes, engine, "cpu", dtype)


def test_a_failure_tells_the_structure_and_the_problem() -> None:
    structure = drawn_structure(1, SMALL, torch.float16)
    cases = drawn_problems(structure, 1, 3, SMALL)
    assert [c.name for c in cases] == [c.name for c in drawn_problems(structure, 1, 3, SMALL)]

    def wrong(case: Case) -> None:
        assert case is not cases[1], "not the truth"

    with pytest.raises(AssertionError, match=r"1 of 3 problems of the structure float16.*\n  problem 1, B.*numbers \d+.*\n.*not the truth"):
        check_problems(structure, cases, wrong)
