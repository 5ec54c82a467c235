"""Pipelines that the kit's tests run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import holdfast as hf

EVENTS = {"key": str, "value": int}
TOTALS = {"key": str, "total": int}


@dataclass
class Reading:
    key: str
    value: int


class Totals(hf.ProcessFunction):
    """The running total of each key; counts its records, and refuses a value of -1."""

    total = hf.ValueStateDescriptor("total", int)
    states = (total,)
    returns = TOTALS

    def process_element(self, value: Any, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        ctx.counter("seen").inc()
        if value["value"] == -1:
            raise ValueError("a poisoned row")
        total = ctx.state(self.total)
        total.update(total.value(0) + value["value"])
        out({"key": ctx.key, "total": total.value()})


class Alarm(hf.ProcessFunction):
    """Some time after each record, by the wall clock, the key and the moment at which its timer fired."""

    states = ()

    def __init__(self, after_ms: int) -> None:
        self.after_ms = after_ms

    def process_element(self, value: Any, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        ctx.timers.register_processing_time_timer(ctx.timers.current_processing_time + self.after_ms)

    def on_timer(self, timestamp_ms: int, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        out((ctx.key, timestamp_ms, ctx.timers.current_processing_time))


class Remembering(hf.ProcessFunction):
    """Whether the key was seen within the last second."""

    last = hf.ValueStateDescriptor("last", int, ttl=hf.Ttl(timedelta(seconds=1)))
    states = (last,)

    def process_element(self, value: Any, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        last = ctx.state(self.last)
        out((ctx.key, last.value()))
        last.update(value["value"])


def totals(stream: Any) -> Any:
    return stream.key_by("key").process(Totals()).uid("totals")


def windows(stream: Any) -> Any:
    counted = stream.key_by("key").window(hf.Tumbling(seconds=1)).aggregate(n=hf.count(), total=hf.sum("value"))
    return counted.uid("windows")


def readings(stream: Any) -> Any:
    def doubled(reading: Reading) -> Reading:
        return Reading(reading.key, 2 * reading.value)

    return stream.map(doubled, returns=Reading)
