"""SIGTERM: before training it ends the rank at once; then all replicas stop after one common round, with a checkpoint.

A thread waits for the signal, since the training thread may stand in a collective for long. Where the round can't end,
because a replica that it waits for has gone, there is nothing to wait for either.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping

from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.environment import leave_message
from crosscloud_trainer.meeting import Meeting

_LOOK_SECONDS = 0.2
_GONE_SECONDS = 2.0  # a connection that comes back sooner was only broken


class Stop:
    """Whether SIGTERM came. To be made before any other thread, which would take the signal."""

    def __init__(self, environ: Mapping[str, str], end: Callable[[int], None] = os._exit) -> None:
        self.requested = False
        self._environ, self._end = environ, end
        self._meeting: Meeting | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=self._run, name="stop", daemon=True).start()

    def gently(self, meeting: Meeting) -> None:
        """From now on the training loop looks at `requested`."""
        self._meeting = meeting

    def _run(self) -> None:
        signal.sigwait({signal.SIGTERM})
        self.requested = True
        alone_since: float | None = None
        while self._meeting is not None:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            alone_since = (alone_since or now) if waits_for_the_gone(self._meeting) else None
            if alone_since is not None and now - alone_since > _GONE_SECONDS:
                break
        leave_message(self._environ, "ended by SIGTERM")
        self._end(ExitCode.TERMINATED)


def waits_for_the_gone(meeting: Meeting) -> bool:
    """Whether a round waits for a replica to which no rank has a connection."""
    waiting = meeting.exchange.waiting()
    if waiting is None or meeting.link is None:
        return False
    states = meeting.link.states()
    reached = {rank.replica for rank, state in states.items() if state.connected}
    return not set(waiting.replicas) <= reached
