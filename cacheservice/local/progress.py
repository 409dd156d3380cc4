"""Shows what is going on while something slow runs: on a terminal as live lines with clocks, elsewhere as plain lines.

Everything goes to stderr, so that stdout holds results only. Called by `up` and `demo`; knows nothing of processes.
Thread rule: one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as RichProgress
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

HEARTBEAT_S = 15.0


class Progress(Protocol):
    """Shows phases by name. More than one may be open; each ends with `end` (or with the display)."""

    def begin(self, name: str, what: str) -> None: ...

    def update(self, name: str, what: str) -> None: ...

    def end(self, name: str, outcome: str) -> None: ...

    def note(self, text: str) -> None: ...


@contextmanager
def show_progress(console: Console) -> Iterator[Progress]:
    """Live lines when `console` is a terminal, else plain ones. Phases still open at the end just vanish."""
    if not console.is_terminal:
        yield PlainProgress(console)
        return
    live = LiveProgress(console)
    try:
        yield live
    finally:
        live.close()


class LiveProgress:
    """A spinner, the name, what happens and a clock for each open phase; a line above for each that ended.

    The terminal is taken only while a phase is open, so that results can be printed in between.
    """

    def __init__(self, console: Console) -> None:
        self._live = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.fields[title]:<12}"),
            TextColumn("{task.description}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def begin(self, name: str, what: str) -> None:
        if not self._tasks:
            self._live.start()
        self._tasks[name] = self._live.add_task(escape(what), title=name, total=None)

    def close(self) -> None:
        """Give the terminal back. Idempotent."""
        self._live.stop()

    def update(self, name: str, what: str) -> None:
        self._live.update(self._tasks[name], description=escape(what))

    def end(self, name: str, outcome: str) -> None:
        task = self._tasks.pop(name)
        elapsed = self._live.tasks[self._live.task_ids.index(task)].elapsed or 0.0
        self._live.remove_task(task)
        self._live.console.print(_ended(name, outcome, elapsed))
        if not self._tasks:
            self._live.stop()

    def note(self, text: str) -> None:
        self._live.console.print(Text(text))


class PlainProgress:
    """A line when a phase begins and ends, and one when what it does has changed after HEARTBEAT_S."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun: dict[str, float] = {}
        self._said: dict[str, float] = {}

    def begin(self, name: str, what: str) -> None:
        self._begun[name] = self._said[name] = time.monotonic()
        self._print(f"{name}: {what}")

    def update(self, name: str, what: str) -> None:
        now = time.monotonic()
        if now - self._said[name] >= HEARTBEAT_S:
            self._said[name] = now
            self._print(f"{name}: {what} ({now - self._begun[name]:.0f} s)")

    def end(self, name: str, outcome: str) -> None:
        self._said.pop(name)
        elapsed = time.monotonic() - self._begun.pop(name)
        self._console.print(_ended(name, outcome, elapsed), soft_wrap=True)

    def note(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def _ended(name: str, outcome: str, elapsed_s: float) -> Text:
    return Text.assemble((f"{name:<12}", "bold"), f" {outcome} ", (f"{elapsed_s:.1f} s", "dim"))
