"""One sandbox per cluster: a network, a mount and a process namespace held by one tiny init.

The clusters' programs write to fixed places (/run, /var/lib, /var/log, /opt); in the sandbox these are
tmpfs. When init dies the kernel ends every process of the cluster, and with them go its mounts,
interfaces and firewall rules: nothing of a cluster but files and cgroups outlives its init.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from crosscloud_lab import cgroups
from crosscloud_lab.errors import LabError
from crosscloud_lab.packages import SYSTEM_PATH
from crosscloud_lab.shell import run

HIDDEN_FOLDERS = ("/run", "/var/lib", "/var/log", "/opt")
# The cluster's state folder under a second name: the path of a socket may have 107 characters only.
SHORT_STATE = "/run/cluster"

# The kubelet insists on these values and would set them for the whole machine; it is shown files instead.
_SHOWN_SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}

# At the end the shell waits for ever, and so reaps what the daemons leave behind.
_INIT_SCRIPT = """
set -e
echo 0 > "$1/cgroup.procs"
state=$2
short=$3
shift 3
mount --make-rshared /
mount -t proc proc /proc
for folder in "$@"; do mount -t tmpfs -o mode=755 tmpfs "$folder"; done
mkdir "$short"
mount --bind "$state" "$short"
cd "$state/sysctls"
find . -type f | while read -r file; do
  if [ -e "/proc/sys/$file" ]; then mount --bind "$file" "/proc/sys/$file"; fi
done
cd /
echo ready
exec >/dev/null 2>&1
while :; do sleep infinity & wait; done
"""

_DAEMON_SCRIPT = """
echo 0 > "$1/cgroup.procs"
log=$2
shift 2
exec "$@" >>"$log" 2>&1 </dev/null
"""


@dataclass(frozen=True)
class Daemon:
    """A program that runs in a sandbox; `name` is unique in its cluster."""

    name: str
    command: tuple[str, ...]

    @property
    def program(self) -> str:
        return Path(self.command[0]).name


class Sandbox:
    """The namespaces of one cluster and the daemons in them."""

    def __init__(self, group: Path, state: Path) -> None:
        self._group = group
        self._state = state

    @property
    def logs(self) -> Path:
        return self._state / "logs"

    def init_pid(self) -> int | None:
        """Process id of init as the host sees it; None when the sandbox doesn't exist."""
        return next((pid for pid in cgroups.members(self._group / "init") if _is_init(pid)), None)

    def pid(self) -> int:
        """As `init_pid`; LabError when the sandbox doesn't exist."""
        pid = self.init_pid()
        if pid is None:
            raise LabError(f"cluster {self._group.name} is not running: run `crosscloud-lab up`")
        return pid

    def ensure(self) -> None:
        """Starts the sandbox if it isn't there."""
        if self.init_pid() is not None:
            return
        self.stop()
        group = self._group / "init"
        group.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        self._write_sysctls()
        command = ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", _INIT_SCRIPT, "init"]
        arguments = [str(group), str(self._state), SHORT_STATE, *HIDDEN_FOLDERS]
        with subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd="/",
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            answer = process.stdout.readline()
            # unshare would wait for init for ever; init goes on without it.
            process.kill()
            if answer.strip() != "ready":
                raise LabError(f"namespaces for cluster {self._group.name} failed: {process.stderr.read().strip()}")
        deadline = time.monotonic() + 10
        while self.init_pid() is None:
            if time.monotonic() > deadline:
                raise LabError(f"init of cluster {self._group.name} ended at once")
            time.sleep(0.01)

    def stop(self) -> None:
        """Ends every process of the cluster."""
        pid = self.init_pid()
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        cgroups.kill(self._group)

    def enter(self, command: Sequence[str | Path]) -> list[str]:
        """The command line that runs `command` in the sandbox."""
        return ["nsenter", f"--target={self.pid()}", "--net", "--mount", "--pid", "--", *map(str, command)]

    def run(self, command: Sequence[str | Path], stdin: str | None = None, timeout: float = 120) -> str:
        """Output of a program run in the sandbox."""
        return run(self.enter(command), stdin=stdin, timeout=timeout)

    def alive(self, daemon: Daemon) -> bool:
        return daemon.program in cgroups.programs(self._group / daemon.name).values()

    def start(self, daemon: Daemon, env: Mapping[str, str] | None = None) -> bool:
        """Starts a daemon unless it runs; True when it was started."""
        if self.alive(daemon):
            return False
        group = self._group / daemon.name
        group.mkdir(parents=True, exist_ok=True)
        log = self.log(daemon)
        command = ["setsid", "--fork", "sh", "-c", _DAEMON_SCRIPT, "daemon", str(group), str(log)]
        environment = {"PATH": SYSTEM_PATH, "HOME": "/root", "LANG": "C.UTF-8", **(env or {})}
        run(self.enter([*command, *daemon.command]), env=environment)
        deadline = time.monotonic() + 10
        while not self.alive(daemon):
            if time.monotonic() > deadline:
                raise LabError(f"{daemon.name} of {self._group.name} ended at once: {tail(log)}")
            time.sleep(0.01)
        return True

    def end(self, daemon: Daemon, grace: float = 10.0) -> None:
        """Ends a daemon's own process, politely first; what it started goes on."""
        deadline = time.monotonic() + grace
        asked: set[int] = set()
        while self.alive(daemon):
            late = time.monotonic() > deadline
            for pid, program in cgroups.programs(self._group / daemon.name).items():
                if program == daemon.program and (late or pid not in asked):
                    asked.add(pid)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            time.sleep(0.02)

    def log(self, daemon: Daemon) -> Path:
        return self.logs / f"{daemon.name}.log"

    def _write_sysctls(self) -> None:
        for name, value in _SHOWN_SYSCTLS.items():
            path = self._state / "sysctls" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")


def _is_init(pid: int) -> bool:
    """Whether a process is the first one of a process namespace inside ours."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                numbers = line.split()[1:]
                return len(numbers) > 1 and numbers[-1] == "1"
    return False


def tail(log: Path) -> str:
    """Name of a log and its last lines, for messages."""
    try:
        text = log.read_text(errors="replace")[-8000:]
    except OSError:
        text = ""
    last = "\n".join(f"    {line[:400]}" for line in text.splitlines()[-5:])
    return f"see {log}\n{last}".rstrip()
