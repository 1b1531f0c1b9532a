"""Sorts what a link receives: words of the own replica's other stages, and all that concerns other replicas."""

from __future__ import annotations

import time
from collections import deque

from crosscloud_trainer.link.frames import Message, MessageType
from crosscloud_trainer.link.handshake import RankId
from crosscloud_trainer.link.link import Event, Link, Received

STAGE_MESSAGES = frozenset({MessageType.ACTIVATION, MessageType.GRADIENT, MessageType.TOTALS})


class Mail:
    """One thread uses it. Whoever waits takes in what comes for the other, so that neither misses its own."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._rounds: deque[Event] = deque()
        self._stages: dict[tuple[RankId, MessageType], deque[Message]] = {}
        self.stage_awaited_since: float | None = None
        """Since when, in seconds since 1970, the present call waits for another stage; any thread may ask."""

    def receive(self, seconds: float | None = None) -> Event | None:
        """The next event that concerns other replicas; None if there was none in this time, or something else came."""
        if not self._rounds:
            self._take(seconds)
        return self._rounds.popleft() if self._rounds else None

    def from_stage(self, peer: RankId, kind: MessageType) -> Message:
        """The next message of this kind from a rank of another stage of the own replica."""
        box = self._stages.setdefault((peer, kind), deque())
        self.stage_awaited_since = None if box else time.time()
        while not box:
            self._take(None)
        self.stage_awaited_since = None
        return box.popleft()

    def _take(self, seconds: float | None) -> None:
        event = self._link.receive(seconds)
        if event is None:
            return
        if isinstance(event, Received) and event.message.type in STAGE_MESSAGES:
            if event.peer.replica == self._link.me.rank.replica:
                self._stages.setdefault((event.peer, event.message.type), deque()).append(event.message)
            return  # a rank of another replica has no business with our stages
        self._rounds.append(event)
