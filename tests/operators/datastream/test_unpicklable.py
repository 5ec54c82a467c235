"""A function that can't travel to the workers is refused before the start: operator, function, variable, and what to do."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from functools import partial
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.unpicklable import check_picklable
from holdfast.operators.functions.process import ProcessFunction
from holdfast.statebackends.errors import GraphError
from holdfast.statebackends.state import ListStateDescriptor, MapStateDescriptor, Pickled, ValueStateDescriptor
from tests.operators.ends import NamedSink, NamedSource

LOCK = threading.Lock()
CONN = sqlite3.connect(":memory:")
ANY_SINK = partial(NamedSink, needs_columns=False)


@pytest.fixture(autouse=True)
def _as_a_program() -> Iterator[None]:
    """This module's functions travel by value, as those of the user's own."""
    with contextlib.ExitStack() as ended:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        ended.callback(cloudpickle.unregister_pickle_by_value, sys.modules[__name__])
        yield


def refusal(build: Any) -> str:
    env = Environment("job")
    build(env.from_source(NamedSource())).sink_to(ANY_SINK(), uid="out")
    with pytest.raises(GraphError) as caught:
        check_picklable(env.build())
    assert caught.value.operator == "op"
    return caught.value.message


def spark_object(name: str) -> Any:
    """Of a class that Spark calls so, and that can't be pickled either."""
    module = ModuleType("pyspark.sql.classic")

    def refuse(self: Any) -> Any:
        raise RuntimeError("[CONTEXT_ONLY_VALID_ON_DRIVER] ...")

    return type(name, (), {"__reduce__": refuse, "__module__": module.__name__})()


class Point:
    """Of the user's program, so that no worker can import it."""


class Holds(ProcessFunction):
    def __init__(self, state: Any) -> None:
        self.states = (state,)  # type: ignore[misc]

    def process_element(self, row: Any, ctx: Any, out: Any) -> None: ...


@pytest.mark.parametrize(
    "state",
    [
        ValueStateDescriptor("points", Pickled[Point]),
        ListStateDescriptor("points", Pickled[list[Point | None]]),
        MapStateDescriptor("points", str, Pickled[dict[str, Point]]),
    ],
)
def test_pickled_state_of_a_class_that_no_worker_can_import_is_refused(state: Any) -> None:
    told = refusal(lambda stream: stream.key_by("carrier").process(Holds(state), returns={"k": int}).uid("op"))
    assert told.startswith("operator 'op': state 'points' is declared Pickled, and Point in it is a class of the program itself")
    assert "Make it a dataclass or a msgspec.Struct" in told


@pytest.mark.parametrize("kind", [Pickled, Pickled[complex], Pickled[Any], Decimal])
def test_state_of_classes_that_workers_have_is_not(kind: Any) -> None:
    env = Environment("job")
    stream = env.from_source(NamedSource()).key_by("carrier")
    stream.process(Holds(ValueStateDescriptor("v", kind)), returns={"k": int}).sink_to(ANY_SINK(), uid="out")
    check_picklable(env.build())


def uses_global(row: Any) -> Any:
    with LOCK:
        return row


class Enrich(ProcessFunction):
    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:")

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        out(self.db.execute("SELECT 1"))


class Nested(ProcessFunction):
    def __init__(self) -> None:
        self.clients = {"eu": [LOCK]}

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        out(value)


class InClass(ProcessFunction):
    shared = LOCK

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        out(self.shared)


class InMethod(ProcessFunction):
    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        out(uses_global(value))


def reads_an_attribute(row: Any, *, conn: Any = CONN) -> Any:
    """Which is called as a global that can't travel, and is none."""
    return row.LOCK, conn


OPEN = "Make it in open() of the function, where each worker makes its own"


def test_a_variable_of_a_closure_is_named() -> None:
    conn = sqlite3.connect(":memory:")

    def enrich(row: Any) -> Any:
        return conn.execute("SELECT 1").fetchone()

    said = refusal(lambda stream: stream.map(enrich).uid("op"))
    assert said.startswith("operator 'op': test_a_variable_of_a_closure_is_named.<locals>.enrich (test_unpicklable.py:")
    assert "uses conn, a sqlite3.Connection, which can't be sent to the workers (cannot pickle 'sqlite3.Connection' object)" in said
    assert said.endswith(OPEN)
    conn.close()


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda stream: stream.map(uses_global).uid("op"), r"uses_global \(test_\w+.py:\d+\) uses LOCK, a _thread.lock, which"),
        (lambda stream: stream.filter(lambda row, lock=LOCK: lock).uid("op"), r"<lambda>'s default, a _thread.lock"),
        (lambda stream: stream.flat_map(lambda row: [uses_global(row)]).uid("op"), r"uses_global \(.*\) uses LOCK"),
        (lambda stream: stream.key_by(uses_global, key_type=str).process(lambda v, c, o: None).uid("op"), "uses LOCK"),
        (lambda stream: stream.key_by(str, key_type=str).process(Enrich()).uid("op"), "Enrich uses self.db, a sqlite3.Connection"),
        (lambda stream: stream.key_by(str, key_type=str).process(Nested()).uid("op"), r"self.clients\['eu'\]\[0\], a _thread"),
        (lambda stream: stream.key_by(str, key_type=str).process(InClass()).uid("op"), "uses InClass.shared, a _thread.lock"),
        (lambda stream: stream.key_by(str, key_type=str).process(InMethod()).uid("op"), r"uses_global \(.*\) uses LOCK"),
        (lambda stream: stream.map(reads_an_attribute).uid("op"), r"uses conn, a sqlite3.Connection"),
    ],
)
def test_whatever_holds_it_the_variable_is_found(build: Any, said: str) -> None:
    message = refusal(build)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(message)
    assert message.endswith(OPEN)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("SparkSession", "It exists in the driver alone: read what the function needs before"),
        ("SparkContext", "It exists in the driver alone: read what the function needs before"),
        ("DataFrame", "It exists in the driver alone: make it a stream with env.from_dataframe"),
    ],
)
def test_what_is_sparks_is_called_so(name: str, said: str) -> None:
    spark = spark_object(name)
    message = refusal(lambda stream: stream.map(lambda row: spark.table("prices")).uid("op"))
    assert f"uses spark, a {name}, which can't be sent to the workers. {said}" in message
    assert "CONTEXT_ONLY" not in message


def test_what_can_travel_is_no_concern() -> None:
    prices = {"a": 1}
    env = Environment("job")
    env.from_source(NamedSource()).map(lambda row: prices.get(row)).sink_to(ANY_SINK(), uid="out")
    check_picklable(env.build())
