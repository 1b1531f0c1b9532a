"""What members say about a job: the states of its pods and the words of its replicas.

A pod's end is that of its trainer container, whatever sidecars do. A member that can't be reached is unknown: what was
seen there last still counts, what is missing there doesn't.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crosscloud_operator.domain import names
from crosscloud_operator.domain.documents import PlannedPod
from crosscloud_operator.domain.inventory import ENDED
from crosscloud_operator.domain.record import PlacedStage, parsed
from crosscloud_trainer.contract import (
    REPORT_KEY,
    ExitCode,
    InvalidDocument,
    Outcome,
    Report,
    counted,
    read_json,
    retryable,
)

Obj = Mapping[str, Any]

# status.reason of pods that were ended by the cluster, not by what ran in them
_FROM_OUTSIDE = frozenset(
    {"Evicted", "NodeShutdown", "NodeLost", "Preempting", "Preempted", "Shutdown", "Terminated", "NodeAffinity"}
    | {
        "OutOfcpu",
        "OutOfmemory",
        "OutOfpods",
        "OutOfnvidia.com/gpu",
        "UnexpectedAdmissionError",
        "TopologyAffinityError",
    }
)
# Codes of pods that ended because another pod had: that one's code is the cause.
CONSEQUENCES = frozenset({ExitCode.PEERS_MISSING, ExitCode.PEER_LOST, ExitCode.FENCED, ExitCode.TERMINATED})


@dataclass(frozen=True)
class End:
    """How a pod's trainer ended. `from_outside`: by the cluster (eviction, node shutdown, deletion), not by itself."""

    exit_code: int | None
    reason: str
    message: str
    from_outside: bool
    at: str | None

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0

    @property
    def counted(self) -> bool:
        return not self.from_outside and (self.exit_code is None or counted(self.exit_code))

    @property
    def retryable(self) -> bool:
        return self.from_outside or self.exit_code is None or retryable(self.exit_code)

    @property
    def is_consequence(self) -> bool:
        return self.exit_code in CONSEQUENCES


@dataclass(frozen=True)
class PodState:
    """One pod of the plan. `known` is False where its member can't be reached; `uid` is None where it doesn't exist."""

    planned: PlannedPod
    known: bool = True
    uid: str | None = None
    gate: int | None = None  # where our gate stands among its scheduling gates
    bound: bool = False
    started: bool = False
    leaving: bool = False
    finished: bool = False  # its phase: nothing in it runs any more
    end: End | None = None
    blocked: str | None = None  # why it can't start or can't be scheduled

    @property
    def missing(self) -> bool:
        """Whether it surely isn't there."""
        return self.known and self.uid is None


def pod_state(planned: PlannedPod, raw: Obj | None, *, known: bool) -> PodState:
    if raw is None:
        return PodState(planned, known=known)
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    trainer = _trainer_status(status)
    state = trainer.get("state") or {}
    return PodState(
        planned=planned,
        known=known,
        uid=meta["uid"],
        gate=next(
            (n for n, gate in enumerate(spec.get("schedulingGates") or ()) if gate.get("name") == names.GATE), None
        ),
        bound=bool(spec.get("nodeName")),
        started=any(state.get(word) is not None for word in ("running", "terminated")),
        leaving=bool(meta.get("deletionTimestamp")),
        finished=status.get("phase") in ENDED,
        end=end_of(raw),
        blocked=_blocked(status, names.TRAINER),
    )


def end_of(raw: Obj) -> End | None:
    """How the pod's trainer ended; None while it hasn't."""
    status = raw.get("status") or {}
    terminated = (_trainer_status(status).get("state") or {}).get("terminated")
    leaving = bool(raw["metadata"].get("deletionTimestamp"))
    pod_reason, pod_message = status.get("reason") or "", status.get("message") or ""
    outside = pod_reason in _FROM_OUTSIDE or _disrupted(status)
    if terminated:
        code = int(terminated.get("exitCode", 255))
        reason = terminated.get("reason") or pod_reason or "Error"
        killed = leaving and code in (137, 143)
        return End(
            exit_code=code,
            reason=reason,
            message=terminated.get("message") or pod_message,
            from_outside=code != 0 and reason != "OOMKilled" and (outside or killed),
            at=_time(terminated.get("finishedAt")),
        )
    if status.get("phase") == "Succeeded":
        return End(0, "Completed", pod_message, from_outside=False, at=None)
    if status.get("phase") == "Failed":
        # Without a word on containers nothing of ours has run to its end: the kubelet or a controller failed the pod.
        silent = not status.get("containerStatuses")
        return End(None, pod_reason or "PodFailed", pod_message, from_outside=outside or silent, at=None)
    return None


def replica_reports(
    config_maps: Iterable[Obj], job: names.JobId, attempt: int, stages: Sequence[PlacedStage]
) -> dict[int, Report]:
    """The last word of each replica whose first stage is given, in this attempt and incarnation, from that stage's
    member; what is older or unreadable is passed over.
    """
    expected = {names.report(job.name, stage.replica): stage for stage in stages}
    found: dict[int, Report] = {}
    for raw in config_maps:
        stage = expected.get(raw["metadata"]["name"])
        text = (raw.get("data") or {}).get(REPORT_KEY)
        if stage is None or not text or not names.is_ours(raw, job):
            continue
        try:
            report = read_json(Report, text)
        except InvalidDocument:
            continue
        if (report.attempt, report.replica, report.incarnation) != (attempt, stage.replica, stage.incarnation):
            continue
        if report.replica not in found or found[report.replica].rank < report.rank:
            found[report.replica] = report
    return found


def has_succeeded(report: Report | None) -> bool:
    """Whether the replica left the record that it has done all of its work."""
    return report is not None and report.completion is not None and report.completion.outcome is Outcome.SUCCEEDED


def _time(value: Any) -> str | None:
    """What a member calls a time, if it is one."""
    return value if parsed(value) is not None else None


def _trainer_status(status: Obj) -> Obj:
    containers = status.get("containerStatuses") or ()
    return next((item for item in containers if item.get("name") == names.TRAINER), {})


def is_held_open(raw: Obj) -> bool:
    """Whether the trainer has ended and another container runs on, so that the pod would never end by itself.

    The kubelet reports the trainer's end a moment before the pod's: that moment is not this.
    """
    others = [
        item for item in (raw.get("status") or {}).get("containerStatuses") or () if item["name"] != names.TRAINER
    ]
    return end_of(raw) is not None and any((item.get("state") or {}).get("running") is not None for item in others)


def _disrupted(status: Obj) -> bool:
    conditions = status.get("conditions") or ()
    return any(item.get("type") == "DisruptionTarget" and item.get("status") == "True" for item in conditions)


def gateway_words(member: str, pods: Iterable[Obj], attempt: int, deployment: str) -> str | None:
    """Why the gateway of a member passes nothing yet; None where a pod of it is ready."""
    words = f"{member}: the gateway has no pod yet (Deployment {deployment})"
    for raw in pods:
        labels = raw["metadata"].get("labels") or {}
        if labels.get(names.COMPONENT) != names.GATEWAY or labels.get(names.ATTEMPT) != str(attempt):
            continue
        status = raw.get("status") or {}
        container: Obj = next(iter(status.get("containerStatuses") or ()), {})
        if container.get("ready"):
            return None
        why = _blocked(status, names.GATEWAY) or "not ready yet"
        words = f"{member}/{raw['metadata']['name']}: {why}"
    return words


def _blocked(status: Obj, main: str) -> str | None:
    """Why a pod's `main` container can't start: by itself, or as one beside it, which is named then, can't."""
    containers = [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]
    for item in sorted(containers, key=lambda item: item.get("name") != main):
        waiting = (item.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            who = "" if item.get("name") == main else f"container {item.get('name')}: "
            return f"{who}{waiting['reason']}: {waiting.get('message') or 'no details'}"
    for item in status.get("conditions") or ():
        if item.get("type") == "PodScheduled" and item.get("status") == "False":
            return f"{item.get('reason')}: {item.get('message') or 'no details'}"
    return None
