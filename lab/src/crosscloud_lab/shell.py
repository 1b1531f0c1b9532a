"""Runs other programs and turns their failures into LabErrors.

Programs that are started inside `together` belong to its tasks: the first failure, or an interrupt, ends all of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from crosscloud_lab.errors import Ended, LabError

_GRACE_SECONDS = 10.0
_SHOWN_LINES = 30


class _Group:
    """The programs of some tasks; each leads a process group of its own, so that its children end with it."""

    def __init__(self) -> None:
        self.ended = False
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()

    def start(self, words: list[str], **options: Any) -> subprocess.Popen[str]:
        with self._lock:
            if self.ended:
                raise Ended(f"`{_shown(words)}` was not started: another task failed, or was interrupted")
            process = subprocess.Popen(words, process_group=0, **options)
            self._running.add(process)
        return process

    def forget(self, process: subprocess.Popen[str]) -> None:
        with self._lock:
            self._running.discard(process)

    def end(self) -> None:
        """Ends what runs, and lets nothing start any more."""
        with self._lock:
            self.ended = True
            running = list(self._running)
        for process in running:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
            # Children may outlive the one that started them.
            _signal_group(process, signal.SIGKILL)


_group: ContextVar[_Group | None] = ContextVar("group", default=None)


def run(
    command: Sequence[str | Path],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    timeout: float = 120,
) -> str:
    """Output of a program; LabError with its words when it fails or takes longer than `timeout` seconds."""
    words = [str(word) for word in command]
    source = subprocess.DEVNULL if stdin is None else subprocess.PIPE
    with _started(words, env, folder, stdin=source, stderr=subprocess.PIPE) as process:
        try:
            output, errors = process.communicate(stdin, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise LabError(f"`{_shown(words)}` did not end within {timeout:.0f} s") from error
    _refuse_failure(process, words, f"`{_shown(words)}`", (errors or output).strip()[-2000:])
    return output


def stream(
    command: Sequence[str | Path],
    told: Callable[[str], None],
    *,
    what: str,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    silence: float = 3600,
) -> None:
    """Tells each line of a program that may run for long.

    LabError with its last lines when it fails, or says nothing for `silence` seconds.
    """
    words = [str(word) for word in command]
    lines: list[str] = []
    with _started(words, env, folder, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        with _Watch(process, silence) as watch:
            for line in process.stdout:
                watch.heard()
                lines.append(line)
                told(line)
            process.wait()
    said = "".join(lines[-_SHOWN_LINES:])
    if watch.expired:
        raise LabError(f"{what} said nothing for {silence:.0f} s and was ended:\n{said}")
    _refuse_failure(process, words, what, said)


def succeeds(command: Sequence[str | Path]) -> bool:
    """Whether a program exits with 0."""
    try:
        run(command)
    except LabError:
        return False
    return True


def together(*tasks: Callable[[], object]) -> None:
    """Runs tasks side by side. The first failure, or an interrupt, ends the programs of all; then it is raised."""
    group = _Group()
    failures: list[BaseException] = []

    def work(task: Callable[[], object]) -> None:
        _group.set(group)
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - the first one is raised again below
            failures.append(error)
            group.end()

    threads = [threading.Thread(target=work, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            # A task that fails ends the others' programs; one that only waits for a lock is left behind.
            while thread.is_alive() and not failures:
                thread.join(0.2)
            thread.join(2 * _GRACE_SECONDS)
    except KeyboardInterrupt:
        group.end()
        for thread in threads:
            thread.join(_GRACE_SECONDS)
        raise
    if failures:
        raise failures[0]


def interrupt_when_asked_to_end() -> None:
    """Takes SIGTERM, and a terminal that goes away, for an interrupt, so that programs we started end with us."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays what it is
            signal.signal(number, signal.default_int_handler)


class _Watch:
    """Ends a program that says nothing for too long."""

    def __init__(self, process: subprocess.Popen[str], silence: float) -> None:
        self.expired = False
        self._process, self._silence = process, silence
        self._last = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def heard(self) -> None:
        self._last = time.monotonic()

    def _look(self) -> None:
        while not self._done.wait(max(self._last + self._silence - time.monotonic(), 0.1)):
            if time.monotonic() >= self._last + self._silence:
                self.expired = True
                _kill(self._process)
                return

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._done.set()
        self._thread.join()


@contextmanager
def _started(
    words: list[str], env: Mapping[str, str] | None, folder: Path | None, **streams: int
) -> Iterator[subprocess.Popen[str]]:
    """A running program, which is killed when the block fails."""
    group = _group.get()
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "errors": "replace", **streams}
    options |= {"env": None if env is None else dict(env), "cwd": folder}
    try:
        process = group.start(words, **options) if group else subprocess.Popen(words, process_group=0, **options)
    except FileNotFoundError as error:
        raise LabError(f"program {words[0]} is not installed") from error
    with process:
        try:
            yield process
        except BaseException:
            _kill(process)
            raise
        finally:
            if group:
                group.forget(process)


def _refuse_failure(process: subprocess.Popen[str], words: list[str], what: str, said: str) -> None:
    if process.returncode == 0:
        return
    group = _group.get()
    if group and group.ended:
        raise Ended(f"`{_shown(words)}` was ended: another task failed, or was interrupted")
    raise LabError(f"{what} failed with exit status {process.returncode}:\n{said}")


def _kill(process: subprocess.Popen[str]) -> None:
    _signal_group(process, signal.SIGKILL)


def _signal_group(process: subprocess.Popen[str], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _shown(words: Sequence[str]) -> str:
    return " ".join(words[:12]) + (" ..." if len(words) > 12 else "")
