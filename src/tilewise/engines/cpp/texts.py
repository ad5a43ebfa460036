"""Generated texts, found by what they were written from. A decoding model has another length at every token, and nearly always the same text."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from tilewise.engines.facts import Facts, Question

Text = TypeVar("Text")


class Texts(Generic[Text]):
    """Texts by a key and the answers that they were written from. `key` covers all else that a text depends on.

    Whoever writes asks the next question by what the answers before it were, so other facts are asked the same until an answer differs: questions and texts are
    known by the path to them, a bit for each answer behind a leading 1.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._questions: dict[tuple[Hashable, int], Question] = {}
        self._texts: dict[tuple[Hashable, int], Text] = {}

    def find(self, key: Hashable, facts: Facts, write: Callable[[], Text]) -> Text:
        """The text for these facts, of which nothing has been asked; `write` writes it from them, where there is none yet."""
        path = 1
        while (question := self._questions.get((key, path))) is not None:
            path = 2 * path + facts.ask(question)
        found = self._texts.get((key, path))
        return self._written(key, facts, write) if found is None else found

    def _written(self, key: Hashable, facts: Facts, write: Callable[[], Text]) -> Text:
        text, path = write(), 1
        if len(self._texts) >= self._most:
            self._questions.clear()
            self._texts.clear()
        for question, answer in facts.asked.items():
            self._questions[key, path] = question
            path = 2 * path + answer
        self._texts[key, path] = text
        return text
