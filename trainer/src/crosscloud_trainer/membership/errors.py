"""Why a view ends its process; see also link/errors.py.

LinkError
├── RoundFailed      what a peer said can't belong to this view or round
├── Diverged         outer states that must be alike are not
└── PeerLost         another replica has not prepared the last round in time
"""

from __future__ import annotations

from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.link import LinkError


class RoundFailed(LinkError):
    exit_code = ExitCode.DIVERGED


class Diverged(LinkError):
    exit_code = ExitCode.DIVERGED


class PeerLost(LinkError):
    exit_code = ExitCode.PEER_LOST
