"""Kubeconfigs from anyone: what is refused, by which field, and that nothing is opened or run (C27, C77)."""

from __future__ import annotations

import base64
import builtins
import copy
import dataclasses
import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer

from crosscloud_operator.kube.access import Access
from crosscloud_operator.kube.credentials import Unusable, access_of, life_of
from crosscloud_operator.kube.kubeconfig import MAX_BYTES, KubeconfigRefused, render, vet

PEM = (
    "-----BEGIN CERTIFICATE-----\n"
    "MIIBejCCAR+gAwIBAgIUBmSg3ivcwUJ0oR5nJ0L3iHqMq1QwCgYIKoZIzj0EAwIw\n"
    "-----END CERTIFICATE-----\n"
)


def good() -> dict[str, Any]:
    """The narrowest kubeconfig that is accepted."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "east", "cluster": {"server": "https://east.example:6443"}}],
        "users": [{"name": "crosscloud", "user": {"token": "abc.def.ghi"}}],
        "contexts": [{"name": "east", "context": {"cluster": "east", "user": "crosscloud"}}],
        "current-context": "east",
    }


def changed(*path: str | int, value: Any) -> dict[str, Any]:
    """The good one with one field set."""
    document = copy.deepcopy(good())
    spot: Any = document
    for step in path[:-1]:
        spot = spot[step]
    spot[path[-1]] = value
    return document


def without(field: str) -> dict[str, Any]:
    document = good()
    del document[field]
    return document


CLUSTER, USER = ("clusters", 0, "cluster"), ("users", 0, "user")
EXEC = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", "touch /tmp/pwned"]}
TWO = [{"name": name, "context": {"cluster": "east", "user": "crosscloud"}} for name in ("east", "west")]
UNUSED_EXEC = [*good()["users"], {"name": "other", "user": {"exec": EXEC}}]

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an exec plugin": (changed(*USER, value={"exec": EXEC}), "users[0].user.exec"),
    "an exec plugin beside a token": (changed(*USER, "exec", value=EXEC), "users[0].user.exec"),
    "an exec plugin of an unused user": (changed("users", value=UNUSED_EXEC), "users[1].user.exec"),
    "an auth provider": (changed(*USER, "auth-provider", value={"name": "gcp"}), "users[0].user.auth-provider"),
    "a token file": (changed(*USER, "tokenFile", value="/var/run/secrets/token"), "users[0].user.tokenFile"),
    "a certificate by path": (changed(*USER, "client-certificate", value="a.crt"), "users[0].user.client-certificate"),
    "a key by path": (changed(*USER, "client-key", value="/home/me/.ssh/id"), "users[0].user.client-key"),
    "an authority by path": (
        changed(*CLUSTER, "certificate-authority", value="/home/me/ca.crt"),
        "clusters[0].cluster.certificate-authority",
    ),
    "a password": (changed(*USER, "password", value="secret"), "users[0].user.password"),
    "impersonation": (changed(*USER, "as", value="system:admin"), "users[0].user.as"),
    "a proxy": (changed(*CLUSTER, "proxy-url", value="http://proxy:3128"), "clusters[0].cluster.proxy-url"),
    "switched-off verification": (
        changed(*CLUSTER, "insecure-skip-tls-verify", value=True),
        "clusters[0].cluster.insecure-skip-tls-verify",
    ),
    "verification switched off by a word": (
        changed(*CLUSTER, "insecure-skip-tls-verify", value="true"),
        "clusters[0].cluster.insecure-skip-tls-verify",
    ),
    "plain http": (changed(*CLUSTER, "server", value="http://east:8080"), "clusters[0].cluster.server"),
    "a server that is a file": (changed(*CLUSTER, "server", value="file:///etc/passwd"), "clusters[0].cluster.server"),
    "a server without a host": (changed(*CLUSTER, "server", value="https://"), "clusters[0].cluster.server"),
    "a server with a user": (changed(*CLUSTER, "server", value="https://a:b@east"), "clusters[0].cluster.server"),
    "a server with a bad port": (changed(*CLUSTER, "server", value="https://east:x"), "clusters[0].cluster.server"),
    "a server with a line end": (
        changed(*CLUSTER, "server", value="https://east\r\nX: y"),
        "clusters[0].cluster.server",
    ),
    "no server": (changed(*CLUSTER, "server", value=None), "clusters[0].cluster.server"),
    "an authority that is no base64": (
        changed(*CLUSTER, "certificate-authority-data", value="%%%"),
        "clusters[0].cluster.certificate-authority-data",
    ),
    "an authority that is no certificate": (
        changed(*CLUSTER, "certificate-authority-data", value=base64.b64encode(PEM.encode()).decode()),
        "clusters[0].cluster.certificate-authority-data",
    ),
    "a token with a line end": (changed(*USER, "token", value="abc\nX-Evil: 1"), "users[0].user.token"),
    "a token that is a number": (changed(*USER, "token", value=5), "users[0].user.token"),
    "no credentials": (changed(*USER, value={}), "users[0].user"),
    "a certificate without its key": (
        changed(*USER, "client-certificate-data", value="YQ=="),
        "users[0].user.client-key-data",
    ),
    "a certificate and key that are none": (
        changed(*USER, value={"client-certificate-data": "YQ==", "client-key-data": "YQ=="}),
        "users[0].user.client-certificate-data",
    ),
    "a field nobody knows": (changed(*USER, "execute", value="x"), "users[0].user.'execute'"),
    "no current context": (without("current-context"), "current-context"),
    "an empty current context": (changed("current-context", value=""), "current-context"),
    "a current context that isn't there": (changed("current-context", value="west"), "current-context"),
    "two contexts": (changed("contexts", value=TWO), "contexts"),
    "a context of an unknown cluster": (changed("contexts", 0, "context", "cluster", value="x"), "context.cluster"),
    "a context of an unknown user": (changed("contexts", 0, "context", "user", value="x"), "context.user"),
    "no clusters": (without("clusters"), "clusters"),
    "clusters that are no list": (changed("clusters", value={"a": 1}), "clusters"),
    "a cluster without a name": (changed("clusters", value=[{"cluster": {}}]), "clusters[0]"),
    "a user given twice": (changed("users", value=good()["users"] * 2), "users[1].name"),
    "another kind": (changed("kind", value="Pod"), "kind"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_by_the_name_of_its_field(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    document, field = REFUSED[case]
    text = json.dumps(document)

    def forbidden(*arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"touched the outside: {arguments}")

    for owner, name in ((builtins, "open"), (subprocess, "Popen"), (socket, "create_connection"), (Path, "read_text")):
        monkeypatch.setattr(owner, name, forbidden)
    with pytest.raises(KubeconfigRefused) as refusal:
        vet(text)
    assert any(problem.startswith(field) or field in problem.split(":")[0] for problem in refusal.value.problems)


@pytest.mark.parametrize("case", [name for name in REFUSED if "exec" in name or "path" in name or "file" in name])
def test_a_trap_is_answered_with_the_way_out(case: str) -> None:
    with pytest.raises(KubeconfigRefused) as refusal:
        vet(json.dumps(REFUSED[case][0]))
    words = str(refusal.value)
    assert "crosscloud member add" in words or "https://host:6443" in words


BROKEN = {
    "nothing": b"",
    "only a comment": b"# hello",
    "a list": b"[1, 2]",
    "a word": b"hello",
    "half a mapping": b"a: [1, 2",
    "a tab for indentation": b"a:\n\tb: 1",
    "bytes that are no text": b"\xff\xfe\x00",
    "a tag that makes Python objects": b"!!python/object/apply:os.system ['touch /tmp/pwned']",
    "a key given twice": b"kind: Config\nkind: Config\n",
    "deep nesting": b"[" * 1_500,
    "too much of it": b"a: " + b"x" * MAX_BYTES,
    "an alias to nothing": b"a: *nowhere",
    "aliases that explode": b"a: &a [x,x]\nb: &b [*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\nclusters: [*c,*c]\n",
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_kubeconfig_is_refused_without_a_traceback(case: str) -> None:
    with pytest.raises(KubeconfigRefused) as refusal:
        vet(BROKEN[case])
    assert len(str(refusal.value)) < 4_000


def test_all_problems_are_named_at_once() -> None:
    document = changed(*CLUSTER, "proxy-url", value="http://proxy")
    document["users"][0]["user"] = {"exec": EXEC, "tokenFile": "x"}
    document["current-context"] = "nowhere"
    with pytest.raises(KubeconfigRefused) as refusal:
        vet(json.dumps(document))
    assert len(refusal.value.problems) == 4


def test_secrets_do_not_show_up_in_messages() -> None:
    document = changed(*USER, "token", value="hunter2 with a space")
    with pytest.raises(KubeconfigRefused) as refusal:
        vet(json.dumps(document))
    assert "hunter2" not in str(refusal.value)
    assert "hunter2" not in repr(Access("https://a", token="hunter2", key="hunter2"))


def test_an_inline_client_certificate_is_accepted(east_api: ApiServer) -> None:
    access = vet(east_api.kubeconfig.read_bytes())
    assert (access.server, access.ca) == (east_api.url, east_api.ca)
    assert (access.certificate, access.key) == (east_api.certificate, east_api.key)
    access.ssl_context()


def test_a_key_of_another_certificate_is_refused(east_api: ApiServer, hub_api: ApiServer) -> None:
    document = json.loads(east_api.kubeconfig.read_text())
    document["users"][0]["user"]["client-key-data"] = base64.b64encode(hub_api.key.encode()).decode()
    with pytest.raises(KubeconfigRefused, match="client-key-data fits"):
        vet(json.dumps(document))


def test_harmless_extras_are_accepted() -> None:
    document = changed(*CLUSTER, "extensions", value=[{"name": "minikube"}])
    document["clusters"][0]["cluster"] |= {
        "insecure-skip-tls-verify": False,
        "proxy-url": "",
        "tls-server-name": "east",
    }
    document["preferences"] = {}
    assert vet(json.dumps(document)).tls_server_name == "east"


def test_what_we_write_is_what_we_accept(east_api: ApiServer) -> None:
    access = Access("https://east:6443/k8s/clusters/c-1", ca=east_api.ca, tls_server_name="east.internal")
    assert vet(render(access, "east", "abc.def.ghi")) == dataclasses.replace(access, token="abc.def.ghi")


def secret(**data: bytes) -> dict[str, Any]:
    return {"metadata": {"name": "member-east"}, "data": {k: base64.b64encode(v).decode() for k, v in data.items()}}


@pytest.mark.parametrize(
    ("held", "reason", "words"),
    [
        (None, "SecretMissing", "ns/member-east: not found"),
        ({"metadata": {}}, "SecretKeyMissing", "data.kubeconfig: missing; it has the keys: none"),
        (secret(config=b"x"), "SecretKeyMissing", "it has the keys: config"),
        (secret(kubeconfig=b""), "KubeconfigRefused", "empty"),
        ({"metadata": {}, "data": {"kubeconfig": "%"}}, "KubeconfigRefused", "base64"),
        (secret(kubeconfig=json.dumps(REFUSED["an exec plugin"][0]).encode()), "KubeconfigRefused", "user.exec"),
    ],
)
def test_a_secret_that_can_not_be_used_says_why(held: dict[str, Any] | None, reason: str, words: str) -> None:
    with pytest.raises(Unusable) as fault:
        access_of(held, "member-east", "ns")
    assert fault.value.reason == reason
    assert words in fault.value.message


def jwt(**claims: Any) -> str:
    return f"x.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.y"


def test_a_service_accounts_token_is_renewed_at_half_of_its_life() -> None:
    life = life_of(Access("https://a", token=jwt(iat=1000, exp=5000, sub="system:serviceaccount:ns:name")))
    assert (life.expires, life.account, life.renew_at) == (5000, ("ns", "name"), 3000)


@pytest.mark.parametrize("token", ["opaque", "a.b", "a.b.c", jwt(), "x.bnVsbA.y", jwt(exp="soon", iat=True, sub=5)])
def test_a_token_that_says_nothing_is_not_renewed(token: str) -> None:
    assert life_of(Access("https://a", token=token)).renew_at is None


def test_a_client_certificate_tells_its_end(east_api: ApiServer) -> None:
    life = life_of(vet(east_api.kubeconfig.read_text()))
    assert life.expires is not None
    assert life.issued is not None
    assert life.expires - life.issued == 86_400 + 300  # as tests/apiserver.py issues them
    assert life.renew_at is None
