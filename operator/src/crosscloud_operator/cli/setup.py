"""The objects that `crosscloud member add` makes, as values. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from crosscloud_operator.kube.api import MEMBER, Obj
from crosscloud_operator.kube.credentials import SECRET_KEY
from crosscloud_operator.kube.rights import MEMBER_RUN_RIGHTS, MEMBER_VIEW_RIGHTS, Right

NAMESPACE = "crosscloud-system"
ACCOUNT = "crosscloud-operator"
VIEW, RUN, TOKEN = f"{ACCOUNT}-view", f"{ACCOUNT}-run", f"{ACCOUNT}-token"
MARK = {"app.kubernetes.io/name": "crosscloud", "app.kubernetes.io/managed-by": "crosscloud-cli"}
MARK_SELECTOR = ",".join(f"{key}={value}" for key, value in MARK.items())
NAME_LABEL = "kubernetes.io/metadata.name"

_RBAC = "rbac.authorization.k8s.io"


def account_objects() -> list[Obj]:
    """In the member: who the operator is there, what it may see, and that it may renew its own token."""
    return [
        _object("v1", "Namespace", NAMESPACE),
        _object("v1", "ServiceAccount", ACCOUNT, NAMESPACE),
        _cluster_role(VIEW, MEMBER_VIEW_RIGHTS),
        _cluster_role(RUN, MEMBER_RUN_RIGHTS),
        _binding("ClusterRoleBinding", VIEW, "ClusterRole", VIEW),
        _object(
            f"{_RBAC}/v1",
            "Role",
            TOKEN,
            NAMESPACE,
            rules=[
                {
                    "apiGroups": [""],
                    "resources": ["serviceaccounts/token"],
                    "resourceNames": [ACCOUNT],
                    "verbs": ["create"],
                }
            ],
        ),
        _binding("RoleBinding", TOKEN, "Role", TOKEN, NAMESPACE),
    ]


def run_objects(allowed: Mapping[str, Any] | None) -> list[Obj]:
    """In the member: where the operator may run jobs. By names: there only. By labels: everywhere, since the
    namespaces that will carry them can't be known."""
    if allowed is None:
        return []
    names = allowed_names(allowed)
    if names is None:
        return [_binding("ClusterRoleBinding", RUN, "ClusterRole", RUN)]
    found = [_object("v1", "Namespace", name, marked=False) for name in names]
    return found + [_binding("RoleBinding", RUN, "ClusterRole", RUN, name) for name in names]


def allowed_by_names(names: Sequence[str]) -> Obj:
    """`spec.allowedNamespaces` for these namespaces."""
    return {"matchExpressions": [{"key": NAME_LABEL, "operator": "In", "values": sorted(set(names))}]}


def allowed_names(allowed: Mapping[str, Any]) -> list[str] | None:
    """The namespaces that a selector names one by one; None where it goes by other labels."""
    labels, expressions = allowed.get("matchLabels") or {}, allowed.get("matchExpressions") or []
    if not labels and len(expressions) == 1:
        only = expressions[0]
        if only.get("key") == NAME_LABEL and only.get("operator") == "In":
            return [str(value) for value in only.get("values") or ()]
    if not expressions and set(labels) == {NAME_LABEL}:
        return [str(labels[NAME_LABEL])]
    return None


def secret_name(member: str) -> str:
    return f"member-{member}"


def hub_objects(member: str, namespace: str, kubeconfig: str, allowed: Obj | None, gateway: Obj) -> list[Obj]:
    """On the hub: the Secret with the kubeconfig, and the MemberCluster that names it."""
    spec: Obj = {"access": {"kubeconfigSecret": {"name": secret_name(member)}}, "gateway": gateway}
    if allowed is not None:
        spec["allowedNamespaces"] = allowed
    data = {SECRET_KEY: base64.b64encode(kubeconfig.encode()).decode()}
    return [
        _object("v1", "Secret", secret_name(member), namespace, type="Opaque", data=data),
        _object(MEMBER.api_version, MEMBER.kind, member, spec=spec),
    ]


def _cluster_role(name: str, rights: Sequence[Right]) -> Obj:
    return _object(f"{_RBAC}/v1", "ClusterRole", name, rules=[right.rule() for right in rights])


def _binding(kind: str, name: str, role_kind: str, role: str, namespace: str | None = None) -> Obj:
    return _object(
        f"{_RBAC}/v1",
        kind,
        name,
        namespace,
        roleRef={"apiGroup": _RBAC, "kind": role_kind, "name": role},
        subjects=[{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}],
    )


def _object(
    api_version: str, kind: str, name: str, namespace: str | None = None, marked: bool = True, **fields: Any
) -> Obj:
    meta: Obj = {"name": name}
    if namespace is not None:
        meta["namespace"] = namespace
    if marked:
        meta["labels"] = dict(MARK)
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **fields}
