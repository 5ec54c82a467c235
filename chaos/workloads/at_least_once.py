"""Jobs whose subtasks don't wait for barriers: random graphs, windows over two sources, and rules that every subtask has.

What a record does more than once is not wrong here; what it does not do at all is. So a sink's rows are counted by a measure that
only grows with each record, whatever comes again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.broadcast import Ruled
from holdfast.chaos.workloads.feeds import Feed, read_before
from holdfast.chaos.workloads.graphs import (
    AsideNode,
    BatchNode,
    CoMapNode,
    FilterNode,
    FlatMapNode,
    Graph,
    MapNode,
    NumberNode,
    SplitNode,
    StepNode,
    UnionNode,
    WindowNode,
    draw_graph,
    evaluate,
    feed_events,
)
from holdfast.chaos.workloads.random_graphs import build_graph, sink_path
from holdfast.chaos.workloads.rules import PATH as RULED
from holdfast.chaos.workloads.rules import build_ruled
from holdfast.chaos.workloads.scenario import (
    Positions,
    RepeatExpectation,
    Scenario,
    SinkExpectation,
    StateExpectation,
    Workload,
)
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_settings
from holdfast.chaos.workloads.windows import draw_skewed_feeds, timed_streams, with_waiting_watermarks
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions import aggregates
from holdfast.operators.functions.windows.assigners import Session, Sliding, Tumbling
from holdfast.operators.sinks.files.parquet import ParquetSink

SHARES = (5, 3, 2)
"""Of runs with a graph of random shape, with windows, and with rules."""
PATH = "/out/at-least-once"
SLIDES = 2
"""Windows that a record is in, where they slide."""

_PER_RECORD = MapNode | FilterNode | FlatMapNode | BatchNode | UnionNode | CoMapNode | SplitNode | AsideNode
"""Steps that make the same of a record whenever it comes."""


def make(rng: random.Random) -> Scenario:
    """A job that may repeat."""
    (drawn,) = rng.choices((_random, _windows, _rules), SHARES)
    return drawn(rng)


def _settings(rng: random.Random) -> dict[str, Any]:
    return {**draw_settings(rng), "checkpointing_mode": "at_least_once"}


# ------------------------------------------------------------------------------------------------------ random graphs


def _random(rng: random.Random) -> Scenario:
    graph = _without_windows(draw_graph(rng))
    expected = _Expected(graph)
    uids = tuple(feed.uid for feed in graph.feeds)
    parallelism, chaining = rng.randint(1, PARALLELISM_MAX), rng.random() < 0.7
    return Scenario(
        plan=partial(build_graph, graph, parallelism, chaining, _settings(rng)),
        records=sum(feed.rows for feed in graph.feeds),
        sinks=tuple(SinkExpectation(sink_path(index), f"sink-{index}", None) for index in graph.sinks),
        operators=tuple(
            f"step-{index}"
            for index, node in enumerate(graph.nodes)
            if isinstance(node, StepNode) and not isinstance(node.step, UnionNode | AsideNode)
        ),
        repeats=tuple(
            RepeatExpectation(
                f"sink-{index}",
                uids,
                partial(expected.rows, index),
                partial(expected.rows_at, index),
                is_bounded=_is_per_record(graph, index),
            )
            for index in graph.sinks
        ),
        counted=tuple(
            StateExpectation(f"step-{index}", "seq", partial(expected.counts_at, index))
            for index, node in enumerate(graph.nodes)
            if isinstance(node, StepNode) and isinstance(node.step, NumberNode)
        ),
        may_drain=True,
    )


def _without_windows(graph: Graph) -> Graph:
    """What a window makes of a record that comes again is another row, which nothing could be said of."""
    nodes = (
        replace(node, step=NumberNode()) if isinstance(node, StepNode) and isinstance(node.step, WindowNode) else node
        for node in graph.nodes
    )
    return Graph(tuple(nodes), graph.sinks)


def _is_per_record(graph: Graph, index: int) -> bool:
    node = graph.nodes[index]
    if not isinstance(node, StepNode):
        return True
    return isinstance(node.step, _PER_RECORD) and all(_is_per_record(graph, each) for each in node.inputs)


class _Expected:
    """Output of each node without any repetition, in all and at a cut."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    @cached_property
    def _all(self) -> list[Any]:
        return evaluate(self._graph, {feed.uid: feed_events(feed, range(feed.rows)) for feed in self._graph.feeds})

    def rows(self, index: int) -> Counter[Row]:
        return Counter(event[:3] for event in self._all[index])

    def _given_at(self, positions: Positions) -> list[Any]:
        return evaluate(
            self._graph,
            {feed.uid: feed_events(feed, read_before(positions[feed.uid], feed.rows)) for feed in self._graph.feeds},
        )

    def rows_at(self, index: int, positions: Positions) -> Counter[Row]:
        return Counter(event[:3] for event in self._given_at(positions)[index])

    def counts_at(self, index: int, positions: Positions) -> Counter[int]:
        """Key -> records in front of the cut."""
        given, node = self._given_at(positions), self._graph.nodes[index]
        assert isinstance(node, StepNode)
        return Counter(key for each in node.inputs for _, key, _, _ in given[each])


# ------------------------------------------------------------------------------------------------------------ windows


def _windows(rng: random.Random) -> Scenario:
    """Every record is in the results of its windows, however often these fire."""
    feeds, paces = draw_skewed_feeds(rng)
    kind, size_ms = rng.choice(("tumbling", "tumbling", "sliding", "session")), rng.choice((40, 100, 250))
    parallelism, lateness_ms = rng.randint(1, PARALLELISM_MAX), rng.choice((0, 0, 100))
    uids, before = tuple(feed.uid for feed in feeds), partial(_in_windows, feeds, kind, size_ms)
    return Scenario(
        plan=partial(_window_plan, feeds, paces, kind, size_ms, lateness_ms, parallelism, _settings(rng)),
        records=sum(feed.rows for feed in feeds),
        sinks=(SinkExpectation(PATH, "windowed", None),),
        operators=("window",),
        repeats=(
            RepeatExpectation(
                "windowed",
                uids,
                before,
                before,
                measure=partial(_measured, kind),
                waits=True,
                is_bounded=not lateness_ms,
                fires_again=bool(lateness_ms),
            ),
        ),
    )


def _window_plan(
    feeds: tuple[Feed, ...],
    paces: tuple[tuple[float, int], ...],
    kind: str,
    size_ms: int,
    lateness_ms: int,
    drawn: int,
    settings: dict[str, Any],
    parallelism: int | None,
) -> JobPlan:
    environment = Environment("at-least-once", parallelism=parallelism or drawn, **settings)
    assigner: Tumbling | Sliding | Session = Tumbling(size_ms)
    if kind != "tumbling":
        assigner = Session(size_ms) if kind == "session" else Sliding(SLIDES * size_ms, size_ms)
    windowed = timed_streams(environment, feeds, paces).key_by("key").window(assigner)
    if lateness_ms:
        windowed = windowed.allowed_lateness(lateness_ms)
    counts = windowed.aggregate(n=aggregates.count(), total=aggregates.sum("value"))
    counts.uid("window").sink_to(ParquetSink(PATH), uid="windowed")
    return with_waiting_watermarks(environment.build())


def _measured(kind: str, rows: Iterable[Row]) -> Counter[Any]:
    """(key, start of the window, us) -> records in its results. Where a session begins depends on what comes again: 0."""
    found: Counter[Any] = Counter()
    for key, start, _, n, _ in rows:
        found[key, 0 if kind == "session" else start] += n
    return found


def _in_windows(feeds: tuple[Feed, ...], kind: str, size_ms: int, positions: Positions | None = None) -> Counter[Any]:
    """As `_measured`, of all records or of those in front of a cut, each once."""
    found: Counter[Any] = Counter()
    for feed in feeds:
        for index in range(feed.rows) if positions is None else read_before(positions[feed.uid], feed.rows):
            start_ms = feed.at(index) - feed.at(index) % size_ms
            starts = {"session": (0,), "sliding": (start_ms, start_ms - size_ms)}.get(kind, (start_ms,))
            found.update((feed.key(index), each * 1_000) for each in starts)
    return found


# -------------------------------------------------------------------------------------------------------------- rules


def _rules(rng: random.Random) -> Scenario:
    """Copies of the rules are equal in every snapshot: their channels wait, those of the records do not."""
    drawn, rules = Ruled.draw(rng, 600), rng.randint(20, 60)
    records, control = drawn.records, Feed("control", rules, 1, first=-rules)
    ruled = drawn._replace(
        control=control,
        paces=(drawn.paces[0], (rules / rng.uniform(0.5, 1.2), 1)),
        settings={**drawn.settings, "checkpointing_mode": "at_least_once"},
    )
    return Scenario(
        plan=partial(build_ruled, ruled),
        records=records.rows + control.rows,
        sinks=(SinkExpectation(RULED, "ruled", None),),
        operators=("apply",),
        repeats=(
            RepeatExpectation("ruled", (records.uid, control.uid), ruled.rows, partial(_ruled_before, ruled), waits=True),
        ),
    )


def _ruled_before(ruled: Ruled, positions: Positions) -> Counter[Row]:
    before = set(read_before(positions[ruled.records.uid], ruled.records.rows))
    return Counter({row: count for row, count in ruled.rows().items() if row[0] in before})


WORKLOAD = Workload(
    "at_least_once", "runs random graphs, windows and rules that wait for no barrier: none is lost, only restores repeat", make
)
