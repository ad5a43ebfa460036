"""What is known of a program's values over a whole problem, as answers to questions. Of lengths, integers and sizes of captures, generated text depends on
nothing else.
"""

from typing import Any, NamedTuple

from tilewise.lang import BoundProgram, Program
from tilewise.lang.ranges import Ranges

INT32 = 2**31 - 1  # integers up to here, either way, are emitted with 32 bits
Question = tuple[Any, ...]  # what is asked, then which values


class Extents(NamedTuple):
    """Upper limits of b, h, q and kv."""

    b: int
    h: int
    q: int
    kv: int


class Facts:
    """Answers about the values of `program`, which runs with `call`'s arguments, and about its captures. What was asked is remembered, in order."""

    def __init__(self, program: Program, call: BoundProgram, extents: Extents) -> None:
        self._call = call
        self._ranges = Ranges(program, call, extents._asdict())
        self.asked: dict[Question, bool] = {}

    def within(self, k: int, low: int, high: int) -> bool:
        """Whether value k lies between these."""
        return self.ask((_within, k, low, high))

    def fits32(self, k: int) -> bool:
        return self.within(k, -INT32, INT32)

    def is_at_least(self, k: int, low: int) -> bool:
        """Whether value k is never below a number."""
        return self.ask((_is_at_least, k, low))

    def never_exceeds(self, a: int, b: int) -> bool:
        """Whether value a is at most value b."""
        return self.ask((_never_exceeds, a, b))

    def product_is_below(self, a: int, b: int, limit: int) -> bool:
        return self.ask((_product_is_below, a, b, limit))

    def is_inside(self, k: int, slot: int, d: int) -> bool:
        """Whether value k is an index into dimension d of a capture, counted from its beginning."""
        return self.ask((_is_inside, k, slot, d))

    def ask(self, question: Question) -> bool:
        answer = self.asked.get(question)
        if answer is None:
            rule, *about = question
            answer = self.asked[question] = rule(self, *about)
        return answer


def _within(facts: Facts, k: int, low: int, high: int) -> bool:
    return facts._ranges[k].within(low, high)


def _is_at_least(facts: Facts, k: int, low: int) -> bool:
    return facts._ranges[k].lowest >= low


def _never_exceeds(facts: Facts, a: int, b: int) -> bool:
    return facts._ranges[a].highest <= facts._ranges[b].lowest


def _product_is_below(facts: Facts, a: int, b: int, limit: int) -> bool:
    return facts._ranges[a].highest * facts._ranges[b].highest < limit


def _is_inside(facts: Facts, k: int, slot: int, d: int) -> bool:
    return facts._ranges[k].within(0, facts._call.captures[slot].shape[d] - 1)
