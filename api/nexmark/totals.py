"""Queries whose newer rows replace older ones: q15 to q19."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.api.nexmark.events import SCHEMAS
from holdfast.api.nexmark.query import Auctions, Query, picked
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions import aggregates

TOP = 10
DAY = ("dateTime", pa.date32())


def cheap(rows: pa.RecordBatch) -> Any:
    return pc.less(rows.column("price"), 10_000)


def dear(rows: pa.RecordBatch) -> Any:
    return pc.and_(pc.greater_equal(rows.column("price"), 10_000), pc.less(rows.column("price"), 1_000_000))


def dearest(rows: pa.RecordBatch) -> Any:
    return pc.greater_equal(rows.column("price"), 1_000_000)


RANKS = {"rank1": cheap, "rank2": dear, "rank3": dearest}


def bid_counts() -> dict[str, Any]:
    """All bids, and those of each rank."""
    ranked = {f"{rank}_bids": aggregates.count(where=where) for rank, where in RANKS.items()}
    return {"total_bids": aggregates.count(), **ranked}


def distinct_counts() -> dict[str, Any]:
    """Different bidders and auctions, in all and of each rank."""
    found: dict[str, Any] = {}
    for what, column in (("bidders", "bidder"), ("auctions", "auction")):
        found[f"total_{what}"] = aggregates.count_distinct(column)
        found |= {f"{rank}_{what}": aggregates.count_distinct(column, where=where) for rank, where in RANKS.items()}
    return found


def bidding_statistics(house: Auctions) -> Stream:
    bids = picked(house.bids("auction", "bidder", "price", "dateTime"), "auction", "bidder", "price", day=DAY).uid("days")
    return bids.key_by("day").aggregate(**bid_counts(), **distinct_counts()).uid("totals")


def channel_statistics(house: Auctions) -> Stream:
    bids = house.bids("auction", "bidder", "price", "channel", "dateTime")
    days = picked(bids, "auction", "bidder", "price", "channel", "dateTime", day=DAY).uid("days")
    keyed = days.key_by(("channel", "day"))
    found = keyed.aggregate(latest=aggregates.max("dateTime"), **bid_counts(), **distinct_counts()).uid("totals")
    assert found.schema is not None
    place = found.schema.get_field_index("latest")
    minute = pa.field("minute", pa.string())
    return found.map_batches(with_minute, returns=found.schema.set(place, minute)).uid("minutes")


MINUTES = pa.array([f"{hour:02d}:{minute:02d}" for hour in range(24) for minute in range(60)])
"""Of a day."""


def with_minute(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The minute of the day in place of `latest`."""
    place = rows.schema.names.index("latest")
    minutes = rows.column(place).view(pa.int64()).to_numpy() // 60_000 % len(MINUTES)
    return rows.set_column(place, "minute", MINUTES.take(pa.array(minutes)))


def auction_statistics(house: Auctions) -> Stream:
    bids = picked(house.bids("auction", "price", "dateTime"), "auction", "price", day=DAY).uid("days")
    prices: dict[str, Any] = {
        "min_price": aggregates.min("price"),
        "max_price": aggregates.max("price"),
        "avg_price": aggregates.mean("price"),
        "sum_price": aggregates.sum("price"),
    }
    return bids.key_by(("auction", "day")).aggregate(**bid_counts(), **prices).uid("totals")


def last_bids(house: Auctions) -> Stream:
    """The newest bid of each bidder for each auction; of one time the one that came last."""
    bids = house.read("bid", SCHEMAS["bid"].names)
    return bids.key_by(("bidder", "auction")).deduplicate(keep="last", by="dateTime").uid("last")


def top_bids(house: Auctions) -> Stream:
    """Of equal prices the earlier comes first, by event time, then by arrival."""
    bids = house.read("bid", SCHEMAS["bid"].names)
    return bids.key_by("auction").top(TOP, by="price", rank_column="rank_number").uid("top")


_RANKS = (("rank1", "price < 10000"), ("rank2", "price >= 10000 AND price < 1000000"), ("rank3", "price >= 1000000"))
_COUNTS = ", ".join(["count(*) AS total_bids", *(f"count(*) FILTER ({where}) AS {rank}_bids" for rank, where in _RANKS)])
_DISTINCT = ", ".join(
    f"count(DISTINCT {column}) AS total_{what}, "
    + ", ".join(f"count(DISTINCT {column}) FILTER ({where}) AS {rank}_{what}" for rank, where in _RANKS)
    for what, column in (("bidders", "bidder"), ("auctions", "auction"))
)

QUERIES = (
    Query(
        "q15",
        "bidding statistics",
        bidding_statistics,
        f"SELECT CAST(dateTime AS DATE) AS day, {_COUNTS}, {_DISTINCT} FROM bid GROUP BY day",
        judged="last",
        key=("day",),
    ),
    Query(
        "q16",
        "statistics of channels",
        channel_statistics,
        f"""
        SELECT channel, CAST(dateTime AS DATE) AS day, max(strftime(dateTime, '%H:%M')) AS minute, {_COUNTS}, {_DISTINCT}
        FROM bid GROUP BY channel, day
        """,
        judged="last",
        key=("channel", "day"),
    ),
    Query(
        "q17",
        "statistics of auctions",
        auction_statistics,
        f"""
        SELECT auction, CAST(dateTime AS DATE) AS day, {_COUNTS}, min(price) AS min_price, max(price) AS max_price,
            avg(price) AS avg_price, sum(price) AS sum_price
        FROM bid GROUP BY auction, day
        """,
        judged="last",
        key=("auction", "day"),
    ),
    Query(
        "q18",
        "last bids",
        last_bids,
        """
        SELECT auction, bidder, price, channel, url, dateTime, extra FROM bid
        QUALIFY row_number() OVER (PARTITION BY bidder, auction ORDER BY dateTime DESC) = 1
        """,
        judged="last",
        key=("bidder", "auction"),
    ),
    Query(
        "q19",
        "top ten bids of an auction",
        top_bids,
        f"""
        SELECT *, row_number() OVER (PARTITION BY auction ORDER BY price DESC, dateTime) AS rank_number FROM bid
        QUALIFY rank_number <= {TOP}
        """,
        judged="last",
        key=("auction", "rank_number"),
    ),
)
