"""A real S3 server on loopback: the lab's versitygw over a folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from crosscloud_lab.binaries import Binaries
from crosscloud_lab.paths import cache_dir
from crosscloud_lab.progress import SilentProgress
from crosscloud_trainer.launcher.attempt import free_ports

KEY, SECRET = "tester", "a-secret-of-the-test"


@dataclass(frozen=True)
class S3Server:
    """`folder` holds a folder for each bucket; `environment` is what the trainer is given."""

    endpoint: str
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def bucket(self, name: str) -> str:
        """The address of a new bucket."""
        (self.folder / name).mkdir()
        return f"s3://{name}"

    def path_of(self, address: str) -> Path:
        """Where an object lies in the folder that is served."""
        return self.folder / address.removeprefix("s3://")

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Within, it takes connections and requests, and answers none."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextmanager
def s3_server(folder: Path, port: int | None = None, secret: str = SECRET) -> Iterator[S3Server]:
    """One that takes this secret only. `port` is that of an earlier one over the same folder."""
    binaries = Binaries(cache_dir())
    binaries.ensure(SilentProgress())
    port = port or free_ports([1])[0][0]
    data = folder / "buckets"
    data.mkdir(exist_ok=True)
    command = [str(binaries.path("versitygw")), "--port", f"127.0.0.1:{port}", "--quiet"]
    command += ["posix", str(data)]
    env = {**os.environ, "ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": secret}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not _answers(port):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "the S3 server doesn't answer"
            time.sleep(0.05)
        yield S3Server(f"http://127.0.0.1:{port}", data, process)
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
