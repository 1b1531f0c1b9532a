"""Bytes by peer and kind. Counted inside TLS: records add about 22 bytes per 16 KiB and a handshake some 2 KiB."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from crosscloud_trainer.link.frames import MessageType
from crosscloud_trainer.link.handshake import RankId

PAYLOAD, RESULT, ACTIVATION, OVERHEAD = KINDS = ("payload", "result", "activation", "overhead")


_KINDS = {
    MessageType.PAYLOAD: PAYLOAD,
    MessageType.RESULT: RESULT,
    MessageType.ACTIVATION: ACTIVATION,
    MessageType.GRADIENT: ACTIVATION,
}


def kind_of(message: MessageType | None) -> str:
    """What a frame's body counts as; frame headers, handshakes and heartbeats are overhead."""
    return _KINDS.get(message, OVERHEAD) if message else OVERHEAD


@dataclass(frozen=True)
class PeerTraffic:
    """Bytes since the start, those that were sent again included. `wan`: the peer is in another member."""

    peer: RankId
    wan: bool
    sent: Mapping[str, int]
    received: Mapping[str, int]


class Traffic:
    """Counters of one peer. Written by the link's thread only."""

    def __init__(self) -> None:
        self.sent = dict.fromkeys(KINDS, 0)
        self.received = dict.fromkeys(KINDS, 0)
