"""The smallest documents that are valid."""

from typing import Any

from crosscloud_trainer import contract
from crosscloud_trainer.contract import JobSpec, dump, read


def minimal() -> dict[str, Any]:
    return {
        "training": {"model": {"preset": "tiny-llama"}, "data": {"train": ["stdlib:*.py"]}, "tokens": "1M"},
        "storage": {"uri": "s3://models/tiny"},
    }


def run_document() -> dict[str, Any]:
    spec = dump(read(JobSpec, minimal()))
    stage = {"index": 0, "member": "east", "nodes": 1, "gpusPerNode": 2}
    return {
        "apiVersion": contract.RUN_VERSION,
        "job": {"namespace": "ml", "name": "tiny", "uid": "1f0c"},
        "attempt": 1,
        "home": {"number": 1, "member": "east"},
        "replicas": [{"index": 0, "incarnation": 1, "zeroStage": 1, "stages": [stage]}],
        "sync": spec["sync"],
        "training": spec["training"],
        "storageUri": "s3://models/tiny",
    }
