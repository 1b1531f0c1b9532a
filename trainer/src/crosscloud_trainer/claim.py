"""Whose storage it is: two jobs that write into one would delete each other's checkpoints.

The file `writer.json` names the job and the attempt that write. A job takes over what an earlier one of its name, or
one that has succeeded, left; from any other it is refused. Who finds another name there stops writing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from crosscloud_trainer.contract import ExitCode, Problem, RunDocument
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.storage import FIELD, Storage

CLAIM = "writer.json"


def claim(storage: Storage, run: RunDocument) -> None:
    """Write our name. Raises Failure(STORAGE_REFUSED) where another job's is, FENCED where a newer attempt's is."""
    found = _read(storage)
    if found.get("uid") == run.job.uid:
        _check_attempt(found, run)
    elif found and not found.get("succeeded") and found.get("job") != _name(run):
        allowed = (
            f"it belongs to job {found.get('job')}, which has not succeeded: give each job a storage of its own, or "
            f"delete {CLAIM} there if that job is gone"
        )
        raise Failure(ExitCode.STORAGE_REFUSED, str(Problem(FIELD, storage.uri, allowed)))
    _write(storage, run, succeeded=False)


def check_claim(storage: Storage, run: RunDocument) -> None:
    """Raises Failure(FENCED) where another job or a newer attempt has taken the storage over."""
    found = _read(storage)
    if found.get("uid", run.job.uid) != run.job.uid:
        taken = f"job {found.get('job')} ({found.get('uid')}) writes there now; give each job a storage of its own"
        raise Failure(ExitCode.FENCED, str(Problem(FIELD, storage.uri, taken)))
    _check_attempt(found, run)


def release(storage: Storage, run: RunDocument) -> None:
    """The job has succeeded: another one may write there."""
    _write(storage, run, succeeded=True)


def _check_attempt(found: Mapping[str, Any], run: RunDocument) -> None:
    if int(found.get("attempt", 0)) > run.attempt:
        message = f"attempt {found['attempt']} of this job writes there now; this is {run.attempt}"
        raise Failure(ExitCode.FENCED, message)


def _name(run: RunDocument) -> str:
    return f"{run.job.namespace}/{run.job.name}"


def _read(storage: Storage) -> dict[str, Any]:
    """What is written there; nothing where it can't be read as a name."""
    text = storage.read(CLAIM)
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _write(storage: Storage, run: RunDocument, *, succeeded: bool) -> None:
    content = {"job": _name(run), "uid": run.job.uid, "attempt": run.attempt, "succeeded": succeeded}
    storage.write(CLAIM, json.dumps(content).encode())
