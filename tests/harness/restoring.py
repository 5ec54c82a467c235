"""Restoring in a test without a coordinator: a snapshot that fits the job, or the first refusal."""

from __future__ import annotations

from holdfast.barriers.jobgraph import JobGraph
from holdfast.coordinator.restore.compatibility import CompatibilityResult, check_compatibility
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata


def plan_restore(metadata: SnapshotMetadata, graph: JobGraph, *, allow_non_restored_state: bool = False) -> CompatibilityResult:
    """As `check_compatibility`, for a snapshot that fits. Raises the first refusal, a RestoreError, otherwise."""
    result = check_compatibility(metadata, graph, allow_non_restored_state=allow_non_restored_state)
    for refusal in result.refusals:
        raise refusal.error()
    return result
