"""One chain with many ends: map, filter, flat_map and map_batches, an exchange in between, and two sinks that share a path."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import SCHEMA, Feed, no_states, read_before
from holdfast.chaos.workloads.scenario import CutExpectation, Positions, Scenario, SinkExpectation, Workload
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_pace, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.operators.sources.generator import GeneratorSource

SHARED, OWN = "/out/fanout", "/out/odd"

Record = tuple[int, int, int]

Pace = tuple[float, int | None]
"""Rows per second, and rows per step; None: the token bucket's."""


def make(rng: random.Random) -> Scenario:
    """One feed, three sinks. Some sources are paced by the product's own token bucket, which gives single rows."""
    feed = Feed("items", rng.randint(100, 300), rng.choice((2, 9)), first=rng.randrange(1_000))
    pace: Pace = (feed.rows / 1.2, None) if rng.random() < 0.2 else draw_pace(rng, feed.rows)
    parallelism = rng.randint(1, PARALLELISM_MAX)
    file_size_max = rng.choice((600, 128 << 20))
    # without chains this is a job of many subtasks, each with a turn in every round of its worker
    settings, chaining = draw_settings(rng), parallelism > 2 or rng.random() < 0.5
    sinks: tuple[tuple[str, str, Callable[[Iterable[Record]], Iterator[Row]]], ...] = (
        (SHARED, "scaled", _scaled),
        (SHARED, "spread", _spread),
        (OWN, "odd", _odd),
    )
    return Scenario(
        plan=partial(_plan, feed, pace, parallelism, file_size_max, chaining, settings),
        records=feed.rows,
        sinks=tuple(
            SinkExpectation(path, sink_id, partial(_all, feed, rows), at_cut=partial(_at_cut, feed, rows))
            for path, sink_id, rows in sinks
        ),
        operators=("scale", "odd-only", "twice", "shift"),
        cuts=(CutExpectation((feed.uid,), "scale", partial(no_states, (feed,))),),
    )


def _plan(
    feed: Feed, pace: Pace, drawn: int, file_size_max: int, chaining: bool, settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    environment = Environment("fanout", parallelism=parallelism or drawn, chaining=chaining, **settings)
    rate, step_rows = pace
    bucket = GeneratorSource(feed.make_batch, feed.rows, SCHEMA, rate, name=feed.uid)
    items = environment.from_source(bucket if step_rows is None else feed.source(rate, step_rows)).uid(feed.uid)
    scaled = items.map(scale, returns=SCHEMA).uid("scale")
    scaled.sink_to(ParquetSink(SHARED, file_size_max=file_size_max), uid="scaled")
    odd = scaled.filter(is_odd).uid("odd-only")
    odd.sink_to(ParquetSink(OWN), uid="odd")
    spread = odd.flat_map(twice, returns=SCHEMA).uid("twice").rebalance()
    spread.map_batches(shift, returns=SCHEMA).uid("shift").sink_to(ParquetSink(SHARED), uid="spread")
    return environment.build()


def scale(row: dict[str, int]) -> dict[str, int]:
    """The value times three."""
    return {**row, "value": row["value"] * 3}


def is_odd(row: dict[str, int]) -> bool:
    return row["value"] % 2 == 1


def twice(row: dict[str, int]) -> Iterator[dict[str, int]]:
    """The row as it is, and with a negative key."""
    yield row
    yield {**row, "key": -row["key"] - 1}


def shift(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Each value plus 7."""
    return batch.set_column(2, SCHEMA.field("value"), pc.add(batch.column("value"), 7))


# ------------------------------------------------------------------------------------------ the same, one record at a time


def _scaled(records: Iterable[Record]) -> Iterator[Row]:
    return ((i, key, value * 3) for i, key, value in records)


def _odd(records: Iterable[Record]) -> Iterator[Row]:
    return (row for row in _scaled(records) if row[2] % 2)


def _spread(records: Iterable[Record]) -> Iterator[Row]:
    for i, key, value in _odd(records):
        yield i, key, value + 7
        yield i, -key - 1, value + 7


def _records(feed: Feed, indices: Iterable[int]) -> Iterator[Record]:
    return ((feed.first + index, feed.key(index), feed.value(index)) for index in indices)


def _all(feed: Feed, rows: Callable[[Iterable[Record]], Iterator[Row]]) -> Counter[Row]:
    return Counter(rows(_records(feed, range(feed.rows))))


def _at_cut(feed: Feed, rows: Callable[[Iterable[Record]], Iterator[Row]], positions: Positions) -> Counter[Row]:
    return Counter(rows(_records(feed, read_before(positions[feed.uid], feed.rows))))


WORKLOAD = Workload("fanout", "sends one chain of row and batch functions to three sinks, two of them at one path", make)
