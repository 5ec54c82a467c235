"""Writes the golden increment of sets, once: `python -m tests.golden.set_increments`. It is kept for ever."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pyarrow as pa

from holdfast.statebackends.handles import OperatorState, OperatorSubtaskState
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.state import ColumnAggregate, ColumnarStateDescriptor
from holdfast.statebackends.storage.port import PutIfAbsent
from tests.statebackends.backend_harness import KEY, MAX_PARALLELISM, Cluster
from tests.statebackends.test_increments import Job

FOLDER = Path(__file__).parent / "sets" / "v1-sets-deltas"
SETS = ColumnarStateDescriptor(
    "sets",
    (
        ColumnAggregate("count", None, "rows"),
        ColumnAggregate("count_distinct", "v", "numbers", pa.int64()),
        ColumnAggregate("count_distinct", "t", "texts", pa.string()),
    ),
)
CONTENTS = {
    ("a", 0): (303, [*range(300), 1_000, 1_001], [*(f"t{number % 7}" for number in range(7)), "é"]),
    ("b", 0): (2, [7, 8], ["t0", "t1"]),
    ("c", 10): (1, [5], ["t5"]),
}
"""(key, window) -> number of rows, and the different values in order of arrival."""


def make(folder: Path = FOLDER) -> None:
    """A table and two deltas: a set that grows twice, a new key, a window that was dropped and came again."""
    with tempfile.TemporaryDirectory() as scratch:
        cluster = Cluster(Path(scratch), "filesystem")
        job, backend = Job(cluster), cluster.backend((SETS,))
        state = backend.columnar_state(SETS, ["user"])

        def update(window: int, key: str, numbers: list[int], texts: list[str]) -> None:
            keys = KEY.column([pa.array([key] * len(numbers), pa.string())], max_parallelism=MAX_PARALLELISM)
            state.update(keys, window, [None, pa.array(numbers, pa.int64()), pa.array(texts)])

        update(0, "a", [*range(300)], [f"t{number % 7}" for number in range(300)])
        update(10, "a", [1, 2, 3], ["t1", "t2", "t3"])
        job.checkpoint([backend], 1, None)
        update(0, "a", [1_000], ["t3"])
        update(0, "b", [7], ["t0"])
        job.checkpoint([backend], 2, 1)
        state.remove(10)
        update(10, "c", [5], ["t5"])
        update(0, "a", [1_001, 4], ["é", "t4"])
        update(0, "b", [8], ["t1"])
        job.checkpoint([backend], 3, 2)
        subtask = OperatorSubtaskState(keyed=job.completed[3])
        metadata = SnapshotMetadata(
            job_id="job", job_name="golden", checkpoint_id=3, kind="checkpoint", attempt=1, epoch=1, trigger_timestamp_ms=0,
            completion_timestamp_ms=0, operators=(OperatorState("op", "f" * 32, "op", 1, MAX_PARALLELISM, (subtask,)),),
        )  # fmt: skip
        assert [len(handle.parts) for handle in job.completed[3]] == [1, 2]
        cluster.storage.execute(PutIfAbsent("job/chk-3/_metadata", encode_metadata(metadata)))
        named = {Path(getattr(part, "path", "")).name for handle in job.completed[3] for part in handle.parts} | {"_metadata"}
        for path in sorted((Path(scratch) / "state").rglob("*")):
            if path.name in named:
                target = folder / path.relative_to(Path(scratch) / "state")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        cluster.close()


if __name__ == "__main__":
    make()
