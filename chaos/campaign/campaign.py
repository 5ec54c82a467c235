"""A campaign: seeds over workloads, run until all are done or enough have failed; then each failure minimised and explained.

It decides which seed runs which workload, when to stop, and which runs are repeated, and it runs one request again, with all of its
faults or a part of them. It prints nothing."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from holdfast.chaos.campaign.catalogue import choose_part
from holdfast.chaos.campaign.determinism import DETERMINISM, run_twice
from holdfast.chaos.campaign.minimise import Minimised, minimise
from holdfast.chaos.campaign.runner import HANG, LIMIT_S, RUN_SEED, SIMULATOR, Outcome, SeedRunner, Task, cpu_count, quieten_logs
from holdfast.chaos.campaign.summary import Failure, Summary, Tally
from holdfast.chaos.cluster.results import RunResult, ViolationRecord
from holdfast.chaos.faults.faults import Fault

if TYPE_CHECKING:
    from holdfast.chaos.cluster.world import Run, RunRequest


FAILURES_MAX = 5
"""Failures reported in full; further ones are counted."""

RUNS_PER_PROCESS = 1_000
"""Runs after which a process is replaced: what libraries keep for good must not add up over a long campaign."""

EVENTS_SHOWN = 12
"""Last events shown of a failed run."""

TASK_FAILED = " reports failed "
"""Mark of the line of a trace that says why a subtask failed: often the user's own error, long before the run's last events."""

SALIENT = (
    "killed",
    "started",
    "left",
    "paused",
    "resumed",
    "cancelled",
    "submitted",
    "ended",
    "takes deploy",
    "reports failed",
)
"""Marks of events that show how one attempt came to follow another, beside faults."""

AFTER_CAUSE = 4
"""Such events shown behind the one in which the problem began."""

NOT_CHECKED = frozenset({SIMULATOR, HANG})
"""Violations without a checker: neither minimised, nor counted as catching a sabotage."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """What to run. Checked before: every name in it exists."""

    seeds: int
    workloads: tuple[str, ...]
    start: int = 0
    kinds: tuple[str, ...] = ()
    """Single kinds of faults; empty: all."""
    plan: tuple[Fault, ...] | None = None
    """The faults of every seed; None: drawn from it."""
    sabotage: str | None = None
    backend: str | None = None
    options: tuple[str, ...] = ()
    """Faults and plan as the user gave them, for the command that replays."""

    def workload_of(self, seed: int) -> str:
        """Seeds take turns over the workloads: a seed's workload depends on nothing but the seed and the list."""
        return self.workloads[seed % len(self.workloads)]

    def request(self, seed: int) -> RunRequest:
        """The run of a seed."""
        from holdfast.chaos.cluster.world import RunRequest  # the whole product comes with it

        return RunRequest(
            seed=seed,
            workload=self.workload_of(seed),
            kinds=self.kinds,
            plan=self.plan,
            sabotage=self.sabotage,
            backend=self.backend,
        )

    def requests(self) -> Iterator[RunRequest]:
        """All runs, in the order of their seeds."""
        return (self.request(seed) for seed in range(self.start, self.start + self.seeds))

    def replay(self, seed: int, *, invariant: str, kept: tuple[int, ...] | None) -> str:
        """The command that repeats a seed, with these faults of its plan; None: all."""
        words = ["--workload", self.workload_of(seed), *self.options]
        if self.sabotage is not None:
            words += ["--sabotage", self.sabotage]
        if self.backend is not None:
            words += ["--backend", self.backend]
        if invariant == DETERMINISM:
            return shlex.join(["holdfast", "chaos", "sim", "--start", str(seed), "--seeds", "1", *words, "--check-determinism"])
        if kept is not None:
            words += ["--only", ",".join(map(str, kept)) or "none"]
        return shlex.join(["holdfast", "chaos", "replay", str(seed), *words, "--trace", f"{seed}.trace"])


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run it: no setting here changes a seed's run."""

    jobs: int = field(default_factory=cpu_count)
    limit_s: float = LIMIT_S
    stop_after: int = 0
    """Failed runs after which it stops; 0: never. With a sabotage only failures found by a checker count."""
    check_determinism: bool = False
    minimise: bool = True
    events: int = EVENTS_SHOWN
    """Last events shown of a failed run."""
    entry: str = RUN_SEED

    def runner(self, jobs: int) -> SeedRunner:
        """Processes for runs with these settings."""
        return SeedRunner(jobs, entry=self.entry, limit_s=self.limit_s, runs_per_process=RUNS_PER_PROCESS)


class Watcher(Protocol):
    """Receives the campaign's progress."""

    def ran(self, result: RunResult, tally: Tally) -> None:
        """One more run has ended."""

    def broke(self, result: RunResult, violation: ViolationRecord, replay: str) -> None:
        """A run broke an invariant; `replay` repeats it with all its faults."""

    def looks_at(self, seed: int, what: str) -> None:
        """A seed runs again, for this purpose."""


class Unwatched:
    """Ignores all progress."""

    def ran(self, result: RunResult, tally: Tally) -> None: ...

    def broke(self, result: RunResult, violation: ViolationRecord, replay: str) -> None: ...

    def looks_at(self, seed: int, what: str) -> None: ...


class Finding(msgspec.Struct, frozen=True):
    """A campaign's result."""

    summary: Summary
    failures: tuple[Failure, ...]


def run_campaign(
    campaign: Campaign, settings: Settings, watcher: Watcher, *, sometimes: tuple[str, ...] = (), runner: SeedRunner | None = None
) -> Finding:
    """Run it, on processes of its own unless a runner is given. An interruption ends the runs, and the report covers those done."""
    tally = Tally(sometimes)
    failed: list[tuple[RunResult, ViolationRecord]] = []
    caught_after = checked = 0
    interrupted = False
    began = time.monotonic()
    try:
        with contextlib.closing(_results(campaign, settings, runner)) as results:
            for result in results:
                tally.add(result)
                watcher.ran(result, tally)
                if not result.violations:
                    continue
                found = _telling(result)
                failed.append((result, found))
                watcher.broke(result, found, campaign.replay(result.seed, invariant=found.invariant, kept=None))
                checked += found.invariant not in NOT_CHECKED
                if campaign.sabotage is not None and checked == 1 and not caught_after:
                    caught_after = tally.seeds
                if found.invariant == DETERMINISM and is_foreign(result.workload):
                    break  # violations of its other seeds would mean nothing
                if settings.stop_after and (tally.violations if campaign.sabotage is None else checked) >= settings.stop_after:
                    break
    except KeyboardInterrupt:
        interrupted = True
    summary = tally.summary(
        start=campaign.start,
        seconds=time.monotonic() - began,
        cores=min(settings.jobs, cpu_count()),
        sabotage=campaign.sabotage or "",
        caught_after=caught_after,
        interrupted=interrupted,
    )
    failed.sort(key=lambda pair: pair[1].invariant in NOT_CHECKED)
    again = replace(settings, minimise=settings.minimise and not interrupted)
    return Finding(summary, _failures(campaign, again, watcher, runner, failed[:FAILURES_MAX]))


def _telling(result: RunResult) -> ViolationRecord:
    """The violation that names a failed run: the first one that a checker found."""
    checked = [violation for violation in result.violations if violation.invariant not in NOT_CHECKED]
    return (checked or list(result.violations))[0]


def _results(campaign: Campaign, settings: Settings, runner: SeedRunner | None) -> Generator[RunResult, None, None]:
    """Results in the order of the seeds. The first seed of each workload of a user's own always runs twice."""
    requests = campaign.requests()
    if settings.check_determinism:
        outcomes = _twice(requests, settings)
    else:
        outcomes = _once(requests, campaign, settings, runner)
    with contextlib.closing(outcomes):
        for outcome in outcomes:
            yield outcome.result


def _twice(requests: Iterator[RunRequest], settings: Settings) -> Generator[Outcome, None, None]:
    tasks = map(Task, requests)
    yield from run_twice(tasks, jobs=settings.jobs, entry=settings.entry, limit_s=settings.limit_s)


def _once(
    requests: Iterator[RunRequest], campaign: Campaign, settings: Settings, runner: SeedRunner | None
) -> Generator[Outcome, None, None]:
    """Runs; the first seed of each workload from a file is checked for repeatability before any other of it."""
    foreign = {name for name in campaign.workloads if is_foreign(name)}
    checked: list[RunRequest] = []
    while foreign:
        request = next(requests, None)
        if request is None:
            break
        checked.append(request)
        foreign.discard(request.workload)
    yield from _twice(iter(checked), settings)
    with _given(runner) or settings.runner(settings.jobs) as used:
        yield from used.run(map(Task, requests))


def _given(runner: SeedRunner | None) -> contextlib.AbstractContextManager[SeedRunner] | None:
    """A given runner, which its owner closes."""
    return None if runner is None else contextlib.nullcontext(runner)


def is_foreign(workload: str) -> bool:
    """Whether the workload is a user's own: FILE.py:function."""
    return ":" in workload


def _failures(
    campaign: Campaign,
    settings: Settings,
    watcher: Watcher,
    runner: SeedRunner | None,
    failed: list[tuple[RunResult, ViolationRecord]],
) -> tuple[Failure, ...]:
    """Each failure with the faults that it takes and its last events. An interruption leaves the rest as they are."""
    failures: list[Failure] = []
    with _given(runner) or settings.runner(1) as used:
        for result, violation in failed:
            try:
                failures.append(_failure(campaign, settings, watcher, used, result, violation))
            except KeyboardInterrupt:
                settings = replace(settings, minimise=False)
                failures.append(_bare(campaign, result, violation, None))
    return tuple(failures)


def _failure(
    campaign: Campaign,
    settings: Settings,
    watcher: Watcher,
    runner: SeedRunner,
    result: RunResult,
    violation: ViolationRecord,
) -> Failure:
    if violation.invariant in NOT_CHECKED or violation.invariant == DETERMINISM:
        return _bare(campaign, result, violation, None)
    request = campaign.request(result.seed)
    small: Minimised | None = None
    if settings.minimise and result.plan:
        watcher.looks_at(result.seed, "minimise")

        def run(kept: tuple[int, ...]) -> RunResult:
            return runner.run_one(Task(replace(request, plan=_part(result.plan, kept)))).result

        small = minimise(result, violation.invariant, run)
        request = replace(request, plan=_part(result.plan, small.kept))
    if not settings.events:
        return _bare(campaign, result, violation, small)
    watcher.looks_at(result.seed, "events")
    told = runner.run_one(Task(request, None))
    now = next((found for found in told.result.violations if found.invariant == violation.invariant), violation)
    failures = [line for line in told.events if TASK_FAILED in line]
    return msgspec.structs.replace(
        _bare(campaign, result, now, small),
        events=tuple(event.partition("\n")[0] for event in _shown(told.events, now, settings.events)),
        around_cause=now.cause_ms is not None,
        task_failure=failures[-1] if failures else "",
    )


def _shown(events: Sequence[str], violation: ViolationRecord, count: int) -> Sequence[str]:
    """The last events, or those around the cause, and the event of the violation."""
    if violation.cause_ms is None:
        return events[-count:]
    story = [line for line in events if _is_salient(line)]
    begun = next((place for place, line in enumerate(story) if float(line.split(None, 1)[0]) >= violation.cause_ms), len(story))
    stop = min(len(story), begun + AFTER_CAUSE)
    found = [line for line in events if f"VIOLATION {violation.invariant}" in line]
    return [*story[max(0, stop - count + 1) : stop], *found[:1]]


def _is_salient(line: str) -> bool:
    _, actor, event = (*line.split(None, 2), "", "")[:3]
    return actor == "fault" or event.startswith(SALIENT)


def _bare(campaign: Campaign, result: RunResult, violation: ViolationRecord, small: Minimised | None) -> Failure:
    kept = tuple(range(len(result.plan))) if small is None else small.kept
    return Failure(
        result.seed,
        result.workload,
        violation.invariant,
        violation.message,
        campaign.replay(result.seed, invariant=violation.invariant, kept=None if len(kept) == len(result.plan) else kept),
        at_ms=violation.at_ms,
        faults={index: result.plan[index] for index in kept},
        planned=len(result.plan),
        minimised=small is not None and small.complete,
        runs=0 if small is None else small.runs,
    )


def _part(plan: tuple[Fault, ...], kept: tuple[int, ...]) -> tuple[Fault, ...]:
    return tuple(plan[index] for index in kept)


def replay_seed(request: RunRequest, only: str | None) -> Run:
    """Run a seed in this process. `only`: these faults of its plan, which takes a run to find out if it is drawn.

    Raises InvalidConfigError for faults that are not in it, and the run's own errors."""
    from holdfast.chaos.campaign.user_runs import run_seed

    quieten_logs()
    if only is None:
        return run_seed(request)
    plan = request.plan if request.plan is not None else run_seed(request).result.plan
    return run_seed(replace(request, plan=choose_part(only, plan)))
