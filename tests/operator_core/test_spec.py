"""What of a job's spec only the operator can judge: the podTemplate, with every fault at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_core.players import SETTINGS, job

from crosscloud_operator.domain.errors import InvalidJob
from crosscloud_operator.domain.spec import read_job, request


def read(**spec: Any) -> Any:
    obj = job(**spec)
    obj["metadata"] |= {"uid": "u", "generation": 1}
    return read_job(obj, SETTINGS)


def faults(**template: Any) -> dict[str, str]:
    with pytest.raises(InvalidJob) as fault:
        read(podTemplate=template)
    return {problem.path.removeprefix("spec.podTemplate."): problem.allowed for problem in fault.value.problems}


def test_what_the_operator_sets_itself_is_refused_field_by_field() -> None:
    trainer = {
        "name": "trainer",
        "command": ["sh"],
        "env": [{"name": "A"}, {"name": "CROSSCLOUD_RUN", "value": "x"}],
        "volumeMounts": [{"name": "x", "mountPath": "/etc/crosscloud/tls"}],
        "resources": {"limits": {"nvidia.com/gpu": 8}},
    }
    found = faults(
        spec={
            "restartPolicy": "Always",
            "nodeName": "n1",
            "volumes": [{"name": "crosscloud-tls", "emptyDir": {}}],
            "containers": [{"image": "nameless:1"}, trainer],
        }
    )
    assert set(found) == {
        "spec.restartPolicy",
        "spec.nodeName",
        "spec.volumes[0].name",
        "spec.containers[0].name",
        "spec.containers[1].command",
        "spec.containers[1].env[1].name",
        "spec.containers[1].volumeMounts[0].mountPath",
        "spec.containers[1].resources.limits[nvidia.com/gpu]",
    }


def test_what_has_the_wrong_shape_is_named_not_stumbled_over() -> None:
    assert faults(spec=[]) == {"spec": "must be an object"}
    assert faults(spec={"containers": {"name": "trainer"}, "volumes": ["data"]}) == {
        "spec.containers": "must be a list",
        "spec.volumes[0]": "must be an object",
    }


def data_for(*members: list[str] | None) -> dict[str, Any]:
    """A job's training with a source for each list of members."""
    sources = [
        {"name": f"s{number}", "paths": ["/data/*"], **({"members": names} if names else {})}
        for number, names in enumerate(members)
    ]
    return {"model": {"preset": "tiny-llama"}, "data": {"sources": sources}, "tokens": 1000}


def test_replicas_are_placed_only_where_there_is_data_for_them() -> None:
    pinned = [{"name": "a", "index": 0, "members": ["north", "west"]}]
    for members, first, second in (
        (([["east"], ["west"]]), ("west",), ("east", "west")),
        (([["east"], None]), ("north", "west"), ()),
    ):
        made = read(replicas=2, replicaOverrides=pinned, training=data_for(*members))
        assert [need.members for need in request(made, SETTINGS).replicas] == [first, second]


def test_the_stages_of_a_replica_lie_where_one_source_is_held_by_all_their_members() -> None:
    for members, sets in (
        ([["east", "west"], ["west", "north"]], ({"east", "west"}, {"west", "north"})),
        ([["east"], None], ()),
    ):
        made = read(replica={"stages": 2}, training=data_for(*members))
        assert all(need.together == tuple(map(frozenset, sets)) for need in request(made, SETTINGS).replicas)


def test_a_replica_pinned_to_a_member_without_data_is_refused() -> None:
    pinned = [{"name": "a", "index": 0, "members": ["north"]}]
    with pytest.raises(InvalidJob) as fault:
        read(replicas=2, replicaOverrides=pinned, training=data_for(["east"], ["west"]))
    (problem,) = fault.value.problems
    assert problem.path == "spec.replicaOverrides[0].members"
    assert "training.data.sources are for east, west only" in problem.allowed


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "env", "limits"]), inner),
    max_leaves=4,
)
FIELDS = (
    "containers",
    "initContainers",
    "volumes",
    "tolerations",
    "nodeSelector",
    "affinity",
    "securityContext",
    "env",
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.sampled_from(FIELDS), JSON), st.dictionaries(st.sampled_from(["labels", "annotations"]), JSON)
)
def test_no_pod_template_makes_the_operator_stumble(spec: dict[str, Any], metadata: dict[str, Any]) -> None:
    try:
        found = read(podTemplate={"spec": spec, "metadata": metadata})
    except InvalidJob:
        return
    request(found, SETTINGS)


def test_a_plain_job_asks_for_each_replica_in_its_own_size() -> None:
    overrides = [{"name": "clinic", "index": 1, "members": ["west"], "stages": 3, "gpusPerStage": 2, "zeroStage": 2}]
    asked = request(read(replicaOverrides=overrides), SETTINGS)
    assert [(need.gpus, need.stages, need.zero_stage, need.members) for need in asked.replicas] == [
        (4, 1, 1, ()),
        (2, 3, 2, ("west",)),
    ]


def test_stages_that_are_named_a_member_each_are_asked_for_there() -> None:
    overrides = [{"name": "split", "index": 1, "stages": 2, "stageMembers": ["west", "east"]}]
    plain, split = request(read(replicaOverrides=overrides), SETTINGS).replicas
    assert (plain.stage_members, split.stage_members) == ((), ("west", "east"))
    assert not split.may_use("north")


def test_stages_named_to_members_that_share_no_data_are_refused_by_name() -> None:
    split = [{"name": "split", "index": 0, "stages": 2, "stageMembers": ["west", "east"]}]
    read(replicaOverrides=split, training=data_for(["east", "west"], ["west"]))
    with pytest.raises(InvalidJob) as fault:
        read(replicaOverrides=split, training=data_for(["east"], ["west"]))
    (problem,) = fault.value.problems
    assert problem.path == "spec.replicaOverrides[0].stageMembers"
    assert "must hold a source of data together" in problem.allowed
