"""Why a link ends its process.

    LinkError            anything below; `exit_code` is what the process should end with
    ├── LinkUnusable     certificate, peer table or port of our own can't be used
    ├── Fenced           a newer attempt or incarnation exists
    ├── Disagreement     another pod runs with something unlike that must be alike
    ├── PeersMissing     other pods were not met in time
    └── LinkClosed       used after close()

A connection that breaks is none of these: it is made again.
"""

from __future__ import annotations

from crosscloud_trainer.contract import ExitCode


class LinkError(Exception):
    exit_code: ExitCode = ExitCode.INVALID_INPUT


class LinkUnusable(LinkError):
    exit_code = ExitCode.INVALID_INPUT


class Fenced(LinkError):
    exit_code = ExitCode.FENCED


class Disagreement(LinkError):
    exit_code = ExitCode.INVALID_INPUT


class PeersMissing(LinkError):
    exit_code = ExitCode.PEERS_MISSING


class LinkClosed(LinkError):
    exit_code = ExitCode.TERMINATED


class FrameError(Exception):
    """Bytes that break the protocol; the connection that they came by is closed. `reason` is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
