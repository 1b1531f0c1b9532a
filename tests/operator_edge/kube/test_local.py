"""Access of the pod or person that runs us: service account files, kubeconfigs of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer
from kubernetes.config import incluster_config

from crosscloud_operator.handlers import connection
from crosscloud_operator.kube.cluster import HttpCluster
from crosscloud_operator.kube.local import NoAccess, in_cluster, user_kubeconfig


@pytest.fixture
def pod(east_api: ApiServer, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a pod with a service account finds; the token's file."""
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    east_api.request("POST", accounts, {"metadata": {"name": "operator"}})
    token = east_api.request("POST", f"{accounts}/operator/token", {"spec": {}})["status"]["token"]
    (tmp_path / "token").write_text(token)
    (tmp_path / "ca.crt").write_text(east_api.ca)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(east_api.port))
    return tmp_path / "token"


def test_a_pods_token_is_read_anew_when_it_has_rotated(pod: Path, east_api: ApiServer) -> None:
    access = in_cluster()
    assert (access.server, access.ca, access.token) == (east_api.url, east_api.ca, pod.read_text())
    pod.write_text("another")
    assert in_cluster().token == "another"


async def test_a_pods_service_account_is_accepted(pod: Path) -> None:
    cluster = HttpCluster("hub", in_cluster())
    try:
        assert (await cluster.version()).startswith("v1.")
    finally:
        await cluster.close()


def test_kopf_gets_the_same_credentials(pod: Path, east_api: ApiServer) -> None:
    info = connection(in_cluster())
    assert (info.server, info.token, info.scheme) == (east_api.url, pod.read_text(), "Bearer")


def test_without_a_service_account_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(NoAccess, match="no service account"):
        in_cluster()


def test_a_users_kubeconfig_may_name_files_and_several_contexts(east_api: ApiServer, tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text(east_api.ca)
    (tmp_path / "token").write_text("abc")
    document = json.loads(east_api.kubeconfig.read_text())
    document["clusters"].append({"name": "b", "cluster": {"server": "https://b", "certificate-authority": "ca.crt"}})
    document["users"].append({"name": "b", "user": {"tokenFile": "token"}})
    document["contexts"].append({"name": "b", "context": {"cluster": "b", "user": "b"}})
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(document))
    assert user_kubeconfig(str(path)).certificate == east_api.certificate
    other = user_kubeconfig(str(path), "b")
    assert (other.server, other.ca, other.token) == ("https://b", east_api.ca, "abc")


def test_a_proxy_of_the_surroundings_is_not_used(east_api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert user_kubeconfig(str(east_api.kubeconfig)).server == east_api.url


@pytest.mark.parametrize(
    ("field", "value"),
    [("insecure-skip-tls-verify", True), ("proxy-url", "http://proxy"), ("server", "http://plain")],
)
def test_what_could_not_be_stored_is_refused_by_its_field(
    field: str, value: Any, east_api: ApiServer, tmp_path: Path
) -> None:
    document = json.loads(east_api.kubeconfig.read_text())
    document["clusters"][0]["cluster"][field] = value
    (tmp_path / "kubeconfig").write_text(json.dumps(document))
    with pytest.raises(NoAccess, match=field):
        user_kubeconfig(str(tmp_path / "kubeconfig"))


@pytest.mark.parametrize(
    ("part", "field", "value", "words"),
    [
        ("clusters", "certificate-authority-data", "//79/A==", "certificate-authority: must be PEM text"),
        (
            "users",
            "exec",
            {"command": "/none", "apiVersion": "client.authentication.k8s.io/v1"},
            "mend its exec command",
        ),
    ],
)
def test_authorities_that_are_no_text_and_users_without_credentials_are_one_message(
    part: str, field: str, value: Any, words: str, east_api: ApiServer, tmp_path: Path
) -> None:
    document = json.loads(east_api.kubeconfig.read_text())
    inner = document[part][0][part.removesuffix("s")]
    if part == "users":
        inner.clear()
    inner[field] = value
    (tmp_path / "kubeconfig").write_text(json.dumps(document))
    with pytest.raises(NoAccess, match=words):
        user_kubeconfig(str(tmp_path / "kubeconfig"))
