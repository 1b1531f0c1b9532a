"""The chart, rendered and installed by the real helm."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apiserver import program
from ruamel.yaml import YAML

from crosscloud_lab.binaries import KUBERNETES_VERSION

CHART = Path(__file__).resolve().parents[1] / "charts" / "crosscloud"
NAMESPACE = "crosscloud-system"


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


def only(objects: Sequence[dict[str, Any]], kind: str, ending: str = "") -> dict[str, Any]:
    """The one object of this kind whose name ends so."""
    (found,) = [obj for obj in objects if obj["kind"] == kind and obj["metadata"]["name"].endswith(ending)]
    return found
