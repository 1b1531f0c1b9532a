"""Mutual TLS connections between ranks of different replicas, and the reliable, bounded streams on them."""

from crosscloud_trainer.link.channel import LinkSettings
from crosscloud_trainer.link.errors import Disagreement, Fenced, LinkClosed, LinkError, LinkUnusable, PeersMissing
from crosscloud_trainer.link.frames import Message, MessageType
from crosscloud_trainer.link.handshake import Authority, RankId
from crosscloud_trainer.link.link import Event, Link, Obeyed, PeerState, Received, Restarted
from crosscloud_trainer.link.traffic import PeerTraffic

__all__ = [
    "Authority",
    "Disagreement",
    "Event",
    "Fenced",
    "Link",
    "LinkClosed",
    "LinkError",
    "LinkSettings",
    "LinkUnusable",
    "Message",
    "MessageType",
    "Obeyed",
    "PeerState",
    "PeerTraffic",
    "PeersMissing",
    "RankId",
    "Received",
    "Restarted",
]
