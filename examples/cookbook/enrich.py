"""Enrichment: each order gets the segment that its customer had when it was placed.

Orders and changes of segments are united, which takes equal columns, and meet in one function by customer. Both wait until event
time has reached them, so an order never overtakes the change that it needs. Each stream gets its event time *before* the union:
event time goes on as far as the slower of them.

    python examples/cookbook/enrich.py
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

import holdfast as hf

DISORDER_MS = 5 * 60_000
EVENT = {"customer": int, "at": pa.timestamp("us", "UTC"), "id": int | None, "cents": int | None, "segment": str | None}
"""An order, or a change: then without id and cents."""
ENRICHED = {"id": int, "customer": int, "cents": int, "segment": str | None}


@dataclass
class Order:
    """An order that waits."""

    id: int
    cents: int


def order_event(row):
    """An order as an event."""
    return {**row, "segment": None}


def change_event(row):
    """A change of segment as an event."""
    return {**row, "id": None, "cents": None}


class WithSegment(hf.ProcessFunction):
    """Emits orders with the segment that is in force."""

    orders = hf.MapStateDescriptor("orders", int, list[Order])  # event time in ms -> orders
    changes = hf.MapStateDescriptor("changes", int, str)  # event time in ms -> segment
    segment = hf.ValueStateDescriptor("segment", str)
    states = (orders, changes, segment)

    def process_element(self, row, ctx, out):
        if row["id"] is None:
            ctx.state(self.changes).put(ctx.timestamp, row["segment"])
        else:
            orders = ctx.state(self.orders)
            orders.put(ctx.timestamp, [*orders.get(ctx.timestamp, []), Order(row["id"], row["cents"])])
        ctx.timers.register_event_time_timer(ctx.timestamp)

    def on_timer(self, timestamp_ms, ctx, out):
        orders, changes, segment = ctx.state(self.orders), ctx.state(self.changes), ctx.state(self.segment)
        if changes.contains(timestamp_ms):
            segment.update(changes.get(timestamp_ms))
            changes.remove(timestamp_ms)
        for order in orders.get(timestamp_ms, []):
            out({"id": order.id, "customer": ctx.key, "cents": order.cents, "segment": segment.value()})
        orders.remove(timestamp_ms)


def pipeline(orders, changes):
    """Orders with the segment of their customer; None before the first change."""
    placed = orders.map(order_event, returns=EVENT).uid("order-events")
    changed = changes.map(change_event, returns=EVENT).uid("change-events")
    placed = placed.assign_timestamps("at", max_out_of_orderness_ms=DISORDER_MS).uid("order-time")
    changed = changed.assign_timestamps("at", max_out_of_orderness_ms=DISORDER_MS).uid("change-time")
    return placed.union(changed).key_by("customer").process(WithSegment(), returns=ENRICHED).uid("with-segment")


SQL = """
    SELECT orders.id, orders.customer, orders.cents, changes.segment
    FROM orders ASOF LEFT JOIN changes ON orders.customer = changes.customer AND orders.at >= changes.at
"""


def tables():
    """1,200 orders and 150 changes of 30 customers within a day, each in the order of its arrival."""
    random = np.random.default_rng(5)

    def arrived(count, **columns):
        at_ms = 1_700_000_000_000 + random.choice(86_400, count, replace=False) * 1_000
        arrival = np.argsort(at_ms + random.integers(0, DISORDER_MS, count))
        times = pa.array(at_ms * 1_000, pa.timestamp("us", "UTC"))
        customers = pa.array(random.integers(0, 30, count))
        return pa.table({"customer": customers, "at": times, **columns}).take(pa.array(arrival))

    segments = random.choice(["new", "regular", "gold"], 150).tolist()
    return {
        "orders": arrived(1_200, id=np.arange(1_200), cents=random.integers(100, 90_000, 1_200)),
        "changes": arrived(150, segment=pa.array(segments)),
    }


if __name__ == "__main__":
    from running import main

    main("enrich", pipeline, tables(), SQL)
