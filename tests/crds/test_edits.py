"""A job's spec can't be changed: whatever the edit, it is refused by the name of the field (case C05)."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from apiserver import ApiServer
from crdfiles import EXAMPLES, JOB_CRD, JOBS, job, load_yaml, minimal_spec, properties, refused_fields, schema_of

MERGE, PATCH = "application/merge-patch+json", "application/json-patch+json"
FULL = load_yaml((EXAMPLES / "job-full.yaml").read_text())

# Another valid value for every field of the full example.
OTHER: dict[str, Any] = {
    "replicas": 4,
    "replica.stages": 4,
    "replica.gpusPerStage": 1,
    "replica.zeroStage": 2,
    "replicaOverrides": [],
    "replicaOverrides[0].name": "clinic",
    "replicaOverrides[0].index": 0,
    "replicaOverrides[0].members": ["east"],
    "replicaOverrides[1].stageMembers": ["east", "east"],
    "replicaOverrides[0].stages": 2,
    "replicaOverrides[0].gpusPerStage": 8,
    "replicaOverrides[0].zeroStage": 1,
    "placement.gpu": "NVIDIA-H100-80GB-HBM3",
    "sync.innerSteps": 51,
    "sync.algorithm": "AllReduce",
    "sync.codec": "None",
    "sync.topK.keep": 32,
    "sync.topK.bits": 4,
    "sync.errorFeedback": False,
    "sync.outerOptimizer.learningRate": 0.6,
    "sync.outerOptimizer.momentum": 0.8,
    "activations.codec": "Int8",
    "training.model": {"preset": "tiny-llama"},
    "training.model.config.hidden_size": 512,
    "training.model.initFrom": "s3://models/other",
    "training.data.sources": [{"name": "web", "paths": ["/data/*.txt"]}],
    "training.data.sources[0].name": "books",
    "training.data.sources[0].paths": ["/data/other/*.txt"],
    "training.data.sources[0].format": "JSONL",
    "training.data.sources[0].field": "body",
    "training.data.sources[0].members": ["east"],
    "training.data.validation": [],
    "training.data.tokenizer": "Bytes",
    "training.data.tokenizerFile": "/data/other.json",
    "training.data.packing": "Stream",
    "training.tokens": "201M",
    "training.batchSize": 32,
    "training.microBatchSize": 1,
    "training.sequenceLength": 513,
    "training.learningRate": 1e-3,
    "training.schedule": "Constant",
    "training.warmupSteps": 201,
    "training.weightDecay": 0,
    "training.gradientClipping": 2,
    "training.precision": "FP32",
    "training.seed": 2,
    "training.evaluateEvery": 50,
    "storage.uri": "s3://models/other",
    "storage.secretName": "other",
    "checkpoint.everySteps": 501,
    "checkpoint.keep": 4,
    "failurePolicy.attempts": 4,
    "podTemplate": {"spec": {"containers": [{"name": "trainer", "image": "other"}]}},
    "podTemplate.spec.containers[0].image": "other",
    "podTemplate.spec.volumes[0].name": "other",
}
ALSO_NAMED = {
    "replica.stages": ["spec.replicaOverrides"],
    "sync.codec": ["spec.sync.topK"],
    "sync.algorithm": ["spec.sync.innerSteps", "spec.sync.outerOptimizer"],
    "training.data.tokenizer": ["spec.training.data.tokenizerFile"],
}  # settings of what was there
OPTIONAL = ["podTemplate", "placement.gpu", "storage.secretName", "replicaOverrides", "sync.topK", "sync.innerSteps"]
OPTIONAL += ["activations", "sync.outerOptimizer", "training.microBatchSize", "checkpoint.everySteps"]
OUTER_OPTIMIZER = [
    "sync.outerOptimizer.learningRate",
    "sync.outerOptimizer.momentum",
]  # the codec says what is left out
EITHER_OR = {"training.model.preset", "training.model.config.model_type", "training.data.train"}
OF_A_SCRIPT = {"script.file": "/app/other.py", "script.args": ["--steps", "20"]}


def pointer(path: str) -> str:
    return "/spec/" + path.replace("[", ".").replace("]", "").replace(".", "/")


def named(path: str) -> list[str]:
    """The field and all fields around it: an error may name any of these, but no other."""
    parts = path.replace("[", ".[").split(".")
    return ["spec." + ".".join(parts[:count]).replace(".[", "[") for count in range(1, len(parts) + 1)]


@pytest.fixture(scope="module")
def running(hub: ApiServer) -> dict[str, Any]:
    """A job with every field set, as stored."""
    body = copy.deepcopy(FULL)
    body["metadata"]["name"] = "running"
    stored: dict[str, Any] = hub.request("POST", JOBS, body)
    return stored


@pytest.mark.parametrize("path", OTHER)
def test_a_changed_field_is_refused_by_its_name(hub: ApiServer, running: dict[str, Any], path: str) -> None:
    operation = {"op": "replace", "path": pointer(path), "value": OTHER[path]}
    status, answer = hub.raw("PATCH", f"{JOBS}/running", [operation], PATCH)
    assert status == 422, answer
    fields = refused_fields(answer)
    assert fields, answer
    assert set(fields) <= {*named(path), *ALSO_NAMED.get(path, [])}, answer["message"]
    assert "can't be changed; delete the job and create it again" in answer["message"]
    assert hub.request("GET", f"{JOBS}/running")["metadata"]["generation"] == 1


@pytest.mark.parametrize("path", OF_A_SCRIPT)
def test_a_script_that_is_changed_is_refused_by_the_name_of_the_field(hub: ApiServer, path: str) -> None:
    name = "script-" + path.lower().replace(".", "-")
    spec = {"script": {"file": "/app/train.py", "args": ["--steps", "10"]}, "storage": {"uri": "/models"}}
    hub.request("POST", JOBS, job(spec, name))
    operation = {"op": "replace", "path": pointer(path), "value": OF_A_SCRIPT[path]}
    status, answer = hub.raw("PATCH", f"{JOBS}/{name}", [operation], PATCH)
    assert (status, refused_fields(answer)) == (422, [f"spec.{path}"]), answer


def test_a_job_can_not_become_one_of_a_script(hub: ApiServer, running: dict[str, Any]) -> None:
    edit = {"spec": {"training": None, "script": {"file": "/app/train.py"}}}
    status, answer = hub.raw("PATCH", f"{JOBS}/running", edit, MERGE)
    assert status == 422, answer
    assert {"spec.training", "spec.script"} <= set(refused_fields(answer))


def test_every_field_of_the_spec_is_tried() -> None:
    schema = schema_of(JOB_CRD)["properties"]["spec"]
    leaves = {path.replace("[]", "[0]") for path, part in properties(schema) if "properties" not in part}
    assert leaves - EITHER_OR <= {re.sub(r"\[\d+\]", "[0]", path) for path in (*OTHER, *OF_A_SCRIPT)}


@pytest.mark.parametrize("path", [*OPTIONAL, *OUTER_OPTIMIZER])
def test_taking_an_optional_field_away_is_refused(hub: ApiServer, running: dict[str, Any], path: str) -> None:
    status, answer = hub.raw("PATCH", f"{JOBS}/running", [{"op": "remove", "path": pointer(path)}], PATCH)
    assert status == 422, answer
    assert refused_fields(answer) == [f"spec.{path}"]


@pytest.mark.parametrize("path", OPTIONAL)
def test_adding_an_optional_field_is_refused(hub: ApiServer, path: str) -> None:
    name = "adding-" + path.lower().replace(".", "-")
    hub.request(
        "POST", JOBS, job({**minimal_spec(), "replicas": 2, "replica": {"stages": 2}, "sync": {"codec": "TopK"}}, name)
    )
    value = {
        "replicaOverrides": FULL["spec"]["replicaOverrides"],
        "podTemplate": FULL["spec"]["podTemplate"],
        "sync.topK": {},
        "activations": {},
    }
    other = value.get(path, "other")
    status, answer = hub.raw("PATCH", f"{JOBS}/{name}", [{"op": "add", "path": pointer(path), "value": other}], PATCH)
    assert status == 422, answer
    assert f"spec.{path}" in refused_fields(answer)


def test_what_was_left_out_of_the_outer_optimizer_can_not_be_added(hub: ApiServer) -> None:
    hub.request("POST", JOBS, job({**minimal_spec(), "sync": {"codec": "TopK", "outerOptimizer": {}}}, "adding-outer"))
    edit = {"spec": {"sync": {"outerOptimizer": {"learningRate": 0.7, "momentum": 0.9}}}}
    status, answer = hub.raw("PATCH", f"{JOBS}/adding-outer", edit, MERGE)
    assert status == 422, answer
    assert sorted(refused_fields(answer)) == [f"spec.{path}" for path in OUTER_OPTIMIZER]


def test_a_bad_value_is_refused_on_an_edit_too(hub: ApiServer, running: dict[str, Any]) -> None:
    status, answer = hub.raw("PATCH", f"{JOBS}/running", {"spec": {"replicas": -1}}, MERGE)
    assert status == 422
    assert "greater than or equal to 1" in answer["message"]


def test_all_bad_edits_are_named_at_once(hub: ApiServer, running: dict[str, Any]) -> None:
    edit = {"spec": {"replicas": 4, "sync": {"codec": "None"}, "storage": {"uri": "s3://a/b"}}}
    status, answer = hub.raw("PATCH", f"{JOBS}/running", edit, MERGE)
    assert status == 422
    assert set(refused_fields(answer)) == {
        "spec.replicas",
        "spec.sync.codec",
        "spec.sync.topK",
        "spec.storage.uri",
    }


def test_labels_and_annotations_can_be_changed(hub: ApiServer, running: dict[str, Any]) -> None:
    answer = hub.request("PATCH", f"{JOBS}/running", {"metadata": {"labels": {"team": "language"}}}, MERGE)
    assert answer["metadata"]["generation"] == 1


def test_applying_the_same_manifest_again_changes_nothing(hub: ApiServer) -> None:
    example = str(EXAMPLES / "job-full.yaml")
    hub.kubectl("apply", "-f", example)
    assert hub.kubectl("apply", "-f", example).strip().endswith("unchanged")


def test_scaling_is_refused_rather_than_ignored(hub: ApiServer, running: dict[str, Any]) -> None:
    said = hub.kubectl("scale", "cctj/running", "-n", "ml", "--replicas=3", check=False)
    assert "NotFound" in said, "there is no scale subresource, since replicas can't be changed"
    assert hub.request("GET", f"{JOBS}/running")["spec"]["replicas"] == running["spec"]["replicas"]
