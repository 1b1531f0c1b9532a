"""kopf's part: it logs in, watches jobs on the hub, and wakes the worker. No logic is here.

Only `on.event` is used, which writes neither annotations nor finalizers of kopf's own; the job's finalizer is put by
reconcile. What the hub and the members hold is kept by the informers of kube/world.py.
"""

from __future__ import annotations

import base64
import datetime
import logging
from collections.abc import Callable
from typing import Any

import kopf

from crosscloud_operator.kube.access import Access
from crosscloud_operator.kube.api import JOB
from crosscloud_operator.kube.workqueue import WorkQueue

LOGIN_SECONDS = 600  # a service account's token rotates; read it again well before it ends


def registry(queue: WorkQueue, access: Callable[[], Access]) -> kopf.OperatorRegistry:
    """Every handler of the operator."""
    found = kopf.OperatorRegistry()

    @kopf.on.login(registry=found)
    def log_in(**_: Any) -> kopf.ConnectionInfo:
        return connection(access())

    @kopf.on.event(JOB.group, JOB.version, JOB.plural, registry=found)
    async def job_changed(namespace: str | None, name: str | None, **_: Any) -> None:
        if namespace and name:
            queue.wake(namespace, name)

    return found


def connection(access: Access) -> kopf.ConnectionInfo:
    """The same credentials that the rest of the operator uses for the hub."""
    expiration = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=LOGIN_SECONDS)
    return kopf.ConnectionInfo(
        server=access.server,
        ca_data=_encoded(access.ca),
        token=access.token,
        scheme="Bearer" if access.token else None,
        certificate_data=_encoded(access.certificate),
        private_key_data=_encoded(access.key),
        expiration=expiration,
    )


def kopf_settings() -> kopf.OperatorSettings:
    """Quiet, and without rights that on.event doesn't need."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # its events repeat log lines; ours tell users something
    settings.posting.level = logging.CRITICAL
    settings.scanning.disabled = True  # no rights on CRDs and namespaces: the chart brings our two kinds
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 5
    return settings


def _encoded(text: str | None) -> str | None:
    return None if text is None else base64.b64encode(text.encode()).decode()
