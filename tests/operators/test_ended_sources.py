"""Checkpoints when some of a job's tasks have reached the end of their input (scenarios L, docs/order.md): they take part, with
their state, until the job ends. Behind a completed checkpoint users see them as FINISHED, and a restore begins them so. In each
mode of checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.barriers.elements import Batch
from holdfast.barriers.messages import TaskState
from holdfast.operators.base import Poll
from holdfast.statebackends.state import Redistribution
from tests.examples import crossed

VALUE = {"key": str, "n": int}
SPLITS = (range(3), range(10, 16))
WAITS_AT, WAITS_MS = 12, 1_000
"""Before this number of the second split the source waits."""


MODES: dict[str, dict[str, Any]] = {
    "aligned": {},
    "unaligned": {"unaligned_checkpoints": True},
    "timeout": {"unaligned_checkpoints": True, "aligned_checkpoint_timeout_ms": 50},
    "at_least_once": {"checkpointing_mode": "at_least_once"},
}
SETTINGS: dict[str, Any] = {}
"""Of the jobs of a test: its mode."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Group L in each mode; tests of other things, with parameters of their own, too, where there is time for that."""
    aside = metafunc.definition.get_closest_marker("parametrize") is not None and not hasattr(metafunc.function, "group_l")
    modes = [pytest.param(mode, marks=[pytest.mark.endurance] * (aside and mode != "aligned")) for mode in MODES]
    metafunc.fixturenames.append("mode")
    metafunc.parametrize("mode", modes, indirect=True)


def group_l(test: Callable[..., None]) -> Callable[..., None]:
    test.group_l = True  # type: ignore[attr-defined]
    return test


@pytest.fixture
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for setting, value in MODES[request.param].items():
        monkeypatch.setitem(SETTINGS, setting, value)
    return str(request.param)


def job_of(name: str = "test", **settings: Any) -> hf.testing.Job:
    return hf.testing.Job(name, **SETTINGS, **settings)


class Total(hf.ProcessFunction):
    """Running total of each key."""

    total = hf.ValueStateDescriptor("total", int)
    states = (total,)
    returns = VALUE

    def process_element(self, row: dict[str, Any], ctx: Any, out: Any) -> None:
        total = ctx.state(self.total).value(0) + row["n"]
        ctx.state(self.total).update(total)
        out({"key": row["key"], "n": total})


class Seen(hf.ProcessFunction):
    """Keeps the numbers that it has seen as union state, and tells with each the sum of those of all subtasks at the restore."""

    seen = hf.OperatorListStateDescriptor("seen", Redistribution.UNION, int)
    states = (seen,)
    returns = {"i": int, "restored": int}  # noqa: RUF012 - the contract's class attribute

    def open(self, ctx: Any) -> None:
        entries = list(ctx.operator_list_state(self.seen).get() or ())
        self.restored = sum(entries)
        ctx.operator_list_state(self.seen).update(entries if ctx.subtask == 0 else [])

    def process_element(self, row: dict[str, Any], ctx: Any, out: Any) -> None:
        ctx.operator_list_state(self.seen).add(row["i"])
        out({"i": row["i"], "restored": self.restored})


class Numbers:
    """A source of two splits, one of which ends at once; reader and source."""

    name = "numbers"
    schema = pa.schema([pa.field("i", pa.int64(), nullable=False)])

    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> Numbers:
        reader = Numbers()
        reader.positions = {split: 0 for split in range(len(SPLITS)) if split % parallelism == subtask}
        return reader

    def open(self, context: Any, entries: list[bytes] | None) -> None:
        self.since_ms = context.monotonic_ms()
        if entries is not None:
            self.positions = {entry[0]: entry[1] for entry in entries}

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        for split, position in self.positions.items():
            if position < len(SPLITS[split]):
                number = SPLITS[split][position]
                if number == WAITS_AT and now_ms < self.since_ms + WAITS_MS:
                    return Poll(ready_at_ms=self.since_ms + WAITS_MS)
                self.positions[split] += 1
                return Poll(batch=Batch(columns=pa.RecordBatch.from_arrays([pa.array([number])], schema=self.schema)))
        return Poll(finished=True)

    def snapshot(self) -> list[bytes]:
        return [bytes(position) for position in self.positions.items()]

    def external_files(self) -> tuple[str, ...]:
        return ()

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None: ...

    def close(self) -> None: ...


class Pair:
    """A feed that ends and one that goes on: totals over both, windows of the first one alone."""

    def __init__(self, **settings: Any) -> None:
        self.job = job_of(**settings)
        self.short, self.long = (self.job.input(name, VALUE) for name in ("short", "long"))
        self.totals = self.job.output(self.short.stream.union(self.long.stream).key_by("key").process(Total()).uid("totals"))
        windows = self.short.stream.key_by("key").window(hf.Tumbling(milliseconds=100)).aggregate(n=hf.sum("n")).uid("windows")
        self.windows = self.job.output(windows)

    def __enter__(self) -> Pair:
        self.job.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.job.close()

    def committed(self) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        return tuple(sorted((row["key"], row["n"]) for row, _ in out.committed()) for out in (self.totals, self.windows))  # type: ignore[return-value]


def row(key: str, n: int) -> dict[str, Any]:
    return {"key": key, "n": n}


@group_l
@pytest.mark.parametrize("parallelism", [1, 3])
def test_checkpoints_go_on_and_commit_what_the_ended_part_has_left(parallelism: int) -> None:
    with Pair(parallelism=parallelism) as pair:
        pair.short.add([row("a", 1), row("b", 2)], at=[10, 20])
        pair.long.add(row("a", 10), at=10)
        first = pair.job.checkpoint()
        assert pair.committed() == ([("a", 1), ("a", 11), ("b", 2)], []), "the window is open"
        pair.short.end()
        assert (pair.job.status, pair.committed()[1]) == ("RUNNING", []), "fired, and not committed yet"
        second = pair.job.checkpoint()
        assert second > first
        assert pair.committed() == ([("a", 1), ("a", 11), ("b", 2)], [("a", 1), ("b", 2)]), "before the job ends"
        pair.long.add(row("b", 20), at=500)
        third = pair.job.checkpoint()
        assert third > second
        assert pair.committed()[0] == [("a", 1), ("a", 11), ("b", 2), ("b", 22)]
        pair.long.end()
        assert pair.job.status == "FINISHED"
        assert pair.committed() == ([("a", 1), ("a", 11), ("b", 2), ("b", 22)], [("a", 1), ("b", 2)])


@group_l
@pytest.mark.parametrize(("how", "parallelism"), crossed(["failure", "restart", "savepoint"], [1, 2, 3]))
def test_a_restore_goes_on_without_the_ended_part(how: str, parallelism: int, tmp_path: Path) -> None:
    """L10: what has ended is not read, fired or emitted again, at any parallelism; what goes on has all state."""
    settings = {"restart": hf.RestartStrategy()} if how == "failure" else {}
    with Pair(parallelism=2, **settings) as pair:
        pair.short.add([row("a", 1), row("b", 2), row("c", 4)], at=[10, 20, 130])
        pair.short.end()
        pair.long.add(row("a", 10), at=10)
        pair.job.checkpoint()
        before = pair.committed()
        assert before[1] == [("a", 1), ("b", 2), ("c", 4)]
        pair.long.add(row("b", 20), at=20)
        match how:
            case "failure":
                pair.job.fail(RuntimeError("a subtask"))
                pair.job.advance(by_ms=60_000)
            case "restart":
                pair.job.restart(parallelism=parallelism)
            case _:
                pair.job.restart(parallelism=parallelism, from_=pair.job.stop(str(tmp_path / "savepoints")))
        pair.long.add(row("c", 40), at=30)
        pair.job.checkpoint()
        assert pair.committed() == (sorted([*before[0], ("b", 22), ("c", 44)]), before[1])
        pair.long.end()
        assert pair.job.status == "FINISHED"
        assert pair.committed() == (sorted([*before[0], ("b", 22), ("c", 44)]), before[1])


def test_an_input_ends_while_a_checkpoint_is_pending() -> None:
    """F40: the subtask that ends acknowledges all the same; nothing is aborted."""
    with Pair(parallelism=2, checkpoint_interval_ms=100) as pair:
        for n in range(3):
            pair.short.add(row("a", 1), at=n)
            pair.long.add(row("b", 1), at=n)
            pair.job.advance(by_ms=150)
        pair.short.end()
        pair.job.advance(by_ms=250)
        pair.long.end()
        assert pair.job.status == "FINISHED"
        stats = pair.job._ask(lambda master: master.coordinator.stats.counts)
        assert (stats.failed, stats.completed >= 4) == (0, True)
        assert pair.committed()[0] == [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2), ("b", 3)]


@group_l
@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_partly_ended_operator_is_whole_at_any_parallelism(parallelism: int) -> None:
    """L08, P10: Flink stores nothing of subtasks that have ended, and so refuses union state of an operator with some. Here all of
    their state is in the checkpoint."""
    with job_of(parallelism=2) as job:
        out = job.output(job.environment.from_source(Numbers()).uid("numbers").process(Seen()).uid("seen"))
        job.start()
        assert sorted(subtask.drained for subtask in _subtasks(job)) == [False, True], "of the operator"
        job.checkpoint()
        before = [row["i"] for row, _ in out.committed()]
        assert sorted(before) == [0, 1, 2, 10, 11]
        job.restart(parallelism=parallelism)
        job.advance(by_ms=WAITS_MS)
        assert job.status == "FINISHED"
        rows = [row for row, _ in out.committed()]
        assert sorted(row["i"] for row in rows) == [*SPLITS[0], *SPLITS[1]], "no split is read again, none is left out"
        assert {row["restored"] for row in rows[len(before) :]} == {sum(before)}, "of all subtasks, ended or not"


def _subtasks(job: hf.testing.Job) -> list[Any]:
    execution = job._ask(lambda master: master.lifecycle.execution)
    assert execution is not None
    return [subtask for vertex in execution.views({}) if vertex.parallelism == 2 for subtask in vertex.subtasks]


def test_a_drained_stop_of_a_partly_ended_job() -> None:
    with Pair(parallelism=2) as pair:
        pair.short.add(row("a", 1), at=10)
        pair.short.end()
        pair.long.add(row("a", 2), at=10)
        pair.job.restart(from_=pair.job.stop(drain=True))
        pair.long.add(row("a", 4), at=2_000)
        pair.job.checkpoint()
        assert pair.committed() == ([("a", 1), ("a", 3), ("a", 7)], [("a", 1)])
        pair.long.end()
        assert pair.job.status == "FINISHED"


# -------------------------------------------------------------------------------------------------------------- FINISHED


def _states(job: hf.testing.Job) -> dict[str, set[str]]:
    """Name of each vertex -> states of its subtasks, as REST shows them."""
    execution = job._ask(lambda master: master.lifecycle.execution)
    assert execution is not None
    views = execution.views({})
    assert execution.counts() == sum((Counter(view.task_counts) for view in views), Counter())
    for view in views:
        ends = [subtask.end_ms >= 0 for subtask in view.subtasks]
        assert ends == [subtask.state is TaskState.FINISHED for subtask in view.subtasks]
        assert (view.end_ms >= 0) == all(ends)
    return {view.name: {subtask.state.value for subtask in view.subtasks} for view in views}


def _of(states: dict[str, set[str]], name: str) -> set[str]:
    return next(found for vertex, found in states.items() if vertex.startswith(name))


def test_a_task_has_finished_once_a_checkpoint_behind_its_end_is_complete() -> None:
    with Pair(parallelism=2) as pair:
        pair.short.add(row("a", 1), at=10)
        pair.job.checkpoint()
        pair.short.end()
        assert set().union(*_states(pair.job).values()) == {"RUNNING"}, "what it gave at its end is not committed"
        pair.job.savepoint()
        assert _of(_states(pair.job), "short") == {"RUNNING"}, "nor by a savepoint"
        pair.job.checkpoint()
        for _ in range(2):
            states = _states(pair.job)
            assert [_of(states, name) for name in ("short", "window", "long", "process")] == [{"FINISHED"}] * 2 + [{"RUNNING"}] * 2
            assert pair.job.snapshot().metadata.properties["finished_tasks"].count(":") == 5, "and the committer of windows"
            pair.job.restart()
            assert set().union(*_states(pair.job).values()) == {"RUNNING"}
            pair.job.checkpoint()
        pair.long.end()
        assert pair.job.status == "FINISHED"
        assert set().union(*_states(pair.job).values()) == {"FINISHED"}


def test_some_tasks_of_an_operator_have_finished() -> None:
    with job_of(parallelism=2) as job:
        job.output(job.environment.from_source(Numbers()).uid("numbers").process(Seen()).uid("seen"))
        job.start()
        job.checkpoint()
        assert _of(_states(job), "numbers") == {"RUNNING", "FINISHED"}


def test_a_drained_stop_has_finished_nothing_but_what_had_ended() -> None:
    with Pair(parallelism=1) as pair:
        pair.short.add(row("a", 1), at=10)
        pair.short.end()
        finished = hf.Snapshot(pair.job.stop(drain=True)).metadata.properties["finished_tasks"]
        assert finished.count(":") == 3, "the short source, its windows and their committer; totals and the long source go on"


class Reminders(hf.ProcessFunction):
    """A row for each key a second after its first record."""

    seen = hf.ValueStateDescriptor("seen", bool)
    states = (seen,)
    returns = VALUE

    def process_element(self, row: dict[str, Any], ctx: Any, out: Any) -> None:
        ctx.state(self.seen).update(True)
        ctx.timers.register_processing_time_timer(ctx.timers.current_processing_time + 1_000)

    def on_timer(self, timestamp_ms: int, ctx: Any, out: Any) -> None:
        out(row("reminder", timestamp_ms))


@pytest.mark.parametrize("parallelism", [1, 2, 3])
@pytest.mark.parametrize("how", ["nothing", "failure", "restart", "savepoint"])
def test_a_timer_by_the_clock_that_the_end_left_behind_fires_behind_no_restore(how: str, parallelism: int) -> None:
    with job_of(parallelism=2) as job:
        short, long = job.input("short", VALUE), job.input("long", VALUE)
        out = job.output(short.stream.key_by("key").process(Reminders()).uid("reminders"))
        other = job.output(long.stream.map(lambda each: each, returns=VALUE).uid("same"))
        job.start()
        short.add([row("a", 1), row("b", 2)])
        short.end()
        job.checkpoint()
        job.advance(by_ms=5_000)
        match how:
            case "failure":
                job.fail()
            case "restart":
                job.restart(parallelism=parallelism)
            case "savepoint":
                job.restart(parallelism=parallelism, from_=job.savepoint())
            case _:
                pass
        job.advance(by_ms=5_000)
        long.add(row("c", 3))
        long.end()
        assert (job.status, out.take(), other.rows()) == ("FINISHED", [], [row("c", 3)])


def test_timers_fire_where_a_new_source_goes_on_behind_the_end(tmp_path: Path) -> None:
    """A live run behind a backfill: the operator reads on, so that what was due while it was down is due."""

    def start(name: str, **how: Any) -> tuple[hf.testing.Job, Any, Any]:
        job = job_of("same", parallelism=2, at_ms=how.pop("at_ms", 0), retain_on_finish=True)
        feed = job.input(name, VALUE)
        out = job.output(feed.stream.key_by("key").process(Reminders()).uid("reminders"))
        job.start(**how)
        return job, feed, out

    history, feed, _ = start("history")
    with history:
        feed.add(row("a", 1))
        feed.end()
        assert history.status == "FINISHED"
        copied = hf.Snapshot(history.snapshot().location).copy(tmp_path / "copied")
        live, _feed, out = start("live", from_=copied.location, sinks="fork", allow_non_restored_state=True, at_ms=10_000)
        with live:
            live.advance(by_ms=1)
            assert out.rows() == [row("reminder", 1_000)]


@pytest.mark.parametrize("parallelism", [1, 2, 3])
@pytest.mark.parametrize("exchanged", [False, True])
def test_a_source_that_goes_on_behind_its_end_goes_on_as_from_the_start(exchanged: bool, parallelism: int, tmp_path: Path) -> None:
    """Backfill and live run of one uid: event time advances, and what was due fires, whichever subtasks the records reach."""
    by_rows = hf.WatermarkStrategy.for_bounded_out_of_orderness(0).with_timestamp_assigner("n")
    strategy = hf.WatermarkStrategy.for_ingestion_time() if exchanged else by_rows

    def start(**how: Any) -> tuple[hf.testing.Job, Any, Any, Any]:
        parallel = how.pop("parallelism", parallelism)
        settings = {"parallelism": parallel, "retain_on_finish": True, "auto_watermark_interval_ms": 200}
        job = job_of("same", at_ms=how.pop("at_ms"), **settings)
        feed = job.input("feed", VALUE)
        stream = feed.stream.global_() if exchanged else feed.stream
        stamped = stream.assign_timestamps_and_watermarks(strategy).uid("times")
        windows = job.output(stamped.key_by("key").window(hf.Tumbling(1_000)).aggregate(n=hf.count()).uid("windows"))
        reminders = job.output(feed.stream.key_by("key").process(Reminders()).uid("reminders"))
        job.start(**how)
        return job, feed, windows, reminders

    def go_on(**how: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        job, feed, windows, reminders = start(at_ms=100_000, **how)
        with job:
            for second in range(5):
                feed.add([row(key, 100_000 + 1_000 * second) for key in "abcdef"])
                job.advance(by_ms=1_000)
            return windows.rows(), reminders.rows()

    history, feed, *_ = start(at_ms=0, parallelism=2)
    with history:
        feed.add([row(key, 10) for key in "abcdefgh"])
        feed.end()
        assert history.status == "FINISHED"
        copied = hf.Snapshot(history.snapshot().location).copy(tmp_path / "copied").location
    windows, reminders = go_on(from_=copied, sinks="abandon")
    fresh, _ = go_on()
    assert (len(fresh) > 6, len(windows)) == (True, len(fresh))
    assert sorted(each["n"] for each in reminders)[:8] == [1_000] * 8, "overdue, of all subtasks"
