"""The engine on real ranks over gloo, beside plain DeepSpeed."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from trainer_core.launch import ours, plain

COMBINATIONS = [(stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16")]


@pytest.mark.parametrize(("stage", "precision"), COMBINATIONS)
def test_one_replica_without_codec_has_the_losses_of_plain_deepspeed_to_the_last_bit(stage, precision):
    expected = plain(2, stage, precision).result()["losses"]
    found = ours("alone", 2, stage=stage, precision=precision).result()
    assert found["losses"] == expected
    assert len(set(expected)) == 20
    assert float.fromhex(expected[-1]) < float.fromhex(expected[0])
    assert len(set(found["digests"])) == 2


@pytest.mark.parametrize("stage", [2, 3])
def test_clipping_by_the_norm_over_all_ranks_gives_the_losses_of_plain_deepspeed(stage):
    expected = plain(2, stage, "fp32", clip_norm=0.05).result()["losses"]
    found = ours("alone", 2, stage=stage, precision="fp32", clip_norm=0.05).result()["losses"]
    free = ours("alone", 2, stage=stage, precision="fp32").result()["losses"]
    values = [[float.fromhex(loss) for loss in losses] for losses in (found, expected, free)]
    assert values[0] == pytest.approx(values[1], rel=1e-4)
    assert values[0] != pytest.approx(values[2], rel=1e-4)


@pytest.mark.parametrize(
    ("first", "second", "codec"),
    [((2, 1), (4, 2), "Int8"), ((2, 2), (4, 3), "None")],
    ids=["ZeRO 1 and 2 with Int8", "ZeRO 2 and 3 without codec"],
)
def test_replicas_of_two_and_of_four_ranks_agree_to_the_bit_after_every_round(first, second, codec):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=120), wait_for_workers=False)
    replicas = [
        ours(
            "replica_of_a_job", ranks, port=store.port, replica=number, stage=stage, precision="bf16", codec=codec, rounds=4
        )
        for number, (ranks, stage) in enumerate((first, second))
    ]
    results = [replica.result() for replica in replicas]
    assert results[0]["digests"] == results[1]["digests"]
    assert len(set(results[0]["digests"])) == 4
    assert results[0]["losses"] == results[1]["losses"]
    assert results[0]["weights"] == results[1]["weights"] == [{"0": 256, "1": 512}] * 4


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "fp32"), (3, "bf16")])
@pytest.mark.parametrize("bad_value", [float("nan"), float("inf")])
def test_steps_with_gradients_that_are_not_finite_are_skipped_counted_and_end_the_training(stage, precision, bad_value):
    seen = ours("skipped_steps", 2, stage=stage, precision=precision, bad_rank=1, bad_value=bad_value).result()
    assert seen["applied"] == [True, True, False, False, True, False, False]
    assert seen["skipped"] == [0, 0, 1, 2, 2, 3, 4]
    assert all(seen["finite"])
    assert "not finite for 3 steps in a row" in seen["error"]


def test_micro_batches_within_an_inner_step_are_no_steps():
    assert ours("accumulated", 2, stage=2).result() == [False, True] * 3


@pytest.mark.parametrize(("stage", "precision"), COMBINATIONS)
def test_working_weights_follow_a_shard_that_was_rewritten_on_every_rank(stage, precision):
    assert ours("refreshed", 2, stage=stage, precision=precision).result() == 0.0


def test_optimizers_that_can_not_be_used_are_refused_with_a_reason():
    messages = ours("refused_optimizers", 1).result()
    assert len(messages) == 3
    assert "not the model's" in messages[0]
    assert "frozen" in messages[1]
    assert "stepped before" in messages[2]
