"""hf.testing.Job: the life of a job under a test's hand, its clock, checkpoints, restarts and failures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.api.testing import workers
from holdfast.barriers.elements import MAX_WATERMARK
from holdfast.operators.functions.schema import UNDECLARED
from holdfast.operators.sinks.files.parquet import read_committed
from holdfast.statebackends.snapshot.metadata import decode_metadata
from tests.api.testing.pipelines import EVENTS, Alarm, Remembering, totals, windows


@pytest.fixture
def job() -> Iterator[hf.testing.Job]:
    with hf.testing.Job(parallelism=2) as made:
        yield made


def started(job: hf.testing.Job, pipeline: Any = totals) -> tuple[hf.testing.Feed, hf.testing.Output]:
    feed = job.input("events", EVENTS)
    out = job.output(pipeline(feed.stream))
    job.start()
    return feed, out


def row(key: str, value: int) -> dict[str, Any]:
    return {"key": key, "value": value}


def total(key: str, value: int) -> dict[str, Any]:
    return {"key": key, "total": value}


# ----------------------------------------------------------------------------------------------------------------- life


def test_the_example_of_the_documentation_runs() -> None:
    def pipeline(bids: hf.Stream) -> hf.Stream:
        return bids.key_by("auction").window(hf.Tumbling(seconds=2)).aggregate(n=hf.count())

    job = hf.testing.Job(parallelism=2)
    feed = job.input("bids", {"auction": int})
    out = job.output(pipeline(feed.stream))
    job.start()
    feed.add({"auction": 1}, at=10)
    feed.watermark(1_999)
    feed.idle()
    job.advance(to_ms=5_000)
    [(first, time)] = out.take()
    assert (first["auction"], first["n"], time, out.watermark) == (1, 1, 1_999, 1_999)
    job.checkpoint()
    job.restart(parallelism=3, state_backend="rocksdb", at_ms=9_000)
    feed.end()
    assert (out.take(), out.watermark, job.status) == ([], MAX_WATERMARK, "FINISHED")
    assert out.committed() == [(first, 1_999)]
    job.close()


def test_each_call_returns_when_the_job_has_come_to_rest(job: hf.testing.Job) -> None:
    feed, out = started(job)
    feed.add(row("a", 1))
    assert out.rows() == [total("a", 1)]
    feed.add([row("a", 2), row("b", 5)])
    assert sorted(out.rows(), key=str) == [total("a", 3), total("b", 5)]
    assert out.rows() == []


def test_what_is_given_before_the_start_waits() -> None:
    with hf.testing.Job() as job:
        feed = job.input("events", EVENTS)
        out = job.output(totals(feed.stream))
        feed.add(row("a", 1), at=1)
        feed.end()
        job.start()
        assert (out.take(), job.status) == ([(total("a", 1), 1)], "FINISHED")


def test_two_jobs_run_at_once_and_know_nothing_of_each_other() -> None:
    with hf.testing.Job() as one, hf.testing.Job() as other:
        feed, out = started(one)
        other_feed, other_out = started(other)
        feed.add(row("a", 1))
        other_feed.add(row("a", 10))
        other.advance(to_ms=50)
        assert (out.rows(), other_out.rows()) == ([total("a", 1)], [total("a", 10)])
        assert (one.now_ms, other.now_ms) == (0, 50)


def test_the_folder_goes_with_the_job() -> None:
    with hf.testing.Job() as job:
        _, out = started(job)
        folder = job._folder.path
        assert os.listdir(folder)
    assert not os.path.exists(folder)
    for call in (lambda: job.advance(to_ms=1), out.committed, lambda: job.input("more")):
        with pytest.raises(hf.InvalidConfigError, match="job 'test' is closed"):
            call()


def test_the_folder_of_a_job_that_is_dropped_goes_too() -> None:
    job = hf.testing.Job()
    folder = job._folder.path
    del job
    assert not os.path.exists(folder)


def test_the_same_seed_gives_the_same_run_and_no_seed_changes_a_result() -> None:
    def run(seed: int) -> list[Any]:
        with hf.testing.Job(parallelism=3, seed=seed) as job:
            feed, out = started(job)
            feed.add([row(key, number) for number, key in enumerate("abcdefgh" * 4)])
            feed.end()
            return out.rows()

    runs = [run(seed) for seed in range(4)]
    assert run(0) == runs[0]
    assert len({str(sorted(each, key=str)) for each in runs}) == 1
    assert len({str(each) for each in runs}) > 1


@pytest.mark.parametrize("batch_rows", [1, 7, 65_536])
@pytest.mark.parametrize("backend", ["memory", "filesystem", "rocksdb"])
def test_no_result_depends_on_where_batches_end_or_on_the_state_backend(batch_rows: int, backend: Any) -> None:
    with hf.testing.Job(parallelism=2, batch_rows=batch_rows, state_backend=backend) as job:
        feed, out = started(job, windows)
        feed.add([row("ab"[number % 2], number) for number in range(40)], at=[50 * number for number in range(40)])
        feed.watermark(999)
        job.checkpoint()
        feed.end()
        found = sorted((each["key"], each["n"], each["total"], time) for each, time in out.take())
    assert found == [("a", 10, 90, 999), ("a", 10, 290, 1_999), ("b", 10, 100, 999), ("b", 10, 300, 1_999)]


def test_batches_are_as_long_as_batch_rows_allow() -> None:
    def lengths(batch_rows: int) -> list[int]:
        with hf.testing.Job(batch_rows=batch_rows) as job:
            feed = job.input("events", {"value": int})

            def count(batch: pa.RecordBatch) -> pa.RecordBatch:
                return pa.RecordBatch.from_pydict({"rows": [batch.num_rows]})

            out = job.output(feed.stream.map_batches(count, returns={"rows": int}))
            job.start()
            feed.add([{"value": number} for number in range(20)])
            return [each["rows"] for each in out.rows()]

    assert (lengths(65_536), lengths(7), lengths(1)) == ([20], [7, 7, 6], [1] * 20)


def test_a_job_whose_source_never_ends_is_still_moving() -> None:
    def forever(indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"i": pa.array(indices)})

    with hf.testing.Job(batch_rows=1, rounds_max=50) as job:
        source = hf.GeneratorSource(forever, 10**12, pa.schema([("i", pa.int64())]))
        job.output(job.environment.from_source(source).uid("numbers"))
        with pytest.raises(hf.StillMovingError, match=r"after 50 rounds and \d+ rows the job still moves: numbers\[0\]") as caught:
            job.start()
        assert (caught.value.rounds, caught.value.rows <= 400, "numbers[0]" in caught.value.moving) == (50, True, True)
    with hf.testing.Job(rows_max=500_000) as job:
        source = hf.GeneratorSource(forever, 10**12, pa.schema([("i", pa.int64())]))
        job.environment.from_source(source).sink_to(hf.Blackhole())
        with pytest.raises(hf.StillMovingError) as caught:
            job.start()
        assert 500_000 < caught.value.rows <= 500_000 + 8 * 65_536


def test_a_job_that_restarts_for_ever_is_still_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_FAILURES_MAX", 20)

    def broken(event: Any) -> Any:
        raise ValueError("never")

    with hf.testing.Job(restart=hf.RestartStrategy("fixed_delay", delay_ms=0), rounds_max=2_000) as job:
        feed = job.input("events", EVENTS)
        job.output(feed.stream.map(broken))
        job.start()
        with pytest.raises(hf.StillMovingError, match="It has failed 20 times"):
            feed.add(row("a", 1))


def test_sources_of_other_kinds_run_beside_feeds(tmp_path: Path) -> None:
    with hf.testing.Job() as job:
        rows = job.environment.from_collection([row("a", 1), row("a", 2)])
        out = job.output(totals(rows))
        rows.sink_to(hf.ParquetSink(tmp_path / "copy")).uid("copy")
        job.start()
        assert (out.rows(), job.status) == ([total("a", 1), total("a", 3)], "FINISHED")
    assert (tmp_path / "copy").exists()


# ---------------------------------------------------------------------------------------------------------------- clock


def test_a_timer_fires_once_its_time_has_passed(job: hf.testing.Job) -> None:
    feed, out = started(job, lambda stream: stream.key_by("key").process(Alarm(1_000)))
    feed.add(row("a", 1))
    job.advance(by_ms=300)
    feed.add(row("b", 1))
    assert out.rows() == []
    job.advance(to_ms=1_000)
    assert out.rows() == []
    job.advance(to_ms=1_001)
    assert out.rows() == [("a", 1_000, 1_001)]
    job.advance(to_ms=9_000)
    assert out.rows() == [("b", 1_300, 1_301)]


def test_an_overdue_timer_fires_once_when_the_job_comes_back(job: hf.testing.Job) -> None:
    feed, out = started(job, lambda stream: stream.key_by("key").process(Alarm(1_000)))
    feed.add(row("a", 1))
    job.checkpoint()
    job.restart(at_ms=7_000)
    assert out.rows() == [("a", 1_000, 7_000)]
    job.advance(to_ms=20_000)
    assert out.rows() == []


def test_state_with_a_ttl_expires_by_the_clock(job: hf.testing.Job) -> None:
    feed, out = started(job, lambda stream: stream.key_by("key").process(Remembering()))
    feed.add(row("a", 1))
    job.advance(to_ms=900)
    feed.add(row("a", 2))
    job.advance(to_ms=2_500)
    feed.add(row("a", 3))
    assert out.rows() == [("a", None), ("a", 1), ("a", None)]


def test_a_long_time_passes_at_once(job: hf.testing.Job) -> None:
    feed, out = started(job, lambda stream: stream.key_by("key").process(Alarm(86_400_000)))
    feed.add(row("a", 1))
    job.advance(by_ms=365 * 86_400_000)
    assert out.rows() == [("a", 86_400_000, 86_400_001)]


def test_periodic_checkpoints_are_taken_as_the_clock_moves() -> None:
    with hf.testing.Job(checkpoint_interval_ms=1_000) as job:
        feed, out = started(job)
        feed.add(row("a", 1))
        assert out.committed() == []
        job.advance(to_ms=5_000)
        assert out.committed() == [(total("a", 1), None)]


def test_a_paced_source_gives_its_rows_as_the_clock_moves() -> None:
    with hf.testing.Job() as job:
        rows = job.environment.from_collection([{"v": number} for number in range(20)], rows_per_second=10)
        out = job.output(rows)
        job.start()
        job.advance(to_ms=1_000)
        first = len(out.rows())
        job.advance(to_ms=1_500)
        assert (8 <= first <= 12, 3 <= len(out.rows()) <= 7) == (True, True)


# ------------------------------------------------------------------------------------------------ checkpoints, restarts


def test_a_restart_repeats_what_was_emitted_behind_the_checkpoint(job: hf.testing.Job) -> None:
    feed, out = started(job)
    feed.add(row("a", 1), at=1)
    assert job.checkpoint() == 1
    feed.add(row("a", 2), at=2)
    assert out.rows() == [total("a", 1), total("a", 3)]
    assert out.committed() == [(total("a", 1), 1)]
    job.restart()
    assert out.take() == [(total("a", 3), 2)]
    job.checkpoint()
    assert out.committed() == [(total("a", 1), 1), (total("a", 3), 2)]


def test_a_restart_without_a_checkpoint_begins_again(job: hf.testing.Job) -> None:
    feed, out = started(job)
    feed.add(row("a", 1))
    job.restart()
    feed.add(row("a", 1))
    assert out.rows() == [total("a", 1), total("a", 1), total("a", 2)]


@pytest.mark.parametrize(("before", "after"), [("memory", "filesystem"), ("filesystem", "rocksdb"), ("rocksdb", "rocksdb")])
def test_a_restart_at_another_parallelism_and_state_backend_loses_nothing(before: Any, after: Any) -> None:
    keys = "abcdefghijklmnop"
    with hf.testing.Job(parallelism=2, state_backend=before) as job:
        feed, out = started(job)
        feed.add([row(key, 1) for key in keys])
        job.checkpoint()
        feed.add([row(key, 10) for key in keys])
        job.restart(parallelism=5, state_backend=after)
        feed.add([row(key, 100) for key in keys])
        job.checkpoint()
        job.restart(parallelism=1)
        out.take()
        feed.add([row(key, 1_000) for key in keys])
        assert sorted(out.rows(), key=str) == [total(key, 1_111) for key in keys]


def test_a_savepoint_restores_on_another_state_backend_where_a_native_checkpoint_does_not() -> None:
    with hf.testing.Job(state_backend="rocksdb") as job:
        feed, out = started(job)
        feed.add(row("a", 1))
        job.checkpoint()
        with pytest.raises(hf.BackendMismatchError, match="totals"):
            job.restart(state_backend="memory")
        feed.add(row("a", 2))  # it goes on as it was
        job.restart(state_backend="memory", from_=job.savepoint())
        feed.add(row("a", 3))
        assert out.rows() == [total("a", 1), total("a", 3), total("a", 6)]


def test_a_restart_from_an_older_checkpoint_needs_leave_to_repeat_output() -> None:
    with hf.testing.Job(retained_checkpoints=2) as job:
        feed, out = started(job)
        feed.add(row("a", 1))
        first = job.checkpoint()
        feed.add(row("a", 2))
        job.checkpoint()
        with pytest.raises(hf.OutputMayRepeatError):
            job.restart(from_=first)
        job.restart(from_=first, allow_output_repeat=True)
        assert out.rows() == [total("a", 1), total("a", 3), total("a", 3)]


def test_a_savepoint_commits_nothing_and_is_no_place_to_recover_from(job: hf.testing.Job, tmp_path: Path) -> None:
    feed, out = started(job)
    feed.add(row("a", 1))
    path = job.savepoint(tmp_path)
    assert Path(path).parent == tmp_path
    assert out.committed() == []
    job.restart()
    assert out.rows() == [total("a", 1), total("a", 1)]
    assert hf.Snapshot(path).states("totals").keys() == {"total"}


def test_a_job_starts_from_the_savepoint_of_another(tmp_path: Path) -> None:
    with hf.testing.Job(parallelism=2) as job:
        feed, _ = started(job)
        feed.add([row("a", 1), row("b", 2)])
        job.checkpoint()  # so that no output waits in the savepoint for a commit
        path = job.savepoint(tmp_path)
    with hf.testing.Job("another", parallelism=3) as job:
        feed = job.input("events", EVENTS)
        out = job.output(totals(feed.stream))
        with pytest.raises(hf.SinkMovedError, match="sink 'output'"):
            job.start(from_=path)
        job.start(from_=path, sinks="fork")
        feed.add([row("a", 10), row("b", 10)])
        assert sorted(out.rows(), key=str) == [total("a", 11), total("b", 12)]


@pytest.mark.parametrize("savepoint_too", [False, True])
def test_rows_given_up_may_be_gone_at_every_attempt(tmp_path: Path, savepoint_too: bool) -> None:
    with hf.testing.Job() as job:
        feed = job.input("events", EVENTS)
        totals(feed.stream).sink_to(hf.ParquetSink(tmp_path / "old", "out"), uid="out")
        job.start()
        feed.add(row("a", 1))
        path = job.savepoint(tmp_path / "savepoints")
    staged = sorted((tmp_path / "old").rglob("staged/*"))
    assert staged
    for file in staged:
        file.unlink()
    with hf.testing.Job() as job:
        feed = job.input("events", EVENTS)
        totals(feed.stream).sink_to(hf.ParquetSink(tmp_path / "new", "out"), uid="out")
        with pytest.raises(hf.CommittablesLeftError):
            job.start(from_=path, sinks="fork")
        job.start(from_=path, sinks="abandon")
        job.fail()
        feed.add(row("a", 10))
        if savepoint_too:
            file = Path(job.savepoint(tmp_path / "savepoints")) / "_metadata"
            assert all("/new/" in entry for entry in decode_metadata(file.read_bytes(), str(file)).external)
        job.checkpoint()
        job.fail()
        feed.add(row("a", 100))
        job.checkpoint()
    assert sorted(read_committed(tmp_path / "new").column("total").to_pylist()) == [11, 111]


def test_a_stop_keeps_windows_open_and_a_drain_closes_them() -> None:
    for drain, fired in ((False, 0), (True, 1)):
        with hf.testing.Job() as job:
            feed, out = started(job, windows)
            feed.add(row("a", 1), at=10)
            location = job.stop(drain=drain)
            assert (len(out.take()), len(out.committed()), job.status) == (fired, fired, "FINISHED")
            assert Path(location).exists()


def test_a_finished_job_is_taken_up_again_from_a_savepoint() -> None:
    with hf.testing.Job() as job:
        feed, out = started(job, windows)
        feed.add(row("a", 1), at=10)
        location = job.stop()
        with pytest.raises(hf.InvalidConfigError, match="job 'test' is FINISHED"):
            feed.add(row("a", 2), at=20)
        job.restart(from_=location)
        feed.add(row("a", 2), at=20)
        feed.end()
        assert [(each["n"], time) for each, time in out.take()] == [(2, 999)]


def test_state_is_read_as_it_is_now_and_reading_changes_nothing(job: hf.testing.Job) -> None:
    feed, out = started(job)
    feed.add([row("a", 1), row("b", 2)])
    values = {each["key"]: each["value"] for each in job.state("totals")["total"]}
    assert values == {"a": 1, "b": 2}
    assert out.committed() == []
    with pytest.raises(hf.NotFoundError, match="has no completed checkpoint"):
        job.snapshot()
    number = job.checkpoint()
    assert job.snapshot().metadata.checkpoint_id == number
    feed.end()
    assert {each["key"] for each in job.state("totals")["total"]} == {"a", "b"}


# ------------------------------------------------------------------------------------------------------------- failures


def test_an_error_of_a_function_is_raised_by_the_call_during_which_it_happened(job: hf.testing.Job) -> None:
    feed, _ = started(job)
    feed.add(row("a", 1))
    job.checkpoint()
    with pytest.raises(hf.UserFunctionError, match="a poisoned row") as caught:
        feed.add(row("a", -1))
    assert caught.value.operator == "totals"
    assert caught.value.record == "{'key': 'a', 'value': -1}"
    assert isinstance(caught.value.__cause__, ValueError)
    assert job.status == "FAILED"
    with pytest.raises(hf.JobFailedError, match="a poisoned row"):
        feed.add(row("b", 1))
    with pytest.raises(hf.UserFunctionError, match="a poisoned row"):
        job.restart()  # it reads the row again
    assert {each["value"] for each in job.state("totals")["total"]} == {1}


def test_with_a_restart_strategy_a_failure_takes_its_course() -> None:
    with hf.testing.Job(restart=hf.RestartStrategy("fixed_delay", attempts_max=2, delay_ms=1_000)) as job:
        feed, out = started(job)
        feed.add(row("a", 1))
        feed.add(row("a", -1))
        assert job.status == "RESTARTING"
        with pytest.raises(hf.InvalidConfigError, match="is RESTARTING: nothing runs that could fail"):
            job.fail()
        assert out.rows() == [total("a", 1)]
        job.advance(to_ms=1_500)
        assert (job.status, job.progress("events").records_out) == ("RESTARTING", 2)
        with pytest.raises(hf.UserFunctionError, match="a poisoned row"):
            job.advance(to_ms=60_000)
        assert job.status == "FAILED"


def test_a_job_recovers_in_place(job: hf.testing.Job) -> None:
    feed, out = started(job)
    feed.add(row("a", 1))
    job.checkpoint()
    feed.add(row("a", 2))
    out.take()
    job.fail()
    assert (out.rows(), job.status) == ([total("a", 3)], "RUNNING")
    job.fail(hf.StorageUnavailableError("gone"))
    feed.add(row("a", 4))
    assert out.rows() == [total("a", 3), total("a", 7)]


def test_what_no_restart_can_mend_is_raised(job: hf.testing.Job) -> None:
    started(job)
    with pytest.raises(hf.CorruptStateError, match="bad"):
        job.fail(hf.CorruptStateError("bad"))
    assert job.status == "FAILED"


def test_an_error_that_is_none_of_ours_is_told_in_words(job: hf.testing.Job) -> None:
    started(job)

    class OddError(Exception):
        pass

    job.fail(OddError("odd"))
    assert job.status == "RUNNING"


def test_a_function_that_fails_when_it_is_opened_fails_the_start() -> None:
    class Unopened(hf.ProcessFunction):
        def open(self, ctx: Any) -> None:
            raise ValueError("no such table")

        def process_element(self, value: Any, ctx: Any, out: Any) -> None:
            pass

    with hf.testing.Job() as job, pytest.raises(hf.UserFunctionError, match="no such table"):
        started(job, lambda stream: stream.key_by("key").process(Unopened()))


def test_a_checkpoint_that_fails_says_why() -> None:
    with hf.testing.Job(memory_snapshot_bytes_max=1_024) as job:
        feed, _ = started(job)
        feed.add([row(f"key-{number}", 1) for number in range(2_000)])
        with pytest.raises(hf.CheckpointFailedError, match="SnapshotTooLargeError"):
            job.checkpoint()


def unsendable(stream: hf.Stream) -> hf.Stream:
    spoiled = stream.map(lambda value: value["key"] if value["value"] >= 0 else lambda: value).uid("spoil")
    return spoiled.broadcast().filter(lambda value: isinstance(value, str)).uid("next")


UNSENDABLE = r"^operator 'spoil', subtask \d: to operator 'next', subtask \d: a row can't be sent to another process, it can't be"


def test_rows_that_no_process_could_send_fail_between_workers(job: hf.testing.Job) -> None:
    feed, _ = started(job, unsendable)
    with pytest.raises(hf.InvalidRowError, match=UNSENDABLE) as raised:
        feed.add(row("a", -1))
    assert (raised.value.operator, raised.value.receiver, job.status) == ("spoil", "next", "FAILED")


def test_after_a_row_that_no_process_could_send_the_restart_strategy_decides() -> None:
    strategy = hf.RestartStrategy("fixed_delay", attempts_max=2, delay_ms=1_000)
    with hf.testing.Job(parallelism=2, restart=strategy) as job:
        feed, _ = started(job, unsendable)
        feed.add([row("a", -1), row("b", 1)])
        assert job.status == "RESTARTING"
        job.advance(to_ms=1_500)
        assert job.status == "RESTARTING", "the same workers came to the same row again"
        with pytest.raises(hf.InvalidRowError, match=UNSENDABLE):
            job.advance(to_ms=60_000)
        assert job.status == "FAILED"


class Odd(Exception):
    """Is pickled, and not to be made anew: Python calls it with its args."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(one)


def test_rows_that_no_process_could_receive_fail_between_workers(job: hf.testing.Job) -> None:
    feed, _ = started(job, lambda stream: stream.map(lambda value: Odd(1, 2)).uid("spoil").broadcast().filter(bool).uid("next"))
    told = UNSENDABLE.replace("sent to", "taken in by") + " unpickled: TypeError: .* missing 1 required positional argument"
    with pytest.raises(hf.InvalidRowError, match=told) as raised:
        feed.add(row("a", 1))
    assert (raised.value.operator, raised.value.receiver, job.status) == ("spoil", "next", "FAILED")


# ------------------------------------------------------------------------------------------------------------- counters


def test_counters_count_each_record_once_over_restarts(job: hf.testing.Job) -> None:
    feed, _ = started(job)
    feed.add([row("a", 1), row("b", 1)])
    job.checkpoint()
    feed.add(row("a", 1))
    job.restart()
    found = job.progress("totals")
    # A submission counts from its own start: what it read again, and what came since.
    assert (found.kind, found.records_in, found.records_out, dict(found.counters)) == ("process", 1, 1, {"seen": 1})
    feed.add(row("a", 1))
    job.fail()
    assert dict(job.progress("totals").counters) == {"seen": 2}


def test_late_records_are_counted(job: hf.testing.Job) -> None:
    feed, out = started(job, windows)
    feed.watermark(5_000)
    feed.add([row("a", 1), row("a", 2)], at=[100, 5_500])
    found = job.progress("windows")
    assert (found.late_dropped, found.late_ms_max, job.watermark("windows")) == (1, 4_900, 5_000)
    feed.end()
    assert [each["total"] for each in out.rows()] == [2]


@pytest.mark.parametrize(("mode", "results"), [("exactly_once", []), ("at_least_once", [1])])
def test_at_least_once_event_time_begins_anew_behind_a_restore(mode: Any, results: list[int]) -> None:
    """Subtasks have come to different points at such a cut: what one has passed would be late, and lost, for the others."""
    with hf.testing.Job(parallelism=2, checkpointing_mode=mode) as job:
        feeds = [job.input(name, EVENTS) for name in ("first", "second")]
        out = job.output(windows(feeds[0].stream.union(feeds[1].stream)))
        job.start()
        for feed in feeds:
            feed.watermark(5_000)
        job.checkpoint()
        job.restart()
        feeds[0].add(row("a", 1), at=100)
        for feed in feeds:
            feed.watermark(6_000)
        assert [found["n"] for found, _ in out.take()] == results


# -------------------------------------------------------------------------------------------------------------- bad use


def test_calls_before_the_start_are_refused() -> None:
    with hf.testing.Job("mine") as job:
        feed = job.input("events", EVENTS)
        with pytest.raises(hf.GraphError, match="job 'mine' has no output"):
            job.start()
        job.output(feed.stream)
        for call in (job.restart, job.checkpoint, job.savepoint, job.stop, job.fail, lambda: job.advance(by_ms=1)):
            with pytest.raises(hf.InvalidConfigError, match="job 'mine' was not started: call start"):
                call()


def test_what_belongs_before_the_start_is_refused_behind_it(job: hf.testing.Job) -> None:
    feed, _ = started(job)
    for call in (lambda: job.input("more"), lambda: job.output(feed.stream), job.start):
        with pytest.raises(hf.InvalidConfigError, match="job 'test' has started"):
            call()


@pytest.mark.parametrize("number", [True, 1.5, float("nan"), float("inf"), "2", None, 2**62])
def test_what_is_no_whole_number_is_refused_and_harms_nothing(number: Any) -> None:
    for setting in ("at_ms", "rounds_max", "rows_max"):
        if (setting, number) not in (("rounds_max", 2**62), ("rows_max", 2**62)):
            with pytest.raises(hf.InvalidConfigError, match=setting):
                hf.testing.Job(**{setting: number})
    with hf.testing.Job() as job:
        feed, out = started(job)
        if number is not None:
            for refused in (
                lambda: job.advance(by_ms=number),
                lambda: job.advance(to_ms=number),
                lambda: job.restart(at_ms=number),
                lambda: job.restart(parallelism=number),
            ):
                with pytest.raises(hf.InvalidConfigError):
                    refused()
        feed.add(row("a", 1))
        job.restart(parallelism=2)
        assert out.rows()


def test_unknown_names_are_refused_with_those_that_there_are(job: hf.testing.Job) -> None:
    started(job)
    for call in (job.state, job.watermark, job.progress):
        with pytest.raises(hf.NotFoundError, match="no operator 'nothing'; its operators are events, totals, output"):
            call("nothing")
    with pytest.raises(hf.InvalidConfigError, match="no setting 'paralellism'; did you mean 'parallelism'"):
        hf.testing.Job(paralellism=2)  # type: ignore[call-arg]


def test_a_clock_never_goes_back(job: hf.testing.Job) -> None:
    started(job)
    job.advance(to_ms=5_000)
    with pytest.raises(hf.InvalidConfigError, match="to_ms is 4999, and the clock is at 5000"):
        job.advance(to_ms=4_999)
    with pytest.raises(hf.InvalidConfigError, match="at_ms is 4000"):
        job.restart(at_ms=4_000)
    with pytest.raises(hf.InvalidConfigError, match="one of them"):
        job.advance()
    with pytest.raises(hf.InvalidConfigError, match="at_ms"):
        hf.testing.Job(at_ms=-1)


def test_a_restart_that_can_not_be_leaves_the_job_as_it_was(job: hf.testing.Job, tmp_path: Path) -> None:
    feed, out = started(job)
    feed.add(row("a", 1))
    with pytest.raises(hf.NotFoundError, match="there is no snapshot"):
        job.restart(from_=tmp_path / "nothing", parallelism=4)
    with pytest.raises(hf.InvalidConfigError, match="parallelism"):
        job.restart(parallelism=0)
    feed.add(row("a", 1))
    assert (out.rows(), job.environment.parallelism) == ([total("a", 1), total("a", 2)], 2)


def test_streams_of_another_job_and_repeated_names_are_refused() -> None:
    with hf.testing.Job() as one, hf.testing.Job() as other:
        feed = one.input("events", EVENTS)
        with pytest.raises(hf.GraphError, match="of another job"):
            other.output(feed.stream)
        with pytest.raises(hf.GraphError, match="has an input 'events' already"):
            one.input("events")


def test_spark_is_refused_by_name() -> None:
    with hf.testing.Job() as job:
        source = hf.DataFrameSource.__new__(hf.DataFrameSource)
        source.__dict__.update(name="orders", _schema=pa.schema([("id", pa.int64())]))
        job.output(job.environment._read(source, None, UNDECLARED).uid("orders"))
        with pytest.raises(hf.GraphError, match="source 'orders' reads a Spark DataFrame"):
            job.start()
