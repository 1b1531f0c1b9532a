"""What the trainers export to Prometheus, read as `kubectl get --raw` would: fresh, where a status is seconds old."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from crosscloud_lab.errors import LabError
from crosscloud_lab.lab import Lab

PORT = 9400
_LINE = re.compile(r"^crosscloud_trainer_(\w+?)(?:_total)?\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Progress:
    """How far a job is; sums or means over its replicas, the least of their steps and rounds."""

    step: int
    round: int
    tokens: int
    dense_bytes: int
    loss: float | None
    validation_loss: float | None


class Trainers:
    """Reads the metrics of a job's replicas, each from the pod that holds its rank 0."""

    def __init__(self, lab: Lab, namespace: str, name: str) -> None:
        self._lab, self._namespace, self._name = lab, namespace, name
        self._pods: dict[tuple[int, int], str] = {}

    def read(self, status: dict[str, Any]) -> Progress | None:
        """None unless every replica answers: before they have started, and after they have ended."""
        attempt = int((status.get("attempt") or {}).get("number") or 0)
        firsts = [stage for stage in status.get("plan") or [] if stage["stage"] == 0]
        places = {stage["replica"]: stage["member"] for stage in firsts}
        try:
            found = [parse(self._metrics(attempt, *place)) for place in sorted(places.items())]
        except LabError:
            return None
        return combine(found)

    def _metrics(self, attempt: int, replica: int, member: str) -> str:
        api = self._lab.cluster(member).api()
        pods = f"/api/v1/namespaces/{self._namespace}/pods"
        if (attempt, replica) not in self._pods:
            wanted = {"job": self._name, "attempt": attempt, "replica": replica, "stage": 0, "node": 0}
            selector = ",".join(f"crosscloud.dev/{key}={value}" for key, value in wanted.items())
            items = api.json("GET", f"{pods}?{urlencode({'labelSelector': selector})}")["items"]
            if not items:
                raise LabError(f"replica {replica} has no pod in {member} yet")
            self._pods[attempt, replica] = items[0]["metadata"]["name"]
        return api.text("GET", f"{pods}/{self._pods[attempt, replica]}:{PORT}/proxy/metrics")


def parse(text: str) -> dict[str, float]:
    """Values by name, without prefix and suffix."""
    return {name: float(value) for name, value in _LINE.findall(text)}


def combine(replicas: list[dict[str, float]]) -> Progress | None:
    """The progress of the whole job; None where a replica hasn't told its step."""
    if not replicas or not all("step" in values for values in replicas):
        return None
    return Progress(
        step=int(min(values["step"] for values in replicas)),
        round=int(min(values.get("round", 0) for values in replicas)),
        tokens=int(sum(values.get("tokens", 0) for values in replicas)),
        dense_bytes=int(sum(values.get("dense_bytes", 0) for values in replicas)),
        loss=_mean(replicas, "loss"),
        validation_loss=_mean(replicas, "validation_loss"),
    )


def of_status(status: dict[str, Any]) -> Progress:
    """The same, as the job's status tells it."""
    told = status.get("progress") or {}
    numbers = (int(told.get(key) or 0) for key in ("step", "round", "tokens", "denseBytes"))
    losses = (float(told[key]) if told.get(key) else None for key in ("loss", "validationLoss"))
    return Progress(*numbers, *losses)


def _mean(replicas: list[dict[str, float]], name: str) -> float | None:
    known = [values[name] for values in replicas if name in values]
    return sum(known) / len(known) if len(known) == len(replicas) else None
