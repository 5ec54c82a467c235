"""Whole jobs whose queues are full, over real workers in one process: what user code holds up, and that nothing waits for ever."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from holdfast.barriers.messages import CheckpointKind
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sinks.simple import Blackhole
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.operators.task.subtask import StepResult, Subtask
from tests.examples import crossed
from tests.harness.mini import MiniCluster
from tests.operators.ports import DictStorage
from tests.operators.worker.test_loop import OUTPUTS, SCHEMA, make_batch, open_output

CALL_MS = 20
"""How long a call of user code takes."""


class LongCalls:
    """Each call takes long by the cluster's clock; in the middle of one a checkpoint may be triggered."""

    cluster: MiniCluster | None = None
    trigger_next = False
    triggered = False

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        cls, cluster = LongCalls, LongCalls.cluster
        if cluster is not None:
            cluster.clock.now_ms += CALL_MS
            if cls.trigger_next:
                cls.trigger_next, cls.triggered = False, True
                cluster.coordinator.trigger(CheckpointKind.CHECKPOINT, cluster.clock.now_ms)
                while cluster.coordinator.outbox:
                    slot, command = cluster.coordinator.outbox.pop(0)
                    cluster.workers[slot].post(command)
        return row


@pytest.fixture
def long_calls() -> Any:
    LongCalls.cluster, LongCalls.trigger_next, LongCalls.triggered = None, False, False
    yield LongCalls
    LongCalls.cluster = None


def subtasks_of(cluster: MiniCluster) -> list[Subtask]:
    return [each.subtask for worker in cluster.workers if worker._attempt for each in worker._attempt.subtasks]


def test_user_code_holds_a_barrier_up_for_one_slice_of_a_worker(
    tmp_path: Path, long_calls: type[LongCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five subtasks of one worker, four of them with long calls, full queues and the rest of a batch in hand: between the slice in
    which the trigger comes and the last snapshot no user code runs."""
    env = Environment("steps", parallelism=1, channel_credit_bytes=400, buffer_timeout_ms=0, step_budget_ms=1, chaining=False)
    stream = env.from_source(GeneratorSource(make_batch, 3_000, SCHEMA, batch_rows=40)).uid("source")
    for number in range(4):
        stream = stream.rebalance().map(LongCalls(), returns=SCHEMA).uid(f"step{number}")
    stream.rebalance().sink_to(Blackhole(), uid="sink")
    cluster = MiniCluster(env.build(), DictStorage(), local_directory=str(tmp_path))
    cluster.coordinator.aligned_timeout_ms = 0
    cluster.deploy()
    cluster.run_until(lambda: cluster.coordinator.all_running)
    for _ in range(300):
        cluster.step()
    long_calls.cluster = cluster
    behind: list[tuple[int, ...]] = []
    step = Subtask.step

    def watched(self: Subtask, now_ms: int, due_s: float | None = None) -> StepResult:
        if long_calls.triggered:
            behind.append(tuple(each._checkpoints._newest_id for each in subtasks_of(cluster)))
        return step(self, now_ms, due_s)

    monkeypatch.setattr(Subtask, "step", watched)
    long_calls.trigger_next = True
    (worker,) = cluster.workers
    while not behind:
        worker.run_once(0)
    assert behind[0] == (1,) * len(subtasks_of(cluster)) == (1,) * 6, "before any subtask goes on"
    monkeypatch.setattr(Subtask, "step", step)
    cluster.run_until(lambda: cluster.coordinator.pending is None)
    (completed,) = cluster.coordinator.completed
    assert len({each.target for each in completed.channels if each.rows}) >= 4, "all queues were full"


# --------------------------------------------------------------------------------------------- nothing waits for ever

HUGE = 150_000
"""Bytes of one row in so many."""
TEXTS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string(), nullable=False)])


def make_texts(indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """Small rows, and a huge one now and then."""
    texts = ["x" * HUGE if index % 50 == 20 else "y" for index in indices.tolist()]
    return pa.RecordBatch.from_arrays([pa.array(indices), pa.array(texts)], schema=TEXTS)


def shorten(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "text": str(len(row["text"]))}


TINY = {"channel_credit_bytes": 1, "channel_credit_batches": 1, "buffer_debloat": False}
MOVING = {
    "channel_credit_bytes": 4_096,
    "channel_credit_bytes_start": 1,
    "buffer_debloat_target_ms": 1,
    "buffer_debloat_period_ms": 1,
}


@pytest.mark.parametrize(
    ("mode", "bounds", "jump_ms"),
    crossed(["aligned", "unaligned", "timeout", "at_least_once"], [TINY, MOVING], [0, -3_600_000, 3_600_000], every=2),
)
def test_nothing_waits_for_ever(tmp_path: Path, mode: str, bounds: dict[str, Any], jump_ms: int) -> None:
    """Allocations of a byte, rows that are larger than any, sources that end soon, or have nothing at all, and a wall clock that is
    set between two looks: each checkpoint is completed, and so is the job."""
    path = "mem://pressed"
    OUTPUTS.pop(path, None)
    loose: dict[str, Any] = {"checkpointing_mode": "at_least_once"} if mode == "at_least_once" else {}
    env = Environment("pressed", parallelism=2, buffer_timeout_ms=0, step_budget_ms=1, **bounds, **loose)
    rows = (300, 7, 0)
    first, *others = (
        env.from_source(GeneratorSource(make_texts, count, TEXTS, batch_rows=30)).uid(f"source{index}")
        for index, count in enumerate(rows)
    )
    dealt = first.union(*others).key_by("id").filter(bool).uid("all").rebalance().map(shorten, returns=TEXTS).uid("short")
    dealt.sink_to(ParquetSink(path, "out", open_storage=open_output), uid="sink")
    cluster = MiniCluster(env.build(), DictStorage(), local_directory=str(tmp_path), seed=abs(jump_ms) % 7, tick_s=0.0003)
    coordinator, clock = cluster.coordinator, cluster.clock
    coordinator.aligned_timeout_ms = {"unaligned": 0, "timeout": 5}.get(mode)
    ahead_ms = 0
    clock.wall_ms = lambda: clock.now_ms + ahead_ms  # type: ignore[method-assign]
    cluster.deploy()
    cluster.run_until(lambda: coordinator.all_running)
    for _ in range(6):
        if coordinator.all_drained:
            break
        coordinator.trigger(CheckpointKind.CHECKPOINT, clock.wall_ms())
        for _ in range(20):
            cluster.step()
        ahead_ms += jump_ms
        cluster.run_until(lambda: coordinator.pending is None, steps_max=20_000)
    assert len(coordinator.completed) >= 2
    assert coordinator.declined == []
    stored = sum(each.rows for completed in coordinator.completed for each in completed.channels)
    assert (stored > 0) is (mode == "unaligned") or mode == "timeout"
    cluster.run_to_end()
    found = read_committed(path, "out", open_storage=open_output)
    expected = Counter((index, str(HUGE if index % 50 == 20 else 1)) for count in rows for index in range(count))
    assert Counter(zip(found["id"].to_pylist(), found["text"].to_pylist(), strict=True)) == expected
