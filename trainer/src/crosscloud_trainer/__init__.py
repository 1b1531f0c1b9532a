"""`from crosscloud_trainer import join` is for scripts that drive DeepSpeed themselves (docs/library.md).

Nothing is imported before it is asked for: the operator imports the contract below this package without torch.
"""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from crosscloud_trainer.library import Alone, Joined


def join() -> Alone | Joined:
    """This process's place in a job; outside of one, a stand-in that does nothing and says so."""
    from crosscloud_trainer.library import join as join_job

    return join_job()
