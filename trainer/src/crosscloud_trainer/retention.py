"""Which checkpoints stay: those that the operator has acknowledged, and newer ones that it hasn't yet."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from crosscloud_trainer.checkpoint import MANIFEST
from crosscloud_trainer.contract import Acknowledged, InvalidDocument, StoredCheckpoint, read_json
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.storage import Storage

log = logging.getLogger("crosscloud_trainer")

_LOOK_SECONDS = 1.0
_LAST_LOOK_SECONDS = 0.1
_LAST_WAIT_SECONDS = 120.0  # the kubelet may take more than a minute to bring what the operator has said
_LEVELS = ("attempt", "home", "step")

Order = tuple[int, ...]
"""(attempt, home, step)"""


def prune(storage: Storage, acknowledged: Acknowledged) -> None:
    """Delete what is older than the newest acknowledged checkpoint and not acknowledged, whole or not."""
    kept = {order for item in acknowledged.checkpoints if (order := _order_of(storage, item.uri)) is not None}
    if not kept:
        return
    for order in _stored(storage, "", ()):
        if order < max(kept) and order not in kept:
            folder = _folder(order)
            storage.remove(f"{folder}/{MANIFEST}")  # first, so that what is half deleted is no checkpoint
            storage.remove(folder)


def _stored(storage: Storage, folder: str, order: Order) -> list[Order]:
    """All checkpoint folders of this storage."""
    if len(order) == len(_LEVELS):
        return [order]
    found = []
    for name in storage.names(folder):
        if match := re.fullmatch(rf"{_LEVELS[len(order)]}-([0-9]+)", name):
            found += _stored(storage, f"{folder}/{name}".lstrip("/"), (*order, int(match[1])))
    return found


def _folder(order: Order) -> str:
    return "/".join(f"{level}-{number}" for level, number in zip(_LEVELS, order, strict=True))


def _order_of(storage: Storage, uri: str) -> Order | None:
    """Which checkpoint of this storage a manifest is of; None for one of another storage."""
    match = re.fullmatch(r"attempt-([0-9]+)/home-([0-9]+)/step-([0-9]+)/.*", uri.removeprefix(f"{storage.uri}/"))
    return tuple(int(number) for number in match.groups()) if match else None


class Retention:
    """Follows the acknowledgements in `path`, a file that the kubelet or the launcher replaces, while training runs."""

    def __init__(self, storage: Storage, path: Path) -> None:
        self._storage, self._path = storage, path
        self._seen: bytes | None = None
        self._acknowledged = Acknowledged()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="retention", daemon=True)
        self._thread.start()

    def finish(self, last: StoredCheckpoint, keep: int, stopped: Callable[[], bool]) -> None:
        """Once the job's `last` checkpoint is acknowledged, older ones go. Where there are more than `keep` it waits
        for that, though not for ever, and not when told to end.
        """
        self._stop.set()
        self._thread.join()
        self._look()
        deadline = time.monotonic() + _LAST_WAIT_SECONDS
        try:
            crowded = len(_stored(self._storage, "", ())) > keep
        except Failure as fault:
            log.warning("older checkpoints are not deleted: %s", fault)
            return
        while crowded and last not in self._acknowledged.checkpoints and not stopped():
            if time.monotonic() > deadline:
                log.warning("older checkpoints are not deleted: the last one was not acknowledged in time")
                return
            time.sleep(_LAST_LOOK_SECONDS)
            self._look()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        try:
            text = self._path.read_bytes()
        except OSError:  # nothing is acknowledged yet
            return
        if text == self._seen:
            return
        try:
            self._acknowledged = read_json(Acknowledged, text)
            prune(self._storage, self._acknowledged)
        except (Failure, InvalidDocument) as fault:
            log.warning("older checkpoints are not deleted: %s", fault)
        self._seen = text
