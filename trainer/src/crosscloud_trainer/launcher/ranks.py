"""The ranks of one pod: started with torchrun's environment, ended together, reaped, their output passed on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from crosscloud_trainer.contract import ExitCode
from crosscloud_trainer.environment import ERROR_FILE, NOT_JOINED, PARENT, unfinished

_EXPLAIN_SECONDS = 5.0  # how long a rank that lost a peer waits for that peer's own words
_EARLY_SECONDS = 30.0  # how long others go on beside one that ended without an error, but too early
_POLL_SECONDS = 0.05
_LINE_BYTES = 2**16  # a longer line is cut, so that no rank fills this process's memory
_LAST_LINE_LETTERS = 300


@dataclass(frozen=True)
class RankExit:
    """How the ranks ended: the exit code of the first that failed, and its message where it left one."""

    code: int
    message: str
    rank: int | None = None


def exit_code(wait_status: int) -> int:
    """A process's exit code as a container would show it: 128 + number for a signal."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def in_words(code: int) -> str:
    """How a process with this exit code ended, as a container would show it."""
    if code > 128:
        number = code - 128
        return f"was killed by {signal.Signals(number).name if number in set(signal.Signals) else number}"
    return f"ended with exit code {code}"


def rank_environments(
    first: int, local: int, world: int, node: int, master: tuple[str, int], environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """torchrun's environment for the `local` ranks of one node, whose first one has the number `first`."""
    threads = environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // local)))
    return [
        {
            **environ,
            "RANK": str(first + number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(local),
            "GROUP_RANK": str(node),
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
            "OMP_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
            "TORCH_CPP_LOG_LEVEL": environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # its warnings come with stacks
            PARENT: str(os.getpid()),
        }
        for number in range(local)
    ]


def usable_cores() -> int:
    """Cores that this process may use: its affinity, cut by the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = _cpu_quota()
    return max(1, min(cores, int(quota))) if quota else cores


def _cpu_quota() -> float | None:
    unified = Path("/sys/fs/cgroup/cpu.max")
    if unified.exists():
        limit, period = unified.read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    legacy = Path("/sys/fs/cgroup/cpu")
    try:
        limit_us = int((legacy / "cpu.cfs_quota_us").read_text())
        return limit_us / int((legacy / "cpu.cfs_period_us").read_text()) if limit_us > 0 else None
    except (OSError, ValueError):
        return None


class RankGroup:
    """The running ranks of a pod. One thread calls it."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], out: IO[str]) -> None:
        """Starts one process for each environment; `out` gets their lines."""
        self._out = out
        self._lock = threading.Lock()
        self._alive: dict[int, int] = {}  # process id -> rank
        self._errors: dict[int, Path] = {}
        self._last_lines: dict[int, str] = {}
        self._pumps: list[threading.Thread] = []
        for environment in environments:
            self._start(command, environment)

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        rank = int(environment["RANK"])
        process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        process.returncode = 0  # `_reap` waits for all children; Popen must not do it a second time
        self._alive[process.pid] = rank
        self._errors[rank] = Path(environment[ERROR_FILE])
        pump = threading.Thread(target=self._pump, args=(rank, process.stdout), daemon=True)
        pump.start()
        self._pumps.append(pump)

    def _pump(self, rank: int, pipe: IO[bytes]) -> None:
        with pipe:
            while data := pipe.readline(_LINE_BYTES):
                line = data.decode(errors="replace").rstrip()
                if line:
                    self._last_lines[rank] = line
                # a full disk, letters that it doesn't take: the line is lost, and not the rank that wrote it
                with self._lock, contextlib.suppress(OSError, UnicodeError):
                    self._out.write(f"[rank {rank}] {line}\n")
                    self._out.flush()

    def wait(self, stopped: Callable[[], bool], tick: Callable[[], None], grace: float = 20.0) -> RankExit:
        """Wait until all ranks have ended. `stopped` says that SIGTERM came, after which they have `grace` seconds for
        a last checkpoint; `tick` is called now and then.
        """
        ended: dict[int, int] = {}
        lost_since: float | None = None
        while self._alive:
            ended.update(self._reap())
            failed = {rank: code for rank, code in ended.items() if code != 0}
            if stopped():
                ended.update(self._end_gently(grace, tick))
                break
            if failed or self._early(ended):
                lost_since = lost_since or time.monotonic()
                explained = any(code != ExitCode.PEER_LOST for code in failed.values())
                limit = _EXPLAIN_SECONDS if failed else _EARLY_SECONDS
                if explained or time.monotonic() - lost_since > limit:
                    self._kill()
                    break
            tick()
            time.sleep(_POLL_SECONDS)
        for pump in self._pumps:
            pump.join(timeout=5)
        return self._verdict(ended, stopped())

    def _verdict(self, ended: Mapping[int, int], stopped: bool) -> RankExit:
        failed = [(rank, code) for rank, code in ended.items() if code != 0]
        early = self._early(ended)
        strangers = [rank for rank in early if unfinished(self._errors[rank]).read_text() == NOT_JOINED]
        if strangers and not failed:
            message = f"rank {strangers[0]} ended with exit code 0, but {NOT_JOINED}"
            return RankExit(ExitCode.INVALID_INPUT, message, strangers[0])
        if not failed and (not early or len(ended) == len(self._errors)):
            return RankExit(ExitCode.SUCCEEDED, "")
        if stopped:
            told = [self._message(rank, code) for rank, code in sorted(failed) if code == ExitCode.TERMINATED]
            return RankExit(ExitCode.TERMINATED, told[0] if told else "ended by SIGTERM")
        # a rank that only lost a peer isn't the cause while another one says what happened
        failed.sort(key=lambda item: item[1] == ExitCode.PEER_LOST)
        if early and (not failed or failed[0][1] == ExitCode.PEER_LOST):
            return RankExit(1, f"rank {early[0]} ended with exit code 0 before its training had ended", early[0])
        rank, code = failed[0]
        return RankExit(code, self._message(rank, code), rank)

    def _early(self, ended: Mapping[int, int]) -> list[int]:
        """Ranks that ended without an error before their training had."""
        return sorted(rank for rank, code in ended.items() if code == 0 and unfinished(self._errors[rank]).exists())

    def _message(self, rank: int, code: int) -> str:
        try:
            left = self._errors[rank].read_text(errors="replace")
        except OSError:
            left = ""
        if left:
            return f"rank {rank}: {left}"
        last = self._last_lines.get(rank, "")[:_LAST_LINE_LETTERS]  # of a traceback, what was raised
        return f"rank {rank} {in_words(code)}" + (f"; its last line: {last}" if last and code <= 128 else "")

    def _reap(self) -> dict[int, int]:
        """Exit codes of ranks that ended. Orphans are reaped too, since in a container this process is PID 1."""
        found = {}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self._alive:
                found[self._alive.pop(pid)] = exit_code(status)
        return found

    def _end_gently(self, grace: float, tick: Callable[[], None]) -> dict[int, int]:
        """SIGTERM, and SIGKILL to those that are still there after `grace` seconds; exit codes."""
        ended: dict[int, int] = {}
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self._alive and time.monotonic() < deadline:
            ended.update(self._reap())
            tick()
            time.sleep(_POLL_SECONDS)
        return ended | self._kill()

    def _kill(self) -> dict[int, int]:
        """What is left can't go on. Exit codes."""
        ended: dict[int, int] = {}
        self._signal(signal.SIGKILL)
        while self._alive:
            ended.update(self._reap())
            time.sleep(_POLL_SECONDS)
        return ended

    def _signal(self, number: int) -> None:
        for pid in self._alive:
            os.kill(pid, number)
