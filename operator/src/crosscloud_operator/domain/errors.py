"""The operator's own errors.

    OperatorError
    ├── InvalidJob      a job whose spec can't be run as written; `problems` has every fault
    └── InvalidStatus   a job's status that the operator has not written

What an API server answers is in `kube/api.py` (ApiError and its children).
"""

from __future__ import annotations

from collections.abc import Sequence

from crosscloud_trainer.contract import Problem


class OperatorError(Exception):
    """Any error that the operator itself finds."""


class InvalidJob(OperatorError):
    """A spec that slipped past the API server's schema, or that only the operator can judge."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(str(problem) for problem in self.problems))


class InvalidStatus(OperatorError):
    """The operator's memory of a job has been overwritten."""
