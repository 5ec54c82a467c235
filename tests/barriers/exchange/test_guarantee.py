"""Which channels wait in an at-least-once job, and what may repeat: a table of graphs."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from holdfast.barriers.exchange.guarantee import behind_loose, describe_guarantee, loose_vertices, stays_aligned
from holdfast.barriers.jobgraph import JobGraph
from holdfast.chaos.workloads.rules import RULES, ApplyRules
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.promises import promises_not_kept
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions import aggregates
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.statebackends.errors import InvalidConfigError

SCHEMA = pa.schema([pa.field("i", pa.int64(), nullable=False)])


def feed(environment: Environment, uid: str) -> Stream:
    return environment.from_source(GeneratorSource(lambda indices: None, 1, SCHEMA)).uid(uid)


def plan_of(shape: str, parallelism: int, **settings: Any) -> JobPlan:
    environment = Environment("job", parallelism=parallelism, **{"checkpointing_mode": "at_least_once", **settings})
    first = feed(environment, "first")
    match shape:
        case "chained":
            made = first.filter(bool)
        case "keyed":
            made = first.key_by("i").aggregate(n=aggregates.sum("i"))
        case "union":
            made = first.union(feed(environment, "second")).filter(bool)
        case "broadcast":
            made = first.broadcast().filter(bool)
        case _:
            made = first.key_by("i").connect(feed(environment, "second").broadcast(RULES)).process(ApplyRules(1))
    made.uid("made").filter(bool).uid("next").disable_chaining().sink_to(ParquetSink("/out"), uid="out")
    return environment.build()


def named(graph: JobGraph, ids: Any) -> list[str]:
    return [vertex.operators[0].uid for vertex in graph.vertices if vertex.vertex_id in ids]


@pytest.mark.parametrize(
    ("shape", "parallelism", "loose", "behind"),
    [
        ("chained", 1, [], []),
        ("chained", 3, [], []),
        ("keyed", 1, [], []),
        ("keyed", 3, ["made"], ["made", "next", "out", "out-committer"]),
        ("union", 1, ["made"], ["made", "next", "out", "out-committer"]),
        ("broadcast", 3, [], []),
        ("rules", 1, ["made"], ["made", "next", "out", "out-committer"]),
    ],
)
def test_what_may_repeat(shape: str, parallelism: int, loose: list[str], behind: list[str]) -> None:
    graph = plan_of(shape, parallelism).graph
    assert named(graph, loose_vertices(graph)) == loose
    assert named(graph, behind_loose(graph)) == behind
    assert ("exactly once here" in describe_guarantee(graph)) == (not loose)
    assert describe_guarantee(graph) in promises_not_kept(graph)


def test_committers_and_broadcasts_stay_aligned() -> None:
    graph = plan_of("rules", 2).graph
    aligned = [edge for edge in graph.edges if stays_aligned(graph, edge)]
    ends = [(edge.source_operator, graph.vertex(edge.target).operators[0].uid) for edge in aligned]
    assert ends == [("second", "made"), ("out", "out-committer")]


def test_exactly_once_repeats_nothing() -> None:
    graph = plan_of("keyed", 3, checkpointing_mode="exactly_once").graph
    assert (loose_vertices(graph), behind_loose(graph)) == ((), frozenset())
    assert describe_guarantee(graph) == "exactly once: a restore loses no record and repeats none"
    assert describe_guarantee(graph) not in promises_not_kept(graph)


def test_another_mode_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfigError, match="'at_most_once', must be one of exactly_once, at_least_once"):
        plan_of("keyed", 3, checkpointing_mode="at_most_once")
