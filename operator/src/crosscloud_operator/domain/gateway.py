"""A job's gateway in a member: HAProxy passes TLS connections to pods by server name, without seeing plain text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from crosscloud_operator.domain import manifests, names
from crosscloud_operator.domain.names import JobId
from crosscloud_operator.domain.settings import JobSettings
from crosscloud_trainer.contract import PeerTable
from crosscloud_trainer.pki import rank_server_name

Obj = dict[str, Any]

CONFIG_KEY = "haproxy.cfg"
CONFIG_DIR = "/etc/crosscloud/gateway"
_HEAD = """\
global
    log stdout format raw local0 notice
    maxconn 4096

defaults
    log global
    mode tcp
    option clitcpka
    option srvtcpka
    timeout connect 10s
    timeout client 1h
    timeout server 1h

# Pods come and go by their DNS names: an unknown one is asked for again, not an error at start.
resolvers cluster
    parse-resolv-conf
    hold valid 2s
    hold nx 1s
    hold other 1s
    hold timeout 1s
    resolve_retries 3
    timeout resolve 1s
    timeout retry 1s

frontend links
    bind :{port}
    tcp-request inspect-delay 10s
    tcp-request content accept if {{ req_ssl_hello_type 1 }}
    tcp-request content reject
"""


def configuration(table: PeerTable, ranks: dict[tuple[int, int, int], int], member: str, port: int) -> str:
    """haproxy.cfg of one member. `ranks`: how many ranks the pod (replica, stage, node) has."""
    rules, backends = [], []
    for peer in table.peers:
        if peer.member != member:
            continue
        for local in range(ranks[peer.replica, peer.stage, peer.node]):
            name = f"r{peer.replica}-s{peer.stage}-n{peer.node}-k{local}"
            server_name = rank_server_name(peer.server_name, local)
            rules.append(f"    use_backend {name} if {{ req_ssl_sni -i {server_name} }}\n")
            address = f"{peer.direct}:{peer.link_port + local}"
            backends.append(
                f"\nbackend {name}\n    server pod {address} resolvers cluster resolve-prefer ipv4 init-addr none\n"
            )
    return _HEAD.format(port=port) + "".join(rules) + "".join(backends)


def gateway(
    job: JobId, anchor_uid: str, attempt: int, config: str, settings: JobSettings, pull_secrets: Sequence[Obj]
) -> list[Obj]:
    """ConfigMap and Deployment: it comes back by itself while the hub is away."""
    name = names.gateway(job.name, attempt)
    meta = manifests.metadata(job, anchor_uid, name, names.GATEWAY, attempt)
    labels = meta["labels"]
    volume = {"name": "config", "configMap": {"name": name}}
    lost = [
        {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
        for what in ("not-ready", "unreachable")
    ]
    container = {
        "name": names.GATEWAY,
        "image": settings.gateway_image,
        "imagePullPolicy": settings.gateway_pull_policy,
        "command": ["haproxy", "-f", f"{CONFIG_DIR}/{CONFIG_KEY}"],
        "ports": [{"name": "link", "containerPort": settings.gateway_port, "protocol": "TCP"}],
        "readinessProbe": {"tcpSocket": {"port": settings.gateway_port}, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "config", "mountPath": CONFIG_DIR, "readOnly": True}],
    }
    pod: Obj = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": lost,
        "containers": [container],
        "volumes": [volume],
    }
    if pull_secrets:
        pod["imagePullSecrets"] = list(pull_secrets)
    # A changed configuration must start a new pod: HAProxy reads the file once.
    digest = hashlib.sha256(config.encode()).hexdigest()[:16]
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels, "annotations": {f"{names.GROUP}/config": digest}},
                "spec": pod,
            },
        },
    }
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {CONFIG_KEY: config}}, deployment]
