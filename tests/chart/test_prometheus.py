"""Alerts and dashboard: a real Prometheus takes every expression, and every metric in them is one that we export."""

from __future__ import annotations

import ast
import http.server
import inspect
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crdfiles import load_yaml
from dashboard import DASHBOARD, Prometheus, QueryFailed, panel_queries, run_prometheus
from helmchart import CHART

import crosscloud_operator.metrics

RULES = CHART / "files" / "rules.yaml"
ALERTS = [rule for group in load_yaml(RULES.read_text())["groups"] for rule in group["rules"]]
QUERIES = panel_queries(namespace="ml", job="tiny-llama")

# One scrape of an operator with one job of two replicas in two members, in Prometheus' text format.
JOB, REPLICAS, MEMBERS = 'namespace="ml",job="tiny-llama"', ("0", "1"), ("east", "west")
PER_JOB = {
    'crosscloud_job_info{%s,status="Training"}': 1,
    "crosscloud_job_step{%s}": 120,
    "crosscloud_job_total_steps{%s}": 400,
    "crosscloud_job_round{%s}": 6,
    "crosscloud_job_tokens_per_second{%s}": 5000,
    "crosscloud_job_attempt{%s}": 1,
    "crosscloud_job_restarts_total{%s}": 0,
}
PER_REPLICA = {
    "crosscloud_job_loss": 2.5,
    "crosscloud_job_validation_loss": 2.6,
    "crosscloud_job_replica_tokens_per_second": 2500,
    "crosscloud_job_replica_step": 120,
    "crosscloud_job_wan_bytes_total": 3_000_000,
    "crosscloud_job_dense_bytes_total": 240_000_000,
    "crosscloud_job_waiting_seconds": 0,
    "crosscloud_job_report_age_seconds": 3,
    "crosscloud_job_skipped_steps_total": 0,
    "crosscloud_job_residual_norm": 0.5,
    "crosscloud_job_unsaved_steps": 20,
    "crosscloud_job_checkpoint_age_seconds": 90,
    "crosscloud_job_digest_mismatches_total": 0,
}
SECONDS = {"compute": 50, "exchange": 30, "waiting": 10, "bubble": 10}
PER_MEMBER = {
    "crosscloud_member_reachable{%s}": 1,
    'crosscloud_member_free_gpus{%s,pool="a",gpu="H100"}': 4,
    "crosscloud_member_credentials_expiry_seconds{%s}": "+Inf",
}


def scrape() -> str:
    lines = [f"{series % JOB} {value}" for series, value in PER_JOB.items()]
    for name, value in PER_REPLICA.items():
        lines += [f'{name}{{{JOB},replica="{replica}"}} {value}' for replica in REPLICAS]
    now = time.monotonic()
    for activity, share in SECONDS.items():
        name = "crosscloud_job_seconds_total"
        lines += [f'{name}{{{JOB},replica="{replica}",activity="{activity}"}} {now * share}' for replica in REPLICAS]
    for series, member_value in PER_MEMBER.items():
        labels = [f'member="{member}"' for member in MEMBERS]
        lines += [f"{series % label} {member_value}" for label in labels]
    return "\n".join(lines) + "\n"


class Exporter(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(scrape().encode())

    def log_message(self, *_: Any) -> None:
        """Requests are no news."""


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Prometheus]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Exporter)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with run_prometheus([f"127.0.0.1:{server.server_port}"]) as found:
            found.wait_scraped(1)
            yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bcrosscloud_\w+", expression))


def exported() -> set[str]:
    """Every text constant of the operator's metrics module; its families are named by such constants."""
    tree = ast.parse(inspect.getsource(crosscloud_operator.metrics))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_promtool_finds_no_fault_in_the_alerts() -> None:
    done = promtool("check", "rules", "--lint-fatal", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("title", "expression"), QUERIES, ids=[title for title, _ in QUERIES])
def test_every_panel_shows_something_of_a_running_job(prometheus: Prometheus, title: str, expression: str) -> None:
    deadline = threading.Event()
    for _ in range(200):  # rates need a second scrape
        samples = prometheus.query(expression)
        if samples:
            break
        deadline.wait(0.1)
    assert samples, expression
    assert all(sample["value"][1] != "NaN" for sample in samples)


def test_the_ratio_panel_divides_dense_bytes_by_those_sent(prometheus: Prometheus) -> None:
    (expression,) = [expression for title, expression in QUERIES if title == "WAN bytes against dense fp32"]
    (sample,) = prometheus.query(expression)
    assert float(sample["value"][1]) == 80.0


def test_the_shares_of_time_are_those_of_the_counters_and_add_up_to_one(prometheus: Prometheus) -> None:
    (expression,) = [expression for title, expression in QUERIES if title == "Where the time goes"]
    deadline = time.monotonic() + 30
    while not (samples := prometheus.query(expression)):  # rates need a second scrape
        assert time.monotonic() < deadline, expression
    shares = {sample["metric"]["activity"]: float(sample["value"][1]) for sample in samples}
    assert shares == pytest.approx({"compute": 0.5, "exchange": 0.3, "waiting": 0.1, "bubble": 0.1}, abs=1e-6)


def test_an_expression_with_a_fault_is_refused_with_prometheus_words(prometheus: Prometheus) -> None:
    with pytest.raises(QueryFailed, match="parse error"):
        prometheus.query("sum(crosscloud_job_step")


@pytest.mark.parametrize("expression", [rule["expr"] for rule in ALERTS] + [expression for _, expression in QUERIES])
def test_every_metric_asked_for_is_one_that_the_operator_exports(expression: str) -> None:
    names = exported()
    for metric in metrics_in(expression):
        whole = metric.removesuffix("_total")
        assert {whole, whole.removeprefix("crosscloud_"), whole.removeprefix("crosscloud_member_")} & names, metric


def test_the_dashboard_covers_what_a_job_is_judged_by() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = set().union(*(metrics_in(expression) for _, expression in QUERIES))
    assert set(PER_REPLICA) <= asked
    assert {item["name"] for item in dashboard["templating"]["list"]} == {"datasource", "namespace", "job"}
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)), "two panels overlap"
    assert all(panel["targets"] and panel["fieldConfig"]["defaults"]["unit"] for panel in dashboard["panels"])


JOB_LABELS = {"namespace": "ml", "job": "tiny-llama"}
EVER = "x40"  # repeat for 40 more minutes

# alert | series and their values, minute by minute | labels of the alert that is on after 30 minutes
FIRING: list[tuple[str, dict[str, str], dict[str, str]]] = [
    ("CrosscloudMemberUnreachable", {'crosscloud_member_reachable{member="east"}': f"0+0{EVER}"}, {"member": "east"}),
    (
        "CrosscloudMemberCredentialsExpire",
        {'crosscloud_member_credentials_expiry_seconds{member="east"}': f"7200-60{EVER}"},
        {"member": "east"},
    ),
    (
        "CrosscloudJobWaitsForRoom",
        {f"crosscloud_job_placement_waiting_seconds{{{JOB}}}": f"600+60{EVER}"},
        JOB_LABELS,
    ),
    ("CrosscloudJobRestarts", {f"crosscloud_job_restarts_total{{{JOB}}}": f"0+0.2{EVER}"}, JOB_LABELS),
    (
        "CrosscloudSyncStalled",
        {f'crosscloud_job_waiting_seconds{{{JOB},replica="1"}}': f"0+60{EVER}"},
        {**JOB_LABELS, "replica": "1"},
    ),
    (
        "CrosscloudReportsStale",
        {
            f'crosscloud_job_report_age_seconds{{{JOB},replica="1"}}': f"0+60{EVER}",
            f'crosscloud_job_info{{{JOB},status="Training"}}': f"1+0{EVER}",
        },
        {**JOB_LABELS, "replica": "1"},
    ),
    (
        "CrosscloudReconcileErrors",
        {'crosscloud_operator_reconcile_errors_total{error="Unreachable"}': f"0+60{EVER}"},
        {"error": "Unreachable"},
    ),
    ("CrosscloudOperatorDown", {"crosscloud_operator_leader": f"0+0{EVER}"}, {}),
]

# alert | series that must leave it off
QUIET: list[tuple[str, dict[str, str]]] = [
    ("CrosscloudMemberUnreachable", {'crosscloud_member_reachable{member="east"}': f"1+0{EVER}"}),
    ("CrosscloudMemberUnreachable", {'crosscloud_member_reachable{member="east"}': "1x28 0 0 1x20"}),
    (
        "CrosscloudMemberCredentialsExpire",
        {'crosscloud_member_credentials_expiry_seconds{member="east"}': "Inf " * 40},
    ),
    (
        "CrosscloudReportsStale",
        {
            f'crosscloud_job_report_age_seconds{{{JOB},replica="1"}}': f"0+60{EVER}",
            f'crosscloud_job_info{{{JOB},status="Succeeded"}}': f"1+0{EVER}",
        },
    ),
    ("CrosscloudJobRestarts", {f"crosscloud_job_restarts_total{{{JOB}}}": "0x10 1x40"}),
    ("CrosscloudOperatorDown", {"crosscloud_operator_leader": f"1+0{EVER}"}),
]


def labels_of(alert: str, found: dict[str, str]) -> dict[str, str]:
    (rule,) = [rule for rule in ALERTS if rule["alert"] == alert]
    return {**found, **rule["labels"]}


def alerts_at(folder: Path, alert: str, series: dict[str, str], expected: list[dict[str, Any]]) -> str:
    """What promtool says against exactly these alerts being on after 30 minutes; empty where it agrees."""
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [{"eval_time": "30m", "alertname": alert, "exp_alerts": expected}],
            }
        ],
    }
    path = folder / "test.yaml"
    path.write_text(json.dumps(test))
    done = promtool("test", "rules", str(path))
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize(("alert", "series", "labels"), FIRING, ids=[case[0] for case in FIRING])
def test_the_alert_goes_off(tmp_path: Path, alert: str, series: dict[str, str], labels: dict[str, str]) -> None:
    said = alerts_at(tmp_path, alert, series, [])
    assert f'alertname="{alert}"' in said, "it stays off"
    for name, value in labels_of(alert, labels).items():
        assert f'{name}="{value}"' in said


@pytest.mark.parametrize(("alert", "series"), QUIET)
def test_the_alert_stays_off(tmp_path: Path, alert: str, series: dict[str, str]) -> None:
    assert not alerts_at(tmp_path, alert, series, [])


def test_every_alert_is_tried() -> None:
    assert {case[0] for case in FIRING} == {rule["alert"] for rule in ALERTS}
