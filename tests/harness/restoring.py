"""Restoring in a test without a coordinator: a snapshot that fits the job, or the first reason why not."""

from __future__ import annotations

from holdfast.barriers.jobgraph import JobGraph
from holdfast.coordinator.restore.compatibility import CompatibilityResult, judge_snapshot
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata


def plan_restore(metadata: SnapshotMetadata, graph: JobGraph, *, allow_non_restored_state: bool = False) -> CompatibilityResult:
    """As `judge_snapshot`, of a snapshot that fits. Raises the first refusal, a RestoreError, otherwise."""
    result = judge_snapshot(metadata, graph, allow_non_restored_state=allow_non_restored_state)
    for refusal in result.refusals:
        raise refusal.error()
    return result
