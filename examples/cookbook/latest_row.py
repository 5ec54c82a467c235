"""Latest row per key: a change log of prices becomes, for each hour with a change, the price that held at its end.

What is emitted with every change would depend on the order of arrival. The end of an hour in event time does not: by then all its
changes are there, and the newest by version is emitted, once. A change that comes after its hour is emitted only if it is newer
than what was.

    python examples/cookbook/latest_row.py
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

import holdfast as hf

HOUR_MS = 3_600_000
DISORDER_MS = 20 * 60_000
PRICE = {"product": str, "hour_ms": int, "version": int, "cents": int}


@dataclass
class Price:
    """One change of a product's price."""

    version: int
    cents: int


class Newest(hf.ProcessFunction):
    """Emits at the end of each hour the newest price of the product, if it changed."""

    newest = hf.MapStateDescriptor("newest", int, Price)  # hour -> its newest
    emitted = hf.ValueStateDescriptor("emitted", int)  # version
    states = (newest, emitted)

    def process_element(self, row, ctx, out):
        newest, hour = ctx.state(self.newest), ctx.timestamp // HOUR_MS
        known = newest.get(hour)
        if known is None or row["version"] > known.version:
            newest.put(hour, Price(row["version"], row["cents"]))
        ctx.timers.register_event_time_timer((hour + 1) * HOUR_MS - 1)

    def on_timer(self, timestamp_ms, ctx, out):
        newest, emitted = ctx.state(self.newest), ctx.state(self.emitted)
        hour = timestamp_ms // HOUR_MS
        price = newest.get(hour)
        newest.remove(hour)
        if price.version > emitted.value(0):
            emitted.update(price.version)
            out({"product": ctx.key, "hour_ms": hour * HOUR_MS, "version": price.version, "cents": price.cents})


def pipeline(changes):
    """Hourly prices, of a stream of changes."""
    in_time = changes.assign_timestamps("changed_at", max_out_of_orderness_ms=DISORDER_MS).uid("time")
    return in_time.key_by("product").process(Newest(), returns=PRICE).uid("newest")


SQL = """
    SELECT product, epoch_ms(changed_at) // 3600000 * 3600000 AS hour_ms, max(version) AS version, arg_max(cents, version) AS cents
    FROM changes GROUP BY product, hour_ms
"""


def tables():
    """1,500 changes of 25 products within twelve hours, numbered by time and in the order of their arrival."""
    random = np.random.default_rng(4)
    at_ms = 1_700_000_000_000 + np.sort(random.choice(12 * HOUR_MS, 1_500, replace=False))
    arrival = np.argsort(at_ms + random.integers(0, DISORDER_MS, 1_500))
    rows = pa.table(
        {
            "product": pa.array([f"product-{number}" for number in random.integers(0, 25, 1_500)]),
            "version": pa.array(np.arange(1, 1_501)),
            "cents": pa.array(random.integers(100, 90_000, 1_500)),
            "changed_at": pa.array(at_ms * 1_000, pa.timestamp("us", "UTC")),
        }
    )
    return {"changes": rows.take(pa.array(arrival))}


if __name__ == "__main__":
    from running import main

    main("latest-row", pipeline, tables(), SQL)
