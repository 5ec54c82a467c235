"""Operators that share the output of one do not see what the others do to their rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pytest

from holdfast.barriers.elements import Batch
from holdfast.operators.functions.rows import MapOperator
from holdfast.operators.functions.schema import UNDECLARED, RowType
from holdfast.operators.task.chain import ChainNode, OperatorChain
from holdfast.statebackends.errors import InvalidRowError
from tests.operators.harness import OperatorHarness
from tests.operators.runtime import Port


def spoil(row: dict[str, int]) -> dict[str, int]:
    row["n"] += 100
    return row


def chained(functions: Mapping[str, Callable[[Any], Any]], row_type: RowType, edges: list[tuple[str, str]]) -> OperatorChain:
    nodes = []
    for uid, function in functions.items():
        operator = MapOperator(function, row_type, row_type)
        context = OperatorHarness(operator).context
        context.uid = uid
        nodes.append(ChainNode(operator, context))
    return OperatorChain(nodes, edges)


@pytest.mark.parametrize("row_type", [UNDECLARED, RowType(pa.schema([("n", pa.int64())]))])
def test_a_function_that_changes_its_row_spoils_nobody_elses(row_type: Any) -> None:
    functions = {"head": lambda row: row, "left": spoil, "right": spoil}
    chain = chained(functions, row_type, [("head", "left"), ("head", "right")])
    ports = [Port(), Port(), Port()]
    for node, own in zip(chain.nodes, ports, strict=True):
        node.attach(own)
    chain.setup()
    chain.process(Batch(rows=[{"n": 1}], schema=row_type.schema), 0)
    assert [own.elements for own in ports] == [[{"n": 1}], [{"n": 101}], [{"n": 101}]]


def test_a_row_that_can_not_be_copied_for_several_readers_is_told_by_name() -> None:
    functions = {"head": lambda row: threading.Lock(), "left": lambda row: row, "right": lambda row: row}
    chain = chained(functions, UNDECLARED, [("head", "left"), ("head", "right")])
    chain.setup()
    told = r"^operator 'head': a row can't be given to several readers, it can't be copied: TypeError: .*; record <unlocked "
    with pytest.raises(InvalidRowError, match=told) as caught:
        chain.process(Batch(rows=[{"n": 1}]), 0)
    assert caught.value.operator == "head"


@pytest.mark.parametrize(("edges", "reader"), [([], "head"), ([("head", "next")], "next")])
def test_a_time_beyond_pythons_is_told_with_the_operator_that_reads_it(
    edges: list[tuple[str, str]], reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = pa.record_batch({"at": pa.array([10**18], pa.timestamp("us", "UTC"))})
    functions = {"head": spoil, **({"next": spoil} if edges else {})}
    chain = chained(functions, RowType(columns.schema), edges)
    chain.setup()
    if edges:
        monkeypatch.setattr(chain.head.operator, "process_batch", lambda batch, index: chain.head.operator.output.collect(batch))
    told = rf"^operator '{reader}': column 'at': 33658-09-27T01:46:40.000000 is no datetime"
    with pytest.raises(InvalidRowError, match=told) as caught:
        chain.process(Batch(columns=columns), 0)
    assert (caught.value.operator, caught.value.column) == (reader, "at")
