"""Three real clusters with the operator installed, driven by the commands that a user has."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from waiting import eventually

from crosscloud_lab.demo import steps
from crosscloud_lab.images import build_images, load_images
from crosscloud_lab.lab import Lab

ROOT = Path(__file__).resolve().parents[1]
Obj = dict[str, Any]


def wait_for(what: str, check: Callable[[], Any], seconds: float = 240, every: float = 1.0) -> Any:
    """`eventually` with the patience that clusters need."""
    return eventually(check, what, seconds, every)


@dataclass
class Cloud:
    """A hub and its members."""

    lab: Lab

    def kubectl(self, cluster: str, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        done = subprocess.run(
            [str(self.lab.binary("kubectl")), "--kubeconfig", str(self.lab.kubeconfig(cluster)), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 or not check, f"kubectl {arguments} in {cluster}: {done.stderr}"
        return done.stdout if done.returncode == 0 else done.stderr

    def get(self, cluster: str, kind: str, *selector: str, namespace: str = "ml") -> list[Obj]:
        return list(json.loads(self.kubectl(cluster, "get", kind, "-n", namespace, *selector, "-o", "json"))["items"])

    def pods(self, job: str, cluster: str | None = None) -> list[Obj]:
        """Pods of a job's trainers, in one member or in all."""
        names = [cluster] if cluster else ["east", "west"]
        selector = ("-l", f"crosscloud.dev/job={job},crosscloud.dev/replica")
        return [pod for name in names for pod in self.get(name, "pods", *selector)]

    def objects(self, job: str) -> list[str]:
        """Names of all that the operator has made for a job in the members, and that is still there."""
        kinds = "pods,configmaps,secrets,services,deployments,networkpolicies,roles,rolebindings,serviceaccounts"
        found = [obj for name in ("east", "west") for obj in self.get(name, kinds, "-l", f"crosscloud.dev/job={job}")]
        return [obj["metadata"]["name"] for obj in found]

    def operators(self) -> list[Obj]:
        """The operator's pods, those that are ending included."""
        return self.get("hub", "pods", "-l", "app.kubernetes.io/component=operator", namespace=steps.NAMESPACE)

    def apply(self, cluster: str, *objects: Obj) -> str:
        document = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        return self.kubectl(cluster, "apply", "-f", "-", stdin=json.dumps(document))

    def refusal(self, cluster: str, obj: Obj) -> str:
        """The API server's words about an object that it must refuse."""
        text = self.kubectl(cluster, "apply", "-f", "-", stdin=json.dumps(obj), check=False)
        assert "error" in text.lower() or "invalid" in text.lower(), f"accepted: {text}"
        return text

    def job(self, name: str) -> Obj:
        found: Obj = json.loads(self.kubectl("hub", "get", "cctj", name, "-n", "ml", "-o", "json"))
        return found

    def reason(self, name: str) -> str:
        """The one word of the job's condition Running."""
        conditions = self.job(name).get("status", {}).get("conditions", [])
        return next((item["reason"] for item in conditions if item["type"] == "Running"), "")

    def wait_for_reason(self, name: str, *reasons: str, seconds: float = 300) -> str:
        def look() -> str:
            seen = self.reason(name)
            bad = {"Failed", "InvalidSpec"} - set(reasons)
            assert seen not in bad, f"{name} is {seen}: {json.dumps(self.job(name)['status'], indent=1)}"
            return seen if seen in reasons else ""

        return str(wait_for(f"{name} to be {' or '.join(reasons)}", look, seconds))

    def delete_job(self, name: str) -> None:
        self.kubectl("hub", "delete", "cctj", name, "-n", "ml", "--ignore-not-found", "--timeout=180s")

    def install(self) -> None:
        images = build_images(ROOT)
        load_images(self.lab, images)
        steps.install_operator(self.lab, images)
        steps.add_members(self.lab, ["east", "west"])
        steps.prepare_namespace(self.lab, ["hub", "east", "west"])


def example(name: str) -> Obj:
    """A manifest of examples/."""
    return dict(YAML(typ="safe", pure=True).load(ROOT / "examples" / name))


def tiny_job(name: str, *, replicas: int = 1, gpus: int = 1, tokens: int = 4096, **spec: Any) -> Obj:
    """A job that ends within seconds of training."""
    return {
        "apiVersion": "crosscloud.dev/v1alpha1",
        "kind": "CrossCloudTrainingJob",
        "metadata": {"name": name, "namespace": "ml"},
        "spec": {
            "replicas": replicas,
            "replica": {"gpusPerStage": gpus},
            "sync": {"innerSteps": 4},
            "training": {
                "model": {"preset": "tiny-llama"},
                "data": {"train": ["stdlib:*.py"]},
                "tokens": tokens,
                "batchSize": 4 * gpus,
                "sequenceLength": 64,
            },
            "storage": {"uri": f"s3://crosscloud/{name}", "secretName": "s3"},
        }
        | spec,
    }
