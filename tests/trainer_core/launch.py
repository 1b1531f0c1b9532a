"""Starts ranks as processes by torchrun, one process group for each replica."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
SOURCES = TESTS.parents[1] / "trainer" / "src"
DEADLINE = 800


class Replica:
    """The ranks of one replica, started with what they are to do; `result` waits for their end."""

    def __init__(self, program: str, ranks: int, plan: list[Any]) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SOURCES), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        self._process = subprocess.Popen(
            [*command, str(TESTS / program), json.dumps(plan)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    @staticmethod
    def results(replicas: "Sequence[Replica]") -> list[Any]:
        """The result of each; where one fails, the others end too."""
        try:
            return [replica.result() for replica in replicas]
        finally:
            for replica in replicas:
                replica._process.kill()
                replica._process.communicate()

    def result(self) -> Any:
        """What rank 0 printed last, from JSON; AssertionError with all output if a rank failed."""
        try:
            out, err = self._process.communicate(timeout=DEADLINE)
        finally:
            self._process.kill()
        assert self._process.returncode == 0, err[-6000:]
        return json.loads(out.strip().splitlines()[-1])


def named(*parts: Any) -> str:
    return " ".join(str(part) for part in parts)
