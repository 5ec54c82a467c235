"""StreamGraph -> JobGraph: chaining, identities, sizes, edges; and what is refused when the graph is built."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import pyarrow as pa
import pytest

from holdfast.barriers.jobgraph import JobConfig, JobGraph, Partitioning, RestartStrategy
from holdfast.barriers.sinks.log import SinkPaths
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import KeyedStream, Stream
from holdfast.operators.functions.aggregates import count, max, mean, sum
from holdfast.operators.functions.process import ProcessFunction
from holdfast.operators.functions.windows.assigners import Tumbling
from holdfast.operators.sinks.targets.staging import StagingPaths
from holdfast.statebackends.errors import GraphError, InvalidConfigError, UnknownColumnError
from holdfast.statebackends.keygroups import operator_id
from holdfast.statebackends.state import MapStateDescriptor, ValueStateDescriptor
from tests.operators.ends import FLIGHTS, NamedSink, NamedSource

GOLDEN = Path(__file__).parents[2] / "golden" / "jobgraph_flights.json"


@dataclass
class Flight:
    carrier: str
    flight: int
    scheduled: int
    delay: float


class Records(ProcessFunction):
    waiting = MapStateDescriptor("waiting", int, list[Flight])
    best = ValueStateDescriptor("best", float)
    states = (waiting, best)
    returns = Flight

    def process_element(self, value: Any, ctx: Any, out: Any) -> None: ...
    def on_timer(self, timestamp_ms: int, ctx: Any, out: Any) -> None: ...


def to_flight(row: dict[str, Any]) -> Flight:
    return Flight(row["carrier"], row["flight"], row["scheduled"], row["delay"])


def environment(parallelism: int = 2, **settings: Any) -> Environment:
    return Environment("job", parallelism=parallelism, **settings)


def source(parallelism: int = 2, schema: pa.Schema | None = FLIGHTS, **settings: Any) -> Stream:
    return environment(parallelism, **settings).from_source(NamedSource(schema))


def built(stream: Stream) -> JobGraph:
    stream.sink_to(NamedSink(needs_columns=False), uid="out")
    return stream.environment.build().graph


def chains(graph: JobGraph) -> list[list[str]]:
    return [[operator.name for operator in vertex.operators] for vertex in graph.vertices]


def flights_job() -> Environment:
    """The demo's shape."""
    env = environment(2, state_backend="rocksdb", checkpoint_interval_ms=1_000)
    departed = (
        env.from_source(NamedSource()).uid("flights")
        .filter(lambda row: row["delay"] is not None).uid("departed")
        .map(to_flight).uid("parse")
        .assign_timestamps("scheduled", timedelta(days=1)).uid("event-time")
    )  # fmt: skip
    by_carrier = departed.key_by("carrier")
    (
        by_carrier.window(Tumbling(days=1))
        .aggregate(flights=count(), mean_delay=mean("delay"), max_delay=max("delay")).uid("days")
        .sink_to(NamedSink()).uid("days-out")
    )  # fmt: skip
    by_carrier.process(Records()).uid("records").sink_to(NamedSink()).uid("records-out")
    return env


# ------------------------------------------------------------------------------------------------------------- chaining


def test_the_demo_job_is_five_vertices() -> None:
    plan = flights_job().build()
    assert chains(plan.graph) == [
        ["flights", "filter", "map", "timestamps"],
        ["window", "out"],
        ["out committer"],
        ["process", "out"],
        ["out committer"],
    ]
    window, records = plan.graph.vertices[1].operators[0], plan.graph.vertices[3].operators[0]
    assert [state.name for state in window.states] == ["windows", "watermark", "watermarks", "assigner", "fired_until"]
    assert [state.kind for state in records.states] == ["map", "value", "timers", "timers"]
    assert records.key_type == "utf8"
    hashes = [edge for edge in plan.graph.edges if edge.partitioning is Partitioning.HASH]
    assert [(edge.source_operator, edge.key, edge.key_type) for edge in hashes] == [("event-time", ("carrier",), "utf8")] * 2
    sinks = ["days-out", "days-out-committer", "records-out", "records-out-committer"]
    assert sorted(plan.operators) == sorted(["departed", "parse", "event-time", "days", "records", *sinks])
    assert (list(plan.sources), sorted(plan.selectors)) == (["flights"], [("days", 0), ("records", 0)])
    assert plan.schemas[hashes[0].edge_id].names == ["carrier", "flight", "scheduled", "delay"]


def test_the_json_of_the_demo_job_is_stable() -> None:
    """Regenerate with HOLDFAST_GOLDEN=1 after a deliberate change of the format."""
    text = msgspec.json.format(msgspec.json.encode(flights_job().build().graph), indent=1).decode() + "\n"
    if os.environ.get("HOLDFAST_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert msgspec.json.decode(text, type=JobGraph) == flights_job().build().graph


@pytest.mark.parametrize(
    ("break_chain", "expected"),
    [
        (lambda stream: stream, [["flights", "map", "filter", "out"]]),
        (lambda stream: stream.set_parallelism(3), [["flights"], ["map"], ["filter", "out"]]),
        (lambda stream: stream.set_max_parallelism(64), [["flights"], ["map"], ["filter", "out"]]),
        (lambda stream: stream.start_new_chain(), [["flights"], ["map", "filter", "out"]]),
        (lambda stream: stream.disable_chaining(), [["flights"], ["map"], ["filter", "out"]]),
        (lambda stream: stream.rebalance(), [["flights", "map"], ["filter", "out"]]),
        (lambda stream: stream.broadcast(), [["flights", "map"], ["filter", "out"]]),
        (lambda stream: stream.forward(), [["flights", "map", "filter", "out"]]),
        (lambda stream: stream.key_by("carrier"), [["flights", "map"], ["filter", "out"]]),
    ],
)
def test_each_rule_of_chaining(break_chain: Callable[[Stream], Stream], expected: list[list[str]]) -> None:
    stream = break_chain(source().map(lambda row: row, returns=FLIGHTS))
    assert chains(built(stream.filter(bool)))[:-1] == expected


def test_an_operator_with_two_inputs_heads_a_chain() -> None:
    env = environment()
    left, right = (env.from_source(NamedSource(name=name)) for name in ("left", "right"))
    graph = built(left.union(right).filter(bool))
    assert chains(graph) == [["left"], ["right"], ["filter", "out"], ["out committer"]]
    assert [edge.input_index for edge in graph.inputs(graph.vertices[2].vertex_id)] == [0, 0]


def test_a_stream_united_with_itself_has_two_edges() -> None:
    stream = source()
    graph = built(stream.union(stream).filter(bool))
    assert chains(graph)[:2] == [["flights"], ["filter", "out"]]
    assert len(graph.inputs(graph.vertices[1].vertex_id)) == 2


def test_a_chain_is_a_tree() -> None:
    stream = source().map(lambda row: row, returns=FLIGHTS).uid("m")
    stream.filter(bool).uid("f1").sink_to(NamedSink(), uid="o1")
    stream.filter(bool).uid("f2").sink_to(NamedSink(), uid="o2")
    graph = stream.environment.build().graph
    assert [operator.uid for operator in graph.vertices[0].operators] == ["source-0", "m", "f1", "o1", "f2", "o2"]
    assert graph.vertices[0].chain_edges == (("source-0", "m"), ("m", "f1"), ("f1", "o1"), ("m", "f2"), ("f2", "o2"))
    assert [edge.source_operator for edge in graph.edges] == ["o1", "o2"]


def test_chaining_can_be_switched_off() -> None:
    assert all(len(chain) == 1 for chain in chains(built(source(chaining=False).filter(bool))))


def test_the_default_partitioner_follows_the_parallelism() -> None:
    stream = source().filter(bool).disable_chaining().filter(bool).set_parallelism(1)
    assert [edge.partitioning for edge in built(stream).edges] == ["forward", "rebalance", "rebalance", "rebalance"]


def test_the_committer_is_one_subtask_in_a_vertex_of_its_own() -> None:
    graph = built(source(parallelism=1))
    committer = graph.vertices[-1]
    assert [(o.uid, o.kind, o.sink_id) for o in committer.operators] == [("out-committer", "sink_committer", "out")]
    assert (committer.parallelism, committer.max_parallelism) == (1, 1)
    assert graph.edges[-1].partitioning is Partitioning.FORWARD


def test_a_sink_without_commits_has_no_committer() -> None:
    stream = source()
    stream.sink_to(NamedSink(commits=False))
    assert len(stream.environment.build().graph.vertices) == 1


# ------------------------------------------------------------------------------------------------------------- identity


def test_vertex_ids_are_those_of_their_heads() -> None:
    graph = built(source().uid("source"))
    assert graph.vertices[0].vertex_id == operator_id("source") == "e5a72f353fc1e6bbf3bd96a41384998c"


def test_generated_uids_are_the_same_each_time_and_avoid_given_ones() -> None:
    def uids() -> list[str]:
        stream = source().map(lambda row: row).filter(bool).uid("map-1")
        return [operator.uid for vertex in built(stream).vertices for operator in vertex.operators]

    assert uids() == uids() == ["source-0", "map-1-auto", "map-1", "out", "out-committer"]


def test_what_leads_to_no_sink_is_not_in_the_job_and_changes_no_id() -> None:
    stream = source()
    stream.map(lambda row: row).name("forgotten")
    graph = built(stream.filter(bool))
    assert chains(graph) == [["flights", "filter", "out"], ["out committer"]]
    assert graph.vertices[0].operators[1].uid == "filter-1"
    assert "lead to no sink: forgotten" in stream.environment.explain()


def test_sink_ids_come_from_uids_and_building_twice_changes_nothing() -> None:
    env = flights_job()
    first = env.build()
    assert [sink.sink_id for sink in env.sinks] == ["days-out", "records-out"]
    assert env.build().graph == first.graph


@pytest.mark.parametrize("uid", ["", "a/b", "..", "-x", "é", "x" * 101, "a b"])
def test_a_uid_that_is_no_file_name_is_refused(uid: str) -> None:
    with pytest.raises(GraphError, match="uid"):
        built(source().uid(uid))


def test_duplicate_uids_name_both_operators() -> None:
    stream = source().map(lambda row: row).name("first").uid("x").filter(bool).name("second").uid("x")
    with pytest.raises(GraphError, match="two operators have the uid 'x': 'first' and 'second'"):
        built(stream)
    with pytest.raises(GraphError, match="'out-committer'"):
        built(source().filter(bool).uid("out-committer"))


def test_one_sink_object_twice_is_refused() -> None:
    stream, sink = source(), NamedSink(sink_id="same")
    stream.sink_to(sink, uid="a")
    stream.sink_to(sink, uid="b")
    with pytest.raises(GraphError, match="share the sink id 'same'"):
        stream.environment.build()


@pytest.mark.parametrize("sink_id", [".", ".."])
def test_a_sink_id_that_would_be_another_folder_is_refused(sink_id: str) -> None:
    stream = source()
    stream.sink_to(NamedSink(sink_id=sink_id), uid="a")
    with pytest.raises(GraphError, match="'a' can't have the sink id"):
        stream.environment.build()
    with pytest.raises(InvalidConfigError, match="part of a path"):
        SinkPaths(sink_id).log(1)
    with pytest.raises(InvalidConfigError, match="part of a path"):
        StagingPaths("job", sink_id).staged("part")


# ---------------------------------------------------------------------------------------------------------------- sizes


def test_max_parallelism_is_derived_inherited_or_given() -> None:
    assert built(source(parallelism=200)).vertices[0].max_parallelism == 512
    graph = built(source(parallelism=2, max_parallelism=16))
    assert (graph.vertices[0].max_parallelism, graph.explicit_max_parallelism) == (16, True)
    graph = built(source().set_max_parallelism(4))
    assert graph.vertices[0].max_parallelism == 4
    assert graph.vertices[0].operators[0].properties == {"explicit_max_parallelism": True}
    assert graph.vertices[1].max_parallelism == 128


def test_the_slots_are_the_largest_parallelism() -> None:
    assert built(source(parallelism=2).map(lambda row: row).set_parallelism(5)).slots_required == 5


@pytest.mark.parametrize("apply", [lambda s: s.set_max_parallelism(1), lambda s: s.set_parallelism(129).set_max_parallelism(128)])
def test_parallelism_above_max_parallelism_is_refused(apply: Callable[[Stream], Stream]) -> None:
    with pytest.raises(GraphError, match="above max parallelism"):
        built(apply(source()))
    with pytest.raises(GraphError, match="above max parallelism"):
        built(source(parallelism=4, max_parallelism=2))


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_sizes_are_whole_and_positive(value: Any) -> None:
    with pytest.raises(InvalidConfigError):
        source().set_parallelism(value)
    with pytest.raises(InvalidConfigError):
        source().set_max_parallelism(value)


def test_forward_between_unequal_parallelisms_is_refused() -> None:
    with pytest.raises(GraphError, match="forward needs equal parallelism"):
        built(source().forward().filter(bool).set_parallelism(3))


# ------------------------------------------------------------------------------------------------------- bad input, typed


def _window(stream: Stream) -> Stream:
    return stream.assign_timestamps("scheduled", timedelta()).key_by("carrier").window(Tumbling(minutes=1)).aggregate(n=count())


UNDECLARED_STREAM: Callable[[], Stream] = lambda: source().map(lambda row: row)  # noqa: E731


@pytest.mark.parametrize(
    ("make", "kind", "problem"),
    [
        (lambda: source().environment.build(), GraphError, "no sink"),
        (lambda: UNDECLARED_STREAM().sink_to(NamedSink(), name="files"), GraphError, "'files' needs columns.*returns="),
        (lambda: UNDECLARED_STREAM().key_by("carrier"), GraphError, r"key_by\(carrier\).*returns="),
        (lambda: UNDECLARED_STREAM().map_batches(len, returns=FLIGHTS), GraphError, "'map_batches' needs columns"),
        (lambda: UNDECLARED_STREAM().assign_timestamps("at", timedelta()), GraphError, "'assign_timestamps' needs"),
        (lambda: UNDECLARED_STREAM().key_by(len, key_type=int).aggregate(n=count()), GraphError, "'aggregate' needs columns"),
        (lambda: source().key_by("tail"), UnknownColumnError, "no column 'tail'; available: carrier, flight"),
        (lambda: source().key_by(["carrier", "tail"]), UnknownColumnError, "'tail'"),
        (lambda: source().key_by([]), GraphError, "distinct columns"),
        (lambda: source().key_by(["carrier", "carrier"]), GraphError, "distinct columns"),
        (lambda: source().key_by("local"), GraphError, "local"),
        (lambda: source().key_by(lambda row: row["carrier"]), GraphError, "key_type="),
        (lambda: source().key_by(["carrier", "day"], key_type=str), GraphError, "one field per column"),
        (lambda: source().assign_timestamps("tail", timedelta()), UnknownColumnError, "'tail'"),
        (lambda: source().assign_timestamps("local", timedelta()), GraphError, "naive"),
        (lambda: source().assign_timestamps("small", timedelta()), GraphError, "int64"),
        (lambda: source().assign_timestamps("at"), GraphError, "max_out_of_orderness"),
        (lambda: source().assign_timestamps("at", timedelta(), max_out_of_orderness_ms=1), GraphError, "one of them"),
        (lambda: source().assign_timestamps("at", timedelta(seconds=-1)), GraphError, "negative"),
        (lambda: source().assign_timestamps("at", timedelta(microseconds=1)), InvalidConfigError, "whole milliseconds"),
        (lambda: source().key_by("carrier").window(Tumbling(5)), GraphError, "assign_timestamps before key_by"),
        (lambda: source().key_by("carrier").window(5), GraphError, "hf.Tumbling"),  # type: ignore[arg-type]
        (lambda: _window(source()).key_by("n").window(Tumbling(5)).aggregate(m=max("gone")), UnknownColumnError, "gone"),
        (lambda: source().key_by("carrier").aggregate(n=sum("origin")), GraphError, "integer, floating or decimal128"),
        (lambda: source().key_by("carrier").aggregate(), GraphError, "at least one aggregate"),
        (lambda: source().key_by("carrier").aggregate(n=5), GraphError, "n=5 is not an aggregate"),  # type: ignore[arg-type]
        (lambda: source().key_by("carrier").aggregate(carrier=count()), GraphError, "already has a column 'carrier'"),
        (lambda: source().key_by("carrier").aggregate(n=count(), emit="all"), GraphError, "emit"),
        (lambda: source().key_by("carrier").union(source()), GraphError, "union before key_by"),
        (lambda: (one := source()).union(one.key_by("carrier")), GraphError, "union before key_by"),
        (lambda: (one := source()).union(one.filter(bool), one.key_by("carrier")), GraphError, "union before key_by"),
        (lambda: source().union(source()), GraphError, "one environment"),
        (lambda: source().key_by("carrier").process(ProcessFunction()), GraphError, "process_element"),
        (lambda: source().key_by("carrier").process(Records), GraphError, "neither"),  # type: ignore[arg-type]
        (lambda: source().key_by("carrier").process(Records(), states=(Records.best,)), GraphError, "own states"),
        (lambda: source().map(5), GraphError, "not a function"),  # type: ignore[arg-type]
        (lambda: source().map(to_flight, returns=5), GraphError, "returns="),
        (lambda: source().rebalance().uid("x"), GraphError, "applies to an operator"),
        (lambda: source().key_by("carrier").set_parallelism(2), GraphError, "applies to an operator"),
        (lambda: source(schema=pa.schema([("t", pa.timestamp("ns"))])).filter(bool), GraphError, "nanoseconds"),
        (lambda: Tumbling(0), InvalidConfigError, "at least 1 ms"),
        (lambda: Tumbling(5, days=1), InvalidConfigError, "once"),
        (lambda: Environment(""), InvalidConfigError, "name"),
        (lambda: environment(0), InvalidConfigError, "parallelism"),
        (lambda: environment(1.5), InvalidConfigError, "parallelism must be a whole number"),  # type: ignore[arg-type]
        (lambda: environment("2"), InvalidConfigError, "parallelism must be a whole number"),  # type: ignore[arg-type]
        (lambda: environment(max_parallelism=0), InvalidConfigError, r"max parallelism must be 1\.\.32768, not 0"),
        (lambda: environment(max_parallelism=-1), InvalidConfigError, r"max parallelism must be 1\.\.32768, not -1"),
        (lambda: environment(max_parallelism=32_769), InvalidConfigError, r"max parallelism must be 1\.\.32768, not 32769"),
        (lambda: environment(standby_workers_per_host=-1), InvalidConfigError, "whole number, at least 0, got -1"),
        (lambda: environment(standby_workers_per_host=1.5), InvalidConfigError, "`float` - at `..standby_workers_per_host"),
        (lambda: environment(standby_workers_per_host=True), InvalidConfigError, "`bool` - at `..standby_workers_per_host"),
        (lambda: built(source(standby_workers_per_host=99)), InvalidConfigError, "which has 2, got 99"),
        (lambda: environment(restart=RestartStrategy(delay_ms=-1)), InvalidConfigError, "delay_ms must not be negative"),
        (lambda: environment(restart=RestartStrategy(delay_ms=100_000)), InvalidConfigError, "delay_max_ms is 60000"),
        (lambda: environment(restart=RestartStrategy("never")), InvalidConfigError, "restart is 'never', must be one of none"),
        (lambda: environment(restart="never"), InvalidConfigError, "restart is 'never', must be one of 'none', 'fixed_delay'"),
        (lambda: environment(restart=3), InvalidConfigError, "restart is 3, must be one of 'none'"),
        (lambda: environment(restart=RestartStrategy(attempts_max=-1)), InvalidConfigError, "attempts_max must not be negative"),
        (lambda: environment(savepoint_directory="savepoints"), InvalidConfigError, "savepoint_directory must be an absolute path"),
        (lambda: environment(checkpoint_interval=5), InvalidConfigError, "no setting 'checkpoint_interval'"),
        (lambda: environment(state_backend="oracle"), InvalidConfigError, "state_backend"),
        (lambda: environment(checkpoint_interval_ms="1s"), InvalidConfigError, "checkpoint_interval_ms"),
        (lambda: flights_job().execute(), InvalidConfigError, "launcher"),
    ],
)
def test_bad_input_is_refused_when_the_graph_is_built(make: Callable[[], Any], kind: type[Exception], problem: str) -> None:
    with pytest.raises(kind, match=problem):
        make()


def test_a_state_that_is_declared_twice_names_the_operator() -> None:
    twice = (ValueStateDescriptor("n", int), ValueStateDescriptor("n", int))
    stream = source().key_by("carrier").process(lambda value, ctx, out: None, states=twice).uid("p")
    with pytest.raises(GraphError, match=r"'p'.*more than once"):
        built(stream)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (ValueStateDescriptor("", int), "the name of a state is ''"),
        (ValueStateDescriptor("\ud800", int), "must be text"),
        (ValueStateDescriptor(5, int), "must be text"),  # type: ignore[call-overload]
        ("count", "'count' declares no state"),
        (ValueStateDescriptor("_event_time_timers", int), "under which its timers are stored"),
        (MapStateDescriptor("_processing_time_timers", int, int), "under which its timers are stored"),
    ],
)
def test_a_state_whose_name_no_snapshot_can_have_is_refused_before_anything_runs(state: Any, problem: str) -> None:
    """No checkpoint of such a job would ever complete."""

    class Timed(Records):
        states = (state,)  # type: ignore[assignment]

    stream = source().key_by("carrier").process(Timed()).uid("p")
    with pytest.raises(GraphError, match=f"'p'.*{problem}"):
        built(stream)


@pytest.mark.parametrize("name", [" ", "a/b", "..", "键", "x" * 2_000, "_timers"])
def test_any_other_name_of_a_state_is_one(name: str) -> None:
    state = ValueStateDescriptor(name, int)
    built(source().key_by("carrier").process(lambda value, ctx, out: None, states=(state,)).uid("p"))


# ----------------------------------------------------------------------------------------------------- types that result


def test_window_and_aggregate_columns() -> None:
    stream = source().assign_timestamps("at", timedelta(days=1)).key_by(["carrier", "small"])
    windows = stream.window(Tumbling(days=1)).aggregate(n=count(), total=sum("small"), worst=max("delay"), avg=mean("flight"))
    assert windows.schema is not None
    assert [(field.name, str(field.type), field.nullable) for field in windows.schema] == [
        ("carrier", "string", False),
        ("small", "int64", False),
        ("window_start", "timestamp[us, tz=UTC]", False),
        ("window_end", "timestamp[us, tz=UTC]", False),
        ("n", "int64", False),
        ("total", "int64", True),
        ("worst", "double", True),
        ("avg", "double", True),
    ]
    running = stream.aggregate(n=count(), least=max("small"))
    assert running.schema is not None
    assert [(field.name, str(field.type)) for field in running.schema] == [
        ("carrier", "string"), ("small", "int64"), ("n", "int64"), ("least", "int32"),
    ]  # fmt: skip


def by_carrier(row: dict[str, Any]) -> tuple[str, int]:
    return row["carrier"], row["flight"]


def test_a_key_function_names_its_columns_and_its_type() -> None:
    stream = source().key_by(by_carrier)
    assert isinstance(stream, KeyedStream)
    aggregated = stream.aggregate(n=count())
    assert aggregated.schema is not None
    assert aggregated.schema.names == ["key_0", "key_1", "n"]
    edge = built(aggregated).edges[0]
    assert (edge.key, edge.key_type) == (None, "tuple<utf8,int64>")


def test_map_and_filter_keep_working_behind_key_by() -> None:
    plan_of = source().key_by("carrier").map(to_flight).uid("m")
    assert plan_of.schema is not None
    stream = plan_of
    stream.sink_to(NamedSink(), uid="out")
    plan = stream.environment.build()
    assert plan.graph.edges[0].partitioning is Partitioning.HASH
    assert plan.graph.vertices[1].operators[0].key_type is None
    assert list(plan.selectors) == [("m", 0)]


def test_a_plan_travels() -> None:
    plan = pickle.loads(cloudpickle.dumps(flights_job().build()))
    assert plan.graph == flights_job().build().graph
    assert plan.operators["records"].uses_timers
    assert not plan.operators["days"].uses_timers


def test_a_config_and_settings_combine() -> None:
    env = environment(config=JobConfig(retained_checkpoints=3), state_backend="filesystem")
    assert (env.config.retained_checkpoints, env.config.state_backend) == (3, "filesystem")


def test_explain_shows_vertices_chains_states_and_edges() -> None:
    text = flights_job().explain()
    assert "job job: 5 vertices, 2 slots, rocksdb state" in text
    assert "-> [2] hash by carrier (utf8)" in text
    assert "      filter (uid departed)" in text
    assert "key utf8; state waiting: map, best: value" in text
