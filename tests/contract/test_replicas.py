"""In what the replicas of a job may differ, and how each is cut into stages."""

import json

import pytest
from contract.documents import minimal, run_document

from crosscloud_trainer.contract import InvalidDocument, JobSpec, read, read_run_document
from crosscloud_trainer.sizes import CodecSpec


def test_a_batch_that_the_ranks_of_one_replica_cannot_share_is_refused() -> None:
    bad = minimal() | {"replicas": 2, "replicaOverrides": [{"name": "big", "index": 1, "gpusPerStage": 3}]}
    with pytest.raises(InvalidDocument, match=r"^training\.batchSize: found 8; must be a multiple .* 3"):
        read(JobSpec, bad)


def test_a_micro_batch_that_does_not_divide_the_share_of_some_rank_is_refused() -> None:
    bad = minimal() | {"replicas": 2, "replicaOverrides": [{"name": "big", "index": 1, "gpusPerStage": 4}]}
    bad["training"]["microBatchSize"] = 4
    with pytest.raises(InvalidDocument, match=r"^training\.microBatchSize: found 4; must divide the share .* 2"):
        read(JobSpec, bad)


@pytest.mark.parametrize(
    ("batch", "given", "ranks", "stages", "expected"),
    [
        (8, None, 1, 1, 8),
        (8, None, 2, 1, 4),
        (8, None, 1, 2, 4),
        (8, None, 2, 2, 2),
        (8, None, 1, 3, 2),
        (60, None, 2, 4, 6),
        (7, None, 1, 2, 1),
        (2, None, 1, 4, 1),
        (8, 8, 1, 2, 8),
        (8, 1, 1, 1, 1),
    ],
)
def test_a_micro_batch_is_the_largest_that_gives_each_stage_one_unless_it_is_given(
    batch: int, given: int | None, ranks: int, stages: int, expected: int
) -> None:
    document = minimal()
    document["training"] |= {"batchSize": batch} | ({"microBatchSize": given} if given else {})
    assert read(JobSpec, document).training.micro_batch(ranks, stages) == expected


def test_a_script_is_refused_where_some_replica_has_several_stages() -> None:
    script = {"script": {"file": "/app/train.py"}, "storage": {"uri": "/models"}, "replicas": 2}
    for more in ({"replica": {"stages": 2}}, {"replicaOverrides": [{"name": "deep", "index": 1, "stages": 2}]}):
        with pytest.raises(InvalidDocument, match=r'^script: found "/app/train.py"; runs replicas of one stage only'):
            read(JobSpec, script | more)
    flat = [{"name": name, "index": index, "stages": 1} for index, name in enumerate("ab")]
    assert read(JobSpec, script | {"replica": {"stages": 2}, "replicaOverrides": flat}).script


def test_a_codec_of_boundaries_is_refused_where_no_replica_has_any() -> None:
    given = minimal() | {"activations": {"codec": "BF16"}}
    with pytest.raises(InvalidDocument, match=r"^activations: .* every replica has one; leave it out"):
        read(JobSpec, given)
    cut = read(JobSpec, given | {"replica": {"stages": 2}})
    assert cut.activations is not None
    assert cut.activations.codec_spec == CodecSpec("BF16")
    assert read(JobSpec, given | {"replicaOverrides": [{"name": "deep", "index": 0, "stages": 2}]}).stages_of(0) == 2


def test_an_override_of_zero_0_counts() -> None:
    given = minimal() | {"replica": {"zeroStage": 2}, "replicaOverrides": [{"name": "a", "index": 0, "zeroStage": 0}]}
    assert read(JobSpec, given).zero_stage_of(0) == 0


def test_the_stages_of_a_replica_are_numbered_in_order_and_have_as_many_ranks_each() -> None:
    stages = [
        {"index": 0, "member": "east", "nodes": 1, "gpusPerNode": 4},
        {"index": 1, "member": "west", "nodes": 2, "gpusPerNode": 2},
    ]
    document = run_document()
    document["replicas"][0]["stages"] = stages
    document["activations"] = {"codec": "Int8"}
    assert [stage.ranks for stage in read_run_document(json.dumps(document)).replicas[0].stages] == [4, 4]
    stages[1] |= {"index": 2, "nodes": 1}
    with pytest.raises(InvalidDocument) as caught:
        read_run_document(json.dumps(document))
    assert [str(problem) for problem in caught.value.problems] == [
        "replicas[0].stages: found [0, 2]; must be numbered from 0, in their order",
        "replicas[0].stages: found [4, 2]; must have as many ranks each",
    ]


def test_overrides_name_each_replica_once_and_only_replicas_that_exist() -> None:
    overrides = [{"name": "a", "index": 0}, {"name": "b", "index": 0}, {"name": "c", "index": 2}]
    with pytest.raises(InvalidDocument) as caught:
        read(JobSpec, minimal() | {"replicas": 2, "replicaOverrides": overrides})
    assert [p.path for p in caught.value.problems] == [
        "replicaOverrides[1].index",
        "replicaOverrides[2].index",
    ]


def test_stages_with_a_member_each_need_one_for_every_stage_and_no_choice_beside() -> None:
    split = {"name": "split", "index": 0, "stageMembers": ["west", "east"]}
    cut = minimal() | {"replica": {"stages": 2}}
    found = read(JobSpec, cut | {"replicaOverrides": [split]}).override(0)
    assert found is not None
    assert found.stage_members == ("west", "east")
    with pytest.raises(InvalidDocument) as caught:
        read(JobSpec, cut | {"replicaOverrides": [split | {"stages": 3, "members": ["west"]}]})
    assert [str(problem) for problem in caught.value.problems] == [
        'replicaOverrides[0].stageMembers: found ["west", "east"]; can\'t stand beside members; leave one of them out',
        'replicaOverrides[0].stageMembers: found ["west", "east"]; '
        "must name one member for each stage of the replica, which has 3",
    ]
