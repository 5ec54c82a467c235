"""Sessions by hand: the clicks of a visitor belong together until there is none for half an hour.

Clicks wait until event time has reached them; a timer at each click adds it to the open session, a timer half an hour later closes
the session if it got no other. A click exactly half an hour later begins a new one.

    python examples/cookbook/sessions.py
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

import holdfast as hf

GAP_MS = 30 * 60_000
DISORDER_MS = 10 * 60_000
SESSION = {"visitor": int, "started_ms": int, "ended_ms": int, "clicks": int}


@dataclass
class Session:
    """An open session; times in ms."""

    started: int
    ended: int
    clicks: int


class Sessions(hf.ProcessFunction):
    """Emits each session when it is over."""

    waiting = hf.MapStateDescriptor("waiting", int, int)  # event time in ms -> clicks
    session = hf.ValueStateDescriptor("session", Session)
    states = (waiting, session)

    def process_element(self, row, ctx, out):
        waiting = ctx.state(self.waiting)
        waiting.put(ctx.timestamp, waiting.get(ctx.timestamp, 0) + 1)
        ctx.timers.register_event_time_timer(ctx.timestamp)

    def on_timer(self, timestamp_ms, ctx, out):
        waiting, state = ctx.state(self.waiting), ctx.state(self.session)
        session = state.value()
        if session is not None and timestamp_ms - session.ended >= GAP_MS:
            out({"visitor": ctx.key, "started_ms": session.started, "ended_ms": session.ended, "clicks": session.clicks})
            state.clear()
            session = None
        clicks = waiting.get(timestamp_ms)
        if clicks is None:
            return
        waiting.remove(timestamp_ms)
        session = session or Session(timestamp_ms, timestamp_ms, 0)
        state.update(Session(session.started, timestamp_ms, session.clicks + clicks))
        ctx.timers.register_event_time_timer(timestamp_ms + GAP_MS)


def pipeline(clicks):
    """Sessions, of a stream of clicks."""
    in_time = clicks.assign_timestamps("clicked_at", max_out_of_orderness_ms=DISORDER_MS).uid("time")
    return in_time.key_by("visitor").process(Sessions(), returns=SESSION).uid("sessions")


SQL = """
    WITH clicks_ms AS (SELECT visitor, epoch_ms(clicked_at) AS at_ms FROM clicks),
    marked AS (
        SELECT *, coalesce(at_ms - lag(at_ms) OVER (PARTITION BY visitor ORDER BY at_ms) < 1800000, false) AS goes_on FROM clicks_ms
    ),
    numbered AS (SELECT *, count(*) FILTER (NOT goes_on) OVER (PARTITION BY visitor ORDER BY at_ms) AS number FROM marked)
    SELECT visitor, min(at_ms) AS started_ms, max(at_ms) AS ended_ms, count(*) AS clicks FROM numbered GROUP BY visitor, number
"""


def tables():
    """1,200 clicks of 15 visitors within a day and a half, by the minute, in the order of their arrival."""
    random = np.random.default_rng(2)
    at_ms = 1_700_000_000_000 + random.integers(0, 2_160, 1_200) * 60_000
    arrival = np.argsort(at_ms + random.integers(0, DISORDER_MS, 1_200))
    times = pa.array(at_ms * 1_000, pa.timestamp("us", "UTC"))
    rows = pa.table({"visitor": pa.array(random.integers(0, 15, 1_200)), "clicked_at": times})
    return {"clicks": rows.take(pa.array(arrival))}


if __name__ == "__main__":
    from running import main

    main("sessions", pipeline, tables(), SQL)
