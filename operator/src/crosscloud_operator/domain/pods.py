"""The pods of an attempt: the user's podTemplate merged under what the contract needs.

Kept from the user: other containers and init containers, annotations and labels, volumes, env, resources, tolerations,
affinity, security contexts (his fields over our defaults; the member's Pod Security judges them), everything we don't
know. Ours, and refused in `spec.py` if the user sets it: command, gates, node, host name, restart policy, our mounts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crosscloud_operator.domain import manifests, names, scheduling, spec
from crosscloud_operator.domain.documents import PlannedPod
from crosscloud_operator.domain.settings import JobSettings
from crosscloud_operator.domain.spec import RESERVED, Job
from crosscloud_trainer.contract import ACKNOWLEDGED_KEY, LINK_PORT, METRICS_PORT

Obj = dict[str, Any]
Raw = Mapping[str, Any]

ROOT = spec.MOUNT_ROOT
USER = 65532
TOKEN_SECONDS = 3600
PRIVATE = 0o440  # the group is the pod's fsGroup


@dataclass(frozen=True)
class Mount:
    """A volume of ours and where the trainer finds it."""

    name: str
    path: str
    source: Obj
    read_only: bool = True


def pod(job: Job, planned: PlannedPod, anchor_uid: str, home: str, settings: JobSettings) -> Obj:
    """The gated pod, narrowed to the node that the plan gave it."""
    template = job.template.get("metadata") or {}
    mounts = _mounts(job, planned)
    own = names.pod_labels(job.id, planned.id)
    meta: Obj = {
        "name": planned.name,
        "namespace": job.id.namespace,
        "labels": {**(template.get("labels") or {}), **own},
        "ownerReferences": [manifests.owner(job.id, anchor_uid)],
    }
    if template.get("annotations"):
        meta["annotations"] = dict(template["annotations"])
    users = dict(job.pod_spec)
    containers = [dict(item) for item in users.get("containers") or ()]
    user_trainer = next((item for item in containers if item["name"] == names.TRAINER), {})
    others = [item for item in containers if item["name"] != names.TRAINER]
    pod_spec: Obj = {
        "enableServiceLinks": False,
        "serviceAccountName": names.reporter(job.id.name),
        **users,
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",
        "hostname": planned.name,
        "subdomain": names.peers_service(job.id.name),
        "schedulingGates": [{"name": names.GATE}],
        "affinity": _affinity(job.pod_spec, planned.node),
        "tolerations": list(spec.tolerations(job.pod_spec, settings)),
        "securityContext": {**_POD_SECURITY, **(users.get("securityContext") or {})},
        "containers": [_trainer(job, planned, user_trainer, mounts, home, settings), *others],
        "volumes": [*(users.get("volumes") or ()), *({"name": item.name, **item.source} for item in mounts)],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod_spec}


_POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def _trainer(
    job: Job, planned: PlannedPod, user: Raw, mounts: Sequence[Mount], home: str, settings: JobSettings
) -> Obj:
    resources = {key: dict(value) for key, value in (user.get("resources") or {}).items() if isinstance(value, Mapping)}
    for part in ("limits", "requests"):
        resources[part] = {**resources.get(part, {}), settings.gpu_resource: str(planned.gpus)}
    users_env = list(user.get("env") or ())
    given = {item.get("name") for item in users_env}
    ours_env = [item for item in _env(job, planned, home) if item["name"] not in given]
    taken = {item.get("mountPath") for item in user.get("volumeMounts") or ()}
    container: Obj = {
        "image": settings.trainer_image,
        "imagePullPolicy": settings.trainer_pull_policy,
        **user,
        "name": names.TRAINER,
        "command": ["crosscloud-trainer", "pod"],
        "env": [*users_env, *ours_env],
        "ports": [*(user.get("ports") or ()), *_ports(planned.gpus)],
        "resources": resources,
        "securityContext": {**_CONTAINER_SECURITY, **(user.get("securityContext") or {})},
        "volumeMounts": [
            *(user.get("volumeMounts") or ()),
            *(_volume_mount(item) for item in mounts if item.path not in taken),
        ],
    }
    if job.spec.storage.secret_name:
        reference = {"secretRef": {"name": names.storage_secret(job.id.name)}}
        container["envFrom"] = [*(user.get("envFrom") or ()), reference]
    return container


def _env(job: Job, planned: PlannedPod, home: str) -> list[Obj]:
    found = {
        "CROSSCLOUD_REPLICA": str(planned.id.replica),
        "CROSSCLOUD_STAGE": str(planned.id.stage),
        "CROSSCLOUD_NODE": str(planned.id.node),
        "CROSSCLOUD_INCARNATION": str(planned.id.incarnation),
        "CROSSCLOUD_RUN": f"{ROOT}/run/{manifests.RUN_KEY}",
        "CROSSCLOUD_PEERS": f"{ROOT}/peers/{manifests.PEERS_KEY}",
        "CROSSCLOUD_TLS": f"{ROOT}/tls",
        "HOME": "/tmp",  # noqa: S108 (a path in the pod, an emptyDir of its own)
    }
    if grace := job.pod_spec.get("terminationGracePeriodSeconds"):
        found["CROSSCLOUD_GRACE"] = str(grace)
    if planned.reports:
        report = names.report(job.id.name, planned.id.replica)
        found["CROSSCLOUD_REPORT"] = f"configmap:{job.id.namespace}/{report}"
        found["CROSSCLOUD_ACKNOWLEDGED"] = f"{ROOT}/anchor/{ACKNOWLEDGED_KEY}"
        if planned.member == home:
            found["CROSSCLOUD_REGISTER"] = f"configmap:{job.id.namespace}/{names.view(job.id.name)}"
    return [{"name": name, "value": value} for name, value in found.items()]


def _ports(gpus: int) -> list[Obj]:
    links = [{"name": f"link-{rank}", "containerPort": LINK_PORT + rank, "protocol": "TCP"} for rank in range(gpus)]
    return [*links, {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"}]


def _mounts(job: Job, planned: PlannedPod) -> list[Mount]:
    name, attempt = job.id.name, planned.id.attempt
    certificate, key = manifests.key_items(planned)
    items = [
        {"key": manifests.AUTHORITY_KEY, "path": "ca.crt"},
        {"key": certificate, "path": "tls.crt"},
        {"key": key, "path": "tls.key"},
    ]
    secret = {"secretName": names.keys_secret(name, attempt), "items": items, "defaultMode": PRIVATE}
    found = [
        Mount(f"{RESERVED}run", f"{ROOT}/run", {"configMap": {"name": names.run_document(name, attempt)}}),
        Mount(f"{RESERVED}peers", f"{ROOT}/peers", {"configMap": {"name": names.peer_table(name, attempt)}}),
        Mount(f"{RESERVED}tls", f"{ROOT}/tls", {"secret": secret}),
        Mount(f"{RESERVED}tmp", "/tmp", {"emptyDir": {}}, read_only=False),  # noqa: S108
        Mount(f"{RESERVED}shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}}, read_only=False),  # noqa: S108
    ]
    if planned.reports:
        token = {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_SECONDS}}
        authority = {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
        projected = {"projected": {"sources": [token, authority], "defaultMode": PRIVATE}}
        found.append(Mount(f"{RESERVED}report", f"{ROOT}/report", projected))
        found.append(Mount(f"{RESERVED}anchor", f"{ROOT}/anchor", {"configMap": {"name": names.anchor(name)}}))
    return found


def _volume_mount(mount: Mount) -> Obj:
    found: Obj = {"name": mount.name, "mountPath": mount.path}
    return found | {"readOnly": True} if mount.read_only else found


def _affinity(users: Raw, node: str) -> Obj:
    """The user's affinity, each of its required node terms narrowed to the planned node."""
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = scheduling.required_node_terms(users)
    narrowed = [
        # A pod's field selector may name a node once only: the user's own match on the name has let the planner choose.
        {**term, "matchFields": [field]}
        for term in terms or ()
        if term.get("matchExpressions") or term.get("matchFields")
    ] or [{"matchFields": [field]}]
    affinity = dict(users.get("affinity") or {})
    node_affinity = dict(affinity.get("nodeAffinity") or {})
    node_affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": narrowed}
    return affinity | {"nodeAffinity": node_affinity}
