"""`crosscloud-operator` as a process of its own, for tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from apiserver import free_port
from prometheus_client.parser import text_string_to_metric_families

NAMESPACE = "crosscloud-system"


@dataclass
class Operator:
    """A running `crosscloud-operator`."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def get(self, path: str) -> tuple[int, str]:
        """Status and text; 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as fault:
            with fault:
                return fault.code, fault.read().decode()
        except OSError:
            return 0, ""

    @property
    def ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def metric(self, name: str, **labels: str) -> float | None:
        """The value of the first series of that name with these labels; None where there is none."""
        return next(self._values(name, labels), None)

    def total(self, name: str) -> float:
        """The sum over all series of that name."""
        return sum(self._values(name, {}))

    def _values(self, name: str, labels: Mapping[str, str]) -> Iterator[float]:
        for family in text_string_to_metric_families(self.get("/metrics")[1]):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    yield float(sample.value)


@contextlib.contextmanager
def operator_process(kubeconfig: Path, folder: Path, name: str, **settings: str) -> Iterator[Operator]:
    """Start it against the hub of a kubeconfig; it is killed at the end of the block."""
    port, log = free_port(), folder / f"{name}.log"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CROSSCLOUD_")}
    environment |= {
        "KUBECONFIG": str(kubeconfig),
        "CROSSCLOUD_NAMESPACE": NAMESPACE,
        "CROSSCLOUD_POD": name,
        "CROSSCLOUD_HTTP_HOST": "127.0.0.1",
        "CROSSCLOUD_HTTP_PORT": str(port),
        "CROSSCLOUD_LEASE_SECONDS": "4",
        "CROSSCLOUD_TRAINER_IMAGE": "example/trainer:1",
        "CROSSCLOUD_GATEWAY_IMAGE": "example/gateway:1",
        **settings,
    }
    with log.open("ab") as stream:
        command = [sys.executable, "-m", "crosscloud_operator"]
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
    try:
        yield Operator(process, port, log)
    finally:
        process.kill()
        process.wait()
