"""A tour of mistakes: small programs, each with the message that its author must get."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

Program = Callable[[], Any]
Answer = type[BaseException]


@dataclass(frozen=True)
class Mistake:
    """A wrong program, the error or warning that must answer it, and parts of its message in order."""

    program: Program
    answer: Answer
    parts: tuple[str, ...]

    def check(self) -> None:
        """Run the program in the working directory, and check the answer."""
        text = "(?s)" + ".*".join(map(re.escape, self.parts))
        if issubclass(self.answer, Warning):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("default")  # as users see them: once per location
                self.program()
            answers = [str(warning.message) for warning in said if issubclass(warning.category, self.answer)]
            matching = [answer for answer in answers if re.search(text, answer)]
            assert len(matching) == 1, f"said {len(matching)} times, not once; of {answers}"
        else:
            with pytest.raises(self.answer, match=text):
                self.program()


class Tour:
    """A table of mistakes; a program is added by decorating it with the expected answer."""

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []

    def answered_by(self, answer: Answer, *parts: str) -> Callable[[Program], Program]:
        """Return a decorator that adds a program, which must be answered with this, and these parts in its message."""

        def enter(program: Program) -> Program:
            self.mistakes.append(Mistake(program, answer, parts))
            return program

        return enter

    @property
    def cases(self) -> pytest.MarkDecorator:
        """Return a mark that parametrizes a test with all mistakes, under their programs' names."""
        names = [mistake.program.__name__ for mistake in self.mistakes]
        assert len(set(names)) == len(names), "two programs have one name: one would be lost"
        return pytest.mark.parametrize("mistake", self.mistakes, ids=names)
