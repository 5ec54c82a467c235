"""ProcessFunction: state and timers per key, what is emitted when, failures, and exactly-once over crashes."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import MAX_WATERMARK
from holdfast.barriers.messages import COUNTERS_MAX
from holdfast.operators.functions.process import CallableProcessFunction, ProcessFunction, ProcessOperator
from holdfast.operators.functions.schema import UNDECLARED, RowType, declared_type
from holdfast.operators.functions.selectors import key_selector
from holdfast.statebackends.errors import (
    InvalidConfigError,
    InvalidKeyError,
    InvariantError,
    UndeclaredStateError,
    UserFunctionError,
)
from holdfast.statebackends.state import ListStateDescriptor, ReducingStateDescriptor, Ttl, ValueStateDescriptor
from tests.examples import examples
from tests.operators.harness import OperatorHarness

ROWS = RowType(pa.schema([("k", pa.string()), ("v", pa.int64())]))
COUNT = ValueStateDescriptor("count", int)


def operator(function: Any, returns: Any = None, key: Any = "k", key_type: Any = None) -> ProcessOperator:
    output = UNDECLARED if returns is None else declared_type(returns, "op")
    return ProcessOperator(function, key_selector(key, key_type, ROWS, "op"), ROWS, output)


def harness(function: Any, returns: Any = None, **settings: Any) -> OperatorHarness:
    return OperatorHarness(operator(function, returns), key_type="utf8", **settings)


class RunningCount(ProcessFunction):
    states = (COUNT,)

    def open(self, ctx: Any) -> None:
        self.count = ctx.state("count")

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        count = self.count.value(0) + 1
        self.count.update(count)
        out({"k": ctx.key, "n": count})


class Sorted(ProcessFunction):
    """Emits each key's values in event-time order, at their times."""

    waiting = ListStateDescriptor("waiting", int)
    states = (waiting,)

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        ctx.state(self.waiting).add(ctx.timestamp)
        ctx.timers.register_event_time_timer(ctx.timestamp)

    def on_timer(self, timestamp_ms: int, ctx: Any, out: Any) -> None:
        waiting = ctx.state(self.waiting)
        left = [time for time in waiting.get() if time != timestamp_ms]
        for _ in range(len(waiting.get()) - len(left)):
            out((ctx.key, timestamp_ms))
        waiting.update(left)


def rows(*keys: str) -> list[dict[str, Any]]:
    return [{"k": key, "v": number} for number, key in enumerate(keys)]


def test_state_is_per_key_and_rows_are_emitted_one_by_one() -> None:
    with harness(RunningCount(), {"k": str, "n": int}) as one:
        one.process(rows("a", "b", "a"), schema=ROWS.schema)
        one.process(rows("a"), schema=ROWS.schema)
    assert one.output.rows() == [{"k": "a", "n": 1}, {"k": "b", "n": 1}, {"k": "a", "n": 2}, {"k": "a", "n": 3}]
    assert one.output.timestamps() == [None] * 4
    assert one.output.batches[0].columns().schema.names == ["k", "n"]


def test_output_takes_the_time_of_its_record_or_timer() -> None:
    class Twice(ProcessFunction):
        def process_element(self, value: Any, ctx: Any, out: Any) -> None:
            if value["v"] != 1:
                out(1)
                out(2)
            ctx.timers.register_event_time_timer(ctx.timestamp + 5)

        def on_timer(self, timestamp_ms: int, ctx: Any, out: Any) -> None:
            out((ctx.timestamp, ctx.watermark))

    with harness(Twice()) as one:
        one.process(rows("a", "b", "a"), [10, 20, 30], schema=ROWS.schema)
        assert one.output.timestamps() == [10, 10, 30, 30]
        one.watermark(25)
        assert one.output.rows()[4:] == [(15, 25), (25, 25)]
        assert one.output.timestamps()[4:] == [15, 25]
        one.watermark(MAX_WATERMARK)
        assert one.output.timestamps()[6:] == [35]


def test_a_plain_function_with_states() -> None:
    def count(value: Any, ctx: Any, out: Any) -> None:
        state = ctx.state(COUNT)
        state.update((state.value() or 0) + 1)
        out(state.value())

    with harness(CallableProcessFunction(count, (COUNT,))) as one:
        one.process(rows("a", "a", "b"), schema=ROWS.schema)
    assert one.output.rows() == [1, 2, 1]


@pytest.mark.parametrize("state", ["other", ValueStateDescriptor("other", int), ValueStateDescriptor("count", str)])
def test_an_undeclared_state_names_the_operator_and_those_declared(state: Any) -> None:
    class Asks(RunningCount):
        def process_element(self, value: Any, ctx: Any, out: Any) -> None:
            ctx.state(state)

    with harness(Asks()) as one, pytest.raises(UndeclaredStateError, match=r"'op'.*\(count\)"):
        one.process(rows("a"), schema=ROWS.schema)


def test_timers_need_on_timer_and_state_needs_a_key() -> None:
    def timer(value: Any, ctx: Any, out: Any) -> None:
        ctx.timers.register_event_time_timer(5)

    with harness(CallableProcessFunction(timer, ())) as one, pytest.raises(UndeclaredStateError, match="on_timer"):
        one.process(rows("a"), schema=ROWS.schema)

    class Early(RunningCount):
        def open(self, ctx: Any) -> None:
            ctx.state("count").value()

    with pytest.raises(InvariantError, match="no current key"), harness(Early()):
        pass


def test_an_exception_names_operator_subtask_and_record_or_timer() -> None:
    class Fails(ProcessFunction):
        def process_element(self, value: Any, ctx: Any, out: Any) -> None:
            if value["v"] == 1:
                raise KeyError("lost")
            ctx.timers.register_event_time_timer(7)

        def on_timer(self, timestamp_ms: int, ctx: Any, out: Any) -> None:
            raise RuntimeError("late")

    for stamps in (None, [1, 2]):
        with harness(Fails()) as one, pytest.raises(UserFunctionError) as caught:
            one.process(rows("a", "b"), stamps, schema=ROWS.schema)
        assert (caught.value.operator, caught.value.subtask, caught.value.record) == ("op", 0, "{'k': 'b', 'v': 1}")
        assert "KeyError" in str(caught.value)
    with harness(Fails()) as one:
        one.process(rows("a"), schema=ROWS.schema)
        with pytest.raises(UserFunctionError, match="timer 7 of key 'a'"):
            one.watermark(7)


def test_null_keys_and_key_functions_that_raise() -> None:
    with harness(RunningCount(), subtask=1, parallelism=2) as one, pytest.raises(InvalidKeyError) as caught:
        one.process([{"k": None, "v": 1}], schema=ROWS.schema)
    assert (caught.value.operator, caught.value.subtask) == ("op", 1)
    failing = OperatorHarness(operator(RunningCount(), key=lambda row: row["x"], key_type=str), key_type="utf8")
    with failing as one, pytest.raises(UserFunctionError) as failed:
        one.process(rows("a"))
    assert (failed.value.operator, failed.value.subtask, failed.value.record) == ("op", 0, "{'k': 'a', 'v': 0}")
    null = OperatorHarness(operator(RunningCount(), key=lambda row: row.get("x"), key_type=str), key_type="utf8")
    with null as one, pytest.raises(InvalidKeyError, match="'op'"):
        one.process(rows("a"))


def test_processing_time_timers_fire_with_their_key() -> None:
    class Later(ProcessFunction):
        def process_element(self, value: Any, ctx: Any, out: Any) -> None:
            ctx.timers.register_processing_time_timer(ctx.processing_time + 100)

        def on_timer(self, timestamp_ms: int, ctx: Any, out: Any) -> None:
            out((ctx.key, timestamp_ms))

    with harness(Later(), now_ms=1_000) as one:
        one.process(rows("b", "a"), schema=ROWS.schema)
        assert one.operator.next_processing_time_ms() == 1_101
        one.processing_time(1_100)
        assert one.output.rows() == []
        one.processing_time(1_101)
        assert one.output.rows() == [("a", 1_100), ("b", 1_100)]


def test_open_and_close_are_called_once_also_after_a_failure() -> None:
    calls: list[str] = []

    class Lives(ProcessFunction):
        def open(self, ctx: Any) -> None:
            calls.append(f"open {ctx.subtask}")

        def process_element(self, value: Any, ctx: Any, out: Any) -> None:
            raise ValueError

        def close(self) -> None:
            calls.append("close")

    one = harness(ProcessFunction())
    one.operator = operator(Lives())
    with one, pytest.raises(UserFunctionError):
        one.process(rows("a"), schema=ROWS.schema)
    one.operator.close()
    assert calls == ["open 0", "close"]


def test_a_snapshot_between_two_slices_of_timers_loses_and_repeats_nothing() -> None:
    keys = [f"k{number}" for number in range(1_200)]
    with harness(Sorted()) as one:
        one.process(rows(*keys), [5] * len(keys), schema=ROWS.schema)
        slices = one.watermark_slices(10)
        next(slices)
        before = one.output.rows()
        snapshot = one.snapshot()
    after = []
    for subtask in range(3):
        with OperatorHarness.restored(operator(Sorted()), [snapshot], parallelism=3, subtask=subtask, key_type="utf8") as part:
            part.watermark(6)
            after += part.output.rows()
    assert 0 < len(before) < len(keys)
    assert sorted(before + after) == sorted((key, 5) for key in keys)


STEPS = st.lists(
    st.one_of(
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), min_size=1, max_size=6),
        st.integers(0, 40),
        st.just("crash"),
        st.just("barrier"),
    ),
    max_size=15,
)


@settings(max_examples=examples(60), deadline=None)
@given(STEPS)
def test_every_timer_fires_once_over_crashes(steps: list[Any]) -> None:
    """I10: each record is emitted exactly once, however often the operator is restored from its last barrier."""
    current = harness(Sorted()).open()
    committed: list[Any] = []
    kept = (0, current.snapshot())
    crashed: set[int] = set()
    position = 0
    while position < len(steps):
        step = steps[position]
        position += 1
        if step == "barrier":
            kept = (position, current.snapshot())
            committed += current.output.rows()
            current.output.clear()
        elif step == "crash":
            if position not in crashed:
                crashed.add(position)
                current = OperatorHarness.restored(operator(Sorted()), [kept[1]], key_type="utf8").open()
                position = kept[0]
        elif isinstance(step, int):
            current.watermark(step)
        else:
            current.process([{"k": key, "v": 0} for key, _ in step], [time for _, time in step], schema=ROWS.schema)
    current.watermark(MAX_WATERMARK)
    expected = Counter(record for step in steps if isinstance(step, list) for record in step)
    assert Counter(committed + current.output.rows()) == expected


class Expiring(ProcessFunction):
    """Counts what came within a second of the record before."""

    count = ValueStateDescriptor("count", int, Ttl(1000))
    states = (count,)

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        count = ctx.state(self.count)
        count.update(count.value(0) + 1)
        out((ctx.key, count.value()))

    def on_timer(self, timestamp_ms: int, ctx: Any, out: Any) -> None:
        out((ctx.key, ctx.state(self.count).value()))


def test_state_with_a_ttl_expires_by_the_clock_of_the_operator_also_after_a_restore() -> None:
    """R23, at an operator."""
    row = [{"k": "a", "v": 1}]
    with harness(Expiring(), now_ms=5_000) as job:
        job.process(row * 2, schema=ROWS.schema)
        job.clock.now_ms = 5_999
        job.process(row, schema=ROWS.schema)
        job.clock.now_ms = 6_999
        job.process(row, schema=ROWS.schema)
        assert job.output.rows() == [("a", 1), ("a", 2), ("a", 3), ("a", 1)]
        snapshot = job.snapshot()
    for now_ms, count in ((7_998, 2), (7_999, 1)):
        with OperatorHarness.restored(operator(Expiring()), [snapshot], key_type="utf8", now_ms=now_ms) as job:
            job.process(row, schema=ROWS.schema)
            assert job.output.rows() == [("a", count)]


class Summing(ProcessFunction):
    total = ReducingStateDescriptor("total", int, lambda left, right: left + right)
    states = (total,)

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        ctx.state(self.total).add(value["v"])
        out(ctx.state(self.total).get())


def test_a_class_that_is_loaded_again_beside_a_running_job_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that travels by value is one class for the process: the next subtask's copy gives it new descriptors."""
    with harness(Summing()) as job:
        job.process([{"k": "a", "v": 1}], schema=ROWS.schema)
        again = ReducingStateDescriptor("total", int, lambda left, right: left + right)
        monkeypatch.setattr(Summing, "total", again)
        monkeypatch.setattr(Summing, "states", (again,))
        job.process([{"k": "a", "v": 2}], schema=ROWS.schema)
        assert job.output.rows() == [1, 3]


# ---------------------------------------------------------------------------------------------------- counters and logger


class Refunds(ProcessFunction):
    def open(self, ctx: Any) -> None:
        self.refunds = ctx.counter("refunds")
        ctx.logger.info("opened")

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        self.refunds.inc()
        ctx.counter("refunds.amount").inc(value["v"])


def test_counters_of_a_function_are_told_as_its_operator_s_own() -> None:
    with harness(Refunds()) as one:
        assert one.context.counters.metrics("op").counters == {"refunds": 0}, "an alarm may wait for the first one"
        one.process(rows("a", "b", "c"), schema=ROWS.schema)
        assert one.context.counters.metrics("op").counters == {"refunds": 3, "refunds.amount": 3}


@pytest.mark.parametrize("name", ["", "a b", "1st", "a\n", "\u00e4", "x" * 65, 5, None])
def test_a_name_that_is_no_counter_s_is_refused_with_the_operator(name: Any) -> None:
    with harness(Refunds()) as one, pytest.raises(InvalidConfigError, match=r"operator 'op': counter .* letters, digits") as caught:
        one.operator._context.counter(name)
    assert caught.value.operator == "op"


def test_a_counter_for_each_row_is_refused_and_told_where_such_things_belong() -> None:
    with harness(Refunds()) as one:
        context = one.operator._context
        for number in range(COUNTERS_MAX - 1):
            context.counter(f"c{number}").inc()
        with pytest.raises(InvalidConfigError, match=r"may have 64.*into state or output"):
            context.counter("one-more")
        context.counter("refunds").inc()


@pytest.mark.parametrize("count", [-1, 1.5, True, "1", None])
def test_a_counter_goes_up_by_whole_numbers(count: Any) -> None:
    class Miscounting(Refunds):
        def process_element(self, value: Any, ctx: Any, out: Any) -> None:
            self.refunds.inc(count)

    told = r"operator 'op', subtask 0: .*process_element \(.*:\d+\) raised .*: a counter goes up by .*; key 'a', record .*'a'"
    with harness(Miscounting()) as one, pytest.raises(UserFunctionError, match=told):
        one.process(rows("a"), schema=ROWS.schema)


def test_the_logger_is_named_by_job_operator_and_subtask(caplog: pytest.LogCaptureFixture) -> None:
    one = harness(Refunds(), subtask=3, parallelism=4)
    one.context.job_name = "shop v1.2"
    with caplog.at_level(logging.INFO, "holdfast.user"), one:
        pass
    assert [(each.name, each.getMessage()) for each in caplog.records] == [("holdfast.user.shop v1_2.op.3", "opened")]
