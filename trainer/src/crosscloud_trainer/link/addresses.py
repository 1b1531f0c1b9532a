"""Where peers are: the peer table's file, which may change while the attempt runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from crosscloud_trainer.contract import ContractTooNew, InvalidDocument, Peer, PeerTable, read_peer_table
from crosscloud_trainer.link.errors import LinkUnusable
from crosscloud_trainer.link.handshake import RankId
from crosscloud_trainer.pki import PodIdentity, rank_server_name

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """Where to dial a rank; `server_name` tells a gateway which rank is meant."""

    host: str
    port: int
    server_name: str


class Addresses:
    """The newest peer table that could be read. Raises LinkUnusable if the first one can't."""

    def __init__(self, path: Path, me: PodIdentity) -> None:
        self._path = path
        self._me = me
        try:
            self._table = self._read()
        except (OSError, InvalidDocument, ContractTooNew) as fault:
            raise LinkUnusable(f"peer table {path}: {fault}") from fault
        mine = self.find(RankId(me.replica, me.stage, me.node, 0))
        if mine is None or mine.server_name != me.server_name:
            found = mine.server_name if mine else "no such pod"
            raise LinkUnusable(f"peer table {path}: found {found}; must be {me.server_name}, as the certificate says")
        self.mine: Peer = mine

    def _read(self) -> PeerTable:
        table = read_peer_table(self._path.read_bytes())
        if table.attempt != self._me.attempt:
            raise OSError(f"it is of attempt {table.attempt}, this is attempt {self._me.attempt}")
        return table

    def refresh(self) -> None:
        """Reads the file again; what can't be read leaves the last good table in force."""
        try:
            self._table = self._read()
        except (OSError, InvalidDocument, ContractTooNew) as fault:
            _log.warning("peer table %s stays as it was: %s", self._path, fault)

    def find(self, rank: RankId) -> Peer | None:
        key = (rank.replica, rank.stage, rank.node)
        return next((p for p in self._table.peers if (p.replica, p.stage, p.node) == key), None)

    def is_wan(self, rank: RankId) -> bool:
        peer = self.find(rank)
        return peer is None or peer.member != self.mine.member

    def target(self, rank: RankId) -> Target | None:
        """Pods of our own member, and of a flat network, are dialled directly; others at their gateway."""
        peer = self.find(rank)
        if peer is None:
            return None
        name = rank_server_name(peer.server_name, rank.local)
        if peer.member == self.mine.member or peer.gateway is None:
            return Target(peer.direct, peer.link_port + rank.local, name)
        host, _, port = peer.gateway.rpartition(":")
        return Target(host.strip("[]"), int(port), name)
