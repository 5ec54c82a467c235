"""Jobs of random shape: a drawn description, built with the DSL. The evaluator of graphs.py gives the expected output."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, assert_never

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import SCHEMA, no_states, read_before, without_rows
from holdfast.chaos.workloads.graphs import (
    MODULUS,
    AsideNode,
    BatchNode,
    CoMapNode,
    CoNumberNode,
    DistinctNode,
    Event,
    FilterNode,
    FlatMapNode,
    Graph,
    MapNode,
    Node,
    NumberNode,
    SourceNode,
    SplitNode,
    Step,
    StepNode,
    UnionNode,
    WindowNode,
    add_windows,
    count_keys,
    draw_graph,
    evaluate,
    feed_events,
)
from holdfast.chaos.workloads.scenario import (
    CutExpectation,
    CutStates,
    InFlightRows,
    Positions,
    Possibly,
    Scenario,
    SinkExpectation,
    Workload,
)
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_settings
from holdfast.chaos.workloads.windows import watermark_bound
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions import aggregates
from holdfast.operators.functions.connected import KeyedCoProcessFunction
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.operators.functions.side_outputs import OutputTag
from holdfast.operators.functions.windows.assigners import Tumbling
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.statebackends.state import MapStateDescriptor, ValueStateDescriptor

Record = dict[str, int]


def make(rng: random.Random) -> Scenario:
    """A random graph; where it has windows it can't be drained in the middle."""
    graph = draw_graph(rng)
    parallelism = rng.randint(1, PARALLELISM_MAX)
    chaining = rng.random() < 0.7
    return scenario_of(graph, partial(build_graph, graph, parallelism, chaining, draw_settings(rng)))


def scenario_of(graph: Graph, plan: Callable[[int | None], JobPlan]) -> Scenario:
    """The job of a description, which `plan` builds at a parallelism, with its expected output and states."""
    expected = _Expected(graph)
    uids = tuple(feed.uid for feed in graph.feeds)
    return Scenario(
        plan=plan,
        records=sum(feed.rows for feed in graph.feeds),
        sinks=tuple(
            SinkExpectation(
                sink_path(index),
                f"sink-{index}",
                partial(expected.rows, index),
                at_cut=None if graph.waits(index) else partial(expected.rows_at, index),
            )
            for index in graph.sinks
        ),
        operators=tuple(
            f"step-{index}"
            for index, node in enumerate(graph.nodes)
            if isinstance(node, StepNode) and not isinstance(node.step, UnionNode | AsideNode)
        ),
        cuts=(
            CutExpectation(uids, uids[0], partial(no_states, graph.feeds)),
            *(
                CutExpectation(
                    uids,
                    f"step-{index}",
                    partial(expected.states_at, index),
                    beside=partial(expected.states_beside, index) if _is_plain(graph.nodes[index]) else None,
                )
                for index in _keyed(graph)
            ),
        ),
        may_drain=not any(graph.waits(index) for index in graph.sinks),
    )


def _keyed(graph: Graph) -> Iterator[int]:
    """Steps whose keyed state depends on positions alone."""
    for index, node in enumerate(graph.nodes):
        if not isinstance(node, StepNode) or any(graph.waits(each) for each in node.inputs):
            continue
        if isinstance(node.step, NumberNode | DistinctNode | WindowNode | CoNumberNode | SplitNode):
            yield index


def _is_plain(node: Node) -> bool:
    """Whether its state depends on the columns of its rows alone."""
    return isinstance(node, StepNode) and not isinstance(node.step, WindowNode)


def sink_path(index: int) -> str:
    """Where the sink behind a node writes."""
    return f"/out/random-{index % 2}"


class _Expected:
    """Expected output of each node, in all and at a cut."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._at: tuple[Positions, list[list[Event]]] | None = None

    @cached_property
    def _all(self) -> list[list[Event]]:
        return evaluate(self._graph, {feed.uid: feed_events(feed, range(feed.rows)) for feed in self._graph.feeds})

    def rows(self, index: int) -> Counter[Row]:
        return Counter(event[:3] for event in self._all[index])

    def _given_at(self, positions: Positions) -> list[list[Event]]:
        """Output at the newest cut asked for; sinks and operators ask for the same one in turn."""
        if self._at is None or self._at[0] != positions:
            before = {feed.uid: feed_events(feed, read_before(positions[feed.uid], feed.rows)) for feed in self._graph.feeds}
            self._at = (positions, evaluate(self._graph, before))
        return self._at[1]

    def rows_at(self, index: int, positions: Positions) -> Counter[Row]:
        return Counter(event[:3] for event in self._given_at(positions)[index])

    def states_at(self, index: int, positions: Positions) -> CutStates:
        """Keyed state of one step."""
        return self._states(index, self._inputs_at(index, positions), positions)

    def states_beside(self, index: int, positions: Positions, in_flight: InFlightRows) -> CutStates:
        """Keyed state of one step, while these rows are in flight to it."""
        inputs = self._inputs_at(index, positions)
        if len(inputs) > 1 and not isinstance(self._step(index), CoNumberNode):  # of a union all inputs are one
            inputs = [[event for each in inputs for event in each]]
        left = [without_rows(events, in_flight.get(number, ())) for number, events in enumerate(inputs)]
        return self._states(index, left, positions)

    def _step(self, index: int) -> Step:
        node = self._graph.nodes[index]
        assert isinstance(node, StepNode)
        return node.step

    def _inputs_at(self, index: int, positions: Positions) -> list[list[Event]]:
        given, node = self._given_at(positions), self._graph.nodes[index]
        assert isinstance(node, StepNode)
        return [given[each] for each in node.inputs]

    def _states(self, index: int, inputs: list[list[Event]], positions: Positions) -> CutStates:
        taken = [event for each in inputs for event in each]
        match step := self._step(index):
            case NumberNode():
                return {"seq": count_keys(taken)}
            case SplitNode():
                return {"seen": count_keys(taken)}
            case CoNumberNode():
                first, second = map(count_keys, inputs)
                return {"first": first, "second": second}
            case DistinctNode(modulus):
                return {"seen": {(key, value % modulus): True for _, key, value, _ in taken}}
            case WindowNode(size_ms):
                return {"windows": self._windows_at(index, taken, size_ms, positions)}
        raise AssertionError(f"{type(step).__name__} keeps no state")

    def _windows_at(self, index: int, taken: list[Event], size_ms: int, positions: Positions) -> dict[Any, Any]:
        feeds = self._graph.feeds_behind(index)
        before = {feed.uid: list(read_before(positions[feed.uid], feed.rows)) for feed in feeds}
        passed = watermark_bound(feeds, before, positions)
        states: dict[Any, Any] = {}
        for (key, start), (count, total) in add_windows(taken, size_ms).items():
            value = {"n": count, "total": total}
            states[(key, start)] = Possibly(value) if passed is None or start + size_ms - 1 <= passed else value
        return states


# ----------------------------------------------------------------------------------------------------------------- build


def build_graph(graph: Graph, drawn: int, chaining: bool, settings: dict[str, Any], parallelism: int | None) -> JobPlan:
    """The job of a description, at a parallelism; None: `drawn`."""
    environment = Environment("random", parallelism=parallelism or drawn, chaining=chaining, **settings)
    streams: list[Stream] = []
    for index, node in enumerate(graph.nodes):
        if isinstance(node, SourceNode):
            streams.append(_source(environment, node))
        else:
            streams.append(_step(f"step-{index}", node, [streams[each] for each in node.inputs]))
    for index in graph.sinks:
        streams[index].sink_to(ParquetSink(sink_path(index)), uid=f"sink-{index}")
    return environment.build()


def _source(environment: Environment, node: SourceNode) -> Stream:
    """The feed with its event times, without their column."""
    feed = node.feed
    stream = environment.from_source(feed.source(*node.pace)).uid(feed.uid)
    timed = stream.assign_timestamps("at", max_out_of_orderness_ms=feed.disorder_ms).uid(f"{feed.uid}-times")
    plain = timed.map_batches(without_time, returns=SCHEMA).uid(f"{feed.uid}-plain")
    if node.parallelism is not None:
        for each in (stream, timed, plain):
            each.set_parallelism(node.parallelism)
    return plain


def _step(uid: str, node: StepNode, inputs: list[Stream]) -> Stream:
    if isinstance(node.step, AsideNode):
        return inputs[0].side_output("aside")
    if isinstance(node.step, UnionNode):
        return inputs[0].union(*inputs[1:])
    if isinstance(node.step, CoMapNode | CoNumberNode):
        made = _co_operator(node.step, *inputs).uid(uid)
    else:
        made = _operator(uid, node, _exchanged(node, inputs[0])).uid(uid)
    if node.parallelism is not None:
        made.set_parallelism(node.parallelism)
    if node.chaining == "head":
        made.start_new_chain()
    elif node.chaining == "never":
        made.disable_chaining()
    return made if not isinstance(node.step, WindowNode) else made.map_batches(window_row, returns=SCHEMA).uid(f"{uid}-row")


def _exchanged(node: StepNode, stream: Stream) -> Stream:
    match node.exchange:
        case "rebalance":
            return stream.rebalance()
        case "broadcast":
            return stream.broadcast()
        case "forward":
            return stream.forward()
        case "rescale":
            return stream.rescale()
        case "shuffle":
            return stream.shuffle(len(node.inputs) + node.inputs[0])
        case "global":
            return stream.global_()
        case "custom":
            return stream.partition_custom(subtask_of, ("key", "value"))
    return stream


def _co_operator(step: CoMapNode | CoNumberNode, first: Stream, second: Stream) -> Stream:
    connected = first.connect(second)
    if isinstance(step, CoMapNode):
        return connected.map(partial(change, 1, step.first, 0), partial(change, 1, step.second, 0), returns=SCHEMA)
    return connected.key_by("key", "key").process(CoNumber())


def _operator(uid: str, node: StepNode, stream: Stream) -> Stream:
    match node.step:
        case MapNode(factor, offset, keys):
            return stream.map(partial(change, factor, offset, keys), returns=SCHEMA)
        case FilterNode(modulus, below):
            return stream.filter(partial(is_below, modulus, below))
        case FlatMapNode(copies_max):
            return stream.flat_map(partial(copies, copies_max), returns=SCHEMA)
        case BatchNode(offset):
            return stream.map_batches(partial(add, offset), returns=SCHEMA)
        case NumberNode():
            return stream.key_by("key").process(Number())
        case DistinctNode(modulus):
            return stream.key_by("key").process(Distinct(modulus))
        case WindowNode(size_ms):
            windowed = stream.key_by("key").window(Tumbling(milliseconds=size_ms))
            return windowed.aggregate(n=aggregates.count(), total=aggregates.sum("value"))
        case SplitNode(modulus):
            return stream.key_by("key").process(Split(modulus))
        case UnionNode() | AsideNode() | CoMapNode() | CoNumberNode():
            raise AssertionError(f"{type(node.step).__name__} is no operator of one input")
        case _:
            assert_never(node.step)


# ------------------------------------------------------------------------------------------------------------- user code


def without_time(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns without the time."""
    return batch.select(SCHEMA.names)


def change(factor: int, offset: int, keys: int, row: Record) -> Record:
    """Another key, unless there are 0, and another value."""
    value = row["value"]
    key = (row["key"] + value) % keys if keys else row["key"]
    return {"i": row["i"], "key": key, "value": (value * factor + offset) % MODULUS}


def subtask_of(key: tuple[int, int], parallelism: int) -> int:
    """By key and value."""
    return sum(key) % parallelism


def is_below(modulus: int, below: int, row: Record) -> bool:
    return row["value"] % modulus < below


def copies(copies_max: int, row: Record) -> Iterator[Record]:
    """As many copies as the value says."""
    for copy in range(row["value"] % (copies_max + 1)):
        yield {**row, "value": (row["value"] + copy) % MODULUS}


def add(offset: int, batch: pa.RecordBatch) -> pa.RecordBatch:
    """A greater value, below the modulus."""
    sums = pa.array((batch.column("value").to_numpy() + offset) % MODULUS)
    return batch.set_column(2, SCHEMA.field("value"), sums)


def window_row(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A window as a row of the usual columns."""
    starts = pc.divide(batch.column("window_start").cast(pa.int64()), 1_000)
    values = (batch.column("total").to_numpy() * 3 + batch.column("n").to_numpy()) % MODULUS
    return pa.RecordBatch.from_arrays([starts, batch.column("key"), pa.array(values)], schema=SCHEMA)


class Number(ProcessFunction):
    """Numbers the records of each key 1, 2, 3 ..."""

    seq = ValueStateDescriptor("seq", int)
    states = (seq,)
    returns = SCHEMA

    def process_element(self, row: Record, ctx: ProcessContext, out: Collector) -> None:
        state = ctx.state(self.seq)
        seq = state.value(0) + 1
        state.update(seq)
        out({"i": seq, "key": row["key"], "value": seq * 2})


class Distinct(ProcessFunction):
    """Emits each remainder of a key's values once."""

    seen = MapStateDescriptor("seen", int, bool)
    states = (seen,)
    returns = SCHEMA

    def __init__(self, modulus: int) -> None:
        self.modulus = modulus

    def process_element(self, row: Record, ctx: ProcessContext, out: Collector) -> None:
        seen, rest = ctx.state(self.seen), row["value"] % self.modulus
        if not seen.contains(rest):
            seen.put(rest, True)
            out({"i": -1, "key": row["key"], "value": rest})


class CoNumber(KeyedCoProcessFunction):
    """1, 2, 3 ... of each key, for each stream."""

    first = ValueStateDescriptor("first", int)
    second = ValueStateDescriptor("second", int)
    states = (first, second)
    returns = SCHEMA

    def process_element1(self, row: Record, ctx: ProcessContext, out: Collector) -> None:
        self._number(self.first, 0, row, ctx, out)

    def process_element2(self, row: Record, ctx: ProcessContext, out: Collector) -> None:
        self._number(self.second, 1, row, ctx, out)

    def _number(self, counter: ValueStateDescriptor[int], side: int, row: Record, ctx: ProcessContext, out: Collector) -> None:
        state = ctx.state(counter)
        seq = state.value(0) + 1
        state.update(seq)
        out({"i": seq, "key": row["key"], "value": seq * 2 + side})


class Split(ProcessFunction):
    """Values that the modulus divides; the others go aside."""

    seen = ValueStateDescriptor("seen", int)
    states = (seen,)
    returns = SCHEMA
    side_outputs = (OutputTag("aside", SCHEMA),)

    def __init__(self, modulus: int) -> None:
        self.modulus = modulus

    def process_element(self, row: Record, ctx: ProcessContext, out: Collector) -> None:
        state = ctx.state(self.seen)
        state.update(state.value(0) + 1)
        if row["value"] % self.modulus:
            ctx.output("aside", row)
        else:
            out(row)


WORKLOAD = Workload("random", "runs a graph of random shape, compared with an evaluator of the same description", make)
