"""Rescale, shuffle, global and custom partitioning: what the graph says, what is refused, and where records go in a running job."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.barriers.elements import Batch
from holdfast.barriers.jobgraph import JobGraph, Partitioning, with_uids
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.plan_digest import describe_difference, digest_plan
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.datastream.unpicklable import check_picklable
from holdfast.operators.functions.partitioning import CustomPartitioning, custom_partitioning
from holdfast.operators.functions.schema import UNDECLARED, declared_type
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.statebackends.errors import GraphError, PartitionOutOfRangeError, UnknownColumnError, UserFunctionError
from holdfast.statebackends.storage.port import Storage
from tests.examples import examples
from tests.harness.mini import MiniCluster
from tests.operators.ends import NamedSink, NamedSource
from tests.operators.ports import DictStorage
from tests.operators.worker.test_loop import SCHEMA, make_batch, run_through_crashes

ROWS = declared_type({"k": str, "n": int}, "rows")


def remainder(key: Any, parallelism: int) -> int:
    return int(key % parallelism)


def rows(parallelism: int = 2, **settings: Any) -> Stream:
    env = Environment("job", parallelism=parallelism, **settings)
    return env.from_source(NamedSource(ROWS.schema, "rows")).uid("rows")


def ended(stream: Stream) -> JobPlan:
    stream.filter(bool).uid("next").sink_to(NamedSink(), uid="out")
    return stream.environment.build()


# -------------------------------------------------------------------------------------------------------------- the graph


@pytest.mark.parametrize(
    ("deal", "partitioning", "said"),
    [
        (lambda stream: stream.rescale(), Partitioning.RESCALE, "rescale"),
        (lambda stream: stream.shuffle(11), Partitioning.SHUFFLE, "shuffle, seed 11"),
        (lambda stream: stream.global_(), Partitioning.GLOBAL, "global"),
        (lambda stream: stream.partition_custom(remainder, "n"), Partitioning.CUSTOM, "custom by n"),
        (lambda stream: stream.partition_custom(remainder, ("n", "k")), Partitioning.CUSTOM, "custom by n, k"),
        (lambda stream: stream.partition_custom(remainder, lambda row: row["n"]), Partitioning.CUSTOM, "custom by function"),
    ],
)
def test_a_partitioning_is_an_exchange_also_between_equal_parallelisms(deal: Any, partitioning: Partitioning, said: str) -> None:
    stream = rows()
    plan = ended(deal(stream))
    (edge,) = (edge for edge in plan.graph.edges if edge.source_operator == "rows")
    assert edge.partitioning is partitioning
    assert f"-> [2] {said}" in stream.environment.explain().splitlines()[3]
    assert msgspec.json.decode(msgspec.json.encode(plan.graph), type=JobGraph) == plan.graph
    assert with_uids(msgspec.to_builtins(plan.graph), {"rows": "other"})["edges"][0].get("seed") == (edge.seed or None)  # type: ignore[index]
    assert plan.selectors == {}


def test_a_graph_without_a_shuffle_says_nothing_of_seeds() -> None:
    assert b"seed" not in msgspec.json.encode(ended(rows().rebalance()).graph)


def test_the_last_partitioning_counts_and_nothing_of_those_before() -> None:
    dealt = rows().shuffle(3).partition_custom(remainder, "n").key_by("k")
    dealt.aggregate(n=hf.count()).uid("n").sink_to(NamedSink(), uid="out")
    plan = dealt.environment.build()
    edge = plan.graph.edges[0]
    assert (edge.partitioning, edge.key, edge.seed) == (Partitioning.HASH, ("k",), msgspec.UNSET)
    assert plan.partitionings == {}


def test_edges_of_one_input_may_have_different_functions() -> None:
    env = Environment("job", parallelism=2)
    stream, others = (env.from_source(NamedSource(ROWS.schema, name)).uid(name) for name in ("rows", "others"))
    plan = ended(stream.partition_custom(remainder, "n").union(others.partition_custom(lambda key, count: count - 1, "k")))
    found = {plan.graph.edges[edge_id].source_operator: each for edge_id, each in plan.partitionings.items()}
    assert {name: each.columns for name, each in found.items() if isinstance(each, CustomPartitioning)} == {
        "rows": ("n",),
        "others": ("k",),
    }


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: rows().partition_custom(remainder, "m"), "no column 'm'; available: k, n"),
        (lambda: rows().partition_custom(remainder, ()), "'partition_custom': a key needs distinct columns"),
        (lambda: rows().partition_custom(remainder, ("n", "n")), "'partition_custom': a key needs distinct columns"),
        (lambda: rows().partition_custom(3, "n"), "3 is not a function of a key and a parallelism"),  # type: ignore[arg-type]
        (lambda: rows().partition_custom(lambda key, count: None, "n"), "returns None, whatever it is given"),  # type: ignore[arg-type, return-value]
        (lambda: rows().partition_custom(remainder, lambda row: None), "returns None, whatever it is given"),
        (lambda: rows().map(str).partition_custom(remainder, "n"), "the column 'n'"),
        (lambda: rows().shuffle("x"), "seed of shuffle must be an integer of 64 bits, not 'x'"),  # type: ignore[arg-type]
        (lambda: rows().shuffle(2**63), "seed of shuffle must be an integer of 64 bits"),
        (lambda: rows().shuffle(True), "seed of shuffle must be an integer of 64 bits"),
        (lambda: rows().global_().uid("x"), "not to a union, key_by, partitioning or side output"),
        (lambda: rows().filter(bool).uid("f").slot_sharing_group("gpu"), "'f' can't be in the slot sharing group 'gpu'"),
        (lambda: rows().rescale().slot_sharing_group("default"), "applies to an operator"),
    ],
)
def test_what_can_not_be_is_refused_when_the_graph_is_built(make: Any, problem: str) -> None:
    with pytest.raises(GraphError, match=problem):
        make()


def test_a_missing_column_and_a_slot_sharing_group_are_typed() -> None:
    with pytest.raises(UnknownColumnError) as raised:
        rows().partition_custom(remainder, "m")
    assert (raised.value.operator, raised.value.column) == ("partition_custom", "m")
    with pytest.raises(GraphError) as refused:
        rows().slot_sharing_group("gpu")
    assert refused.value.fields == {"operator": "rows", "setting": "slot_sharing_group"}


def test_all_operators_are_in_the_default_slot_sharing_group() -> None:
    stream = rows().slot_sharing_group("default")
    assert ended(stream).graph.slots_required == 2


def test_a_function_that_can_not_travel_is_named() -> None:
    lock = __import__("threading").Lock()
    plan = ended(rows().partition_custom(lambda key, count: bool(lock) and 0, "n"))
    with pytest.raises(GraphError, match=r"operator 'next'.* uses lock"):
        check_picklable(plan)


def test_an_edited_function_is_another_plan() -> None:
    def plan(offset: int) -> JobPlan:
        return ended(rows().partition_custom(lambda key, count: (key + offset) % count, "n"))

    assert describe_difference(digest_plan(plan(1)), digest_plan(plan(1))) is None
    difference = describe_difference(digest_plan(plan(1)), digest_plan(plan(2)))
    assert difference == "the code, or the data, of operator 'next'"


# ----------------------------------------------------------------------------------------------------------- the function


def batch(*values: Any) -> Batch:
    return Batch(rows=[{"k": str(n), "n": n} for n in values], schema=ROWS.schema)


def test_keys_are_python_values_of_columns_or_what_a_function_returns() -> None:
    seen: list[Any] = []

    def function(key: Any, parallelism: int) -> int:
        seen.append((key, parallelism))
        return 0

    for key in ("n", ("k", "n"), lambda row: -row["n"]):
        custom_partitioning(function, key, ROWS).subtasks(batch(1, 2), parallelism=3, operator="next")
    assert seen == [(1, 3), (2, 3), (("1", 1), 3), (("2", 2), 3), (-1, 3), (-2, 3)]


def test_a_null_is_a_key_like_others() -> None:
    schema = pa.schema([("n", pa.int64())])
    columns = Batch(columns=pa.RecordBatch.from_pydict({"n": [1, None]}, schema=schema))
    given = custom_partitioning(lambda key, count: 0 if key is None else 1, "n", declared_type(schema, "rows"))
    assert given.subtasks(columns, parallelism=2, operator="next").tolist() == [1, 0]


def test_integers_of_numpy_are_subtasks() -> None:
    given = custom_partitioning(lambda key, count: np.int64(key % count), "n", ROWS)  # type: ignore[arg-type, return-value]
    assert given.subtasks(batch(1, 2), parallelism=2, operator="next").tolist() == [1, 0]


@pytest.mark.parametrize("returned", [2, -1, 2**40, None, 1.0, "1", True, [0]])
def test_what_is_no_subtask_is_an_error_that_names_operator_function_and_record(returned: Any) -> None:
    def choose(key: int, parallelism: int) -> int:
        return returned if key == 5 else 0

    given = custom_partitioning(choose, "n", ROWS)
    problem = r"operator 'next': .*choose .*record .*: a subtask is an integer from 0 to 1"
    with pytest.raises(PartitionOutOfRangeError, match=problem) as error:
        given.subtasks(batch(4, 5, 6), parallelism=2, operator="next")
    assert (error.value.operator, error.value.returned, error.value.parallelism) == ("next", repr(returned), 2)
    assert error.value.record == "{'k': '5', 'n': 5}"
    assert isinstance(error.value, UserFunctionError)


def test_an_exception_is_that_of_the_record() -> None:
    given = custom_partitioning(lambda key, count: 1 // (key - 5), "n", ROWS)
    with pytest.raises(UserFunctionError, match=r"operator 'next': .*ZeroDivisionError") as error:
        given.subtasks(batch(6, 5), parallelism=2, operator="next")
    assert error.value.record == "{'k': '5', 'n': 5}"
    stops = custom_partitioning(lambda key, count: next(iter(())), "n", ROWS)
    with pytest.raises(UserFunctionError, match="StopIteration"):
        stops.subtasks(batch(6, 5), parallelism=2, operator="next")
    keys = custom_partitioning(remainder, lambda row: row["m"], declared_type({"n": int}, "rows"))
    with pytest.raises(UserFunctionError, match="KeyError"):
        keys.subtasks(batch(6), parallelism=2, operator="next")


def test_rows_of_undeclared_type_have_keys_by_function() -> None:
    given = custom_partitioning(remainder, lambda row: row, UNDECLARED)
    assert given.subtasks(Batch(rows=[3, 4]), parallelism=3, operator="next").tolist() == [0, 1]


# -------------------------------------------------------------------------------------------------------------- whole jobs

OUTPUTS: dict[str, DictStorage] = {}


def open_output(path: str) -> Storage:
    return OUTPUTS.setdefault(path, DictStorage(root=path))


class Where(hf.RichFunction):
    """Adds the subtask to the key: key * 10 + subtask."""

    def open(self, ctx: Any) -> None:
        self.subtask = ctx.subtask

    def __call__(self, row: dict[str, int]) -> dict[str, int]:
        return {**row, "key": row["key"] * 10 + self.subtask}


def start(parallelism: int, **settings: Any) -> Stream:
    """Ids from 0 on, with key 0."""
    env = Environment("dealt", parallelism=parallelism, channel_credit_batches=2, step_budget_ms=1, **settings)
    source = env.from_source(GeneratorSource(make_batch, 240, SCHEMA, batch_rows=7)).uid("rows")
    return source.map(lambda row: {**row, "key": 0}, returns=SCHEMA).uid("plain")


def write(stream: Stream, path: str) -> JobPlan:
    OUTPUTS.pop(path, None)
    stream.sink_to(ParquetSink(path, "out", open_storage=open_output), uid="out")
    return stream.environment.build()


def run(stream: Stream, tmp_path: Path, seed: int = 1) -> dict[int, int]:
    """id -> key of all rows in the output, each of which is there once."""
    path = "mem://dealt"
    cluster = MiniCluster(write(stream, path), DictStorage(), local_directory=str(tmp_path), seed=seed)
    run_through_crashes(cluster, [])
    table = read_committed(path, "out", open_storage=open_output)
    found = dict(zip(table["id"].to_pylist(), table["key"].to_pylist(), strict=True))
    assert len(found) == table.num_rows == 240
    return found


def test_custom_records_arrive_at_their_subtasks(tmp_path: Path) -> None:
    dealt = start(2).partition_custom(remainder, "id").map(Where(), returns=SCHEMA).uid("where").set_parallelism(3)
    assert run(dealt, tmp_path) == {number: number % 3 for number in range(240)}


def test_global_records_arrive_at_subtask_0(tmp_path: Path) -> None:
    dealt = start(3).global_().map(Where(), returns=SCHEMA).uid("where")
    assert set(run(dealt, tmp_path).values()) == {0}


@pytest.mark.parametrize(("producers", "consumers"), [(1, 3), (2, 3), (3, 2), (2, 2)])
def test_rescaled_records_stay_among_neighbours(tmp_path: Path, producers: int, consumers: int) -> None:
    stream = start(producers).map(Where(), returns=SCHEMA).uid("first")
    dealt = stream.rescale().map(Where(), returns=SCHEMA).uid("second").set_parallelism(consumers)
    met = Counter(run(dealt, tmp_path).values())
    pairs = {divmod(key, 10) for key in met}
    if producers <= consumers:
        assert pairs == {(consumer * producers // consumers, consumer) for consumer in range(consumers)}
    else:
        expected = {0: [0], 1: [1, 2]}
        assert pairs == {(producer, consumer) for consumer, group in expected.items() for producer in group}


def test_shuffled_records_go_by_their_numbers_whatever_the_schedule(tmp_path: Path) -> None:
    def dealt() -> Stream:
        return start(1).shuffle(5).map(Where(), returns=SCHEMA).uid("where").set_parallelism(3)

    found = run(dealt(), tmp_path / "one", seed=1)
    assert run(dealt(), tmp_path / "two", seed=2) == found
    assert min(Counter(found.values()).values()) > 50


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    crashes=st.lists(st.integers(20, 600), max_size=2),
    sizes=st.tuples(*[st.integers(1, 3)] * 5),
)
def test_each_row_comes_out_once_through_crashes(tmp_path: Path, seed: int, crashes: list[int], sizes: tuple[int, ...]) -> None:
    path = "mem://through"
    stream = start(sizes[0])
    for index, deal in enumerate(
        (
            lambda stream: stream.rescale(),
            lambda stream: stream.shuffle(seed),
            lambda stream: stream.global_(),
            lambda stream: stream.partition_custom(remainder, "id"),
        )
    ):
        stream = deal(stream).map(lambda row: row, returns=SCHEMA).uid(f"step-{index}").set_parallelism(sizes[index + 1])
    cluster = MiniCluster(write(stream, path), DictStorage(), local_directory=str(tmp_path), seed=seed)
    run_through_crashes(cluster, crashes)
    ids = read_committed(path, "out", open_storage=open_output)["id"].to_pylist()
    assert Counter(ids) == Counter(range(240))


def test_the_plan_travels() -> None:
    plan: JobPlan = cloudpickle.loads(cloudpickle.dumps(ended(rows().partition_custom(remainder, "n"))))
    (given,) = plan.partitionings.values()
    assert given.subtasks(batch(1, 2), parallelism=2, operator="next").tolist() == [1, 0]
