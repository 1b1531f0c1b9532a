"""What the operator may do to clusters, as values: `lifecycle` decides them, `execution` carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from crosscloud_operator.domain.documents import PlannedPod

Obj = dict[str, Any]


@dataclass(frozen=True)
class Ensure:
    """Make the object unless it is there. One of that name that isn't ours is left alone and reported.

    `update`: its data follow ours also where it is there.
    """

    member: str
    obj: Obj
    update: bool = False


@dataclass(frozen=True)
class EnsureAuthority:
    """Make the job's certificate authority on the hub unless it is there."""


@dataclass(frozen=True)
class EnsureKeys:
    """Make the Secret with certificates and keys of a member's pods unless it is there."""

    member: str
    anchor_uid: str
    attempt: int
    pods: tuple[PlannedPod, ...]


@dataclass(frozen=True)
class Lift:
    """Take our gate off a pod; one that has none any more is left as it is."""

    member: str
    pod: str
    uid: str
    gate: int


@dataclass(frozen=True)
class Remove:
    """Delete just the object of this UID, with its own grace period."""

    member: str
    kind: str
    name: str
    uid: str


MemberAction = Ensure | EnsureKeys | Lift | Remove
Action = EnsureAuthority | MemberAction


class Fault(Enum):
    """Why an action could not be carried out."""

    NAME_CONFLICT = "NameConflict"  # an object of that name is somebody else's
    LEAVING = "Leaving"  # an object of that name is being deleted
    REFUSED = "Refused"  # quota, LimitRange, Pod Security, webhook, RBAC, schema
    UNREACHABLE = "MemberUnreachable"


@dataclass(frozen=True)
class Failure:
    """An action that did not happen; `message` is the API server's own where it has spoken."""

    fault: Fault
    member: str
    what: str  # kind and name
    message: str

    def __str__(self) -> str:
        return f"{self.member}: {self.what}: {self.message}"
