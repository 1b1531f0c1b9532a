"""What a round takes of memory, at a size that shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from link.yard import Yard
from membership.field import run_document

from crosscloud_trainer.models.memory import needed

TESTS = Path(__file__).parents[1]
PARAMETERS = 100_000_000
COPY = 4 * PARAMETERS
"""Bytes of one fp32 copy of a rank's shard."""


def test_a_round_of_100_million_parameters_takes_what_is_counted_and_a_fifth_of_a_copy_at_most(tmp_path: Path) -> None:
    """Outer state, residuals and payloads are what the check before training counts; the rest is to work on them."""
    Yard(tmp_path)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(TESTS / "membership" / "memory_process.py"), str(tmp_path)]
    started = [
        subprocess.Popen([*command, str(replica), str(PARAMETERS)], env=environ, stdout=subprocess.PIPE, text=True)
        for replica in (0, 1)
    ]
    told = [json.loads(process.communicate(timeout=600)[0]) for process in started]
    need = needed(PARAMETERS, run_document([1, 1]), 0)
    counted = need.outer + need.exchange
    assert told[0]["digest"] == told[1]["digest"]
    for one in told:
        assert 0.95 * counted < one["bytes"] < counted + COPY // 5
