"""Joins as a user writes them: whole jobs through restarts, and what building the graph refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest

import holdfast as hf
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions.schema import declared_type
from tests.operators.ends import NamedSource

ORDERS = {"id": int, "currency": str | None, "amount": int}
RATES = {"code": str | None, "rate": float, "note": str | None}


@pytest.mark.parametrize("batch_rows", [1, 65_536])
@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
def test_a_temporal_join_goes_on_anywhere(backend: Literal["memory", "rocksdb"], batch_rows: int) -> None:
    with hf.testing.Job(parallelism=2, state_backend="filesystem", batch_rows=batch_rows) as job:
        orders, rates = job.input("orders", ORDERS), job.input("rates", RATES)
        priced = orders.stream.temporal_join(rates.stream, on=("currency", "code"), how="left").uid("priced")
        assert priced.schema is not None
        assert priced.schema.names == ["currency", "id", "amount", "rate", "note"]
        out = job.output(priced)
        job.start()
        rates.add([{"code": "EUR", "rate": 1.5, "note": None}, {"code": None, "rate": 9.0, "note": "of nothing"}], at=[10, 0])
        rates.add({"code": "EUR", "rate": 2.5, "note": "new"}, at=20)
        rates.watermark(15)
        orders.add([order(1, "EUR"), order(2, "CHF"), order(3, "EUR")], at=[12, 13, 25])
        orders.watermark(12)
        assert shown(out) == [(1, 12, 1.5)]
        orders.add(order(4, None), at=16)  # a null has no partner, and needs no watermark to know it
        assert shown(out) == [(4, 16, None)]
        job.checkpoint()
        job.restart(parallelism=3, state_backend=backend)
        orders.watermark(30)
        rates.watermark(22)
        assert shown(out) == [(2, 13, None)]
        rates.end()
        orders.add(order(5, "EUR"), at=19)  # late
        orders.end()
        assert shown(out) == [(3, 25, 2.5)]


def order(number: int, currency: str | None) -> dict[str, Any]:
    return {"id": number, "currency": currency, "amount": 100}


def shown(out: Any) -> list[tuple[Any, ...]]:
    return sorted((row["id"], time, row["rate"]) for row, time in out.take())


# --------------------------------------------------------------------------------------------------------- what is refused


def streams(*, timed: bool = True) -> tuple[Stream, Stream]:
    env = Environment("job", parallelism=2)
    found = []
    for name, columns in (("orders", {"id": int, "at": int, "text": str}), ("rates", {"id": int, "at": int, "wide": float})):
        stream = env.from_source(NamedSource(declared_type(columns, name).schema, name)).uid(name)
        found.append(stream.assign_timestamps("at", max_out_of_orderness_ms=0).uid(f"{name}-times") if timed else stream)
    return found[0], found[1]


@pytest.mark.parametrize(
    ("join", "told"),
    [
        (lambda a, b: a.temporal_join(b, "id", how="full"), "how is 'inner' or 'left', not 'full'"),
        (lambda a, b: a.temporal_join(b, "id"), "two columns of one name: at"),
        (lambda a, b: a.temporal_join(b, ("text", "id")), "keys have different types"),
        (lambda a, b: a.temporal_join(b, "text"), "no column 'text'"),
        (lambda a, b: a.temporal_join("rates", "id"), "takes two streams of one environment, not 'rates'"),
        (lambda a, b: a.temporal_join(streams()[1], "id"), "takes two streams of one environment"),
        (lambda a, b: a.map(lambda row: row).temporal_join(b, "id"), "needs columns"),
    ],
)
def test_a_bad_temporal_join_is_refused_when_the_graph_is_built(join: Callable[[Stream, Stream], Stream], told: str) -> None:
    with pytest.raises(hf.GraphError, match=told) as raised:
        join(*streams())
    assert "temporal_join" in str(raised.value)


def test_a_temporal_join_needs_event_times_on_both_sides() -> None:
    orders, rates = streams(timed=False)
    with pytest.raises(hf.GraphError, match="the rows of its left side have no event times"):
        orders.temporal_join(rates, "id")
    with pytest.raises(hf.GraphError, match="the rows of its right side have no event times"):
        orders.assign_timestamps("at", max_out_of_orderness_ms=0).temporal_join(rates, "id")
