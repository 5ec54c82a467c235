"""Two skewed sources, a union, the first rows of each key and its newest one: rows that enter a table, move down and leave it.

Which rows a key has does not depend on the order of arrival: they are compared by columns that tell all of them apart."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import Feed, read_before
from holdfast.chaos.workloads.scenario import (
    CutExpectation,
    CutStates,
    Positions,
    RowsInAnyOrder,
    Scenario,
    SinkExpectation,
    Workload,
)
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_settings
from holdfast.chaos.workloads.windows import Feeds, Paces, draw_skewed_feeds, timed_streams
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sinks.files.parquet import ParquetSink

RANKED_PATH, NEWEST_PATH = "/out/ranked", "/out/newest"
_RANKS, _SCORE = 1_000, 10_000_000
"""More ranks than any job here has; more than any `i`."""


def make(rng: random.Random) -> Scenario:
    """Two feeds over about the same event time, which does not matter here but for the times of the rows that are kept."""
    feeds, paces = draw_skewed_feeds(rng)
    parallelism = rng.randint(1, PARALLELISM_MAX)
    n, descending = rng.choice((1, 3, 10)), rng.random() < 0.5
    settings = draw_settings(rng)
    uids, everything = tuple(feed.uid for feed in feeds), {feed.uid: range(feed.rows) for feed in feeds}
    return Scenario(
        plan=partial(_plan, feeds, paces, n, descending, parallelism, settings),
        records=sum(feed.rows for feed in feeds),
        sinks=(
            SinkExpectation(
                RANKED_PATH, "ranked", partial(_ranked_rows, feeds, n, descending, everything), ordered_by=(0, 1), last_of_key=True
            ),
            SinkExpectation(NEWEST_PATH, "newest", partial(_newest_rows, feeds, everything), ordered_by=(1, 0), last_of_key=True),
        ),
        operators=("top", "last"),
        cuts=(
            CutExpectation(uids, "top", partial(_rows_at, feeds, n, descending)),
            CutExpectation(uids, "last", partial(_newest_at, feeds)),
        ),
    )


def _plan(
    feeds: Feeds, paces: Paces, n: int, descending: bool, drawn: int, settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    environment = Environment("topn", parallelism=parallelism or drawn, **settings)
    keyed = timed_streams(environment, feeds, paces).key_by("key")
    top = keyed.top(n, by=["value", "i"], descending=descending).uid("top")
    ranked = top.map(partial(_place, descending), returns=dict.fromkeys(("place", "score", "i", "at"), int)).uid("places")
    ranked.sink_to(ParquetSink(RANKED_PATH), uid="ranked")
    keyed.deduplicate(keep="last", by="i").uid("last").sink_to(ParquetSink(NEWEST_PATH), uid="newest")
    return environment.build()


def _place(descending: bool, row: Mapping[str, int]) -> dict[str, int]:
    """Key and rank as one number, and one that rises whenever the rank gets another row."""
    return {
        "place": row["key"] * _RANKS + row["rank"],
        "score": _score(row["value"], row["i"], descending),
        "i": row["i"],
        "at": row["at"],
    }


def _score(value: int, i: int, descending: bool) -> int:
    return (value * _SCORE + i) * (1 if descending else -1)


# ----------------------------------------------------------------------------------------------------------- expectation

_Found = tuple[int, int, int]
"""i, value, at."""


def _by_key(feeds: Iterable[Feed], indices: Mapping[str, Iterable[int]]) -> dict[int, list[_Found]]:
    found: dict[int, list[_Found]] = {}
    for feed in feeds:
        for index in indices[feed.uid]:
            row = (feed.first + index, feed.value(index), feed.at(index))
            found.setdefault(feed.key(index), []).append(row)
    return found


def _top(rows: list[_Found], n: int, descending: bool) -> list[_Found]:
    return sorted(rows, key=lambda row: -_score(row[1], row[0], descending))[:n]


def _ranked_rows(feeds: Feeds, n: int, descending: bool, indices: Mapping[str, Iterable[int]]) -> Counter[Row]:
    return Counter(
        (key * _RANKS + rank, _score(value, i, descending), i, at)
        for key, rows in _by_key(feeds, indices).items()
        for rank, (i, value, at) in enumerate(_top(rows, n, descending), 1)
    )


def _newest_rows(feeds: Feeds, indices: Mapping[str, Iterable[int]]) -> Counter[Row]:
    newest = {key: max(rows) for key, rows in _by_key(feeds, indices).items()}
    return Counter((i, key, value, at) for key, (i, value, at) in newest.items())


def _before(feeds: Feeds, positions: Positions) -> dict[str, list[int]]:
    return {feed.uid: list(read_before(positions[feed.uid], feed.rows)) for feed in feeds}


def _rows_at(feeds: Feeds, n: int, descending: bool, positions: Positions) -> CutStates:
    """No row more than its key has ranks."""
    return {
        "rows": RowsInAnyOrder.of(
            ((key, 0), {"i": i, "value": value, "at": at, "time": at})
            for key, rows in _by_key(feeds, _before(feeds, positions)).items()
            for i, value, at in _top(rows, n, descending)
        )
    }


def _newest_at(feeds: Feeds, positions: Positions) -> CutStates:
    newest = {key: max(rows) for key, rows in _by_key(feeds, _before(feeds, positions)).items()}
    return {"kept": {(key, 0): {"by": i, "time": at} for key, (i, _, at) in newest.items()}}


WORKLOAD = Workload("topn", "keeps the first rows of each key, and its newest one, of two skewed sources", make)
