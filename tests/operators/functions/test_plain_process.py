"""Process functions without keys: operator state, what is refused, and that no entry is lost or doubled by a rescale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import ConnectedStreams, Stream
from holdfast.operators.functions.connected import CoProcessFunction, CoProcessOperator
from holdfast.operators.functions.process import Collector, PlainProcessOperator, ProcessContext, ProcessFunction
from holdfast.operators.functions.schema import UNDECLARED, declared_type
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.statebackends.errors import (
    GraphError,
    IncompatibleStateError,
    StateValueError,
    UndeclaredStateError,
    UserFunctionError,
)
from holdfast.statebackends.serialization.state_serializer import check_compatible, state_meta
from holdfast.statebackends.state import OperatorListStateDescriptor, Redistribution, ValueStateDescriptor
from holdfast.statebackends.storage.port import Storage
from tests.examples import examples
from tests.harness.mini import MiniCluster
from tests.operators.ends import NamedSink, NamedSource
from tests.operators.harness import OperatorHarness
from tests.operators.ports import DictStorage
from tests.operators.worker.test_loop import run_through_crashes

ROWS = declared_type({"n": int}, "rows")


class Pairs(ProcessFunction):
    """Emits two numbers that followed each other; counts, over restarts, what it has seen."""

    waiting = OperatorListStateDescriptor("waiting", type=int)
    seen = OperatorListStateDescriptor("seen", Redistribution.UNION, tuple[int, int])
    states = (waiting, seen)
    returns = {"left": int, "right": int, "seen": int}  # noqa: RUF012 - the contract's class attribute
    side_outputs = {"odd": {"n": int}}  # noqa: RUF012

    def open(self, ctx: ProcessContext) -> None:
        own = [entry for entry in ctx.operator_list_state(self.seen).get() if entry[0] == ctx.subtask]
        self.count = sum(count for _, count in own)
        ctx.operator_list_state("seen").update(own)

    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        self.count += 1
        ctx.operator_list_state(self.seen).update([(ctx.subtask, self.count)])
        if value["n"] % 2:
            ctx.output("odd", {"n": value["n"]})
        waiting = ctx.operator_list_state(self.waiting)
        before = waiting.get()
        if before:
            waiting.clear()
            out({"left": before[0], "right": value["n"], "seen": self.count})
        else:
            waiting.add(value["n"])


def operator(function: ProcessFunction | None = None) -> PlainProcessOperator:
    sides = {"odd": declared_type({"n": int}, "op")}
    return PlainProcessOperator(function or Pairs(), ROWS, declared_type(Pairs.returns, "op"), sides)


def rows(*numbers: int) -> list[dict[str, int]]:
    return [{"n": number} for number in numbers]


def test_state_of_a_subtask_follows_no_key() -> None:
    with OperatorHarness(operator()) as harness:
        harness.output.sides["odd"] = []
        harness.operator._sides.begin()
        harness.process(rows(1, 2, 3), [10, 20, 30], ROWS.schema)
        assert harness.output.rows() == [{"left": 1, "right": 2, "seen": 2}]
        assert harness.output.timestamps() == [20]
        assert [row for batch in harness.output.sides["odd"] for row in batch.rows()] == rows(1, 3)
        snapshot = harness.snapshot()
    with OperatorHarness.restored(operator(), [snapshot]) as harness:
        harness.process(rows(4), None, ROWS.schema)
        assert harness.output.rows() == [{"left": 3, "right": 4, "seen": 4}]


def test_a_rescale_deals_lists_and_gives_unions_to_all() -> None:
    snapshots = []
    for subtask in (0, 1):
        with OperatorHarness(operator(), subtask=subtask, parallelism=2) as harness:
            harness.process(rows(10 + subtask))
            snapshots.append(harness.snapshot())
    with OperatorHarness.restored(operator(), snapshots, subtask=0, parallelism=1) as harness:
        states = {name: harness._lists.list_state(name) for name in ("waiting", "seen")}
        assert len(states["waiting"].entries) == 2
        assert harness.operator.function.count == 1  # of its own; open() kept no other
        assert len(states["seen"].entries) == 1
        again = harness.snapshot()
    assert len(again.lists["seen"]) == 1


def test_time_is_known_without_keys() -> None:
    found: list[Any] = []

    class Times(ProcessFunction):
        def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
            out((ctx.timestamp, ctx.watermark, ctx.processing_time))

    with OperatorHarness(PlainProcessOperator(Times(), UNDECLARED, UNDECLARED), now_ms=7) as harness:
        harness.watermark(15)
        harness.process([1], [20])
        found = harness.output.rows()
    assert found == [(20, 15, 7)]


class Asks(ProcessFunction):
    lists = OperatorListStateDescriptor("lists", type=int)
    states = (lists,)

    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        match value:
            case "state":
                ctx.state(ValueStateDescriptor("count", int))
            case "list as keyed":
                ctx.state(self.lists)  # type: ignore[call-overload]
            case "key":
                out(ctx.key)
            case "timers":
                ctx.timers.register_event_time_timer(5)
            case "undeclared":
                ctx.operator_list_state("other")
            case "retyped":
                ctx.operator_list_state(OperatorListStateDescriptor("lists", type=str))
            case _:
                ctx.operator_list_state(self.lists).add(value)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("state", UndeclaredStateError, "state 'count' is not among the declared states"),
        ("list as keyed", UndeclaredStateError, "'lists' is operator state.*operator_list_state"),
        ("key", UndeclaredStateError, "not on a keyed stream, so it has no key: call key_by"),
        ("timers", UndeclaredStateError, "not on a keyed stream, so it has no timers: call key_by"),
        ("undeclared", UndeclaredStateError, "operator state 'other' is not among the declared states"),
        ("retyped", UndeclaredStateError, "operator state 'lists' is not among the declared states"),
        (1.5, StateValueError, "state 'lists'.*1.5"),
    ],
)
def test_what_needs_a_key_or_a_declaration_is_refused_by_name(value: Any, error: type[Exception], message: str) -> None:
    harness = OperatorHarness(PlainProcessOperator(Asks(), UNDECLARED, UNDECLARED))
    with harness, pytest.raises(error, match=f"operator 'op'.*{message}"):
        harness.process([value])


def test_an_error_of_the_function_names_operator_and_record() -> None:
    class Fails(ProcessFunction):
        def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
            out(1 // value)

    harness = OperatorHarness(PlainProcessOperator(Fails(), UNDECLARED, UNDECLARED))
    with harness, pytest.raises(UserFunctionError, match=r"operator 'op', subtask 0.*ZeroDivisionError.*record 0"):
        harness.process([1, 0])


class Greedy(ProcessFunction):
    """Keeps what all subtasks had: it would double with each restore."""

    seen = OperatorListStateDescriptor("seen", Redistribution.UNION, int)
    states = (seen,)

    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None: ...


def test_open_must_say_what_of_a_union_is_its_own() -> None:
    harness = OperatorHarness(PlainProcessOperator(Greedy(), UNDECLARED, UNDECLARED))
    with pytest.raises(UndeclaredStateError, match=r"operator 'op'.*union state 'seen'.*update"):
        harness.open()


def test_opaque_entries_are_bytes() -> None:
    lists = OperatorListStateDescriptor("lists")
    with OperatorHarness(PlainProcessOperator(_adding(lists), UNDECLARED, UNDECLARED)) as harness:
        harness.process([b"\xff\x00", b""])
        assert harness.snapshot().lists == {"lists": [b"\xff\x00", b""]}
        assert harness.operator._context.operator_list_state(lists).get() == [b"\xff\x00", b""]
        with pytest.raises(StateValueError, match="state 'lists'"):
            harness.process(["text"])


def _adding(lists: OperatorListStateDescriptor) -> ProcessFunction:
    class Adds(ProcessFunction):
        states = (lists,)

        def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
            ctx.operator_list_state(lists).add(value)

    return Adds()


def test_an_entry_of_another_type_is_refused_at_a_restore() -> None:
    stored = state_meta(OperatorListStateDescriptor("lists", type=int), None)
    assert (stored.kind, stored.value_type) == ("operator_list", "int")
    with pytest.raises(IncompatibleStateError, match="'lists' was stored as operator_list of int"):
        check_compatible(stored, state_meta(OperatorListStateDescriptor("lists", type=str), None), operator="op")


# -------------------------------------------------------------------------------------------------------------- the graph


def stream() -> Stream:
    return Environment("job", parallelism=2).from_source(NamedSource(ROWS.schema, "rows")).uid("rows")


def twice() -> ConnectedStreams:
    one = stream()
    return one.connect(one)


def test_it_is_chained_and_says_what_it_stores() -> None:
    pairs = stream().process(Pairs()).uid("pairs")
    pairs.side_output("odd").sink_to(NamedSink(), uid="odd")
    pairs.sink_to(NamedSink(), uid="out")
    vertex = pairs.environment.build().graph.vertices[0]
    assert [each.uid for each in vertex.operators] == ["rows", "pairs", "odd", "out"]
    described = vertex.operators[1]
    assert described.key_type is None
    found = [(state.name, state.kind, state.value_type) for state in described.states]
    assert found == [("waiting", "operator_list", "int"), ("seen", "operator_union", "tuple<int,int>")]


class Counts(ProcessFunction):
    states = (ValueStateDescriptor("count", int),)

    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None: ...


class Rings(ProcessFunction):
    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None: ...
    def on_timer(self, timestamp_ms: int, ctx: ProcessContext, out: Collector) -> None: ...


class Both(CoProcessFunction):
    states = (ValueStateDescriptor("count", int),)

    def process_element1(self, value: Any, ctx: ProcessContext, out: Collector) -> None: ...
    def process_element2(self, value: Any, ctx: ProcessContext, out: Collector) -> None: ...


class One(CoProcessFunction):
    def process_element1(self, value: Any, ctx: ProcessContext, out: Collector) -> None: ...


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: stream().process(Counts()), "'process': the state 'count' of Counts is kept per key.*key_by"),
        (lambda: stream().process(Rings()), "'process': Rings defines on_timer.*key_by"),
        (lambda: stream().process(Counts), "neither a ProcessFunction instance nor a function"),  # type: ignore[arg-type]
        (lambda: stream().process(ProcessFunction()), "must define process_element"),
        (lambda: twice().process(Both()), "'co_process': the state 'count' of Both is kept per key"),
        (lambda: twice().process(One()), "One must define process_element2"),
    ],
)
def test_what_needs_a_key_is_refused_when_the_graph_is_built(make: Any, problem: str) -> None:
    with pytest.raises(GraphError, match=problem):
        make()


# ------------------------------------------------------------------------------------------------------------ two streams


class Tagged(CoProcessFunction):
    lefts = OperatorListStateDescriptor("lefts", type=int)
    states = (lefts,)

    def process_element1(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        ctx.operator_list_state(self.lefts).add(value)

    def process_element2(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        out((value, ctx.operator_list_state(self.lefts).get()))


def test_two_streams_share_operator_state() -> None:
    with OperatorHarness(CoProcessOperator(Tagged(), (UNDECLARED, UNDECLARED), UNDECLARED)) as harness:
        harness.process([1, 2])
        harness.process(["a"], input_index=1)
        snapshot = harness.snapshot()
        assert harness.output.rows() == [("a", [1, 2])]
    with OperatorHarness.restored(CoProcessOperator(Tagged(), (UNDECLARED, UNDECLARED), UNDECLARED), [snapshot]) as harness:
        harness.process(["b"], input_index=1)
        assert harness.output.rows() == [("b", [1, 2])]


# -------------------------------------------------------------------------------------------------------------- whole jobs

NUMBERS = pa.schema([pa.field("n", pa.int64(), nullable=False)])
OUTPUTS: dict[str, DictStorage] = {}


def open_output(path: str) -> Storage:
    return OUTPUTS.setdefault(path, DictStorage(root=path))


def numbers(indices: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(np.asarray(indices))], schema=NUMBERS)


def pairs_job(path: str, parallelism: int, count: int) -> JobPlan:
    OUTPUTS.pop(path, None)
    env = Environment("pairs", parallelism=parallelism, channel_credit_batches=2, step_budget_ms=1)
    source = env.from_source(GeneratorSource(numbers, count, NUMBERS, batch_rows=9)).uid("in").set_parallelism(1)
    source.rebalance().process(Pairs()).uid("pairs").sink_to(ParquetSink(path, "out", open_storage=open_output), uid="sink")
    return env.build()


@settings(max_examples=examples(6), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), crashes=st.lists(st.integers(20, 400), max_size=2), parallelism=st.sampled_from([1, 3]))
def test_every_number_is_in_one_pair_through_crashes(tmp_path: Path, seed: int, crashes: list[int], parallelism: int) -> None:
    path, count = "mem://pairs", 180
    cluster = MiniCluster(pairs_job(path, parallelism, count), DictStorage(), local_directory=str(tmp_path), seed=seed)
    run_through_crashes(cluster, crashes)
    table = read_committed(path, "out", open_storage=open_output)
    found = sorted(table["left"].to_pylist() + table["right"].to_pylist())
    assert len(found) >= count - parallelism  # one may wait on each subtask
    assert len(found) == len(set(found))
    assert set(found) <= set(range(count))
