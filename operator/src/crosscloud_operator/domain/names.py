"""Every name and label that is derived from a job, built here and nowhere else.

A derived name is a DNS-1035 label (at most 63 characters, a letter in front), so that it may name a Service and be a
host name. `{job}{suffix}` is used as it is where that holds; else the job's part is cut and a hash of the whole job
name put behind it. The set of suffixes is chosen so that no two jobs can come to one name without a hash collision.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from crosscloud_trainer.contract import API_VERSION

LIMIT = 63
GROUP = API_VERSION.partition("/")[0]
FINALIZER = f"{GROUP}/cleanup"
GATE = f"{GROUP}/gang"

HUB = f"{GROUP}/hub"
JOB_UID = f"{GROUP}/job-uid"
JOB = f"{GROUP}/job"
ATTEMPT = f"{GROUP}/attempt"
REPLICA = f"{GROUP}/replica"
INCARNATION = f"{GROUP}/incarnation"
STAGE = f"{GROUP}/stage"
NODE = f"{GROUP}/node"
APP = "app.kubernetes.io/name"
MANAGED_BY = "app.kubernetes.io/managed-by"
COMPONENT = "app.kubernetes.io/component"

TRAINER = "trainer"  # the main container's name, and the component of its pods
GATEWAY = "gateway"

_HASH_LENGTH = 10
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True)
class JobId:
    """Who a job is: the hub that holds it, and what its API server calls it."""

    hub: str
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True)
class PodId:
    """Which pod of a job: (replica, stage, node) in an attempt and an incarnation."""

    attempt: int
    replica: int
    incarnation: int
    stage: int
    node: int


def digest(text: str) -> str:
    """Ten characters of [a-z2-7] (50 bits) that are the same for the same text on every machine."""
    return base64.b32encode(hashlib.sha256(text.encode()).digest()).decode().lower()[:_HASH_LENGTH]


def derived(job: str, suffix: str) -> str:
    """`{job}{suffix}` as a DNS-1035 label of at most 63 characters."""
    if _LABEL.fullmatch(job) and len(job) + len(suffix) <= LIMIT:
        return job + suffix
    slug = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")
    slug = slug if slug[:1].isalpha() else f"j{slug}"
    room = LIMIT - len(suffix) - _HASH_LENGTH - 1
    return f"{slug[:room].rstrip('-')}-{digest(job)}{suffix}"


def anchor(job: str) -> str:
    return derived(job, "-anchor")


def peers_service(job: str) -> str:
    """The headless Service: `{pod}.{this}.{namespace}.svc` is a pod's address."""
    return derived(job, "-pods")


def gateway_service(job: str) -> str:
    return derived(job, "-gateway")


def reporter(job: str) -> str:
    """ServiceAccount of the pods that write reports; its Roles are called like the ConfigMaps that they open."""
    return derived(job, "-reporter")


def network_policy(job: str) -> str:
    return derived(job, "-pods")


def view(job: str) -> str:
    return derived(job, "-view")


def report(job: str, replica: int) -> str:
    return derived(job, f"-r{replica}-report")


def storage_secret(job: str) -> str:
    return derived(job, "-storage")


def run_document(job: str, attempt: int) -> str:
    return derived(job, f"-a{attempt}-run")


def peer_table(job: str, attempt: int) -> str:
    return derived(job, f"-a{attempt}-peers")


def keys_secret(job: str, attempt: int) -> str:
    return derived(job, f"-a{attempt}-keys")


def gateway(job: str, attempt: int) -> str:
    """The gateway's Deployment and the ConfigMap with its configuration."""
    return derived(job, f"-a{attempt}-gateway")


def pod(job: str, pod_id: PodId) -> str:
    p = pod_id
    return derived(job, f"-a{p.attempt}-r{p.replica}-i{p.incarnation}-s{p.stage}-n{p.node}")


def authority_secret(uid: str) -> str:
    """On the hub: the key of a job's certificate authority."""
    return derived("crosscloud-authority", f"-{uid}")


def event(job: str, key: str) -> str:
    """One name per thing that is told, so that telling it twice makes one Event."""
    return derived(job, f"-{digest(key)}")


def host(job: str, pod_id: PodId, namespace: str, cluster_domain: str) -> str:
    """A pod's DNS name inside its member."""
    return f"{pod(job, pod_id)}.{peers_service(job)}.{namespace}.svc.{cluster_domain}"


def labels(job: JobId, component: str, attempt: int | None = None) -> dict[str, str]:
    """What marks an object as ours; only objects with the hub's id and the job's UID are ever changed or deleted."""
    found = {
        APP: "crosscloud",
        MANAGED_BY: "crosscloud-operator",
        COMPONENT: component,
        HUB: job.hub,
        JOB_UID: job.uid,
        JOB: derived(job.name, ""),
    }
    return found if attempt is None else found | {ATTEMPT: str(attempt)}


def pod_labels(job: JobId, pod_id: PodId) -> dict[str, str]:
    return labels(job, TRAINER, pod_id.attempt) | {
        REPLICA: str(pod_id.replica),
        INCARNATION: str(pod_id.incarnation),
        STAGE: str(pod_id.stage),
        NODE: str(pod_id.node),
    }


def selector(job: JobId) -> str:
    """The label selector of a job's objects."""
    return f"{HUB}={job.hub},{JOB_UID}={job.uid}"


def is_ours(obj: Mapping[str, object], job: JobId) -> bool:
    """Whether this object was made by this hub for this very job (UID, not name)."""
    marks = _labels_of(obj)
    return marks.get(HUB) == job.hub and marks.get(JOB_UID) == job.uid


def is_of_earlier_job(obj: Mapping[str, object], job: JobId) -> bool:
    """Whether this hub made it for a job of the same name that has been deleted since: it will go by itself."""
    marks = _labels_of(obj)
    return (
        marks.get(HUB) == job.hub
        and marks.get(JOB) == derived(job.name, "")
        and marks.get(JOB_UID) not in (None, job.uid)
    )


def _labels_of(obj: Mapping[str, object]) -> Mapping[str, object]:
    metadata = obj.get("metadata")
    found = metadata.get("labels") if isinstance(metadata, Mapping) else None
    return found if isinstance(found, Mapping) else {}
