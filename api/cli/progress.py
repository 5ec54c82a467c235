"""A line on stderr that shows the progress of a tool that takes long, for a person who waits.

    holdfast: diff: totals.count, 1,310,720 rows, 84.2 MiB read, 12.0 s

It is removed before the tool prints its result. Nothing is shown with --json, or where stderr is no terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from typer.core import TyperCommand

from holdfast.api.cli import console
from holdfast.coordinator.figures import duration_text, size_text

SILENT_MS = 2_000
"""A tool that takes less shows no progress."""
_INTERVAL_MS = 500
_WIDTH_MAX = 100
"""Characters of the line, at most: a line that wraps could not be removed."""
_ERASE = "\r\x1b[K"


def progress_line(tool: str, rows: int, size: int, what: str, elapsed_ms: int) -> str:
    """Text of the line, without terminal control sequences."""
    parts = [f"{rows:,} rows"] if rows else []
    parts += [f"{size_text(size)} read"] if size else []
    end = ", ".join([*parts, duration_text(elapsed_ms)])
    head = f"holdfast: {tool}: "
    room = _WIDTH_MAX - len(head) - len(end) - 2
    shown = console.printable(what)
    if len(shown) > room:
        shown = f"{shown[: max(room - 3, 0)]}..."
    return f"{head}{shown}, {end}" if what else f"{head}{end}"


class ProgressLine:
    """Progress line of one tool on one terminal; thread-safe."""

    def __init__(self, tool: str, stream: TextIO, *, clock_ms: Callable[[], int], silent_ms: int = SILENT_MS) -> None:
        from holdfast.statebackends.state_processor.progress import Work

        self.work = Work()
        self._tool, self._stream, self._clock_ms = tool, stream, clock_ms
        self._began_ms = clock_ms()
        self._silent_ms = silent_ms
        self._lock = threading.Lock()
        self._shown = self._ended = False

    def tick(self) -> None:
        """Show the progress, unless it is too early or the tool has ended."""
        elapsed_ms = self._clock_ms() - self._began_ms
        with self._lock:
            if elapsed_ms < self._silent_ms or self._ended:
                return
            work = self.work
            self._write(_ERASE + progress_line(self._tool, work.rows, work.size, work.what, elapsed_ms))
            self._shown = True

    def end(self) -> None:
        """Remove the line for good, before the tool prints its result."""
        with self._lock:
            if self._shown and not self._ended:
                self._write(_ERASE)
            self._ended = True

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._ended = True  # the terminal is gone; the tool goes on


@contextmanager
def shown_progress(tool: str) -> Iterator[None]:
    """Show progress of the block from a separate thread, until the console prints something else."""
    from holdfast.statebackends.state_processor.progress import noted

    line = ProgressLine(tool, sys.stderr, clock_ms=lambda: time.monotonic_ns() // 1_000_000, silent_ms=SILENT_MS)
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(_INTERVAL_MS / 1_000):
            line.tick()

    thread = threading.Thread(target=show, name="progress", daemon=True)
    with noted(line.work), console.before_output(line.end):
        thread.start()
        try:
            yield
        finally:
            ended.set()
            line.end()
            thread.join()


class Tool(TyperCommand):
    """A command that shows its progress."""

    def invoke(self, ctx: Any) -> Any:
        if ctx.params.get("as_json") or not sys.stderr.isatty():
            return super().invoke(ctx)
        with shown_progress(ctx.info_name or ""):
            return super().invoke(ctx)
