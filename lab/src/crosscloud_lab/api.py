"""A minimal client of a cluster's API server, for what the lab itself asks: standard library only."""

from __future__ import annotations

import http.client
import json
import ssl
from datetime import datetime
from pathlib import Path
from typing import Any

from crosscloud_lab.errors import LabError
from crosscloud_lab.plan import ClusterPlan

_SECONDS = 10.0


class ApiUnavailable(LabError):
    """The API server doesn't answer."""


class ApiRefused(LabError):
    """The API server answered with an error; `code` is the HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(message)


class Api:
    """Requests as the cluster's administrator, each on a connection of its own."""

    def __init__(self, cluster: ClusterPlan, pki: Path) -> None:
        self._address = str(cluster.api_address)
        self._name = cluster.name
        self._context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._context.load_cert_chain(str(pki / "admin.crt"), str(pki / "admin.key"))

    def text(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> str:
        """The answer's body. Raises ApiUnavailable, ApiRefused."""
        connection = http.client.HTTPSConnection(self._address, 6443, timeout=_SECONDS, context=self._context)
        payload = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, payload, {"Content-Type": content_type, "Accept": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise ApiUnavailable(
                f"API server of {self._name} at {self._address}:6443 doesn't answer: {error}"
            ) from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise ApiRefused(answer.status, f"{method} {path} in {self._name}: {answer.status} {text[:500]}")
        return text

    def json(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        return json.loads(self.text(method, path, body, content_type))

    def ready(self) -> bool:
        """Whether /readyz says ok."""
        try:
            return self.text("GET", "/readyz").strip() == "ok"
        except LabError:
            return False

    def create(self, path: str, body: Any) -> None:
        """Creates an object unless it is there."""
        try:
            self.text("POST", path, body)
        except ApiRefused as refused:
            if refused.code != 409:
                raise

    def nodes(self) -> dict[str, Any]:
        """Node objects by name."""
        return {item["metadata"]["name"]: item for item in self.json("GET", "/api/v1/nodes")["items"]}


def node_ready(node: Any, since: datetime | None = None) -> bool:
    """Whether the node's kubelet says that it is ready, and has said so after `since`."""
    for condition in node.get("status", {}).get("conditions", []):
        if condition["type"] == "Ready" and condition["status"] == "True":
            said = datetime.fromisoformat(condition["lastHeartbeatTime"])
            return since is None or said >= since.replace(microsecond=0)
    return False
