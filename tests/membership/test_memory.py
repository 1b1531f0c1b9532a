"""What a round takes of memory, at a size that shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from link.yard import Yard
from membership.field import run_document

from crosscloud_trainer.contract import Algorithm, CodecName, Sync, dump_json
from crosscloud_trainer.models.memory import needed

TESTS = Path(__file__).parents[1]
LEFT = 80_000_000
"""Bytes that a round may take beside what is counted, whatever the model: a fifth of one fp32 copy of the largest shard
here, and less than a copy of any.
"""


@pytest.mark.parametrize(
    ("sync", "ranks", "shard"),
    [
        (Sync(codec=CodecName.INT8), 1, 100_000_000),
        (Sync(codec=CodecName.TOP_K), 2, 25_000_000),
        (Sync(Algorithm.ALL_REDUCE, codec=CodecName.INT8), 1, 25_000_000),
    ],
    ids=["DiLoCo, Int8, 100 million", "DiLoCo, TopK, two ranks", "AllReduce, Int8"],
)
def test_a_round_takes_what_is_counted_and_little_more(tmp_path: Path, sync: Sync, ranks: int, shard: int) -> None:
    """Outer state, residuals and payloads are what the check before training counts; the rest is to work on them."""
    run = replace(run_document([ranks, ranks]), sync=sync)
    (tmp_path / "run.json").write_text(dump_json(run))
    Yard(tmp_path, ranks=ranks)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(TESTS / "membership" / "memory_process.py"), str(tmp_path)]
    started = [
        subprocess.Popen([*command, *map(str, (replica, rank, shard * ranks))], env=environ, stdout=subprocess.PIPE)
        for replica in (0, 1)
        for rank in range(ranks)
    ]
    told = [json.loads(process.communicate(timeout=600)[0]) for process in started]
    need = needed(shard * ranks, run, 0)
    counted = need.outer + need.exchange
    assert len({one["digest"] for one in told}) == 1
    for one in told:
        assert 0.95 * counted < one["bytes"] < counted + LEFT
