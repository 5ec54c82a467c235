"""Asynchronous I/O: order, capacity, timeouts and attempts, and that requests in flight are state that no barrier waits for."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import MAX_WATERMARK, Batch, CheckpointBarrier, EndOfData, Watermark, WatermarkStatus
from holdfast.operators.base import JobPlan, UserCall
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions.async_map import REQUESTS, STALE_TIMERS_MAX, AsyncMapOperator, Request, RetryStrategy
from holdfast.operators.functions.schema import UNDECLARED, declared_type
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.operators.task.pool import ThreadPool
from holdfast.statebackends.errors import (
    AsyncTimeoutError,
    GraphError,
    IncompatibleStateError,
    InvalidConfigError,
    TooManyRowsSkippedError,
    UserFunctionError,
)
from holdfast.statebackends.storage.port import Storage
from tests.examples import examples
from tests.harness.mini import MiniCluster
from tests.operators.ends import NamedSink, NamedSource
from tests.operators.harness import OperatorHarness
from tests.operators.ports import DictStorage
from tests.operators.runtime import Bench
from tests.operators.worker.test_loop import run_through_crashes

ROWS = declared_type({"n": int}, "rows")


def rows(*numbers: int) -> list[dict[str, int]]:
    return [{"n": number} for number in numbers]


def twice(row: Any) -> dict[str, int]:
    return {"n": row["n"] * 2}


def operator(function: Any = twice, **settings: Any) -> AsyncMapOperator:
    return AsyncMapOperator(function, ROWS, ROWS, **{"timeout_ms": 1_000, **settings})


def asking(**settings: Any) -> Bench:
    return Bench([operator(**{"timeout_ms": 10**9, **settings})], channels=1).started()


def offer(bench: Bench, *numbers: int) -> None:
    bench.gate.offer(0, Batch(rows=rows(*numbers), schema=ROWS.schema), 64)


class Calls(OperatorHarness):
    """A harness whose calls a test answers."""

    def put(self, *numbers: int, at: int | None = None) -> None:
        self.process(rows(*numbers), None if at is None else [at] * len(numbers), ROWS.schema)

    @property
    def asked(self) -> list[Any]:
        """Of the calls that wait for an answer."""
        return [call.argument["n"] if isinstance(call.argument, dict) else call.argument for call, _ in self.pool.calls]

    def answer(self, *numbers: int, error: Exception | None = None) -> None:
        """Calls for these rows return, or raise, in this order; then the operator has its turns."""
        for number in numbers:
            found = next(each for each in self.pool.calls if each[0].argument == {"n": number})
            self.pool.calls.remove(found)
            call, ended = found
            ended(None if error else call.function(call.argument), error)
        self.turn()

    def turn(self, after_ms: int = 0) -> None:
        self.clock.now_ms += after_ms
        while (mail := self.context.mailbox.take()) is not None:
            mail.done(mail.result, mail.error)  # type: ignore[union-attr]
        while (due := self.operator.next_processing_time_ms()) is not None and due <= self.clock.now_ms:
            for _ in self.operator.process_processing_time(self.clock.now_ms):
                pass

    def out(self) -> list[Any]:
        """Numbers and watermarks that were emitted, in order."""
        found: list[Any] = []
        for element in self.output.elements:
            found += [f"w{element}"] if isinstance(element, int) else [row["n"] for row in element.rows()]
        self.output.clear()
        return found


# ------------------------------------------------------------------------------------------------------------------ order


def test_ordered_results_keep_the_order_of_their_rows() -> None:
    with Calls(operator()) as calls:
        calls.put(1, 2, 3, at=10)
        calls.watermark(10)
        calls.put(4, at=20)
        calls.answer(4, 3, 2)
        assert calls.out() == []
        calls.answer(1)
        assert calls.output.timestamps() == [10, 10, 10, 20]
        assert calls.out() == [2, 4, 6, "w10", 8]
        assert not calls.operator.has_requests()


def test_unordered_results_leave_at_once_and_cross_no_watermark() -> None:
    with Calls(operator(ordered=False)) as calls:
        calls.put(1, 2, 3)
        calls.watermark(10)
        calls.watermark(12)
        calls.put(4)
        calls.answer(3, 4)
        assert calls.out() == [6]
        calls.answer(1)
        assert calls.out() == [2]
        calls.answer(2)
        assert calls.out() == [4, "w12", 8]


def test_a_watermark_without_requests_in_front_passes() -> None:
    with Calls(operator()) as calls:
        calls.watermark(5)
        calls.turn()
        assert calls.out() == ["w5"]


def test_behind_a_call_that_hangs_nothing_is_kept_of_those_that_are_answered() -> None:
    with Calls(operator(ordered=False, capacity=100, timeout_ms=10**9)) as calls:
        calls.put(0)
        for number in range(1, 2_501):
            calls.put(number)
            calls.answer(number)
        calls.output.clear()
        segment = calls.operator._segments[0]
        assert len([each for each in gc.get_objects() if isinstance(each, Request) and each.segment is segment]) == 1
        assert len(calls.operator._timers) <= STALE_TIMERS_MAX + 2
        with pytest.raises(AsyncTimeoutError):  # the one that hangs has its timeout all the same
            calls.turn(after_ms=10**9)


# --------------------------------------------------------------------------------------------------------------- capacity


def test_beyond_its_capacity_it_takes_no_input() -> None:
    with Calls(operator(capacity=2)) as calls:
        assert calls.operator.takes_input()
        calls.put(1, 2)
        assert calls.operator.takes_input()
        calls.put(3, 4)
        assert not calls.operator.takes_input()
        assert calls.asked == [1, 2]
        calls.answer(2)
        assert calls.asked == [1]  # its result still waits for the first, and counts
        calls.answer(1)
        assert calls.asked == [3, 4]
        assert calls.operator.takes_input()


def test_a_full_subtask_lets_barriers_and_mails_in_and_counts_as_backpressured() -> None:
    bench = asking(capacity=1)
    offer(bench, 1, 2)
    bench.run()
    bench.events(0, CheckpointBarrier(1, 1_000, folder="chk-1"))
    bench.run()
    assert [type(each).__name__ for each in bench.port.elements] == ["CheckpointBarrier"]
    offer(bench, 3)
    bench.run()
    assert [call.argument["n"] for call, _ in bench.pool.calls] == [1]
    assert bench.subtask._input.is_full
    bench.clock.now_ms += 40
    bench.run()
    assert bench.subtask.metrics().backpressured_ms >= 40
    answer(bench, 1)
    answer(bench, 2)
    assert [call.argument["n"] for call, _ in bench.pool.calls] == [3]
    assert not bench.subtask._input.is_full


# ------------------------------------------------------------------------------------------------------ errors and timeouts


def test_an_error_names_operator_and_row() -> None:
    with Calls(operator()) as calls:
        calls.put(7)
        with pytest.raises(UserFunctionError, match=r"operator 'op', subtask 0.*KeyError.*record \{'n': 7\}"):
            calls.answer(7, error=KeyError("gone"))


def test_a_call_without_an_answer_times_out() -> None:
    with Calls(operator()) as calls:
        calls.put(7)
        calls.turn(after_ms=999)
        with pytest.raises(AsyncTimeoutError, match=r"operator 'op', subtask 0: no answer in 1000 ms.*\{'n': 7\}") as raised:
            calls.turn(after_ms=1)
        assert (raised.value.operator, raised.value.subtask, raised.value.timeout_ms) == ("op", 0, 1_000)
        assert calls.pool.calls[0][0].is_abandoned


def test_rows_whose_calls_fail_may_be_skipped() -> None:
    with Calls(operator(skips=True)) as calls:
        calls.context.skipped_rows_max = 2
        calls.put(1, 2, 3)
        calls.answer(1, error=ValueError("no"))
        calls.answer(2)
        calls.turn(after_ms=1_000)
        assert calls.out() == [4]
        assert calls.context.counters.rows_skipped == 2
        calls.put(4)
        with pytest.raises(TooManyRowsSkippedError):
            calls.turn(after_ms=1_000)


def test_a_late_answer_is_dropped() -> None:
    with Calls(operator(skips=True)) as calls:
        calls.context.skipped_rows_max = None
        calls.put(1)
        calls.turn(after_ms=1_000)
        calls.answer(1)
        assert calls.out() == []
        assert not calls.operator.has_requests()


def test_attempts_follow_each_other_and_an_older_answer_is_dropped() -> None:
    retry = RetryStrategy(attempts_max=3, delay_ms=100, multiplier=2.0)
    with Calls(operator(retry=retry)) as calls:
        calls.put(1)
        calls.answer(1, error=OSError("down"))
        assert calls.asked == []
        calls.turn(after_ms=99)
        assert calls.asked == []
        calls.turn(after_ms=1)
        assert calls.asked == [1]
        older = calls.pool.calls[0]
        calls.turn(after_ms=1_000)  # the second attempt times out
        assert calls.asked == [1]
        calls.turn(after_ms=200)
        assert calls.asked == [1, 1]
        older[1]({"n": -1}, None)
        calls.turn()
        assert calls.out() == []
        del calls.pool.calls[0]
        calls.answer(1)
        assert calls.out() == [2]


def test_an_attempt_has_nothing_of_what_the_one_before_changed_in_its_row() -> None:
    with Calls(operator(retry=RetryStrategy(attempts_max=3, delay_ms=0))) as calls:
        calls.put(1, 5)
        first, ended = calls.pool.calls.pop(0)
        first.argument["n"] += 10
        ended(None, OSError("down"))
        calls.turn()
        assert calls.asked == [5, 1]
        first.argument["n"] += 10  # behind its timeout, say
        calls.answer(1, 5)
        assert calls.out() == [2, 10]


def test_the_last_attempt_fails_for_good() -> None:
    with Calls(operator(retry=RetryStrategy(attempts_max=2, delay_ms=0, on=(OSError,)))) as calls:
        calls.put(1)
        calls.answer(1, error=OSError("down"))
        with pytest.raises(UserFunctionError, match="down"):
            calls.answer(1, error=OSError("down"))
    with Calls(operator(retry=RetryStrategy(on=(OSError,)))) as calls:
        calls.put(1)
        with pytest.raises(UserFunctionError, match="ValueError"):
            calls.answer(1, error=ValueError("another kind"))


def test_a_result_may_be_asked_for_again() -> None:
    with Calls(operator(retry=RetryStrategy(2, 0, if_result=lambda row: row["n"] == 2))) as calls:
        calls.put(1)
        calls.answer(1)
        assert (calls.out(), calls.asked) == ([], [1])
        calls.answer(1)
        assert calls.out() == [2]


@pytest.mark.parametrize(
    ("retry", "pauses"),
    [
        (RetryStrategy(delay_ms=50), [50, 50, 50]),
        (RetryStrategy(delay_ms=50, multiplier=3, delay_ms_max=200), [50, 150, 200]),
        (RetryStrategy(delay_ms=0), [0, 0, 0]),
    ],
)
def test_pauses_between_attempts(retry: RetryStrategy, pauses: list[int]) -> None:
    assert [retry.pause_ms(attempt) for attempt in (1, 2, 3)] == pauses


@pytest.mark.parametrize("setting", [{"attempts_max": 0}, {"delay_ms": -1}, {"multiplier": 0.5}, {"delay_ms": 1.5}])
def test_a_retry_strategy_out_of_bounds_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError, match=f"{next(iter(setting))} of a RetryStrategy"):
        RetryStrategy(**setting)


# -------------------------------------------------------------------------------------------------------------- batch-wise


def test_rows_may_go_together() -> None:
    with Calls(operator(lambda found: [twice(row) for row in found], batch_rows=2)) as calls:
        calls.put(1, 2, 3)
        assert calls.asked == [rows(1, 2), rows(3)]
        for call, ended in calls.pool.calls:
            ended(call.function(call.argument), None)
        calls.turn()
        assert calls.out() == [2, 4, 6]


def test_a_batch_gives_a_result_for_each_row() -> None:
    with Calls(operator(lambda found: found[:1], batch_rows=2)) as calls:
        calls.put(1, 2)
        calls.pool.calls[0][1](rows(1), None)
        with pytest.raises(UserFunctionError, match="returned 1 results for 2 rows"):
            calls.turn()


def test_of_a_batch_the_rows_without_a_result_are_left_out_and_no_others() -> None:
    def some(found: list[dict[str, int]]) -> list[Any]:
        return [twice(row) if row["n"] % 2 else None for row in found]

    with Calls(operator(some, batch_rows=4, skips=True)) as calls:
        calls.context.skipped_rows_max = 3
        calls.put(1, 2, 3, 4, at=7)
        calls.put(6, 8, at=8)
        call, ended = calls.pool.calls[0]
        ended(call.function(call.argument), None)
        calls.turn()
        (batch,) = calls.output.elements
        assert isinstance(batch, Batch)
        assert batch.timestamps is not None
        assert batch.timestamps.tolist() == [7, 7]
        assert calls.out() == [2, 6]
        assert calls.context.counters.rows_skipped == 2
        call, ended = calls.pool.calls[1]
        ended(call.function(call.argument), None)
        with pytest.raises(TooManyRowsSkippedError, match=r"returned None.*record \{'n': 8\}"):
            calls.turn()


def test_a_forgotten_return_is_told() -> None:
    with Calls(operator()) as calls:
        calls.put(1)
        calls.pool.calls[0][1](None, None)
        with pytest.raises(UserFunctionError, match="returned None"):
            calls.turn()


# ------------------------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("ordered", [True, False])
def test_requests_in_flight_are_state_and_go_first(ordered: bool) -> None:
    with Calls(operator(ordered=ordered, capacity=3)) as calls:
        calls.put(1, 2, at=10)
        calls.watermark(10)
        calls.put(3, 4, 5, at=20)
        calls.answer(1)
        assert calls.out() == [2]
        snapshot = calls.snapshot()
    with Calls.restored(operator(ordered=ordered), [snapshot]) as calls:
        calls.put(6, at=30)
        assert calls.asked == [2, 3, 4, 5, 6]
        calls.answer(3, 2, 4, 5, 6)
        assert calls.output.timestamps() == [10, 20, 20, 20, 30]
        assert calls.out() == [4, "w10", 6, 8, 10, 12]
        assert calls.snapshot().lists == {REQUESTS.name: []}


def test_a_watermark_that_waits_alone_is_state() -> None:
    with Calls(operator()) as calls:
        calls.put(1)
        calls.watermark(10)
        snapshot = calls.snapshot()
    with Calls.restored(operator(), [snapshot]) as calls:
        calls.answer(1)
        assert calls.out() == [2, "w10"]


def test_behind_a_rescale_rows_are_dealt_without_their_watermarks() -> None:
    snapshots = []
    for subtask in (0, 1):
        with Calls(operator(), subtask=subtask, parallelism=2) as calls:
            calls.put(1 + 10 * subtask, 2 + 10 * subtask)
            calls.watermark(50 * (1 + subtask))
            calls.put(3 + 10 * subtask)
            snapshots.append(calls.snapshot())
    asked = []
    for subtask in range(3):
        with Calls.restored(operator(), snapshots, subtask=subtask, parallelism=3) as calls:
            asked += calls.asked
            calls.answer(*calls.asked)
            assert not any(isinstance(each, str) for each in calls.out())
    assert sorted(asked) == [1, 2, 3, 11, 12, 13]


def test_stored_rows_of_other_columns_are_refused() -> None:
    with Calls(operator()) as calls:
        calls.put(1)
        snapshot = calls.snapshot()
    other = declared_type({"m": int}, "op")
    with pytest.raises(IncompatibleStateError, match=r"operator 'op'.*in flight.*'n'.*'m'"):
        Calls.restored(AsyncMapOperator(twice, other, ROWS), [snapshot]).open()


# ------------------------------------------------------------------------------------------------------------- the subtask


def names(bench: Bench) -> list[Any]:
    found = [each["n"] if isinstance(each, dict) else type(each).__name__ for each in bench.port.elements]
    bench.port.elements.clear()
    return found


def answer(bench: Bench, number: int) -> None:
    found = next(each for each in bench.pool.calls if each[0].argument["n"] == number)
    bench.pool.calls.remove(found)
    found[1](found[0].function(found[0].argument), None)
    bench.run()


def test_the_end_of_the_input_waits_for_answers_and_a_barrier_does_not() -> None:
    bench = asking(ordered=False)
    offer(bench, 1)
    bench.events(0, Watermark(5))
    offer(bench, 2)
    bench.events(0, Watermark(MAX_WATERMARK), EndOfData(), CheckpointBarrier(1, 1_000, folder="chk-1"))
    bench.run()
    assert names(bench) == ["CheckpointBarrier"]  # the requests are in its snapshot, and the end of data comes again behind it
    answer(bench, 2)
    assert names(bench) == []
    answer(bench, 1)
    assert names(bench) == [2, "Watermark", 4, "Watermark", "EndOfData"]


def test_a_barrier_passes_while_the_end_of_event_time_waits() -> None:
    bench = asking()
    offer(bench, 1)
    bench.events(0, Watermark(MAX_WATERMARK), CheckpointBarrier(1, 1_000, folder="chk-1"))
    bench.run()
    assert names(bench) == ["CheckpointBarrier"]
    answer(bench, 1)
    assert names(bench) == [2, "Watermark"]


def test_silence_is_told_behind_the_answers() -> None:
    bench = asking()
    offer(bench, 1)
    bench.events(0, WatermarkStatus(idle=True))
    bench.run()
    assert names(bench) == []
    answer(bench, 1)
    assert names(bench) == [2, "WatermarkStatus"]


def test_a_stop_without_a_drain_waits_for_nothing() -> None:
    bench = asking()
    offer(bench, 1)
    bench.events(0, EndOfData(drain=False))
    bench.run()
    assert names(bench) == ["EndOfData"]
    answer(bench, 1)
    assert names(bench) == []  # nothing leaves behind the end of data


# -------------------------------------------------------------------------------------------------------------- the graph


def stream(schema: pa.Schema | None = ROWS.schema) -> Stream:
    return Environment("job").from_source(NamedSource(schema, "rows")).uid("rows")


def test_it_begins_a_chain() -> None:
    asked = stream().async_map(twice, returns=ROWS.schema).uid("asked")
    asked.sink_to(NamedSink(), uid="out")
    vertices = asked.environment.build().graph.vertices
    assert [[each.uid for each in vertex.operators] for vertex in vertices][:2] == [["rows"], ["asked", "out"]]
    assert [(state.name, state.kind) for state in vertices[1].operators[0].states] == [("requests", "operator_list")]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"capacity": 0}, r"'async_map': capacity must be 1\.\.100000"),
        ({"capacity": 10**9}, "'async_map': capacity"),
        ({"timeout_ms": 0}, "'async_map': timeout_ms"),
        ({"batch_rows": 0}, "'async_map': batch_rows"),
        ({"retry": 3}, r"'async_map': retry is a hf\.RetryStrategy"),
        ({"on_error": "drop"}, "'async_map': on_error"),
    ],
)
def test_settings_out_of_bounds_are_refused_when_the_graph_is_built(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(GraphError, match=problem):
        stream().async_map(twice, **settings)


def test_rows_in_flight_must_be_declared() -> None:
    with pytest.raises(GraphError, match="'async_map' needs columns"):
        stream(None).async_map(twice)
    assert UNDECLARED.schema is None


# -------------------------------------------------------------------------------------------------------------- real calls


async def slow_twice(row: dict[str, int]) -> dict[str, int]:
    await asyncio.sleep(0.001)
    return {"n": row["n"] * 2}


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)


@pytest.mark.parametrize("function", [slow_twice, twice])
def test_calls_run_on_an_event_loop_or_in_threads(function: Any) -> None:
    pool, found = ThreadPool(), []
    try:
        for number in range(50):
            call = UserCall(function, {"n": number}, is_coroutine=function is slow_twice)
            pool.run_call(call, lambda result, error: found.append((result, error)))
        until(lambda: len(found) == 50)
        assert sorted(result["n"] for result, _ in found) == [2 * number for number in range(50)]
        until(lambda: not pool._calls._tasks)  # nothing is kept of a call that has ended
    finally:
        pool.close()


def test_a_call_that_never_returns_holds_up_neither_others_nor_the_end() -> None:
    pool, found, never = ThreadPool(), [], threading.Event()
    try:
        for _ in range(8):
            pool.run_call(UserCall(lambda row: never.wait(), 0, is_coroutine=False), lambda result, error: None)
        pool.run(lambda: 5, lambda result, error: found.append(result))
        pool.run_call(UserCall(lambda row: row, 6, is_coroutine=False), lambda result, error: found.append(result))
        until(lambda: len(found) == 2)
        assert sorted(found) == [5, 6]
    finally:
        never.set()
        pool.close()


def test_an_abandoned_coroutine_is_cancelled() -> None:
    pool, started, cancelled = ThreadPool(), threading.Event(), threading.Event()

    async def forever(row: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    try:
        call = UserCall(forever, 0, is_coroutine=True)
        pool.run_call(call, lambda result, error: None)
        assert started.wait(10)
        call.abandon()
        assert cancelled.wait(10)
        until(lambda: not pool._calls._tasks)
    finally:
        pool.close()


def test_an_error_of_a_call_is_its_answer() -> None:
    pool, found = ThreadPool(), []

    async def fails(row: Any) -> None:
        raise KeyError(row)

    def fails_too(row: Any) -> None:
        raise KeyError(row)

    try:
        for function in (fails, fails_too):
            pool.run_call(UserCall(function, 1, is_coroutine=function is fails), lambda result, error: found.append(type(error)))
        until(lambda: len(found) == 2)
        assert found == [KeyError, KeyError]
    finally:
        pool.close()


# -------------------------------------------------------------------------------------------------------------- whole jobs

OUTPUTS: dict[str, DictStorage] = {}
NUMBERS: Any = ROWS.schema


def open_output(path: str) -> Storage:
    return OUTPUTS.setdefault(path, DictStorage(root=path))


def numbers(indices: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(np.asarray(indices))], schema=NUMBERS)


def async_job(path: str, parallelism: int, count: int, *, ordered: bool) -> JobPlan:
    OUTPUTS.pop(path, None)
    env = Environment("async", parallelism=parallelism, channel_credit_batches=2, step_budget_ms=1)
    source = env.from_source(GeneratorSource(numbers, count, NUMBERS, batch_rows=9)).uid("in")
    asked = source.async_map(twice, ordered=ordered, capacity=7, returns=NUMBERS).uid("asked")
    asked.sink_to(ParquetSink(path, "out", open_storage=open_output), uid="sink")
    return env.build()


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    crashes=st.lists(st.integers(20, 400), max_size=2),
    parallelism=st.sampled_from([1, 3]),
    ordered=st.booleans(),
)
def test_every_row_has_one_result_through_crashes(
    tmp_path: Path, seed: int, crashes: list[int], parallelism: int, ordered: bool
) -> None:
    path, count = "mem://async", 150
    plan = async_job(path, parallelism, count, ordered=ordered)
    cluster = MiniCluster(plan, DictStorage(), local_directory=str(tmp_path), seed=seed)
    run_through_crashes(cluster, crashes)
    found = read_committed(path, "out", open_storage=open_output)["n"].to_pylist()
    assert sorted(found) == [2 * number for number in range(count)]
