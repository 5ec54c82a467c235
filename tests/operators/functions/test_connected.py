"""Operators of two inputs: how the graph connects them, what each input brings, and that no record is lost on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch, CheckpointBarrier, EndOfData, Watermark
from holdfast.barriers.jobgraph import JobGraph, Partitioning, with_uids
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.plan_digest import describe_difference, digest_plan
from holdfast.operators.datastream.stream import ConnectedStreams, Stream
from holdfast.operators.datastream.unpicklable import check_picklable
from holdfast.operators.functions.connected import CoRowFunctionOperator, KeyedCoProcessFunction, KeyedCoProcessOperator
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.operators.functions.rows import MapOperator
from holdfast.operators.functions.schema import UNDECLARED, declared_type
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.statebackends.errors import GraphError, InvariantError, TooManyRowsSkippedError
from holdfast.statebackends.state import ListStateDescriptor, ValueStateDescriptor
from holdfast.statebackends.storage.port import Storage
from tests.examples import examples
from tests.harness.mini import MiniCluster
from tests.operators.ends import NamedSink, NamedSource
from tests.operators.harness import OperatorHarness
from tests.operators.ports import DictStorage
from tests.operators.runtime import Bench, Recording
from tests.operators.worker.test_loop import run_through_crashes

ORDERS = declared_type({"id": int, "item": str}, "orders")
PAYMENTS = declared_type({"order": int, "amount": int}, "payments")
PAID = {"id": int, "item": str, "amount": int}


class Pay(KeyedCoProcessFunction):
    """Orders and payments by id, whichever comes first; a timer gives up on what waits."""

    item = ValueStateDescriptor("item", str)
    waiting = ListStateDescriptor("waiting", int)
    states = (item, waiting)
    returns = PAID

    def process_element1(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        ctx.state(self.item).update(value["item"])
        for amount in ctx.state(self.waiting).get():
            out({"id": ctx.key, "item": value["item"], "amount": amount})
        ctx.state(self.waiting).clear()

    def process_element2(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        item = ctx.state(self.item).value()
        if item is None:
            ctx.state(self.waiting).add(value["amount"])
            ctx.timers.register_event_time_timer(100)
        else:
            out({"id": ctx.key, "item": item, "amount": value["amount"]})

    def on_timer(self, timestamp_ms: int, ctx: ProcessContext, out: Collector) -> None:
        for amount in ctx.state(self.waiting).get():
            out({"id": ctx.key, "item": "", "amount": amount})
        ctx.state(self.waiting).clear()


def streams(parallelism: int = 2) -> tuple[Stream, Stream]:
    env = Environment("job", parallelism=parallelism)
    orders = env.from_source(NamedSource(ORDERS.schema, "orders")).uid("orders")
    return orders, env.from_source(NamedSource(PAYMENTS.schema, "payments")).uid("payments")


def paid(parallelism: int = 2) -> Stream:
    orders, payments = streams(parallelism)
    return orders.connect(payments).key_by("id", "order").process(Pay()).uid("paid")


def built(stream: Stream) -> JobPlan:
    stream.sink_to(NamedSink(), uid="out")
    return stream.environment.build()


# -------------------------------------------------------------------------------------------------------------- the graph


def test_two_inputs_are_two_edges_with_selectors_of_their_own() -> None:
    plan = built(paid())
    paid_vertex = next(vertex for vertex in plan.graph.vertices if vertex.operators[0].uid == "paid")
    assert [operator.uid for operator in paid_vertex.operators] == ["paid", "out"]  # chained behind, never before
    edges = plan.graph.inputs(paid_vertex.vertex_id)
    found = [(edge.source_operator, edge.input_index, edge.partitioning, edge.key) for edge in edges]
    assert found == [("orders", 0, Partitioning.HASH, ("id",)), ("payments", 1, Partitioning.HASH, ("order",))]
    assert {key: repr(selector) for key, selector in plan.selectors.items()} == {("paid", 0): "id", ("paid", 1): "order"}
    assert [state.name for state in paid_vertex.operators[0].states][:2] == ["item", "waiting"]
    assert paid_vertex.operators[0].key_type == "int64"
    assert msgspec.json.decode(msgspec.json.encode(plan.graph), type=JobGraph) == plan.graph
    check_picklable(plan)


def test_keys_may_be_given_before_connect() -> None:
    orders, payments = streams()
    plan = built(orders.key_by("id").connect(payments.key_by("order")).process(Pay()).uid("paid"))
    assert plan.graph == built(paid()).graph


def test_an_operator_with_two_inputs_is_not_chained_to_what_is_before_it() -> None:
    env = Environment("job", parallelism=1)
    numbers = env.from_source(NamedSource(ORDERS.schema)).uid("orders")
    plan = built(numbers.connect(numbers).map(lambda row: row, lambda row: row, returns=ORDERS.schema).uid("both"))
    assert [[operator.uid for operator in vertex.operators] for vertex in plan.graph.vertices][:2] == [["orders"], ["both", "out"]]
    assert [(edge.input_index, edge.partitioning) for edge in plan.graph.edges][:2] == [
        (0, Partitioning.FORWARD),
        (1, Partitioning.FORWARD),
    ]


def test_the_selector_of_the_second_input_is_part_of_what_a_plan_is() -> None:
    def plan(key: Any) -> JobPlan:
        orders, payments = streams()
        return built(orders.connect(payments).key_by("id", key, key_type=int).process(Pay()).uid("paid"))

    one = digest_plan(plan(lambda row: row["order"]))
    assert describe_difference(one, digest_plan(plan(lambda row: row["order"]))) is None
    assert "'paid'" in str(describe_difference(one, digest_plan(plan(lambda row: row["order"] + 1))))


class Half(KeyedCoProcessFunction):
    def process_element1(self, value: Any, ctx: ProcessContext, out: Collector) -> None: ...


class Plain(ProcessFunction):
    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None: ...


def connected() -> ConnectedStreams:
    first, second = streams()
    return first.connect(second)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: connected().process(Pay()), "'co_process': both streams need a key"),
        (lambda: connected().key_by("item", "order").process(Pay()), r"'co_process'.*input 1 by item \(utf8\).*order \(int64\)"),
        (lambda: connected().key_by("id", "order").process(Half()), "Half must define process_element2"),
        (lambda: connected().key_by("id", "order").process(Plain()), "not a KeyedCoProcessFunction"),  # type: ignore[arg-type]
        (lambda: connected().key_by("id", "order").process(Pay), "not a KeyedCoProcessFunction"),  # type: ignore[arg-type]
        (lambda: connected().key_by("item", "order").map(len, len), r"'co_map'.*different types"),
        (lambda: connected().map(len, 5), "5 is not a function"),  # type: ignore[arg-type]
        (lambda: connected().map(len, len, on_error="drop"), "'co_map'.*on_error"),
        (lambda: streams()[0].connect(streams()[1]), "one environment"),
        (lambda: streams()[0].connect("payments"), "connect takes a stream"),  # type: ignore[call-overload]
        (lambda: connected().map(_order, len), "'co_map'.*different types.*returns="),
    ],
)
def test_what_does_not_go_together_is_refused_when_the_graph_is_built(make: Any, problem: str) -> None:
    with pytest.raises(GraphError, match=problem):
        make()


class Order(msgspec.Struct):
    id: int
    item: str


def _order(row: dict[str, Any]) -> Order:
    return Order(**row)


def test_inputs_are_numbered_from_0_on() -> None:
    orders, _ = streams()
    graph = orders.environment.graph
    with pytest.raises(GraphError, match=r"'gap': its inputs are numbered \[1\]"):
        graph.add("gap", "gap", [replace(edge, input_index=1) for edge in orders._inputs])


def test_renamed_operators_keep_their_inputs() -> None:
    graph = built(paid()).graph
    renamed = with_uids(msgspec.to_builtins(graph), {"paid": "settled"})
    assert renamed is not None
    assert [edge["input_index"] for edge in renamed["edges"]] == [edge.input_index for edge in graph.edges]
    assert "side_output" not in renamed["edges"][0]


# ----------------------------------------------------------------------------------------------------------- the functions


def pay_operator() -> KeyedCoProcessOperator:
    selectors = (key_selector("id", None, ORDERS, "op"), key_selector("order", None, PAYMENTS, "op"))
    return KeyedCoProcessOperator(Pay(), selectors, (ORDERS, PAYMENTS), declared_type(PAID, "op"))


def feed(harness: OperatorHarness, index: int, *rows: tuple[Any, ...], at: int = 10) -> None:
    kind = (ORDERS, PAYMENTS)[index]
    dicts = [dict(zip(kind.names, row, strict=True)) for row in rows]
    harness.process(dicts, [at] * len(rows), kind.schema, index)


def test_state_and_timers_are_shared_by_both_inputs() -> None:
    with OperatorHarness(pay_operator(), key_type="int64") as harness:
        feed(harness, 1, (1, 5), (2, 7))
        feed(harness, 0, (1, "pen"), at=20)
        feed(harness, 1, (1, 6), at=30)
        assert harness.output.rows() == [{"id": 1, "item": "pen", "amount": 5}, {"id": 1, "item": "pen", "amount": 6}]
        assert harness.output.timestamps() == [20, 30]
        snapshot = harness.snapshot()
    with OperatorHarness.restored(pay_operator(), [snapshot], key_type="int64") as harness:
        harness.watermark(100)
        feed(harness, 1, (1, 8))
        assert harness.output.rows() == [{"id": 2, "item": "", "amount": 7}, {"id": 1, "item": "pen", "amount": 8}]


def test_each_input_has_a_function_of_its_own_and_one_count_of_skipped_rows() -> None:
    first = MapOperator(lambda row: 1 // row, UNDECLARED, UNDECLARED, skips=True)
    second = MapOperator(lambda row: row * 2, UNDECLARED, UNDECLARED, skips=True)
    with OperatorHarness(CoRowFunctionOperator(first, second)) as harness:
        harness.context.skipped_rows_max = 1
        harness.process([1, 0])
        harness.process([1, 0], input_index=1)
        assert harness.output.rows() == [1, 2, 0]
        with pytest.raises(TooManyRowsSkippedError, match="1 rows"):
            harness.process([None], input_index=1)


class Opened:
    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    def open(self, ctx: Any) -> None:
        ctx.counter("opened").inc()

    def close(self) -> None:
        CLOSED.append(self.fails)
        if self.fails:
            raise ValueError("a connection that was lost")

    def __call__(self, row: Any) -> Any:
        return row


CLOSED: list[bool] = []


def test_both_functions_are_opened_and_closed_whatever_the_first_one_raises() -> None:
    functions = [MapOperator(Opened(fails=fails), UNDECLARED, UNDECLARED) for fails in (True, False)]
    harness = OperatorHarness(CoRowFunctionOperator(functions[0], functions[1])).open()
    assert harness.context.counters.user["opened"].count == 2
    CLOSED.clear()
    with pytest.raises(Exception, match="a connection that was lost"):
        harness.close()
    assert CLOSED == [True, False]


# ------------------------------------------------------------------------------------------------------- end of the inputs


NAMED: dict[int, str | int] = {MAX_WATERMARK: "max", MIN_WATERMARK: "min"}


class Ended(Recording):
    """Notes which input ends, and the event time of each."""

    def end_input(self, input_index: int) -> Iterator[None]:
        times = [self.context.input_watermark_ms(index) for index in (0, 1)]
        self._note("ended", input_index, [NAMED.get(time, time) for time in times])
        yield
        self.output.collect(Batch(rows=[f"left of {input_index}"]))


def two_inputs(*channels: int) -> Bench:
    log: list[str] = []
    bench = Bench([Ended("a", log)], channels=len(channels), inputs=channels, log=log)
    bench.chain.head.context.valve = bench.subtask._input._inputs.valve  # type: ignore[union-attr]
    return bench.started()


def test_an_input_has_ended_when_all_its_channels_have() -> None:
    bench = two_inputs(0, 0, 1)
    bench.events(2, Watermark(7))
    bench.events(0, Watermark(MAX_WATERMARK), EndOfData())
    bench.run()
    assert bench.log == []
    bench.events(1, Watermark(MAX_WATERMARK), EndOfData())
    bench.run()
    assert bench.log == ["a watermark 7", "a ended 0 ['max', 7]"]
    bench.rows(2, "x")
    bench.events(2, Watermark(MAX_WATERMARK), EndOfData())
    bench.run()
    assert bench.log[2:] == ["a process x", f"a watermark {MAX_WATERMARK}", "a ended 1 ['max', 'max']", "a finish"]
    assert [element for element in bench.port.elements if isinstance(element, str)] == ["left of 0", "x", "left of 1"]


def test_a_stopped_job_ends_all_inputs_together_or_none() -> None:
    drained = two_inputs(0, 1)
    drained.events(0, EndOfData(drain=True, stopped=True))
    drained.run()
    assert drained.log == []  # the other one may go on, and so may this one when the job does
    drained.events(1, EndOfData(drain=True, stopped=True))
    drained.run()
    assert [entry.split(" [")[0] for entry in drained.log] == [f"a watermark {MAX_WATERMARK}", "a ended 0", "a ended 1", "a finish"]
    stopped = two_inputs(0, 1)
    stopped.events(0, EndOfData(drain=False))
    stopped.events(1, EndOfData(drain=False))
    stopped.run()
    assert stopped.log == []


def test_a_barrier_may_fall_before_the_slices_of_an_ending_input() -> None:
    bench = two_inputs(0, 1)
    bench.events(0, EndOfData(), CheckpointBarrier(1, 1_000, folder="chk-1"))
    bench.events(1, CheckpointBarrier(1, 1_000, folder="chk-1"))
    bench.run()
    assert bench.log[0] == "a prepare 1"
    rows = [element if isinstance(element, str) else type(element).__name__ for element in bench.port.elements]
    assert rows == ["CheckpointBarrier", "left of 0"]  # a restored job is told of the end once more


def test_of_one_input_finish_is_the_end() -> None:
    bench = two_inputs(0)
    bench.events(0, EndOfData())
    bench.run()
    assert bench.log == [f"a watermark {MAX_WATERMARK}", "a finish"]


def test_only_inputs_that_an_operator_has_have_an_event_time() -> None:
    context = two_inputs(0, 1).chain.head.context
    assert context.input_watermark_ms(1) == MIN_WATERMARK
    for index in (-1, 2):
        with pytest.raises(InvariantError, match=f"no input {index}"):
            context.input_watermark_ms(index)


# -------------------------------------------------------------------------------------------------------------- whole jobs

NUMBERS = pa.schema([pa.field("n", pa.int64(), nullable=False)])
OUTPUTS: dict[str, DictStorage] = {}


def open_output(path: str) -> Storage:
    return OUTPUTS.setdefault(path, DictStorage(root=path))


def numbers(indices: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(np.asarray(indices))], schema=NUMBERS)


class Match(KeyedCoProcessFunction):
    """Each number of the first with each equal remainder of the second, once."""

    left = ListStateDescriptor("left", int)
    right = ListStateDescriptor("right", int)
    states = (left, right)
    returns = {"left": int, "right": int}  # noqa: RUF012 - the contract's class attribute

    def process_element1(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        ctx.state(self.left).add(value["n"])
        for right in ctx.state(self.right).get():
            out({"left": value["n"], "right": right})

    def process_element2(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        ctx.state(self.right).add(value["n"])
        for left in ctx.state(self.left).get():
            out({"left": left, "right": value["n"]})


def remainder(row: dict[str, int]) -> int:
    return row["n"] % 20


def match_job(path: str, parallelism: int, rows: tuple[int, int]) -> JobPlan:
    OUTPUTS.pop(path, None)
    env = Environment("match", parallelism=parallelism, channel_credit_batches=2, step_budget_ms=1)
    sides = [
        env.from_source(GeneratorSource(numbers, count, NUMBERS, batch_rows=9)).uid(f"in-{index}").set_parallelism(index + 1)
        for index, count in enumerate(rows)
    ]
    matched = sides[0].connect(sides[1]).key_by(remainder, remainder).process(Match()).uid("match")
    matched.sink_to(ParquetSink(path, "out", open_storage=open_output), uid="sink")
    return env.build()


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), crashes=st.lists(st.integers(20, 600), max_size=2), parallelism=st.sampled_from([1, 3]))
def test_every_pair_comes_out_once_through_crashes(tmp_path: Path, seed: int, crashes: list[int], parallelism: int) -> None:
    path, rows = "mem://match", (150, 90)
    cluster = MiniCluster(match_job(path, parallelism, rows), DictStorage(), local_directory=str(tmp_path), seed=seed)
    run_through_crashes(cluster, crashes)
    table = read_committed(path, "out", open_storage=open_output)
    found = Counter(zip(table["left"].to_pylist(), table["right"].to_pylist(), strict=True))
    assert found == Counter((left, right) for left in range(150) for right in range(90) if left % 20 == right % 20)


def test_the_repr_of_connected_streams_says_what_they_are() -> None:
    assert "ConnectedStreams of <Stream" in repr(connected())
