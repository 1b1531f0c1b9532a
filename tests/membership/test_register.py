"""One suite for both forms of the register, the ConfigMap on a real API server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer

from crosscloud_trainer.contract import ExitCode, dump_json
from crosscloud_trainer.link import Authority, Fenced
from crosscloud_trainer.membership.kube import ConfigMapClient, KubeConflict, KubeError
from crosscloud_trainer.membership.register import Conflict, Register, RegisterUnusable, open_view, register_from
from crosscloud_trainer.membership.view import VIEW_VERSION, View, ViewReplica

NAMESPACE = "ml"
Make = Callable[[], Register]


def view(term: int = 1, number: int = 1, attempt: int = 1) -> View:
    replicas = (ViewReplica(0, 1), ViewReplica(1, 2))
    return View(VIEW_VERSION, attempt, 1, term, number, replicas)


class Account:
    """A service account that may get and patch the ConfigMaps with these names, as the operator grants it to rank 0."""

    def __init__(self, server: ApiServer, folder: Path, name: str, writable: list[str]) -> None:
        server.namespace(NAMESPACE)
        self.folder = folder
        (folder / "ca.crt").write_text(server.ca)
        self._make(server, "", "serviceaccounts", {"metadata": {"name": name}})
        rules = [{"apiGroups": [""], "resources": ["configmaps"], "resourceNames": writable, "verbs": ["get", "patch"]}]
        group = "rbac.authorization.k8s.io"
        self._make(server, group, "roles", {"metadata": {"name": name}, "rules": rules})
        reference = {"apiGroup": group, "kind": "Role", "name": name}
        subject = {"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}
        self._make(
            server, group, "rolebindings", {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]}
        )
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{name}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        (folder / "token").write_text(server.request("POST", path, request)["status"]["token"] + "\n")
        self.environ = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(server.port),
            "CROSSCLOUD_REPORT_CREDENTIALS": str(folder),
        }

    @staticmethod
    def _make(server: ApiServer, group: str, resource: str, body: dict[str, Any]) -> None:
        base = f"/apis/{group}/v1" if group else "/api/v1"
        status, answer = server.raw("POST", f"{base}/namespaces/{NAMESPACE}/{resource}", body)
        assert status in (201, 409), answer

    @property
    def client(self) -> ConfigMapClient:
        return ConfigMapClient.in_cluster(self.folder, self.environ)


def config_map(server: ApiServer, name: str, data: dict[str, str] | None = None) -> str:
    server.namespace(NAMESPACE)
    body = {"metadata": {"name": name}, "data": data or {}}
    server.request("POST", f"/api/v1/namespaces/{NAMESPACE}/configmaps", body)
    return name


@pytest.fixture(params=["file", "configmap"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Gives one more handle of the same, empty register at each call."""
    if request.param == "file":
        return lambda: register_from(f"file:{tmp_path / 'view.json'}")
    server: ApiServer = request.getfixturevalue("home")
    name = config_map(server, f"view-{abs(hash(tmp_path.name))}", {"other": "key"})
    account = Account(server, tmp_path, name, [name])
    return lambda: register_from(f"configmap:{NAMESPACE}/{name}", account.environ)


def test_a_new_register_holds_no_view(make: Make) -> None:
    assert make().read().view is None


def test_what_was_swapped_in_is_read_back_by_others(make: Make) -> None:
    register = make()
    written = register.swap(view(), register.read().version)
    found = make().read()
    assert found == written
    assert found.view == view()


def test_a_swap_from_an_old_version_is_a_conflict_and_changes_nothing(make: Make) -> None:
    register = make()
    empty = register.read().version
    register.swap(view(1), empty)
    with pytest.raises(Conflict):
        make().swap(view(2), empty)
    assert register.read().view == view(1)


def test_the_same_content_again_does_not_bring_back_an_old_version(make: Make) -> None:
    register = make()
    first = register.swap(view(1), register.read().version)
    second = register.swap(view(2), first.version)
    register.swap(view(1), second.version)
    with pytest.raises(Conflict):
        register.swap(view(3), first.version)


def test_of_many_that_swap_at_once_each_success_builds_on_the_one_before(make: Make) -> None:
    make().swap(view(1), make().read().version)
    successes: list[int] = []

    def raise_term() -> None:
        register = make()
        for _ in range(5):
            found = register.read()
            assert found.view is not None
            try:
                register.swap(view(found.view.term + 1), found.version)
            except Conflict:
                continue
            successes.append(found.view.term + 1)

    threads = [threading.Thread(target=raise_term) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(successes) == list(range(2, len(successes) + 2))
    last = make().read().view
    assert last is not None
    assert last.term == len(successes) + 1


def test_opening_raises_the_term_and_gives_a_new_number_to_other_replicas_only(make: Make) -> None:
    first = open_view(make(), 1, 1, {0: 1, 1: 1})
    assert first.authority == Authority(1, 1, 1)
    assert open_view(make(), 1, 1, {0: 1, 1: 1}).authority == Authority(1, 2, 1)
    assert open_view(make(), 1, 2, {0: 1, 1: 1}).authority == Authority(1, 3, 2)
    moved = open_view(make(), 2, 2, {0: 1, 1: 1})
    assert moved.authority == Authority(2, 4, 2)
    assert make().read().view == moved


def test_an_older_attempt_or_home_is_fenced_by_the_register(make: Make) -> None:
    newest = open_view(make(), 2, 3, {0: 1})
    for home, attempt in ((2, 2), (1, 3)):
        with pytest.raises(Fenced, match=r"attempt 3 and home 2") as caught:
            open_view(make(), home, attempt, {0: 1})
        assert caught.value.exit_code == ExitCode.FENCED
    assert make().read().view == newest


def test_openers_that_meet_both_succeed_one_after_the_other(make: Make) -> None:
    opened: list[View] = []
    threads = [threading.Thread(target=lambda: opened.append(open_view(make(), 1, 1, {0: 1, 1: 1}))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(one.term for one in opened) == [1, 2, 3, 4]
    assert {one.number for one in opened} == {1}


def test_other_keys_of_the_config_map_stay(home: ApiServer, tmp_path: Path) -> None:
    name = config_map(home, "shared", {"other": "key"})
    account = Account(home, tmp_path, "shared", [name])
    open_view(register_from(f"configmap:{NAMESPACE}/{name}", account.environ), 1, 1, {0: 1})
    found = home.request("GET", f"/api/v1/namespaces/{NAMESPACE}/configmaps/{name}")["data"]
    assert found["other"] == "key"
    assert json.loads(found["view.json"])["term"] == 1


@pytest.mark.parametrize("text", ["", "file:", "configmap:only-a-name", "configmap:/x", "http://x", "secret:a/b"])
def test_an_address_that_names_no_register_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(RegisterUnusable, match="configmap:NAMESPACE/NAME or file:PATH"):
        register_from(text, {})


def test_outside_a_pod_a_config_map_is_refused_with_what_is_missing() -> None:
    with pytest.raises(RegisterUnusable, match="KUBERNETES_SERVICE_HOST"):
        register_from("configmap:ml/view", {})


@pytest.mark.parametrize("content", ["{", "[]", '{"version": "1"}', '{"version": 1, "view": {"term": 0}}'])
def test_a_file_that_holds_no_register_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "view.json").write_text(content)
    with pytest.raises(RegisterUnusable):
        open_view(register_from(f"file:{tmp_path / 'view.json'}"), 1, 1, {0: 1}, seconds=0)


def test_a_client_reads_its_token_again_for_each_request(home: ApiServer, tmp_path: Path) -> None:
    name = config_map(home, "token-test")
    client = Account(home, tmp_path, "token-test", [name]).client
    good = (tmp_path / "token").read_text()
    (tmp_path / "token").write_text("expired")
    with pytest.raises(KubeError) as caught:
        client.patch(NAMESPACE, name, {"report.json": "{}"})
    assert caught.value.status == 401
    (tmp_path / "token").write_text(good)
    assert client.patch(NAMESPACE, name, {"report.json": "{}"}).data == {"report.json": "{}"}


def test_a_client_tells_what_it_may_not_do_and_what_is_not_there(home: ApiServer, tmp_path: Path) -> None:
    config_map(home, "foreign")
    client = Account(home, tmp_path, "own", ["own"]).client
    with pytest.raises(KubeError, match=r"foreign.*forbidden") as caught:
        client.patch(NAMESPACE, "foreign", {"a": "b"})
    assert caught.value.status == 403
    with pytest.raises(KubeError) as caught:
        client.get(NAMESPACE, "own")
    assert caught.value.status == 404
    for name in ("..", "a/b", "", "A"):
        with pytest.raises(KubeError, match="not the name"):
            client.get(NAMESPACE, name)


def test_a_patch_of_an_old_version_is_a_conflict(home: ApiServer, tmp_path: Path) -> None:
    name = config_map(home, "versions")
    client = Account(home, tmp_path, "versions", [name]).client
    old = client.get(NAMESPACE, name).resource_version
    client.patch(NAMESPACE, name, {"a": "1"}, resource_version=old)
    with pytest.raises(KubeConflict):
        client.patch(NAMESPACE, name, {"a": "2"}, resource_version=old)


def test_a_view_of_another_version_is_not_taken_for_ours(tmp_path: Path) -> None:
    text = dump_json(view()).replace(VIEW_VERSION, "view.crosscloud.dev/v2")
    (tmp_path / "view.json").write_text(f'{{"version": 1, "view": {text}}}')
    with pytest.raises(RegisterUnusable, match="apiVersion"):
        open_view(register_from(f"file:{tmp_path / 'view.json'}"), 1, 1, {0: 1})
