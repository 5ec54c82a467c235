"""One source in order, and windows of so many records of each key: which ones a record is in depends on nothing but its turn."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from functools import partial
from math import gcd
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import Feed, read_before
from holdfast.chaos.workloads.scenario import CutExpectation, CutStates, Positions, Possibly, Scenario, SinkExpectation, Workload
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_pace, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions import aggregates
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH = "/out/count_windows"

Lengths = tuple[int, int]
"""Count and slide."""


def make(rng: random.Random) -> Scenario:
    """One subtask reads, so that records of a key come in order; some streams have event times."""
    rows, keys = rng.randint(150, 500), rng.choice((1, 4, 30))
    feed = Feed("records", rows, keys, 0, 10_000, rng.choice((0, 2)))
    lengths = rng.choice(((5, 5), (1, 1), (20, 20), (6, 2), (6, 4), (3, 7), (4, 8)))
    pace, parallelism, settings = draw_pace(rng, rows), rng.randint(1, PARALLELISM_MAX), draw_settings(rng)
    committed = partial(_committed, feed, lengths)
    return Scenario(
        plan=partial(_plan, feed, pace, lengths, parallelism, settings),
        records=rows,
        sinks=(SinkExpectation(PATH, "counted", partial(_rows, feed, lengths, range(rows)), at_cut=committed),),
        operators=("window",),
        cuts=(CutExpectation((feed.uid,), "window", partial(_states_at, feed, lengths)),),
    )


def _plan(
    feed: Feed, pace: tuple[float, int], lengths: Lengths, drawn: int, settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    environment = Environment("count_windows", parallelism=parallelism or drawn, **settings)
    stream = environment.from_source(feed.source(*pace)).uid(feed.uid).set_parallelism(1)
    if feed.step_ms:
        stream = stream.assign_timestamps("at", max_out_of_orderness_ms=0).uid("times").set_parallelism(1)
    count, slide = lengths
    keyed = stream.key_by("key")
    windowed = keyed.count_window(count) if count == slide else keyed.count_window(count, slide)
    counts = windowed.aggregate(
        n=aggregates.count(),
        total=aggregates.sum("value"),
        least=aggregates.min("value"),
        values=aggregates.count_distinct("value"),
        newest=aggregates.last("i"),
    )
    counts.uid("window").sink_to(ParquetSink(PATH), uid="counted")
    return environment.build()


# ------------------------------------------------------------------------------------------ the same, one record at a time


def _of_keys(feed: Feed, indices: Iterable[int]) -> dict[int, list[int]]:
    """Key -> its records, in turn."""
    found: dict[int, list[int]] = {}
    for index in sorted(indices):
        found.setdefault(feed.key(index), []).append(index)
    return found


def _rows(feed: Feed, lengths: Lengths, indices: Iterable[int]) -> Counter[Row]:
    """What is not full at the end does not fire, nor in a drain."""
    count, slide = lengths
    rows: Counter[Row] = Counter()
    for key, records in _of_keys(feed, indices).items():
        for end in range(slide, len(records) + 1, slide):
            window = records[max(0, end - count) : end]
            values = [feed.value(index) for index in window]
            rows[key, len(window), sum(values), min(values), len(set(values)), window[-1]] += 1
    return rows


def _committed(feed: Feed, lengths: Lengths, positions: Positions) -> Counter[Row]:
    return _rows(feed, lengths, read_before(positions[feed.uid], feed.rows))


def _states_at(feed: Feed, lengths: Lengths, positions: Positions) -> CutStates:
    """The last panes of each key; an empty one may have left a row."""
    count, slide = lengths
    pane = gcd(count, slide)
    panes, states = count // pane, dict[Any, Any]()
    for key, records in _of_keys(feed, read_before(positions[feed.uid], feed.rows)).items():
        newest = len(records) // pane
        position = len(records) % pane if count == slide else len(records)
        for number in range(max(0, newest - panes + 1), newest + 1):
            found = _pane(feed, records[number * pane : (number + 1) * pane], position if number % panes == 0 else 0)
            may_be_gone = not found["n"] and (count == slide or number % panes)
            states[key, number % panes] = Possibly(found) if may_be_gone else found
    return {"count_windows": states}


def _pane(feed: Feed, records: list[int], position: int) -> dict[str, Any]:
    values = [feed.value(index) for index in records]
    newest = records[-1] if records else None
    at = None if newest is None else feed.at(newest) if feed.step_ms else 0
    least = min(values, default=None)
    return {
        "window_records": position, "n": len(records), "total": sum(values) if values else None, "least": least,
        "values": list(dict.fromkeys(values)), "newest": newest, "newest.time": at,
    }


WORKLOAD = Workload("count_windows", "aggregates windows of so many records of each key, side by side or overlapping", make)
