"""Windows of a function of rows, with more disorder than the watermarks allow for: which records are late depends on the order of
arrival, and each is looked for by its number."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import Feed
from holdfast.chaos.workloads.scenario import AccountsExpectation, Scenario, SinkExpectation, Workload
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_pace, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.process import Collector
from holdfast.operators.functions.windows.assigners import Tumbling
from holdfast.operators.functions.windows.row_functions import ProcessWindowFunction, WindowContext
from holdfast.operators.sinks.files.parquet import ParquetSink

RESULTS, LATE = "/out/latecomers", "/out/latecomers-late"

Feeds = tuple[Feed, ...]


class Numbers(ProcessWindowFunction):
    """The numbers of the records in a window, each time that it fires."""

    returns = {"key": int, "start": int, "numbers": str}  # noqa: RUF012 - the contract's class attribute

    def process(self, key: int, ctx: WindowContext, elements: list[dict[str, int]], out: Collector) -> None:
        numbers = " ".join(str(row["i"]) for row in elements)
        out({"key": key, "start": ctx.window.start, "numbers": numbers})


def make(rng: random.Random) -> Scenario:
    """Two feeds whose disorder is several times the bound of their watermarks; a late output, or none."""
    disorder_ms, size_ms = rng.choice((200, 400)), rng.choice((30, 80))
    feeds = tuple(
        Feed(name, rng.randint(100, 250), rng.choice((1, 3, 8)), first, 10_000, rng.randint(2, 5), disorder_ms)
        for name, first in (("red", 0), ("blue", 1_000_000))
    )
    paces = tuple(draw_pace(rng, feed.rows) for feed in feeds)
    bound_ms, lateness_ms = rng.choice((0, disorder_ms // 4)), rng.choice((0, 40, 100))
    has_late_output, parallelism = rng.random() < 0.6, rng.randint(1, PARALLELISM_MAX)
    settings = draw_settings(rng) | {"latency_tracking_interval_ms": rng.choice((0, 20, 150))}
    sinks = (SinkExpectation(RESULTS, "results", None),)
    return Scenario(
        plan=partial(_plan, feeds, paces, (size_ms, bound_ms, lateness_ms), has_late_output, parallelism, settings),
        records=sum(feed.rows for feed in feeds),
        sinks=(*sinks, SinkExpectation(LATE, "late", None)) if has_late_output else sinks,
        operators=("numbers",),
        accounts=AccountsExpectation("numbers", partial(_problem, feeds)),
        may_drain=False,
        may_rescale_in_flight=False,
    )


def _plan(
    feeds: Feeds,
    paces: tuple[tuple[float, int], ...],
    times: tuple[int, int, int],
    has_late_output: bool,
    drawn: int,
    settings: dict[str, Any],
    parallelism: int | None,
) -> JobPlan:
    size_ms, bound_ms, lateness_ms = times
    environment = Environment("latecomers", parallelism=parallelism or drawn, **settings)
    streams = [
        environment.from_source(feed.source(*pace))
        .uid(feed.uid)
        .assign_timestamps("at", max_out_of_orderness_ms=bound_ms)
        .uid(f"{feed.uid}-times")
        for feed, pace in zip(feeds, paces, strict=True)
    ]
    windowed = streams[0].union(*streams[1:]).key_by("key").window(Tumbling(milliseconds=size_ms)).allowed_lateness(lateness_ms)
    if has_late_output:
        windowed = windowed.side_output_late("late")
    found = windowed.process(Numbers()).uid("numbers")
    found.sink_to(ParquetSink(RESULTS), uid="results")
    if has_late_output:
        found.side_output("late").sink_to(ParquetSink(LATE), uid="late")
    return environment.build()


def _problem(feeds: Feeds, rows: Mapping[str, Sequence[Row]], dropped: int) -> str | None:
    """Of a window the last result counts; its contents are complete each time."""
    last = {(key, start): numbers.split() for key, start, numbers in rows["results"]}
    found = Counter(int(number) for numbers in last.values() for number in numbers)
    found.update(row[0] for row in rows.get("late", ()))
    doubled = sorted(number for number, count in found.items() if count > 1)
    if doubled:
        return f"the records {doubled[:10]} are in two results, or in one and in the late output"
    missing = {feed.first + index for feed in feeds for index in range(feed.rows)} - found.keys()
    if len(missing) != dropped:
        places = f"{len(missing)} records are in no result and not in the late output ({sorted(missing)[:10]})"
        return f"{places}; {dropped} are counted as late"
    return None


WORKLOAD = Workload("latecomers", "collects records in windows of a function, of which many come late", make)
