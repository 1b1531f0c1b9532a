"""Runs the tests as two pytest processes: what needs the lab's clusters, and the rest.

A line appears for each file that is done; what pytest says at its end (failures, slowest tests) follows whole. An
interrupt ends both, and each takes its clusters down. Arguments go to both: `.ci/tests.py -k gang`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

LAB = ["tests/lab", "tests/e2e"]
PARTS = {"lab": LAB, "rest": ["tests", *(f"--ignore={folder}" for folder in LAB)]}
NOTHING_COLLECTED = 5  # pytest's exit status where -k leaves none


class Part:
    """One pytest process; its progress is shown as it comes, the rest is kept."""

    def __init__(self, name: str, arguments: list[str], begin: float) -> None:
        self.name = name
        self._begin = begin
        self._last: list[str] = []
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        color = ["--color=yes"] if sys.stdout.isatty() else []
        self._process = subprocess.Popen(
            [*command, *color], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def interrupt(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def wait(self) -> int:
        code = self._process.wait()
        self._reader.join()
        return 0 if code == NOTHING_COLLECTED else code

    def tell(self) -> None:
        say(f"\n== {self.name}\n{''.join(self._last)}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        ending = False
        for line in self._process.stdout:
            # Between its first heading and the next one, pytest tells of one file in each line.
            ending = ending or ("====" in line and "test session starts" not in line)
            if ending:
                self._last.append(line)
            elif "[" in line and "%" in line:
                say(f"{time.monotonic() - self._begin:5.0f} s  {self.name:<4}  {line}")


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> int:
    parts: list[Part] = []

    def forward(number: int, _: object) -> None:
        say(f"\n{signal.Signals(number).name}: ending both, and their clusters\n")
        for part in parts:
            part.interrupt(signal.SIGINT)

    # Before anything starts: a program whose parent handles a signal begins with the default, not with ignoring it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    begin = time.monotonic()
    parts += (Part(name, [*arguments, *sys.argv[1:]], begin) for name, arguments in PARTS.items())
    codes = [part.wait() for part in parts]
    for part in parts:
        part.tell()
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
