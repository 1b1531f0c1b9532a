"""The life of a job against the in-memory API: what a user would see, from apply to delete."""

from __future__ import annotations

from crosscloud_operator.kube.api import CONFIG_MAP, DEPLOYMENT, JOB, POD, SECRET, SERVICE, Ref
from operator_core.players import Lab, end_pod, job, lab, report


async def running(**spec: object) -> Lab:
    """A lab in which `demo` runs."""
    scene = Lab(lab())
    scene.submit(job(**spec))  # type: ignore[arg-type]
    await scene.until(lambda: scene.status().is_true("Running"))
    return scene


async def test_a_job_over_two_members_runs_to_its_end() -> None:
    scene = await running()
    status = scene.status()
    assert [(stage.member, [node.name for node in stage.nodes]) for stage in status.plan] == [
        ("east", ["e1"]),
        ("west", ["w1", "w2"]),
    ]
    assert status.home is not None
    assert status.home.member == "east"
    for pod in scene.pods():
        assert "schedulingGates" not in pod["spec"]
    scene.finish()
    await scene.until(lambda: scene.status().is_true("Succeeded"))
    await scene.until(lambda: scene.status().attempt.gone_at is not None)  # type: ignore[union-attr]
    assert scene.status().result.uri == "s3://models/demo/result"  # type: ignore[union-attr]
    assert len(scene.pods()) == 3, "finished pods stay for their logs"
    assert not any(cluster.all(DEPLOYMENT) for cluster in scene.world.clusters.values()), "the gateways are gone"
    scene.world.real_hub.remove(Ref(JOB, "demo", "ml"))
    await scene.until(lambda: scene.world.real_hub.find(JOB, "demo") is None)
    for cluster in scene.world.clusters.values():
        cluster.collect_garbage()
        left = [key for key in cluster.objects if key[0] not in ("Namespace", "Node")]
        assert left == []
    assert scene.world.real_hub.all(SECRET) == []
