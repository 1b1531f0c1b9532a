"""`crosscloud member` against two real API servers: a hub and a member."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer
from crdfiles import JOBS, job, minimal_spec

from crosscloud_operator.kube.kubeconfig import vet
from crosscloud_operator.kube.rights import MEMBER_RUN_RIGHTS, MEMBER_VIEW_RIGHTS, Right

from .conftest import Command, world_at_work

SYSTEM = "crosscloud-system"
ME = f"system:serviceaccount:{SYSTEM}:crosscloud-operator"


def node(api: ApiServer, name: str, gpus: int) -> None:
    amount = {"nvidia.com/gpu": str(gpus)}
    status = {"capacity": amount, "allocatable": amount, "conditions": [{"type": "Ready", "status": "True"}]}
    meta = {"name": name, "labels": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}}
    assert api.raw("POST", "/api/v1/nodes", {"metadata": meta, "status": status})[0] in (201, 409)


def stored(hub_api: ApiServer, member: str) -> str:
    found = hub_api.request("GET", f"/api/v1/namespaces/{SYSTEM}/secrets/member-{member}")
    return base64.b64decode(found["data"]["kubeconfig"]).decode()


def spec(hub_api: ApiServer, member: str) -> dict[str, Any]:
    found: dict[str, Any] = hub_api.request("GET", f"/apis/crosscloud.dev/v1alpha1/memberclusters/{member}")
    return found["spec"]


def may(api: ApiServer, verb: str, resource: str, namespace: str | None, group: str = "", name: str = "") -> bool:
    """What the API server itself says of the operator's account."""
    resource, _, subresource = resource.partition("/")
    asked = {"verb": verb, "resource": resource, "subresource": subresource, "group": group, "name": name}
    if namespace:
        asked["namespace"] = namespace
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{SYSTEM}", "system:authenticated"]
    review = {"spec": {"user": ME, "groups": groups, "resourceAttributes": asked}}
    answer = api.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def test_a_member_is_added_becomes_ready_and_shows_its_gpus(
    crosscloud: Command, hub_api: ApiServer, east_api: ApiServer
) -> None:
    node(east_api, "n1", 4)
    with world_at_work(hub_api):
        out = crosscloud("member", "add", "east", "--kubeconfig", str(east_api.kubeconfig), "--allow-namespace", "ml")
        assert "east is Ready" in out
        assert "NVIDIA-A100-SXM4-80GB" in out
        listed = crosscloud("member", "list")
    assert "Connected" in listed
    assert "ml" in listed
    assert spec(hub_api, "east") == {
        "access": {"kubeconfigSecret": {"name": "member-east"}},
        "allowedNamespaces": {
            "matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["ml"]}]
        },
        "gateway": {"type": "NodePort"},
    }
    assert east_api.request("GET", "/api/v1/namespaces/ml")["metadata"]["name"] == "ml"


def test_what_is_stored_is_a_token_of_the_members_own_account_and_nothing_of_the_administrator(
    crosscloud: Command, hub_api: ApiServer, east_api: ApiServer
) -> None:
    crosscloud("member", "add", "east", "--kubeconfig", str(east_api.kubeconfig), "--timeout", "0")
    text = stored(hub_api, "east")
    access = vet(text)
    assert access.token is not None
    assert access.certificate is None
    claims = json.loads(base64.urlsafe_b64decode(access.token.split(".")[1] + "=="))
    assert claims["sub"] == ME
    admin = json.loads(east_api.kubeconfig.read_text())["users"][0]["user"]
    assert admin["client-key-data"] not in text


def test_the_account_has_the_rights_of_the_table_in_the_allowed_namespaces_and_no_others(
    crosscloud: Command, east_api: ApiServer
) -> None:
    arguments = ("member", "add", "east", "--kubeconfig", str(east_api.kubeconfig), "--timeout", "0")
    crosscloud(*arguments, "--allow-namespace", "ml", "--allow-namespace", "lab")
    for right in MEMBER_RUN_RIGHTS:
        for verb, resource in ((verb, resource) for verb in right.verbs for resource in right.resources):
            assert may(east_api, verb, resource, "ml", right.group)
            assert may(east_api, verb, resource, "lab", right.group)
            seen = any(has(item, right.group, resource, verb) for item in MEMBER_VIEW_RIGHTS)
            assert may(east_api, verb, resource, "kube-system", right.group) == seen
    for right in MEMBER_VIEW_RIGHTS:
        for verb, resource in ((verb, resource) for verb in right.verbs for resource in right.resources):
            assert may(east_api, verb, resource, None, right.group)
    assert not may(east_api, "get", "secrets", SYSTEM)
    assert not may(east_api, "list", "secrets", "ml")
    assert not may(east_api, "create", "nodes", None)
    assert may(east_api, "create", "serviceaccounts/token", SYSTEM, name="crosscloud-operator")
    assert not may(east_api, "create", "serviceaccounts/token", SYSTEM, name="default")
    assert not may(east_api, "create", "serviceaccounts/token", "ml", name="default")


def has(right: Right, group: str, resource: str, verb: str) -> bool:
    return right.group == group and resource in right.resources and verb in right.verbs


def test_adding_again_keeps_what_is_right_and_takes_rights_back_where_jobs_may_no_longer_run(
    crosscloud: Command, hub_api: ApiServer, east_api: ApiServer
) -> None:
    arguments = ("member", "add", "east", "--kubeconfig", str(east_api.kubeconfig), "--timeout", "0")
    crosscloud(*arguments, "--allow-namespace", "ml", "--gateway-address", "east.example")
    before = spec(hub_api, "east")
    again = crosscloud(*arguments)
    assert "created" not in again
    assert spec(hub_api, "east") == before
    moved = crosscloud(*arguments, "--allow-namespace", "lab")
    assert "RoleBinding ml/crosscloud-operator-run: deleted" in moved
    assert may(east_api, "create", "pods", "lab")
    assert not may(east_api, "create", "pods", "ml")
    assert spec(hub_api, "east")["gateway"]["address"] == "east.example"
    everywhere = crosscloud(*arguments, "--allow-selector", "team=ml")
    assert "ClusterRoleBinding crosscloud-operator-run: created" in everywhere
    assert spec(hub_api, "east")["allowedNamespaces"] == {"matchLabels": {"team": "ml"}}
    assert may(east_api, "create", "pods", "ml")
    crosscloud(*arguments, "--allow-namespace", "ml")
    assert spec(hub_api, "east")["allowedNamespaces"].keys() == {"matchExpressions"}
    assert not may(east_api, "create", "pods", "lab")


def test_a_cluster_that_is_a_member_already_is_not_added_under_another_name(
    crosscloud: Command, hub_api: ApiServer, east_api: ApiServer
) -> None:
    kubeconfig = ("--kubeconfig", str(east_api.kubeconfig))
    with world_at_work(hub_api):
        crosscloud("member", "add", "east", *kubeconfig)
        for more in ((), ("--dry-run",)):
            out = " ".join(crosscloud("member", "add", "twin", *kubeconfig, *more, code=1).split())
            assert "--kubeconfig: its cluster is the member east already" in out
            assert "crosscloud member remove east" in out
        assert hub_api.raw("GET", "/apis/crosscloud.dev/v1alpha1/memberclusters/twin")[0] == 404
        assert hub_api.raw("GET", f"/api/v1/namespaces/{SYSTEM}/secrets/member-twin")[0] == 404
        assert "east is Ready" in crosscloud("member", "add", "east", *kubeconfig)
        # One that came in by hand goes without the rights of the other.
        twin = {"metadata": {"name": "twin"}, "spec": {"access": {"kubeconfigSecret": {"name": "member-twin"}}}}
        kind = {"apiVersion": "crosscloud.dev/v1alpha1", "kind": "MemberCluster"}
        hub_api.request("POST", "/apis/crosscloud.dev/v1alpha1/memberclusters", kind | twin)
        assert "its account and rights stay" in crosscloud("member", "remove", "twin", *kubeconfig)
        assert may(east_api, "list", "nodes", None)


def test_a_dry_run_tells_all_and_changes_nothing(crosscloud: Command, hub_api: ApiServer, east_api: ApiServer) -> None:
    def version(api: ApiServer) -> str:
        return str(api.request("GET", "/api/v1/configmaps?limit=1")["metadata"]["resourceVersion"])

    before = east_api.raw("GET", "/api/v1/namespaces/dry")[0]
    out = crosscloud(
        "member", "add", "dry", "--kubeconfig", str(east_api.kubeconfig), "--allow-namespace", "dry", "--dry-run"
    )
    assert before == 404
    assert "Namespace dry: would be created" in out
    assert "MemberCluster dry: would be created" in out
    assert east_api.raw("GET", "/api/v1/namespaces/dry")[0] == 404
    assert hub_api.raw("GET", "/apis/crosscloud.dev/v1alpha1/memberclusters/dry")[0] == 404
    assert hub_api.raw("GET", f"/api/v1/namespaces/{SYSTEM}/secrets/member-dry")[0] == 404


def test_without_an_operator_it_says_that_nobody_looked(crosscloud: Command, east_api: ApiServer) -> None:
    out = crosscloud("member", "add", "east", "--kubeconfig", str(east_api.kubeconfig), "--timeout", "1", code=1)
    assert "east is not Ready after 1 s" in out
    assert "does it run?" in out


def test_an_administrators_exec_plugin_runs_and_is_not_stored(
    crosscloud: Command, hub_api: ApiServer, east_api: ApiServer, tmp_path: Path
) -> None:
    east_api.namespace("admins")
    path = "/api/v1/namespaces/admins/serviceaccounts"
    east_api.raw("POST", path, {"metadata": {"name": "admin"}})
    binding = {
        "metadata": {"name": "admins"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "namespace": "admins", "name": "admin"}],
    }
    east_api.raw("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding)
    granted = east_api.request("POST", f"{path}/admin/token", {"spec": {}})["status"]["token"]
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": granted},
    }
    (tmp_path / "credential.json").write_text(json.dumps(credential))
    document = json.loads(east_api.kubeconfig.read_text())
    document["users"][0]["user"] = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "cat",
            "args": [str(tmp_path / "credential.json")],
            "interactiveMode": "Never",
        }
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(document))
    crosscloud("member", "add", "east", "--kubeconfig", str(tmp_path / "kubeconfig"), "--timeout", "0")
    assert "exec" not in stored(hub_api, "east")
    assert granted not in stored(hub_api, "east")


def submit(hub_api: ApiServer, name: str, plan: list[dict[str, Any]], conditions: list[dict[str, Any]]) -> None:
    hub_api.namespace("ml")
    hub_api.request("POST", JOBS, job(minimal_spec(), name))
    status = {"status": {"plan": plan, "conditions": conditions}}
    hub_api.request("PATCH", f"{JOBS}/{name}/status", status, "application/merge-patch+json")


STAGE = {"replica": 0, "incarnation": 1, "stage": 0, "member": "east", "pool": "a100", "zeroStage": 1, "nodes": []}
DONE = {
    "type": "Succeeded",
    "status": "True",
    "reason": "Succeeded",
    "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


def test_a_member_with_running_jobs_is_not_removed_unless_forced(
    crosscloud: Command, hub_api: ApiServer, east_api: ApiServer
) -> None:
    crosscloud("member", "add", "east", "--kubeconfig", str(east_api.kubeconfig), "--timeout", "0")
    submit(hub_api, "ended", [STAGE], [DONE])
    submit(hub_api, "busy", [STAGE], [])
    out = crosscloud("member", "remove", "east", code=1)
    assert "ml/busy" in out
    assert "ended" not in out
    assert "--force" in out
    crosscloud("member", "remove", "east", "--force")
    assert hub_api.raw("GET", "/apis/crosscloud.dev/v1alpha1/memberclusters/east")[0] == 404
    assert hub_api.raw("GET", f"/api/v1/namespaces/{SYSTEM}/secrets/member-east")[0] == 404


def test_removing_with_the_members_kubeconfig_takes_the_rights_away(crosscloud: Command, east_api: ApiServer) -> None:
    kubeconfig = str(east_api.kubeconfig)
    crosscloud("member", "add", "east", "--kubeconfig", kubeconfig, "--allow-namespace", "ml", "--timeout", "0")
    assert may(east_api, "create", "pods", "ml")
    out = crosscloud("member", "remove", "east", "--kubeconfig", kubeconfig)
    assert not may(east_api, "create", "pods", "ml")
    assert not may(east_api, "list", "nodes", None)
    assert "Namespace crosscloud-system: deleted" in out
    # No controller runs here that would end the namespace.
    finish = {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": SYSTEM}, "spec": {"finalizers": []}}
    east_api.request("PUT", f"/api/v1/namespaces/{SYSTEM}/finalize", finish)


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "a name with capitals": (("member", "add", "East", "--kubeconfig", "x"), "found 'East'; must be at most 63"),
    "no kubeconfig": (("member", "add", "east"), "--kubeconfig"),
    "a kubeconfig that is not there": (
        ("member", "add", "east", "--kubeconfig", "/nope"),
        "--kubeconfig: found '/nope', but there is no such file; must be the path of a cluster's kubeconfig",
    ),
    "a kubeconfig without a name, where the hub's is there": (
        ("member", "add", "east", "--kubeconfig", ""),
        "--kubeconfig: found '', which names no file",
    ),
    "a folder where a file should be there": (
        ("member", "remove", "east", "--kubeconfig", "/"),
        "--kubeconfig: found '/', which is a folder",
    ),
    "a hub that is not there": (
        ("member", "list", "--hub-kubeconfig", "/nope"),
        "--hub-kubeconfig: found '/nope', but there is no such file",
    ),
    "a context of the hub that isn't there": (
        ("member", "list", "--hub-context", "nope"),
        "--hub-context: there is no context 'nope'",
    ),
    "a context without its kubeconfig": (
        ("member", "remove", "east", "--context", "x"),
        "--kubeconfig, which is missing",
    ),
    "a namespace of the operator that isn't there": (
        ("--operator-namespace", "nowhere", "member", "add", "east", "--kubeconfig", "HUB"),
        "--operator-namespace: the hub has no namespace 'nowhere'",
    ),
    "a namespace that can't be one": (
        ("member", "add", "east", "--kubeconfig", "x", "--allow-namespace", "a_b"),
        "found 'a_b'",
    ),
    "labels that can't be read": (
        ("member", "add", "east", "--kubeconfig", "x", "--allow-selector", "team ml"),
        "found 'team ml'",
    ),
    "names and labels at once": (
        ("member", "add", "east", "--kubeconfig", "x", "--allow-namespace", "a", "--allow-selector", "a=b"),
        "give one of the two",
    ),
    "a server without TLS": (
        ("member", "add", "east", "--kubeconfig", "x", "--server", "http://a"),
        "found 'http://a'; must be an address like https://",
    ),
    "a timeout that is no number": (("member", "add", "east", "--kubeconfig", "x", "--timeout", "soon"), "'soon'"),
    "a timeout with a fraction": (
        ("member", "add", "east", "--kubeconfig", "x", "--timeout", "1.5"),
        "'1.5' is not a valid whole number of seconds",
    ),
    "a timeout without end": (("member", "add", "east", "--kubeconfig", "x", "--timeout", "nan"), "'nan'"),
    "a gateway that is no host": (
        ("member", "add", "east", "--kubeconfig", "x", "--gateway-address", "a b/"),
        "found 'a b/'; must be a host name or an IP address",
    ),
    "a member that isn't there": (("member", "remove", "north"), "there is no member 'north'"),
    "an unknown command": (("members",), "No such command 'members'; must be one of fetch, init, member, status"),
    "an unknown command for members": (("member", "delete"), "must be one of add, list, remove"),
    "a job with its namespace": (("status", "ml/busy"), "found 'ml/busy'; must be the job's name alone: `busy -n ml`"),
    "a job with capitals": (("fetch", "Busy", "x"), "found 'Busy'; must be at most 63"),
    "a folder that is taken": (("fetch", "busy", "/usr"), "found '/usr', which is there already"),
    "a folder without a name": (("fetch", "busy", ""), "found ''; must be a folder"),
    "a folder below a file": (("fetch", "busy", "/etc/passwd/x"), "but /etc/passwd is a file"),
    "an address that is none": (
        ("fetch", "busy", "x", "--endpoint-url", "localhost:9000"),
        "found 'localhost:9000'; must be an address like http://",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message_with_field_value_and_what_is_allowed(
    case: str, crosscloud: Command, hub_api: ApiServer
) -> None:
    arguments, words = BAD[case]
    arguments = tuple(str(hub_api.kubeconfig) if text == "HUB" else text for text in arguments)
    code = 1 if "there" in case else 2
    out = crosscloud(*arguments, code=code)
    assert words in " ".join(out.split())


def test_broken_kubeconfigs_of_the_administrator_are_one_message(
    crosscloud: Command, east_api: ApiServer, tmp_path: Path
) -> None:
    path = tmp_path / "kubeconfig"
    document = json.loads(east_api.kubeconfig.read_text())
    insecure = json.loads(json.dumps(document))
    insecure["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = True
    for text, words in (
        ("[1, 2", "can't be read"),
        ("", "onfig"),
        (json.dumps({**document, "current-context": "gone"}), "gone"),
        (json.dumps(insecure), "insecure-skip-tls-verify"),
    ):
        path.write_text(text)
        out = crosscloud("member", "add", "east", "--kubeconfig", str(path), code=1)
        assert words in out
    path.write_text(json.dumps(document))
    out = crosscloud("member", "add", "east", "--kubeconfig", str(path), "--context", "nope", code=1)
    assert "nope" in out


def test_a_server_that_can_not_be_stored_is_refused_before_anything_is_made(
    crosscloud: Command, east_api: ApiServer
) -> None:
    def accounts() -> Any:
        return east_api.request("GET", f"/api/v1/namespaces/{SYSTEM}/serviceaccounts")["items"]

    before = accounts()
    for server in ("https://", "https://a:99999", "https://user@a"):
        out = crosscloud("member", "add", "west", "--kubeconfig", str(east_api.kubeconfig), "--server", server, code=2)
        assert f"'--server': found '{server}'; must be an address like https://" in " ".join(out.split())
    assert accounts() == before


def test_a_hub_without_the_chart_says_how_to_install_it(east_api: ApiServer) -> None:
    out = Command(east_api)("member", "list", code=1)
    assert "helm install" in out
