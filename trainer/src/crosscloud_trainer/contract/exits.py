"""Exit codes of the trainer, and what the operator does about each. Anything else is a fault of the user's code or of
ours: retried and counted."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    SUCCEEDED = 0
    INVALID_INPUT = 64  # the run document, the data or the model can't be used
    CONTRACT_TOO_NEW = 65  # the run document is of a version this image doesn't know
    STORAGE_REFUSED = 66  # storage.uri can't be written: bucket, key or permission
    STORAGE_UNREACHABLE = 69  # storage doesn't answer
    PEERS_MISSING = 70  # not all pods of the attempt were met before the start deadline
    PEER_LOST = 71  # another pod of the attempt has gone
    DIVERGED = 72  # what replicas must have alike differs, or what one said can't be right
    NON_FINITE = 73  # too many skipped steps or rounds in a row
    FENCED = 74  # a newer attempt or incarnation exists
    TERMINATED = 143  # SIGTERM, to this pod or to another one of the attempt: a preemption, no fault of the job's


_NOT_RETRYABLE = frozenset(
    {ExitCode.INVALID_INPUT, ExitCode.CONTRACT_TOO_NEW, ExitCode.STORAGE_REFUSED, ExitCode.NON_FINITE}
)
_NOT_COUNTED = frozenset({ExitCode.PEERS_MISSING, ExitCode.TERMINATED})


def retryable(code: int) -> bool:
    """Whether another attempt could end differently."""
    return code not in _NOT_RETRYABLE


def counted(code: int) -> bool:
    """Whether the attempt counts against `failurePolicy.attempts`: those that never ran or were told to end don't."""
    return code not in _NOT_COUNTED
