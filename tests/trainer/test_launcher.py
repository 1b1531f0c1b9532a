"""The launcher of a pod: ranks that start, end and are reaped together; addresses; documents."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from trainer.jobs import TRAINER, manifest, record, wait_for, written

from crosscloud_trainer.contract import ExitCode, dump, read_peer_table
from crosscloud_trainer.environment import ERROR_FILE, PARENT, PodEnvironment, read_attempt
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.launcher import network, ranks
from crosscloud_trainer.launcher.attempt import LocalJob, StageId, free_ports
from crosscloud_trainer.launcher.manifest import read_manifest
from crosscloud_trainer.launcher.pod import Stop

NEVER = lambda: False  # noqa: E731 - a constant function


def nothing() -> None:
    return


def group(tmp_path: Path, *programs: str) -> tuple[ranks.RankGroup, io.StringIO]:
    """Ranks that run these Python programs."""
    out = io.StringIO()
    environments = ranks.rank_environments(0, len(programs), len(programs), 0, ("127.0.0.1", 1), os.environ)
    for number, item in enumerate(environments):
        item[ERROR_FILE] = str(tmp_path / f"error-{number}")
        item["PROGRAM"] = programs[number]
    command = [sys.executable, "-c", "import os; exec(os.environ['PROGRAM'])"]
    return ranks.RankGroup(command, environments, out), out


SLEEP = "import time; time.sleep(600)"


def test_ranks_have_the_environment_of_torchrun() -> None:
    made = ranks.rank_environments(4, 2, 8, 2, ("10.0.0.7", 29400), {"OMP_NUM_THREADS": "3", "KEEP": "me"})
    assert [item["RANK"] for item in made] == ["4", "5"]
    assert [item["LOCAL_RANK"] for item in made] == ["0", "1"]
    for item in made:
        assert item["WORLD_SIZE"] == "8"
        assert item["LOCAL_WORLD_SIZE"] == "2"
        assert item["GROUP_RANK"] == "2"
        assert (item["MASTER_ADDR"], item["MASTER_PORT"]) == ("10.0.0.7", "29400")
        assert (item["OMP_NUM_THREADS"], item["KEEP"]) == ("3", "me")


def test_cores_are_shared_by_the_ranks_of_a_host_and_none_gets_less_than_one() -> None:
    assert ranks.rank_environments(0, 1, 1, 0, ("h", 1), {})[0]["OMP_NUM_THREADS"] == str(ranks.usable_cores())
    assert ranks.rank_environments(0, 1000, 1000, 0, ("h", 1), {})[0]["OMP_NUM_THREADS"] == "1"


def test_lines_of_ranks_carry_their_number(tmp_path: Path) -> None:
    running, out = group(tmp_path, "print('one')", "import sys; print('two', file=sys.stderr)")
    assert running.wait(NEVER, nothing).code == 0
    assert sorted(out.getvalue().splitlines()) == ["[rank 0] one", "[rank 1] two"]


def test_a_rank_without_room_for_its_message_says_it_in_its_last_line(tmp_path: Path) -> None:
    leave = "from crosscloud_trainer.environment import leave_message as leave; import os"
    full = f"{leave}; leave({{'{ERROR_FILE}': '/dev/full'}}, 'why'); os._exit(3)"
    running, _ = group(tmp_path, full)
    assert running.wait(NEVER, nothing).message == "rank 0 ended with exit code 3; its last line: error: why"


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    running, out = group(tmp_path, "print('x' * 200_000)")
    assert running.wait(NEVER, nothing).code == 0
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) < 100_000
    assert "".join(line.removeprefix("[rank 0] ") for line in lines) == "x" * 200_000


def test_a_rank_goes_on_where_its_lines_can_not_be_written(tmp_path: Path) -> None:
    done = tmp_path / "done"
    environment = ranks.rank_environments(0, 1, 1, 0, ("127.0.0.1", 1), os.environ)[0]
    environment[ERROR_FILE] = str(tmp_path / "error")
    program = f"for n in range(3000): print('x' * 100, flush=True)\nopen({str(done)!r}, 'w').close()"
    with suppress(OSError), Path("/dev/full").open("w") as full:  # closing it says once more that it is full
        running = ranks.RankGroup([sys.executable, "-c", program], [environment], full)
        assert running.wait(NEVER, nothing).code == 0
    assert done.exists()


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("raise SystemExit(73)", 73, "rank 1 ended with exit code 73"),
        (
            "import nowhere",
            1,
            "rank 1 ended with exit code 1; its last line: ModuleNotFoundError: No module named 'nowhere'",
        ),
        ("import os; os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 11)", 139, "rank 1 was killed by SIGSEGV"),
    ],
)
def test_the_first_failing_rank_gives_code_and_message_and_the_others_go_with_it(
    tmp_path: Path, program: str, code: int, words: str
) -> None:
    others = psutil.Process().children()  # servers of other tests
    running, _ = group(tmp_path, SLEEP, program, SLEEP)
    end = running.wait(NEVER, nothing)
    assert (end.code, end.rank) == (code, 1)
    assert end.message == words
    assert psutil.Process().children() == others  # reaped: no zombie either


def test_a_rank_that_lost_a_peer_is_not_the_cause_where_the_peer_explains_itself(tmp_path: Path) -> None:
    leave = "from crosscloud_trainer.environment import leave_message; import os, time, sys;"
    running, _ = group(
        tmp_path,
        f"{leave} leave_message(os.environ, 'a rank has gone'); sys.exit(71)",
        f"{leave} time.sleep(0.5); leave_message(os.environ, 'never finite'); sys.exit(73)",
    )
    end = running.wait(NEVER, nothing)
    assert (end.code, end.message, end.rank) == (73, "rank 1: never finite", 1)


UNFINISHED = "from crosscloud_trainer.environment import *; import os, time; begin_training(os.environ);"


def test_a_rank_that_ends_well_before_its_training_has_is_a_failure_once_others_go_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_EARLY_SECONDS", 0.5)
    running, _ = group(tmp_path, SLEEP, UNFINISHED)
    end = running.wait(NEVER, nothing)
    assert (end.code, end.message, end.rank) == (1, "rank 1 ended with exit code 0 before its training had ended", 1)


def test_it_is_the_cause_where_others_only_lost_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_EXPLAIN_SECONDS", 0.5)
    running, _ = group(tmp_path, "raise SystemExit(71)", UNFINISHED, SLEEP)
    assert running.wait(NEVER, nothing).rank == 1


def test_ranks_may_end_at_unlike_times_once_their_training_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_EARLY_SECONDS", 0.2)
    done = f"{UNFINISHED} end_training(os.environ);"
    running, _ = group(tmp_path, f"{done} time.sleep(1)", done, "import time; time.sleep(1)")
    assert running.wait(NEVER, nothing).code == 0


def test_ranks_that_all_end_without_training_have_had_nothing_to_do(tmp_path: Path) -> None:
    running, _ = group(tmp_path, UNFINISHED, UNFINISHED)
    assert running.wait(NEVER, nothing).code == 0


def test_sigterm_is_passed_on_and_its_code_is_that_of_termination(tmp_path: Path) -> None:
    others = psutil.Process().children()
    mark = tmp_path / "ready"
    polite = "import signal, sys, time, pathlib; signal.signal(15, lambda *_: sys.exit(5));"
    running, _ = group(tmp_path, f"{polite} pathlib.Path({str(mark)!r}).touch(); {SLEEP}")
    end = running.wait(mark.exists, nothing)
    assert end.code == ExitCode.TERMINATED
    assert psutil.Process().children() == others


def test_orphans_that_come_to_the_launcher_are_reaped(tmp_path: Path) -> None:
    """As PID 1 of a container it inherits them; here it is made a subreaper."""
    script = f"""
import ctypes, io, os, sys
from pathlib import Path
from crosscloud_trainer.launcher import ranks
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
child = "import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', 'pass'])"
env = ranks.rank_environments(0, 1, 1, 0, ("h", 1), os.environ)
env[0]["CROSSCLOUD_ERROR_FILE"] = {str(tmp_path / "e")!r}
group = ranks.RankGroup([sys.executable, "-c", child + "; import time; time.sleep(1.5)"], env, io.StringIO())
code = group.wait(lambda: False, lambda: None).code
import psutil
print(code, len(psutil.Process().children()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0"]


# Addresses


def test_one_name_that_never_resolves_ends_at_the_start_deadline_as_peers_missing() -> None:
    with pytest.raises(Failure) as caught:
        network.wait_for_address("no-such-pod.invalid", time.monotonic() + 0.5, NEVER)
    assert caught.value.code == ExitCode.PEERS_MISSING
    assert "no-such-pod.invalid" in str(caught.value)


def test_the_users_interface_is_taken_if_it_exists_and_named_if_not() -> None:
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    for name in others[:1]:
        assert network.interface_for("127.0.0.1", {"GLOO_SOCKET_IFNAME": name}) == name
    for wrong in ("^lo,docker", "eth999", "", "lo"):
        with pytest.raises(Failure) as caught:
            network.interface_for("127.0.0.1", {"GLOO_SOCKET_IFNAME": wrong})
        assert caught.value.code == ExitCode.INVALID_INPUT
        told, _, allowed = str(caught.value).partition("; must be one interface that leads to other hosts: ")
        assert told == f"GLOO_SOCKET_IFNAME: found {json.dumps(wrong)}"
        assert "lo" not in allowed.partition(";")[0].split(", ")


def test_loopback_is_never_chosen_for_a_world_of_several_hosts() -> None:
    gateways = [line.split()[1] for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    if "00000000" in gateways:  # there is a default route, and its interface is taken
        assert network.interface_for("127.0.1.1", {}) != "lo"
    else:
        with pytest.raises(Failure, match="set it to one of"):
            network.interface_for("127.0.1.1", {})


def test_port_blocks_are_disjoint_and_can_be_bound() -> None:
    blocks = free_ports([3, 1, 5])
    ports = [port for block in blocks for port in block]
    assert [len(block) for block in blocks] == [3, 1, 5]
    assert len(set(ports)) == 9
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


# Documents of a pod


@pytest.fixture
def pod(tmp_path: Path) -> dict[str, str]:
    """The environment of replica 1 of a job that the local launcher prepared and then didn't let run."""
    document = manifest(replicas=3, replica={"gpusPerStage": 2})
    found = read_manifest(written(tmp_path, document))
    job = LocalJob(found, record(tmp_path), tmp_path, tmp_path / "logs", str(tmp_path / "out"))
    with ExitStack() as held:
        for item in job.start(1, held):
            item.end(signal.SIGKILL)
            item.wait(60)
    return job._environment(tmp_path / "attempt-1", StageId(1, 0, 1), range(20000, 20003))


def test_the_master_is_the_pod_with_rank_0_whatever_order_the_peer_table_has(pod: dict[str, str]) -> None:
    path = Path(pod["CROSSCLOUD_PEERS"])
    table = read_peer_table(path.read_bytes())
    names = [replace(peer, direct=f"host-{peer.replica}") for peer in table.peers]
    for seed in range(6):
        random.Random(seed).shuffle(names)
        path.write_text(json.dumps(dump(replace(table, peers=tuple(names)))))
        attempt = read_attempt(PodEnvironment.read(pod))
        assert (attempt.master.replica, attempt.master.stage, attempt.master.node) == (1, 0, 0)
        assert attempt.master.direct == "host-1"


def test_the_environment_of_a_pod_tells_all_that_is_wrong_at_once() -> None:
    with pytest.raises(Failure) as caught:
        PodEnvironment.read({"CROSSCLOUD_REPLICA": "-1", "CROSSCLOUD_STAGE": "0", "CROSSCLOUD_REPORT": "http://x"})
    told = str(caught.value)
    with pytest.raises(Failure, match=r"CROSSCLOUD_NODE: found .9999"):
        PodEnvironment.read({"CROSSCLOUD_NODE": "9" * 5000})
    assert 'CROSSCLOUD_REPLICA: found "-1"; must be a whole number' in told
    assert 'CROSSCLOUD_NODE: found ""' in told
    assert 'CROSSCLOUD_INCARNATION: found ""' in told
    assert 'CROSSCLOUD_REPORT: found "http://x"; must be configmap:NAMESPACE/NAME or file:PATH' in told


def edit(name: str, change: Callable[[dict[str, object]], object]) -> Callable[[dict[str, str]], None]:
    def apply(env: dict[str, str]) -> None:
        path = Path(env[name])
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return apply


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (lambda env: env.update(CROSSCLOUD_REPLICA="7"), 64, "the run document has no such stage"),
        (
            lambda env: env.update(CROSSCLOUD_NODE="1"),
            64,
            "CROSSCLOUD_NODE: found 1; must be below the stage's nodes, 1",
        ),
        (lambda env: env.update(CROSSCLOUD_INCARNATION="2"), 64, "CROSSCLOUD_INCARNATION: found 2"),
        (lambda env: env.update(CROSSCLOUD_RUN="/none.json"), 64, 'CROSSCLOUD_RUN: found "/none.json"; must be a file'),
        (lambda env: env.update(CROSSCLOUD_TLS="/none"), 64, "CROSSCLOUD_TLS"),
        (edit("CROSSCLOUD_PEERS", lambda d: d["peers"].pop()), 64, "is missing in the peer table"),  # type: ignore[attr-defined]
        (edit("CROSSCLOUD_PEERS", lambda d: d.update(attempt=9)), 64, "peers: attempt: found 9; must be the run's, 1"),
        (
            edit("CROSSCLOUD_RUN", lambda d: d.update(apiVersion="run.crosscloud.dev/v9")),
            65,
            "use a newer trainer image",
        ),
        (edit("CROSSCLOUD_RUN", lambda d: d.update(attempt=0, more=1)), 64, "run.json: more: found 1; unknown field"),
        (edit("CROSSCLOUD_RUN", lambda d: d.update(storageUri="/proc/nothing")), 66, "storage.uri: found"),
        (edit("CROSSCLOUD_RUN", lambda d: d.update(storageUri="foo://x")), 64, "no file system serves this address"),
    ],
)
def test_a_pod_that_cannot_run_says_why_in_one_message_its_exit_code_and_its_report(
    pod: dict[str, str], spoil: Callable[[dict[str, str]], None], code: int, words: str
) -> None:
    Path(pod["CROSSCLOUD_TERMINATION_LOG"]).unlink(missing_ok=True)
    spoil(pod)
    done = subprocess.run([*TRAINER, "pod"], env={**pod, PARENT: str(os.getpid())}, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout
    assert words in Path(pod["CROSSCLOUD_TERMINATION_LOG"]).read_text()
    assert "Traceback" not in done.stdout + done.stderr


def test_a_pod_whose_data_is_missing_tells_the_field_in_its_completion(pod: dict[str, str]) -> None:
    edit("CROSSCLOUD_RUN", lambda d: d["training"]["data"].update(train=["/none/*.txt"]))(pod)  # type: ignore[index]
    done = subprocess.run([*TRAINER, "pod"], env={**pod, PARENT: str(os.getpid())}, capture_output=True, text=True)
    report = json.loads(Path(pod["CROSSCLOUD_REPORT"].removeprefix("file:")).read_text())
    assert done.returncode == ExitCode.INVALID_INPUT
    assert report["activity"] == "Ended"
    assert report["completion"]["outcome"] == "Failed"
    assert report["completion"]["exitCode"] == 64
    assert report["completion"]["message"].startswith("training.data.train[0]: found")


def test_sigterm_ends_a_pod_that_still_waits_for_its_peers(pod: dict[str, str]) -> None:
    env = {**pod, PARENT: str(os.getpid())}
    process = subprocess.Popen([*TRAINER, "pod"], env=env, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: psutil.Process(process.pid).children(), "the ranks")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    report = json.loads(Path(pod["CROSSCLOUD_REPORT"].removeprefix("file:")).read_text())
    assert process.returncode == ExitCode.TERMINATED
    assert report["completion"]["exitCode"] == 143


def test_sigterm_ends_at_once_what_a_pod_does_before_it_has_ranks() -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop = Stop()
        stop.install()
        for _ in range(2):  # the second time the signal has come already
            with pytest.raises(Failure) as caught, stop.at_once():
                signal.raise_signal(signal.SIGTERM)
            assert caught.value.code == ExitCode.TERMINATED
        assert stop()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_pod_without_room_for_its_files_names_the_folder(pod: dict[str, str], tmp_path: Path) -> None:
    edit("CROSSCLOUD_RUN", lambda d: d["training"]["data"].update(train=[str(tmp_path / "text")]))(pod)  # type: ignore[index]
    (tmp_path / "text").write_bytes(bytes(2**20))
    command = [
        "bash",
        "-c",
        'ulimit -f 1024; exec "$@"',
        "-",
        *TRAINER,
        "pod",
    ]  # no file above 1 MiB: the tokens take 2
    done = subprocess.run(command, env={**pod, PARENT: str(os.getpid())}, capture_output=True, text=True)
    report = json.loads(Path(pod["CROSSCLOUD_REPORT"].removeprefix("file:")).read_text())
    assert done.returncode == 1
    assert report["completion"]["message"].endswith(": File too large")
    assert "Traceback" not in done.stdout + done.stderr


def test_a_local_run_that_can_not_write_its_logs_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    command = [*TRAINER, "local", str(written(tmp_path, manifest())), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path / 'logs' / 'attempt-1'}: Not a directory\n"
