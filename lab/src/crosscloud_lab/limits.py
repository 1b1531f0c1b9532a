"""Limits of the machine that several clusters run into: raised by the first lab, put back by the last.

Every kubelet, containerd and API server holds several inotify instances, and root gets 128 of them by
default. What the machine had before is kept in /run, which ends with a restart just as the limits do.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from crosscloud_lab import cgroups
from crosscloud_lab.paths import exclusive

_RECORD, _SYSCTLS = Path("/run/crosscloud-lab"), Path("/proc/sys")
_WANTED = {"fs/inotify/max_user_instances": 8192, "fs/inotify/max_user_watches": 524288}


def raise_limits(record: Path = _RECORD, sysctls: Path = _SYSCTLS) -> None:
    """Raises the limits that are too low, and remembers what they were."""
    low = {name: int((sysctls / name).read_text()) for name in _WANTED}
    low = {name: value for name, value in low.items() if value < _WANTED[name]}
    if not low:
        return
    with exclusive(record / "lock"):
        before = _read(record)
        (record / "before.part").write_text(json.dumps(low | before))
        (record / "before.part").rename(record / "before.json")
        for name in low:
            (sysctls / name).write_text(str(_WANTED[name]))


def restore_limits(record: Path = _RECORD, sysctls: Path = _SYSCTLS) -> None:
    """Puts the limits back unless another lab is there."""
    if not record.is_dir() or any(cgroups.ledger_root().glob("crosscloud-*")):
        return
    with exclusive(record / "lock"):
        for name, value in _read(record).items():
            (sysctls / name).write_text(str(value))
        (record / "before.json").unlink(missing_ok=True)
    (record / "lock").unlink(missing_ok=True)
    with suppress(OSError):
        record.rmdir()


def _read(record: Path) -> dict[str, int]:
    try:
        found: dict[str, int] = json.loads((record / "before.json").read_text())
    except FileNotFoundError:
        return {}
    return found
