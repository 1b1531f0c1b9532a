"""Programs that the lab runs: side by side, with a deadline, and none left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import eventually

from crosscloud_lab.errors import Ended, LabError
from crosscloud_lab.progress import PlainProgress
from crosscloud_lab.shell import run, stream, together

# A program with a child of its own, as compilers and image builders are; the child writes its process id.
FAMILY = "sh -c 'echo $$ > {file}; exec sleep 1000' & wait"


def ended(file: Path) -> bool:
    with suppress(ProcessLookupError):
        os.kill(int(file.read_text()), 0)
        return Path(f"/proc/{int(file.read_text())}/status").read_text().split("State:\t")[1][0] == "Z"
    return True


def family(file: Path) -> Callable[[], str]:
    return lambda: run(["sh", "-c", FAMILY.format(file=file)], timeout=600)


def test_the_first_failure_ends_the_other_tasks_programs_and_their_children(tmp_path: Path) -> None:
    file, lines = tmp_path / "pid", list[str]()

    def fails() -> None:
        eventually(lambda: file.exists() and file.read_text(), "the other task to run")
        run(["sh", "-c", "echo no room >&2; exit 3"])

    def waits() -> None:
        with PlainProgress(lines.append).phase("the other one"):
            family(file)()

    with pytest.raises(LabError, match=r"failed with exit status 3:\nno room"):
        together(waits, fails)
    eventually(lambda: ended(file), "the child's end")
    assert lines[0].startswith("--  the other one: stopped ("), lines


def test_nothing_starts_any_more_when_a_task_has_failed(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    told: list[type[BaseException]] = []

    def late() -> None:
        eventually(begun.exists, "the failure")
        for _ in range(1000):
            try:
                run(["true"])
            except LabError as error:
                told.append(type(error))
                raise
            time.sleep(0.01)

    def fails() -> None:
        begun.touch()
        raise LabError("first")

    with pytest.raises(LabError, match="first"):
        together(late, fails)
    assert told == [Ended]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_all_tasks(tmp_path: Path, number: int) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    script = (
        "import signal, sys; from crosscloud_lab.shell import interrupt_when_asked_to_end, run, together\n"
        # What started the tests may ignore signals, as nohup does.
        "signal.signal(signal.SIGINT, signal.default_int_handler); signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "interrupt_when_asked_to_end()\n"
        "together(*(lambda text=text: run(['sh', '-c', text], timeout=600) for text in sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", script, *(FAMILY.format(file=file) for file in files)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: all(file.exists() and file.read_text() for file in files), "both tasks to run")
        process.send_signal(number)
        assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    for file in files:
        eventually(lambda file=file: ended(file), "the child's end")


def test_a_program_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with pytest.raises(LabError, match=r"`sh -c .*` did not end within 2 s"):
        run(["sh", "-c", FAMILY.format(file=file)], timeout=2)
    eventually(lambda: ended(file), "the child's end")


def test_a_program_that_falls_silent_is_ended_with_its_last_words(tmp_path: Path) -> None:
    file, lines = tmp_path / "pid", list[str]()
    script = f"echo one; echo two >&2; {FAMILY.format(file=file)}"
    with pytest.raises(LabError, match=r"the build said nothing for 2 s and was ended:\none\ntwo\n"):
        stream(["sh", "-c", script], lines.append, what="the build", silence=2)
    assert lines == ["one\n", "two\n"]
    eventually(lambda: ended(file), "the child's end")


def test_a_stream_that_fails_shows_its_last_words() -> None:
    with pytest.raises(LabError, match=r"^the build failed with exit status 4:\nthe reason\n$"):
        stream(["sh", "-c", "echo the reason; exit 4"], lambda _: None, what="the build")
