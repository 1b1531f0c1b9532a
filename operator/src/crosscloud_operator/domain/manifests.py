"""The objects that the operator makes in a member beside pods and gateway, as values.

Two lives: objects of the job (anchor, Services, reports, view, RBAC, NetworkPolicy, storage Secret) stay until the job
is deleted; those of an attempt carry its number as a label and go when it ends. The anchor owns all the others.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from crosscloud_operator.domain import names
from crosscloud_operator.domain.documents import PlannedPod
from crosscloud_operator.domain.names import JobId
from crosscloud_trainer.contract import (
    ACKNOWLEDGED_KEY,
    LINK_PORT,
    METRICS_PORT,
    Acknowledged,
    PeerTable,
    RunDocument,
    StoredCheckpoint,
    dump_json,
)
from crosscloud_trainer.pki import PodCertificate

Obj = dict[str, Any]

RUN_KEY = "run.json"
PEERS_KEY = "peers.json"
AUTHORITY_KEY = "ca.crt"


def anchor(job: JobId, checkpoints: Sequence[StoredCheckpoint] = ()) -> Obj:
    """Owns everything that we make in this member; deleting it cleans the member.

    `checkpoints` are those that the job's status has: the trainer deletes no other before it has read that here.
    """
    meta = {"name": names.anchor(job.name), "namespace": job.namespace, "labels": names.labels(job, "anchor")}
    data = {"job": f"{job.namespace}/{job.name}"}
    if checkpoints:
        data[ACKNOWLEDGED_KEY] = dump_json(Acknowledged(tuple(checkpoints)))
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}


def owner(job: JobId, anchor_uid: str) -> Obj:
    """`controller: true`, or a drain would refuse our pods."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": names.anchor(job.name),
        "uid": anchor_uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def metadata(job: JobId, anchor_uid: str, name: str, component: str, attempt: int | None = None) -> Obj:
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": names.labels(job, component, attempt),
        "ownerReferences": [owner(job, anchor_uid)],
    }


def services(job: JobId, anchor_uid: str, gateway_port: int, *, gateway: bool) -> list[Obj]:
    """The headless Service that gives pods their names and, for a job over several members, the gateway's NodePort."""
    pods = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, anchor_uid, names.peers_service(job.name), "pods"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _selector(job, names.TRAINER),
            "ports": [{"name": "link", "port": LINK_PORT, "targetPort": LINK_PORT, "protocol": "TCP"}],
        },
    }
    if not gateway:
        return [pods]
    entrance = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, anchor_uid, names.gateway_service(job.name), names.GATEWAY),
        "spec": {
            "type": "NodePort",
            "selector": _selector(job, names.GATEWAY),
            "ports": [{"name": "link", "port": gateway_port, "targetPort": gateway_port, "protocol": "TCP"}],
        },
    }
    return [pods, entrance]


def reports(job: JobId, anchor_uid: str, replicas: Sequence[int]) -> list[Obj]:
    """One empty ConfigMap per replica in this member; only its rank 0 writes into it."""
    return [
        _config_map(metadata(job, anchor_uid, names.report(job.name, replica), "report"), {}) for replica in replicas
    ]


def view(job: JobId, anchor_uid: str) -> Obj:
    """In the home only: the register of the view."""
    return _config_map(metadata(job, anchor_uid, names.view(job.name), "view"), {})


def reporter(job: JobId, anchor_uid: str, writable: Sequence[str], account: str | None) -> list[Obj]:
    """Leave to read and patch just the ConfigMaps in `writable`, for an account of ours or the user's own `account`.

    Each has a Role of its own, called like it: a later attempt may need another one here, and no Role is ever changed.
    """
    name = account or names.reporter(job.name)
    found: list[Obj] = []
    if account is None:
        meta = metadata(job, anchor_uid, name, "reporter")
        found.append(
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta, "automountServiceAccountToken": False}
        )
    subject = {"kind": "ServiceAccount", "name": name, "namespace": job.namespace}
    for config_map in writable:
        found += _leave(metadata(job, anchor_uid, config_map, "reporter"), config_map, subject)
    return found


def _leave(meta: Obj, config_map: str, subject: Obj) -> list[Obj]:
    """Role and RoleBinding that let the subject read and patch one ConfigMap."""
    group = "rbac.authorization.k8s.io"
    rule = {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [config_map], "verbs": ["get", "patch"]}
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": meta, "rules": [rule]}
    reference = {"apiGroup": group, "kind": "Role", "name": config_map}
    binding = {"kind": "RoleBinding", "metadata": meta, "roleRef": reference, "subjects": [subject]}
    return [role, {"apiVersion": f"{group}/v1", **binding}]


def network_policy(job: JobId, anchor_uid: str) -> Obj:
    """Trainer pods take connections from pods of their job (the gateway is one), and scrapes of their metrics."""
    same_job = {"podSelector": {"matchLabels": {names.HUB: job.hub, names.JOB_UID: job.uid}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, anchor_uid, names.network_policy(job.name), "network-policy"),
        "spec": {
            "podSelector": {"matchLabels": _selector(job, names.TRAINER)},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [same_job]}, {"ports": [{"protocol": "TCP", "port": METRICS_PORT}]}],
        },
    }


def storage_secret(job: JobId, anchor_uid: str, data: Mapping[str, str]) -> Obj:
    """A copy of the Secret that the user made once, on the hub; `data` is base64 as the API holds it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, anchor_uid, names.storage_secret(job.name), "storage"),
        "type": "Opaque",
        "data": dict(data),
    }


def run_document(job: JobId, anchor_uid: str, document: RunDocument) -> Obj:
    name = names.run_document(job.name, document.attempt)
    meta = metadata(job, anchor_uid, name, "run", document.attempt)
    return _config_map(meta, {RUN_KEY: dump_json(document)}) | {"immutable": True}


def peer_table(job: JobId, anchor_uid: str, table: PeerTable) -> Obj:
    name = names.peer_table(job.name, table.attempt)
    return _config_map(metadata(job, anchor_uid, name, "peers", table.attempt), {PEERS_KEY: dump_json(table)})


def keys_secret(
    job: JobId, anchor_uid: str, attempt: int, authority: bytes, keys: Mapping[PlannedPod, PodCertificate]
) -> Obj:
    """The keys of one member's pods; each pod mounts only its own items."""
    data = {AUTHORITY_KEY: _base64(authority)}
    for pod, pair in keys.items():
        certificate, key = key_items(pod)
        data |= {certificate: _base64(pair.certificate), key: _base64(pair.key)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, anchor_uid, names.keys_secret(job.name, attempt), "keys", attempt),
        "type": "Opaque",
        "immutable": True,
        "data": data,
    }


def key_items(pod: PlannedPod) -> tuple[str, str]:
    """Where a pod's certificate and key lie in its member's Secret."""
    stem = f"r{pod.id.replica}-s{pod.id.stage}-n{pod.id.node}-i{pod.id.incarnation}"
    return f"{stem}.crt", f"{stem}.key"


def authority_secret(job: JobId, namespace: str, certificate: bytes, key: bytes) -> Obj:
    """On the hub only: what issues the certificates of one job."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": names.authority_secret(job.uid),
            "namespace": namespace,
            "labels": names.labels(job, "authority"),
        },
        "type": "Opaque",
        "data": {"tls.crt": _base64(certificate), "tls.key": _base64(key)},
    }


def _selector(job: JobId, component: str) -> dict[str, str]:
    return {names.HUB: job.hub, names.JOB_UID: job.uid, names.COMPONENT: component}


def _config_map(meta: Obj, data: Mapping[str, str]) -> Obj:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": dict(data)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
