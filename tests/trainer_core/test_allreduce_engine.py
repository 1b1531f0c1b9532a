"""`AllReduce` with real DeepSpeed ranks over gloo, beside torch's DDP on the same global batch."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from trainer_core.launch import Replica, named

from crosscloud_trainer.sizes import CODECS

STEPS = 50
CLIP_NORM = 0.5
JOBS = {
    "two": ([2, 1], [2, 0]),
    "pairs": ([2, 2], [3, 0]),
    "other pairs": ([2, 2], [1, 3]),
    "three": ([1, 1, 1], [0, 1, 3]),
    "five": ([1, 1, 1, 1, 1], [0, 1, 2, 3, 0]),
}
"""By name: ranks and ZeRO stage of each replica."""
DRIFT = {"drift": ([1, 2], [2, 0])}
DRIFT_STEP, RESYNC_ROUNDS = 2, 4
BAD_VALUES = [float("nan"), float("inf"), float("-inf"), 1e38]
SPOILT = [(codec, BAD_VALUES[(number + bad) % 4], bad) for number, codec in enumerate(CODECS) for bad in (0, 1)]
"""What the gradient of the last rank of which replica is multiplied with in one step: each codec and each value with
each replica.
"""
BAD_STEP = 2
HOSTS = {
    "drift": [0, "pair"],
    "two": ["pair", 0],
    "pairs": ["pair", "other pair"],
    "other pairs": ["other pair", "pair"],
    "three": [0, 1, 2],
    "five": [0, 1, 2, 3, 4],
    **{named(*one): ["pair", 0] for one in SPOILT},
}
"""Which processes run the replicas: two of two ranks, and five of one; to start them takes the longest."""


@pytest.fixture(scope="module")
def ours():
    """What all replicas of all jobs did, by name."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(minutes=10), wait_for_workers=False)
    plans = {host: [] for host in ["pair", "other pair", *range(5)]}
    for name, (ranks, stages) in {**JOBS, **DRIFT}.items():
        for number, stage in enumerate(stages):
            arguments = {"port": store.port, "name": name, "replica": number, "ranks": ranks, "stage": stage}
            more = {"steps": STEPS, "clip_norm": CLIP_NORM}
            if name in DRIFT:
                more = {"steps": 5, "clip_norm": CLIP_NORM, "codec": "Int8", "drift_step": DRIFT_STEP}
                more["resync_rounds"] = RESYNC_ROUNDS
            plans[HOSTS[name][number]].append([name, "allreduce_replica", {**arguments, **more}])
            if name != "two":
                continue
            for codec, value, bad in SPOILT:
                more = {"name": named(codec, value, bad), "steps": 4, "clip_norm": CLIP_NORM, "codec": codec}
                more |= {"bad_step": BAD_STEP, "bad_replica": bad, "bad_value": value}
                plans[HOSTS[name][number]].append([more["name"], "allreduce_replica", {**arguments, **more}])
    started = {host: Replica("our_engine.py", 2 if "pair" in str(host) else 1, plan) for host, plan in plans.items()}
    results = dict(zip(started, Replica.results(list(started.values())), strict=True))
    return {name: [results[host][name] for host in hosts] for name, hosts in HOSTS.items()}


@pytest.fixture(scope="module")
def ddp():
    """Losses of all ranks of DDP, by name."""
    plan = [[name, list(range(sum(ranks))), STEPS, CLIP_NORM] for name, (ranks, _) in JOBS.items()]
    return Replica("plain_ddp.py", 5, plan).result()


@pytest.mark.parametrize("name", JOBS)
def test_losses_are_those_of_ddp_on_the_same_global_batch(name, ours, ddp):
    found = [losses for replica in ours[name] for losses in replica["losses"]]
    assert len(found) == len(ddp[name]) == sum(JOBS[name][0])
    for mine, theirs in zip(found, ddp[name], strict=True):
        assert len(mine) == STEPS
        assert list(map(float.fromhex, mine)) == pytest.approx(list(map(float.fromhex, theirs)), rel=1e-6)
    assert len({tuple(replica["digests"]) for replica in ours[name]}) == 1


@pytest.mark.parametrize(("codec", "value", "bad"), SPOILT)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all_replicas_and_by_the_schedule(codec, value, bad, ours):
    first, second = ours[named(codec, value, bad)]
    for replica in (first, second):
        assert replica["applied"] == [[number != BAD_STEP, number != BAD_STEP] for number in range(1, 5)]
        assert all(replica["finite"])
        assert replica["rates"][BAD_STEP - 1] == replica["rates"][BAD_STEP] != replica["rates"][BAD_STEP + 1]
    assert first["digests"] == second["digests"]
    assert first["rates"] == second["rates"]


def test_replicas_that_have_drifted_apart_are_alike_to_the_bit_after_the_next_comparison(ours):
    """ZeRO 2 on one rank, and ZeRO 0 on two that take over, of which each works on everything."""
    first, second = ours["drift"]
    for step in range(DRIFT_STEP - 1, RESYNC_ROUNDS - 1):
        assert first["states"][step] != second["states"][step]
    assert first["states"][RESYNC_ROUNDS - 1] == second["states"][RESYNC_ROUNDS - 1]
    assert first["digests"] == second["digests"]
    assert len(set(second["kept"][RESYNC_ROUNDS - 1])) == 1
