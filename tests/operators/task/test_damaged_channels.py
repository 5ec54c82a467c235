"""In-flight records that a subtask restores: read, dealt out by key, or refused by operator, subtask and edge."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest

from holdfast.barriers.alignment.inflight import encode
from holdfast.barriers.elements import Batch, Element, Watermark
from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, Partitioning
from holdfast.barriers.messages import Deployment, InFlightRestore, RestoredChannel, RestoredPiece, SubtaskDeployment
from holdfast.operators.functions.schema import declared_type
from holdfast.operators.functions.selectors import ColumnKeySelector, FunctionKeySelector, Selector
from holdfast.operators.task.restored_channels import ChannelLoader
from holdfast.statebackends.errors import CorruptStateError, UserFunctionError
from holdfast.statebackends.handles import InlineHandle
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.local_recovery.storage import RestoredBytes
from holdfast.statebackends.serialization.keys import KeyType
from tests.coordinator.doubles import operator, vertex
from tests.operators.ports import DictStorage

KEY = KeyType.parse("int64")
BY_KEY = ColumnKeySelector(("k",), KEY)


def graph_of(columns: Any = ("k: int64", "n: int64")) -> JobGraph:
    source, target = vertex(operator("in", "source"), parallelism=2), vertex(operator("out", "map"), parallelism=2)
    edge = JobEdge(0, source.vertex_id, "in", target.vertex_id, 0, Partitioning.HASH, ("k",), "int64", columns=columns)
    return JobGraph("job", (source, target), (edge,), JobConfig())


def batch(*keys: int, **columns: Any) -> Batch:
    found = columns or {"k": pa.array(keys, pa.int64()), "n": pa.array(keys, pa.int64())}
    return Batch(columns=pa.RecordBatch.from_pydict(found))


def load(
    data: bytes,
    rows: int,
    *,
    offset: int = 0,
    length: int | None = None,
    filtered: bool = False,
    graph: JobGraph | None = None,
    selector: Selector = BY_KEY,
) -> list[Element]:
    """What stands in front of the channel from subtask 1 of `in` to subtask 1 of `out`."""
    job = graph or graph_of()
    piece = RestoredPiece(0, offset, len(data) if length is None else length, rows, filtered)
    restore = InFlightRestore((InlineHandle(data),), (RestoredChannel(0, 1, (piece,), keeps_events=True),))
    wanted = SubtaskDeployment(job.vertices[1].vertex_id, 1, in_flight=restore)
    loader = ChannelLoader(wanted, Deployment(2, job, (wanted,), {}, restored_folder="job/chk-7"), {0: selector})
    ((index, elements),) = loader.load(DictStorage(), RestoredBytes(), None, None)
    assert index == 1, "of the channels of the subtask, by producer"
    return elements


def keys(elements: list[Element]) -> list[int]:
    return [row["k"] for element in elements if isinstance(element, Batch) for row in element.rows()]


def test_records_come_back_with_their_events() -> None:
    elements = load(encode([Watermark(3), batch(1, 2), Watermark(5), batch(3)]), 3)
    assert (elements[0], elements[2], keys(elements)) == (Watermark(3), Watermark(5), [1, 2, 3])


def test_records_of_other_subtasks_are_left_out() -> None:
    mine = assign_key_groups(128, 2, 1)
    groups = BY_KEY.keys(batch(*range(50)), max_parallelism=128, operator="out").key_groups
    elements = load(encode([batch(*range(50))]), 50, filtered=True)
    assert keys(elements) == [key for key, group in enumerate(groups) if int(group) in mine]
    assert 0 < len(keys(elements)) < 50


DATA = encode([batch(1, 2), Watermark(5)])


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"offset": -1}, "bytes -1.."),
        ({"offset": 1}, f"bytes 1..{len(DATA) + 1} of a part of {len(DATA)}"),
        ({"length": -1}, "bytes 0..-1"),
        ({"length": 2**63}, f"bytes 0..{2**63} of a part of {len(DATA)}"),
        ({"rows": 3}, "in-flight data of 2 rows instead of 3"),
        *(({"length": length}, "in-flight data") for length in range(len(DATA))),
    ],
)
def test_what_can_not_be_read_names_operator_subtask_and_edge(place: dict[str, int], said: str) -> None:
    with pytest.raises(CorruptStateError) as caught:
        load(DATA, **{"rows": 2, **place})  # type: ignore[arg-type]
    assert caught.value.message.startswith("in-flight records of 'in' -> 'out', subtask 1, can't be read: ")
    assert said in caught.value.message
    assert (caught.value.operator, caught.value.subtask) == ("out", 1)


def test_records_without_a_column_of_their_edge_are_no_records_of_it() -> None:
    """The function behind it would fail instead, as if it were wrong."""
    wrong = encode([batch(key=[1], n=[2])])
    with pytest.raises(CorruptStateError, match="records with the columns key, n, without k: int64"):
        load(wrong, 1, filtered=True)
    more = batch(k=[1], n=[2], unread=["x"])
    assert keys(load(encode([more]), 1)) == [1], "rows that were no columns yet travel with all that they have"
    assert load(wrong, 1, graph=graph_of(msgspec.UNSET))
    combined = Batch(columns=batch(k=[1], parts=[2]).columns().replace_schema_metadata({"holdfast.rows": "combined"}))
    assert keys(load(encode([combined]), 1)) == [1], "a combiner's rows have columns of their own"
    assert load(encode([Watermark(7)]), 0) == [Watermark(7)]


def test_a_key_function_that_raises_names_operator_subtask_edge_and_row() -> None:
    def failing(row: dict[str, int]) -> int:
        return 1 // (row["k"] - 3)

    selector = FunctionKeySelector(failing, KEY, declared_type({"k": int, "n": int}, "out"))
    with pytest.raises(UserFunctionError) as caught:
        load(encode([batch(1, 3)]), 2, filtered=True, selector=selector)
    error = caught.value
    assert error.message.startswith("in-flight records of 'in' -> 'out' can't be dealt out by key: operator 'out', subtask 1: ")
    assert (error.operator, error.subtask, error.fields["edge"]) == ("out", 1, "'in' -> 'out'")
    assert "'k': 3" in (error.record or "")
