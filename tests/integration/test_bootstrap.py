"""A job of real worker processes that starts from a savepoint made of a frame, is killed, and whose output is exact."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.statebackends.errors import MaxParallelismError, UnclaimedStateError
from holdfast.statebackends.factory import BackendKind
from tests.integration.counting import KEYS, CountPerKey
from tests.integration.test_two_processes import Cluster, cluster, committed, counting_plan, eventually

__all__ = ["cluster"]

pytestmark = pytest.mark.slow

HISTORY = {key: 1_000 * key for key in range(KEYS - 2)}
"""Of two keys the job has none."""


def history(max_parallelism: int, uid: str = "count") -> hf.Savepoint:
    frame = pa.table({"carrier": list(HISTORY), "flights": list(HISTORY.values())})
    savepoint = hf.Savepoint.create(max_parallelism=max_parallelism, parallelism=min(3, max_parallelism))
    return savepoint.with_state(uid, CountPerKey.count, frame, key="carrier", value="flights")


def after_history(rows: int) -> Counter[tuple[int, int]]:
    return Counter((key, HISTORY.get(key, 0) + count + 1) for key in range(KEYS) for count in range(len(range(key, rows, KEYS))))


@pytest.mark.parametrize("backend", [pytest.param("filesystem", marks=pytest.mark.endurance), "rocksdb"])
def test_counts_go_on_from_what_was_given(cluster: Cluster, tmp_path: Path, backend: BackendKind) -> None:
    rows = 4_000
    plan = counting_plan(rows, 2.0, tmp_path / "out", backend)
    savepoint = history(plan.graph.vertices[0].max_parallelism).write(tmp_path / "history")
    job = cluster.submit(plan, restore=savepoint.location).job_id
    eventually(lambda: cluster.completed(job) >= 1, "a checkpoint")
    assert cluster.slots is not None
    victim = cluster.kill_worker(0)
    eventually(lambda: cluster.slots is not None and cluster.slots.pid(0) not in (None, victim), "the successor")
    cluster.wait_finished(job)
    assert committed(tmp_path / "out") == after_history(rows)
    assert hf.Snapshot(savepoint.location).verify().is_sound, "the savepoint stays its user's"


def test_a_savepoint_that_does_not_fit_the_job_is_refused_before_it_starts(cluster: Cluster, tmp_path: Path) -> None:
    plan = counting_plan(100, 1.0, tmp_path / "out", "memory")
    with pytest.raises(UnclaimedStateError, match="counts"):
        cluster.submit(plan, restore=history(128, "counts").write(tmp_path / "uid").location)
    with pytest.raises(MaxParallelismError):
        cluster.submit(plan, restore=history(1).write(tmp_path / "narrow").location)
