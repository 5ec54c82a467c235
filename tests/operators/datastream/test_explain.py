"""`explain`: the calls of the program, why each link is chained or not, and what runs where."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions.aggregates import Aggregate, count, max, sum
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.statebackends.errors import GraphError, InvalidConfigError
from tests.operators.ends import NamedSink, NamedSource


class Aside(ProcessFunction):
    side_outputs = {"late": {"flight": int}}  # noqa: RUF012 - the contract's class attribute

    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        out(value)


def source(parallelism: int = 2, **settings: Any) -> Stream:
    env = Environment("job", parallelism=parallelism, **settings)
    return env.from_source(NamedSource()).uid("flights")


def explained(stream: Stream) -> dict[str, Any]:
    stream.sink_to(NamedSink(commits=False), uid="out")
    found: dict[str, Any] = json.loads(stream.environment.explain(format="json"))
    return found


def reasons(stream: Stream) -> dict[tuple[str, str], tuple[bool, str]]:
    links = explained(stream)["job_graph"]["links"]
    return {(each["source"], each["target"]): (each["chained"], each["reason"]) for each in links}


CHAINED = (True, "forward, equal parallelism, one stream")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: source().filter(bool).uid("next"), CHAINED),
        (lambda: source().forward().filter(bool).uid("next"), CHAINED),
        (lambda: source().rebalance().filter(bool).uid("next"), (False, "partitioned: rebalance")),
        (lambda: source().rescale().filter(bool).uid("next"), (False, "partitioned: rescale")),
        (lambda: source().filter(bool).uid("next").set_parallelism(3), (False, "parallelism 2 and 3")),
        (lambda: source().filter(bool).uid("next").set_max_parallelism(7), (False, "max parallelism 128 and 7")),
        (lambda: source().filter(bool).uid("next").start_new_chain(), (False, "next starts a new chain")),
        (lambda: source().filter(bool).uid("next").disable_chaining(), (False, "next has chaining disabled")),
        (lambda: source().disable_chaining().filter(bool).uid("next"), (False, "flights has chaining disabled")),
        (lambda: source(chaining=False).filter(bool).uid("next"), (False, "the job has chaining=False")),
        (lambda: twice(source()), (False, "next reads 2 streams")),
    ],
)
def test_each_link_has_its_reason(make: Any, expected: tuple[bool, str]) -> None:
    assert reasons(make())[("flights", "next")] == expected


def twice(stream: Stream) -> Stream:
    return stream.union(stream.filter(bool).uid("kept")).map(str).uid("next").map(lambda row: row, returns=NamedSource().schema)


def test_a_committer_is_never_chained() -> None:
    stream = source(1, max_parallelism=1)
    stream.sink_to(NamedSink(), uid="out")
    *_, link = json.loads(stream.environment.explain(format="json"))["job_graph"]["links"]
    assert (link["target"], link["chained"], link["reason"]) == ("out-committer", False, "out-committer is a committer")


def test_the_reasons_are_those_of_the_plan() -> None:
    stream = source().filter(bool).uid("next")
    late = stream.key_by("carrier").process(Aside()).uid("aside").side_output("late")
    late.sink_to(NamedSink(commits=False), uid="late")
    found = explained(stream)
    plan = stream.environment.build()
    chained = {(each["source"], each["target"]) for each in found["job_graph"]["links"] if each["chained"]}
    assert chained == {pair for vertex in plan.graph.vertices for pair in vertex.chain_edges}
    assert [each["id"] for each in found["job_graph"]["vertices"]] == [vertex.vertex_id for vertex in plan.graph.vertices]
    link = next(each for each in found["job_graph"]["links"] if each["target"] == "late")
    assert (link["side_output"], link["input"], link["partitioning"]) == ("late", 0, "forward")


def test_the_stream_graph_is_what_the_program_says() -> None:
    stream = source()
    stream.map(str).name("forgotten")
    others = stream.shuffle(3).filter(bool).uid("some")
    joined = stream.connect(others).key_by("carrier", "carrier").map(lambda row: row, lambda row: row, returns=stream.schema)
    nodes = explained(joined.uid("joined").set_parallelism(3))["stream_graph"]
    assert [(node["name"], node["uid"], node["used"], node["parallelism"]) for node in nodes] == [
        ("flights", "flights", True, None),
        ("forgotten", None, False, None),
        ("filter", "some", True, None),
        ("co_map", "joined", True, 3),
        ("out", "out", True, None),
    ]
    assert nodes[3]["inputs"] == [
        {"id": 0, "input": 0, "partitioning": "hash", "key": "carrier", "side_output": None},
        {"id": 2, "input": 1, "partitioning": "hash", "key": "carrier", "side_output": None},
    ]
    assert nodes[2]["inputs"][0]["partitioning"] == "shuffle"
    assert nodes[4]["inputs"][0]["partitioning"] is None


def test_the_execution_plan_has_every_subtask_with_its_channels() -> None:
    found = explained(source(2).rescale().filter(bool).uid("next").set_parallelism(4))
    execution = found["execution_plan"]
    flights, following, out = (vertex["id"] for vertex in found["job_graph"]["vertices"])
    assert (execution["slots"], len(execution["subtasks"])) == (4, 2 + 4 + 2)
    subtasks = {(each["vertex"], each["subtask"]): each for each in execution["subtasks"]}
    assert all(each["slot"] == each["subtask"] for each in execution["subtasks"])
    assert subtasks[flights, 1]["outputs"] == [{"edge": 0, "vertex": following, "first": 2, "last": 3}]
    assert subtasks[following, 2]["inputs"] == [{"edge": 0, "vertex": flights, "first": 1, "last": 1}]
    assert subtasks[out, 0]["inputs"] == [{"edge": 1, "vertex": following, "first": 0, "last": 3}]
    assert execution["channels"] == 4 + 8


def test_it_says_what_may_repeat() -> None:
    mode = {"checkpointing_mode": "at_least_once"}
    found = explained(source(2, **mode).rebalance().filter(bool).uid("next").filter(bool).uid("last"))
    assert found["checkpointing_mode"] == "at_least_once"
    assert found["guarantee"].startswith("at least once: a restore loses no record, and may repeat some in ")
    assert [each["may_repeat"] for each in found["job_graph"]["vertices"]] == [False, True]
    alone = source(1, **mode).rebalance().filter(bool).uid("next")
    alone.sink_to(NamedSink(commits=False), uid="out")
    assert alone.environment.explain().splitlines()[1].startswith("at least once: exactly once here")
    assert explained(source().rebalance().filter(bool).uid("next"))["guarantee"].startswith("exactly once")


def test_the_text_has_all_three() -> None:
    stream = source().filter(bool).uid("next").rebalance().filter(bool).uid("then").set_parallelism(3)
    stream.sink_to(NamedSink(commits=False), uid="out")
    assert stream.environment.explain() == "\n".join(
        [
            "job job: 3 vertices, 3 slots, memory state",
            "[1] parallelism 2, max 128",
            "    flights (uid flights); state positions: operator_list",
            "      filter (uid next)",
            "    -> [2] rebalance; not chained: parallelism 2 and 3",
            "[2] parallelism 3, max 128",
            "    filter (uid then)",
            "    -> [3] rebalance; not chained: parallelism 3 and 2",
            "[3] parallelism 2, max 128",
            "    out (uid out)",
            "",
            "stream graph: the calls of the program",
            "    #0 source flights (uid flights)",
            "    #1 filter (uid next) <- #0",
            "    #2 filter (uid then), parallelism 3 <- #1 rebalance",
            "    #3 sink out (uid out) <- #2",
            "",
            "execution plan: 7 subtasks, 12 channels; subtask i runs in slot i",
            "    flights -> filter: slots 0 to 1, reads 0 channels",
            "    filter: slots 0 to 2, reads 6 channels",
            "    out: slots 0 to 1, reads 6 channels",
        ]
    )


def test_other_formats_and_broken_graphs_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="format is 'yaml', must be one of text, json"):
        source().environment.explain(format="yaml")  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="no sink"):
        source().environment.explain(format="json")


@pytest.mark.parametrize(
    ("parallelism", "settings", "aggregates", "expected"),
    [
        (2, {}, {"n": count(), "most": max("delay")}, "combined by key and window where it pays"),
        (1, {}, {"n": count()}, "not combined: parallelism 1"),
        (2, {"combine_aggregates": False}, {"n": count()}, "not combined: combine_aggregates is off"),
        (2, {}, {"total": sum("delay")}, "not combined: sum of 'delay' (double) goes by the order of records"),
    ],
)
def test_links_say_whether_records_are_combined(
    parallelism: int, settings: dict[str, Any], aggregates: dict[str, Aggregate], expected: str
) -> None:
    stream = source(parallelism, **settings).key_by("carrier").aggregate(emit="changes", **aggregates).uid("totals")
    found = explained(stream)["job_graph"]["links"]
    assert {each["target"]: each["combined"] for each in found} == {"totals": expected, "out": None}
    sent = ["carrier", *("delay" for each in aggregates.values() if each.column)]
    assert [each["columns"] for each in found] == [sent, None]
    assert f"; not chained: partitioned: hash; {expected}; sends {', '.join(sent)}" in stream.environment.explain()
    plan = stream.environment.build()
    assert set(plan.combinings) == ({0} if expected.startswith("combined") else set())
