"""Whole jobs on this machine whose replicas have unequal data, and one whose data is lost on the way (case C57)."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from trainer.jobs import TINY_MODEL, TRAINER, finished, manifest, start_local, wait_for, written
from trainer.test_data_packing import TEXTS, trained_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

STEP = re.compile(r"^\[rank 0\] step (\d+) of", re.MULTILINE)


def texts_in(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:04}.txt").write_text(f"{TEXTS[number % len(TEXTS)]} and text number {number}\n" * 3)


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, list[dict[str, Any]]]:
    """East has a few documents of its own, west many and two ranks; all read a file of lines."""
    folder = tmp_path_factory.mktemp("unequal")
    texts_in(folder / "east", 6)
    texts_in(folder / "west", 150)
    (folder / "web.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS * 5))
    sources = [
        {"name": "web", "paths": [f"{folder}/web.jsonl"], "field": "body"},
        {"name": "notes", "paths": [f"{folder}/east/*.txt"], "members": ["east"]},
        {"name": "letters", "paths": [f"file://{folder}/west/*.txt"], "members": ["west"]},
    ]
    tokenizer = trained_tokenizer(folder / "tokenizer", bos_token="<s>", eos_token="</s>")
    data = {"sources": sources, "tokenizer": "File", "tokenizerFile": tokenizer}
    document = manifest(
        training={"data": data, "tokens": 8 * 2 * 4 * 32, "microBatchSize": 2, "evaluateEvery": 4},
        replicaOverrides=[
            {"name": "a", "index": 0, "members": ["east"], "zeroStage": 1},
            {"name": "b", "index": 1, "members": ["west"], "gpusPerStage": 2, "zeroStage": 3},
        ],
    )
    code, events, err = finished(start_local(written(folder, document), folder / "out"))
    assert code == 0, err + str(events[-1:])
    return folder, code, events


def test_replicas_with_unequal_data_make_equally_many_steps_and_agree(
    unequal: tuple[Path, int, list[dict[str, Any]]],
) -> None:
    folder, _, events = unequal
    end = events[-1]
    assert end["steps"] == 8
    assert end["digests_equal"] is True
    told = [(folder / "out/logs/attempt-1" / f"replica-{replica}.log").read_text() for replica in (0, 1)]
    shared = [re.findall(r"tokens of web \((.*?)\)", text) for text in told]
    assert shared[0] == shared[1] != []
    assert "tokens of notes (6 files" in told[0]
    assert "letters" not in told[0]
    assert "tokens of letters (150 files" in told[1]
    assert "notes" not in told[1]


def test_the_losses_and_the_best_step_are_in_the_summary(unequal: tuple[Path, int, list[dict[str, Any]]]) -> None:
    end = unequal[2][-1]
    assert end["best_step"] in (4, 8)
    assert 0 < end["best_validation_loss"] <= end["validation_loss"] + 1


def test_the_result_has_the_tokenizer_of_the_job(unequal: tuple[Path, int, list[dict[str, Any]]]) -> None:
    folder = unequal[0]
    known = AutoTokenizer.from_pretrained(folder / "tokenizer")
    loaded = AutoTokenizer.from_pretrained(folder / "out/result")
    model = AutoModelForCausalLM.from_pretrained(folder / "out/result")
    assert loaded(TEXTS[0])["input_ids"] == known(TEXTS[0])["input_ids"]
    assert model.config.vocab_size == len(known)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (known.bos_token_id, known.eos_token_id)
    assert model.config.hidden_size == TINY_MODEL["hidden_size"]


def test_data_that_is_lost_while_training_ends_the_attempt_everywhere_and_names_the_rank(tmp_path: Path) -> None:
    texts_in(tmp_path / "texts", 60)
    document = manifest(
        training={"data": {"train": [f"{tmp_path}/texts/*.txt"]}, "tokens": 10**9},
        replica={"gpusPerStage": 2},
        failurePolicy={"attempts": 1},
    )
    path = written(tmp_path, document)
    process = subprocess.Popen(
        [*TRAINER, "local", str(path), "--json", "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    log = tmp_path / "out/logs/attempt-1/replica-1.log"
    wait_for(lambda: log.exists() and "[rank 0] round 2 applied" in log.read_text(), "the second round")
    tokens = sorted(tmp_path.glob("crosscloud-*/attempt-1/crosscloud-pod-*/0"))
    assert len(tokens) == 2, "each replica's pod has its own"
    with tokens[0].open("r+b") as out:
        out.truncate(100)
    code, events, _ = finished(process)
    assert code == 1
    message = events[-1]["message"]
    assert re.match(r"replica [01]: rank [01]: ", message), message
    assert "has become shorter: sequence" in message
