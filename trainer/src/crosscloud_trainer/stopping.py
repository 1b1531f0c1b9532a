"""SIGTERM: before training it ends the rank at once; then all replicas stop after one common round, with a checkpoint.

A thread waits for the signal, since the training thread may stand in a collective for long. Where the round can't end,
because a replica that it waits for has gone, there is nothing to wait for either. Where it doesn't end before the grace
period does, the rank says which checkpoint stands.
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
_LAST_WORD_SECONDS = 1.0  # of the ranks' grace
_ADVICE = "a longer terminationGracePeriodSeconds or a shorter window would have left one"


class Stop:
    """Whether SIGTERM came. To be made before any other thread, which would take the signal."""

    def __init__(self, environ: Mapping[str, str], end: Callable[[int], None] = os._exit) -> None:
        self.requested = False
        self._environ, self._end = environ, end
        self._meeting: Meeting | None = None
        self._seconds = 0.0
        self._stands: Callable[[], int | None] = lambda: None
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=self._run, name="stop", daemon=True).start()

    def gently(self, meeting: Meeting, grace: float, stands: Callable[[], int | None]) -> None:
        """From now on the training loop looks at `requested`, and has `grace` seconds from then on. `stands` says after
        which step the newest stored checkpoint was taken: 0 for none, None where this rank doesn't know.
        """
        self._seconds, self._stands = max(grace - _LAST_WORD_SECONDS, 0.5), stands
        self._meeting = meeting

    def _run(self) -> None:
        signal.sigwait({signal.SIGTERM})
        self.requested = True
        why = self._outlasted()
        leave_message(self._environ, "ended by SIGTERM" + (f": {why}; {self._standing()}" if why else ""))
        self._end(ExitCode.TERMINATED)

    def _outlasted(self) -> str:
        """Why the common end is no longer waited for; empty before training."""
        since, alone_since = time.monotonic(), None
        while self._meeting is not None:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            if now - since > self._seconds:
                return f"no checkpoint of all replicas was stored within {self._seconds:.0f} s; {_ADVICE}"
            alone_since = (alone_since or now) if waits_for_the_gone(self._meeting) else None
            if alone_since is not None and now - alone_since > _GONE_SECONDS:
                return "a replica that the round waits for has gone"
        return ""

    def _standing(self) -> str:
        step = self._stands()
        if step is None:
            return "the newest stored checkpoint stands"
        return f"the checkpoint of step {step} stands" if step else "no checkpoint has been stored yet"


def waits_for_the_gone(meeting: Meeting) -> bool:
    """Whether a round waits for a replica to which no rank has a connection."""
    waiting = meeting.exchange.waiting()
    if waiting is None or meeting.link is None:
        return False
    states = meeting.link.states()
    reached = {rank.replica for rank, state in states.items() if state.connected}
    return not set(waiting.replicas) <= reached
