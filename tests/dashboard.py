"""What a Grafana dashboard asks Prometheus, and a real Prometheus to ask."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apiserver import free_port

DASHBOARD = Path(__file__).resolve().parents[1] / "charts" / "crosscloud" / "files" / "dashboard.json"
START_SECONDS = 60.0
BUILT_IN = {"__rate_interval": "1m", "__interval": "15s", "__range": "1h"}


class QueryFailed(Exception):
    """Prometheus doesn't take the expression; the text is its own."""


def panel_queries(**variables: str) -> list[tuple[str, str]]:
    """(panel's title, expression) of every query of the dashboard, its variables (`namespace`, `job`) replaced."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            found.append((panel["title"], filled(target["expr"], variables)))
    return found


def filled(expression: str, variables: Mapping[str, str]) -> str:
    """The expression as Grafana sends it."""
    for name, value in sorted({**BUILT_IN, **variables}.items(), key=lambda item: -len(item[0])):
        expression = expression.replace(f"${{{name}}}", value).replace(f"${name}", value)
    return expression


@dataclass
class Prometheus:
    """A running Prometheus."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query: [{"metric": {...}, "value": [time, text]}]. Raises QueryFailed."""
        answer = self.get("/api/v1/query", query=expression)
        return list(answer["result"])

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of the HTTP API. Raises QueryFailed."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as fault:
            raise QueryFailed(json.load(fault).get("error", str(fault))) from fault

    def wait_scraped(self, targets: int) -> None:
        """Wait until so many targets are up. Raises AssertionError with what Prometheus says of them."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            active = self.get("/api/v1/targets")["activeTargets"]
            if sum(target["health"] == "up" for target in active) >= targets:
                return
            assert time.monotonic() < deadline, [(target["scrapeUrl"], target["lastError"]) for target in active]
            time.sleep(0.1)


@contextlib.contextmanager
def run_prometheus(targets: Sequence[str]) -> Iterator[Prometheus]:
    """A real Prometheus (Debian's package) that scrapes /metrics of the `targets` (host:port)."""
    program = shutil.which("prometheus")
    assert program, "prometheus is not installed: apt-get install prometheus"
    folder = Path(tempfile.mkdtemp(prefix="crosscloud-prometheus-"))
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        # Labels of the series stay: they speak of jobs, not of the process that was scraped.
        "scrape_configs": [
            {"job_name": "crosscloud", "honor_labels": True, "static_configs": [{"targets": list(targets)}]}
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    log = folder / "log"
    with log.open("wb") as output:
        environment = {**os.environ, "GOMAXPROCS": "1"}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            yield _ready(Prometheus(f"http://127.0.0.1:{port}"), process, log)
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)


def _ready(prometheus: Prometheus, process: subprocess.Popen[bytes], log: Path) -> Prometheus:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{prometheus.url}/-/ready", timeout=5):
                return prometheus
        except OSError:
            running = process.poll() is None and time.monotonic() < deadline
            assert running, f"prometheus didn't start: {log.read_text()[-2000:]}"
            time.sleep(0.1)
