"""Generated texts are found by what is known of values, and are those that would be written anew."""

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.engines.test_cpp_programs import drawn
from tests.support.generated import captures, function_of
from tests.support.programs import trace_value
from tilewise.core.problem import Options, make_problem
from tilewise.engines.codegen import layouts_of
from tilewise.engines.cpp import missing, mods
from tilewise.engines.cpp.emit import BY_KEY, BY_QUERY, Writer, score_source
from tilewise.engines.cpp.texts import Texts
from tilewise.engines.facts import Extents, Facts
from tilewise.integrations.step_masks import Sight, mask_of
from tilewise.lang import BoundProgram

LENGTHS = [Extents(2, 3, *lengths) for lengths in ((1, 1), (1, 7), (50, 64), (4000, 70000), (70000, 2**31), (2**33, 2**33))]


def written(call: BoundProgram, facts: Facts) -> str:
    return score_source([Writer(call.program, facts, layouts_of(call.captures), axes) for axes in (BY_QUERY, BY_KEY)], "float")


@pytest.mark.parametrize("part", range(4))
def test_texts_are_those_written_anew(part: int) -> None:
    """Of generated programs that load, divide and compare integers, in any order of lengths: each is found twice."""
    texts: Texts[str] = Texts(10**6)
    several = 0
    for k, (tree, seed) in list(enumerate(drawn()))[part::4]:
        call = trace_value(function_of(tree, captures(seed)))
        distinct = set()
        for extents in [*LENGTHS, *LENGTHS[::-1]]:
            facts = Facts(call.program, call, extents)
            found = texts.find((k, call.program.text), facts, lambda facts=facts, call=call: written(call, facts))
            assert found == written(call, Facts(call.program, call, extents))
            distinct.add(found)
        several += len(distinct) > 1
    assert several > 5  # lengths did decide about some of them


def test_a_full_cache_begins_anew() -> None:
    texts: Texts[int] = Texts(2)
    call = trace_value(lambda s, b, h, q, kv: s + (q * 2 + kv))
    product = [i.op for i in call.program.instructions].index("mul")

    def find(key: int, extents: Extents) -> int:
        facts = Facts(call.program, call, extents)
        return texts.find(key, facts, lambda: key + 10 * facts.fits32(product))

    for key in range(5):
        assert [find(key, e) for e in (LENGTHS[1], LENGTHS[-1], LENGTHS[1])] == [key + 10, key, key + 10]


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
class TestUnits:
    def test_another_length_is_not_written_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A decoding model's mask and its keys grow by one at every token."""
        sources: list[Any] = []
        original = mods.mask_source
        monkeypatch.setattr(mods, "mask_source", lambda *args: sources.append(args) or original(*args))
        monkeypatch.setattr(mods, "_units", Texts(100))
        monkeypatch.setattr(mods, "_units_of_calls", {})
        for length in range(100, 110):
            q, k = torch.randn(2, 1, 1, 16), torch.randn(2, 1, length, 16)
            visible = torch.arange(length).expand(2, -1) >= torch.tensor([[3], [0]])
            mask = mask_of(Sight(length - 1, None, None, visible))
            found, right = (tw.attention(q, k, k, mask=mask, backend=backend) for backend in ("cpp", "reference"))
            torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
        assert len(sources) == 1

    def test_where_a_load_may_leave_its_tensor_the_text_is_another(self) -> None:
        """The same program, and a capture that has become too short: it is clamped to its last element."""
        for length in (40, 60, 40):
            table = torch.arange(length) / 8
            q, k = torch.randn(1, 1, 50, 16), torch.randn(1, 1, 50, 16)
            found, right = (tw.attention(q, k, k, score=lambda s, b, h, i, j, t=table: s + t[j], backend=backend) for backend in ("cpp", "reference"))
            torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)

    def test_gradients_of_two_captures_have_a_text_each(self) -> None:
        """The derivatives are one program; which capture a gradient is added to is not in its text."""
        first, second = torch.zeros(20), torch.zeros(20)
        q = torch.randn(1, 1, 20, 8)
        p, _ = make_problem(q, q, q, None, lambda s, b, h, i, j: s + first[i] + second[i], Options())
        assert p.score is not None
        sources = [mods.dscore_unit(p.score, p, frozenset([k])).source for k in (0, 1)]
        assert sources[0] != sources[1]
        assert mods.dscore_unit(p.score, p, frozenset([0])).source == sources[0]
