"""A user without root's rights, for what root's tests start."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ID = 65534


@dataclass(frozen=True)
class OrdinaryUser:
    """`prefix` goes before a command; `home` is the one folder that belongs to this user, `environ` says so."""

    home: Path
    prefix: tuple[str, ...]
    environ: Mapping[str, str]


@contextmanager
def ordinary_user() -> Iterator[OrdinaryUser]:
    """With an empty home, which goes at the end; whoever isn't root stays who they are.

    Of root's rights only reading is left: checkout and Python may lie in a home that is closed to others.
    """
    with tempfile.TemporaryDirectory(prefix="home-") as folder:
        environ = {**os.environ, "HOME": folder}
        prefix: tuple[str, ...] = ()
        if os.geteuid() == 0:
            os.chown(folder, _ID, _ID)
            prefix = ("setpriv", f"--reuid={_ID}", f"--regid={_ID}", "--clear-groups")
            prefix += ("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")
        yield OrdinaryUser(Path(folder), prefix, environ)
