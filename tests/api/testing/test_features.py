"""What else of the product runs under hf.testing.Job: sinks of the user's own, several outputs, aggregates, failures at random."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.operators.sinks.files.parquet import read_committed
from tests.api.testing.pipelines import EVENTS, totals, windows
from tests.examples import examples


def row(key: str, value: int) -> dict[str, Any]:
    return {"key": key, "value": value}


class Misfit(hf.ProcessFunction):
    side_outputs = (hf.OutputTag("side", returns={"n": int}),)
    returns: ClassVar[Any] = {"n": int}

    def process_element(self, value: Any, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        if value["value"]:
            ctx.output("side", {"n": "no number"})
        else:
            out({"n": "no number"})


@pytest.mark.parametrize("value", [0, 1])
def test_a_row_that_does_not_fit_the_declared_columns_fails_as_in_any_sink(value: int) -> None:
    with hf.testing.Job() as job:
        feed = job.input("events", EVENTS)
        rows = feed.stream.key_by("key").process(Misfit()).uid("misfit")
        job.output(rows.side_output("side") if value else rows)
        job.start()
        with pytest.raises(hf.SchemaMismatchError, match="misfit"):
            feed.add({"key": "a", "value": value})


@pytest.mark.parametrize("backend", ["memory", "filesystem", "rocksdb"])
def test_a_parquet_sink_has_each_row_once_over_a_crash_and_a_rescale(tmp_path: Path, backend: Any) -> None:
    with hf.testing.Job(parallelism=2, state_backend=backend) as job:
        feed = job.input("events", EVENTS)
        totals(feed.stream).sink_to(hf.ParquetSink(tmp_path / "out")).uid("sink")
        job.start()
        feed.add([row("a", 1), row("b", 2)])
        job.checkpoint()
        feed.add([row("a", 10), row("b", 20)])
        job.fail()
        feed.add([row("a", 100), row("b", 200)])
        job.restart(parallelism=3)
        feed.end()
        assert job.status == "FINISHED"
    found = read_committed(tmp_path / "out").to_pylist()
    assert sorted((each["key"], each["total"]) for each in found) == [
        ("a", 1), ("a", 11), ("a", 111), ("b", 2), ("b", 22), ("b", 222),
    ]  # fmt: skip


def test_several_outputs_of_one_stream_see_the_same_rows() -> None:
    with hf.testing.Job(parallelism=2) as job:
        feed = job.input("events", EVENTS)
        made = totals(feed.stream)
        one, other = job.output(made), job.output(made.filter(lambda each: each["total"] > 1), "large")
        job.start()
        feed.add([row("a", 1), row("a", 1)])
        assert ([each["total"] for each in one.rows()], [each["total"] for each in other.rows()]) == ([1, 2], [2])
        job.checkpoint()
        assert (len(one.committed()), len(other.committed()), other.uid) == (2, 1, "large")


def test_running_aggregates_and_functions_of_batches_run() -> None:
    with hf.testing.Job(parallelism=2) as job:
        feed = job.input("events", EVENTS)
        out = job.output(feed.stream.key_by("key").aggregate(total=hf.sum("value"), n=hf.count()))
        job.start()
        feed.add([row("a", 1), row("a", 2)], to=0)
        feed.add(row("a", 3))
        assert out.rows() == [{"key": "a", "total": 3, "n": 2}, {"key": "a", "total": 6, "n": 3}]


def test_event_times_may_be_assigned_behind_a_feed() -> None:
    with hf.testing.Job() as job:
        feed = job.input("events", EVENTS)
        out = job.output(windows(feed.stream.assign_timestamps("value", 100).uid("times")))
        job.start()
        feed.add([row("a", 10), row("a", 500)])
        feed.add(row("a", 1_200))
        assert ([each["n"] for each in out.rows()], job.watermark("times"), out.watermark) == ([2], 1_099, 1_099)


def test_what_a_function_remembers_beside_its_state_is_lost_at_a_restart() -> None:
    class Forgetful(hf.RichFunction):
        def open(self, ctx: Any) -> None:
            self.seen = 0

        def __call__(self, value: Any) -> int:
            self.seen += 1
            return self.seen

    with hf.testing.Job() as job:
        feed = job.input("events", EVENTS)
        out = job.output(feed.stream.map(Forgetful()))
        job.start()
        feed.add([row("a", 1), row("a", 1)])
        job.checkpoint()
        job.restart()
        feed.add(row("a", 1))
        assert out.rows() == [1, 2, 1]


def test_a_job_runs_on_the_thread_of_its_test() -> None:
    before = threading.active_count()
    with hf.testing.Job(parallelism=3, state_backend="filesystem") as job:
        feed = job.input("events", EVENTS)
        job.output(totals(feed.stream))
        job.start()
        feed.add([row(key, 1) for key in "abcdef"])
        job.checkpoint()
        job.restart(parallelism=2)
        assert threading.active_count() == before


def test_without_chaining_every_link_is_an_exchange() -> None:
    with hf.testing.Job(parallelism=2, chaining=False) as job:
        feed = job.input("events", EVENTS)
        out = job.output(feed.stream.map(lambda value: value["value"]).filter(lambda value: value > 1))
        job.start()
        feed.add([row("a", number) for number in range(4)])
        assert sorted(out.rows()) == [2, 3]


class Paid(hf.KeyedCoProcessFunction):
    """Orders with their payments; payments of nothing go aside."""

    order = hf.ValueStateDescriptor("order", int)
    states = (order,)
    returns = {"key": str, "ordered": int, "paid": int}  # noqa: RUF012
    side_outputs = (hf.OutputTag("unknown", {"key": str}),)

    def process_element1(self, value: Any, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        ctx.state(self.order).update(value["value"])

    def process_element2(self, value: Any, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        ordered = ctx.state(self.order).value()
        if ordered is None:
            ctx.output("unknown", {"key": value["key"]})
        else:
            out({"key": value["key"], "ordered": ordered, "paid": value["value"]})


def test_two_inputs_meet_in_one_operator_and_side_outputs_come_out_apart() -> None:
    with hf.testing.Job(parallelism=2) as job:
        orders, payments = job.input("orders", EVENTS), job.input("payments", EVENTS)
        paid = orders.stream.key_by("key").connect(payments.stream.key_by("key")).process(Paid()).uid("paid")
        out, unknown = job.output(paid), job.output(paid.side_output("unknown"), "unknown")
        job.start()
        orders.add(row("a", 5), at=1)
        job.checkpoint()
        payments.add([row("a", 4), row("b", 3)], at=[2, 3])
        job.restart(parallelism=3)
        expected = ({"key": "a", "ordered": 5, "paid": 4}, 2)
        assert (out.take(), unknown.take()) == ([expected] * 2, [({"key": "b"}, 3)] * 2)
        orders.watermark(10)
        assert job.watermark("paid") is None
        payments.watermark(7)
        assert (job.watermark("paid"), out.watermark, unknown.watermark) == (7, 7, 7)
        job.checkpoint()
        assert (out.committed(), unknown.committed()) == ([expected], [({"key": "b"}, 3)])


Steps = st.lists(
    st.one_of(
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), min_size=1, max_size=8),
        st.sampled_from(["checkpoint", "fail", "restart-1", "restart-3", "savepoint"]),
    ),
    max_size=8,
)


@settings(max_examples=examples(15), deadline=None)
@given(Steps, st.integers(0, 3), st.sampled_from([1, 7, 65_536]))
def test_committed_totals_are_those_of_a_run_without_failures(steps: list[Any], seed: int, batch_rows: int) -> None:
    expected: dict[str, int] = {}
    with hf.testing.Job(parallelism=2, seed=seed, batch_rows=batch_rows) as job:
        feed = job.input("events", EVENTS)
        out = job.output(totals(feed.stream))
        job.start()
        for step in steps:
            if isinstance(step, list):
                feed.add([row(key, value) for key, value in step])
                for key, value in step:
                    expected[key] = expected.get(key, 0) + value
            elif step.startswith("restart"):
                job.restart(parallelism=int(step[-1]))
            else:
                getattr(job, step)()
        feed.end()
        committed = [each for each, _ in out.committed()]
    assert len(committed) == sum(len(step) for step in steps if isinstance(step, list))
    assert {each["key"]: each["total"] for each in sorted(committed, key=lambda each: each["total"])} == expected
