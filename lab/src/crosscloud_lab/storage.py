"""The object store of the lab: an S3 server beside the first cluster, which every cluster can reach."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from crosscloud_lab.binaries import Binaries
from crosscloud_lab.plan import STORAGE_PORT, LabPlan
from crosscloud_lab.sandbox import Daemon, Sandbox, tail
from crosscloud_lab.state import LabState
from crosscloud_lab.waiting import wait_until

REGION = "us-east-1"
BUCKETS = ("crosscloud", "models")
_KEYS_FILE = "s3.json"


@dataclass(frozen=True)
class S3:
    """How to reach the object store: from the host and, by the same address, from pods of every cluster."""

    endpoint: str
    region: str
    access_key: str
    secret_key: str


def access(lab: LabPlan, state: LabState) -> S3:
    """Address and keys of the store; the keys are made when it is started first."""
    keys = state.read(_KEYS_FILE, None)
    if keys is None:
        keys = {"accessKey": secrets.token_hex(10), "secretKey": secrets.token_hex(20)}
        state.write(_KEYS_FILE, keys)
    return S3(lab.storage_url, REGION, keys["accessKey"], keys["secretKey"])


def daemon(lab: LabPlan, folder: Path, binaries: Binaries) -> Daemon:
    listen = f"{lab.storage_address}:{STORAGE_PORT}"
    options = (f"--port={listen}", f"--region={REGION}", "--quiet", "posix", str(folder))
    return Daemon("versitygw", (str(binaries.path("versitygw")), *options))


def up(lab: LabPlan, sandbox: Sandbox, state: LabState, binaries: Binaries) -> None:
    """Starts the server unless it runs, and waits until it answers."""
    folder = state.folder / "s3"
    for bucket in BUCKETS:
        (folder / bucket).mkdir(parents=True, exist_ok=True)
    keys = access(lab, state)
    server = daemon(lab, folder, binaries)
    sandbox.start(server, {"ROOT_ACCESS_KEY": keys.access_key, "ROOT_SECRET_KEY": keys.secret_key})
    wait_until(
        lambda: _answers(keys.endpoint),
        "the S3 server",
        lambda: tail(sandbox.log(server)),
        alive=lambda: sandbox.alive(server),
    )


def _answers(endpoint: str) -> bool:
    """Any answer will do: without keys the server refuses, which shows that it serves."""
    try:
        urlopen(endpoint, timeout=5).close()  # noqa: S310 - our own http address
    except HTTPError as refused:
        refused.close()
    except (URLError, OSError):
        return False
    return True
