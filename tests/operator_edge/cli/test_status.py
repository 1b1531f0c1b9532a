"""`crosscloud status` and `crosscloud member list`: what a person reads, in a terminal of 80 columns too."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from apiserver import ApiServer
from rich.console import Console

from crosscloud_operator.cli.common import duration
from crosscloud_operator.cli.status import show, show_all
from crosscloud_operator.domain.record import rfc3339

from .conftest import Command
from .test_fetch import finished_job

POOL = "NVIDIA-A100-SXM4-80GB"
NODES = {
    "east": "gke-east-a100-pool-8f3c2d1e-x7kq",
    "west": "ip-10-0-17-231.eu-west-1.compute.internal",
}
DIGESTS = ("8f3c2d1e9a7b6c5d", "8f3c2d1e9a7b6c5d")


def busy() -> dict[str, Any]:
    """The status of a job in its second attempt, of which a replica waits."""
    running = {
        "type": "Running",
        "status": "True",
        "reason": "WaitingForPeers",
        "message": "replica 0 waits for replica 1",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    plan = [
        {"replica": n, "incarnation": 1, "stage": 0, "member": m, "pool": POOL, "zeroStage": 1,
         "nodes": [{"name": f"{node}{i}", "gpus": 2} for i in range(2)]}
        for n, (m, node) in enumerate(NODES.items())
    ]  # fmt: skip
    waits = {"waitingFor": [1], "waitingSince": rfc3339(time.time() - 300)}
    replicas = [
        {"index": 0, "activity": "Waiting", "step": 120, "round": 6, "loss": "2.5000", "digest": DIGESTS[0], **waits},
        {"index": 1, "activity": "Training", "step": 112, "round": 6, "loss": "2.6000", "digest": DIGESTS[1]},
    ]
    return {
        "conditions": [running],
        "plan": plan,
        "replicaStatuses": replicas,
        "progress": {
            "step": 112, "totalSteps": 400, "round": 6, "loss": "2.5500", "tokensPerSecond": 5210,
            "wanPerStep": "1.2 MB",
        },
        "attempt": {"number": 2, "plannedAt": "2026-01-01T00:00:00Z"},
        "restarts": 1,
        "refused": [{"member": "north", "reason": "0 of 2 GPUs free"}],
    }  # fmt: skip


def printed(job: dict[str, Any], width: int) -> str:
    out = Console(file=io.StringIO(), width=width, highlight=False)
    show(job, out)
    text: str = out.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_status_tells_where_a_job_is_and_what_it_waits_for(crosscloud: Command, hub_api: ApiServer) -> None:
    finished_job(hub_api, "busy", None, **busy())
    out = crosscloud("status", "busy", "-n", "ml")
    for words in ("ml/busy: WaitingForPeers, attempt 2, 1 restart", "step 112 of 400", "north: 0 of 2 GPUs free"):
        assert words in out
    assert out.count("attempt 2") == 1
    assert out.count(DIGESTS[0]) == 2
    assert "1, for 5m" in out
    assert f"{NODES['east']}0 (2), {NODES['east']}1 (2)" in out
    assert "there is no job" in crosscloud("status", "nobody", "-n", "ml", code=1)
    assert "there is one in ml" in crosscloud("status", "busy", code=1)


def test_status_tells_which_checkpoint_is_the_last_and_which_the_best() -> None:
    known = [(40, "2.2000"), (30, "10.3000"), (20, "2.1000")]
    stored = [
        {"uri": f"s3://m/step-{step}/manifest.json", "step": step, "validationLoss": loss} for step, loss in known
    ]
    out = printed({"metadata": {"name": "a", "namespace": "ml"}, "status": busy() | {"checkpoints": stored}}, 120)
    assert "  last checkpoint: after step 40\n" in out
    assert "  best checkpoint: after step 20, validation loss 2.1000, s3://m/step-20/manifest.json\n" in out


def test_without_a_job_it_lists_them_with_the_columns_of_kubectl_get(crosscloud: Command, hub_api: ApiServer) -> None:
    assert "there is no job in namespace 'ml'" in crosscloud("status", "-n", "ml", code=1)
    assert "kubectl apply" in crosscloud("status", "-A")
    finished_job(hub_api, "busy", None, **busy())
    finished_job(hub_api, "new", None)
    kubectl = hub_api.kubectl("get", "cctj", "-n", "ml").splitlines()
    ours = crosscloud("status", "-n", "ml").splitlines()
    assert [line.split()[:-1] for line in ours[:2]] == [line.split()[:-1] for line in kubectl[:2]]
    assert ours[2].split()[:2] == ["new", "-"]
    everywhere = crosscloud("status", "-A").splitlines()
    assert everywhere[0].split()[0] == "NAMESPACE"
    assert everywhere[1].split()[:3] == ["ml", "busy", "WaitingForPeers"]
    assert "give one of the two" in crosscloud("status", "busy", "-A", code=2)


@pytest.mark.parametrize("width", [80, 100])
def test_in_a_narrow_terminal_nothing_is_cut(width: int) -> None:
    meta = {"namespace": "ml", "name": "tiny-llama-pretraining"}
    out = printed({"metadata": meta, "status": busy()}, width)
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out
    replicas = next(n for n, line in enumerate(lines) if line.startswith("REPLICA  MEMBER"))
    assert lines[replicas + 1].split() == [
        "0", "east", "Waiting", "120", "6", "2.5000", DIGESTS[0], "1,", "for", "5m",
    ]  # fmt: skip
    assert lines[replicas + 2].split()[:2] == ["1", "west"]


def test_a_replica_is_told_once_with_all_its_members_and_each_of_its_stages_where_it_is() -> None:
    status = busy()
    for stage in status["plan"]:
        stage["nodes"] = [{"name": "n1", "gpus": 4}]
    status["plan"].insert(1, status["plan"][0] | {"stage": 1, "member": "west"})
    out = printed({"metadata": {"namespace": "ml", "name": "a"}, "status": status}, 100)
    lines = [line.split() for line in out.splitlines()]
    places = lines.index(["REPLICA", "STAGE", "MEMBER", "POOL", "NODES", "(GPUS)"])
    assert [line[:3] for line in lines[places - 2 : places]] == [["0", "east,", "west"], ["1", "west", "Training"]]
    assert lines[places + 1 : places + 4] == [
        ["0", "0", "east", POOL, "n1", "(4)"],
        ["0", "1", "west", POOL, "n1", "(4)"],
        ["1", "0", "west", POOL, "n1", "(4)"],
    ]


def test_lists_of_jobs_fit_into_a_terminal() -> None:
    jobs = [
        {"metadata": {"namespace": "research", "name": f"tiny-llama-{n}", "creationTimestamp": rfc3339(time.time())},
         "status": busy()}
        for n in range(2)
    ]  # fmt: skip
    out = Console(file=io.StringIO(), width=100, highlight=False)
    show_all(jobs, out, with_namespace=True)
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 3
    assert max(len(line.rstrip()) for line in lines) <= 100


def test_messages_of_an_attempt_do_not_repeat_its_number() -> None:
    status = busy()
    status["conditions"][0] |= {"reason": "Training", "message": "attempt 2: 2 replica(s) are training"}
    out = printed({"metadata": {"namespace": "ml", "name": "a"}, "status": status}, 100)
    assert out.startswith("ml/a: Training, attempt 2, 1 restart\n  2 replica(s) are training\n")


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (172_800, "2d"), (10**7, "115d")]
)
def test_time_spans_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_members_that_are_not_ready_say_why(crosscloud: Command, hub_api: ApiServer) -> None:
    path = "/apis/crosscloud.dev/v1alpha1/memberclusters"
    spec = {"access": {"kubeconfigSecret": {"name": "member-east"}}}
    kind = {"apiVersion": "crosscloud.dev/v1alpha1", "kind": "MemberCluster"}
    hub_api.request("POST", path, kind | {"metadata": {"name": "east"}, "spec": spec})
    condition = {
        "type": "Ready",
        "status": "False",
        "reason": "Unreachable",
        "message": "since 2026-01-01T00:00:00Z: no route to host",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {"conditions": [condition], "credentials": {"expiresAt": rfc3339(time.time() + 7300)}}
    hub_api.request("PATCH", f"{path}/east/status", {"status": status}, "application/merge-patch+json")
    out = crosscloud("member", "list")
    assert out.splitlines()[1].split() == ["east", "False", "Unreachable", "-", "-", "-", "none", "2h", "left"]
    assert "east: since 2026-01-01T00:00:00Z: no route to host" in out
