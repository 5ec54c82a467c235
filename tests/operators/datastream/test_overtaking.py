"""Which edges a barrier may overtake: a table of graphs. Flink let broadcasts and committables be overtaken, then none at all where
a job had one such edge (FLINK-22815, 36287, 37870, 33693)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.barriers.jobgraph import JobGraph, with_uids
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions.aggregates import count
from holdfast.operators.functions.broadcast import BroadcastProcessFunction, KeyedBroadcastProcessFunction
from holdfast.statebackends.state import MapStateDescriptor
from tests.operators.ends import FLIGHTS, NamedSink, NamedSource

TIMED = pa.schema([("flight", pa.string()), ("_timestamp_ms", pa.int64())])
RULES = MapStateDescriptor("rules", str, int)
RESCALED = "nothing says where its records belong after a rescale"
BROADCAST = "broadcast: copies of a state are equal at the barrier"
COMMITTABLES = "all committables of a checkpoint are at the committer when it completes"


class Ruled(BroadcastProcessFunction):
    returns = NamedSource().schema

    def process_element(self, value: Any, ctx: Any, out: Any) -> None: ...

    def process_broadcast_element(self, value: Any, ctx: Any, out: Any) -> None: ...


class RuledByKey(KeyedBroadcastProcessFunction):
    returns = NamedSource().schema

    def process_element(self, value: Any, ctx: Any, out: Any) -> None: ...

    def process_broadcast_element(self, value: Any, ctx: Any, out: Any) -> None: ...


def flights(env: Any = None, uid: str = "flights") -> Stream:
    return (env or Environment("job", parallelism=2)).from_source(NamedSource(name=uid)).uid(uid)


def counted(stream: Stream, uid: str = "next") -> Stream:
    return stream.key_by("carrier").aggregate(emit="changes", n=count()).uid(uid)


def behind(stream: Stream) -> Stream:
    return stream.filter(bool).uid("next")


def united(deal: Callable[[Stream], Stream]) -> Stream:
    first = flights()
    return behind(first.rebalance().union(deal(flights(first.environment, "others"))))


def ruled(*, keyed: bool) -> Stream:
    first = flights()
    rules = flights(first.environment, "others").broadcast(RULES)
    if keyed:
        return first.key_by("carrier").connect(rules).process(RuledByKey()).uid("next")
    return first.rebalance().connect(rules).process(Ruled()).uid("next")


def reasons(stream: Stream, *, commits: bool = False) -> dict[tuple[str, str], str | None]:
    """(source, target) -> why barriers stay in line, of each exchange; what explain says and the edges say is the same."""
    stream.sink_to(NamedSink(needs_columns=False, commits=commits), uid="out")
    links = json.loads(stream.environment.explain(format="json"))["job_graph"]["links"]
    exchanges = [link for link in links if not link["chained"]]
    edges = stream.environment.build().graph.edges
    assert [edge.overtakable for edge in edges] == [link["in_line"] is None for link in exchanges]
    assert all(link["in_line"] is None for link in links if link["chained"])
    return {(link["source"], link["target"]): link["in_line"] for link in exchanges}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: counted(flights()), None),
        (lambda: behind(flights().rebalance()), None),
        (lambda: behind(flights().shuffle(3)), None),
        (lambda: behind(flights().global_()), None),
        (lambda: behind(flights().start_new_chain()).disable_chaining(), f"forward: {RESCALED}"),
        (lambda: behind(flights().rescale()), f"rescale: {RESCALED}"),
        (lambda: behind(flights().partition_custom(lambda key, parallelism: 0, "flight")), f"custom: {RESCALED}"),
        (lambda: behind(flights().broadcast()), BROADCAST),
        (lambda: behind(flights().map(str).rebalance()), "its rows have no declared columns"),
        (lambda: behind(flights().map(dict, returns=TIMED).rebalance()), "a column is named _timestamp_ms"),
    ],
)
def test_the_partitioning_and_the_columns_decide(make: Callable[[], Stream], expected: str | None) -> None:
    assert {found for (_, target), found in reasons(make()).items() if target == "next"} == {expected}


@pytest.mark.parametrize(
    ("make", "own", "other"),
    [
        (lambda: united(lambda stream: stream.key_by("carrier").filter(bool).uid("kept").shuffle()), None, None),
        (lambda: united(lambda stream: stream.broadcast()), f"next also reads others ({BROADCAST})", BROADCAST),
        (lambda: united(lambda stream: stream.rescale()), f"next also reads others (rescale: {RESCALED})", f"rescale: {RESCALED}"),
        (lambda: ruled(keyed=True), f"next also reads others ({BROADCAST})", BROADCAST),
        (lambda: ruled(keyed=False), f"next also reads others ({BROADCAST})", BROADCAST),
    ],
)
def test_one_edge_in_line_holds_all_edges_into_the_same_vertex(
    make: Callable[[], Stream], own: str | None, other: str | None
) -> None:
    found = reasons(make())
    assert found["flights", "next"] == own
    assert {reason for (source, target), reason in found.items() if target == "next" and source != "flights"} == {other}


def test_other_edges_of_the_job_are_overtaken_still() -> None:
    ruling = ruled(keyed=True)
    found = reasons(counted(ruling.rebalance().filter(bool).uid("between"), "totals"), commits=True)
    assert found == {
        ("flights", "next"): f"next also reads others ({BROADCAST})",
        ("others", "next"): BROADCAST,
        ("next", "between"): None,
        ("between", "totals"): None,
        ("out", "out-committer"): COMMITTABLES,
    }


def test_committables_stay_in_line_whatever_the_parallelism() -> None:
    for parallelism in (1, 3):
        stream = flights(Environment("job", parallelism=parallelism))
        assert reasons(stream, commits=True)["out", "out-committer"] == COMMITTABLES


def test_splits_stay_in_line(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    env = Environment("job", parallelism=2)
    stream = env.from_source(hf.FileSource(tmp_path / "in", format="json", schema={"n": int})).uid("files")
    assert reasons(stream)["files-enumerator", "files"] == "a split is in one place at the barrier"


@pytest.mark.parametrize(
    ("settings", "head", "stay"),
    [
        ({}, None, "barriers would stay in line with unaligned_checkpoints: "),
        ({"unaligned_checkpoints": True}, "unaligned checkpoints: barriers overtake what is queued", "barriers stay in line: "),
        (
            {"unaligned_checkpoints": True, "aligned_checkpoint_timeout_ms": 70},
            "unaligned checkpoints: barriers overtake what is queued, in a checkpoint that is 70 ms old",
            "barriers stay in line: ",
        ),
        ({"checkpointing_mode": "at_least_once"}, None, None),
    ],
)
def test_the_text_names_the_reason_only_where_it_is_news(settings: dict[str, Any], head: str | None, stay: str | None) -> None:
    first = flights(Environment("job", parallelism=2, **settings))
    found = behind(first.rebalance().union(flights(first.environment, "others").broadcast()))
    reasons(found, commits=True)
    lines = found.environment.explain().splitlines()
    said = [line.split("; ")[-1] for line in lines if "not chained" in line]
    assert said == [
        "not chained: partitioned: rebalance" if stay is None else f"{stay}next also reads others ({BROADCAST})",
        "not chained: partitioned: broadcast",
        "not chained: parallelism 2 and 1",
    ]
    assert [line for line in lines if line.startswith("unaligned")] == ([] if head is None else [head])
    told = json.loads(found.environment.explain(format="json"))
    assert told["unaligned_checkpoints"] == settings.get("unaligned_checkpoints", False)
    assert told["aligned_checkpoint_timeout_ms"] == settings.get("aligned_checkpoint_timeout_ms", 0)


def test_graphs_of_before_are_read_and_new_ones_keep_it() -> None:
    stream = counted(flights())
    reasons(stream, commits=True)
    graph = stream.environment.build().graph
    told = msgspec.to_builtins(graph)
    renamed = msgspec.convert(with_uids(told, {"next": "totals"}), JobGraph)
    assert [edge.overtakable for edge in renamed.edges] == [edge.overtakable for edge in graph.edges] == [True, False]
    for edge in told["edges"]:
        del edge["overtakable"]
    assert not any(edge.overtakable for edge in msgspec.convert(told, JobGraph).edges)


def test_two_edges_from_one_operator_into_one_input_are_told_apart() -> None:
    first = flights()
    found = behind(first.rebalance().union(first.broadcast()))
    reasons(found)
    said = [line.split("; ")[0].strip() for line in found.environment.explain().splitlines() if "not chained" in line]
    assert said[:2] == ["-> [2] rebalance", "-> [2] broadcast"]
    assert found.environment.explain().count("not chained: partitioned: broadcast") == 1


def test_edges_name_the_columns_that_they_send_where_a_record_of_them_could_be_stored() -> None:
    aggregated = counted(flights())
    reasons(aggregated)
    assert [edge.columns for edge in aggregated.environment.build().graph.edges] == [("carrier: string",)]
    mixed = united(lambda stream: stream.broadcast())
    reasons(mixed, commits=True)
    in_turn, to_all, committables = mixed.environment.build().graph.edges
    assert (to_all.columns, committables.columns) == (msgspec.UNSET, msgspec.UNSET)
    assert (in_turn.overtakable, in_turn.columns) == (False, tuple(f"{field.name}: {field.type}" for field in FLIGHTS))
