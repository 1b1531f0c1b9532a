"""The main job on real clusters: two replicas of two stages, one inside a member, one over both, trained through a cut
link and a killed operator; its result loads.

One run serves all tests of this file: the fixture lives through it and notes what was seen; the tests judge the notes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cloud import Cloud, Obj, example, wait_for
from dashboard import Prometheus, panel_queries, run_prometheus

from crosscloud_lab.demo.follow import member_bytes
from crosscloud_lab.demo.steps import tool
from crosscloud_trainer.contract import METRICS_PORT

NAME = "tiny-llama"
TOKENS = 800_000


@dataclass
class Run:
    """What was seen during the job's life."""

    pods_before_kill: dict[str, str] = field(default_factory=dict)
    pods_after_kill: dict[str, str] = field(default_factory=dict)
    while_cut: Obj = field(default_factory=dict)
    rounds_while_cut: list[list[int]] = field(default_factory=list)
    panels: dict[str, Any] = field(default_factory=dict)
    trainer_metrics: list[Obj] = field(default_factory=list)
    ended: Obj = field(default_factory=dict)
    wan_bytes: int = 0
    pods: list[Obj] = field(default_factory=list)


def uids(cloud: Cloud) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in cloud.pods(NAME)}


def phases(cloud: Cloud) -> set[str]:
    return {pod["status"]["phase"] for pod in cloud.pods(NAME)}


def rounds(job: Obj) -> list[int]:
    return [row["round"] for row in job["status"]["replicaStatuses"]]


def after_round(cloud: Cloud, count: int) -> Obj | None:
    job = cloud.job(NAME)
    rows = job.get("status", {}).get("replicaStatuses", [])
    return job if len(rows) == 2 and min(row["round"] for row in rows) >= count else None


def ready_operator(cloud: Cloud) -> str:
    """UID of the operator's pod that is ready: it holds the Lease and has seen the hub."""
    for pod in cloud.operators():
        conditions = pod["status"].get("conditions", [])
        if any(item["type"] == "Ready" and item["status"] == "True" for item in conditions):
            return str(pod["metadata"]["uid"])
    return ""


def kill_operator(cloud: Cloud) -> None:
    """No grace: the process has no chance to tidy up. Returns when another one is ready."""
    old = ready_operator(cloud)
    cloud.kubectl("hub", "delete", "pod", "-n", "crosscloud-system", "-l", "app.kubernetes.io/component=operator",
                  "--grace-period=0", "--force")  # fmt: skip
    wait_for("another operator", lambda: ready_operator(cloud) not in ("", old), seconds=180)


@pytest.fixture(scope="module")
def run(cloud: Cloud) -> Run:
    """The link is cut first: while the job waits, it can't end before everything was looked at."""
    seen = Run()
    manifest = example("demo.yaml")
    manifest["spec"]["training"] |= {"tokens": TOKENS, "evaluateEvery": 20}
    cloud.delete_job(NAME)
    before = member_bytes(cloud.lab)
    cloud.apply("hub", manifest)
    wait_for("two rounds", lambda: after_round(cloud, 2), seconds=420)

    cloud.lab.cut("east", "west")
    try:
        wait_for("both replicas to wait", lambda: all_waiting(cloud), seconds=240)
        cloud.wait_for_reason(NAME, "WaitingForPeers")
        seen.while_cut = cloud.job(NAME)
        seen.rounds_while_cut.append(rounds(seen.while_cut))
        seen.pods_before_kill = uids(cloud)
        kill_operator(cloud)
        look_at_metrics(cloud, seen)
        assert cloud.reason(NAME) == "WaitingForPeers"
        seen.rounds_while_cut.append(rounds(cloud.job(NAME)))
    finally:
        cloud.lab.heal()
    count = max(seen.rounds_while_cut[1]) + 1
    wait_for("the new operator to follow the rounds", lambda: after_round(cloud, count), seconds=240)
    seen.pods_after_kill = uids(cloud)
    cloud.wait_for_reason(NAME, "Succeeded", seconds=600)
    wait_for("the pods to end", lambda: phases(cloud) == {"Succeeded"}, seconds=120)
    seen.ended = cloud.job(NAME)
    seen.wan_bytes = member_bytes(cloud.lab) - before
    seen.pods = cloud.pods(NAME)
    return seen


def look_at_metrics(cloud: Cloud, seen: Run) -> None:
    """What a Prometheus gets from the operator for each panel, and from a trainer itself."""
    pod = cloud.pods(NAME, "east")[0]["metadata"]["name"]
    with (
        forwarded(cloud, "hub", "crosscloud-system", "deployment/crosscloud-operator", 8080) as operator,
        forwarded(cloud, "east", "ml", f"pod/{pod}", METRICS_PORT) as trainer,
        run_prometheus([operator, trainer]) as prometheus,
    ):
        for title, expression in panel_queries(namespace="ml", job=NAME):
            found = wait_for(title, lambda q=expression: numbers(prometheus, q), seconds=90)
            seen.panels[f"{title}: {expression}"] = found
        own = '{__name__=~"crosscloud_trainer_.+"}'
        seen.trainer_metrics = wait_for("the trainer's metrics", lambda: prometheus.query(own), seconds=90)


def numbers(prometheus: Prometheus, expression: str) -> list[Obj]:
    """The samples, once all of them are numbers: 0/0 would be a panel without a line."""
    samples = prometheus.query(expression)
    return [] if any(sample["value"][1] == "NaN" for sample in samples) else samples


def all_waiting(cloud: Cloud) -> bool:
    rows = cloud.job(NAME)["status"]["replicaStatuses"]
    told = [row.get("waitingFor") or row.get("waitingForStages") for row in rows if row["activity"] == "Waiting"]
    return len(told) == 2 and all(told)


class forwarded:  # noqa: N801 - used like a function
    """`kubectl port-forward` to a port in a cluster; its address here as HOST:PORT."""

    def __init__(self, cloud: Cloud, cluster: str, namespace: str, target: str, port: int) -> None:
        kubectl, config = str(cloud.lab.binary("kubectl")), str(cloud.lab.kubeconfig(cluster))
        self.command = [kubectl, "--kubeconfig", config, "-n", namespace, "port-forward", target, f":{port}"]

    def __enter__(self) -> str:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # Forwarding from 127.0.0.1:PORT -> 8080
        return line.split(" -> ")[0].removeprefix("Forwarding from ")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_each_stage_ran_in_its_member_on_the_nodes_of_the_plan(run: Run) -> None:
    nodes = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in run.pods}
    planned = [node["name"] for stage in run.ended["status"]["plan"] for node in stage["nodes"]]
    assert sorted(nodes.values()) == sorted(planned)
    plan = [(stage["replica"], stage["stage"], stage["member"]) for stage in run.ended["status"]["plan"]]
    assert plan == [(0, 0, "east"), (0, 1, "east"), (1, 0, "west"), (1, 1, "east")]
    assert [[node["gpus"] for node in stage["nodes"]] for stage in run.ended["status"]["plan"]] == [[1], [1], [2], [2]]


def test_the_job_succeeded_and_its_loss_fell(run: Run) -> None:
    progress = run.ended["status"]["progress"]
    assert progress["step"] == progress["totalSteps"] == -(-TOKENS // (2 * 8 * 256))
    assert float(progress["loss"]) < 0.75 * float(progress["firstLoss"])


def test_a_replica_inside_a_member_and_one_over_both_end_with_equal_digests(run: Run) -> None:
    digests = [row["digest"] for row in run.ended["status"]["replicaStatuses"]]
    assert len(digests) == 2
    assert len(set(digests)) == 1


def test_a_killed_operator_is_replaced_and_no_pod_is_made_twice(run: Run) -> None:
    assert len(run.pods_before_kill) == 4
    assert run.pods_before_kill == run.pods_after_kill
    assert run.ended["status"]["attempt"]["number"] == 1


def test_a_cut_link_pauses_both_replicas_at_the_round_and_the_status_says_so(run: Run) -> None:
    first, later = run.rounds_while_cut
    assert max(later) - min(later) <= 1, "a round that one replica lacks is the last one"
    assert max(later) <= max(first) + 1
    rows = {row["index"]: row for row in run.while_cut["status"]["replicaStatuses"]}
    assert rows[0].get("waitingFor") == [1]
    assert rows[1].get("waitingForStages") == [1] or rows[1].get("waitingFor") == [0]
    assert run.ended["status"]["restarts"] == 0, "a cut link costs no attempt"


def test_far_fewer_bytes_crossed_the_wan_than_dense_fp32_would_have_sent(run: Run) -> None:
    dense = run.ended["status"]["progress"]["denseBytes"]
    assert 0 < run.wan_bytes < dense / 10, f"{run.wan_bytes} bytes at the interface, {dense} dense"


def test_no_panel_of_the_dashboard_is_empty(run: Run) -> None:
    assert len(run.panels) >= 8
    assert all(run.panels.values())


def test_a_prometheus_gets_the_trainers_own_metrics(run: Run) -> None:
    values = {sample["metric"]["__name__"]: float(sample["value"][1]) for sample in run.trainer_metrics}
    assert {"crosscloud_trainer_step", "crosscloud_trainer_loss", "crosscloud_trainer_tokens_total"} <= set(values)
    assert {sample["metric"]["training_job"] for sample in run.trainer_metrics} == {NAME}
    assert values["crosscloud_trainer_step"] >= run.while_cut["status"]["replicaStatuses"][0]["step"] > 0


def test_the_fetched_result_is_a_transformers_model_that_writes_text(run: Run, cloud: Cloud, tmp_path: Path) -> None:
    target = tmp_path / "model"
    fetch = [tool("crosscloud"), "--kubeconfig", cloud.lab.kubeconfig("hub"), "fetch", NAME, target, "-n", "ml"]
    subprocess.run(list(map(str, fetch)), check=True, capture_output=True)
    script = (
        "import sys, torch, transformers as t; m = t.AutoModelForCausalLM.from_pretrained(sys.argv[1]);"
        "x = torch.tensor([list(b'import os\\nimport sys\\n')]); print(float(m(x, labels=x).loss))"
    )
    loss = float(
        subprocess.run([sys.executable, "-c", script, str(target)], check=True, capture_output=True, text=True).stdout
    )
    uniform = 5.55  # nats per byte of a model that knows nothing: log(257)
    assert loss < 0.75 * uniform
    text = subprocess.run(
        [str(tool("crosscloud-trainer")), "generate", str(target), "--prompt", "def ", "--tokens", "20"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert text.startswith("def ")
    assert len(text) > 8


def test_a_finished_job_leaves_its_gpus_free_and_its_logs_readable(run: Run, cloud: Cloud) -> None:

    def free() -> bool:
        status = json.loads(cloud.kubectl("hub", "get", "mcl", "east", "-o", "json"))["status"]
        return bool(status["freeGpus"] == status["gpus"] == 4)

    wait_for("the GPUs of east to be free", free, seconds=60)
    logs = cloud.kubectl("east", "logs", "-n", "ml", run.pods[0]["metadata"]["name"], "-c", "trainer")
    assert logs.strip()


def test_deleting_the_job_cleans_both_members(run: Run, cloud: Cloud) -> None:
    cloud.delete_job(NAME)
    wait_for("members to be clean", lambda: not cloud.objects(NAME), seconds=120)
