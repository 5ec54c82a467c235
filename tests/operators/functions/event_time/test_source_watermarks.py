"""A source with a watermark strategy: one operator to its user, two in one chain below."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.barriers.jobgraph import JobGraph
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.statebackends.errors import GraphError, InvalidConfigError, NotFoundError, UnknownColumnError

SCHEMA = pa.schema([pa.field("at", pa.int64(), nullable=False), pa.field("key", pa.int64(), nullable=False)])
TIMES = hf.WatermarkStrategy.for_bounded_out_of_orderness(5).with_timestamp_assigner("at")


def make(indices: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(indices * 10), pa.array(indices % 3)], schema=SCHEMA)


def generator(rows: int = 100) -> GeneratorSource:
    return GeneratorSource(make, rows, SCHEMA)


def built(environment: hf.Environment, stream: Any) -> JobGraph:
    stream.sink_to(hf.Blackhole(), uid="out")
    return environment.build().graph


def chains(graph: JobGraph) -> list[list[str]]:
    return [[operator.uid for operator in vertex.operators] for vertex in graph.vertices]


def test_what_is_set_of_the_source_is_set_of_both() -> None:
    environment = hf.Environment("job", parallelism=4)
    stream = environment.from_source(generator(), watermark_strategy=TIMES)
    graph = built(environment, stream.uid("bids").name("Bids").set_parallelism(2).set_max_parallelism(8))
    vertex = graph.vertices[0]
    assert [(each.uid, each.name, each.kind) for each in vertex.operators] == [
        ("bids", "Bids", "source"),
        ("bids-watermarks", "Bids watermarks", "timestamps"),
    ]
    assert (vertex.parallelism, vertex.max_parallelism, vertex.name) == (2, 8, "Bids -> Bids watermarks")
    assert not any(each.uid_generated for each in vertex.operators)


@pytest.mark.parametrize("how", ["chaining=False", "disable_chaining"])
def test_the_two_stay_in_one_chain(how: str) -> None:
    environment = hf.Environment("job", parallelism=2, chaining=how != "chaining=False")
    aligned = TIMES.with_watermark_alignment("group", 100)
    stream = environment.from_source(generator(), watermark_strategy=aligned).uid("bids")
    if how == "disable_chaining":
        stream.disable_chaining()
    assert chains(built(environment, stream.map_batches(lambda batch: batch, returns=SCHEMA).uid("same")))[:2] == [
        ["bids", "bids-watermarks"],
        ["same"] if how == "chaining=False" else ["same", "out"],
    ]


def test_without_a_uid_both_have_generated_ones() -> None:
    environment = hf.Environment("job")
    vertex = built(environment, environment.from_source(generator(), watermark_strategy=TIMES)).vertices[0]
    assert [(each.uid, each.uid_generated) for each in vertex.operators][:2] == [("source-0", True), ("source-0-watermarks", True)]


def test_everything_reads_the_source_behind_its_watermarks() -> None:
    environment = hf.Environment("job", parallelism=2)
    one, other = (environment.from_source(generator(), watermark_strategy=TIMES).uid(uid) for uid in ("one", "other"))
    counts = one.union(other).key_by("key").window(hf.Tumbling(milliseconds=100)).aggregate(n=hf.count()).uid("counts")
    one.sink_to(hf.Blackhole(), uid="copy")
    graph = built(environment, counts)
    assert {edge.source_operator for edge in graph.inputs(graph.vertices[-1].vertex_id)} == {"one-watermarks", "other-watermarks"}
    assert ["one", "one-watermarks", "copy"] in chains(graph)
    text = environment.explain()
    assert "one watermarks" not in text
    assert "generator watermarks (uid one-watermarks)" in text


@pytest.mark.parametrize(
    ("strategy", "error"),
    [
        (5, GraphError),
        (hf.WatermarkStrategy.for_bounded_out_of_orderness(5), GraphError),
        (TIMES.with_timestamp_assigner("missing"), UnknownColumnError),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused_and_leaves_no_source_behind(strategy: Any, error: type[Exception]) -> None:
    environment = hf.Environment("job")
    with pytest.raises(error):
        environment.from_source(generator(), watermark_strategy=strategy)
    assert not environment.graph.nodes


def test_a_uid_that_is_taken_is_refused() -> None:
    environment = hf.Environment("job")
    stream = environment.from_source(generator(), watermark_strategy=TIMES).uid("bids")
    with pytest.raises(InvalidConfigError, match="bids-watermarks"):
        built(environment, stream.map_batches(lambda batch: batch, returns=SCHEMA).uid("bids-watermarks"))


def windows(environment: Any, *, as_call: bool) -> Any:
    if as_call:
        bids = environment.from_source(generator()).uid("bids").assign_timestamps_and_watermarks(TIMES).uid("bids-watermarks")
    else:
        bids = environment.from_source(generator(), watermark_strategy=TIMES).uid("bids")
    return bids.key_by("key").window(hf.Tumbling(milliseconds=100)).aggregate(n=hf.count()).uid("windows")


@pytest.mark.parametrize("was_call", [True, False])
def test_a_job_runs_as_with_a_call_of_its_own_and_takes_over_its_snapshots(was_call: bool) -> None:
    def finished(job: hf.testing.Job, out: Any) -> list[tuple[Any, ...]]:
        assert job.status == "FINISHED"
        return sorted((row["key"], row["n"], time) for row, time in out.take())

    with hf.testing.Job("same", parallelism=2) as one, hf.testing.Job("same", parallelism=3) as other:
        rows = []
        for job, as_call in ((one, was_call), (other, not was_call)):
            out = job.output(windows(job.environment, as_call=as_call))
            job.start()
            rows.append(finished(job, out))
        assert rows[0] == rows[1]
        assert len(rows[0]) == 30
    with hf.testing.Job("third", parallelism=1) as third:
        feed = third.input("feed", {"at": int})
        third.output(feed.stream.map(lambda row: row, returns={"at": int}).uid("same"))
        third.output(windows(third.environment, as_call=was_call))
        third.start()
        location = third.savepoint()
        with hf.testing.Job("fourth", parallelism=2) as fourth:
            out = fourth.output(windows(fourth.environment, as_call=not was_call))
            fourth.start(from_=location, sinks="fork", allow_non_restored_state=True)
            assert finished(fourth, out) == [], "it had read everything"


def test_the_watermark_of_the_source_is_the_one_that_its_strategy_gives() -> None:
    with hf.testing.Job() as job:
        slow = GeneratorSource(make, 100, SCHEMA, rows_per_second=10)
        job.output(job.environment.from_source(slow, watermark_strategy=TIMES).uid("bids"))
        job.start()
        job.advance(by_ms=1_000)
        assert job.watermark("bids") == job.watermark("bids-watermarks")
        assert job.watermark("bids") is not None
        assert job.progress("bids").records_out >= 10
        with pytest.raises(NotFoundError):
            job.watermark("bid")
