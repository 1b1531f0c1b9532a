"""The benchmark of the engine still runs, and both sides of it do the same. How fast is not for a test to say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[2] / "benchmarks" / "engine.py"


@pytest.mark.parametrize("zero", [0, 2])
def test_both_sides_of_the_engine_benchmark_have_equal_losses(zero):
    size = {"layers": 1, "width": 32, "vocabulary": 64, "sequence": 8, "batch": 1, "pairs": 10, "window": 5}
    size["zero"] = zero
    options = [f"--{name}={value}" for name, value in size.items()]
    done = subprocess.run(
        [sys.executable, str(ENGINE), "--json", *options], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["losses_equal"]
    assert result["losses"] == 12
    assert result["size"].items() >= size.items()
    assert result["round_ms"] > 0
    assert result["overhead_interval"][0] <= result["overhead"] <= result["overhead_interval"][1]
