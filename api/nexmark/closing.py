"""Queries of auctions that have closed, and of their winning bids: q4, q6, q9.

A bid counts if its time is that of the auction or later, and not behind `expires`. The highest wins; of equals the earliest, and of
those of one time the one that came first. An auction without such a bid gives nothing.

Bids meet their auctions within the longest time that one is open. What they make has the end of its auction as event time, so that
an auction closes when a window does, and all of it is columnar."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.api.nexmark.events import AUCTIONS, EVENTS, OPEN_AUCTIONS, SCHEMAS
from holdfast.api.nexmark.query import Auctions, Query, picked
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions import aggregates
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.operators.functions.windows.assigners import Tumbling
from holdfast.statebackends.state import ListStateDescriptor

LAST = 10
"""Auctions of a seller in q6's mean."""
CLOSING_MS = 1_000
"""Auctions that end within one such stretch of time close together."""

_TIME_BITS = 24
"""Of the time from an auction to a bid, ms: 4 hours."""
_RANK = pa.field("rank", pa.int64())


def open_ms(house: Auctions) -> int:
    """The longest that an auction is open."""
    horizon = -(-OPEN_AUCTIONS * EVENTS * 1_000 // (AUCTIONS * house.events_per_second))
    return 2 * (horizon + 1) + 1


def ranked(rows: pa.RecordBatch) -> pa.RecordBatch:
    """One number for each bid of an auction: the greatest wins."""
    bid_ms, auction_ms = (rows.column(name).view(pa.int64()).to_numpy() for name in ("bid_dateTime", "opened"))
    rank = rows.column("price").to_numpy() * 2**_TIME_BITS + (2**_TIME_BITS - 1 - (bid_ms - auction_ms))
    return rows.append_column(_RANK, pa.array(rank.astype(np.int64)))


def winning_bids(house: Auctions, auctions: Stream, *auction: str, **bid: str) -> Stream:
    """Each auction that has closed: `auction`, its id, `expires`, these of its columns, and, of its winning bid, the price and
    those that are named, as {name: column}. Event times are within `CLOSING_MS` of `expires`."""
    opened = picked(auctions, "id", "expires", *auction, opened="dateTime").uid("opened")
    made = house.read("bid", tuple(dict.fromkeys(("auction", "price", "dateTime", *bid.values()))))
    bids = picked(made, "auction", "price", **{"bid_dateTime": "dateTime", **bid}).uid("bids-of-auctions")
    longest = open_ms(house)
    pairs = bids.interval_join(opened, on=("auction", "id"), lower=-longest, upper=0).uid("pairs")
    counting = pairs.filter("bid_dateTime <= expires").uid("counting")
    assert counting.schema is not None
    ranks = counting.map_batches(ranked, returns=counting.schema.append(_RANK)).uid("ranked")
    closing = ranks.assign_timestamps("expires", longest).uid("closing").key_by("auction").window(Tumbling(CLOSING_MS))
    of_auction: dict[str, Any] = {name: aggregates.first(name) for name in ("expires", *auction)}
    of_bid: dict[str, Any] = {name: aggregates.arg_max(name, by="rank") for name in bid}
    return closing.aggregate(price=aggregates.max("price"), **of_auction, **of_bid).uid("winning")


def average_price_of_category(house: Auctions) -> Stream:
    auctions = house.auctions("id", "dateTime", "expires", "category")
    return winning_bids(house, auctions, "category").key_by("category").aggregate(final=aggregates.mean("price")).uid("averages")


class LastAuctions(ProcessFunction):
    """Of a seller, at the end of each auction: the mean of the winning bids of the last ten. Of auctions that close at one moment
    the one with the lesser id closes first."""

    waiting = ListStateDescriptor("waiting", tuple[int, int, int])
    """(closes, id, price), until event time has reached them."""
    last = ListStateDescriptor("last", int)
    states = (waiting, last)
    returns = pa.schema({"seller": pa.int64(), "auction": pa.int64(), "average": pa.float64()})

    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        assert ctx.timestamp is not None
        ctx.state(self.waiting).add((value["expires"], value["auction"], value["price"]))
        ctx.timers.register_event_time_timer(ctx.timestamp)

    def on_timer(self, timestamp_ms: int, ctx: ProcessContext, out: Collector) -> None:
        waiting, last = ctx.state(self.waiting), ctx.state(self.last)
        closed = sorted(row for row in waiting.get() if row[0] <= timestamp_ms)  # of this window, and no other's
        waiting.update([row for row in waiting.get() if row[0] > timestamp_ms])
        prices = list(last.get())
        for _, auction, price in closed:
            prices = [*prices, price][-LAST:]
            out({"seller": ctx.key, "auction": auction, "average": sum(prices) / len(prices)})
        last.update(prices)


def average_price_of_seller(house: Auctions) -> Stream:
    winners = winning_bids(house, house.auctions("id", "dateTime", "expires", "seller"), "seller")
    times = picked(winners, "auction", "seller", "price", expires=("expires", pa.int64())).uid("ends")
    return times.key_by("seller").process(LastAuctions()).uid("averages")


def auctions_with_winners(house: Auctions) -> Stream:
    """Winners meet the whole auction again: its texts are not carried along with every bid."""
    auctions = house.read("auction", SCHEMAS["auction"].names)
    winners = winning_bids(house, auctions, bidder="bidder", bid_dateTime="dateTime", bid_extra="extra")
    narrow = picked(winners, "bidder", "price", "bid_dateTime", "bid_extra", id="auction").uid("winners")
    longest = open_ms(house) + CLOSING_MS
    return narrow.interval_join(auctions, on="id", lower=-longest, upper=0).uid("auctions-with-winners")


_WINNERS = """
    WITH winners AS (
        SELECT auction.*, bidder, price, bid.dateTime AS bid_dateTime, bid.extra AS bid_extra
        FROM auction JOIN bid ON id = bid.auction AND bid.dateTime BETWEEN auction.dateTime AND expires
        QUALIFY row_number() OVER (PARTITION BY id ORDER BY price DESC, bid_dateTime) = 1
    )
"""

QUERIES = (
    Query(
        "q4",
        "average price of a category",
        average_price_of_category,
        f"{_WINNERS} SELECT category, avg(price) AS final FROM winners GROUP BY category",
        kinds=("auction", "bid"),
        judged="last",
        key=("category",),
    ),
    Query(
        "q6",
        "average price of a seller's last ten",
        average_price_of_seller,
        f"""{_WINNERS}
        SELECT seller, id AS auction,
            avg(price) OVER (PARTITION BY seller ORDER BY expires, id ROWS BETWEEN {LAST - 1} PRECEDING AND CURRENT ROW) AS average
        FROM winners""",
        kinds=("auction", "bid"),
    ),
    Query(
        "q9",
        "winning bids",
        auctions_with_winners,
        f"{_WINNERS} SELECT * FROM winners",
        kinds=("auction", "bid"),
    ),
)
