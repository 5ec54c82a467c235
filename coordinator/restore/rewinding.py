"""Whether a restore goes back behind output that may be committed, and whose (I22). Reads only."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import msgspec

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.sinklog import DISCARDS_PROPERTY
from holdfast.coordinator.ha.recorded_job import RecordedJob
from holdfast.coordinator.ha.records import JobPaths, RestorePoint, is_job_id
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.restore.resolve import Resolved
from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.errors import CorruptStateError, ObjectMissingError, OutputMayRepeatError
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.storage.port import Flow


@dataclass(frozen=True, slots=True)
class Rewind:
    """A restore after which output may be written again."""

    restored: int
    committed: int
    """Highest id whose output may have been committed."""
    job_id: str
    """Of the job that committed it."""
    sinks: tuple[str, ...]
    """Ids of the sinks concerned."""
    skipped: tuple[int, ...] = ()
    """Ids that can't be read."""

    def error(self) -> OutputMayRepeatError:
        named = f" of {', '.join(map(repr, self.sinks))}" if self.sinks else ""
        newer = f"{self.committed} of job {self.job_id}"
        if self.skipped:
            newer += f" (not readable: {', '.join(map(str, self.skipped))})"
        return OutputMayRepeatError(
            f"checkpoint {self.restored} is older than {newer}, whose output is committed: what{named} came after it would be "
            "written again. Restore the newest one, or accept that: allow_output_repeat=True",
            restored=self.restored,
            committed=self.committed,
            sinks=list(self.sinks),
            skipped=list(self.skipped),
        )


def find_rewind(
    job: RecordedJob, resolved: Resolved, metadata: SnapshotMetadata, graph: JobGraph, *, moved: Collection[str] = ()
) -> Flow[Rewind | None]:
    """None where nothing newer than the snapshot can have committed output that this job would write again.

    `moved`: ids of sinks that write elsewhere than the job of the snapshot: what that one goes on to commit is beside theirs. What
    this job committed itself, wherever that was, is its own output, which it would write again."""
    base = resolved.base
    assert base is not None
    own = tuple(sorted(set(_sink_ids(graph))))
    if not own and _has_sinks(graph):
        return None
    skipped = tuple(each.checkpoint_id for each in resolved.skipped)
    if metadata.job_id == job.job_id and base.checkpoint_id < job.newest_completed:
        return Rewind(base.checkpoint_id, job.newest_completed, job.job_id, own, skipped)
    since = _completed_since(job, base)
    if since:
        return Rewind(base.checkpoint_id, since, job.job_id, own, skipped)
    shared = tuple(sorted(set(own) & set(_stored_sink_ids(metadata)) - set(moved)))
    if metadata.job_id == job.job_id or not shared or not is_job_id(metadata.job_id):
        return None
    try:
        other = yield from read_job(JobPaths(metadata.job_id))
    except (CorruptStateError, ObjectMissingError):
        return None  # the sinks' own logs say it too, later
    if other.exists and base.checkpoint_id < other.newest_completed:
        return Rewind(base.checkpoint_id, other.newest_completed, other.job_id, shared)
    return None


def _completed_since(job: RecordedJob, base: RestorePoint) -> int:
    """Highest id that this job has completed since it was started from the very same snapshot of another job; 0: none."""
    firsts = [
        record.first_checkpoint_id
        for record in job.submissions.values()
        if record.base is not None and record.base.explicit and record.base.folder == base.folder
    ]
    newest = job.newest_completed
    return newest if base.explicit and firsts and newest >= min(firsts) else 0


def _sink_ids(graph: JobGraph) -> Iterator[str]:
    """Of sinks whose output somebody can see."""
    for vertex in graph.vertices:
        for operator in vertex.operators:
            if operator.sink_id and not operator.properties.get(DISCARDS_PROPERTY):
                yield operator.sink_id


def _has_sinks(graph: JobGraph) -> bool:
    return any(operator.sink_id for vertex in graph.vertices for operator in vertex.operators)


def _stored_sink_ids(metadata: SnapshotMetadata) -> Iterator[str]:
    """Of the job that took the snapshot."""
    if metadata.graph is None:
        return
    try:
        yield from _sink_ids(msgspec.convert(metadata.graph, JobGraph))
    except UNDECODABLE:
        return  # of another version: its sinks are not known
