"""ConfigMaps of one API server over plain HTTPS: what a pod needs to write its report and to keep the view.

Standard library only and blocking: callers use it from threads that may wait. The token is read again for each request,
since the kubelet renews it.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_BYTES = 4 * 2**20  # of an answer; an object has 1 MiB at most
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class KubeError(OSError):
    """A request that failed: no answer, or an answer that refuses (`status`; None without an answer)."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class KubeConflict(KubeError):
    """The object has changed since it was read."""


@dataclass(frozen=True)
class ConfigMap:
    data: Mapping[str, str]
    resource_version: str


class ConfigMapClient:
    """Reads and changes ConfigMaps. `seconds` bounds each step of a request, and the whole of its answer's body."""

    def __init__(self, host: str, port: int, token: Path, ca: Path, seconds: float = 10.0) -> None:
        self._host = host.strip("[]")
        self._port = port
        self._token = token
        self._ca = ca
        self._seconds = seconds

    @staticmethod
    def in_cluster(credentials: Path, environ: Mapping[str, str]) -> ConfigMapClient:
        """The API server of the cluster that this pod runs in. `credentials` is the folder with token and ca.crt.

        Raises KubeError outside of a cluster.
        """
        host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not port.isdecimal():
            found = f"KUBERNETES_SERVICE_HOST is {host!r}, KUBERNETES_SERVICE_PORT {port!r}"
            raise KubeError(f"{found}; both are set in a pod, and ConfigMaps can be written from there only")
        return ConfigMapClient(host, int(port), credentials / "token", credentials / "ca.crt")

    def get(self, namespace: str, name: str) -> ConfigMap:
        """Raises KubeError."""
        return self._request("GET", namespace, name, None)

    def patch(
        self, namespace: str, name: str, data: Mapping[str, str], resource_version: str | None = None
    ) -> ConfigMap:
        """Sets these keys and leaves others as they are. Raises KubeError; KubeConflict where the object has another
        `resource_version` than the one given.
        """
        body: dict[str, Any] = {"data": dict(data)}
        if resource_version is not None:
            body["metadata"] = {"resourceVersion": resource_version}
        return self._request("PATCH", namespace, name, json.dumps(body))

    def _request(self, method: str, namespace: str, name: str, body: str | None) -> ConfigMap:
        if not _NAME.fullmatch(namespace) or not _NAME.fullmatch(name):
            raise KubeError(f"{namespace}/{name} is not the name of a ConfigMap")
        deadline = time.monotonic() + self._seconds
        where = f"{method} ConfigMap {namespace}/{name} at {self._host}:{self._port}"
        try:
            context = ssl.create_default_context(cafile=str(self._ca))
            headers = {"Authorization": f"Bearer {self._token.read_text().strip()}", "Accept": "application/json"}
            if body is not None:
                headers["Content-Type"] = "application/merge-patch+json"
            connection = http.client.HTTPSConnection(self._host, self._port, context=context, timeout=self._seconds)
            try:
                connection.request(method, f"/api/v1/namespaces/{namespace}/configmaps/{name}", body, headers)
                response = connection.getresponse()
                text = _read(connection, response, deadline)
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as fault:
            raise KubeError(f"{where}: {fault or type(fault).__name__}") from fault
        return _config_map(where, response.status, text)


def _read(connection: http.client.HTTPSConnection, response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The whole body; a server that drips must not hold us beyond the deadline."""
    parts: list[bytes] = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no whole answer in time")
        if connection.sock is not None:
            connection.sock.settimeout(left)
        part = response.read1(65536)
        if not part:
            return b"".join(parts)
        parts.append(part)
        if sum(map(len, parts)) > _MAX_BYTES:
            raise ValueError(f"the answer has more than {_MAX_BYTES} bytes")


def _config_map(where: str, status: int, text: bytes) -> ConfigMap:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = {}
    if not isinstance(answer, dict):
        answer = {}
    if status == http.client.CONFLICT:
        raise KubeConflict(f"{where}: {answer.get('message', 'conflict')}", status)
    if status != http.client.OK:
        raise KubeError(f"{where}: {status} {answer.get('message', text[:200].decode(errors='replace'))}", status)
    version = (answer.get("metadata") or {}).get("resourceVersion")
    if answer.get("kind") != "ConfigMap" or not isinstance(version, str):
        raise KubeError(f"{where}: the answer is no ConfigMap", status)
    return ConfigMap(answer.get("data") or {}, version)
