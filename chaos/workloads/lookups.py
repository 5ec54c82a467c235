"""Lookup joins: what a table, or a function that the pool answers late, out of order or never, has of the keys of a source."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import pyarrow as pa

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import Feed, no_states, read_before
from holdfast.chaos.workloads.scenario import CutExpectation, Positions, Scenario, SinkExpectation
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_pace, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.async_map import RetryStrategy
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH = "/out/lookups"
MATCHES_MAX = 3
KEYS_MAX = 12


def found_of(key: int) -> list[dict[str, int]]:
    """What is known of a key: none to three rows."""
    return [{"found": 10 * key + place} for place in range(key % (MATCHES_MAX + 1))]


def find(keys: list[int]) -> dict[int, list[dict[str, int]]]:
    return {key: found_of(key) for key in keys}


async def find_async(keys: list[int]) -> list[list[dict[str, int]]]:
    return [found_of(key) for key in keys]


def make(rng: random.Random) -> Scenario:
    feed = Feed("asking", rng.randint(60, 300), rng.choice((1, 5, KEYS_MAX)))
    how, looked_up = rng.choice(("inner", "left")), rng.choice(("table", find, find_async))
    settings: dict[str, Any] = {}
    if looked_up != "table":
        settings = {
            "returns": {"found": int},
            "ordered": rng.random() < 0.5,
            "capacity": rng.choice((5, 40)),
            "timeout_ms": 400,
            "retry": RetryStrategy(5, rng.choice((0, 20))),
            "batch_rows": rng.choice((1, 7)),
            "cache_rows": rng.choice((0, 4, 100)),
        }
        settings["cache_ttl_ms"] = rng.choice((None, 50)) if settings["cache_rows"] else None
    rows = partial(_rows, feed, how)
    at_cut = partial(_rows_at, feed, how) if looked_up == "table" else None
    drawn = rng.randint(1, PARALLELISM_MAX), draw_settings(rng)
    return Scenario(
        plan=partial(_plan, feed, draw_pace(rng, feed.rows), how, looked_up, settings, *drawn),
        records=feed.rows,
        sinks=(SinkExpectation(PATH, "found", rows, at_cut=at_cut),),
        operators=("lookup",),
        cuts=(CutExpectation((feed.uid,), "lookup", partial(no_states, (feed,))),),
    )


def _plan(
    feed: Feed,
    pace: tuple[float, int],
    how: Any,
    looked_up: Any,
    calls: dict[str, Any],
    drawn: int,
    settings: dict[str, Any],
    parallelism: int | None,
) -> JobPlan:
    environment = Environment("lookups", parallelism=parallelism or drawn, **settings)
    source = environment.from_source(feed.source(*pace)).uid(feed.uid)
    known = [{"key": key, **row} for key in range(KEYS_MAX) for row in found_of(key)]
    table = pa.Table.from_pylist(known, schema=pa.schema([("key", pa.int64()), ("found", pa.int64())]))
    found = source.lookup_join(table if looked_up == "table" else looked_up, on="key", how=how, **calls).uid("lookup")
    found.sink_to(ParquetSink(PATH), uid="found")
    return environment.build()


def _rows(feed: Feed, how: str) -> Counter[Row]:
    return Counter(row for index in range(feed.rows) for row in _of_record(feed, how, index))


def _rows_at(feed: Feed, how: str, positions: Positions) -> Counter[Row]:
    return Counter(row for index in read_before(positions[feed.uid], feed.rows) for row in _of_record(feed, how, index))


def _of_record(feed: Feed, how: str, index: int) -> list[Row]:
    key = feed.key(index)
    own = key, feed.first + index, feed.value(index)
    found: list[int | None] = [row["found"] for row in found_of(key)]
    return [(*own, each) for each in (found or [None] * (how == "left"))]
