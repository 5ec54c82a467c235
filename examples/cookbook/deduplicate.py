"""Dedupe in a day: of a message that is delivered several times one is kept. Order numbers begin anew each day.

What is remembered is forgotten at the end of the day in event time, so state holds the numbers of a day or two. What comes later
than `DISORDER_MS` after the end of its day can't be told from a repetition any more: it is left out, and counted.

    python examples/cookbook/deduplicate.py
"""

import numpy as np
import pyarrow as pa

import holdfast as hf

DAY_MS = 86_400_000
DISORDER_MS = 2 * 3_600_000
"""How late a message, or its repetition, may be delivered."""
ORDER = {"number": int, "ordered_at": pa.timestamp("us", "UTC"), "cents": int}


class FirstOfDay(hf.ProcessFunction):
    """Lets the first message of each number and day pass."""

    days = hf.MapStateDescriptor("days", int, bool)
    states = (days,)

    def open(self, ctx):
        self.repeated, self.late = ctx.counter("repeated"), ctx.counter("late")

    def process_element(self, row, ctx, out):
        day = ctx.timestamp // DAY_MS
        ends_at = (day + 1) * DAY_MS - 1
        if ends_at <= ctx.watermark:
            self.late.inc()
            return
        days = ctx.state(self.days)
        if days.contains(day):
            self.repeated.inc()
            return
        days.put(day, True)
        ctx.timers.register_event_time_timer(ends_at)
        out(row)

    def on_timer(self, timestamp_ms, ctx, out):
        ctx.state(self.days).remove(timestamp_ms // DAY_MS)


def pipeline(messages):
    """Messages without repetitions."""
    in_time = messages.assign_timestamps("ordered_at", max_out_of_orderness_ms=DISORDER_MS).uid("time")
    return in_time.key_by("number").process(FirstOfDay(), returns=ORDER).uid("first-of-day")


SQL = """
    SELECT number, ordered_at, cents FROM messages
    QUALIFY row_number() OVER (PARTITION BY number, epoch_ms(ordered_at) // 86400000 ORDER BY ordered_at) = 1
"""


def tables():
    """900 orders of three days, each delivered one to three times, in the order of their arrival."""
    random = np.random.default_rng(3)
    days = np.repeat(np.arange(3), 300)
    numbers = np.tile(np.arange(300), 3)
    at_ms = 1_699_920_000_000 + days * DAY_MS + random.integers(0, DAY_MS, 900)
    cents = random.integers(100, 90_000, 900)
    copies = np.repeat(np.arange(900), random.integers(1, 4, 900))
    delivered = at_ms[copies] + random.integers(0, DISORDER_MS, len(copies))
    messages = copies[np.argsort(delivered)]
    times = pa.array(at_ms[messages] * 1_000, pa.timestamp("us", "UTC"))
    return {"messages": pa.table({"number": numbers[messages], "ordered_at": times, "cents": cents[messages]})}


if __name__ == "__main__":
    from running import main

    main("deduplicate", pipeline, tables(), SQL)
