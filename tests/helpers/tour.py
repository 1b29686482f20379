"""A tour of mistakes: small programs, each with what must be said to its author."""

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
    """A program that its author got wrong, the error or warning that must answer it, and parts of its text in order."""

    program: Program
    answer: Answer
    parts: tuple[str, ...]

    def check(self) -> None:
        """Run the program in the working directory, and look at the answer."""
        text = "(?s)" + ".*".join(map(re.escape, self.parts))
        if issubclass(self.answer, Warning):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("default")  # as users see them: once for each place
                self.program()
            answers = [str(warning.message) for warning in said if issubclass(warning.category, self.answer)]
            matching = [answer for answer in answers if re.search(text, answer)]
            assert len(matching) == 1, f"said {len(matching)} times, not once; of {answers}"
        else:
            with pytest.raises(self.answer, match=text):
                self.program()


class Tour:
    """A table of mistakes; a program is entered by decorating it with what answers it."""

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []

    def answered_by(self, answer: Answer, *parts: str) -> Callable[[Program], Program]:
        """Return what enters a program: it must be answered by this, with these parts in its text."""

        def enter(program: Program) -> Program:
            self.mistakes.append(Mistake(program, answer, parts))
            return program

        return enter

    @property
    def cases(self) -> pytest.MarkDecorator:
        """Return what gives a test each mistake, under its program's name."""
        names = [mistake.program.__name__ for mistake in self.mistakes]
        assert len(set(names)) == len(names), "two programs have one name: one would be lost"
        return pytest.mark.parametrize("mistake", self.mistakes, ids=names)
