"""What a driver sees of its job: rates, the last checkpoint, restarts, and the live line that shows them.

The numbers are a pure function of two looks at the coordinator's REST service; the line goes to stderr."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from barriers.jobgraph import JobGraph
from operators.launcher import Progress
from operators.supervisor import SeenWorker

_STYLES = {"RUNNING": "green", "FINISHED": "green", "FAILED": "red", "CANCELED": "yellow"}


@dataclass(frozen=True, slots=True)
class Look:
    """One poll of the coordinator."""

    at_ms: int
    """Monotonic."""
    job: dict[str, Any]
    checkpoints: dict[str, Any]
    workers: dict[str, Any]


def registered_slots(workers: dict[str, Any]) -> frozenset[int]:
    """Slots whose worker the coordinator knows."""
    return frozenset(int(worker["slot"]) for worker in workers.get("workers", ()) if worker.get("registered"))


def seen_workers(workers: dict[str, Any]) -> tuple[SeenWorker, ...]:
    """What GET .../workers says of the slots, as the slot supervisor takes it; a coordinator of an older version says less."""
    return tuple(
        SeenWorker(
            slot=int(worker["slot"]),
            spawn=int(worker.get("spawn") or 0),
            registered=bool(worker.get("registered")),
            timed_out=bool(worker.get("timed_out")),
            pid=int(worker.get("pid") or 0),
            fingerprint=str(worker.get("fingerprint") or ""),
        )
        for worker in workers.get("workers", ())
    )


def records(graph: JobGraph, job: dict[str, Any]) -> tuple[int, int]:
    """Records that left the sources and that reached the sinks, in this attempt."""
    metrics = {vertex["id"]: vertex.get("metrics", {}) for vertex in job.get("vertices", ())}
    read = written = 0
    for vertex in graph.vertices:
        numbers = metrics.get(vertex.vertex_id, {})
        if vertex.is_source:
            read += int(numbers.get("write-records") or 0)
        if any(operator.kind == "sink_writer" for operator in vertex.operators):
            written += int(numbers.get("write-records" if vertex.is_source else "read-records") or 0)
    return read, written


def derive_progress(graph: JobGraph, now: Look, before: Look | None) -> Progress:
    """Rates are over the time between the two looks; 0 when an attempt began between them."""
    read, written = records(graph, now.job)
    read_rate = written_rate = 0.0
    if before is not None and now.at_ms > before.at_ms:
        seconds = (now.at_ms - before.at_ms) / 1000
        read_before, written_before = records(graph, before.job)
        read_rate = max(0.0, (read - read_before) / seconds)
        written_rate = max(0.0, (written - written_before) / seconds)
    latest = (now.checkpoints.get("latest") or {}).get("completed") or {}
    duration = latest.get("end_to_end_duration")
    return Progress(
        state=str(now.job.get("state", "UNKNOWN")),
        records_in=read,
        records_out=written,
        records_in_per_second=read_rate,
        records_out_per_second=written_rate,
        last_checkpoint_id=latest.get("id"),
        last_checkpoint_duration_ms=None if duration is None else int(duration),
        restarts=int(now.workers.get("restarts") or 0),
    )


def describe_restart(name: str, now: Look, before: Look | None) -> str | None:
    """The newest failure's first line, when the job was restarted between two looks."""
    restarts = int(now.workers.get("restarts") or 0)
    if before is None or restarts <= int(before.workers.get("restarts") or 0):
        return None
    failure = str(now.workers.get("failure") or now.workers.get("last_failure") or "").strip()
    return f"{name} restart {restarts}: {failure.splitlines()[0] if failure else 'its cause is not on record'}"


def format_progress(name: str, progress: Progress, registered: int, slots: int) -> str:
    """One line for people."""
    read, written = _count(progress.records_in_per_second), _count(progress.records_out_per_second)
    parts = [f"{name} {progress.state}", f"in {read}/s", f"out {written}/s"]
    if progress.last_checkpoint_id is not None:
        duration = progress.last_checkpoint_duration_ms
        parts.append(f"checkpoint {progress.last_checkpoint_id}" + ("" if duration is None else f" in {duration} ms"))
    parts.append(f"restarts {progress.restarts}")
    if registered < slots:
        parts.append(f"{registered} of {slots} workers")
    return "  ".join(parts)


def _count(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f}"


class _Console(Console):
    """Falls silent when the reader of its pipe has gone; rich would end the thread, and redirect the program's stdout."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class ProgressLine:
    """SHELL: the live line; plain lines, and few, when stderr is not a terminal; nothing once nobody reads them."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._console = _Console(file=sys.stderr)
        self._live: Live | None = None
        self._last_state = ""

    def show(self, line: str, state: str) -> None:
        if not self._enabled:
            return
        if not self._console.is_terminal:
            if state != self._last_state:
                self.say(line)
            self._last_state = state
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        self._live.update(Text(line, style=_STYLES.get(state, "cyan"), no_wrap=True, overflow="ellipsis"), refresh=True)

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._enabled:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
