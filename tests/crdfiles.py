"""The CRDs of this repository as data, and manifests that tests send to a real API server."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from apiserver import ApiServer
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
CRDS = ROOT / "crds"
EXAMPLES = CRDS / "examples"
EVERY_EXAMPLE = sorted(path for folder in (EXAMPLES, ROOT / "examples") for path in folder.rglob("*.yaml"))
JOB_CRD = CRDS / "crosscloud.dev_crosscloudtrainingjobs.yaml"
MEMBER_CRD = CRDS / "crosscloud.dev_memberclusters.yaml"

JOBS = "/apis/crosscloud.dev/v1alpha1/namespaces/ml/crosscloudtrainingjobs"
MEMBERS = "/apis/crosscloud.dev/v1alpha1/memberclusters"


def example_name(path: Path) -> str:
    """`examples/tiny.yaml`."""
    return str(path.relative_to(ROOT))


def load_yaml(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def schema_of(crd: Path) -> dict[str, Any]:
    """openAPIV3Schema of the CRD's only version."""
    (version,) = load_yaml(crd.read_text())["spec"]["versions"]
    return dict(version["schema"]["openAPIV3Schema"])


def properties(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(path, schema) of every property below; list items have `[]` in their path."""
    for name, below in schema.get("properties", {}).items():
        where = f"{path}.{name}".lstrip(".")
        yield where, below
        yield from properties(below, where)
    if "items" in schema:
        yield from properties(schema["items"], f"{path}[]")


def install(server: ApiServer) -> None:
    """Apply the CRDs as a user would (client-side apply) and wait until the API server serves them."""
    server.kubectl("apply", "-f", str(CRDS))
    server.kubectl("wait", "--for=condition=Established", "--timeout=60s", "--recursive=false", "-f", str(CRDS))
    server.namespace("ml")


def minimal_spec() -> dict[str, Any]:
    """Only the fields that have no default."""
    return {
        "training": {"model": {"preset": "tiny-llama"}, "data": {"train": ["/data/*.txt"]}, "tokens": "2M"},
        "storage": {"uri": "s3://models/tiny-llama"},
    }


def job(spec: Mapping[str, Any], name: str = "tiny-llama") -> dict[str, Any]:
    return {
        "apiVersion": "crosscloud.dev/v1alpha1",
        "kind": "CrossCloudTrainingJob",
        "metadata": {"name": name, "namespace": "ml"},
        "spec": dict(spec),
    }


def member(spec: Mapping[str, Any], name: str = "east") -> dict[str, Any]:
    return {
        "apiVersion": "crosscloud.dev/v1alpha1",
        "kind": "MemberCluster",
        "metadata": {"name": name},
        "spec": dict(spec),
    }


def changed(document: Mapping[str, Any], edits: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with `path: value` set; `...` removes the field. Numbers in a path are places in a list."""
    result = copy.deepcopy(dict(document))
    for path, value in edits.items():
        at: Any = result
        *parents, last = [int(part) if part.isdigit() else part for part in re.split(r"[.\[\]]+", path) if part]
        for part in parents:
            at = at[part] if isinstance(part, int) else at.setdefault(part, {})
        if value is ...:
            del at[last]
        else:
            at[last] = value
    return result


def refused_fields(answer: Mapping[str, Any]) -> list[str]:
    """The fields that a 422 names."""
    return [cause.get("field", "") for cause in answer["details"].get("causes", [])]
