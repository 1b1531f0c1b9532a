"""Who exchanges with whom, and the rounds between them."""

from crosscloud_trainer.membership.errors import Diverged, PeerLost, RoundFailed
from crosscloud_trainer.membership.exchange import LinkExchange, Waiting
from crosscloud_trainer.membership.register import Register, RegisterUnusable, open_view, register_from
from crosscloud_trainer.membership.solo import SoloExchange
from crosscloud_trainer.membership.view import View

__all__ = [
    "Diverged",
    "LinkExchange",
    "PeerLost",
    "Register",
    "RegisterUnusable",
    "RoundFailed",
    "SoloExchange",
    "View",
    "Waiting",
    "open_view",
    "register_from",
]
