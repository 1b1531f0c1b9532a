"""A DeepSpeed script of one's own as a job on real clusters, fetched from the object store by each pod."""

from __future__ import annotations

from pathlib import Path

import fsspec
from cloud import ROOT, Cloud, tiny_job


def test_a_script_at_an_address_trains_in_two_members_and_its_replicas_end_alike(cloud: Cloud) -> None:
    keys = cloud.lab.s3_environment()
    store = fsspec.filesystem(
        "s3",
        key=keys["AWS_ACCESS_KEY_ID"],
        secret=keys["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=keys["AWS_ENDPOINT_URL"],
        client_kwargs={"region_name": keys["AWS_DEFAULT_REGION"]},
    )
    store.put_file(str(ROOT / "examples/library/train.py"), "crosscloud/scripts/train.py")
    job = tiny_job(
        "scripted", replicas=2, script={"file": "s3://crosscloud/scripts/train.py", "args": ["--steps", "20"]}
    )
    del job["spec"]["training"]
    members = ("east", "west")
    job["spec"] |= {
        "replica": {"gpusPerStage": 2, "zeroStage": 2},
        "replicaOverrides": [{"name": name, "index": index, "members": [name]} for index, name in enumerate(members)],
    }
    cloud.apply("hub", job)
    cloud.wait_for_reason("scripted", "Succeeded", seconds=600)
    status = cloud.job("scripted")["status"]
    assert status["progress"]["step"] == 20
    digests = {row["digest"] for row in status["replicaStatuses"]}
    assert len(digests) == 1, digests
    assert status["progress"]["wanBytes"] > 0
    selector = ("-n", "ml", "-l", "crosscloud.dev/job=scripted,crosscloud.dev/replica=0", "-c", "trainer", "--tail=-1")
    stored = store.ls(status["result"]["uri"], detail=False)
    assert [Path(path).name for path in stored] == ["model.pt"], "stored after the last round"
    assert "loss " in cloud.kubectl("east", "logs", *selector), "what the script prints is in the pod's log"
    cloud.delete_job("scripted")
