"""Whole jobs on this machine: real processes, DeepSpeed, and mutual TLS on loopback."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer.jobs import (
    TINY_MODEL,
    TRAINER,
    alive,
    family,
    finished,
    manifest,
    ranks_of,
    start_local,
    wait_for,
    written,
)
from trainer.runs import Run
from transformers import AutoModelForCausalLM, AutoTokenizer

from crosscloud_trainer.contract import ExitCode, Model
from crosscloud_trainer.models.presets import build_model


def run(folder: Path, document: Any) -> Run:
    out = folder / "out"
    code, events, err = finished(start_local(written(folder, document), out))
    assert err == ""
    return Run(code, events, out)


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two replicas with 2 and 4 ranks and unlike ZeRO stages in one job; 12 steps in windows of 5."""
    override = {"name": "big", "index": 1, "gpusPerStage": 4, "zeroStage": 2}
    document = manifest(
        replica={"gpusPerStage": 2, "zeroStage": 1}, replicaOverrides=[override], sync={"innerSteps": 5}
    )
    return run(tmp_path_factory.mktemp("unequal"), document)


def test_replicas_with_two_and_four_ranks_agree_to_the_bit_after_every_round(unequal: Run) -> None:
    assert unequal.code == 0
    assert sorted(unequal.digests()) == [
        1,
        2,
        3,
    ]  # after steps 5 and 10, and the shorter window that ends with step 12
    assert unequal.digests() == unequal.digests(replica=1)
    assert len(set(unequal.digests().values())) == 3


def test_events_tell_the_whole_story_and_the_end_its_numbers(unequal: Run) -> None:
    end = unequal.end
    reports = [event for event in unequal.events if event["event"] == "report"]
    assert end["event"] == "finish"
    assert end["steps"] == 12
    assert end["tokens"] == 3072
    assert end["last_loss"] < end["first_loss"]
    assert end["validation_loss"] < end["first_loss"]
    assert end["digests_equal"] is True
    elements = sum(
        p.numel() for p in build_model(Model(config=dict(TINY_MODEL, tie_word_embeddings=True)), 32, 0).parameters()
    )
    assert end["dense_bytes"] == pytest.approx(2 * 12 * 4 * elements, rel=1e-3)  # 2 (C-1)/C of 4 bytes, both replicas
    assert end["wan_bytes"] < end["dense_bytes"] / 8
    assert {report["replica"] for report in reports} == {0, 1}
    assert [r["completion"]["outcome"] for r in reports if "completion" in r] == ["Succeeded", "Succeeded"]
    details = [report["detail"] for report in reports if report["replica"] == 0 and "detail" in report]
    assert "loading torch and DeepSpeed" in details
    ending = {"waiting until all replicas have the last round", "writing checkpoint and result"}
    assert ending & set(details), "each may be quicker than reports are, but not both"
    terms = {report["term"] for report in reports if report["activity"] == "Ended"}
    assert len(terms) == 1
    assert terms.pop() >= 1


def test_the_manifest_comes_with_digests_that_are_right(unequal: Run) -> None:
    path = next((unequal.out / "attempt-1" / "home-1").iterdir()) / "manifest.json"
    found = json.loads(path.read_bytes())
    completion = [e["completion"] for e in unequal.events if e.get("completion") and e["replica"] == 0]
    assert completion[0]["checkpointDigest"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found["round"] == 3
    assert found["digest"] == unequal.digests()[3]
    chunks = [chunk for replica in found["replicas"] for rank in replica["ranks"] for chunk in rank["chunks"]]
    assert len(chunks) == 6
    for chunk in chunks:
        data = (path.parent / chunk["path"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == chunk["sha256"]


def test_the_result_is_a_transformers_folder_with_the_logits_of_the_outer_weights(unequal: Run) -> None:
    model = build_model(Model(config=dict(TINY_MODEL, tie_word_embeddings=True)), 32, seed=99)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for (name, start), values in unequal.weights().items():
            parameters[name].view(-1)[start : start + values.numel()] = values
    loaded = AutoModelForCausalLM.from_pretrained(unequal.out / "result")
    tokenizer = AutoTokenizer.from_pretrained(unequal.out / "result")
    ids = tokenizer("def naïve():", return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == [256, *"def naïve():".encode()]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_generate_writes_text_that_begins_with_the_prompt(unequal: Run) -> None:
    command = [*TRAINER, "generate", str(unequal.out / "result"), "--prompt", "import ", "--tokens", "20"]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2))
    assert first.stdout.startswith("import ")
    assert first.stdout == second.stdout  # the same seed
    assert first.stderr == ""


def test_one_replica_trains_without_exchange(tmp_path: Path) -> None:
    done = run(tmp_path, manifest(replicas=1, training={"tokens": 1024, "precision": "BF16"}))
    start = build_model(Model(config=dict(TINY_MODEL, tie_word_embeddings=True)), 32, 0)
    before = dict(start.named_parameters(remove_duplicate=False))
    assert done.code == 0
    assert done.end["wan_bytes"] == 0
    assert done.end["ratio"] is None
    moved = [
        not torch.equal(before[name].detach().view(-1)[start : start + values.numel()], values)
        for (name, start), values in done.weights().items()
    ]
    assert all(moved)
    assert done.end["last_loss"] < done.end["first_loss"]


def test_a_killed_rank_ends_the_attempt_and_the_next_one_finishes(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    path = written(tmp_path, manifest(training={"tokens": 12288, "model": {"config": gpt2}}))
    process = start_local(path, tmp_path / "out")
    assert process.stdout is not None
    events = []
    for line in process.stdout:
        events.append(json.loads(line))
        if events[-1]["event"] == "report" and events[-1]["progress"]["round"] >= 1:
            break
    first = ranks_of(process.pid)
    victim = first[-1]
    victim.send_signal(signal.SIGKILL)
    code, rest, _ = finished(process)
    events += rest
    failures = [event for event in events if event["event"] == "failure"]
    assert code == 0
    assert [failure["last"] for failure in failures] == [False]
    assert "was killed by SIGKILL" in failures[0]["message"]
    assert [event["attempt"] for event in events if event["event"] == "attempt"] == [1, 2]
    assert alive(first) == []
    second = Run(code, events, tmp_path / "out")
    assert second.digests(2) == second.digests(2, replica=1) != {}


def test_sigterm_ends_everything_and_leaves_no_process(tmp_path: Path) -> None:
    path = written(tmp_path, manifest(training={"tokens": "10M"}))
    process = start_local(path, tmp_path / "out")
    wait_for(lambda: len(ranks_of(process.pid)) == 2, "two ranks")
    below = family(process.pid)
    process.send_signal(signal.SIGTERM)
    code, events, _ = finished(process)
    assert code == ExitCode.TERMINATED
    (stopping,) = (event for event in events if event["event"] == "stopping")
    assert stopping["message"].startswith("interrupted: the replicas stop after this round, with a checkpoint; at most")
    assert events[-1] == {
        "event": "failure",
        "attempt": 1,
        "message": "interrupted: all processes have ended",
        "last": True,
    }
    assert alive(below) == []


def test_a_terminal_that_is_closed_ends_a_run_in_order(tmp_path: Path) -> None:
    process = start_local(written(tmp_path, manifest(replicas=1, training={"tokens": "10M"})), tmp_path / "out")
    wait_for(lambda: len(ranks_of(process.pid)) == 1, "a rank")
    below = family(process.pid)
    process.send_signal(signal.SIGHUP)
    code, events, _ = finished(process)
    assert (code, events[-1]["message"]) == (128 + signal.SIGHUP, "interrupted: all processes have ended")
    assert alive(below) == []


def test_the_death_of_the_launcher_takes_all_processes_with_it_and_the_next_run_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    path = written(tmp_path, manifest(replicas=1, training={"tokens": "10M"}))
    process = start_local(path, tmp_path / "out")
    wait_for(lambda: len(ranks_of(process.pid)) == 1, "a rank")
    below = family(process.pid)
    process.kill()
    process.communicate()
    (key,) = tmp_path.glob("crosscloud-*/attempt-1/tls-0/tls.key")
    assert oct(key.stat().st_mode)[-3:] == "600"
    assert oct(key.parents[2].stat().st_mode)[-3:] == "700"
    wait_for(lambda: not alive(below), "the end of all processes")
    nothing = written(tmp_path, manifest(training={"data": {"train": ["/none/*.txt"]}}))
    assert finished(start_local(nothing, tmp_path / "out"))[0] == ExitCode.INVALID_INPUT
    assert list(tmp_path.glob("*crosscloud-*")) == []


def test_steps_that_are_never_finite_end_the_job_at_once(tmp_path: Path) -> None:
    document = manifest(training={"tokens": "1M"})
    document["spec"]["training"]["model"] = {"config": {**TINY_MODEL, "rms_norm_eps": -1.0}}
    done = run(tmp_path, document)
    assert done.code == ExitCode.NON_FINITE
    assert done.end["last"] is True
    assert "not finite for 10 steps in a row" in done.end["message"]
