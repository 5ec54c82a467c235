"""The referee of `orders.py`: what should have come out, computed by DuckDB from the records that kafka-python reads from the
topic, with no Holdfast in it."""

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
    SELECT shop, beginning AS window_start, beginning + INTERVAL 1 MINUTE AS window_end,
           count(*) AS orders, sum(cents)::BIGINT AS cents
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

    def add(self, place: Place, value: bytes | None, newest: dt.datetime) -> dt.datetime:
        """One more record of a partition whose newest order so far is `newest`; the newest one then."""
        self.records += 1
        try:
            order = json.loads(value)  # type: ignore[arg-type]  # a tombstone is a TypeError
            ordered = {**order, "ordered_at": dt.datetime.fromisoformat(order["ordered_at"])}
            if not (isinstance(order["shop"], str) and type(order["id"]) is int and type(order["cents"]) is int):
                raise TypeError(value)
        except (TypeError, ValueError):
            self.unreadable.add(place)
            return newest
        self.orders.append(ordered)
        if ordered["ordered_at"] < newest - dt.timedelta(milliseconds=DISORDER_MS):
            self.behind.add(order["id"])
        return max(newest, ordered["ordered_at"])


def read_topic(bootstrap: str, name: str) -> Topic:
    """By a client that is not the job's."""
    found = Topic()
    settings = {"group_id": None, "isolation_level": "read_committed", "metrics_enabled": False}
    consumer = kafka.KafkaConsumer(bootstrap_servers=bootstrap, **settings)
    try:
        for place in (kafka.TopicPartition(name, partition) for partition in range(PARTITIONS)):
            consumer.assign([place])
            consumer.seek_to_beginning(place)
            end = consumer.end_offsets([place])[place]
            newest = BEGIN
            while consumer.position(place) < end:
                for record in [each for records in consumer.poll(timeout_ms=1_000).values() for each in records]:
                    newest = found.add((record.partition, record.offset), record.value, newest)
    finally:
        consumer.close(autocommit=False)
    return found


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


@dataclass
class Outputs:
    """What the job has written, as multisets."""

    postgres: Counter[Window]
    delta: Counter[Window]
    late: Counter[tuple[int, str, int, dt.datetime]]
    """Orders that came too late for their window."""
    dead_letters: Counter[Place]


def read_outputs(dsn: str, schema: str, delta: pa.Table) -> Outputs:
    """Those of the tables of a schema, and of a Delta table."""
    letters = rows_of_postgres(dsn, f"SELECT split, position FROM {schema}.dead_letters")
    return Outputs(
        Counter(rows_of_postgres(dsn, f"SELECT shop, window_start, window_end, orders, cents FROM {schema}.spending")),
        windows_of(delta),
        Counter(rows_of_postgres(dsn, f"SELECT id, shop, cents, ordered_at FROM {schema}.late_orders")),
        Counter((int(split.rpartition("[")[2].rstrip("]")), *position) for split, position in letters),
    )


def problems(topic: Topic, outputs: Outputs) -> list[str]:
    """Empty: all outputs are exact, and the run has tested what it should."""
    late = [dict(zip(("id", "shop", "cents", "ordered_at"), row, strict=True)) for row in outputs.late]
    windows = expected_windows(topic, late)
    found = difference("PostgreSQL, spending", windows, outputs.postgres)
    found += difference("Delta, spending", windows, outputs.delta)
    found += difference("PostgreSQL, dead letters", Counter(topic.unreadable), outputs.dead_letters)
    may_be_late = Counter({tuple(order.values()): 1 for order in topic.orders if order["id"] in topic.behind})
    unknown = outputs.late - may_be_late
    if unknown:
        found.append(f"PostgreSQL, late orders: {unknown.total()} are doubled or not late: {list(unknown)[:3]}")
    for what, rows in (("window", outputs.postgres), ("late order", outputs.late), ("dead letter", outputs.dead_letters)):
        if not rows:
            found.append(f"the run had no {what}: it proves nothing")
    return found
