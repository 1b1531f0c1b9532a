"""Keys to work on: woken by anything, worked on one at a time per key, again when asked to, later when it fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from crosscloud_operator.kube.api import ApiError
from crosscloud_operator.kube.backoff import Backoff

log = logging.getLogger(__name__)

Key = tuple[str, str]  # namespace, name
Work = Callable[[str, str], Awaitable[float | None]]  # seconds until the next look, or None: when woken


@dataclass
class Outcome:
    """How one piece of work ended; `error` is the exception's class name, or empty."""

    key: Key
    seconds: float
    error: str


@dataclass
class _Entry:
    backoff: Backoff
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    working_since: float | None = None
    task: asyncio.Task[None] | None = None


class WorkQueue:
    """Runs `work(namespace, name)` for each woken key.

    A key that is woken while it is worked on is worked on once more. Between two looks at one key lie at least
    `pause` seconds, so that a burst of events is one look. One key that hangs holds up no other.
    """

    def __init__(
        self,
        work: Work,
        *,
        pause: float = 0.1,
        done: Callable[[Outcome], None] = lambda _: None,
        backoff: Callable[[], Backoff] = lambda: Backoff(1.0, 60.0),
    ) -> None:
        self._work = work
        self._pause = pause
        self._done = done
        self._backoff = backoff
        self._entries: dict[Key, _Entry] = {}

    def wake(self, namespace: str, name: str) -> None:
        """Look at this key soon."""
        key = (namespace, name)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(self._backoff())
            entry.task = asyncio.get_running_loop().create_task(self._run(key, entry), name=f"job {namespace}/{name}")
        entry.woken.set()

    @property
    def longest(self) -> float:
        """Seconds that the oldest piece of work under way has taken so far."""
        now = time.monotonic()
        return max((now - entry.working_since for entry in self._entries.values() if entry.working_since), default=0.0)

    async def close(self) -> None:
        """Cancel all work and wait for its end."""
        tasks = [entry.task for entry in self._entries.values() if entry.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: Key, entry: _Entry) -> None:
        while True:
            entry.woken.clear()
            delay = await self._once(key, entry)
            await asyncio.sleep(self._pause)
            if delay is None and not entry.woken.is_set():
                del self._entries[key]  # no await since the check: a wake can't be lost here
                return
            try:
                async with asyncio.timeout(delay):
                    await entry.woken.wait()
            except TimeoutError:
                pass

    async def _once(self, key: Key, entry: _Entry) -> float | None:
        began = entry.working_since = time.monotonic()
        error = ""
        try:
            delay = await self._work(*key)
            entry.backoff.reset()
        except ApiError as fault:
            error = type(fault).__name__
            delay = entry.backoff.next()
            log.warning("%s/%s: %s; again in %.0f s", *key, fault.message, delay)
        except Exception as fault:  # one job's bug must not end the others' work
            error = type(fault).__name__
            delay = entry.backoff.next()
            log.error("%s/%s: unexpected; again in %.0f s", *key, delay, exc_info=fault)  # noqa: TRY400
        finally:
            entry.working_since = None
            seconds = time.monotonic() - began
        self._done(Outcome(key, seconds, error))
        return delay
