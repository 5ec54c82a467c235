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


@pytest.mark.parametrize("batch_rows", [1, 65_536])
@pytest.mark.parametrize("window", [hf.Tumbling(10), hf.Session(5)])
def test_a_window_join_and_a_cogroup_go_on_anywhere(window: Any, batch_rows: int) -> None:
    with hf.testing.Job(parallelism=2, state_backend="filesystem", batch_rows=batch_rows) as job:
        orders, rates = job.input("orders", ORDERS), job.input("rates", RATES)
        on = ("currency", "code")
        joined = orders.stream.window_join(rates.stream, on=on, window=window, how="full").uid("joined")
        counted = orders.stream.cogroup(rates.stream, counts, on=on, window=window, returns=COUNTS).uid("counted")
        out, groups = job.output(joined), job.output(counted)
        job.start()
        orders.add([order(1, "EUR"), order(2, "CHF")], at=[2, 3])
        job.checkpoint()
        job.restart(parallelism=3, state_backend="rocksdb")
        rates.add([{"code": "EUR", "rate": 1.5, "note": "x"}, {"code": "USD", "rate": 2.5, "note": None}], at=4)
        orders.end()
        rates.end()
        ends = {"EUR": 9, "CHF": 8, "USD": 9} if isinstance(window, hf.Session) else dict.fromkeys(("EUR", "CHF", "USD"), 10)
        rows = sorted((row["currency"], time, row["id"], row["rate"], row["note"]) for row, time in out.take())
        assert rows == [
            ("CHF", ends["CHF"] - 1, 2, None, None),
            ("EUR", ends["EUR"] - 1, 1, 1.5, "x"),
            ("USD", ends["USD"] - 1, None, 2.5, None),
        ]
        found = sorted((row["currency"], row["end"], row["orders"], row["rates"]) for row, _ in groups.take())
        assert found == [("CHF", ends["CHF"], [2], 0), ("EUR", ends["EUR"], [1], 1), ("USD", ends["USD"], [], 1)]


def test_late_rows_of_window_joins_and_cogroups_are_streams_of_their_own() -> None:
    with hf.testing.Job(parallelism=2) as job:
        orders, rates = job.input("orders", ORDERS), job.input("rates", RATES)
        on, window = ("currency", "code"), hf.Tumbling(10)
        tags: dict[str, Any] = {"late_left": "late", "late_right": hf.OutputTag("stale")}
        joined = orders.stream.window_join(rates.stream, on=on, window=window, **tags).uid("joined")
        counted = orders.stream.cogroup(rates.stream, counts, on=on, window=window, returns=COUNTS, **tags).uid("counted")
        outs = [job.output(stream.side_output(tag)) for stream in (joined, counted) for tag in ("late", "stale")]
        found = job.output(joined), job.output(counted)
        job.start()
        for each in (orders, rates):
            each.watermark(50)
        orders.add(order(1, "EUR"), at=40)
        rates.add({"code": "EUR", "rate": 1.5, "note": "x"}, at=49)
        orders.end()
        rates.end()
        late, stale = order(1, "EUR"), {"code": "EUR", "rate": 1.5, "note": "x"}
        assert [out.take() for out in outs] == [[(late, 40)], [(stale, 49)]] * 2
        assert [out.take() for out in found] == [[], []]


COUNTS = {"currency": str, "end": int, "orders": list[int], "rates": int}


def counts(key: str, window: hf.TimeWindow, left: list[Any], right: list[Any]) -> Any:
    yield {"currency": key, "end": window.end, "orders": [row["id"] for row in left], "rates": len(right)}


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
        (lambda a, b: a.temporal_join(b, on="id", how="full"), "how is 'inner' or 'left', not 'full'"),
        (lambda a, b: a.temporal_join(b, on="id"), "two columns of one name: at"),
        (lambda a, b: a.temporal_join(b, on=("text", "id")), "keys have different types"),
        (lambda a, b: a.temporal_join(b, on="text"), "no column 'text'"),
        (lambda a, b: a.temporal_join("rates", on="id"), "takes two streams of one environment, not 'rates'"),
        (lambda a, b: a.temporal_join(streams()[1], on="id"), "takes two streams of one environment"),
        (lambda a, b: a.map(lambda row: row).temporal_join(b, on="id"), "needs columns"),
    ],
)
def test_a_bad_temporal_join_is_refused_when_the_graph_is_built(join: Callable[[Stream, Stream], Stream], told: str) -> None:
    with pytest.raises(hf.GraphError, match=told) as raised:
        join(*streams())
    assert "temporal_join" in str(raised.value)


@pytest.mark.parametrize(
    ("window", "told"),
    [
        (hf.Global(), "window is one of event time"),
        (hf.Tumbling(10, time="processing"), "window is one of event time"),
        (10, "window is one of event time"),
        (hf.Session(lambda row: 10), "the gap of its sessions is a number of ms"),
        (hf.Sliding(10_000, 1), "kept in 10000 windows; it may be in 1000"),
    ],
)
def test_a_bad_window_is_refused_when_the_graph_is_built(window: Any, told: str) -> None:
    orders, rates = streams()
    with pytest.raises(hf.GraphError, match=f"'window_join'.*{told}"):
        orders.window_join(rates, on="id", window=window, suffixes=("", "_rate"))
    with pytest.raises(hf.GraphError, match=f"'cogroup'.*{told}"):
        orders.cogroup(rates, counts, on="id", window=window)


def test_bad_arguments_of_window_join_and_cogroup_are_refused() -> None:
    orders, rates = streams()
    with pytest.raises(hf.GraphError, match="'window_join': how is inner, left, right, full, not 'outer'"):
        orders.window_join(rates, on="id", window=hf.Tumbling(10), how="outer")  # type: ignore[arg-type]
    with pytest.raises(hf.GraphError, match=r"'window_join'.*two columns of one name: at"):
        orders.window_join(rates, on="id", window=hf.Tumbling(10))
    with pytest.raises(hf.GraphError, match="'cogroup': 5 is not a function"):
        orders.cogroup(rates, 5, on="id", window=hf.Tumbling(10))  # type: ignore[arg-type]


def test_a_temporal_join_needs_event_times_on_both_sides() -> None:
    orders, rates = streams(timed=False)
    with pytest.raises(hf.GraphError, match="the rows of its left side have no event times"):
        orders.temporal_join(rates, on="id")
    with pytest.raises(hf.GraphError, match="the rows of its right side have no event times"):
        orders.assign_timestamps("at", max_out_of_orderness_ms=0).temporal_join(rates, on="id")
