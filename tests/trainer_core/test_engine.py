"""The engine on real ranks over gloo, beside plain DeepSpeed.

To start ranks takes longer than what they do here, so each group of ranks is started once and goes through
all scenarios.
"""

from datetime import timedelta

import pytest
import torch.distributed as dist
from trainer_core.launch import Replica, named

COMBINATIONS = [(stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]
ACCUMULATED = 4
CLIP_NORM = 0.05
CLIPPED_WITHIN = {"fp32": 1e-6, "bf16": 2**-8}
"""DeepSpeed adds a rounded norm of each group of parameters, ours is the norm of all; in bf16 a weight may so come to
lie on the other side of a rounding, a whole spacing of that type away.
"""
BAD_VALUES = [float("nan"), float("-inf"), 1e38]
JOBS = {"Int8": ((2, 1), (4, 2)), "None": ((2, 2), (4, 3))}
"""By codec: ranks and ZeRO stage of both replicas."""
ROUNDS = 4


@pytest.fixture(scope="module")
def plain():
    """Losses of plain DeepSpeed on two ranks."""
    plan = []
    for pair in COMBINATIONS:
        plan.append([named(*pair), *pair, 0.0])
        plan.append([named("clipped", *pair), *pair, CLIP_NORM])
        plan.append([named("accumulated", *pair), *pair, 0.0, ACCUMULATED])
        plan.append([named("frozen", *pair), *pair, 0.0, 1, True])
    return Replica("plain_deepspeed.py", 2, plan).result()


@pytest.fixture(scope="module")
def ours():
    """Results of our engine on two ranks."""
    plan = [["refused", "refused_optimizers", {}]]
    for stage, precision in COMBINATIONS:
        arguments = {"stage": stage, "precision": precision}
        plan.append([named(stage, precision), "alone", arguments])
        plan.append([named("refreshed", stage, precision), "refreshed", arguments])
        for name, more in (
            ("clipped", {"clip_norm": CLIP_NORM}),
            ("accumulated", {"accumulated": ACCUMULATED}),
            ("frozen", {"frozen": True}),
        ):
            plan.append([named(name, stage, precision), "alone", {**arguments, **more}])
        for value in BAD_VALUES:
            more = {"bad_rank": 1, "bad_value": value}
            plan.append([named("skipped", stage, precision, value), "skipped_steps", {**arguments, **more}])
    return Replica("our_engine.py", 2, plan).result()


@pytest.fixture(scope="module")
def replicas():
    """Results of both replicas of each job, which exchange over a store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(minutes=10), wait_for_workers=False)
    started = []
    for number in (0, 1):
        plan = []
        for codec, job in JOBS.items():
            arguments = {"port": store.port, "replica": number, "stage": job[number][1], "precision": "bf16"}
            plan.append([codec, "replica_of_a_job", {**arguments, "codec": codec, "rounds": ROUNDS}])
        started.append(Replica("our_engine.py", JOBS["None"][number][0], plan))
    return [replica.result() for replica in started]


@pytest.mark.parametrize(("stage", "precision"), COMBINATIONS)
def test_one_replica_without_codec_has_the_losses_of_plain_deepspeed_to_the_last_bit(stage, precision, plain, ours):
    expected, found = plain[named(stage, precision)], ours[named(stage, precision)]
    assert found["losses"] == expected
    assert len(set(expected)) == 20
    assert float.fromhex(expected[-1]) < float.fromhex(expected[0])
    assert len(set(found["digests"])) == 2


@pytest.mark.parametrize(("stage", "precision"), COMBINATIONS)
def test_clipping_by_the_norm_over_all_ranks_gives_the_losses_of_plain_deepspeed(stage, precision, plain, ours):
    name, within = named("clipped", stage, precision), CLIPPED_WITHIN[precision]
    runs = (ours[name]["losses"], plain[name], plain[named(stage, precision)])
    clipped, expected, free = ([float.fromhex(loss) for loss in losses] for losses in runs)
    assert clipped == pytest.approx(expected, rel=within)
    assert clipped != pytest.approx(free, rel=within)


@pytest.mark.parametrize("codec", JOBS)
def test_replicas_of_two_and_of_four_ranks_agree_to_the_bit_after_every_round(codec, replicas):
    two, four = (replica[codec] for replica in replicas)
    assert two["digests"] == four["digests"]
    assert len(set(two["digests"])) == ROUNDS
    assert two["losses"] == four["losses"]
    assert two["weights"] == four["weights"] == [{"0": 256, "1": 512}] * ROUNDS
    assert two["applied"] == [True] * 2 * ROUNDS
    assert four["applied"] == [number != 4 for number in range(1, 2 * ROUNDS + 1)]


@pytest.mark.parametrize("bad_value", BAD_VALUES)
@pytest.mark.parametrize(("stage", "precision"), COMBINATIONS)
def test_steps_with_gradients_that_are_not_finite_are_skipped_counted_and_end_the_training(
    stage, precision, bad_value, ours
):
    seen = ours[named("skipped", stage, precision, bad_value)]
    assert seen["applied"] == [True, True, False, False, True, False, False]
    assert seen["skipped"] == [0, 0, 1, 2, 2, 3, 4]
    assert all(seen["finite"])
    assert "not finite for 3 steps in a row" in seen["error"]


@pytest.mark.parametrize("pair", COMBINATIONS)
def test_accumulated_micro_batches_give_the_losses_of_plain_deepspeed_to_the_last_bit(pair, plain, ours):
    found, expected = ours[named("accumulated", *pair)]["losses"], plain[named("accumulated", *pair)]
    assert found == expected != plain[named(*pair)]


@pytest.mark.parametrize("pair", COMBINATIONS)
def test_frozen_parameters_give_the_losses_of_plain_deepspeed_to_the_last_bit(pair, plain, ours):
    found, expected = ours[named("frozen", *pair)]["losses"], plain[named("frozen", *pair)]
    assert found == expected != plain[named(*pair)]


@pytest.mark.parametrize(("stage", "precision"), COMBINATIONS)
def test_working_weights_follow_a_shard_that_was_rewritten_on_every_rank(stage, precision, ours):
    assert ours[named("refreshed", stage, precision)] == 0.0


def test_optimizers_that_can_not_be_used_are_refused_with_a_reason(ours):
    foreign, frozen, stepped = ours["refused"]
    assert "not the model's" in foreign
    assert "frozen" in frozen
    assert "stepped before" in stepped
