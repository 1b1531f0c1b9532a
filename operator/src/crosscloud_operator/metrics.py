"""What Prometheus sees. Series of jobs and members are made from the informers at each scrape, so that those of a
deleted job are gone with it; the hub re-exports the replicas' reports, since it can't scrape pods in members.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from crosscloud_operator.domain import names
from crosscloud_operator.domain.record import condition_in, parsed
from crosscloud_operator.kube.api import CONFIG_MAP, Obj
from crosscloud_operator.kube.credentials import life_of
from crosscloud_operator.kube.duplicates import duplicates
from crosscloud_operator.kube.workqueue import Outcome
from crosscloud_operator.kube.world import KubeWorld
from crosscloud_trainer.contract import REPORT_KEY, InvalidDocument, Report, read_json

JOB_LABELS = ("namespace", "job")
REPLICA_LABELS = (*JOB_LABELS, "replica")


class OperatorMetrics:
    """The registry of one operator process: counters of its own work, and the collector of what it sees."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the series and tell nobody anything
        self.registry = CollectorRegistry()
        self._seconds = Histogram(
            "crosscloud_operator_reconcile_seconds",
            "Time that one look at a job took.",
            registry=self.registry,
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
        )
        self._errors = Counter(
            "crosscloud_operator_reconcile_errors",
            "Looks at a job that ended in an error, by kind of error.",
            ("error",),
            registry=self.registry,
        )

    def reconciled(self, outcome: Outcome) -> None:
        """Count one look at a job."""
        self._seconds.observe(outcome.seconds)
        if outcome.error:
            self._errors.labels(outcome.error).inc()

    def watch(self, world: Callable[[], KubeWorld | None], leading: Callable[[], bool]) -> None:
        """Export what the world shows; nothing of it while there is none (standing by)."""
        self.registry.register(_WorldCollector(world, leading))


class _WorldCollector(Collector):
    def __init__(self, world: Callable[[], KubeWorld | None], leading: Callable[[], bool]) -> None:
        self._world = world
        self._leading = leading

    def collect(self) -> Iterator[Metric]:
        leader = GaugeMetricFamily("crosscloud_operator_leader", "1 where this process holds the Lease.")
        leader.add_metric([], float(self._leading()))
        yield leader
        world = self._world()
        if world is None:
            return
        now = time.time()
        yield from _job_families(world.jobs(), now)
        yield from _replica_families(world.jobs(), _reports(world), now)
        yield from _member_families(world, now)
        age = GaugeMetricFamily(
            "crosscloud_operator_last_event_age_seconds",
            "Time since the last word from a cluster, bookmarks included.",
            labels=("cluster",),
        )
        for name, at in world.last_contact().items():
            age.add_metric([name], max(0.0, now - at))
        yield age


def _job_families(jobs: Iterable[Obj], now: float) -> Iterator[Metric]:
    families: dict[str, Metric] = {}

    def put(
        name: str, text: str, labels: list[str], value: Any, counter: bool = False, extra: tuple[str, ...] = ()
    ) -> None:
        number = _number(value)
        if number is None:
            return
        if name not in families:
            make = CounterMetricFamily if counter else GaugeMetricFamily
            families[name] = make(f"crosscloud_{name}", text, labels=(*JOB_LABELS, *extra))
        families[name].add_metric(labels, number)  # type: ignore[attr-defined]

    counts: dict[str, int] = {}
    for job in jobs:
        meta, status = job["metadata"], job.get("status") or {}
        labels = [meta["namespace"], meta["name"]]
        reason, since = _running(status)
        counts[reason] = counts.get(reason, 0) + 1
        put("job_info", "1 for each job; status is the reason of its condition Running.", [*labels, reason], 1,
            extra=("status",))  # fmt: skip
        progress = status.get("progress") or {}
        put("job_step", "Inner steps done.", labels, progress.get("step"))
        put("job_total_steps", "Inner steps that the job will take.", labels, progress.get("totalSteps"))
        put("job_round", "Rounds done.", labels, progress.get("round"))
        put("job_tokens", "Tokens trained on.", labels, progress.get("tokens"), counter=True)
        put("job_tokens_per_second", "Tokens trained on per second.", labels, progress.get("tokensPerSecond"))
        put("job_attempt", "Number of the attempt.", labels, (status.get("attempt") or {}).get("number"))
        put("job_restarts", "Attempts that followed one that ran.", labels, status.get("restarts", 0), counter=True)
        waiting = now - since if reason == "Waiting" and since is not None else 0.0
        put("job_placement_waiting_seconds", "How long the job has waited for room; 0 when placed.", labels, waiting)
        created = parsed(meta.get("creationTimestamp"))
        put("job_created_timestamp_seconds", "When the job was made.", labels, created)
    state = GaugeMetricFamily("crosscloud_jobs", "Jobs by the reason of their condition Running.", labels=("status",))
    for reason, count in sorted(counts.items()):
        state.add_metric([reason], count)
    yield state
    yield from families.values()


# Report field, metric, whether it is a counter, text.
_PROGRESS: tuple[tuple[str, str, bool, str], ...] = (
    ("step", "job_replica_step", False, "Inner steps that the replica has done."),
    ("loss", "job_loss", False, "Training loss of the replica."),
    ("validation_loss", "job_validation_loss", False, "Validation loss of the replica."),
    ("tokens", "job_replica_tokens", True, "Tokens that the replica has trained on."),
    ("tokens_per_second", "job_replica_tokens_per_second", False, "Tokens that the replica trains on per second."),
    ("wan_bytes_sent", "job_wan_bytes", True, "Bytes that the replica has sent to others over links."),
    ("wan_bytes_received", "job_wan_received_bytes", True, "Bytes that the replica has received over links."),
    ("dense_bytes", "job_dense_bytes", True, "Bytes that an exchange in fp32 at every step would have sent so far."),
    ("skipped_steps", "job_skipped_steps", True, "Inner steps skipped for gradients that were not finite."),
    ("skipped_rounds", "job_skipped_rounds", True, "Rounds without the replica's update, which was not finite."),
    ("digest_mismatches", "job_digest_mismatches", True, "Rounds before which the replicas' outer states differed."),
    ("unsaved_steps", "job_unsaved_steps", False, "Inner steps since the last checkpoint, or since the start."),
    ("residual_norm", "job_residual_norm", False, "Norm of what encoding has lost and later updates bring."),
)


def _replica_families(jobs: Iterable[Obj], reports: Mapping[tuple[str, int], Report], now: float) -> Iterator[Metric]:
    placed = {job["metadata"]["uid"]: [job["metadata"]["namespace"], job["metadata"]["name"]] for job in jobs}
    known = [([*placed[uid], str(replica)], item) for (uid, replica), item in sorted(reports.items()) if uid in placed]
    for attribute, name, counter, text in _PROGRESS:
        make = CounterMetricFamily if counter else GaugeMetricFamily
        family = make(f"crosscloud_{name}", text, labels=REPLICA_LABELS)
        for labels, report in known:
            if (value := getattr(report.progress, attribute)) is not None:
                family.add_metric(labels, float(value))
        yield family
    waiting = GaugeMetricFamily(
        "crosscloud_job_waiting_seconds", "How long the replica has waited at a round; 0 while it trains.",
        labels=REPLICA_LABELS,
    )  # fmt: skip
    age = GaugeMetricFamily(
        "crosscloud_job_report_age_seconds", "Time since the replica's last report.", labels=REPLICA_LABELS
    )
    seconds = CounterMetricFamily(
        "crosscloud_job_seconds", "Time that the replica has spent, by activity.", labels=(*REPLICA_LABELS, "activity")
    )
    checkpoint = GaugeMetricFamily(
        "crosscloud_job_checkpoint_age_seconds", "Time since the replica's last checkpoint, or since the start.",
        labels=REPLICA_LABELS,
    )  # fmt: skip
    for labels, report in known:
        progress = report.progress
        for activity, spent in progress.seconds.items():
            seconds.add_metric([*labels, activity], spent)
        if (saved := parsed(progress.saved_at)) is not None:
            checkpoint.add_metric(labels, max(0.0, now - saved))
        since = parsed(progress.waiting_since)
        waiting.add_metric(labels, max(0.0, now - since) if since is not None else 0.0)
        if (at := parsed(report.time)) is not None:
            age.add_metric(labels, max(0.0, now - at))
    yield from (waiting, age, seconds, checkpoint)


def _member_families(world: KubeWorld, now: float) -> Iterator[Metric]:
    def gauge(name: str, text: str, *extra: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"crosscloud_member_{name}", text, labels=("member", *extra))

    reachable = gauge("reachable", "1 where the member's API server answers.")
    lost = gauge("unreachable_seconds", "How long the member has been out of reach; 0 where it is not.")
    expiry = gauge("credentials_expiry_seconds", "Time until the member's credentials end; +Inf where they don't.")
    total = gauge("gpus", "GPUs of a node pool.", "pool", "gpu")
    free = gauge("free_gpus", "GPUs of a node pool that no bound pod has asked for.", "pool", "gpu")
    running, doubled = world.running_members(), duplicates(world)
    for obj in world.members():
        name = obj["metadata"]["name"]
        member = running.get(name)
        since = member.unreachable_since if member else None
        reachable.add_metric([name], float(member is not None and member.synced and since is None))
        lost.add_metric([name], max(0.0, now - since) if since is not None else 0.0)
        if member is None:
            continue
        expires = life_of(member.cluster.access).expires
        expiry.add_metric([name], math.inf if expires is None else expires - now)
        for pool in member.pools() if member.synced and name not in doubled else ():
            total.add_metric([name, pool.name, pool.gpu], pool.total)
            free.add_metric([name, pool.name, pool.gpu], pool.free)
    yield from (reachable, lost, expiry, total, free)


def _reports(world: KubeWorld) -> dict[tuple[str, int], Report]:
    """The newest report of each (job UID, replica)."""
    found: dict[tuple[str, int], Report] = {}
    for member in world.running_members().values():
        for obj in member.informers[CONFIG_MAP].objects():
            text = (obj.get("data") or {}).get(REPORT_KEY)
            uid = (obj["metadata"].get("labels") or {}).get(names.JOB_UID)
            if not text or not uid:
                continue
            try:
                report = read_json(Report, text)
            except InvalidDocument:
                continue  # reconcile tells about it
            before = found.get((uid, report.replica))
            if before is None or before.rank < report.rank:
                found[uid, report.replica] = report
    return found


def _running(status: Mapping[str, Any]) -> tuple[str, float | None]:
    """Reason of the condition Running, and since when its status holds."""
    running = condition_in(status, "Running")
    return (str(running.get("reason")), parsed(running.get("lastTransitionTime"))) if running else ("New", None)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
