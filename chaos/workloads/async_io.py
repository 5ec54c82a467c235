"""Asynchronous calls: the pool answers late, out of order, and a few never; each row has its result once, and none is overtaken.

Behind the calls a function looks at each result: one behind its watermark is marked, and so is, where order is kept, one behind a
later row of the same attempt. Neither mark is in the expected output (I34)."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import Feed, no_states
from holdfast.chaos.workloads.scenario import CutExpectation, Scenario, SinkExpectation, Workload
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_pace, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.async_map import RetryStrategy
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH = "/out/async"

TIMEOUT_MS = 400


def ask(row: dict[str, int]) -> dict[str, int]:
    """What blocks, to the pool."""
    return {**row, "value": row["value"] + 1}


async def ask_async(row: dict[str, int]) -> dict[str, int]:
    return ask(row)


def ask_all(rows: list[dict[str, int]]) -> list[dict[str, int]]:
    return [ask(row) for row in rows]


class Watch(ProcessFunction):
    """Marks what comes too late: `late` for a result that its watermark has overtaken, `order` for one that a later row has."""

    returns = dict.fromkeys(("i", "value", "late", "order"), int)

    def __init__(self, *, ordered: bool) -> None:
        self._ordered = ordered
        self._highest = -1
        self.marked: list[str] = []
        """What came too late, for the checker."""

    def process_element(self, row: dict[str, int], ctx: ProcessContext, out: Collector) -> None:
        late = ctx.timestamp is not None and ctx.timestamp <= ctx.watermark
        overtaken = self._ordered and row["i"] < self._highest
        self._highest = max(self._highest, row["i"])
        if late or overtaken:
            what = f"behind the watermark {ctx.watermark}" if late else "behind a later row"
            self.marked.append(f"of row {row['i']} at {ctx.timestamp} comes {what}")
        out({"i": row["i"], "value": row["value"], "late": int(late), "order": int(overtaken)})


def make(rng: random.Random) -> Scenario:
    """A feed with event times, from one subtask to one, so that order is known, or to several without an order."""
    feed = Feed("asking", rng.randint(100, 400), 1, 0, 10_000, rng.randint(1, 6), rng.choice((0, 15)))
    ordered = rng.random() < 0.5
    parallelism = 1 if ordered else rng.randint(1, PARALLELISM_MAX)
    calls: dict[str, Any] = {
        "ordered": ordered,
        "capacity": rng.choice((1, 5, 40)) if ordered else rng.choice((5, 40)),
        "timeout_ms": TIMEOUT_MS,
        "retry": RetryStrategy(5, rng.choice((0, 20))),
    }
    function: Any = rng.choice((ask, ask_async, ask_all))
    if function is ask_all:
        calls["batch_rows"] = rng.choice((1, 7))
    settings = draw_settings(rng)
    return Scenario(
        plan=partial(_plan, feed, draw_pace(rng, feed.rows), function, calls, parallelism, settings),
        records=feed.rows,
        sinks=(SinkExpectation(PATH, "answers", partial(_rows, feed)),),
        operators=("watch",),
        cuts=(CutExpectation((feed.uid,), "calls", partial(no_states, (feed,))),),
        may_rescale=not ordered,  # the order of several old subtasks is that of none
        may_drain=False,  # what is read behind a drain is late to the restored job's watermark
    )


def _plan(
    feed: Feed,
    pace: tuple[float, int],
    function: Any,
    calls: dict[str, Any],
    drawn: int,
    settings: dict[str, Any],
    parallelism: int | None,
) -> JobPlan:
    environment = Environment("async", parallelism=parallelism or drawn, **settings)
    source = environment.from_source(feed.source(*pace)).uid(feed.uid).set_parallelism(1)
    times = source.assign_timestamps("at", max_out_of_orderness_ms=feed.disorder_ms).uid("times").set_parallelism(1)
    answers = times.async_map(function, returns=feed.schema, **calls).uid("calls")
    watched = answers.process(Watch(ordered=calls["ordered"])).uid("watch")
    watched.sink_to(ParquetSink(PATH), uid="answers")
    return environment.build()


def _rows(feed: Feed) -> Counter[Row]:
    return Counter((index, feed.value(index) + 1, 0, 0) for index in range(feed.rows))


WORKLOAD = Workload("async", "asks for each row, and is answered late, out of order or never: requests in flight are state", make)
