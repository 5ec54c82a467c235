"""The keyed counter with a ledger sink: small, quick, and the one whose speed is measured."""

from __future__ import annotations

import random
from collections import Counter
from functools import cached_property, partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.counting import COUNTED_COMPARED, COUNTED_KEY_AND_SEQ, Count, counted_rows, counted_states
from holdfast.chaos.workloads.feeds import Feed, read_before, without_rows
from holdfast.chaos.workloads.scenario import (
    CutExpectation,
    CutStates,
    InFlightRows,
    Positions,
    Scenario,
    SinkExpectation,
    Workload,
)
from holdfast.chaos.workloads.settings import draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sinks.files.parquet import ParquetSink

LEDGER = "/out/ledger"
KEYS = 20


def make(rng: random.Random) -> Scenario:
    """About 1,000 records in a little more than a second, some ten checkpoints."""
    feed = Feed("numbers", rng.randint(900, 1_100), KEYS, first=rng.randrange(1_000))
    parallelism = rng.choice((1, 1, 1, 1, 1, 1, 1, 2))  # a rescale gives others several, too; the other workloads draw up to 4
    step_rows = rng.choice((80, 100, 125))
    rows_per_second = rng.randint(700, 900)
    # small batches cost the same each, and fanout and random have them
    settings = {**draw_settings(rng, interval_ms=(100, 150)), "batch_rows_max": 65_536}
    return counted_into_ledger(feed, parallelism, rows_per_second, step_rows, settings)


def counted_into_ledger(
    feed: Feed,
    parallelism: int,
    rows_per_second: int,
    step_rows: int,
    settings: dict[str, Any],
    *,
    duration_ms: int = 2_000,
    sink: dict[str, Any] | None = None,
) -> Scenario:
    """The job and its expectations. `settings`: of its JobConfig; `sink`: of its sink."""
    ledger = _Ledger(feed)
    return Scenario(
        plan=partial(_plan, feed, parallelism, rows_per_second, step_rows, settings, sink or {}),
        records=feed.rows,
        sinks=(
            SinkExpectation(
                LEDGER,
                "ledger",
                ledger.rows,
                ordered_by=COUNTED_KEY_AND_SEQ,
                steps_by_one=True,
                compared=COUNTED_COMPARED,
                at_cut=ledger.rows_at,
            ),
        ),
        operators=("count",),
        cuts=(CutExpectation((feed.uid,), "count", ledger.states_at, beside=ledger.states_beside),),
        duration_ms=duration_ms,
    )


def _plan(
    feed: Feed,
    drawn: int,
    rows_per_second: float,
    step_rows: int,
    settings: dict[str, Any],
    sink: dict[str, Any],
    parallelism: int | None,
) -> JobPlan:
    environment = Environment("counter", parallelism=parallelism or drawn, **settings)
    numbers = environment.from_source(feed.source(rows_per_second, step_rows)).uid(feed.uid)
    numbers.key_by("key").process(Count()).uid("count").sink_to(ParquetSink(LEDGER, **sink), uid="ledger")
    return environment.build()


class _Ledger:
    """Expected rows of the ledger, computed once."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    @cached_property
    def _records(self) -> list[tuple[int, int, int]]:
        feed = self.feed
        return [(feed.first + index, feed.key(index), feed.value(index)) for index in range(feed.rows)]

    def rows(self) -> Counter[Row]:
        return counted_rows(self._records)

    def rows_at(self, positions: Positions) -> Counter[Row]:
        return counted_rows(self._before(positions))

    def states_at(self, positions: Positions) -> CutStates:
        return counted_states(self._before(positions))

    def states_beside(self, positions: Positions, in_flight: InFlightRows) -> CutStates:
        return counted_states(without_rows(self._before(positions), in_flight[0]))

    def _before(self, positions: Positions) -> list[tuple[int, int, int]]:
        records = self._records
        return [records[index] for index in read_before(positions[self.feed.uid], self.feed.rows)]


WORKLOAD = Workload("counter", "numbers the records of each key into a ledger", make)
