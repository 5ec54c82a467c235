"""The broadcast pattern: who may write, that copies are equal whatever comes first, and what a restore and a rescale give."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.barriers.jobgraph import Partitioning
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import BroadcastStream, Stream
from holdfast.operators.functions.broadcast import (
    BroadcastContext,
    BroadcastProcessFunction,
    BroadcastProcessOperator,
    KeyedBroadcastProcessFunction,
    KeyedBroadcastProcessOperator,
    ReadOnlyBroadcastContext,
)
from holdfast.operators.functions.operator_state import BroadcastState, broadcast_list
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.operators.functions.schema import UNDECLARED, declared_type
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.statebackends.backend import OperatorListState
from holdfast.statebackends.errors import GraphError, ReadOnlyStateError, StateValueError, UndeclaredStateError
from holdfast.statebackends.state import ListStateDescriptor, MapStateDescriptor, Ttl, ValueStateDescriptor
from holdfast.statebackends.storage.port import Storage
from tests.examples import examples
from tests.harness.mini import MiniCluster
from tests.operators.ends import NamedSink, NamedSource
from tests.operators.harness import HarnessSnapshot, OperatorHarness
from tests.operators.ports import DictStorage
from tests.operators.worker.test_loop import run_through_crashes

PAYMENTS = declared_type({"card": str, "shop": str, "amount": int}, "payments")
LIMITS = declared_type({"shop": str, "limit": int}, "limits")
RULES = MapStateDescriptor("rules", str, int)
NAMES = MapStateDescriptor("names", str, list[str])


class Limit(KeyedBroadcastProcessFunction):
    """What each card has spent; a limit of 0 forgives all cards, a negative one is refused by a mistaken record."""

    spent = ValueStateDescriptor("spent", int)
    shops = ListStateDescriptor("shops", str)
    states = (spent, shops)
    returns = {"card": str, "spent": int, "limit": int}  # noqa: RUF012 - the contract's class attribute

    def process_element(self, value: Any, ctx: ReadOnlyBroadcastContext, out: Collector) -> None:
        spent = ctx.state(self.spent).value(0) + value["amount"]
        ctx.state(self.spent).update(spent)
        ctx.timers.register_event_time_timer(1_000)
        out({"card": ctx.key, "spent": spent, "limit": ctx.broadcast_state(RULES).get(value["shop"], -1)})

    def process_broadcast_element(self, value: Any, ctx: BroadcastContext, out: Collector) -> None:
        rules = ctx.broadcast_state(RULES)
        if value["limit"] == 0:
            rules.remove(value["shop"])
            ctx.apply_to_keyed_state(self.spent, lambda card, spent: self._forgive(card, spent, out))
        else:
            rules.put(value["shop"], value["limit"])

    def _forgive(self, card: str, spent: Any, out: Collector) -> None:
        out({"card": card, "spent": -spent.value(0), "limit": 0})
        spent.clear()

    def on_timer(self, timestamp_ms: int, ctx: ProcessContext, out: Collector) -> None:
        assert isinstance(ctx, ReadOnlyBroadcastContext)
        out({"card": ctx.key, "spent": ctx.state(self.spent).value(0), "limit": len(list(ctx.broadcast_state(RULES).items()))})


def keyed_operator(function: KeyedBroadcastProcessFunction | None = None) -> KeyedBroadcastProcessOperator:
    selector = key_selector("card", None, PAYMENTS, "op")
    output = declared_type(Limit.returns, "op")
    return KeyedBroadcastProcessOperator(function or Limit(), selector, (PAYMENTS, LIMITS), (RULES,), output)


def pay(harness: OperatorHarness, *rows: tuple[str, str, int]) -> list[Any]:
    harness.output.clear()
    harness.process([dict(zip(PAYMENTS.names, row, strict=True)) for row in rows], [10] * len(rows), PAYMENTS.schema)
    return [tuple(row.values()) for row in harness.output.rows()]


def limit(harness: OperatorHarness, *rows: tuple[str, int]) -> list[Any]:
    harness.output.clear()
    harness.process([dict(zip(LIMITS.names, row, strict=True)) for row in rows], [20] * len(rows), LIMITS.schema, 1)
    return [tuple(row.values()) for row in harness.output.rows()]


def test_records_meet_the_rules_that_came_before() -> None:
    with OperatorHarness(keyed_operator(), key_type="utf8") as harness:
        assert pay(harness, ("a", "x", 5)) == [("a", 5, -1)]
        assert limit(harness, ("x", 7), ("y", 9)) == []
        assert pay(harness, ("a", "x", 5), ("b", "y", 1)) == [("a", 10, 7), ("b", 1, 9)]
        snapshot = harness.snapshot()
    with OperatorHarness.restored(keyed_operator(), [snapshot], key_type="utf8") as harness:
        assert pay(harness, ("a", "y", 1)) == [("a", 11, 9)]
        harness.output.clear()
        harness.watermark(1_000)
        assert sorted(row["card"] for row in harness.output.rows()) == ["a", "b"]
        assert {row["limit"] for row in harness.output.rows()} == {2}


def test_the_broadcast_side_reaches_all_keys_of_the_subtask() -> None:
    with OperatorHarness(keyed_operator(), key_type="utf8") as harness:
        pay(harness, ("a", "x", 5), ("b", "x", 6), ("a", "x", 1))
        harness.snapshot()  # frozen layers are reached as well
        pay(harness, ("c", "x", 2))
        assert sorted(limit(harness, ("x", 0))) == [("a", -6, 0), ("b", -6, 0), ("c", -2, 0)]
        assert harness.output.timestamps() == [20, 20, 20]
        assert limit(harness, ("x", 0)) == []
        assert pay(harness, ("a", "x", 3)) == [("a", 3, -1)]


class Writes(Limit):
    def process_element(self, value: Any, ctx: ReadOnlyBroadcastContext, out: Collector) -> None:
        rules: Any = ctx.broadcast_state(RULES)
        match value["shop"]:
            case "put":
                rules.put("x", 1)
            case "remove":
                rules.remove("x")
            case "clear":
                rules.clear()
            case "other":
                ctx.broadcast_state(NAMES)
            case _:
                out({"card": "", "spent": 0, "limit": rules.get("x", 0)})


@pytest.mark.parametrize("call", ["put", "remove", "clear"])
def test_the_keyed_side_can_not_write(call: str) -> None:
    with OperatorHarness(keyed_operator(Writes()), key_type="utf8") as harness:
        limit(harness, ("x", 7))
        with pytest.raises(ReadOnlyStateError, match=rf"operator 'op'.*{call}\(\) on the broadcast state 'rules'") as raised:
            pay(harness, ("a", call, 1))
        assert (raised.value.operator, raised.value.state, raised.value.subtask) == ("op", "rules", 0)
        assert call in str(raised.value.record)
        assert pay(harness, ("a", "x", 1)) == [("", 0, 7)]


def test_a_state_that_was_not_broadcast_is_refused() -> None:
    problem = "broadcast state 'names' is not among those of the broadcast stream"
    with OperatorHarness(keyed_operator(Writes()), key_type="utf8") as harness, pytest.raises(UndeclaredStateError, match=problem):
        pay(harness, ("a", "other", 1))


def test_neither_keys_nor_timers_on_the_broadcast_side() -> None:
    assert not {"key", "timers", "state"} & set(dir(BroadcastContext))


# --------------------------------------------------------------------------------------------------------------- the copies


def state(entries: list[bytes] | None = None, descriptor: Any = NAMES) -> tuple[BroadcastState[Any, Any], OperatorListState]:
    stored = OperatorListState(descriptor.name, entries or [])
    return BroadcastState(descriptor, stored), stored


LISTS = st.one_of(st.none(), st.lists(st.text(max_size=3), max_size=3))


@given(st.lists(st.tuples(st.integers(0, 9), LISTS), max_size=30), st.randoms())
def test_copies_do_not_depend_on_the_order_of_keys(changes: list[tuple[int, list[str] | None]], rng: random.Random) -> None:
    """As long as changes of one key keep their order, whatever comes between, copies are equal, byte for byte."""
    one, stored_one = state()
    other, stored_other = state()
    model: dict[str, list[str]] = {}
    for key, value in changes:
        _change(one, str(key), value)
        model.pop(str(key), None) if value is None else model.update({str(key): value})
    keys = sorted({key for key, _ in changes})
    rng.shuffle(keys)
    for wanted in keys:
        for key, value in changes:
            if key == wanted:
                _change(other, str(key), value)
    one.store()
    other.store()
    assert stored_one.entries == stored_other.entries
    restored, _ = state(list(stored_one.entries))
    for each in (one, other, restored):
        assert dict(each.items()) == model
        assert list(each.keys()) == [key for key, _ in each.items()] == list(one.keys())
        assert each.is_empty() == (not model)
        assert all(each.contains(key) and each.get(key) == value for key, value in model.items())
        assert each.get("none") is None


def _change(state: BroadcastState[Any, Any], key: str, value: list[str] | None) -> None:
    if value is None:
        state.remove(key)
    else:
        state.put(key, value)


def test_a_value_changed_in_place_changes_no_state() -> None:
    names, stored = state()
    given_in = ["a"]
    names.put("x", given_in)
    given_in.append("b")
    found = names.get("x")
    assert found == ["a"]
    found.append("c")
    next(iter(names.values())).append("d")
    names.store()
    assert names.get("x") == ["a"]
    assert dict(state(list(stored.entries))[0].items()) == {"x": ["a"]}


def test_iteration_is_over_the_entries_as_they_are_when_it_begins() -> None:
    names, _ = state()
    names.put("x", ["a"])
    names.put("y", [])
    for key, _ in names.items():
        names.remove(key)
    assert names.is_empty()
    names.put("z", [])
    names.clear()
    assert list(names.items()) == []


def test_a_value_of_another_type_is_refused_where_it_is_put() -> None:
    names, _ = state()
    with pytest.raises(StateValueError, match="state 'names'"):
        names.put("x", ["a", 1])
    with pytest.raises(StateValueError, match=r"state 'names'.*key"):
        names.put(3, [])
    assert names.is_empty()


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
def test_a_rescale_hands_a_copy_to_every_subtask(parallelism: int) -> None:
    snapshots: list[HarnessSnapshot] = []
    for subtask in range(3):
        with OperatorHarness(keyed_operator(), key_type="utf8", subtask=subtask, parallelism=3) as harness:
            rules = [("x", 7), ("y", 9), ("z", 3)]
            limit(harness, *rules[subtask:], *rules[:subtask])
            snapshots.append(harness.snapshot())
    assert len({tuple(snapshot.lists["rules"]) for snapshot in snapshots}) == 1
    for subtask in range(parallelism):
        settings: dict[str, Any] = {"key_type": "utf8", "subtask": subtask, "parallelism": parallelism}
        with OperatorHarness.restored(keyed_operator(), snapshots, **settings) as harness:
            assert harness.snapshot().lists["rules"] == snapshots[0].lists["rules"]


# --------------------------------------------------------------------------------------------------------- without keys


class Rename(BroadcastProcessFunction):
    def process_element(self, value: Any, ctx: ReadOnlyBroadcastContext, out: Collector) -> None:
        out((value, ctx.broadcast_state(NAMES).get(value, [])))

    def process_broadcast_element(self, value: Any, ctx: BroadcastContext, out: Collector) -> None:
        if value is None:
            ctx.apply_to_keyed_state(ValueStateDescriptor("spent", int), lambda key, state: None)
        ctx.broadcast_state(NAMES).put(*value)


def test_a_stream_without_keys_reads_broadcast_state() -> None:
    operator = BroadcastProcessOperator(Rename(), (UNDECLARED, UNDECLARED), (NAMES,), UNDECLARED)
    with OperatorHarness(operator) as harness:
        harness.process(["x"])
        harness.process([("x", ["a"])], input_index=1)
        harness.process(["x"])
        assert harness.output.rows() == [("x", []), ("x", ["a"])]
        with pytest.raises(UndeclaredStateError, match="not on a keyed stream, so it has no keyed state: call key_by"):
            harness.process([None], input_index=1)


# -------------------------------------------------------------------------------------------------------------- the graph


def streams() -> tuple[Stream, Stream]:
    env = Environment("job", parallelism=2)
    payments = env.from_source(NamedSource(PAYMENTS.schema, "payments")).uid("payments")
    return payments, env.from_source(NamedSource(LIMITS.schema, "limits")).uid("limits")


def test_one_input_is_by_key_and_the_other_goes_to_all() -> None:
    payments, limits = streams()
    limited = payments.key_by("card").connect(limits.broadcast(RULES)).process(Limit()).uid("limited")
    limited.sink_to(NamedSink(), uid="out")
    plan = limited.environment.build()
    vertex = next(vertex for vertex in plan.graph.vertices if vertex.operators[0].uid == "limited")
    found = [(edge.source_operator, edge.input_index, edge.partitioning) for edge in plan.graph.inputs(vertex.vertex_id)]
    assert found == [("payments", 0, Partitioning.HASH), ("limits", 1, Partitioning.BROADCAST)]
    states = {state.name: (state.kind, state.value_type) for state in vertex.operators[0].states}
    assert states["rules"] == ("operator_broadcast", "tuple<str,int>")
    assert vertex.operators[0].properties["timers"] is True


class Half(KeyedBroadcastProcessFunction):
    def process_element(self, value: Any, ctx: ReadOnlyBroadcastContext, out: Collector) -> None: ...


class Clashes(Limit):
    states = (ValueStateDescriptor("rules", int),)  # type: ignore[assignment]


class Keyless(Rename):
    states = (ValueStateDescriptor("count", int),)


def of(function: Any, *states: Any, keyed: bool = True) -> Any:
    payments, limits = streams()
    broadcast: Any = limits.broadcast(*(states or (RULES,)))
    limited = (payments.key_by("card") if keyed else payments).connect(broadcast).process(function)
    limited.sink_to(NamedSink(needs_columns=False), uid="out")
    return limited.environment.build()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: of(Limit(), keyed=False), "'broadcast_process': .*not a BroadcastProcessFunction instance"),
        (lambda: of(Rename()), "not a KeyedBroadcastProcessFunction instance"),
        (lambda: of(Limit), "not a KeyedBroadcastProcessFunction instance"),
        (lambda: of(ProcessFunction()), "not a KeyedBroadcastProcessFunction instance"),
        (lambda: of(Half()), "Half must define process_broadcast_element"),
        (lambda: of(Keyless(), keyed=False), "the state 'count' of Keyless is kept per key"),
        (lambda: of(Clashes()), "'rules' is declared more than once"),
        (lambda: of(Limit(), RULES, RULES), "'rules' is declared more than once"),
        (lambda: of(Limit(), ValueStateDescriptor("v", int)), "broadcast takes MapStateDescriptors"),
        (lambda: of(Limit(), MapStateDescriptor("m", str, int, Ttl(5))), "'m' has a TTL"),
        (lambda: of(Limit(), MapStateDescriptor("m", str, object)), "operator '.*'.*object"),
        (lambda: streams()[0].connect(streams()[1].broadcast(RULES)), "one environment"),
    ],
)
def test_what_does_not_go_together_is_refused_when_the_graph_is_built(make: Any, problem: str) -> None:
    with pytest.raises(GraphError, match=problem):
        make()


def test_without_states_broadcast_is_a_partitioning() -> None:
    _, limits = streams()
    assert isinstance(limits.broadcast(), Stream)
    broadcast = limits.broadcast(RULES, NAMES)
    assert isinstance(broadcast, BroadcastStream)
    assert "rules, names" in repr(broadcast)
    assert "BroadcastConnectedStream of" in repr(limits.connect(broadcast))


# -------------------------------------------------------------------------------------------------------------- whole jobs

NUMBERS = pa.schema([pa.field("n", pa.int64(), nullable=False)])
OUTPUTS: dict[str, DictStorage] = {}
FACTORS = MapStateDescriptor("factors", int, int)
GROUPS = 7


def open_output(path: str) -> Storage:
    return OUTPUTS.setdefault(path, DictStorage(root=path))


def numbers(indices: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(np.asarray(indices))], schema=NUMBERS)


class Multiply(KeyedBroadcastProcessFunction):
    """Each number by the factor of its group, once that is known: those that wait are found by apply_to_keyed_state."""

    waiting = ListStateDescriptor("waiting", int)
    states = (waiting,)
    returns = {"n": int, "product": int}  # noqa: RUF012 - the contract's class attribute

    def process_element(self, value: Any, ctx: ReadOnlyBroadcastContext, out: Collector) -> None:
        factor = ctx.broadcast_state(FACTORS).get(value["n"] % GROUPS)
        if factor is None:
            ctx.state(self.waiting).add(value["n"])
        else:
            out({"n": value["n"], "product": value["n"] * factor})

    def process_broadcast_element(self, value: Any, ctx: BroadcastContext, out: Collector) -> None:
        group, factor = value["n"], value["n"] + 2
        ctx.broadcast_state(FACTORS).put(group, factor)

        def release(key: int, waiting: Any) -> None:
            kept = []
            for number in waiting.get():
                if number % GROUPS == group:
                    out({"n": number, "product": number * factor})
                else:
                    kept.append(number)
            waiting.update(kept)

        ctx.apply_to_keyed_state(self.waiting, release)


def multiply_job(path: str, parallelism: int, count: int, backend: str) -> JobPlan:
    OUTPUTS.pop(path, None)
    settings: dict[str, Any] = {"state_backend": backend}
    env = Environment("multiply", parallelism=parallelism, channel_credit_batches=2, step_budget_ms=1, **settings)
    rows = env.from_source(GeneratorSource(numbers, count, NUMBERS, batch_rows=9)).uid("in")
    factors = env.from_source(GeneratorSource(numbers, GROUPS, NUMBERS, batch_rows=2)).uid("factors").set_parallelism(2)
    keyed = rows.key_by(lambda row: row["n"] % 20, key_type=int)
    product = keyed.connect(factors.broadcast(FACTORS)).process(Multiply()).uid("multiply")
    product.sink_to(ParquetSink(path, "out", open_storage=open_output), uid="sink")
    return env.build()


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    crashes=st.lists(st.integers(20, 400), max_size=2),
    parallelism=st.sampled_from([1, 3]),
    backend=st.sampled_from(["memory", "rocksdb"]),
)
def test_every_record_meets_its_rule_once_through_crashes(
    tmp_path: Path, seed: int, crashes: list[int], parallelism: int, backend: str
) -> None:
    path, count = "mem://multiply", 150
    plan = multiply_job(path, parallelism, count, backend)
    cluster = MiniCluster(plan, DictStorage(), local_directory=mkdtemp(dir=tmp_path), seed=seed)
    run_through_crashes(cluster, crashes)
    table = read_committed(path, "out", open_storage=open_output)
    found = Counter(zip(table["n"].to_pylist(), table["product"].to_pylist(), strict=True))
    assert found == Counter((n, n * (n % GROUPS + 2)) for n in range(count))


def test_what_is_stored_is_a_broadcast_list() -> None:
    assert broadcast_list(RULES).kind == "operator_broadcast"
