"""Faults on real clusters: a killed pod, a cut link, a refused pod, a hostile kubeconfig."""

from __future__ import annotations

import base64
import json
import re

from cloud import Cloud, Obj, example, tiny_job, wait_for


def test_a_killed_pod_ends_the_attempt_and_the_next_one_goes_on_from_the_checkpoint(cloud: Cloud) -> None:
    cloud.apply("hub", tiny_job("mortal", replicas=2, gpus=2, tokens=150_000, checkpoint={"everySteps": 20}))
    wait_for("a checkpoint", lambda: cloud.job("mortal").get("status", {}).get("checkpoints"), seconds=400)
    victim = cloud.pods("mortal", "east") or cloud.pods("mortal", "west")
    where = "east" if cloud.pods("mortal", "east") else "west"
    name = victim[0]["metadata"]["name"]
    cloud.kubectl(where, "delete", "pod", name, "-n", "ml", "--grace-period=0", "--force")
    wait_for("attempt 2", lambda: cloud.job("mortal")["status"]["attempt"]["number"] == 2, seconds=240)
    first = {
        pod["metadata"]["uid"]
        for pod in cloud.pods("mortal")
        if pod["metadata"]["labels"]["crosscloud.dev/attempt"] == "1"
    }
    assert not first, "attempt 2 starts when all pods of attempt 1 are gone"
    cloud.wait_for_reason("mortal", "Succeeded", seconds=600)
    assert cloud.job("mortal")["status"]["restarts"] == 1
    selector = ("-n", "ml", "-l", "crosscloud.dev/job=mortal,crosscloud.dev/replica", "-c", "trainer", "--tail=-1")
    logs = "".join(cloud.kubectl(member, "logs", *selector) for member in ("east", "west"))
    resumed = [int(step) for step in re.findall(r"resumed from s3://crosscloud/mortal/attempt-1/\S+: step (\d+)", logs)]
    assert len(resumed) == 2, "each replica says where it goes on"
    assert resumed[0] == resumed[1] >= 20
    cloud.delete_job("mortal")


def test_a_cut_link_pauses_both_replicas_at_a_round_and_once_healed_they_end_alike(cloud: Cloud) -> None:
    """What README and `make demo` tell people to try, with fewer and shorter steps."""
    manifest = example("long.yaml")
    manifest["spec"]["training"] |= {"sequenceLength": 64, "tokens": 200_000}

    def both_waiting() -> list[Obj]:
        rows = cloud.job("long")["status"]["replicaStatuses"]
        return rows if [row["activity"] for row in rows] == ["Waiting", "Waiting"] else []

    cloud.apply("hub", manifest)
    cloud.wait_for_reason("long", "Training", seconds=420)
    assert [stage["member"] for stage in cloud.job("long")["status"]["plan"]] == ["east", "west"]
    cloud.lab.cut("east", "west")
    try:
        waiting = wait_for("both replicas to wait", both_waiting, seconds=240)
        cloud.wait_for_reason("long", "WaitingForPeers")
    finally:
        cloud.lab.heal()
    assert [row["waitingFor"] for row in waiting] == [[1], [0]]
    window = manifest["spec"]["sync"]["innerSteps"]
    assert all(row["step"] > 0 and row["step"] % window == 0 for row in waiting), "at the end of a window"
    cloud.wait_for_reason("long", "Succeeded", seconds=600)
    status = cloud.job("long")["status"]
    assert max(row["step"] for row in waiting) < status["progress"]["step"] == status["progress"]["totalSteps"]
    assert len({row["digest"] for row in status["replicaStatuses"]}) == 1
    assert status["attempt"]["number"] == 1, "a cut link costs no attempt"
    cloud.delete_job("long")


def test_a_pod_that_the_member_refuses_takes_the_whole_gang_back(cloud: Cloud) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "no-gpus", "namespace": "ml"},
        "spec": {"hard": {"requests.nvidia.com/gpu": "0"}},
    }
    cloud.apply("west", quota)
    try:
        job = tiny_job("gang", replicas=2, gpus=4)  # one replica fits in each member
        cloud.apply("hub", job)
        wait_for("the refusal in the status", lambda: "no-gpus" in json.dumps(cloud.job("gang").get("status", {})))
        wait_for("all pods taken back", lambda: not cloud.pods("gang"), seconds=120)
        assert cloud.job("gang")["status"].get("restarts", 0) == 0, "an attempt that never ran is not counted"
    finally:
        cloud.kubectl("west", "delete", "resourcequota", "no-gpus", "-n", "ml")
    cloud.wait_for_reason("gang", "Succeeded", seconds=600)
    cloud.delete_job("gang")


def test_a_kubeconfig_that_would_run_a_program_is_refused_and_the_others_go_on(cloud: Cloud) -> None:
    config = cloud.kubectl("east", "config", "view", "--raw", "-o", "json")
    evil = json.loads(config)
    evil["users"][0]["user"] = {
        "exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", "touch /tmp/pwned"]}
    }
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "evil", "namespace": "crosscloud-system"},
        "data": {"kubeconfig": base64.b64encode(json.dumps(evil).encode()).decode()},
    }
    member = {
        "apiVersion": "crosscloud.dev/v1alpha1",
        "kind": "MemberCluster",
        "metadata": {"name": "evil"},
        "spec": {"access": {"kubeconfigSecret": {"name": "evil"}}},
    }
    cloud.apply("hub", secret, member)
    try:

        def refusal() -> str:
            found = json.loads(cloud.kubectl("hub", "get", "mcl", "evil", "-o", "json"))
            conditions = {item["type"]: item for item in found.get("status", {}).get("conditions", [])}
            ready = conditions.get("Ready", {})
            return str(ready.get("message", "")) if ready.get("status") == "False" else ""

        message = wait_for("the refusal", refusal, seconds=60)
        assert "exec" in message
        cloud.apply("hub", tiny_job("beside"))
        cloud.wait_for_reason("beside", "Succeeded", seconds=400)
        cloud.delete_job("beside")
        for name in ("east", "west"):
            status = json.loads(cloud.kubectl("hub", "get", "mcl", name, "-o", "json"))["status"]
            assert next(item["status"] for item in status["conditions"] if item["type"] == "Ready") == "True"
        pod = cloud.operators()[0]["metadata"]["name"]
        assert "pwned" not in cloud.kubectl("hub", "exec", "-n", "crosscloud-system", pod, "--", "ls", "/tmp")
    finally:
        cloud.kubectl("hub", "delete", "mcl/evil")
        cloud.kubectl("hub", "delete", "secret", "evil", "-n", "crosscloud-system")
