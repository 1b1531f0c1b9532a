"""The errors of this package.

LabError                   anything a person must act on; its text is the whole message
  LabFileError             the lab file says something that is not allowed (all findings at once)
  PreflightError           this machine can't carry the lab (all findings at once)
  ComponentError           a process of the lab didn't come up; the text names its log
  Ended                    a program was ended because of what happened elsewhere
"""

from __future__ import annotations

from collections.abc import Sequence


class LabError(Exception):
    """A failure with a message that is meant for the user as it stands."""


class _FindingsError(LabError):
    def __init__(self, title: str, findings: Sequence[str]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join([title, *(f"  - {finding}" for finding in self.findings)]))


class LabFileError(_FindingsError):
    """The lab file has mistakes; `findings` has one sentence for each."""


class PreflightError(_FindingsError):
    """The machine misses something; `findings` has one sentence for each."""


class ComponentError(LabError):
    """A component didn't become healthy in time."""


class Ended(LabError):
    """A program was ended, or not started, because another task failed or the user interrupted."""


def in_words(error: Exception) -> str:
    """What a user is told of an error; of one of the system's, such as a full disk, which file it is about."""
    if isinstance(error, OSError):
        return f"{error.filename or 'system'}: {error.strerror or error}"
    return str(error)
