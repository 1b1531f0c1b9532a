"""What the operator remembers of a job: its status, as frozen values. Nothing else is remembered anywhere.

`read_status` takes what the API server holds, `write_status` gives it back; `merge_diff` is what has to be sent.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from crosscloud_operator.domain.errors import InvalidStatus
from crosscloud_trainer.contract import StoredCheckpoint, dump
from crosscloud_trainer.contract.reading import camel, fields_of

# The times in a status that are computed with; lastTransitionTime is only handed on.
TIMES = frozenset(
    {
        "plannedAt", "admittedAt", "boundAt", "endedAt", "goneAt", "retryAt", "startedAt", "finishedAt",
        "unreachableSince", "waitingSince", "reportedAt",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """A condition in the standard shape; `status` is True, False or Unknown."""

    type: str
    status: str
    reason: str
    message: str = ""
    last_transition_time: str | None = None
    observed_generation: int = 0


@dataclass(frozen=True)
class Cause:
    """Why an attempt ended. `counted`: against failurePolicy.attempts; `retryable`: whether another may follow."""

    reason: str
    message: str
    counted: bool
    retryable: bool
    member: str | None = None
    pod: str | None = None
    exit_code: int | None = None


@dataclass(frozen=True)
class Attempt:
    """One try at running the job, with the times (RFC 3339) of what can't be undone.

    planned: the plan is fixed; admitted: every pod was accepted, gates are lifted from here on; bound: every pod has
    its node; ended: `cause` says why; gone: its pods were seen gone by a fresh list.
    """

    number: int
    planned_at: str
    admitted_at: str | None = None
    bound_at: str | None = None
    ended_at: str | None = None
    gone_at: str | None = None
    retry_at: str | None = None
    cause: Cause | None = None


@dataclass(frozen=True)
class Home:
    number: int
    member: str


@dataclass(frozen=True)
class PlacedNode:
    name: str
    gpus: int


@dataclass(frozen=True)
class PlacedStage:
    """Where one stage of one replica runs."""

    replica: int
    incarnation: int
    stage: int
    member: str
    pool: str
    zero_stage: int
    nodes: tuple[PlacedNode, ...]


def places(plan: Sequence[PlacedStage], *, nodes: bool = False) -> str:
    """Where the replicas are, for a person: `replica 0 on east, replica 1 on east (stages 0-1) and west (stage 2)`."""
    found = []
    for replica in sorted({stage.replica for stage in plan}):
        stages = sorted((stage for stage in plan if stage.replica == replica), key=lambda stage: stage.stage)
        runs = [list(run) for _, run in itertools.groupby(stages, key=lambda stage: stage.member)]
        parts = []
        for run in runs:
            first, last = run[0].stage, run[-1].stage
            which = f"stage {first}" if first == last else f"stages {first}-{last}"
            words = [which] if len(runs) > 1 else []
            if nodes:
                names = dict.fromkeys(node.name for stage in run for node in stage.nodes)
                words.append(", ".join(names))
            parts.append(run[0].member + (f" ({': '.join(words)})" if words else ""))
        found.append(f"replica {replica} on {' and '.join(parts)}")
    return ", ".join(found)


@dataclass(frozen=True)
class Refusal:
    """Why a member can't take a stage, in words that a person can act on."""

    member: str
    reason: str


@dataclass(frozen=True)
class MemberState:
    """A member in which objects of the job may exist."""

    name: str
    unreachable_since: str | None = None


@dataclass(frozen=True)
class ReplicaStatus:
    """The last word of one replica."""

    index: int
    activity: str
    step: int = 0
    round: int = 0
    loss: str | None = None
    digest: str | None = None
    waiting_for: tuple[int, ...] = ()
    waiting_for_stages: tuple[int, ...] = ()
    waiting_since: str | None = None
    reported_at: str | None = None
    message: str | None = None


@dataclass(frozen=True)
class ProgressSummary:
    """Sums over replicas; the step is that of the replica that is least far. The best
    evaluation is the best of any replica. Bytes are those sent over the WAN."""

    step: int
    total_steps: int
    round: int
    tokens: int
    tokens_per_second: int
    wan_bytes: int
    dense_bytes: int
    wan_bytes_per_step: int
    wan_per_step: str
    skipped_steps: int
    loss: str | None = None
    first_loss: str | None = None
    validation_loss: str | None = None
    validation_perplexity: str | None = None
    best_validation_loss: str | None = None
    best_step: int | None = None


@dataclass(frozen=True)
class Result:
    uri: str | None = None
    checkpoint_uri: str | None = None
    checkpoint_digest: str | None = None


@dataclass(frozen=True)
class JobStatus:
    """The status of a CrossCloudTrainingJob."""

    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()
    attempt: Attempt | None = None
    attempts_counted: int = 0
    restarts: int = 0
    replicas: int = 0
    home: Home | None = None
    plan: tuple[PlacedStage, ...] = ()
    refused: tuple[Refusal, ...] = ()
    members: tuple[MemberState, ...] = ()
    replica_statuses: tuple[ReplicaStatus, ...] = ()
    progress: ProgressSummary | None = None
    checkpoints: tuple[StoredCheckpoint, ...] = ()  # newest first, those that the job keeps
    result: Result | None = None
    started_at: str | None = None
    finished_at: str | None = None

    def condition(self, kind: str) -> Condition | None:
        return next((item for item in self.conditions if item.type == kind), None)

    def is_true(self, kind: str) -> bool:
        found = self.condition(kind)
        return found is not None and found.status == "True"

    @property
    def finished(self) -> bool:
        return self.is_true("Succeeded") or self.is_true("Failed")

    @property
    def holds_gpus(self) -> bool:
        """Whether GPUs of the plan are promised to this job: from the plan until its pods are seen gone."""
        return self.attempt is not None and self.attempt.gone_at is None and not self.finished


def read_status(data: Any) -> JobStatus:
    """Raises InvalidStatus where somebody else has written into it. Passed over are fields of other versions, and
    times that can't be read (`unreadable_times` names them).
    """
    try:
        return typing.cast(JobStatus, _builder(JobStatus)(data or {}))
    except (TypeError, AttributeError) as fault:
        reason = str(fault).replace(".__init__()", "")  # of a dataclass: what is too much in it, or missing
        raise InvalidStatus(f"status: found what this operator has not written ({reason})") from fault


def unreadable_times(data: Any, path: str = "status") -> list[str]:
    """The times in a status that are none, each with its path and value; an API server lets some of them through."""
    if isinstance(data, list):
        return [text for number, item in enumerate(data) for text in unreadable_times(item, f"{path}[{number}]")]
    if not isinstance(data, Mapping):
        return []
    found = []
    for key, value in data.items():
        if key in TIMES and value is not None and parsed(value) is None:
            found.append(f"{path}.{key}: found {str(value)[:60]!r}; must be a time like 2026-01-31T12:00:00Z")
        found += unreadable_times(value, f"{path}.{key}")
    return found


def write_status(status: JobStatus) -> dict[str, Any]:
    """The plain JSON form."""
    return typing.cast(dict[str, Any], dump(status))


def condition_in(status: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    """The condition of this type in the plain JSON form of any object's status."""
    return next((item for item in status.get("conditions") or () if item.get("type") == kind), None)


def has_ended(job: Mapping[str, Any]) -> bool:
    """Whether a job in its plain JSON form has succeeded or failed."""
    found = (condition_in(job.get("status") or {}, kind) for kind in ("Succeeded", "Failed"))
    return any(item is not None and item["status"] == "True" for item in found)


def merge_diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7386) that makes `new` of `old`; empty where they are alike."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := merge_diff(before, value):
                patch[key] = inner
        elif value != before:
            patch[key] = value
    return patch


def rfc3339(seconds: float) -> str:
    """Wall-clock seconds as RFC 3339, UTC, whole seconds: the form of metav1.Time."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """Inverse of `rfc3339`; takes fractions and other offsets too, and UTC where none is named. Raises ValueError."""
    found = datetime.fromisoformat(text.upper())  # RFC 3339 takes t and z too
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def parsed(text: Any) -> float | None:
    """The same for texts of others: None where it is no time."""
    try:
        return seconds(text) if isinstance(text, str) else None
    except (ValueError, OverflowError):
        return None


@functools.cache
def _builder(kind: Any) -> Callable[[Any], Any]:
    """What makes a `kind` of plain JSON data. The API server has checked its types, so nothing is checked again."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return _builder(next(item for item in typing.get_args(kind) if item is not type(None)))
    if typing.get_origin(kind) is tuple:
        item = _builder(typing.get_args(kind)[0])
        return lambda data: tuple(item(each) for each in data)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return lambda data: data
    fields = {camel(name): (name, _builder(hint)) for name, hint, _, _ in fields_of(kind)}

    def build(data: Any) -> Any:
        known = (
            fields[key] + (value,)
            for key, value in data.items()
            if key in fields and value is not None and not (key in TIMES and parsed(value) is None)
        )
        return kind(**{name: make(value) for name, make, value in known})

    return build
