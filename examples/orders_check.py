"""The referee of `orders.py`: what should have come out, computed by DuckDB from the records that kafka-python reads from the topic,
with no Holdfast in it."""

from __future__ import annotations

import datetime as dt
import json
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import duckdb
import psycopg2
import pyarrow as pa

from orders_feed import BEGIN, DISORDER_MS, PARTITIONS

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka

Window = tuple[str, dt.datetime, dt.datetime, int, int]
Place = tuple[int, int]
"""Partition and offset."""

WINDOWS = """
    SELECT shop, beginning AS window_start, beginning + INTERVAL 1 MINUTE AS window_end, count(*) AS orders, sum(cents)::BIGINT AS cents
    FROM (SELECT *, time_bucket(INTERVAL 1 MINUTE, ordered_at, TIMESTAMPTZ '2026-01-01 00:00:00+00') AS beginning FROM orders)
    WHERE id NOT IN (SELECT id FROM late) GROUP BY shop, beginning
"""


@dataclass
class Topic:
    """All that is in the topic."""

    orders: list[dict[str, Any]] = field(default_factory=list)
    behind: set[int] = field(default_factory=set)
    """Ids of those that are farther behind an order before them than the disorder that the job allows."""
    unreadable: set[Place] = field(default_factory=set)
    records: int = 0


def read_topic(bootstrap: str, name: str) -> Topic:
    """By a client that is not the job's."""
    found = Topic()
    consumer = kafka.KafkaConsumer(bootstrap_servers=bootstrap, group_id=None, isolation_level="read_committed", metrics_enabled=False)
    try:
        for place in (kafka.TopicPartition(name, partition) for partition in range(PARTITIONS)):
            consumer.assign([place])
            consumer.seek_to_beginning(place)
            end = consumer.end_offsets([place])[place]
            newest = BEGIN
            while consumer.position(place) < end:
                for record in [each for records in consumer.poll(timeout_ms=1_000).values() for each in records]:
                    newest = _sort(record, found, newest)
    finally:
        consumer.close(autocommit=False)
    return found


def _sort(record: Any, found: Topic, newest: dt.datetime) -> dt.datetime:
    """The newest order of the partition then."""
    found.records += 1
    try:
        order = json.loads(record.value)
        order["ordered_at"] = dt.datetime.fromisoformat(order["ordered_at"])
        if not (isinstance(order["shop"], str) and type(order["id"]) is int and type(order["cents"]) is int):
            raise TypeError(record.value)
    except (TypeError, ValueError):
        found.unreadable.add((record.partition, record.offset))
        return newest
    found.orders.append(order)
    if order["ordered_at"] < newest - dt.timedelta(milliseconds=DISORDER_MS):
        found.behind.add(order["id"])
    return max(newest, order["ordered_at"])


def expected_windows(topic: Topic, late: list[dict[str, Any]]) -> Counter[Window]:
    """`late`: orders that no window has."""
    types = pa.schema([("id", pa.int64()), ("shop", pa.string()), ("cents", pa.int64()), ("ordered_at", pa.timestamp("ms", "UTC"))])
    with duckdb.connect() as database:
        database.execute("SET TimeZone = 'UTC'")
        database.register("orders", pa.Table.from_pylist(topic.orders, types))
        database.register("late", pa.Table.from_pylist(late, types))
        return windows_of(database.sql(WINDOWS).to_arrow_table())


def windows_of(table: pa.Table) -> Counter[Window]:
    """Its rows, as a multiset."""
    columns = ("shop", "window_start", "window_end", "orders", "cents")
    return Counter(zip(*([_plain(value) for value in table.column(name).to_pylist()] for name in columns), strict=True))


def _plain(value: Any) -> Any:
    return value.astimezone(dt.UTC) if isinstance(value, dt.datetime) else value


def rows_of_postgres(dsn: str, query: str) -> list[tuple[Any, ...]]:
    """In a session of its own."""
    connection = psycopg2.connect(dsn)
    try:
        with connection.cursor() as cursor:
            cursor.execute("SET TIME ZONE 'UTC'")
            cursor.execute(query)
            return [tuple(_plain(value) for value in row) for row in cursor.fetchall()]
    finally:
        connection.close()


def difference(name: str, wanted: Counter[Any], found: Counter[Any]) -> list[str]:
    """Empty if they hold the same rows, each as often; else what differs, with examples."""
    missing, extra = wanted - found, found - wanted
    if not missing and not extra:
        return []
    lines = [f"{name}: {missing.total()} rows are missing, {extra.total()} are too many"]
    lines += [f"    missing: {row}" for row in list(missing)[:3]]
    return lines + [f"    too many: {row}" for row in list(extra)[:3]]


def problems(topic: Topic, dsn: str, schema: str, delta: pa.Table) -> list[str]:
    """Of all outputs; empty: they are exact, and the run has tested what it should."""
    late_rows = rows_of_postgres(dsn, f"SELECT id, shop, cents, ordered_at FROM {schema}.late_orders")
    late = [dict(zip(("id", "shop", "cents", "ordered_at"), row, strict=True)) for row in late_rows]
    spending = rows_of_postgres(dsn, f"SELECT shop, window_start, window_end, orders, cents FROM {schema}.spending")
    letters = rows_of_postgres(dsn, f"SELECT split, position FROM {schema}.dead_letters")
    places = Counter((int(split.rpartition("[")[2].rstrip("]")), *position) for split, position in letters)
    windows = expected_windows(topic, late)
    of_topic = Counter({tuple(order.values()): 1 for order in topic.orders if order["id"] in topic.behind})
    found = difference("PostgreSQL, spending", windows, Counter(spending))
    found += difference("Delta, spending", windows, windows_of(delta))
    found += difference("PostgreSQL, dead letters", Counter(topic.unreadable), places)
    unknown = Counter(tuple(row) for row in late_rows) - of_topic
    if unknown:
        found.append(f"PostgreSQL, late orders: {unknown.total()} are doubled or not late: {list(unknown)[:3]}")
    for what, rows in (("order", spending), ("late order", late_rows), ("dead letter", letters)):
        if not rows:
            found.append(f"the run had no {what}: it proves nothing")
    return found
