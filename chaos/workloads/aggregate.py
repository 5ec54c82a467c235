"""Running aggregates over columns: how many rows they emit depends on where batches end; the last row of a key does not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import Feed, read_before
from holdfast.chaos.workloads.scenario import CutExpectation, CutStates, Positions, Scenario, SinkExpectation, Workload
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_pace, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions import aggregates
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH = "/out/aggregate"


def make(rng: random.Random) -> Scenario:
    """One feed, one table of aggregates."""
    feed = Feed("measures", rng.randint(200, 900), rng.choice((1, 5, 40)), first=rng.randrange(1_000))
    parallelism = rng.randint(1, PARALLELISM_MAX)
    pace = draw_pace(rng, feed.rows)
    settings = draw_settings(rng)
    return Scenario(
        plan=partial(_plan, feed, parallelism, pace, settings),
        records=feed.rows,
        sinks=(SinkExpectation(PATH, "totals", partial(_rows, feed), ordered_by=(0, 1), last_of_key=True),),
        operators=("aggregate",),
        cuts=(CutExpectation((feed.uid,), "aggregate", partial(_states_at, feed)),),
    )


def _plan(feed: Feed, drawn: int, pace: tuple[float, int], settings: dict[str, Any], parallelism: int | None) -> JobPlan:
    environment = Environment("aggregate", parallelism=parallelism or drawn, **settings)
    keyed = environment.from_source(feed.source(*pace)).uid(feed.uid).key_by("key")
    totals = keyed.aggregate(
        n=aggregates.count(), total=aggregates.sum("value"), low=aggregates.min("value"), high=aggregates.max("value")
    )
    totals.uid("aggregate").sink_to(ParquetSink(PATH), uid="totals")
    return environment.build()


def _totals(feed: Feed, indices: Iterable[int]) -> dict[int, list[int]]:
    """key -> [n, total, low, high] over these records."""
    totals: dict[int, list[int]] = {}
    for index in indices:
        value = feed.value(index)
        found = totals.setdefault(feed.key(index), [0, 0, value, value])
        found[:] = found[0] + 1, found[1] + value, min(found[2], value), max(found[3], value)
    return totals


def _rows(feed: Feed) -> Counter[Row]:
    return Counter((key, *row) for key, row in _totals(feed, range(feed.rows)).items())


def _states_at(feed: Feed, positions: Positions) -> CutStates:
    totals = _totals(feed, read_before(positions[feed.uid], feed.rows))
    names = ("n", "total", "low", "high")
    return {"aggregates": {(key, 0): dict(zip(names, row, strict=True)) for key, row in totals.items()}}


WORKLOAD = Workload("aggregate", "keeps running totals per key in columns and emits each change", make)
