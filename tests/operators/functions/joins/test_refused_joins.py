"""What building the graph refuses of joins of event time: each names the operator."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.datastream.stream import Stream

TYPES = {"id": int, "at": int}


def stream(environment: hf.Environment, name: str, columns: Any, *, timed: bool = True) -> Stream:
    rows = environment.from_collection([], returns=columns).uid(name)
    return rows.assign_timestamps("at", max_out_of_orderness_ms=0) if timed else rows


def both(left: Any = None, right: Any = None, **settings: Any) -> tuple[Stream, Stream]:
    environment = hf.Environment("refused")
    return (
        stream(environment, "left", left or {**TYPES, "item": str}, **settings),
        stream(environment, "right", right or {"id": int, "at": int, "paid": float}),
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "has no lower bound"),
        ({"lower": 0}, "has no upper bound, and would keep its rows for ever"),
        ({"lower": 1, "upper": 0}, "no time is in the interval from 1 to 0 ms"),
        ({"lower": 5, "upper": 5, "upper_exclusive": True}, "from 5 to 5 ms without its ends"),
        ({"lower": 0.5, "upper": 1}, "must be a timedelta, or ms as an int, not 0.5"),
        ({"lower": 0, "upper": 10**16}, "upper may be 1000000000000000 ms at most"),
        ({"lower": 0, "upper": 1, "how": "outer"}, "how is inner, left, right, full, not 'outer'"),
        ({"lower": 0, "upper": 1}, "two columns of one name: at"),
        ({"lower": 0, "upper": 1, "suffixes": ("", "_2"), "late_left": "late", "late_right": "late"}, "two side outputs"),
    ],
)
def test_an_interval_join_is_refused(settings: dict[str, Any], message: str) -> None:
    left, right = both()
    with pytest.raises(hf.GraphError, match="operator 'interval_join'.*" + message):
        left.interval_join(right, on="id", **settings)


@pytest.mark.parametrize(
    ("retain", "message"),
    [
        (None, "has no bound, and would keep its rows for ever: give retain="),
        (-1, "retain must be at least 0 ms, not -1"),
        ((1, 2, 3), "a duration, or a pair"),
        ((timedelta(seconds=1), "x"), "must be a timedelta"),
    ],
)
def test_a_regular_join_without_a_bound_is_refused(retain: Any, message: str) -> None:
    left, right = both()
    with pytest.raises(hf.GraphError, match="operator 'join'.*" + message):
        left.join(right, on="id", retain=retain, suffixes=("", "_right"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: both(timed=False), "no event times"),
        (lambda: both(left={"id": str, "at": int}), "keys have different types: id of the left is utf8, id of the right int64"),
        (lambda: (both()[0], both()[1]), "one environment"),
        (lambda: both(left={**TYPES, "d": pa.month_day_nano_interval()}), "column 'd' is"),
    ],
)
def test_streams_that_can_not_be_joined_are_refused(make: Callable[[], tuple[Stream, Stream]], message: str) -> None:
    left, right = make()
    with pytest.raises(hf.GraphError, match="operator 'join'.*" + message):
        left.join(right, on="id", retain=1, suffixes=("", "_right"))


@pytest.mark.parametrize(
    ("kind", "join"),
    [
        ("window_join", lambda a, b: a.window_join(b, on="id", window=hf.Tumbling(10), suffixes=("", "_right"))),
        ("cogroup", lambda a, b: a.cogroup(b, lambda key, window, left, right: [], on="id", window=hf.Tumbling(10))),
        ("temporal_join", lambda a, b: a.temporal_join(b, on="id", suffixes=("", "_right"))),
    ],
)
@pytest.mark.parametrize("data_type", [pa.month_day_nano_interval(), pa.string_view(), pa.list_(pa.struct([]))], ids=str)
@pytest.mark.parametrize("side", [0, 1])
def test_columns_that_can_not_be_kept_are_refused(
    kind: str, join: Callable[[Stream, Stream], Stream], side: int, data_type: pa.DataType
) -> None:
    odd = {**TYPES, "d": data_type}
    streams = both(left=odd) if side == 0 else both(right=odd)
    with pytest.raises(hf.GraphError, match=f"operator '{kind}' keeps rows in its state, and column 'd' is"):
        join(*streams)


def test_late_outputs_of_both_sides_have_names_of_their_own() -> None:
    left, right = both()
    late: dict[str, Any] = {"late_left": "late", "late_right": "late"}
    with pytest.raises(hf.GraphError, match="'window_join': two side outputs are called 'late'"):
        left.window_join(right, on="id", window=hf.Tumbling(10), suffixes=("", "_right"), **late)
    with pytest.raises(hf.GraphError, match="'cogroup': two side outputs are called 'late'"):
        left.cogroup(right, lambda *_: [], on="id", window=hf.Tumbling(10), returns={"id": int}, **late)


def test_a_regular_join_is_an_interval_join_as_far_as_each_side_is_retained() -> None:
    left, right = both()
    joined = left.join(right, on="id", retain=(timedelta(seconds=2), 500), suffixes=("", "_right"))
    node = joined._own("join")
    assert node.properties == {"lower_ms": -500, "upper_ms": 2_000, "how": "inner"}
    assert joined.schema is not None
    assert joined.schema.names == ["id", "at", "item", "at_right", "paid"]
