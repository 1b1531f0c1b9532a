"""A real API server refuses bad manifests by the name of the field, and the contract's reader agrees with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from apiserver import ApiServer
from crdfiles import (
    EVERY_EXAMPLE,
    EXAMPLES,
    JOBS,
    MEMBERS,
    changed,
    example_name,
    job,
    load_yaml,
    member,
    minimal_spec,
    refused_fields,
)

from crosscloud_trainer.contract import InvalidDocument, JobSpec, read

DRY_RUN = "?dryRun=All&fieldValidation=Strict"
MODEL, DATA, SOURCES = "training.model", "training.data.train", "training.data.sources"


def override(**fields: Any) -> dict[str, Any]:
    return {"name": "a", "index": 0} | fields


# what is wrong with it | edits of the smallest valid spec | the field that the API server names
BAD_SPECS: list[tuple[str, Mapping[str, Any], str]] = [
    ("no replicas", {"replicas": 0}, "replicas"),
    ("fewer than no replicas", {"replicas": -1}, "replicas"),
    ("one and a half replicas", {"replicas": 1.5}, "replicas"),
    ("replicas as text", {"replicas": "2"}, "replicas"),
    ("replicas as a truth value", {"replicas": True}, "replicas"),
    ("replicas as a list", {"replicas": []}, "replicas"),
    ("a billion replicas", {"replicas": 10**9}, "replicas"),
    ("more replicas than 64 bits hold", {"replicas": 10**20}, "replicas"),
    ("no GPUs", {"replica.gpusPerStage": 0}, "replica.gpusPerStage"),
    ("fewer than no GPUs", {"replica.gpusPerStage": -1}, "replica.gpusPerStage"),
    ("half a GPU", {"replica.gpusPerStage": 0.5}, "replica.gpusPerStage"),
    ("ZeRO -1", {"replica.zeroStage": -1}, "replica.zeroStage"),
    ("ZeRO 4", {"replica.zeroStage": 4}, "replica.zeroStage"),
    ("replica as text", {"replica": "big"}, "replica"),
    (
        "two overrides of one name",
        {"replicas": 2, "replicaOverrides": [override(), override(index=1)]},
        "replicaOverrides[1]",
    ),
    (
        "two overrides of one replica",
        {"replicas": 2, "replicaOverrides": [override(), override(name="b")]},
        "replicaOverrides",
    ),
    ("an override of a replica that isn't there", {"replicaOverrides": [override(index=1)]}, "replicaOverrides"),
    ("an override of replica -1", {"replicaOverrides": [override(index=-1)]}, "replicaOverrides[0].index"),
    ("an override without index", {"replicaOverrides": [{"name": "a"}]}, "replicaOverrides[0].index"),
    ("an override without name", {"replicaOverrides": [{"index": 0}]}, "replicaOverrides[0].name"),
    ("an override with an empty name", {"replicaOverrides": [override(name="")]}, "replicaOverrides[0].name"),
    ("an override in capitals", {"replicaOverrides": [override(name="A")]}, "replicaOverrides[0].name"),
    ("an override with a long name", {"replicaOverrides": [override(name="a" * 64)]}, "replicaOverrides[0].name"),
    (
        "one member named twice",
        {"replicaOverrides": [override(members=["east", "east"])]},
        "replicaOverrides[0].members[1]",
    ),
    ("a member without name", {"replicaOverrides": [override(members=[""])]}, "replicaOverrides[0].members[0]"),
    (
        "more members than there may be",
        {"replicaOverrides": [override(members=[f"m{number}" for number in range(17)])]},
        "replicaOverrides[0].members",
    ),
    (
        "members of stages beside members",
        {"replicaOverrides": [override(members=["east"], stageMembers=["west"])]},
        "replicaOverrides",
    ),
    (
        "fewer members than stages",
        {"replica.stages": 2, "replicaOverrides": [override(stageMembers=["west"])]},
        "replicaOverrides",
    ),
    (
        "more members than the override's stages",
        {"replica.stages": 2, "replicaOverrides": [override(stages=1, stageMembers=["west", "east"])]},
        "replicaOverrides",
    ),
    ("no member of a stage", {"replicaOverrides": [override(stageMembers=[])]}, "replicaOverrides[0].stageMembers"),
    (
        "a stage's member in capitals",
        {"replicaOverrides": [override(stageMembers=["West"])]},
        "replicaOverrides[0].stageMembers[0]",
    ),
    ("no GPUs in an override", {"replicaOverrides": [override(gpusPerStage=0)]}, "replicaOverrides[0].gpusPerStage"),
    ("a batch that the ranks can't share", {"replica.gpusPerStage": 3}, "training.batchSize"),
    (
        "a batch that the ranks of one replica can't share",
        {"replicas": 2, "replicaOverrides": [override(gpusPerStage=3)]},
        "training.batchSize",
    ),
    ("no stages", {"replica.stages": 0}, "replica.stages"),
    ("more stages than there may be", {"replica.stages": 65}, "replica.stages"),
    ("no stages in an override", {"replicaOverrides": [override(stages=0)]}, "replicaOverrides[0].stages"),
    ("a codec of boundaries without any", {"activations": {}}, "activations"),
    (
        "a codec of boundaries where overrides leave none",
        {"replica.stages": 2, "activations": {}, "replicaOverrides": [override(index=0, stages=1)]},
        "activations",
    ),
    (
        "a codec of boundaries that keeps the largest",
        {"replica.stages": 2, "activations.codec": "TopK"},
        "activations.codec",
    ),
    ("a script in stages", {"training": ..., "script": {"file": "/a"}, "replica.stages": 2}, "script"),
    (
        "a script in stages in one replica",
        {"training": ..., "script": {"file": "/a"}, "replicas": 2, "replicaOverrides": [override(stages=2)]},
        "script",
    ),
    ("a GPU kind with a space", {"placement.gpu": "A 100"}, "placement.gpu"),
    ("an algorithm that doesn't exist", {"sync.algorithm": "Diloco"}, "sync.algorithm"),
    ("a window of AllReduce", {"sync.algorithm": "AllReduce", "sync.innerSteps": 5}, "sync.innerSteps"),
    (
        "an outer optimizer of AllReduce",
        {"sync.algorithm": "AllReduce", "sync.outerOptimizer": {}},
        "sync.outerOptimizer",
    ),
    ("no sequence at a time", {"training.microBatchSize": 0}, "training.microBatchSize"),
    ("a micro-batch that doesn't divide the batch", {"training.microBatchSize": 3}, "training.microBatchSize"),
    (
        "a micro-batch that doesn't divide the share of one replica's ranks",
        {"replicas": 2, "training.microBatchSize": 4, "replicaOverrides": [override(gpusPerStage=4)]},
        "training.microBatchSize",
    ),
    ("a codec that doesn't exist", {"sync.codec": "int8"}, "sync.codec"),
    ("settings of TopK for another codec", {"sync.topK": {}}, "sync.topK"),
    ("TopK that keeps nothing", {"sync.codec": "TopK", "sync.topK.keep": 0}, "sync.topK.keep"),
    ("TopK that keeps more than half", {"sync.codec": "TopK", "sync.topK.keep": 2049}, "sync.topK.keep"),
    ("TopK in 3 bits", {"sync.codec": "TopK", "sync.topK.bits": 3}, "sync.topK.bits"),
    ("TopK in 2 bits as text", {"sync.codec": "TopK", "sync.topK.bits": "2"}, "sync.topK.bits"),
    ("a window without steps", {"sync.innerSteps": 0}, "sync.innerSteps"),
    ("error feedback as text", {"sync.errorFeedback": "true"}, "sync.errorFeedback"),
    ("a momentum of one", {"sync.outerOptimizer.momentum": 1}, "sync.outerOptimizer.momentum"),
    ("no model", {MODEL: ...}, MODEL),
    ("neither preset nor config", {MODEL: {}}, MODEL),
    ("preset and config", {MODEL: {"preset": "tiny-llama", "config": {"model_type": "llama"}}}, MODEL),
    ("a preset that doesn't exist", {MODEL: {"preset": "llama-400b"}}, f"{MODEL}.preset"),
    ("weights at a relative path", {f"{MODEL}.initFrom": "base"}, f"{MODEL}.initFrom"),
    ("a config without architecture", {MODEL: {"config": {}}}, f"{MODEL}.config.model_type"),
    ("a config with a number as architecture", {MODEL: {"config": {"model_type": 5}}}, f"{MODEL}.config.model_type"),
    ("no data", {DATA: []}, DATA),
    ("data without a name", {DATA: [""]}, f"{DATA}[0]"),
    ("neither files nor sources", {DATA: ...}, "training.data"),
    ("files and sources", {SOURCES: [{"name": "a", "paths": ["/a"]}]}, "training.data"),
    ("no sources", {DATA: ..., SOURCES: []}, SOURCES),
    ("a source without files", {DATA: ..., SOURCES: [{"name": "a"}]}, f"{SOURCES}[0].paths"),
    (
        "text with a column",
        {DATA: ..., SOURCES: [{"name": "a", "paths": ["/a"], "format": "Text", "field": "b"}]},
        f"{SOURCES}[0].field",
    ),
    ("a tokenizer's file without its choice", {"training.data.tokenizerFile": "/a"}, "training.data.tokenizerFile"),
    ("a tokenizer without its file", {"training.data.tokenizer": "File"}, "training.data.tokenizerFile"),
    ("data with a blank name", {DATA: [" "]}, f"{DATA}[0]"),
    ("no tokens", {"training.tokens": ...}, "training.tokens"),
    ("zero tokens", {"training.tokens": 0}, "training.tokens"),
    ("tokens with a unit that doesn't exist", {"training.tokens": "5X"}, "training.tokens"),
    ("tokens as a fraction", {"training.tokens": 1.5}, "training.tokens"),
    ("tokens with an exponent", {"training.tokens": 1e6}, "training.tokens"),
    ("more tokens than text was ever written", {"training.tokens": "1001T"}, "training.tokens"),
    ("more tokens than text was ever written, as a number", {"training.tokens": 10**15 + 1}, "training.tokens"),
    ("a learning rate of zero", {"training.learningRate": 0}, "training.learningRate"),
    ("a learning rate as text", {"training.learningRate": "3e-4"}, "training.learningRate"),
    ("a precision that doesn't exist", {"training.precision": "fp16"}, "training.precision"),
    ("a seed wider than 32 bits", {"training.seed": 2**31}, "training.seed"),
    ("no storage", {"storage": ...}, "storage"),
    ("storage without address", {"storage": {}}, "storage.uri"),
    ("storage at a relative path", {"storage.uri": "models"}, "storage.uri"),
    ("an empty name of a Secret", {"storage.secretName": ""}, "storage.secretName"),
    ("a Secret's name with a line feed", {"storage.secretName": "s3\n"}, "storage.secretName"),
    ("a checkpoint at every zeroth step", {"checkpoint.everySteps": 0}, "checkpoint.everySteps"),
    ("no checkpoint that stays", {"checkpoint.keep": 0}, "checkpoint.keep"),
    ("no attempts", {"failurePolicy.attempts": 0}, "failurePolicy.attempts"),
    ("a pod template as text", {"podTemplate": "none"}, "podTemplate"),
]

# misspelt or out of place
UNKNOWN_FIELDS = [
    "replica_count",
    "replica.gpus",
    "sync.inner_steps",
    "sync.outerOptimizer.beta",
    "sync.topK.density",
    "training.bachSize",
    "training.model.name",
    "training.data.test",
    "storage.secret",
    "placement.members",
    "checkpoint.every_steps",
    "failurePolicy.retries",
    "suspend",
]

BAD_MEMBERS: list[tuple[str, Mapping[str, Any], str]] = [
    ("no access", {"access": ...}, "access"),
    ("neither kubeconfig nor in-cluster", {"access": {}}, "access"),
    ("kubeconfig and in-cluster", {"access": {"kubeconfigSecret": {"name": "a"}, "inCluster": {}}}, "access"),
    ("a Secret without name", {"access": {"kubeconfigSecret": {}}}, "access.kubeconfigSecret.name"),
    ("a Secret with an empty name", {"access.kubeconfigSecret.name": ""}, "access.kubeconfigSecret.name"),
    ("a gateway that doesn't exist", {"gateway": {"type": "Tunnel"}}, "gateway.type"),
    ("a gateway's address with a port", {"gateway": {"address": "example.org:80"}}, "gateway.address"),
    (
        "In without values",
        {"allowedNamespaces": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
        "allowedNamespaces.matchExpressions[0].values",
    ),
    (
        "Exists with values",
        {"allowedNamespaces": {"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]}},
        "allowedNamespaces.matchExpressions[0].values",
    ),
    (
        "an operator that doesn't exist",
        {"allowedNamespaces": {"matchExpressions": [{"key": "a", "operator": "Like", "values": ["b"]}]}},
        "allowedNamespaces.matchExpressions[0].operator",
    ),
    ("namespaces as a list", {"allowedNamespaces": ["ml"]}, "allowedNamespaces"),
]


def contract_fields(spec: Mapping[str, Any]) -> list[str]:
    """The fields that the contract's reader names; none where it takes the spec."""
    try:
        read(JobSpec, spec)
    except InvalidDocument as fault:
        return [problem.path for problem in fault.problems]
    return []


@pytest.mark.parametrize(("edits", "field"), [case[1:] for case in BAD_SPECS], ids=[case[0] for case in BAD_SPECS])
def test_a_bad_spec_is_refused_by_the_name_of_its_field(hub: ApiServer, edits: Mapping[str, Any], field: str) -> None:
    spec = changed(minimal_spec(), edits)
    status, answer = hub.raw("POST", JOBS + DRY_RUN, job(spec))
    assert status == 422, answer
    assert f"spec.{field}" in refused_fields(answer), answer["message"]
    named = contract_fields(spec)
    assert any(path.startswith(field) or field.startswith(path) for path in named), named


@pytest.mark.parametrize("field", UNKNOWN_FIELDS)
def test_an_unknown_field_is_refused_by_its_name(hub: ApiServer, field: str) -> None:
    spec = changed(minimal_spec(), {field: 1})
    status, answer = hub.raw("POST", JOBS + DRY_RUN, job(spec))
    assert status == 400
    assert f'unknown field "spec.{field}"' in answer["message"]
    assert field in contract_fields(spec)


@pytest.mark.parametrize("length", [63, 64, 200])
def test_a_name_that_is_no_label_is_refused_with_the_limit(hub: ApiServer, length: int) -> None:
    for path, body in (
        (JOBS, job(minimal_spec(), "n" * length)),
        (MEMBERS, member({"access": {"inCluster": {}}}, "n" * length)),
    ):
        status, answer = hub.raw("POST", path + DRY_RUN, body)
        assert (status, "at most 63" in str(answer)) == ((201, False) if length == 63 else (422, True)), answer


def test_a_name_with_a_dot_is_refused(hub: ApiServer) -> None:
    status, answer = hub.raw("POST", JOBS + DRY_RUN, job(minimal_spec(), "tiny.llama"))
    assert status == 422
    assert "metadata.name" in answer["message"]


@pytest.mark.parametrize(("edits", "field"), [case[1:] for case in BAD_MEMBERS], ids=[case[0] for case in BAD_MEMBERS])
def test_a_bad_member_is_refused_by_the_name_of_its_field(hub: ApiServer, edits: Mapping[str, Any], field: str) -> None:
    good = {"access": {"kubeconfigSecret": {"name": "member-east"}}}
    status, answer = hub.raw("POST", MEMBERS + DRY_RUN, member(changed(good, edits)))
    assert status == 422, answer
    assert f"spec.{field}" in refused_fields(answer), answer["message"]


@pytest.mark.parametrize("example", EVERY_EXAMPLE, ids=example_name)
def test_the_examples_are_taken(hub: ApiServer, example: Any) -> None:
    hub.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(example))
    document = load_yaml(example.read_text())
    if document["kind"] == "CrossCloudTrainingJob":
        assert contract_fields(document["spec"]) == []


@pytest.mark.parametrize(
    ("written", "rate"),
    [("3e-4", 3e-4), ("3E-4", 3e-4), ("1.5e-05", 1.5e-5), ("+3e-4", 3e-4), (".001", 1e-3), ("1", 1.0)],
)
def test_kubectl_and_our_reader_see_the_same_number(hub: ApiServer, written: str, rate: float) -> None:
    text = (EXAMPLES / "job.yaml").read_text().replace("learningRate: 3e-4", f"learningRate: {written}")
    stored = hub.kubectl(
        "create", "--dry-run=server", "-f", "-", "-o", "jsonpath={.spec.training.learningRate}", stdin=text
    )
    assert float(stored) == rate
    assert read(JobSpec, load_yaml(text)["spec"]).training.learning_rate == rate
