"""Queries of windows: q5, q7, q8, q11, q12."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.api.nexmark.events import TIME
from holdfast.api.nexmark.query import Auctions, Query, picked
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions import aggregates
from holdfast.operators.functions.process import Collector
from holdfast.operators.functions.windows.assigners import Session, Sliding, Tumbling
from holdfast.operators.functions.windows.row_functions import ProcessWindowFunction, WindowContext

WINDOW_MS = 10_000
SLIDE_MS = 2_000
GAP_MS = 10_000
MARK = "candidate"


@dataclass(frozen=True)
class Candidates:
    """Marks, in a batch, the rows of each window whose `by` is the greatest so far: only these can be the window's.

    Which rows these are depends on where batches end; the greatest of a window is among them wherever that is."""

    by: str
    window: str
    """Column that tells windows apart."""
    size_ms: int = 1
    """Its values, in ms, are divided by this."""

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        windows = rows.column(self.window).cast(TIME).view(pa.int64()).to_numpy() // self.size_ms
        values = rows.column(self.by).to_numpy()
        if (windows[1:] < windows[:-1]).any():
            _, place = np.unique(windows, return_inverse=True)
            most = np.full(place.max() + 1, np.iinfo(np.int64).min)
            np.maximum.at(most, place, values)
            greatest = most[place]
        else:
            starts = np.concatenate(([0], np.flatnonzero(windows[1:] != windows[:-1]) + 1))
            greatest = np.repeat(np.maximum.reduceat(values, starts), np.diff(starts, append=len(values)))
        return rows.append_column(MARK, pa.array(values == greatest))

    def of(self, stream: Stream) -> Stream:
        """The candidates of a stream, with its columns."""
        assert stream.schema is not None
        marked = stream.map_batches(self, returns=stream.schema.append(pa.field(MARK, pa.bool_()))).uid("marked")
        return marked.filter(MARK).uid("candidates").select(*stream.schema.names).uid("unmarked")


class Greatest(ProcessWindowFunction):
    """The rows of a window whose `by` is the greatest of all: each of them."""

    def __init__(self, by: str) -> None:
        self.by = by

    def process(self, key: Any, ctx: WindowContext, elements: list[Any], out: Collector) -> None:
        greatest = max(row[self.by] for row in elements)
        for row in elements:
            if row[self.by] == greatest:
                out(row)


def hot_items(house: Auctions) -> Stream:
    sliding = Sliding(WINDOW_MS, SLIDE_MS)
    counts = house.bids("auction", "dateTime").key_by("auction").window(sliding).aggregate(num=aggregates.count()).uid("counts")
    candidates = Candidates("num", "window_end").of(counts)
    # Results of a window have its last millisecond as their time, so that they meet again in a window as long as the slide.
    windows = candidates.key_by("window_end").window(Tumbling(SLIDE_MS))
    return windows.process(Greatest("num"), returns=counts.schema).uid("hot")


def highest_bids(house: Auctions) -> Stream:
    bids = house.bids("auction", "bidder", "price", "dateTime", "extra")
    candidates = Candidates("price", "dateTime", WINDOW_MS).of(bids)
    windows = candidates.key_by(all_together).window(Tumbling(WINDOW_MS))
    return windows.process(Greatest("price"), returns=bids.schema).uid("highest")


def all_together(bid: Any) -> int:
    """One key for all."""
    return 0


PEOPLE = pa.schema({"id": pa.int64(), "name": pa.string(), "is_seller": pa.bool_(), "dateTime": TIME})


def as_person(rows: pa.RecordBatch) -> pa.RecordBatch:
    count = rows.num_rows
    columns = [rows.column("id"), rows.column("name"), pa.array(np.zeros(count, np.bool_)), rows.column("dateTime")]
    return pa.RecordBatch.from_arrays(columns, schema=PEOPLE)


def as_seller(rows: pa.RecordBatch) -> pa.RecordBatch:
    count = rows.num_rows
    columns = [rows.column("seller"), pa.nulls(count, pa.string()), pa.array(np.ones(count, np.bool_)), rows.column("dateTime")]
    return pa.RecordBatch.from_arrays(columns, schema=PEOPLE)


def new_sellers(house: Auctions) -> Stream:
    people, auctions = house.together(person=("id", "name", "dateTime"), auction=("seller", "dateTime"))
    persons = people.map_batches(as_person, returns=PEOPLE).uid("as-person")
    sellers = auctions.map_batches(as_seller, returns=PEOPLE).uid("as-seller")
    windows = persons.union(sellers).key_by("id").window(Tumbling(WINDOW_MS))
    found = windows.aggregate(name=aggregates.first("name"), sold=aggregates.count(where="is_seller")).uid("people")
    return found.filter("sold > 0 AND name IS NOT NULL").uid("new").select("id", "name", "window_start").uid("named")


def user_sessions(house: Auctions) -> Stream:
    windows = house.bids("bidder", "dateTime").key_by("bidder").window(Session(GAP_MS))
    counted = windows.aggregate(bid_count=aggregates.count()).uid("sessions")
    return picked(counted, "bidder", "bid_count", starttime="window_start", endtime="window_end").uid("named")


def user_sessions_by_clock(house: Auctions) -> Stream:
    windows = house.bids("bidder").key_by("bidder").window(Tumbling(WINDOW_MS, time="processing"))
    counted = windows.aggregate(bid_count=aggregates.count()).uid("windows")
    return picked(counted, "bidder", "bid_count", starttime="window_start", endtime="window_end").uid("named")


QUERIES = (
    Query(
        "q5",
        "hot items",
        hot_items,
        f"""
        WITH counts AS (
            SELECT auction, (epoch_ms(dateTime) // {SLIDE_MS} - before) * {SLIDE_MS} + {WINDOW_MS} AS ends, count(*) AS num
            FROM bid, range({WINDOW_MS // SLIDE_MS}) AS slides(before) GROUP BY auction, ends
        )
        SELECT auction, num, epoch_ms(ends) AS window_end FROM counts
        QUALIFY num = max(num) OVER (PARTITION BY ends)
        """,
    ),
    Query(
        "q7",
        "highest bids",
        highest_bids,
        f"""
        SELECT auction, bidder, price, dateTime, extra FROM bid
        QUALIFY price = max(price) OVER (PARTITION BY epoch_ms(dateTime) // {WINDOW_MS})
        """,
    ),
    Query(
        "q8",
        "new sellers",
        new_sellers,
        f"""
        SELECT DISTINCT id, name, epoch_ms(new.begins) AS window_start
        FROM (SELECT id, name, epoch_ms(dateTime) // {WINDOW_MS} * {WINDOW_MS} AS begins FROM person) AS new
        JOIN (SELECT seller, epoch_ms(dateTime) // {WINDOW_MS} * {WINDOW_MS} AS begins FROM auction) AS sold
        ON id = seller AND new.begins = sold.begins
        """,
        kinds=("person", "auction"),
    ),
    Query(
        "q11",
        "user sessions",
        user_sessions,
        f"""
        WITH marked AS (
            SELECT bidder, epoch_ms(dateTime) AS ms,
                coalesce(ms - lag(ms) OVER (PARTITION BY bidder ORDER BY ms) <= {GAP_MS}, false) AS goes_on
            FROM bid
        ),
        numbered AS (SELECT *, count(*) FILTER (NOT goes_on) OVER (PARTITION BY bidder ORDER BY ms) AS number FROM marked)
        SELECT bidder, count(*) AS bid_count, epoch_ms(min(ms)) AS starttime, epoch_ms(max(ms) + {GAP_MS}) AS endtime
        FROM numbered GROUP BY bidder, number
        """,
    ),
    Query(
        "q12",
        "bids of a bidder by the clock",
        user_sessions_by_clock,
        "SELECT bidder, count(*) AS bid_count FROM bid GROUP BY bidder",
        judged="totals",
        key=("bidder",),
    ),
)
