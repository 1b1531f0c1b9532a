"""The operator's settings, from the environment alone, every fault at once."""

from __future__ import annotations

import dataclasses
import re
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosscloud_operator.domain.settings import JobSettings

PREFIX = "CROSSCLOUD_"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
PULL_POLICIES = ("Always", "IfNotPresent", "Never")

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_IMAGE = re.compile(r"\S+")


class InvalidSettings(ValueError):
    """`problems` has one line per variable: its name, the value found, what is allowed."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


@dataclass(frozen=True)
class Settings:
    """Times are in seconds. `jobs` lacks the hub's id where it isn't set: `for_hub` completes it.

    A kubeconfig is used outside a cluster only; inside, the pod's service account is.
    """

    namespace: str  # the operator's own: member kubeconfigs, the Lease
    identity: str  # who holds the Lease; differs between processes
    jobs: JobSettings
    kubeconfig: str | None = None
    http_host: str = "0.0.0.0"  # noqa: S104 - probes and scrapes come from outside the pod
    http_port: int = 8080
    log_level: str = "INFO"
    lease_name: str = "crosscloud-operator"
    lease_seconds: float = 15.0  # a dead operator's successor waits so long
    token_seconds: int = 86_400  # life asked for a member's token; it is renewed at half of what was given

    def for_hub(self, hub: str) -> JobSettings:
        """What reconcile needs, with the id of the hub that was found."""
        return dataclasses.replace(self.jobs, hub=self.jobs.hub or hub)


class _Reader:
    """Takes values from an environment and collects the faults."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.problems: list[str] = []

    def text(self, name: str, default: str, pattern: re.Pattern[str] | None, allowed: str) -> str:
        value = self._environ.get(PREFIX + name, "").strip() or default
        if pattern is not None and not pattern.fullmatch(value):
            self._fault(name, value, allowed)
        return value

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        value = self._environ.get(PREFIX + name, "").strip() or default
        if value not in choices:
            self._fault(name, value, f"one of {', '.join(choices)}")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        text = self._environ.get(PREFIX + name, "").strip()
        if not text:
            return default
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            self._fault(name, text, f"a number from {least:g} to {most:g}")
            return default
        return value

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        value = self.number(name, default, least, most)
        if value != int(value):
            self._fault(name, f"{value:g}", f"a whole number from {least} to {most}")
        return int(value)

    def _fault(self, name: str, value: str, allowed: str) -> None:
        self.problems.append(f"{PREFIX}{name}: found {value!r}; must be {allowed}")


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Raises InvalidSettings with every fault."""
    reader = _Reader(environ)
    namespace = reader.text("NAMESPACE", "crosscloud-system", _NAME, "a namespace's name")
    pod = reader.text("POD", socket.gethostname() or "operator", None, "")
    settings = Settings(
        namespace=namespace,
        identity=f"{pod}_{uuid.uuid4().hex[:12]}",
        jobs=_job_settings(reader, namespace),
        kubeconfig=environ.get("KUBECONFIG") or None,
        http_host=reader.text("HTTP_HOST", Settings.http_host, re.compile(r"[0-9A-Fa-f:.]+"), "an IP address"),
        http_port=reader.integer("HTTP_PORT", Settings.http_port, 0, 65_535),
        log_level=reader.choice("LOG_LEVEL", Settings.log_level, LOG_LEVELS),
        lease_seconds=reader.number("LEASE_SECONDS", Settings.lease_seconds, 3, 300),
        token_seconds=reader.integer("TOKEN_SECONDS", Settings.token_seconds, 600, 365 * 86_400),
    )
    if reader.problems:
        raise InvalidSettings(reader.problems)
    return settings


def _job_settings(reader: _Reader, namespace: str) -> JobSettings:
    values: dict[str, Any] = {"operator_namespace": namespace}
    hub = reader.text("HUB_ID", "", None, "")
    if hub and not _LABEL_VALUE.fullmatch(hub):
        reader.problems.append(f"{PREFIX}HUB_ID: found {hub!r}; must be a label's value (63 characters at most)")
    values["hub"] = hub
    for name in ("trainer", "gateway"):
        values[f"{name}_image"] = reader.text(f"{name.upper()}_IMAGE", "", _IMAGE, "an image, as in a pod")
        policy = f"{name}_pull_policy"
        values[policy] = reader.choice(policy.upper(), getattr(JobSettings, policy), PULL_POLICIES)
    # The rest is taken as the dataclass has it: numbers are times or a port, texts are names.
    for field in dataclasses.fields(JobSettings):
        if field.name in values:
            continue
        default = field.default
        if isinstance(default, int):
            values[field.name] = reader.integer(field.name.upper(), default, 1, 65_535)
        elif isinstance(default, float):
            values[field.name] = reader.number(field.name.upper(), default, 0.1, 86_400)
        else:
            values[field.name] = reader.text(field.name.upper(), str(default), _IMAGE, "text without spaces")
    return JobSettings(**values)
