"""The life of a job as a state machine: what state its status is in, and what follows from what is observed.

    Waiting ──plan──▶ Admitting ──all accepted──▶ Binding ──all bound──▶ Running ──all succeeded──▶ Ending ──▶ Finished
       ▲                  │                          │                     │
       │                  └───────────┬──────────────┴──────cause──────────┘
    Retrying ◀──another attempt── Stopping ──no other attempt──▶ Finished            (any) ──deleted──▶ Deleting

The state is a function of the status alone, so a restarted operator is where the last one was. Whatever can't be undone
(the plan, lifting gates, the end of an attempt) is written to the status before it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from crosscloud_operator.domain import record
from crosscloud_operator.domain.actions import Action, Remove
from crosscloud_operator.domain.names import JobId
from crosscloud_operator.domain.observed import PodState
from crosscloud_operator.domain.placement import Placement
from crosscloud_operator.domain.record import Attempt, Cause, JobStatus
from crosscloud_operator.domain.settings import JobSettings
from crosscloud_operator.domain.spec import Job
from crosscloud_operator.domain.status import PLACED, REACHABLE, RUNNING, with_condition
from crosscloud_trainer.contract import Report


class State(Enum):
    WAITING = "Waiting"  # for room; no pod, no reservation (Preparing, while Services and addresses are made)
    ADMITTING = "Admitting"  # planned: gated pods and all they need are being made
    BINDING = "Binding"  # every pod was accepted: gates are being lifted
    RUNNING = "Running"  # every pod has its node
    STOPPING = "Stopping"  # the attempt has ended: its pods are being removed
    RETRYING = "Retrying"  # the pause before the next attempt
    ENDING = "Ending"  # succeeded: the gateway is being removed, pods end by themselves
    FINISHED = "Finished"
    DELETING = "Deleting"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.WAITING: frozenset({State.ADMITTING, State.DELETING}),
    State.ADMITTING: frozenset({State.BINDING, State.STOPPING, State.DELETING}),
    State.BINDING: frozenset({State.RUNNING, State.STOPPING, State.DELETING}),
    State.RUNNING: frozenset({State.STOPPING, State.ENDING, State.DELETING}),
    State.STOPPING: frozenset({State.RETRYING, State.FINISHED, State.DELETING}),
    State.RETRYING: frozenset({State.WAITING, State.DELETING}),
    State.ENDING: frozenset({State.FINISHED, State.DELETING}),
    State.FINISHED: frozenset({State.DELETING}),
    State.DELETING: frozenset(),
}


def state_of(status: JobStatus, *, deleting: bool, now: float) -> State:
    """Where a job is, from what was saved."""
    attempt = status.attempt
    if deleting:
        return State.DELETING
    if status.finished:
        return State.FINISHED if attempt is None or attempt.gone_at else State.ENDING
    if attempt is None:
        return State.WAITING
    if attempt.gone_at is not None:
        return State.RETRYING if attempt.retry_at and record.seconds(attempt.retry_at) > now else State.WAITING
    if attempt.ended_at is not None:
        return State.STOPPING
    if attempt.bound_at is not None:
        return State.RUNNING
    return State.BINDING if attempt.admitted_at is not None else State.ADMITTING


@dataclass(frozen=True)
class Site:
    """What is ready for the job in a member: its anchor, its Services, the gateway's address (host:port)."""

    anchor_uid: str | None = None
    has_pods_service: bool = False
    gateway: str | None = None
    problem: str | None = None  # why the gateway can have no address

    def is_whole(self, *, gateway: bool) -> bool:
        """Whether pods can be made; `gateway`: the job lies in several members, so that it needs an address too."""
        return self.anchor_uid is not None and self.has_pods_service and (self.gateway is not None or not gateway)


@dataclass(frozen=True)
class Found:
    """An object of an attempt as a fresh list shows it. `finished`: a pod in which nothing runs any more."""

    remove: Remove
    leaving: bool = False
    is_trainer: bool = False  # a pod of the plan, not the gateway's
    finished: bool = False
    held_open: bool = False  # its trainer has ended, and a container beside it runs on


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is known of a job even where its spec can't be read."""

    now: float
    id: JobId
    generation: int
    status: JobStatus
    settings: JobSettings
    unreachable: Mapping[str, str] = field(default_factory=dict)  # member -> since (RFC 3339)


@dataclass(frozen=True, kw_only=True)
class Facts(Scene):
    """All that a decision may depend on. What a state doesn't need is left at its default."""

    job: Job
    state: State
    # Waiting
    placement: Placement | None = None
    hub_member: str | None = None
    # Waiting, Admitting: of the members that answer
    sites: Mapping[str, Site] = field(default_factory=dict)
    storage: Mapping[str, str] | None = None  # data of the storage Secret on the hub; None where it isn't there
    # an attempt
    pods: tuple[PodState, ...] = ()
    reports: Mapping[int, Report] = field(default_factory=dict)
    gateways: tuple[str, ...] = ()  # why gateways pass nothing yet
    strays: tuple[Remove, ...] = ()  # of older attempts
    # Stopping, Ending: by fresh lists, of the members that answer
    found: tuple[Found, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The status to save first, then what to do, then when to look again (seconds; None: only when woken).

    `plan`: everything is ready, so plan under the lock on a fresh list of jobs. `again`: look again at once.
    `release`: nothing of the job is left, so take the finalizer off.
    """

    status: JobStatus
    actions: tuple[Action, ...] = ()
    requeue: float | None = None
    again: bool = False
    plan: bool = False
    release: bool = False


def tell(
    scene: Scene,
    status: JobStatus,
    reason: str,
    message: str,
    *,
    running: bool | None = False,
    placed: tuple[bool, str, str] | None = None,
) -> JobStatus:
    """The status with its conditions: `reason` is the one-word story that `kubectl get` shows."""
    status = replace(status, observed_generation=scene.generation)
    status = with_condition(status, RUNNING, running, reason, message, scene.now)
    if placed is not None:
        status = with_condition(status, PLACED, *placed, scene.now)
    return with_reachability(status, scene.unreachable, scene.now)


def with_reachability(status: JobStatus, unreachable: Mapping[str, str], now: float) -> JobStatus:
    """Which members of the job can't be reached, and since when: a clock that survives a restart."""
    if not status.members:
        return status
    members = tuple(replace(item, unreachable_since=unreachable.get(item.name)) for item in status.members)
    status = replace(status, members=members)
    lost = [f"{item.name} since {item.unreachable_since}" for item in members if item.unreachable_since]
    if lost:
        return with_condition(status, REACHABLE, False, "MemberUnreachable", f"not reached: {', '.join(lost)}", now)
    return with_condition(status, REACHABLE, True, "AllReached", "every member of the job answers", now)


def with_attempt(status: JobStatus, **times: str) -> JobStatus:
    """The status with these times of its attempt set."""
    return replace(status, attempt=replace(current(status), **times))  # type: ignore[arg-type]


def end_attempt(facts: Facts, cause: Cause) -> Decision:
    """Write down why the attempt has ended, before anything of it is removed."""
    status = facts.status
    attempt = current(status)
    counted = status.attempts_counted + (1 if cause.counted else 0)
    attempt = replace(attempt, ended_at=record.rfc3339(facts.now), cause=cause)
    status = replace(status, attempt=attempt, attempts_counted=counted, replicas=0)
    return Decision(tell(facts, status, "Stopping", cause.message), again=True)


def current(status: JobStatus) -> Attempt:
    """The attempt that a state beyond Waiting has."""
    if status.attempt is None:
        raise AssertionError("a job beyond Waiting has an attempt")
    return status.attempt


def is_final(status: JobStatus, job: Job) -> bool:
    """Whether no other attempt follows the one that has ended."""
    cause = current(status).cause
    return cause is not None and (not cause.retryable or status.attempts_counted >= job.spec.failure_policy.attempts)
