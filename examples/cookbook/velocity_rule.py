"""Velocity rule: an alert for each moment at which a card was used four times or more within a minute.

Payments come out of order. They wait in state until event time has reached them and are judged in their own order, so that the
alerts do not depend on which of two workers was ahead. State older than a minute is forgotten by a timer: in event time, unlike a
TTL, which goes by the wall clock.

    python examples/cookbook/velocity_rule.py
"""

import numpy as np
import pyarrow as pa

import holdfast as hf

MINUTE_MS = 60_000
LIMIT = 4
"""Payments within a minute."""
DISORDER_MS = 5_000
"""How far a payment may arrive behind a later one."""
ALERT = {"card": str, "at_ms": int, "payments": int, "cents": int}


class TooFast(hf.ProcessFunction):
    """Counts the payments of the last minute, at each moment at which there is one."""

    payments = hf.MapStateDescriptor("payments", int, list[int])  # event time in ms -> cents
    states = (payments,)

    def process_element(self, row, ctx, out):
        payments = ctx.state(self.payments)
        payments.put(ctx.timestamp, [*payments.get(ctx.timestamp, []), row["cents"]])
        ctx.timers.register_event_time_timer(ctx.timestamp)
        ctx.timers.register_event_time_timer(ctx.timestamp + MINUTE_MS)  # forgets it, also if the card is never seen again

    def on_timer(self, timestamp_ms, ctx, out):
        payments = ctx.state(self.payments)
        recent = []
        for at, cents in list(payments.items()):
            if at <= timestamp_ms - MINUTE_MS:
                payments.remove(at)
            elif at <= timestamp_ms:
                recent += cents
        if payments.contains(timestamp_ms) and len(recent) >= LIMIT:
            out({"card": ctx.key, "at_ms": timestamp_ms, "payments": len(recent), "cents": sum(recent)})


def pipeline(payments):
    """Alerts, of a stream of payments."""
    in_time = payments.assign_timestamps("paid_at", max_out_of_orderness_ms=DISORDER_MS).uid("time")
    return in_time.key_by("card").process(TooFast(), returns=ALERT).uid("too-fast")


SQL = """
    SELECT DISTINCT card, at_ms, count(*) OVER minute AS payments, CAST(sum(cents) OVER minute AS BIGINT) AS cents
    FROM (SELECT *, epoch_ms(paid_at) AS at_ms FROM payments)
    WINDOW minute AS (PARTITION BY card ORDER BY at_ms RANGE BETWEEN 59999 PRECEDING AND CURRENT ROW)
    QUALIFY count(*) OVER minute >= 4
"""
"""The same of all payments at once; also in the other recipes."""


def tables():
    """1,500 payments of 60 cards within 18 minutes, in the order of their arrival."""
    random = np.random.default_rng(1)
    at_ms = 1_700_000_000_000 + random.integers(0, 1_080, 1_500) * 1_000
    arrival = np.argsort(at_ms + random.integers(0, DISORDER_MS, 1_500))
    cards = [f"card-{number}" for number in random.integers(0, 60, 1_500)]
    rows = pa.table(
        {
            "card": pa.array(cards),
            "cents": pa.array(random.integers(100, 90_000, 1_500)),
            "paid_at": pa.array(at_ms * 1_000, pa.timestamp("us", "UTC")),
        }
    )
    return {"payments": rows.take(pa.array(arrival))}


if __name__ == "__main__":
    from running import main

    main("velocity-rule", pipeline, tables(), SQL)
