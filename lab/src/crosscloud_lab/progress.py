"""One line per phase with the time it took: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from crosscloud_lab.errors import Ended

Note = Callable[[str], None]
"""Says what a running phase is doing right now."""

_PLAIN_REPEAT_SECONDS = 15.0


class Progress(Protocol):
    """Shows phases; phases of several threads may overlap."""

    def phase(self, title: str) -> AbstractContextManager[Note]:
        """Opens a phase; use it in a `with` statement, its value takes notes."""


def _say_nothing(text: str) -> None:
    """Takes notes for nobody."""


class SilentProgress:
    """For library use and tests."""

    @contextmanager
    def phase(self, title: str) -> Iterator[Note]:  # noqa: ARG002
        yield _say_nothing


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class PlainProgress:
    """One line at the end of each phase; a long phase repeats its last note now and then."""

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self._write = write or _to_stderr

    @contextmanager
    def phase(self, title: str) -> Iterator[Note]:
        started = time.monotonic()
        last = [started]
        lock = threading.Lock()

        def note(text: str) -> None:
            with lock:
                now = time.monotonic()
                if now - last[0] >= _PLAIN_REPEAT_SECONDS:
                    last[0] = now
                    self._write(f"    {title}: {text} ({now - started:.0f} s)")

        outcome = "failed"
        try:
            yield note
            outcome = "done"
        except Ended:
            outcome = "stopped"
            raise
        finally:
            mark = "ok" if outcome == "done" else "--"
            self._write(f"{mark}  {title}: {outcome} ({time.monotonic() - started:.1f} s)")


class LiveProgress:
    """Spinners on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._open = 0
        self._display: RichProgress | None = None

    @contextmanager
    def phase(self, title: str) -> Iterator[Note]:
        started = time.monotonic()
        display, task = self._begin(title)
        outcome = "[red]✗[/red]"
        try:
            yield lambda text: display.update(task, note=text)
            outcome = "[green]✓[/green]"
        except Ended:
            outcome = "[yellow]–[/yellow]"
            raise
        finally:
            display.update(task, visible=False)
            self._console.print(f"{outcome} {title} [dim]{time.monotonic() - started:.1f} s[/dim]")
            self._end(display, task)

    def _begin(self, title: str) -> tuple[RichProgress, TaskID]:
        with self._lock:
            if self._display is None:
                self._display = RichProgress(
                    SpinnerColumn(),
                    TextColumn("{task.description}"),
                    TextColumn("[dim]{task.fields[note]}[/dim]"),
                    TimeElapsedColumn(),
                    console=self._console,
                    transient=True,
                    refresh_per_second=4,
                )
                self._display.start()
            self._open += 1
            return self._display, self._display.add_task(title, total=None, note="")

    def _end(self, display: RichProgress, task: TaskID) -> None:
        with self._lock:
            display.remove_task(task)
            self._open -= 1
            if self._open == 0:
                display.stop()
                self._display = None


def default_progress() -> Progress:
    """Live on a terminal, plain lines in a pipe or in CI."""
    console = Console(stderr=True)
    return LiveProgress(console) if console.is_terminal else PlainProgress()
