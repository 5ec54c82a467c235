"""A query of Nexmark, which the seed draws, against DuckDB over the same events."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

from holdfast.api.nexmark.oracle import Oracle
from holdfast.api.nexmark.queries import QUERIES
from holdfast.api.nexmark.query import Auctions, Query
from holdfast.chaos.pipelines.judging import LOST, REPEATED, Problem
from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.scenario import Scenario, SinkExpectation, Workload
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH = "/out/nexmark"
EVENTS_PER_SECOND = 20
"""Of event time: a window of 10 s has 184 bids."""
CLOSED_BY_A_DRAIN = frozenset({"q3", "q4", "q5", "q6", "q7", "q8", "q9", "q11", "q12", "q20"})
"""Queries whose windows, auctions or joins a drain closes before their time: what a join keeps has no partner behind the end."""


def make(rng: random.Random) -> Scenario:
    """Up to half a minute of the auction house, in which one auction in ten closes."""
    query = QUERIES[rng.choice([name for name, query in QUERIES.items() if not query.partition_by])]
    events, seed = rng.randint(100, 600), rng.randrange(1_000)
    rate = events / rng.uniform(0.7, 1.5)
    settings = draw_settings(rng)
    parallelism = rng.randint(1, PARALLELISM_MAX)
    return Scenario(
        plan=partial(_plan, query, events, seed, rate, parallelism, settings),
        records=events,
        sinks=(SinkExpectation(PATH, query.name, None, judge=partial(_judge, query, events, seed)),),
        operators=(),
        may_drain=query.name not in CLOSED_BY_A_DRAIN,
    )


def _plan(
    query: Query, events: int, seed: int, rate: float, drawn: int, settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    environment = Environment("nexmark", parallelism=parallelism or drawn, **settings)
    query.build(Auctions(environment, events, EVENTS_PER_SECOND, rate, seed)).sink_to(ParquetSink(PATH), uid=query.name)
    return environment.build()


def _judge(query: Query, events: int, seed: int, rows: Sequence[Row]) -> Problem | None:
    environment = Environment("columns")
    schema = query.build(Auctions(environment, events, EVENTS_PER_SECOND, None, seed)).schema
    assert schema is not None
    difference = Oracle(events, EVENTS_PER_SECOND, seed).expected(query).difference(rows, schema.names)
    if difference is None:
        return None
    invariant = LOST if difference.missing else REPEATED
    return Problem(invariant, f"sink {query.name}: missing {difference.missing}, too many {difference.extra}")


WORKLOAD = Workload("nexmark", "a query of Nexmark, which the seed draws, beside DuckDB", make)
