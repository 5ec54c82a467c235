"""Queries of auctions that have closed, and of their winning bids: q4, q6, q9.

A bid counts if its time is that of the auction or later, and not behind `expires`. The highest wins; of equals the earliest, and of
those of one time the one of the bidder with the least id, then with the least text. An auction without such a bid gives nothing."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from holdfast.api.nexmark.events import SCHEMAS
from holdfast.api.nexmark.query import Auctions, Query, picked
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions import aggregates
from holdfast.operators.functions.connected import KeyedCoProcessFunction
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.statebackends.state import ListStateDescriptor, ValueStateDescriptor

LAST = 10
"""Auctions of a seller in q6's mean."""

CLOSES = "closes_ms"


class WinningBids(KeyedCoProcessFunction):
    """Emits each auction with its winning bid, when event time has reached its end.

    Bids may come before their auction; those whose auction should have come are forgotten."""

    def __init__(self, auction: pa.Schema, bid: pa.Schema) -> None:
        """Columns of both, of which none are called alike. The auction has `closes_ms`, the bid `price` and `bidder`."""
        self.auction = ValueStateDescriptor("auction", pa.struct([*auction, ("opened_ms", pa.int64())]))
        timed = pa.struct([*bid, ("at_ms", pa.int64())])
        self.best = ValueStateDescriptor("best", timed)
        self.early = ListStateDescriptor("early", timed)
        self.states = (self.auction, self.best, self.early)  # type: ignore[misc]  # of this instance: the columns are the streams'

    def process_element1(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        opened = {**value, "opened_ms": ctx.timestamp}
        ctx.state(self.auction).update(opened)
        ctx.timers.register_event_time_timer(value[CLOSES])
        early = ctx.state(self.early)
        for bid in early.get():
            self._offer(opened, bid, ctx)
        early.clear()

    def process_element2(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        assert ctx.timestamp is not None
        bid = {**value, "at_ms": ctx.timestamp}
        opened = ctx.state(self.auction).value()
        if opened is None:
            ctx.state(self.early).add(bid)
            ctx.timers.register_event_time_timer(ctx.timestamp)
        else:
            self._offer(opened, bid, ctx)

    def _offer(self, opened: Any, bid: Any, ctx: ProcessContext) -> None:
        if opened["opened_ms"] <= bid["at_ms"] <= opened[CLOSES]:
            best = ctx.state(self.best)
            before = best.value()
            if before is None or _rank(bid) < _rank(before):
                best.update(bid)

    def on_timer(self, timestamp_ms: int, ctx: ProcessContext, out: Collector) -> None:
        auction, best, early = ctx.state(self.auction), ctx.state(self.best), ctx.state(self.early)
        opened = auction.value()
        if opened is None:
            early.update([bid for bid in early.get() if bid["at_ms"] > timestamp_ms])
        elif timestamp_ms >= opened[CLOSES]:
            winner = best.value()
            if winner is not None:
                del opened["opened_ms"], winner["at_ms"]
                out({**opened, **winner})
            auction.clear()
            best.clear()


def _rank(bid: Any) -> tuple[Any, ...]:
    """Less wins."""
    return -bid["price"], bid["at_ms"], bid.get("bidder", 0), bid.get("bid_extra", "")


def winning_bids(house: Auctions, auction: tuple[str, ...], **bid: str) -> Stream:
    """Auctions that have closed, with these columns, and their winning bids with those that are named, as {name: column}."""
    given = house.read("auction", tuple(dict.fromkeys(("id", "dateTime", "expires", *auction))))
    auctions = picked(given, "id", *auction, **{CLOSES: ("expires", pa.int64())}).uid("auctions-closing")
    bids = house.read("bid", tuple(dict.fromkeys(("auction", "dateTime", *bid.values()))))
    renamed = picked(bids, "auction", **bid).uid("bids-of-auctions")
    assert auctions.schema is not None
    assert renamed.schema is not None
    function, returns = WinningBids(auctions.schema, renamed.schema), pa.schema([*auctions.schema, *renamed.schema])
    return auctions.connect(renamed).key_by("id", "auction").process(function, returns=returns).uid("winning")


def average_price_of_category(house: Auctions) -> Stream:
    winners = winning_bids(house, ("category",), price="price")
    return winners.key_by("category").aggregate(final=aggregates.mean("price")).uid("averages")


class LastAuctions(ProcessFunction):
    """Of a seller, at the end of each auction: the mean of the winning bids of the last ten. Of auctions that close at one moment
    the one with the lesser id closes first."""

    waiting = ListStateDescriptor("waiting", tuple[int, int, int])
    """(closes, id, price), until event time has reached them."""
    last = ListStateDescriptor("last", int)
    states = (waiting, last)
    returns = pa.schema({"seller": pa.int64(), "auction": pa.int64(), "average": pa.float64()})

    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        ctx.state(self.waiting).add((value[CLOSES], value["id"], value["price"]))
        ctx.timers.register_event_time_timer(value[CLOSES])

    def on_timer(self, timestamp_ms: int, ctx: ProcessContext, out: Collector) -> None:
        waiting, last = ctx.state(self.waiting), ctx.state(self.last)
        closed = sorted(row for row in waiting.get() if row[0] <= timestamp_ms)
        waiting.update([row for row in waiting.get() if row[0] > timestamp_ms])
        prices = list(last.get())
        for _, auction, price in closed:
            prices = [*prices, price][-LAST:]
            out({"seller": ctx.key, "auction": auction, "average": sum(prices) / len(prices)})
        last.update(prices)


def average_price_of_seller(house: Auctions) -> Stream:
    winners = winning_bids(house, ("seller",), price="price")
    return winners.key_by("seller").process(LastAuctions()).uid("averages")


def auctions_with_winners(house: Auctions) -> Stream:
    own = tuple(name for name in SCHEMAS["auction"].names if name != "id")
    bid = {"bidder": "bidder", "price": "price", "bid_dateTime": "dateTime", "bid_extra": "extra"}
    return winning_bids(house, own, **bid)


_WINNERS = """
    WITH winners AS (
        SELECT auction.*, bidder, price, bid.dateTime AS bid_dateTime, bid.extra AS bid_extra
        FROM auction JOIN bid ON id = bid.auction AND bid.dateTime BETWEEN auction.dateTime AND expires
        QUALIFY row_number() OVER (PARTITION BY id ORDER BY price DESC, bid_dateTime, bidder, bid_extra) = 1
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
