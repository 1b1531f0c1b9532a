"""How the trainer ends when it can't go on: one message for a person, one exit code for the operator."""

from __future__ import annotations

from collections.abc import Iterable

from crosscloud_trainer.contract import ExitCode


class Failure(Exception):
    """An end that is explained. `code` tells the operator what to do, the message tells the user."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def invalid(problems: Iterable[object]) -> Failure:
    """Input that can't be used; each problem is one line of the message."""
    return Failure(ExitCode.INVALID_INPUT, "\n".join(str(problem) for problem in problems))
