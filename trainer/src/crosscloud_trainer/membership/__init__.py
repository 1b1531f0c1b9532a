"""Who exchanges with whom, and the rounds between them."""

from crosscloud_trainer.membership.errors import Diverged, PeerLost, RoundFailed
from crosscloud_trainer.membership.exchange import LinkExchange, Waiting
from crosscloud_trainer.membership.solo import SoloExchange

__all__ = ["Diverged", "LinkExchange", "PeerLost", "RoundFailed", "SoloExchange", "Waiting"]
