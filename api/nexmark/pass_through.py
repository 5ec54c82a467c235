"""Queries of one bid at a time: q0, q1, q2, q10, q13, q14, q21, q22."""

from __future__ import annotations

import pyarrow as pa

from holdfast.api.nexmark.query import Auctions, Query
from holdfast.operators.datastream.stream import Stream

SIDE_ROWS = 10_000
"""Of q13's side input: keys from 0, and the text of each as its value."""

_CHANNEL_IDS = "CASE lower(channel) WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3' "
CHANNEL_ID = f"{_CHANNEL_IDS} ELSE CASE WHEN contains(url, '&channel_id=') THEN split_part(url, '&channel_id=', 2) END END"
"""Null where there is none. Upstream looks for it with a regular expression, twice, which costs three times as much."""

_HOUR = "epoch_ms(dateTime) // 3600000 % 24"
BID_TIME_TYPE = (
    f"CASE WHEN {_HOUR} BETWEEN 8 AND 18 THEN 'dayTime' WHEN {_HOUR} <= 6 OR {_HOUR} >= 20 THEN 'nightTime' ELSE 'otherTime' END"
)
DAY, MINUTE = "strftime(dateTime, '%Y-%m-%d')", "strftime(dateTime, '%H:%M')"
EUROS = "0.908 * CAST(price AS DECIMAL(14, 0))"
"""Exact, and of 64 bits."""


def pass_through(house: Auctions) -> Stream:
    return house.bids("auction", "bidder", "price", "dateTime", "extra")


def currency_conversion(house: Auctions) -> Stream:
    bids = house.bids("auction", "bidder", "price", "dateTime", "extra")
    return bids.select("auction", "bidder", "dateTime", "extra", price=EUROS).uid("euros")


def selection(house: Auctions) -> Stream:
    return house.bids("auction", "price").filter("auction % 123 = 0").uid("selected")


def with_side_key(bids: pa.RecordBatch) -> pa.RecordBatch:
    return bids.append_column("key", pa.array(bids.column("auction").to_numpy() % SIDE_ROWS))


def bounded_side_input(house: Auctions) -> Stream:
    bids = house.bids("auction", "bidder", "price", "dateTime")
    assert bids.schema is not None
    keyed = bids.map_batches(with_side_key, returns=bids.schema.append(pa.field("key", pa.int64()))).uid("keyed")
    keys = pa.array(range(SIDE_ROWS), pa.int64())
    side_input = pa.table({"key": keys, "value": keys.cast(pa.string())})
    return keyed.lookup_join(side_input, on="key").uid("values")


def calculation(house: Auctions) -> Stream:
    bids = house.bids("auction", "bidder", "price", "dateTime", "extra")
    dear = bids.filter(f"{EUROS} > 1000000 AND {EUROS} < 50000000").uid("dear")
    counts = "length(extra) - length(replace(extra, 'c', ''))"
    calculated = dear.select("auction", "bidder", "dateTime", "extra", price=EUROS, bidTimeType=BID_TIME_TYPE, c_counts=counts)
    return calculated.uid("calculated")


def channel_ids(house: Auctions) -> Stream:
    bids = house.bids("auction", "bidder", "price", "channel", "url")
    named = ("auction", "bidder", "price", "channel")
    # A column that says which rows stay is computed with the others: a condition in SQL would be a query of its own.
    ids = bids.select(*named, channel_id=CHANNEL_ID, is_known=f"{CHANNEL_ID} IS NOT NULL").uid("ids")
    return ids.filter("is_known").uid("known").select(*named, "channel_id").uid("named")


def log_to_files(house: Auctions) -> Stream:
    bids = house.bids("auction", "bidder", "price", "dateTime", "extra")
    named = bids.select("auction", "bidder", "price", "dateTime", "extra", dt=DAY, hm=MINUTE)
    return named.uid("minutes")


def url_directories(house: Auctions) -> Stream:
    directories = {f"dir{number}": f"string_split(url, '/')[{number + 3}]" for number in (1, 2, 3)}
    bids = house.bids("auction", "bidder", "price", "channel", "url")
    return bids.select("auction", "bidder", "price", "channel", **directories).uid("directories")


QUERIES = (
    Query("q0", "pass through", pass_through, "SELECT auction, bidder, price, dateTime, extra FROM bid"),
    Query(
        "q1",
        "currency conversion",
        currency_conversion,
        "SELECT auction, bidder, 0.908 * price AS price, dateTime, extra FROM bid",
    ),
    Query("q2", "selection", selection, "SELECT auction, price FROM bid WHERE auction % 123 = 0"),
    Query(
        "q10",
        "log to files by day and minute",
        log_to_files,
        f"SELECT auction, bidder, price, dateTime, extra, {DAY} AS dt, {MINUTE} AS hm FROM bid",
        partition_by=("dt", "hm"),
    ),
    Query(
        "q13",
        "bounded side input join",
        bounded_side_input,
        f"""
        SELECT auction, bidder, price, dateTime, value
        FROM bid JOIN (SELECT range AS key, CAST(range AS VARCHAR) AS value FROM range({SIDE_ROWS})) ON auction % {SIDE_ROWS} = key
        """,
    ),
    Query(
        "q14",
        "calculation",
        calculation,
        """
        SELECT auction, bidder, 0.908 * price AS price, dateTime, extra,
            CASE WHEN hour(dateTime) >= 8 AND hour(dateTime) <= 18 THEN 'dayTime'
                WHEN hour(dateTime) <= 6 OR hour(dateTime) >= 20 THEN 'nightTime' ELSE 'otherTime' END AS bidTimeType,
            len(regexp_extract_all(extra, 'c')) AS c_counts
        FROM bid WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000
        """,
    ),
    Query(
        "q21",
        "channel ids",
        channel_ids,
        """
        SELECT auction, bidder, price, channel,
            CASE WHEN channel = 'Apple' THEN '0' WHEN channel = 'Google' THEN '1' WHEN channel = 'Facebook' THEN '2'
                WHEN channel = 'Baidu' THEN '3' ELSE nullif(regexp_extract(url, '(&|^)channel_id=([^&]*)', 2), '') END AS channel_id
        FROM bid WHERE channel_id IS NOT NULL
        """,
    ),
    Query(
        "q22",
        "directories of URLs",
        url_directories,
        """
        SELECT auction, bidder, price, channel,
            split_part(url, '/', 4) AS dir1, split_part(url, '/', 5) AS dir2, split_part(url, '/', 6) AS dir3
        FROM bid
        """,
    ),
)
