"""Whether the ranks of a script come to its end together.

All ranks of a replica make the same calls of their engine. One that ends before the others would leave them in a
collective that never completes, and a collective of its own would mix with theirs. So a rank that comes to its end says
after how many calls, in the store by which the ranks have met, and goes on once all have come to theirs. From then on
those that have not say how many calls they have made: whoever has made fewer than another one has ended alone.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.failures import Failure

_LOOK_SECONDS = 1.0
_POLL_SECONDS = 0.1
_SOMEONE = "someone has ended"


class Store(Protocol):
    """As much as is needed of torch's. Calls raise RuntimeError once the rank that keeps it has gone."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Departure:
    """One rank's end of it. `calls` counts those of the engine that are collective."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self.calls = 0
        self._store, self._rank, self._ranks = store, rank, ranks
        self._ended = threading.Event()
        if ranks > 1:
            threading.Thread(target=self._watch, name="departure", daemon=True).start()

    def together(self, step: int, seconds: float | None = None) -> None:
        """Returns once all ranks have come to the end. `step` is this rank's last one, for the message.

        Raises Failure where they have made unlike numbers of calls, or haven't all come in this time.
        """
        self._ended.set()
        self._store.set(f"ended {self._rank}", str(self.calls))
        self._store.set(_SOMEONE, "")
        deadline = None if seconds is None else time.monotonic() + seconds
        while missing := [rank for rank in range(self._ranks) if not self._store.check([f"ended {rank}"])]:
            self._compare([rank for rank in missing if self._store.check([f"calls {rank}"])], "calls", step)
            if deadline is not None and time.monotonic() > deadline:
                message = f"the script has ended on this rank after step {step}, and not on rank {missing[0]}"
                raise Failure(1, f"{message} within {seconds:g} s; call sync.finish() on all ranks after the last step")
            time.sleep(_POLL_SECONDS)
        self._compare(range(self._ranks), "ended", step)

    def _compare(self, ranks: list[int] | range, key: str, step: int) -> None:
        made = {rank: int(self._store.get(f"{key} {rank}")) for rank in ranks}
        if further := [rank for rank, calls in made.items() if calls > self.calls]:
            message = f"the script has ended on this rank after step {step}, while rank {further[0]} goes on"
            raise Failure(1, f"{message}: all ranks must take equally many steps")
        if key == "ended" and (short := [rank for rank, calls in made.items() if calls < self.calls]):
            raise Failure(ExitCode.PEER_LOST, f"the script has ended earlier on rank {short[0]}")

    def _watch(self) -> None:
        try:
            while not self._ended.wait(_LOOK_SECONDS):
                if self._store.check([_SOMEONE]):
                    self._store.set(f"calls {self._rank}", str(self.calls))
        except RuntimeError:
            return  # the rank that kept the store has gone, and its launcher tells why
