"""Progress of a job as its driver shows it: rates, the last checkpoint, restarts, and the live line.

The numbers are a pure function of two polls of the coordinator's REST service; the line goes to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from holdfast.barriers.messages import printable
from holdfast.operators.datastream.launcher import OperatorProgress, Progress
from holdfast.operators.spark.supervisor import SeenWorker, in_seats

PLAIN_INTERVAL_S = 10.0
"""Pause between two lines of an unchanged job, where stderr is no terminal."""
COUNTERS_SHOWN_MAX = 20
"""Most of the user's counters in the last line."""

_STYLES = {"RUNNING": "green", "FINISHED": "green", "FAILED": "red", "CANCELED": "yellow"}


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """One poll of the coordinator."""

    at_ms: int
    """Monotonic."""
    job: dict[str, Any]
    checkpoints: dict[str, Any]
    workers: dict[str, Any]


def registered_slots(workers: dict[str, Any]) -> frozenset[int]:
    """Slots whose worker the coordinator knows."""
    return frozenset(int(worker["slot"]) for worker in workers.get("workers", ()) if worker.get("registered"))


def worker_nonces(workers: dict[str, Any]) -> frozenset[str]:
    """Nonces of the processes that hold the job's slots; workers of other jobs have different ones."""
    return frozenset(str(worker["nonce"]) for worker in workers.get("workers", ()) if worker.get("nonce"))


def seen_workers(workers: dict[str, Any]) -> tuple[SeenWorker, ...]:
    """Seats in the answer of GET .../workers, for the slot supervisor, which started workers there; an older coordinator omits some
    fields."""
    holders = tuple(
        SeenWorker(
            slot=int(worker["seat"] if _sits_elsewhere(worker) else worker["slot"]),
            spawn=int((worker["seat_spawn"] if _sits_elsewhere(worker) else worker.get("spawn")) or 0),
            registered=bool(worker.get("registered")),
            timed_out=bool(worker.get("timed_out")),
            pid=int(worker.get("pid") or 0),
            fingerprint=str(worker.get("fingerprint") or ""),
        )
        for worker in workers.get("workers", ())
    )
    standbys = tuple(
        SeenWorker(int(each["seat"]), int(each["spawn"]), True, False, int(each["pid"]), str(each["fingerprint"]), stands_by=True)
        for each in workers.get("standbys", ())
    )
    silent = tuple(
        SeenWorker(int(each["seat"]), int(each["spawn"]), False, True, int(each["pid"]), str(each["fingerprint"]))
        for each in workers.get("silent", ())
    )
    return in_seats((*holders, *silent), standbys)


def _sits_elsewhere(worker: dict[str, Any]) -> bool:
    return int(worker.get("seat", -1)) >= 0


def operators_of(workers: dict[str, Any]) -> tuple[OperatorProgress, ...]:
    """Operators in the answer of GET .../workers; empty from an older coordinator."""
    return tuple(
        OperatorProgress(
            uid=str(each["uid"]),
            kind=str(each["kind"]),
            records_in=int(each["records_in"]),
            records_out=int(each["records_out"]),
            late_dropped=int(each["late_dropped"]),
            late_ms_max=int(each["late_ms_max"]),
            counters={str(name): int(count) for name, count in each["counters"].items()},
            rows_skipped=int(each.get("rows_skipped") or 0),
            first_skipped=str(each.get("first_skipped") or ""),
        )
        for each in workers.get("operators", ())
    )


def records(operators: Iterable[OperatorProgress]) -> tuple[int, int]:
    """Records that the sources read and that the sinks took."""
    read = written = 0
    for operator in operators:
        read += operator.records_out if operator.kind == "source" else 0
        written += operator.records_in if operator.kind == "sink_writer" else 0
    return read, written


class CompletedCheckpoints:
    """Counts completed checkpoints over several coordinators: each counts from 0 when it begins to lead the job."""

    def __init__(self) -> None:
        self._by_epoch: dict[int, int] = {}

    def note(self, epoch: int, completed: int) -> None:
        self._by_epoch[epoch] = max(completed, self._by_epoch.get(epoch, 0))

    @property
    def count(self) -> int:
        return sum(self._by_epoch.values())


def derive_progress(now: ObservedJob, before: ObservedJob | None, *, checkpoints: int = 0) -> Progress:
    """Progress from two polls. Rates are over the time between them, and 0 when an attempt began between them. `checkpoints`:
    completed so far."""
    operators = operators_of(now.workers)
    read, written = records(operators)
    read_rate = written_rate = 0.0
    if before is not None and now.at_ms > before.at_ms:
        seconds = (now.at_ms - before.at_ms) / 1000
        read_before, written_before = records(operators_of(before.workers))
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
        late_dropped=sum(operator.late_dropped for operator in operators),
        rows_skipped=sum(operator.rows_skipped for operator in operators),
        checkpoints=checkpoints,
        seconds=max(0, int(now.job.get("duration") or 0)) / 1000,
        operators=operators,
    )


def describe_restart(name: str, now: ObservedJob, before: ObservedJob | None) -> str | None:
    """The newest failure's first line, when the job was restarted between two polls."""
    restarts = int(now.workers.get("restarts") or 0)
    if before is None or restarts <= int(before.workers.get("restarts") or 0):
        return None
    failure = str(now.workers.get("failure") or now.workers.get("last_failure") or "").strip()
    first, _, _ = failure.partition("\n")
    return f"{name} restart {restarts}: {first or 'cause unknown'}"


def describe_restored(name: str, now: ObservedJob, before: ObservedJob | None) -> str | None:
    """Checkpoint or savepoint from which the attempt after a failure was restored, when that happened between two polls."""
    restored, known = _restored(now), _restored(before) if before is not None else None
    if before is None or not restored or restored == known or not int(now.workers.get("restarts") or 0):
        return None
    what = "savepoint" if restored.get("is_savepoint") else "checkpoint"
    return f"{name} restored from {what} {restored.get('id')}"


def _restored(observed: ObservedJob) -> dict[str, Any]:
    return (observed.checkpoints.get("latest") or {}).get("restored") or {}


def format_progress(name: str, progress: Progress, registered: int, slots: int) -> str:
    """The live line."""
    read, written = _count(progress.records_in_per_second), _count(progress.records_out_per_second)
    parts = [f"{name} {progress.state}", f"in {read}/s", f"out {written}/s"]
    if progress.last_checkpoint_id is not None:
        duration = progress.last_checkpoint_duration_ms
        parts.append(f"checkpoint {progress.last_checkpoint_id}" + ("" if duration is None else f" in {duration} ms"))
    parts.append(f"restarts {progress.restarts}")
    if progress.late_dropped:
        parts.append(f"late {progress.late_dropped:,}")
    if progress.rows_skipped:
        parts.append(f"skipped {progress.rows_skipped:,}")
    if registered < slots:
        parts.append(f"{registered} of {slots} workers")
    return "  ".join(parts)


def format_totals(name: str, progress: Progress) -> str:
    """The last line: totals of the whole job."""
    sinks = [operator for operator in progress.operators if operator.kind == "sink_writer"]
    parts = [f"{_rows(progress.records_in)} in"]
    parts += [f"{_rows(sink.records_in)} out to {sink.uid}" for sink in sinks]
    parts += [_counted(progress.checkpoints, "checkpoint"), _counted(progress.restarts, "restart")]
    parts.append(f"{_rows(progress.late_dropped)} dropped as late")
    if progress.rows_skipped:
        parts.append(f"{_rows(progress.rows_skipped)} skipped")
    return f"{name} {progress.state} after {progress.seconds:,.1f} s: {', '.join(parts)}"


def format_counters(name: str, progress: Progress) -> str | None:
    """The user's counters, for the end; None if there are none."""
    counted = [
        f"{operator.uid} {counter} {count:,}"
        for operator in progress.operators
        for counter, count in sorted(operator.counters.items())
    ]
    more = f", and {len(counted) - COUNTERS_SHOWN_MAX} more" if len(counted) > COUNTERS_SHOWN_MAX else ""
    return f"{name} counters: {', '.join(counted[:COUNTERS_SHOWN_MAX])}{more}" if counted else None


def describe_late(name: str, progress: Progress) -> list[str]:
    """One warning for each operator that dropped late rows, which are missing in the output without a trace."""
    return [
        f"{name}: operator {operator.uid!r} dropped {operator.late_dropped:,} of {_rows(operator.records_in)} because they came "
        f"too late, the latest {_duration(operator.late_ms_max)} behind the watermark. A larger max_out_of_orderness_ms of "
        "assign_timestamps() waits longer for such rows"
        for operator in progress.operators
        if operator.late_dropped
    ]


def describe_skipped(name: str, progress: Progress) -> list[str]:
    """One warning for each operator that left rows out, with the first reason: it may apply to all."""
    return [
        f"{name}: operator {operator.uid!r} left out {_rows(operator.rows_skipped)} of {operator.records_in:,} (on_error='skip'), "
        f"the first since: {operator.first_skipped}"
        for operator in progress.operators
        if operator.rows_skipped
    ]


def _rows(count: int) -> str:
    return _counted(count, "row")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _duration(duration_ms: int) -> str:
    """At most two units: `2 d 3 h`, `5 min 7 s`, `1.250 s`."""
    if duration_ms < 60_000:
        return f"{duration_ms / 1000:.3f}".rstrip("0").rstrip(".") + " s"
    left, texts = duration_ms // 1000, []
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if left >= seconds:
            texts.append(f"{left // seconds:,} {unit}")
            left %= seconds
    return " ".join(texts[:2])


def _count(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f}"


class _Console(Console):
    """Stops writing when the reader of its pipe has gone; rich would end the thread, and redirect the program's stdout."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class ProgressLine:
    """SHELL: the live line; without a terminal a few plain lines; nothing once the reader of stderr has gone."""

    def __init__(self, *, enabled: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._enabled = enabled
        self._clock = clock
        self._console = _Console(file=sys.stderr)
        self._live: Live | None = None
        self._last_state = ""
        self._due_s = 0.0

    def show(self, line: str, state: str) -> None:
        if not self._enabled:
            return
        if not self._console.is_terminal:
            if state != self._last_state or self._clock() >= self._due_s:
                self.say(line)
                self._due_s = self._clock() + PLAIN_INTERVAL_S
            self._last_state = state
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        self._live.update(Text(line, style=_STYLES.get(state, "cyan"), no_wrap=True, overflow="ellipsis"), refresh=True)

    def say(self, line: str) -> None:
        """Write a line that stays. Control characters of a row are escaped; a display that can't be written raises nothing."""
        if not self._enabled:
            return
        try:
            self._console.print(printable(line, keep="\n\t"), highlight=False, markup=False, soft_wrap=True)
        except (OSError, ValueError):  # disk full; closed
            self._enabled = False

    def finish(self, line: str) -> None:
        """Write the last line in place of the live one."""
        if self._live is not None:
            self._live.transient = True
        self.close()
        self.say(line)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
