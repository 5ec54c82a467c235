"""Side outputs: what is declared and refused, where rows and events go, and that each row arrives once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.barriers.elements import Batch, CheckpointBarrier, EndOfData, Watermark, WatermarkStatus
from holdfast.barriers.jobgraph import JobGraph, Partitioning, with_uids
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import KeyedStream, Stream
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction, ProcessOperator
from holdfast.operators.functions.rows import MapOperator
from holdfast.operators.functions.schema import UNDECLARED, declared_type
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.side_outputs import SIDE_OUTPUTS_MAX, OutputTag, declared_side_outputs
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.operators.task.chain import ChainNode, OperatorChain
from holdfast.statebackends.errors import GraphError, SchemaMismatchError, UndeclaredOutputError
from holdfast.statebackends.storage.port import Storage
from tests.examples import examples
from tests.harness.mini import MiniCluster
from tests.operators.ends import NamedSink, NamedSource
from tests.operators.harness import OperatorHarness
from tests.operators.ports import DictStorage
from tests.operators.runtime import Bench, Port, Recording
from tests.operators.worker.test_loop import SCHEMA, make_batch, run_through_crashes

ROWS = declared_type({"k": str, "n": int}, "rows")
ODD = OutputTag("odd", {"n": int})


class Split(ProcessFunction):
    """Odd numbers aside; what a timer finds, too."""

    side_outputs = (ODD, OutputTag("notes"))
    returns = {"n": int}  # noqa: RUF012 - the contract's class attribute

    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        if value["n"] % 2:
            ctx.output(ODD, {"n": value["n"]})
        else:
            out({"n": value["n"]})
        ctx.output("notes", value["n"])
        ctx.timers.register_event_time_timer(value["n"])

    def on_timer(self, timestamp_ms: int, ctx: ProcessContext, out: Collector) -> None:
        ctx.output("odd", {"n": -timestamp_ms})


def keyed(parallelism: int = 2, **settings: Any) -> KeyedStream:
    env = Environment("job", parallelism=parallelism, **settings)
    return env.from_source(NamedSource(ROWS.schema, "rows")).uid("rows").key_by("k")


def split() -> Stream:
    return keyed().process(Split()).uid("split")


# -------------------------------------------------------------------------------------------------------------- the graph


def test_a_side_output_is_a_stream_that_is_chained_or_exchanged() -> None:
    main = split()
    odd = main.side_output(ODD)
    assert odd.schema == pa.schema([pa.field("n", pa.int64(), nullable=False)])
    odd.map(lambda row: row, returns=ODD.returns).uid("chained").sink_to(NamedSink(), uid="odd-out")
    main.side_output("odd").rebalance().filter(bool).uid("dealt").sink_to(NamedSink(), uid="dealt-out")
    odd.key_by("n").process(Split(), side_outputs={"notes": {"n": int}}).uid("keyed").sink_to(NamedSink(), uid="keyed-out")
    main.sink_to(NamedSink(), uid="out")
    plan = main.environment.build()
    vertex = next(vertex for vertex in plan.graph.vertices if vertex.operators[0].uid == "split")
    assert vertex.chain_edges == (("split", "chained"), ("chained", "odd-out"), ("split", "out"))
    assert vertex.chain_side_outputs == {"chained": "odd"}
    edges = {edge.target: edge for edge in plan.graph.edges if edge.source_operator == "split"}
    found = sorted((edge.partitioning, edge.tag, plan.schemas[edge.edge_id].names) for edge in edges.values())
    assert found == [(Partitioning.HASH, "odd", ["n"]), (Partitioning.REBALANCE, "odd", ["n"])]
    assert msgspec.json.decode(msgspec.json.encode(plan.graph), type=JobGraph) == plan.graph


def test_a_graph_without_side_outputs_says_nothing_of_them() -> None:
    main = split()
    main.sink_to(NamedSink(), uid="out")
    text = msgspec.json.encode(main.environment.build().graph)
    assert b"side_output" not in text


def test_only_a_side_output_may_be_read() -> None:
    main = split()
    main.side_output(ODD).sink_to(NamedSink(), uid="odd-out")
    graph = main.environment.build().graph
    assert [operator.uid for operator in graph.vertices[1].operators] == ["split", "odd-out"]


def test_renamed_operators_keep_their_side_outputs() -> None:
    main = split()
    main.side_output(ODD).sink_to(NamedSink(), uid="odd-out")
    renamed = with_uids(msgspec.to_builtins(main.environment.build().graph), {"odd-out": "other"})
    assert renamed is not None
    assert renamed["vertices"][1]["chain_side_outputs"] == {"other": "odd"}


def test_a_union_of_both_outputs_is_two_edges() -> None:
    main = split()
    main.union(main.side_output(ODD)).filter(bool).uid("all").sink_to(NamedSink(), uid="out")
    plan = main.environment.build()
    assert [(edge.source_operator, edge.tag) for edge in plan.graph.edges if edge.source_operator == "split"] == [
        ("split", None),
        ("split", "odd"),
    ]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: split().side_output("even"), "'split' has no side output 'even'; declared: odd, notes"),
        (lambda: keyed().side_output("odd"), "applies to an operator"),
        (lambda: split().side_output(ODD).uid("x"), "not to a union, key_by, partitioning or side output"),
        (lambda: keyed().process(Split(), side_outputs={"a b": {}}), "name of a side output must be"),
        (lambda: keyed().process(Split(), side_outputs={"odd": 5}), "'process': returns="),
        (lambda: keyed().process(Split(), side_outputs=[ODD, OutputTag("odd")]), "'process': two side outputs are called 'odd'"),
        (lambda: keyed().process(Split(), side_outputs=["odd"]), "'process': side_outputs is"),  # type: ignore[list-item]
        (lambda: OutputTag(""), "name of a side output must be"),
        (lambda: OutputTag("x" * 101), "name of a side output must be"),
        (lambda: split().side_output("notes").key_by("n"), "returns="),
    ],
)
def test_what_is_not_declared_is_refused_when_the_graph_is_built(make: Any, problem: str) -> None:
    with pytest.raises(GraphError, match=problem):
        make()


def test_an_operator_has_so_many_side_outputs() -> None:
    tags = [OutputTag(f"t{number}") for number in range(SIDE_OUTPUTS_MAX + 1)]
    assert len(declared_side_outputs(tags[:-1], "op")) == SIDE_OUTPUTS_MAX
    with pytest.raises(GraphError, match="'op' declares 101 side outputs"):
        declared_side_outputs(tags, "op")


# ----------------------------------------------------------------------------------------------------------- the function


def operator(function: ProcessFunction | None = None) -> ProcessOperator:
    given = function or Split()
    sides = declared_side_outputs(given.side_outputs, "op")
    return ProcessOperator(given, key_selector("k", None, ROWS, "op"), ROWS, UNDECLARED, sides)


def process(harness: OperatorHarness, *rows: int, at: list[int] | None = None) -> None:
    harness.process([{"k": "a", "n": n} for n in rows], at, ROWS.schema)


def test_rows_of_a_side_output_have_the_event_times_of_their_records_and_timers() -> None:
    with OperatorHarness(operator(), key_type="utf8") as harness:
        harness.output.sides = {"odd": []}
        harness.operator.open()
        process(harness, 1, 2, 3, at=[10, 20, 30])
        harness.watermark(2)
        first, second = harness.output.sides["odd"]
        assert (list(first.rows()), first.timestamps.tolist()) == ([{"n": 1}, {"n": 3}], [10, 30])  # type: ignore[union-attr]
        assert (list(second.rows()), second.timestamps.tolist()) == ([{"n": -1}, {"n": -2}], [1, 2])  # type: ignore[union-attr]
        assert harness.output.rows() == [{"n": 2}]
        process(harness, 5)
        assert harness.output.sides["odd"][2].timestamps is None


def test_rows_that_nobody_reads_are_not_kept() -> None:
    with OperatorHarness(operator(), key_type="utf8") as harness:
        process(harness, 1, 2, at=[10, 20])
        assert harness.output.rows() == [{"n": 2}]
        assert harness.operator._sides._sides == {}


class Undeclared(Split):
    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        ctx.output("od", value)


class AtOpen(Split):
    def open(self, ctx: ProcessContext) -> None:
        ctx.output(ODD, {"n": 1})


class AtClose(Split):
    def open(self, ctx: ProcessContext) -> None:
        self.ctx = ctx

    def close(self) -> None:
        self.ctx.output(ODD, {"n": 1})


def test_an_undeclared_tag_is_an_error_that_names_operator_and_tags() -> None:
    with OperatorHarness(operator(Undeclared()), key_type="utf8") as harness:
        problem = r"'op': side output 'od' is not among the declared ones \(odd, notes\)"
        with pytest.raises(UndeclaredOutputError, match=problem) as raised:
            process(harness, 1)
        assert (raised.value.operator, raised.value.side_output) == ("op", "od")


def test_open_and_close_have_no_record_to_emit_for() -> None:
    with pytest.raises(UndeclaredOutputError, match=r"'odd' has no rows in open\(\) and close\(\)"):
        OperatorHarness(operator(AtOpen()), key_type="utf8").open()
    harness = OperatorHarness(operator(AtClose()), key_type="utf8").open()
    with pytest.raises(UndeclaredOutputError, match=r"open\(\) and close\(\)"):
        harness.close()


class Misfit(Split):
    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        ctx.output(ODD, {"n": "one"})


def test_a_row_that_does_not_fit_is_refused_by_the_name_of_the_operator() -> None:
    with OperatorHarness(operator(Misfit()), key_type="utf8") as harness:
        harness.output.sides = {"odd": []}
        harness.operator.open()
        process(harness, 1)
        with pytest.raises(SchemaMismatchError, match=r"'op'.*'n'") as raised:
            harness.output.sides["odd"][0].columns()
        assert raised.value.operator == "op"


# -------------------------------------------------------------------------------------------------------------- the chain


class Aside(Recording):
    """Each row to the main output and to a side output."""

    def process_batch(self, batch: Batch, input_index: int) -> None:
        self.output.collect(batch)
        self.output.collect_side("aside", batch)
        self.output.collect_side("unread", batch)


def spoil(row: dict[str, int]) -> dict[str, int]:
    row["n"] += 100
    return row


def test_readers_of_two_outputs_do_not_see_what_the_others_do_to_a_row() -> None:
    operators = {"head": Aside("head", []), "left": MapOperator(spoil, UNDECLARED, UNDECLARED)}
    operators["right"] = MapOperator(spoil, UNDECLARED, UNDECLARED)
    nodes = []
    for uid, each in operators.items():
        context = OperatorHarness(each).context
        context.uid = uid
        nodes.append(ChainNode(each, context))
    side, ports = Port(), [Port(), Port()]
    nodes[0].attach(side, "aside")
    for node, own in zip(nodes[1:], ports, strict=True):
        node.attach(own)
    chain = OperatorChain(nodes, [("head", "left"), ("head", "right")], {"right": "aside"})
    chain.setup()
    chain.process(Batch(rows=[{"n": 1}]), 0)
    assert side.elements == [{"n": 1}]
    assert [own.elements for own in ports] == [[{"n": 101}], [{"n": 101}]]
    assert [node.context.counters.records_out for node in nodes] == [2, 1, 1]
    assert [node.context.counters.records_in for node in nodes] == [1, 1, 1]


def test_barriers_watermarks_statuses_and_ends_go_to_side_outputs() -> None:
    bench = Bench([Aside("a", [])], channels=1)
    side = Port()
    bench.chain.head.attach(side, "aside")
    bench.chain.setup()
    bench.started()
    bench.rows(0, "x")
    statuses = (WatermarkStatus(idle=True), WatermarkStatus(idle=False))
    for event in (Watermark(5), *statuses, CheckpointBarrier(1, 1_000, folder="chk-1"), EndOfData()):
        bench.events(0, event)
        bench.settle()
    assert [type(element).__name__ for element in side.elements] == [
        "str",
        "Watermark",
        "WatermarkStatus",
        "WatermarkStatus",
        "CheckpointBarrier",
        "Watermark",
        "EndOfData",
    ]
    assert side.elements == bench.port.elements


# -------------------------------------------------------------------------------------------------------------- whole jobs

OUTPUTS: dict[str, DictStorage] = {}


def open_output(path: str) -> Storage:
    return OUTPUTS.setdefault(path, DictStorage(root=path))


class ByParity(ProcessFunction):
    """Numbers the rows of each key; those with an odd id go aside."""

    seen = hf.ValueStateDescriptor("seen", int)
    states = (seen,)
    returns = SCHEMA
    side_outputs = {"odd": SCHEMA}  # noqa: RUF012 - the contract's class attribute

    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        state = ctx.state(self.seen)
        state.update(state.value(0) + 1)
        row = {"id": value["id"], "key": state.value()}
        if value["id"] % 2:
            ctx.output("odd", row)
        else:
            out(row)


def parity_job(path: str, parallelism: int, *, chaining: bool) -> JobPlan:
    OUTPUTS.pop(path, None)
    env = Environment("parity", parallelism=parallelism, channel_credit_batches=2, step_budget_ms=1, chaining=chaining)
    rows = env.from_source(GeneratorSource(make_batch, 300, SCHEMA, batch_rows=7)).uid("rows")
    main = rows.key_by("key").process(ByParity()).uid("parity")
    main.sink_to(ParquetSink(path, "even", open_storage=open_output), uid="even")
    odd = main.side_output("odd")
    odd.sink_to(ParquetSink(path, "odd", open_storage=open_output), uid="odd")
    dealt = odd.rebalance().map(lambda row: {**row, "key": 0}, returns=SCHEMA).uid("dealt")
    dealt.sink_to(ParquetSink(path, "dealt", open_storage=open_output), uid="dealt-out")
    return env.build()


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    crashes=st.lists(st.integers(20, 600), max_size=2),
    parallelism=st.sampled_from([1, 2]),
    chaining=st.booleans(),
)
def test_each_row_comes_out_of_its_output_once(
    tmp_path: Path, seed: int, crashes: list[int], parallelism: int, chaining: bool
) -> None:
    path = "mem://parity"
    cluster = MiniCluster(parity_job(path, parallelism, chaining=chaining), DictStorage(), local_directory=str(tmp_path), seed=seed)
    run_through_crashes(cluster, crashes)
    even, odd, dealt = (read_committed(path, sink, open_storage=open_output)["id"].to_pylist() for sink in ("even", "odd", "dealt"))
    assert Counter(even) == Counter(range(0, 300, 2))
    assert Counter(odd) == Counter(dealt) == Counter(range(1, 300, 2))
