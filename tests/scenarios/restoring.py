"""The rule of group O about restoring under another max parallelism, against the coordinator's real preflight."""

from __future__ import annotations

import re

from holdfast.barriers.jobgraph import JobConfig, JobGraph, JobVertex, OperatorDescription
from holdfast.statebackends.errors import MaxParallelismError
from holdfast.statebackends.handles import (
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorState,
    OperatorSubtaskState,
    StateMeta,
)
from holdfast.statebackends.keygroups import operator_id
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from tests.harness.restoring import plan_restore
from tests.scenarios.outcome import Failed, Outcome, Passed
from tests.scenarios.tables import UnparsedError
from tests.statebackends.foreign_tables import savepoint_of

UID = "count"
STATE = StateMeta("counts", "value", "int64", "utf8")


def check_restore_max_parallelism(case: str, expected: str) -> Outcome:
    """`state had 128 explicitly, job says 256`: refused if the job says so explicitly, else the stored one is adopted."""
    stored, said = re.search(r"had\s+(\d+)", case), re.search(r"says\s+(\d+)", case)
    adopts = re.search(r"adopts\s+(\d+)", expected)
    if stored is None or said is None or not re.search(r"refused", expected):
        raise UnparsedError(f"not `state had N, job says M` -> refused: {case!r}")
    metadata = snapshot(int(stored.group(1)))
    try:
        plan_restore(metadata, graph(int(said.group(1)), explicit=True))
    except MaxParallelismError as error:
        if UID not in str(error):
            return Failed("an error that names the operator", str(error))
    else:
        return Failed(expected, "not refused")
    plan = plan_restore(metadata, graph(int(said.group(1)), explicit=False))
    adopted = plan.graph.vertices[0].max_parallelism
    wanted = int(adopts.group(1)) if adopts else int(stored.group(1))
    return Passed() if adopted == wanted else Failed(f"adopts {wanted}", str(adopted))


def snapshot(max_parallelism: int) -> SnapshotMetadata:
    handle = KeyedStateHandle(KeyGroupRange(0, max_parallelism), "arrow", (STATE,), (InlineHandle(b"ARROW1x ARROW1"),))
    state = OperatorState(UID, operator_id(UID), UID, 1, max_parallelism, (OperatorSubtaskState(keyed=(handle,)),))
    return savepoint_of(state)


def graph(max_parallelism: int, *, explicit: bool) -> JobGraph:
    operator = OperatorDescription(UID, operator_id(UID), UID, "process", (STATE,), key_type="utf8")
    vertex = JobVertex(operator.operator_id, UID, 1, max_parallelism, (operator,))
    return JobGraph("job", (vertex,), (), JobConfig(), explicit_max_parallelism=explicit)
