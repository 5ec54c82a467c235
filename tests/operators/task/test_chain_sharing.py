"""Operators that share the output of one do not see what the others do to their rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from holdfast.barriers.elements import Batch
from holdfast.operators.functions.rows import MapOperator
from holdfast.operators.functions.schema import UNDECLARED, RowType
from holdfast.operators.task.chain import ChainNode, OperatorChain
from tests.operators.harness import OperatorHarness
from tests.operators.runtime import Port


def spoil(row: dict[str, int]) -> dict[str, int]:
    row["n"] += 100
    return row


@pytest.mark.parametrize("row_type", [UNDECLARED, RowType(pa.schema([("n", pa.int64())]))])
def test_a_function_that_changes_its_row_spoils_nobody_elses(row_type: Any) -> None:
    nodes = []
    for uid, function in (("head", lambda row: row), ("left", spoil), ("right", spoil)):
        operator = MapOperator(function, row_type, row_type)
        context = OperatorHarness(operator).context
        context.uid = uid
        nodes.append(ChainNode(operator, context))
    port = Port()
    ports = [Port(), Port()]
    nodes[0].attach(port)
    for node, own in zip(nodes[1:], ports, strict=True):
        node.attach(own)
    chain = OperatorChain(nodes, [("head", "left"), ("head", "right")])
    chain.setup()
    chain.process(Batch(rows=[{"n": 1}], schema=row_type.schema), 0)
    assert port.elements == [{"n": 1}]
    assert [own.elements for own in ports] == [[{"n": 101}], [{"n": 101}]]
