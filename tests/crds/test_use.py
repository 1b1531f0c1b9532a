"""What a user sees of the two kinds through the real kubectl."""

from __future__ import annotations

from typing import Any

import pytest
from apiserver import ApiServer
from crdfiles import JOB_CRD, JOBS, MEMBER_CRD, MEMBERS, job, member, minimal_spec, properties, schema_of

MERGE = "application/merge-patch+json"
TIME = "2026-01-02T03:04:05Z"

JOB_STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "conditions": [
        {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": "",
            "lastTransitionTime": TIME,
            "observedGeneration": 1,
        }
        for kind, status, reason in (("Placed", "True", "Planned"), ("Running", "True", "WaitingForPeers"))
    ],
    "startedAt": TIME,
    "restarts": 2,
    "progress": {"step": 120, "totalSteps": 400, "loss": "2.5318", "tokensPerSecond": 5210, "wanPerStep": "1.2 MB"},
}
MEMBER_STATUS: dict[str, Any] = {
    "conditions": [
        {"type": "Ready", "status": "True", "reason": "Connected", "message": "", "lastTransitionTime": TIME},
        {"type": "CredentialsValid", "status": "True", "reason": "Valid", "message": "", "lastTransitionTime": TIME},
    ],
    "version": "v1.34.4",
    "gpus": 12,
    "freeGpus": 7,
    "nodePools": [{"name": "a", "gpu": "NVIDIA-L4", "nodes": 2, "gpus": 12, "freeGpus": 7}],
}


def filler(schema: dict[str, Any]) -> Any:
    """A value for every field of a schema."""
    if schema["type"] == "object":
        return {name: filler(below) for name, below in schema["properties"].items()}
    if schema["type"] == "array":
        return [filler(schema["items"])]
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("format") == "date-time":
        return TIME
    return {"string": "Text", "integer": 1, "boolean": True}[schema["type"]]


@pytest.fixture(scope="module")
def objects(hub: ApiServer) -> None:
    hub.request("POST", JOBS, job(minimal_spec(), "seen"))
    hub.request("PATCH", f"{JOBS}/seen/status", {"status": JOB_STATUS}, MERGE)
    hub.request("POST", MEMBERS, member({"access": {"inCluster": {}}}, "seen"))
    hub.request("PATCH", f"{MEMBERS}/seen/status", {"status": MEMBER_STATUS}, MERGE)


def columns(text: str) -> dict[str, str]:
    """Header to cell of the only row, by the places of the headers."""
    header, row = text.rstrip("\n").split("\n")
    starts = [
        0,
        *(
            place + 3
            for place in range(len(header))
            if header[place : place + 3] == "   " and header[place + 3 : place + 4].strip()
        ),
    ]
    ends = [*starts[1:], None]
    return {header[a:b].strip(): row[a:b].strip() for a, b in zip(starts, ends, strict=True)}


@pytest.mark.usefixtures("objects")
def test_a_line_of_kubectl_get_tells_the_story_of_a_job(hub: ApiServer) -> None:
    found = columns(hub.kubectl("get", "cctj", "-n", "ml", "seen"))
    age = found.pop("AGE")
    assert age
    assert found == {
        "NAME": "seen",
        "STATUS": "WaitingForPeers",
        "STEP": "120",
        "LOSS": "2.5318",
        "TOKENS/S": "5210",
        "WAN/STEP": "1.2 MB",
        "RESTARTS": "2",
    }


@pytest.mark.usefixtures("objects")
def test_a_line_of_kubectl_get_tells_the_story_of_a_member(hub: ApiServer) -> None:
    found = columns(hub.kubectl("get", "mcl", "seen"))
    assert found.pop("AGE")
    assert found == {
        "NAME": "seen",
        "READY": "True",
        "REASON": "Connected",
        "VERSION": "v1.34.4",
        "GPUS": "12",
        "FREE": "7",
    }


@pytest.mark.usefixtures("objects")
@pytest.mark.parametrize("category", ["all", "training"])
def test_both_kinds_are_found_by_their_categories(hub: ApiServer, category: str) -> None:
    found = hub.kubectl("get", category, "-A", "-o", "name")
    assert "crosscloudtrainingjob.crosscloud.dev/seen" in found
    assert "membercluster.crosscloud.dev/seen" in found


@pytest.mark.parametrize(
    ("crd", "path", "body"),
    [
        (JOB_CRD, JOBS, job(minimal_spec(), "whole")),
        (MEMBER_CRD, MEMBERS, member({"access": {"inCluster": {}}}, "whole")),
    ],
    ids=["job", "member"],
)
def test_every_field_of_the_status_can_be_stored(hub: ApiServer, crd: Any, path: str, body: dict[str, Any]) -> None:
    status = filler(schema_of(crd)["properties"]["status"])
    hub.request("POST", path, body)
    url = f"{path}/whole/status?fieldValidation=Strict"
    assert hub.request("PATCH", url, {"status": status}, MERGE)["status"] == status


def test_a_users_spec_and_the_operators_status_are_written_apart(hub: ApiServer) -> None:
    body = job(minimal_spec(), "apart") | {"status": {"restarts": 5}}
    assert "status" not in hub.request("POST", JOBS, body)
    edit = {"spec": {"replicas": 3}, "status": {"restarts": 1}}
    answer = hub.request("PATCH", f"{JOBS}/apart/status", edit, MERGE)
    assert (answer["spec"]["replicas"], answer["status"]) == (1, {"restarts": 1})


@pytest.mark.parametrize(("kind", "crd"), [("cctj", JOB_CRD), ("mcl", MEMBER_CRD)])
def test_kubectl_explain_knows_every_field(hub: ApiServer, kind: str, crd: Any) -> None:
    said = hub.kubectl("explain", kind, "--recursive")
    for path, _ in properties(schema_of(crd)):
        assert path.rsplit(".", 1)[-1].removesuffix("[]") in said, path


def test_kubectl_explain_teaches_units_and_choices(hub: ApiServer) -> None:
    said = " ".join(hub.kubectl("explain", "cctj.spec.training.tokens").split())
    assert "with k, M, G or T (powers of 1000) behind it, for example 200M" in said
