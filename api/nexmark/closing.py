"""Queries of auctions that have closed, and of their winning bids: q4, q6, q9.

A bid counts if its time is that of the auction or later, and not behind `expires`. The highest wins; of equals the earliest, and of
those of one time the one that came first. An auction without such a bid gives nothing.

Bids meet their auctions within the longest time that one is open. The bids of an auction are a session whose gap is longer than
that: it ends when no bid can follow, by the event time of bids and auctions, whichever of them are behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.api.nexmark.events import AUCTIONS, EVENTS, OPEN_AUCTIONS, SCHEMAS
from holdfast.api.nexmark.query import Auctions, Query, picked
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions import aggregates
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.operators.functions.windows.assigners import Session
from holdfast.statebackends.state import ListStateDescriptor

LAST = 10
"""Auctions of a seller in q6's mean."""
GAP_MS_MIN = 1_000
"""Gap of sessions: auctions that close within about such a time are looked at together."""

_TIME_BITS = 24
"""Of the time from an auction to a bid, ms: 4 hours."""
_SPREAD = 64
"""Groups of a batch that lie within so many times its rows are numbers of an array; others are sorted."""
_RANK, _LEADS = pa.field("rank", pa.int64()), pa.field("leads", pa.bool_())


def open_ms(house: Auctions) -> int:
    """The longest that an auction is open."""
    horizon = -(-OPEN_AUCTIONS * EVENTS * 1_000 // (AUCTIONS * house.events_per_second))
    return 2 * (horizon + 1) + 1


def gap_ms(house: Auctions) -> int:
    """Longer than an auction is open."""
    return max(open_ms(house) + 1, GAP_MS_MIN)


def leading(rows: pa.RecordBatch) -> pa.RecordBatch:
    """One number for each bid of an auction, the greatest wins; and whether it counts and is the greatest of the batch.

    What leads depends on where batches end; the winner is always among them."""
    bid_ms, auction_ms, expires = (rows.column(name).view(pa.int64()).to_numpy() for name in ("bid_dateTime", "opened", "expires"))
    rank = rows.column("price").to_numpy() * 2**_TIME_BITS + (2**_TIME_BITS - 1 - (bid_ms - auction_ms))
    leads = is_greatest(rows.column("auction").to_numpy(), np.where(bid_ms <= expires, rank, -1)) & (bid_ms <= expires)
    return pa.RecordBatch.from_arrays(
        [*rows.columns, pa.array(rank), pa.array(leads)], schema=rows.schema.append(_RANK).append(_LEADS)
    )


def is_greatest(groups: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Of each row, of at least one: whether no value of its group is greater."""
    place = groups - groups.min()
    if place.max() > _SPREAD * len(groups):
        _, place = np.unique(groups, return_inverse=True)
    greatest = np.full(int(place.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(greatest, place, values)
    found: npt.NDArray[np.bool_] = values == greatest[place]
    return found


def winning_bids(house: Auctions, auctions: Stream, bids: Stream, *auction: str, **bid: str) -> Stream:
    """Each auction that has closed: `auction`, its id, `expires`, these of its columns, and, of its winning bid, the price and
    those that are named, as {name: column}. Its event time is behind `expires`, by `gap_ms` at most."""
    opened = picked(auctions, "id", "expires", *auction, opened="dateTime").uid("opened")
    made = picked(bids, "auction", "price", **{"bid_dateTime": "dateTime", **bid}).uid("bids-of-auctions")
    pairs = made.interval_join(opened, on=("auction", "id"), lower=-open_ms(house), upper=0).uid("pairs")
    assert pairs.schema is not None
    ranked = pairs.map_batches(leading, returns=pairs.schema.append(_RANK).append(_LEADS)).uid("ranked")
    closing = ranked.filter(_LEADS.name).uid("leading").key_by("auction").window(Session(gap_ms(house)))
    of_auction: dict[str, Any] = {name: aggregates.first(name) for name in ("expires", *auction)}
    of_bid: dict[str, Any] = {name: aggregates.arg_max(name, by="rank") for name in bid}
    return closing.aggregate(price=aggregates.max("price"), **of_auction, **of_bid).uid("winning")


BID = ("auction", "price", "dateTime")


def average_price_of_category(house: Auctions) -> Stream:
    auctions, bids = house.together(auction=("id", "dateTime", "expires", "category"), bid=BID)
    winners = winning_bids(house, auctions, bids, "category")
    return winners.key_by("category").aggregate(final=aggregates.mean("price")).uid("averages")


class LastAuctions(ProcessFunction):
    """Of a seller, in the order in which auctions end: the mean of the winning bids of the last ten. Of those that end at one
    moment the one with the lesser id is first."""

    waiting = ListStateDescriptor("waiting", tuple[int, int, int])
    """(end, id, price), until all that end up to then have come."""
    last = ListStateDescriptor("last", int)
    states = (waiting, last)
    returns = pa.schema({"seller": pa.int64(), "auction": pa.int64(), "average": pa.float64()})

    def __init__(self, gap_ms: int) -> None:
        """`gap_ms`: so much later than its end an auction may come."""
        self.gap_ms = gap_ms

    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        ctx.state(self.waiting).add((value["expires"], value["auction"], value["price"]))
        ctx.timers.register_event_time_timer(value["expires"] + self.gap_ms)

    def on_timer(self, timestamp_ms: int, ctx: ProcessContext, out: Collector) -> None:
        waiting, last = ctx.state(self.waiting), ctx.state(self.last)
        rows = sorted(waiting.get())
        closed = [row for row in rows if row[0] + self.gap_ms <= timestamp_ms]
        waiting.update(rows[len(closed) :])
        prices = list(last.get())
        for _, auction, price in closed:
            prices = [*prices, price][-LAST:]
            out({"seller": ctx.key, "auction": auction, "average": sum(prices) / len(prices)})
        last.update(prices)


def average_price_of_seller(house: Auctions) -> Stream:
    auctions, bids = house.together(auction=("id", "dateTime", "expires", "seller"), bid=BID)
    winners = winning_bids(house, auctions, bids, "seller")
    ends = picked(winners, "auction", "seller", "price", expires=("expires", pa.int64())).uid("ends")
    return ends.key_by("seller").process(LastAuctions(gap_ms(house))).uid("averages")


def auctions_with_winners(house: Auctions) -> Stream:
    """Winners meet the whole auction again: its texts are not carried along with every bid."""
    auctions, bids = house.together(auction=SCHEMAS["auction"].names, bid=(*BID, "bidder", "extra"))
    winners = winning_bids(house, auctions, bids, bidder="bidder", bid_dateTime="dateTime", bid_extra="extra")
    narrow = picked(winners, "bidder", "price", "bid_dateTime", "bid_extra", id="auction").uid("winners")
    longest = open_ms(house) + gap_ms(house)
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
