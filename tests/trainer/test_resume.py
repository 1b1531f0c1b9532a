"""Jobs that are killed or told to end go on from a checkpoint to the bit, from a folder or from S3 (C61, C63)."""

from __future__ import annotations

import json
import math
import random
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer.jobs import TINY_MODEL, TRAINER, finished, manifest, ranks_of, start_local, wait_for, written
from trainer.runs import Run, broken_off, until_checkpoint
from trainer.s3 import s3_server

from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.export import export
from crosscloud_trainer.failures import Failure

STEPS, WARMUP = 48, 6
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.1}
TOP_K = {
    "sync": {"innerSteps": 4, "codec": "TopK"},
    "replica": {"gpusPerStage": 2, "zeroStage": 3},
    "replicaOverrides": [{"name": "cut", "index": 1, "stages": 2, "gpusPerStage": 1, "zeroStage": 2}],
}
ALL_REDUCE = {"algorithm": "AllReduce", "codec": "Int8"}
LEFT_OUT = "left out: the one before it is still being stored"


def job(folder: Path, **spec: Any) -> Path:
    """48 steps, in windows of 4, with a checkpoint after each; of dropout, so that random numbers count."""
    training = {"tokens": STEPS * 256, "warmupSteps": WARMUP, "model": {"config": GPT2}, **spec.pop("training", {})}
    folder.mkdir(exist_ok=True)
    return written(folder, manifest(**{"training": training, "checkpoint": {"everySteps": 4}, **spec}))


def resumed(path: Path, out: Path) -> subprocess.Popen[str]:
    return start_local(path, out, "--resume")


def killed(path: Path, folder: Path) -> Run:
    """A run with its storage on S3, which for a while doesn't answer. After that a rank is killed, at any moment."""
    with s3_server(folder) as server:
        address, out = server.bucket("models") + "/killed", folder / "cut"
        process = start_local(path, out, "--storage", address, environ=server.environment)
        logs = [out / "logs" / "attempt-1" / f"replica-{label}.log" for label in ("0", "1-0")]

        def told(words: str) -> bool:
            return all(log.exists() and words in log.read_text() for log in logs)

        wait_for(lambda: told("training: "), "the first step")
        with server.stalled():
            wait_for(lambda: told(LEFT_OUT), "a checkpoint that is left out")
        wait_for(lambda: re.search(r"checkpoint of step \d+: s3:", logs[0].read_text()), "the one before")
        with server.stalled():  # so that it doesn't come to its end before
            events = until_checkpoint(process, 4)
            time.sleep(random.uniform(0, 1))
            random.choice(ranks_of(process.pid)).send_signal(signal.SIGKILL)
        code, rest, _ = finished(process)
        return Run(code, [*events, *rest], out, server.path_of)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The same two jobs, each in one go and broken off: DiLoCo with TopK by SIGKILL of a rank, in bf16 with unlike
    replicas, AllReduce by SIGTERM.
    """
    folder = tmp_path_factory.mktemp("runs")
    llama = {"config": {**TINY_MODEL, "tie_word_embeddings": False, "attention_dropout": 0.1}}
    kill = job(folder / "kill", training={"model": llama, "precision": "BF16", "microBatchSize": 2}, **TOP_K)
    end = job(folder / "end", sync=ALL_REDUCE)
    processes = {
        "end cut": start_local(end, folder / "end" / "cut"),
        "end whole": start_local(end, folder / "end" / "whole"),
        "kill whole": start_local(kill, folder / "kill" / "whole"),
    }
    events = until_checkpoint(processes["end cut"], 8)
    processes["end cut"].send_signal(signal.SIGTERM)
    found = {}
    for name, process in processes.items():
        code, rest, _ = finished(process)
        found[name] = Run(code, rest, folder / Path(*name.split()))
    found["end cut"].events[:0] = events
    found["end stopped"] = replace(found["end cut"], out=folder / "end" / "stopped")
    broken_off(found["end cut"], found["end stopped"].out)
    rest_of_end = resumed(end, folder / "end" / "cut")
    found["kill cut"] = killed(kill, folder / "kill")
    found["end resumed"] = Run(*finished(rest_of_end)[:2], folder / "end" / "cut")
    return found


def test_after_sigkill_the_next_attempt_goes_on_to_the_bit(runs: dict[str, Run]) -> None:
    whole, cut = runs["kill whole"], runs["kill cut"]
    assert (whole.code, cut.code) == (0, 0)
    assert ["was killed by SIGKILL" in failure for failure in cut.failures] == [True], cut.failures
    assert "resumed from s3://models/killed/attempt-1/home-1/step-" in cut.log(2)
    rest = cut.digests(2)
    assert min(rest) > 1
    assert rest == {number: digest for number, digest in whole.digests(1).items() if number in rest}
    assert (cut.end["last_loss"], cut.end["validation_loss"]) == (whole.end["last_loss"], whole.end["validation_loss"])
    assert (cut.end["steps"], cut.end["tokens"]) == (STEPS, STEPS * 256)
    assert cut.chunks() == whole.chunks()


def test_storage_that_is_slow_holds_up_no_step_and_the_next_checkpoint_is_left_out_by_all(runs: dict[str, Run]) -> None:
    run = runs["kill cut"]
    logs = [run.log(1, label) for label in (0, "1-0")]
    left_out = [set(re.findall(r"checkpoint of step (\d+) left out: the one before", log)) for log in logs]
    for step in left_out[0] & left_out[1]:
        assert f"checkpoint of step {step}: s3://" not in logs[0]
    assert left_out[0] & left_out[1]
    assert "is not stored" not in "".join(logs)


def test_sigterm_leaves_a_checkpoint_from_which_a_later_run_goes_on_to_the_bit(runs: dict[str, Run]) -> None:
    whole, cut, rest = runs["end whole"], runs["end stopped"], runs["end resumed"]
    assert (whole.code, cut.code, rest.code) == (0, ExitCode.TERMINATED, 0)
    step = cut.checkpoints[0]["step"]
    assert cut.end["message"] == f"interrupted: all processes have ended; --resume goes on after step {step}"
    told = [f"told to end: stopped after step {step}, with a checkpoint" in cut.log(1, replica) for replica in (0, 1)]
    assert told == [True, True]
    assert f": step {step}, round {step}" in rest.log(2)
    assert (rest.end["last_loss"], rest.end["validation_loss"]) == (
        whole.end["last_loss"],
        whole.end["validation_loss"],
    )
    assert rest.chunks() == whole.chunks()


@pytest.mark.parametrize("name", ["kill whole", "kill cut", "end resumed"])
def test_at_the_end_the_last_checkpoints_and_the_best_one_are_there_and_no_other(
    runs: dict[str, Run], name: str
) -> None:
    run = runs[name]
    folder = run.path_of(run.checkpoints[0]["uri"]).parents[3]
    steps = folder.glob("attempt-*/home-*/step-*")
    stored = {path for path in steps if any(file.is_file() for file in path.rglob("*"))}
    assert stored == {run.path_of(item["uri"]).parent for item in run.checkpoints}
    last, best = run.checkpoints[:2], run.checkpoints[2:]
    assert (last[0]["step"], len(last)) == (48, 2)
    assert len(best) <= 1
    assert all(float(item["validationLoss"]) > float(best[0]["validationLoss"]) for item in last if best)


@pytest.fixture(scope="module")
def others(runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Jobs that go on where the one was stopped by SIGTERM: its newest checkpoint damaged, by steps of 12 sequences
    on two ranks in place of 8 on two replicas; with none left; with another algorithm and another width.
    """
    folder = tmp_path_factory.mktemp("others")
    layout = {"replicas": 1, "replica": {"gpusPerStage": 2, "zeroStage": 3}, "sync": ALL_REDUCE}
    policy = {"everySteps": 4, "keep": 16}
    jobs: dict[str, dict[str, Any]] = {
        "damaged": {**layout, "training": {"batchSize": 12}, "checkpoint": policy},
        "gone": {"replicas": 1, "sync": ALL_REDUCE},
        "another": {"replicas": 1, "training": {"model": {"config": {**GPT2, "n_embd": 64}}}},
    }
    processes = {}
    for name, spec in jobs.items():
        newest, *before = broken_off(runs["end stopped"], folder / name)
        if name == "damaged":
            chunk = next(Path(newest["uri"]).parent.glob("replica-0/*.safetensors"))
            chunk.write_bytes(chunk.read_bytes()[: chunk.stat().st_size // 2])
        if name == "gone":
            for item in (newest, *before):
                Path(item["uri"]).unlink()
        processes[name] = resumed(job(folder / f"{name} job", **spec), folder / name)
    return {name: Run(*finished(process)[:2], folder / name) for name, process in processes.items()}


def test_damage_is_told_and_another_layout_goes_on_from_the_checkpoint_before(
    runs: dict[str, Run], others: dict[str, Run]
) -> None:
    run = others["damaged"]
    newest, before, *_ = (item["uri"].rpartition("attempt-1/")[2] for item in runs["end stopped"].checkpoints)
    assert run.code == 0, run.end
    assert f"{newest} can't be used: replica-0/rank-0-0.safetensors has" in run.log(2)
    assert f"{before}: step " in run.log(2)
    assert "residuals of replicas [1] are dropped" in run.log(2)


def test_where_a_step_has_another_number_of_tokens_steps_and_rates_follow_the_tokens_seen(
    runs: dict[str, Run], others: dict[str, Run]
) -> None:
    run, stopped = others["damaged"], runs["end stopped"].checkpoints[1]["step"]
    seen = stopped * 8 / 12  # of the present steps, which have 12 sequences; those before had 8
    first, last = int(seen), STEPS * 8 // 12
    assert (run.end["steps"], run.end["tokens"]) == (last, STEPS * 256)
    taken = [item for item in run.checkpoints if "/attempt-2/" in item["uri"]]
    assert {item["step"] for item in taken} <= {*range(first + 4, last, 4), last}  # a slow disk may leave some out
    assert len(taken) > 1, "also of a replica that is alone, under AllReduce"
    for item in taken:
        manifest = json.loads(Path(item["uri"]).read_text())
        (_, said) = manifest["replicas"][0]["ranks"]
        done = item["step"] - first + seen
        rate = 3e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1, (done - WARMUP) / (last - WARMUP)))) / 2)
        assert said["schedule"]["position"] == pytest.approx(done)
        assert said["schedule"]["rates"] == pytest.approx([rate, rate])


def test_where_no_checkpoint_is_whole_the_job_ends_with_the_reason(
    runs: dict[str, Run], others: dict[str, Run]
) -> None:
    run = others["gone"]
    assert (run.code, run.end["last"]) == (ExitCode.STORAGE_REFUSED, True)
    assert "none of the job's checkpoints can be used" in run.end["message"]
    assert run.end["message"].count("its manifest isn't there") == len(runs["end stopped"].checkpoints)


def test_a_checkpoint_of_another_algorithm_and_model_is_refused_with_the_names_and_sizes(
    others: dict[str, Run],
) -> None:
    run = others["another"]
    assert (run.code, run.end["last"]) == (ExitCode.INVALID_INPUT, True)
    first, *lines = run.end["message"].splitlines()
    assert first.endswith("/manifest.json is of another algorithm or model:")
    assert lines[:3] == [
        "spec.sync.algorithm: the checkpoint has AllReduce, the job DiLoCo",
        "parameter lm_head.weight: the checkpoint has 8,288 elements, the job 16,576 elements",
        "parameter transformer.h.0.attn.c_attn.bias: the checkpoint has 96 elements, the job 192 elements",
    ]
    assert len(lines) == 8 + 1
    assert re.fullmatch(r"and \d+ more", lines[-1])


def test_resume_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    process = resumed(job(tmp_path), tmp_path / "none")
    code, events, err = finished(process)
    assert (code, events) == (ExitCode.INVALID_INPUT, [])
    assert "--resume" in err
    assert "leave --resume out to begin anew" in err


def test_resume_and_overwrite_exclude_each_other(tmp_path: Path) -> None:
    code, events, err = finished(start_local(job(tmp_path), tmp_path / "out", "--resume", "--overwrite"))
    assert (code, events) == (ExitCode.INVALID_INPUT, [])
    assert "--resume, --overwrite: one goes on with the earlier run, the other begins anew" in err
    assert not (tmp_path / "out").exists()


def test_a_model_folder_of_any_checkpoint_is_exported(runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs["end resumed"]
    result, (last, before, *_) = run.out / "result", run.checkpoints
    for name, item in (("last", last), ("before", before)):
        command = [*TRAINER, "export", str(result), item["uri"], str(tmp_path / name)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == (f"{tmp_path / name}: the model after step {item['step']}\n", "")
    assert export(result, str(Path(before["uri"]).parent), tmp_path / "by folder") == before["step"]
    weights = {name: load_file(tmp_path / name / "model.safetensors") for name in ("last", "before")}
    kept = load_file(result / "model.safetensors")
    assert {name: values.tolist() for name, values in weights["last"].items()} == {
        n: v.tolist() for n, v in kept.items()
    }
    assert any(not torch.equal(kept[name], values) for name, values in weights["before"].items())
    assert json.loads((tmp_path / "before" / "crosscloud.json").read_text())["checkpoint"] == before["uri"]
    assert json.loads((tmp_path / "by folder" / "crosscloud.json").read_text())["checkpoint"] == before["uri"]
    assert {path.name for path in (tmp_path / "before").iterdir()} == {path.name for path in result.iterdir()}


def test_an_export_that_makes_no_sense_is_one_line_by_the_name_of_its_argument(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    result, uri = runs["end resumed"].out / "result", runs["end resumed"].checkpoints[0]["uri"]
    new, broken, other = tmp_path / "new", tmp_path / "broken", tmp_path / "other"
    broken.mkdir()
    other.mkdir()
    for path in (broken / "crosscloud.json", other / "manifest.json"):
        path.write_text("[]")
    before = sorted(tmp_path.rglob("*"))
    for arguments, said in (
        ((tmp_path, uri, new), "RESULT: "),
        ((broken, uri, new), "RESULT: "),
        ((result, "nowhere", new), "CHECKPOINT: nowhere is no manifest.json that is there; give an address of"),
        ((result, f"{other}/manifest.json", new), f"CHECKPOINT: {other}/manifest.json doesn't go with"),
        ((result, runs["end whole"].checkpoints[0]["uri"], new), "CHECKPOINT: "),
        ((result, uri, tmp_path), f"OUT: {tmp_path} is there already"),
    ):
        with pytest.raises(Failure, match=f"^{re.escape(said)}") as fault:
            export(*arguments)
        assert fault.value.code == ExitCode.INVALID_INPUT
        assert len(str(fault.value).splitlines()) == 1
        assert sorted(tmp_path.rglob("*")) == before, "nothing half made"


def test_an_export_touches_nothing_beside_its_folder(runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs["end resumed"]
    mine = tmp_path / "model.part" / "mine"
    mine.parent.mkdir()
    mine.write_text("kept")
    export(run.out / "result", run.checkpoints[0]["uri"], tmp_path / "model")
    assert mine.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.part"]
