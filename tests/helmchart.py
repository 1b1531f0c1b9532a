"""The chart, rendered and installed by the real helm."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from apiserver import ApiServer, program
from operatorprocess import Operator, operator_process
from ruamel.yaml import YAML
from waiting import wait_until

from crosscloud_lab.binaries import KUBERNETES_VERSION

CHART = Path(__file__).resolve().parents[1] / "charts" / "crosscloud"
NAMESPACE = "crosscloud-system"
START_SECONDS = 90


class HelmFailed(Exception):
    """helm ended with an error; the text is what it said."""


def helm(*arguments: str, kubeconfig: Path | None = None) -> str:
    """Standard output of helm. Raises HelmFailed."""
    where = [] if kubeconfig is None else [f"--kubeconfig={kubeconfig}"]
    done = subprocess.run([str(program("helm")), *arguments, *where], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HelmFailed(done.stderr)
    return done.stdout


def rendered(*settings: str, release: str = "crosscloud") -> list[dict[str, Any]]:
    """The objects that `helm install` would make, tests included; `settings` as for --set."""
    # Without a cluster, a helm that was built from its module alone believes in Kubernetes 1.20.
    where = ("--namespace", NAMESPACE, "--kube-version", KUBERNETES_VERSION)
    text = helm("template", release, str(CHART), *where, *as_sets(settings))
    return [document for document in YAML(typ="safe", pure=True).load_all(text) if document]


def as_sets(settings: Sequence[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def account_token(server: ApiServer) -> str:
    """A token of the operator's service account."""
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/crosscloud/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    return str(server.request("POST", path, request)["status"]["token"])


@contextlib.contextmanager
def operator_of_the_chart(server: ApiServer, folder: Path, name: str) -> Iterator[Operator]:
    """The operator with the chart's service account and environment, as its Deployment would run it."""
    document = json.loads(server.kubeconfig.read_text())
    document["users"][0]["user"] = {"token": account_token(server)}
    (folder / f"{name}.kubeconfig").write_text(json.dumps(document))
    (container,) = only(rendered(), "Deployment")["spec"]["template"]["spec"]["containers"]
    settings = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    del settings["CROSSCLOUD_HTTP_PORT"]  # several of them share this machine
    with operator_process(folder / f"{name}.kubeconfig", folder, name, **settings) as operator:
        wait_until(lambda: operator.ready, START_SECONDS)
        yield operator


def only(objects: Sequence[dict[str, Any]], kind: str, ending: str = "") -> dict[str, Any]:
    """The one object of this kind whose name ends so."""
    (found,) = [obj for obj in objects if obj["kind"] == kind and obj["metadata"]["name"].endswith(ending)]
    return found
