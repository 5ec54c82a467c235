"""The simulator's output: progress and a line for each failure while it runs, failures in full and a summary at the end; plain
lines into a pipe.

It decides words and widths, and counts nothing."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.api.cli import console
from holdfast.chaos.campaign.campaign import Finding
from holdfast.chaos.campaign.proof import Verdict
from holdfast.chaos.campaign.summary import CoverageReport, Failure, Summary, Tally
from holdfast.chaos.cluster.results import RunResult, ViolationRecord
from holdfast.chaos.pipelines.judging import Dependence
from holdfast.coordinator.figures import duration_text

WIDTH = 120
"""Columns of a paragraph in a pipe."""
_LABEL = 13
_GAPS_FROM = 100
"""Runs of a summary from which on it lists what they never did: fewer can't do everything."""
_LINES = 10
"""Most plain lines of progress in a campaign."""
_MESSAGE = 160
"""Characters of a message in the one line of a failure."""


class ProgressBar:
    """Progress on stderr, so that stdout is the report alone: a bar on a terminal, else a line each tenth of the way, or
    nothing."""

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        self._total = total
        self._quiet = quiet
        self._began = time.monotonic()
        self._lines = 0
        self._progress: Progress | None = None
        if not quiet and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[found]}"))
            self._progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task("seeds", total=total, found="")

    def ran(self, result: RunResult, tally: Tally) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=tally.seeds, found=self._pace(tally))
        elif not self._quiet and self._total >= _LINES**2 and tally.seeds * _LINES >= self._total * (self._lines + 1):
            self._lines = tally.seeds * _LINES // self._total
            self._say(f"{tally.seeds:,} of {self._total:,} seeds, {self._pace(tally)}")

    def broke(self, result: RunResult, violation: ViolationRecord, replay: str) -> None:
        """One line at once, enough to look at the failure while a long campaign runs, or after it was stopped."""
        if self._quiet:
            return
        what = f"seed {result.seed} of {result.workload} broke {violation.invariant}: {_in_brief(violation.message)}"
        text = f"{what}; again: {replay}"
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._say(text)

    def looks_at(self, seed: int, what: str) -> None:
        """A step that takes a while begins."""
        text = {"minimise": f"seed {seed}: minimising its faults", "coverage": "measuring coverage"}.get(
            what, f"seed {seed}: {what}"
        )
        if self._progress is not None:
            self._progress.update(self._task, description=text)
        elif not self._quiet and what != "events":
            self._say(text)

    def tried(self, verdict: Verdict) -> None:
        """One more sabotage has been tried."""
        if self._progress is not None:
            self._progress.update(self._task, advance=1, description=verdict.sabotage)
        elif not self._quiet:
            self._say(f"{verdict.sabotage}: {caught(verdict)}")

    def _pace(self, tally: Tally) -> str:
        seconds = max(0.001, time.monotonic() - self._began)
        return f"{_count(tally.violations, 'violation')}, {60 * tally.seeds / seconds:,.0f} a minute"

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def __enter__(self) -> ProgressBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()


def _in_brief(message: str) -> str:
    """One line: of a traceback the last one, which names the error, else the first one."""
    lines = [line for line in message.splitlines() if line.strip()] or [""]
    return textwrap.shorten(lines[-1] if lines[0].startswith("Traceback ") else lines[0], _MESSAGE, placeholder=" ...")


def plain(value: Any) -> Any:
    """A record as JSON's own types."""
    return msgspec.to_builtins(value, str_keys=True)


def show_finding(found: Finding, coverage: CoverageReport | None, meanings: Mapping[str, str]) -> None:
    """Failures first, so that the summary is the last thing on the screen. `meanings`: of invariants."""
    for failure in found.failures:
        show_failure(failure, meanings)
    untold = found.summary.violations - len(found.failures)
    if untold > 0:
        console.show_line(_count(untold, "more violation"))
        console.show_line("")
    show_summary(found.summary, coverage)


def show_failure(failure: Failure, meanings: Mapping[str, str]) -> None:
    """What broke, the faults that it takes, the run's end, and the command that repeats it."""
    first, *more = failure.message.splitlines() or [""]
    console.show_line(f"seed {failure.seed} of {failure.workload} broke {failure.invariant} at {failure.at_ms:,} ms: {first}")
    for line in more:
        console.show_line(f"  {line}")
    if failure.invariant in meanings:
        console.show_line(f"  {failure.invariant}: {meanings[failure.invariant]}")
    if failure.planned:
        console.show_line(f"  {faults_heading(failure)}")
    for index, fault in failure.faults.items():
        console.show_line(f"    {index:>2}  {fault.label}")
    if failure.task_failure and failure.task_failure not in failure.events:
        console.show_line("  last failure of a subtask")
        console.show_line(f"  {failure.task_failure}")
    if failure.events:
        what = "events around the cause" if failure.around_cause else "last events"
        console.show_line(f"  {what} (ms, process, event)")
    for line in failure.events:
        console.show_line(f"  {line}")
    console.show_line(f"  again: {failure.replay}")
    console.show_line("")


def _show_violation(what: str, at_ms: int, message: str) -> None:
    first, *rest = message.splitlines() or [""]
    console.show_line(f"{what} at {at_ms:,} ms: {first}")
    for line in rest:
        console.show_line(f"  | {line}")


def faults_heading(failure: Failure) -> str:
    """How many faults of its plan a failure takes."""
    if failure.minimised and not failure.faults:
        return f"it takes none of its {_count(failure.planned, 'fault')}"
    if failure.minimised:
        return (
            f"it takes {len(failure.faults)} of its {_count(failure.planned, 'fault')} ({_count(failure.runs, 'run')} to find out)"
        )
    return f"{len(failure.faults)} of its {_count(failure.planned, 'fault')}"


def show_summary(summary: Summary, coverage: CoverageReport | None) -> None:
    """Label and text, one line or paragraph each."""
    console.show_line(summary_title(summary))
    _paragraphs(summary_rows(summary, coverage))


def summary_title(summary: Summary) -> str:
    """What ran, in a line."""
    where = f"{_count(summary.seeds, 'seed')} from {summary.start} over {_count(len(summary.workloads), 'workload')}"
    return f"{where} in {duration_text(int(summary.seconds * 1000))}{', interrupted' if summary.interrupted else ''}"


def summary_rows(summary: Summary, coverage: CoverageReport | None) -> list[tuple[str, str]]:
    """(label, text) of all that a summary says."""
    depends = [_dependence(each) for found in summary.dependences.values() for each in found]
    rows = [*_counts(summary), *depends, *_gaps(summary), *_coverage(coverage)]
    if summary.sabotage:
        outcome = f"caught after {_count(summary.caught_after, 'seed')}" if summary.caught_after else "NOT caught"
        rows.append(("sabotage", f"{summary.sabotage}: {outcome}"))
    return rows


def _dependence(found: Dependence) -> tuple[str, str]:
    """A sink of a user's own pipeline whose output is undetermined."""
    if found.judged:
        return "depends", f"{found}. It is judged by what expect() says"
    what = "Nothing of it was compared" if found.seed is None else f"It was not compared in seed {found.seed}"
    return "NOT JUDGED", f"{found}. {what}: say with hf.chaos.expect(...) what must hold all the same"


def _counts(summary: Summary) -> list[tuple[str, str]]:
    broken = ", ".join(f"{name} in {_count(count, 'run')}" for name, count in summary.invariants.items())
    planned = sum(count.planned for count in summary.faults.values())
    hit = sum(count.hit for count in summary.faults.values())
    return [
        ("violations", f"{summary.violations:,}{f' ({broken})' if broken else ''}"),
        ("runs", f"{summary.runs_per_minute:,.0f} a minute, {summary.runs_per_minute_per_core:,.0f} a minute and core"),
        ("faults", f"{planned:,} planned, {hit:,} hit, of {_count(len(summary.faults), 'kind')}"),
        ("crashes", f"{summary.crashes:,} at {_count(len(summary.crash_points), 'distinct point')}"),
        ("checkpoints", f"{summary.checkpoints:,} completed"),
        ("restarts", f"{_count(summary.restarts, 'attempt')} beyond the first"),
        ("records", f"{summary.records:,} in {duration_text(summary.virtual_ms)} of virtual time"),
    ]


def _gaps(summary: Summary) -> list[tuple[str, str]]:
    """What these runs do not prove."""
    gaps = []
    if summary.idle:
        first = ", ".join(map(str, summary.idle_seeds)) + (", ..." if summary.idle > len(summary.idle_seeds) else "")
        gaps.append(("no fault hit", f"in {_count(summary.idle, 'run')}: {'seeds' if summary.idle > 1 else 'seed'} {first}"))
    dull = [kind for kind, count in summary.faults.items() if not count.hit]
    many = summary.seeds >= _GAPS_FROM
    if dull and many:
        gaps.append(("never hit", ", ".join(dull)))
    known = len(summary.visited) + len(summary.never_visited)
    if known:
        never = f"; never: {', '.join(summary.never_visited)}" if summary.never_visited and many else ""
        gaps.append(("visited", f"{len(summary.visited)} of {known} dangerous states{never}"))
    return gaps


def _coverage(coverage: CoverageReport | None) -> list[tuple[str, str]]:
    if coverage is None:
        return []
    if coverage.unavailable:
        return [("coverage", f"not measured: {coverage.unavailable}")]
    packages = ", ".join(f"{name} {percent} %" for name, percent in coverage.packages.items())
    rows = [("coverage", f"{coverage.branches_percent} % of branches in {_count(coverage.runs, 'run')} ({packages})")]
    return [*rows, ("never ran", ", ".join(coverage.never_ran) or "no module")]


def show_run(result: RunResult, digest: str, events: int) -> None:
    """One run of a given seed."""
    backend = f", {result.backend}" if result.backend else ""
    console.show_line(f"seed {result.seed} of {result.workload}{backend}: {result.ended or 'no end'}")
    hit = sorted(set(result.faults_hit))
    rows = [
        ("time", f"{duration_text(result.virtual_ms)} of virtual time, {_count(result.steps, 'step')}"),
        ("faults", f"{len(result.plan)} planned, {len(hit)} hit"),
        ("crashes", f"{result.crashes:,}{': ' if result.crashes else ''}{', '.join(result.crash_points)}"),
        ("checkpoints", f"{result.checkpoints:,} completed"),
        ("restarts", f"{_count(result.restarts, 'attempt')} beyond the first"),
        ("records", f"{result.records:,}"),
        ("visited", ", ".join(sorted(name for name, count in result.sometimes.items() if count)) or "no dangerous state"),
        ("trace", f"{_count(events, 'event')}, digest {digest}"),
    ]
    _paragraphs(rows)
    for index, fault in enumerate(result.plan):
        console.show_line(f"  {index:>2}  {'hit   ' if index in hit else 'no hit'}  {fault.label}")
    _paragraphs(_dependence(each) for each in result.dependences)
    for violation in result.violations:
        _show_violation(f"broke {violation.invariant}", violation.at_ms, violation.message)
    if not result.violations:
        console.show_line("no violation" if hit else "no violation, and no fault hit")


def show_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Each sabotage, and how it was caught."""
    rows = [
        (
            verdict.sabotage,
            caught(verdict),
            verdict.invariant + ("" if verdict.invariant in (*verdict.expected, "") or not verdict.expected else " (!)"),
            ", ".join(verdict.expected) or "any",
            textwrap.shorten(verdict.message, 90),
        )
        for verdict in verdicts
    ]
    console.show_table(("SABOTAGE", "OUTCOME", "BY", "EXPECTED", "MESSAGE"), rows, empty="no sabotages")
    count = sum(1 for verdict in verdicts if verdict.caught_after)
    console.show_line(f"{count} of {_count(len(verdicts), 'sabotage')} caught")


def caught(verdict: Verdict) -> str:
    """Whether a sabotage was caught, and how soon."""
    if verdict.caught_after:
        return f"caught after {_count(verdict.caught_after, 'seed')}"
    return f"NOT caught in {_count(verdict.seeds, 'seed')}"


def _paragraphs(rows: Iterable[tuple[str, str]]) -> None:
    width = Console().width if sys.stdout.isatty() else WIDTH
    for label, text in rows:
        lines = textwrap.wrap(text, max(40, width - _LABEL), break_long_words=False, break_on_hyphens=False) or [""]
        console.show_line(f"{label:<{_LABEL}}{lines[0]}")
        for line in lines[1:]:
            console.show_line(f"{'':<{_LABEL}}{line}")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
