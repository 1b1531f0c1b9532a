"""A DeepSpeed script of one's own, alone and in jobs: the example that users copy, through real processes.

All of it is started at once, since starting takes longest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from trainer.jobs import DEADLINE_SECONDS, finished, start_local
from transformers import AutoModelForCausalLM

from crosscloud_trainer.adopting import adopt
from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.engine import EngineError
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.library import Alone, Joined
from crosscloud_trainer.result import store_folder
from crosscloud_trainer.shard_optimizer import ShardOptimizer
from crosscloud_trainer.storage import Storage

SCRIPT = Path(__file__).parents[2] / "examples" / "library" / "train.py"
WITH_TRAINER = SCRIPT.with_name("with_trainer.py")
RUNNER = Path(__file__).parent / "alone.py"
GROUPED = Path(__file__).parent / "grouped.py"
ENDS_ALONE = Path(__file__).parent / "ends_alone.py"
STEPS, WINDOW = 12, 5
ROUNDS = 3  # after steps 5 and 10, and at the end of the script
MICRO_BATCHES = 2
CLIPPED, UNCLIPPED = "1,0.3", "1,0"
FROZEN = {f"frozen at ZeRO {stage}": stage for stage in (0, 1, 3)}
SETTINGS = {**{name: f"{stage},0" for name, stage in FROZEN.items()}, "all reduce": CLIPPED}  # of grouped.py, by job

JOBS: dict[str, dict[str, Any]] = {
    "one replica": {"replicas": 1, "replica": {"gpusPerStage": 2, "zeroStage": 2}, "sync": {"innerSteps": WINDOW}},
    "two replicas": {
        "replicas": 2,
        "replica": {"gpusPerStage": 1, "zeroStage": 2},
        "replicaOverrides": [{"name": "big", "index": 1, "gpusPerStage": 2}],
        "sync": {"innerSteps": WINDOW},
    },
    "all reduce": {
        "replicas": 2,
        "replica": {"gpusPerStage": 1, "zeroStage": 1},
        "sync": {"algorithm": "AllReduce", "codec": "None"},
        "failurePolicy": {"attempts": 1},
    },
    "the Trainer": {"replicas": 2, "replica": {"zeroStage": 2}, "sync": {"innerSteps": WINDOW}},
    "other ZeRO stage": {"replicas": 1, "replica": {"zeroStage": 1}},
    **{name: {"replicas": 1, "replica": {"gpusPerStage": 2, "zeroStage": stage}} for name, stage in FROZEN.items()},
}


ONE_REPLICA_OF_TWO = {"replicas": 1, "replica": {"gpusPerStage": 2, "zeroStage": 3}, "failurePolicy": {"attempts": 1}}


def job(folder: Path, script: dict[str, Any], **spec: Any) -> Path:
    """The manifest of a job of a script, as a file."""
    document = {
        "apiVersion": "crosscloud.dev/v1alpha1",
        "kind": "CrossCloudTrainingJob",
        "metadata": {"name": "own"},
        "spec": {"script": script, "storage": {"uri": "/models"}, **spec},
    }
    folder.mkdir(exist_ok=True)
    with (folder / "job.yaml").open("w") as out:
        YAML(typ="safe", pure=True).dump(document, out)
    return folder / "job.yaml"


def losses(folder: Path, rank: int, setting: str = "") -> list[float]:
    path = folder / (f"losses-{setting}-{rank}" if setting else f"losses-{rank}")
    return [float.fromhex(text) for text in path.read_text().split()]


def torchrun(*command: str) -> subprocess.Popen[str]:
    """Two ranks of a script without a job."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(RUNNER)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen([*launcher, *command], env=environment, text=True, **pipes)


def script_of(name: str, folder: Path) -> dict[str, Any]:
    """What a job runs."""
    if setting := SETTINGS.get(name):
        return {"file": str(GROUPED), "args": [str(folder / "losses"), str(STEPS), setting]}
    args = ["--steps", str(STEPS), "--losses", str(folder / "losses")]
    if name == "the Trainer":
        return {"file": str(WITH_TRAINER), "args": args}
    return {"file": str(SCRIPT), "args": [*args, "--model", str(folder / "model")]}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, list[dict[str, Any]]]]:
    """Folder, exit code and events by job; "alone" are the scripts under torchrun, without a job."""
    root = tmp_path_factory.mktemp("library")
    started = {}
    for name, spec in JOBS.items():
        folder = root / name
        path = job(folder, script_of(name, folder), **spec)
        options = ["--link", "100mbit", "--tensorboard"] if name == "two replicas" else []
        started[name] = (folder, start_local(path, folder / "out", *options))
    folder = root / "alone"
    folder.mkdir()
    example, grouped = script_of("alone", folder), script_of("all reduce", folder)
    settings = sorted(set(SETTINGS.values()))
    for process in (
        torchrun(example["file"], *example["args"]),
        torchrun(grouped["file"], *grouped["args"][:2], *settings),
    ):
        _, err = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == 0, err[-3000:]
        assert err.count("not in a job; join() and wrap() change nothing") == 1
    found: dict[str, tuple[Path, int, list[dict[str, Any]]]] = {"alone": (folder, 0, [])}
    for name, (folder, process) in started.items():
        code, events, _ = finished(process)
        found[name] = (folder, code, events)
    return found


def same_weights(first: Path, second: Path) -> bool:
    one, two = (torch.load(path / "model.pt", weights_only=True) for path in (first, second))
    assert one.keys() == two.keys()
    return all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("rank", [0, 1])
def test_in_a_job_of_one_replica_a_script_has_its_own_losses_to_the_last_bit(ends: Any, rank: int) -> None:
    assert ends["one replica"][1] == 0, ends["one replica"][2][-1]
    alone, joined = losses(ends["alone"][0], rank), losses(ends["one replica"][0], rank)
    assert joined == alone
    assert len(set(alone)) == STEPS * MICRO_BATCHES
    assert alone[-1] < alone[0]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FROZEN)
def test_frozen_parameters_groups_and_schedule_are_as_without_a_job_to_the_last_bit(
    ends: Any, name: str, rank: int
) -> None:
    folder, code, events = ends[name]
    assert code == 0, events[-1]
    alone = losses(ends["alone"][0], rank, SETTINGS[name])
    assert losses(folder, rank, SETTINGS[name]) == alone
    assert len(set(alone)) == STEPS * MICRO_BATCHES


def test_two_replicas_of_unlike_size_end_with_equal_weights(ends: Any) -> None:
    folder, code, events = ends["two replicas"]
    assert code == 0, events[-1]
    end = events[-1]
    assert (end["event"], end["steps"], end["rounds"], end["digests_equal"]) == ("finish", STEPS, ROUNDS, True)
    assert end["tokens"] == STEPS * MICRO_BATCHES * 64 * 3  # what the script told by sync.tokens, of three ranks
    assert end["last_loss"] < end["first_loss"]
    assert [event["progress"]["totalSteps"] for event in events if event["event"] == "report"][-1] == STEPS
    assert end["wan_bytes"] < end["dense_bytes"] / 8
    taken = [losses(folder, rank) for rank in range(3)]
    assert len({tuple(seen) for seen in taken}) == 3, "each rank of the job trains on data of its own"


def test_what_a_script_stores_after_the_last_round_is_the_jobs_result(ends: Any) -> None:
    """Under DiLoCo the last round changes the weights: what was saved before it would be one replica's alone."""
    folder, _, events = ends["two replicas"]
    stored = Path(events[-1]["result"])
    assert stored == folder / "out" / "result"
    assert same_weights(stored, folder / "model-1"), "the other replica has saved the same"
    folder, _, events = ends["one replica"]
    assert same_weights(Path(events[-1]["result"]), ends["alone"][0] / "model-0")


def test_a_script_can_not_store_a_model_before_the_last_round(tmp_path: Path) -> None:
    sync = Joined.__new__(Joined)
    sync._finished = False
    with pytest.raises(Failure, match=r"sync\.store was called before sync\.finish\(\)"):
        sync.store(tmp_path)


def test_a_run_over_a_shaped_link_leaves_its_page_and_tensorboards_files(ends: Any) -> None:
    folder, _, events = ends["two replicas"]
    page = Path(events[-1]["report"])
    assert page.parent == folder / "out"
    assert page.read_text().count("<svg") == 4
    assert len(list((folder / "out" / "tensorboard" / "attempt-1").glob("replica-*/events.*"))) == 2


def test_under_all_reduce_two_replicas_of_one_rank_take_the_steps_of_one_replica_of_two(ends: Any) -> None:
    """In fp32 both add the same numbers in another order, which makes 2e-7; without clipping the losses are percents
    apart.
    """
    folder, code, events = ends["all reduce"]
    assert code == 0, events[-1]
    assert events[-1]["digests_equal"] is True
    for rank in (0, 1):
        alone, unclipped = (losses(ends["alone"][0], rank, setting) for setting in (CLIPPED, UNCLIPPED))
        assert losses(folder, rank, CLIPPED) == pytest.approx(alone, rel=2e-6)
        assert alone != pytest.approx(unclipped, rel=1e-2)


def test_the_trainer_of_transformers_takes_part_in_a_job_by_a_callback(ends: Any) -> None:
    folder, code, events = ends["the Trainer"]
    assert code == 0, events[-1]
    end = events[-1]
    assert (end["steps"], end["rounds"], end["digests_equal"]) == (STEPS, ROUNDS, True)
    assert end["last_loss"] < end["first_loss"]
    taken = [losses(folder, rank) for rank in (0, 1)]
    assert [len(seen) for seen in taken] == [STEPS, STEPS]
    assert taken[0] != taken[1], "each replica trains on data of its own"
    model = AutoModelForCausalLM.from_pretrained(end["result"])
    assert model.config.hidden_size == 64


def test_a_script_that_does_not_join_the_job_has_not_been_trained(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("print('trained alone')\n")
    code, events, _ = finished(start_local(job(tmp_path, {"file": str(script)}, replicas=1), tmp_path / "out"))
    assert code == ExitCode.INVALID_INPUT
    message = "rank 0 ended with exit code 0, but the script has not called crosscloud_trainer.join()"
    assert message in events[-1]["message"]


TWO_REPLICAS_OF_ONE = {**ONE_REPLICA_OF_TWO, "replicas": 2, "replica": {"zeroStage": 3}, "sync": {"innerSteps": 2}}
ALONE: list[tuple[str, dict[str, Any], int, str]] = [  # what rank 1 does, in which job, and how that ends
    ("exits", ONE_REPLICA_OF_TWO, 1, "rank 1: the script has ended on this rank after step 3, while rank 0 goes on"),
    ("exits at once", ONE_REPLICA_OF_TWO, 1, "rank 1 ended with exit code 0 before its training had ended"),
    ("has no more data", ONE_REPLICA_OF_TWO, 1, "rank 1: unexpected StopIteration"),
    (
        "exits",
        TWO_REPLICAS_OF_ONE,
        ExitCode.DIVERGED,
        "replica 1 has ended after round 2, and this one is in round 3: all replicas must take equally many steps",
    ),
]


def test_a_rank_that_ends_alone_ends_the_job_with_its_own_message(tmp_path: Path) -> None:
    """C57: by an exit or an exception; under ZeRO 3 the others wait for it in their next forward pass. Where it is a
    replica of its own, its replica has taken fewer steps than the other.
    """
    started = []
    for number, (how, spec, *_) in enumerate(ALONE):
        folder = tmp_path / str(number)
        path = job(folder, {"file": str(ENDS_ALONE), "args": [how]}, **spec)
        started.append(start_local(path, folder / "out"))
    for process, (*_, expected, message) in zip(started, ALONE, strict=True):
        code, events, _ = finished(process)
        assert (code, message in events[-1]["message"]) == (expected, True), events[-1]


def test_a_zero_stage_that_is_not_the_scripts_is_refused_by_the_name_of_the_field(ends: Any) -> None:
    _, code, events = ends["other ZeRO stage"]
    assert code == ExitCode.INVALID_INPUT
    assert "replica.zeroStage: found 1; must be 2" in events[-1]["message"]


def test_a_script_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = job(tmp_path, {"file": "no/such/train.py"})
    code, events, _ = finished(start_local(path, tmp_path / "out"))
    assert code == ExitCode.INVALID_INPUT
    assert 'script.file: found "no/such/train.py"; must be a file in the image' in events[-1]["message"]


def test_a_result_without_files_is_refused(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "storage"))
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(Failure, match=f"^result: {folder} holds no files"):
            store_folder(storage, folder)


def test_outside_a_job_the_very_optimizer_comes_back() -> None:
    sync = Alone()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    assert sync.wrap(optimizer) is optimizer
    sync.steps(10)
    sync.tokens(5)
    sync.finish()
    sync.store("nowhere")
    assert (sync.joined, sync.replica, sync.replicas, sync.rank, sync.ranks) == (False, 0, 1, 0, 1)


class Config:
    """As much of a DeepSpeed engine as is asked before it is taken into a job."""

    pipeline_parallelism = False

    def __init__(self, *, fp16: bool = False, offload: str | None = None, groups: int = 1) -> None:
        self._fp16, self._offload = fp16, offload
        self.optimizer = type("Zero", (), {"fp32_partitioned_groups_flat": [None] * groups})()

    def zero_optimization_stage(self) -> int:
        return 3

    def zero_sub_group_size(self) -> int:
        return 1000

    def fp16_enabled(self) -> bool:
        return self._fp16

    def zero_offload_optimizer(self) -> Any:
        return type("Offload", (), {"device": self._offload})() if self._offload else None

    def zero_offload_param(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (Config(fp16=True), "fp16.enabled: found true"),
        (Config(offload="cpu"), "offload_optimizer, offload_param: must be left out"),
        (Config(groups=2), "sub_group_size: found 1000; must be above a rank's part of the model"),
    ],
)
def test_what_deepspeed_can_not_do_in_a_job_is_refused_by_its_name(config: Config, fault: str) -> None:
    optimizer = ShardOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1))
    with pytest.raises(EngineError, match=fault):
        adopt(config, optimizer)


def test_a_rate_set_on_the_shown_group_keeps_the_proportion_of_the_users_groups() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    inner = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2}])
    optimizer = ShardOptimizer(inner, {id(first): "a", id(second): "b"})
    optimizer.bind([("a", torch.zeros(2)), ("b", torch.zeros(2))], lambda: [torch.ones(2), torch.ones(2)])
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.step()
    assert [group["lr"] for group in inner.param_groups] == [0.05, pytest.approx(0.1)]
