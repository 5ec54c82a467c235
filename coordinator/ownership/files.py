"""CORE: derives the owner of every file of a state directory from listings, registers and manifests. Pure.

A file is an orphan only if no snapshot can name it, now or later. If a snapshot can't be read, or is not decided, every file that
it might name counts as owned. Unknown files are never deleted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, assert_never

from holdfast.barriers.sinks.log import ROOT_FOLDER
from holdfast.coordinator.ha.recorded_job import CheckpointFact, Completed, Decision, RecordedCheckpoint, RecordedJob, Unreadable
from holdfast.coordinator.ha.records import AbortRecord, SavepointRecord
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import external_places
from holdfast.statebackends.layout import (
    CLAIM_NAME,
    DRILLS_FOLDER,
    FSCK_FOLDER,
    HISTORY_FOLDER,
    INPUT_MANIFEST,
    LABELS_FOLDER,
    METADATA_NAME,
    SHARED_FOLDER,
    SINKS_FOLDER,
    SOURCES_FOLDER,
    TASK_OWNED_FOLDER,
    JobPaths,
    batch_folder,
    is_directory_file,
    is_drill_name,
    is_in_stream,
    is_job_record,
    parse_checkpoint_name,
    parse_history_name,
    parse_label_name,
    part_path,
    writer_of,
)
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.snapshot.parts import snapshot_files
from holdfast.statebackends.storage.port import FileFacts

SMALL_FILE_BYTES = 128 << 10
"""Object stores' cheaper classes bill smaller files as if they had this size, and every file costs a request."""

_SINK_FOLDER = re.compile(rf"(?:^|(?P<root>.*)/){ROOT_FOLDER}/[^/]+/(staged|data|log|summaries|merges)/[^/]+")
_SINK_FILE = re.compile(r"part-.+\.(parquet|jsonl|csv)")
_PARTITIONS = re.compile(r"(?:(?:^|/)[^/=]+=[^/]*)+$")
"""Folders of a sink's partitions, at the end of a path."""


class OwnerKind(StrEnum):
    """Kind of data that a file belongs to."""

    CHECKPOINTS = "checkpoints"
    SHARED = "shared"
    TASK_OWNED = TASK_OWNED_FOLDER
    """Files of tasks, which alone may delete them."""
    SAVEPOINTS = "savepoints"
    """Below the state directory; user-owned."""
    SOURCES = "sources"
    SINKS = "sinks"
    """Files of sinks that write below the state directory; the sinks' own sweep deletes what they don't need."""
    RECORDS = "records"
    HISTORY = "history"
    """What happened to a job, and what its drills found; who writes them deletes the oldest."""
    UNKNOWN = "unknown"
    """Nothing that Holdfast writes."""


class FileStatus(StrEnum):
    OWNED = "owned"
    YOUNG = "young"
    """No snapshot names it yet; it is younger than the safety age, and its writer may be about to."""
    ORPHAN = "orphan"


@dataclass(frozen=True, slots=True)
class OwnedFile:
    """One file of a state directory, its kind and its owner."""

    path: str
    """Relative to the state directory."""
    size: int
    modified_ms: int
    job_id: str
    """Empty: of no job."""
    kind: OwnerKind
    status: FileStatus
    owner: str
    """In words: what owns it, or why nothing does."""


@dataclass(frozen=True, slots=True)
class JobEvidence:
    """The directory of one job, as far as it was read."""

    job_id: str
    job: RecordedJob | None
    """None: a record can't be read, so that no file counts as an orphan."""
    damage: str = ""
    """Why `job` is None."""
    snapshots: Mapping[int, SnapshotMetadata] = field(default_factory=dict)
    """Of every completed checkpoint whose `_metadata` lies in the job's directory and can be read."""
    inputs: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    """Folder of a materialised input -> the paths that its manifest names; None: it can't be read. Without one: not sealed."""
    files: tuple[FileFacts, ...] = ()
    is_settled: bool = False
    """Two readings of the registers were equal: at one moment all of them were so."""

    @property
    def has_unreadable(self) -> bool:
        """A completed checkpoint can't be read: it may name any file."""
        if self.job is None:
            return True
        return any(isinstance(checkpoint.decision, Unreadable) for checkpoint in completed_checkpoints(self.job))


def completed_checkpoints(job: RecordedJob) -> tuple[RecordedCheckpoint, ...]:
    """Completed checkpoints, also those that another job has claimed: the files that they name are needed."""
    return (*job.with_fact(CheckpointFact.COMPLETED), *job.with_fact(CheckpointFact.CLAIMED))


@dataclass(frozen=True, slots=True)
class Claims:
    """Files that the snapshots of a state directory name. Those of other jobs, and savepoints, may name files of a job, too."""

    paths: AbstractSet[str]
    has_unreadable: bool
    """Some snapshot can't be read: it may name any shared file."""


def claimed_paths(metadata: SnapshotMetadata, folder: str) -> Iterator[str]:
    """Storage paths of all files that a snapshot names, in its folder and outside of it. Paths that leave the storage are left
    out."""
    for handle, _, _ in snapshot_files(metadata):
        try:
            yield part_path(folder, handle.path)
        except CorruptStateError:
            continue
    for entry in metadata.external:
        yield from external_places(entry)


def derive_claims(jobs: Iterable[JobEvidence], savepoints: Mapping[str, SnapshotMetadata | None]) -> Claims:
    """`savepoints`: by folder below the state directory; None for one that can't be read."""
    paths: set[str] = set()
    unreadable = None in savepoints.values()
    for evidence in jobs:
        unreadable = unreadable or evidence.has_unreadable
        for number, metadata in evidence.snapshots.items():
            paths.update(claimed_paths(metadata, JobPaths(evidence.job_id).checkpoint(number)))
    for folder, known in savepoints.items():
        if known is not None:
            paths.update(claimed_paths(known, folder))
    return Claims(paths, unreadable)


@dataclass(frozen=True, slots=True)
class Ages:
    """When a file is old enough to be an orphan."""

    now_ms: int
    safety_age_ms: int

    def status(self, fact: FileFacts) -> FileStatus:
        """Status of a file that no snapshot names."""
        return FileStatus.ORPHAN if self.now_ms - fact.modified_ms >= self.safety_age_ms else FileStatus.YOUNG


def assign_owners(evidence: JobEvidence, claims: Claims, ages: Ages) -> list[OwnedFile]:
    """Every file of a job's directory with its owner, in the order of the listing."""
    return [_owned_file(evidence, fact, claims, ages) for fact in evidence.files]


def _owned_file(evidence: JobEvidence, fact: FileFacts, claims: Claims, ages: Ages) -> OwnedFile:
    kind, verdict = _verdict(evidence, fact.path.removeprefix(f"{evidence.job_id}/"), fact.path, claims)
    status = FileStatus.OWNED if verdict.is_owned else ages.status(fact)
    return OwnedFile(*fact, evidence.job_id, kind, status, verdict.reason)


class _Verdict(NamedTuple):
    is_owned: bool
    reason: str


def _owned(reason: str) -> _Verdict:
    return _Verdict(True, reason)


def _orphaned(reason: str) -> _Verdict:
    return _Verdict(False, reason)


def _verdict(evidence: JobEvidence, name: str, path: str, claims: Claims) -> tuple[OwnerKind, _Verdict]:
    top, _, rest = name.partition("/")
    number = parse_checkpoint_name(top)
    if number is not None and rest:
        return OwnerKind.CHECKPOINTS, _of_checkpoint(evidence, number, rest, path, claims)
    if top == LABELS_FOLDER and rest.isdecimal():
        return OwnerKind.RECORDS, _of_mark(evidence, int(rest))
    if is_job_record(name):
        return OwnerKind.RECORDS, _owned("the job")
    if top == HISTORY_FOLDER and parse_history_name(rest) is not None:
        return OwnerKind.HISTORY, _owned("the job's history")
    if top == DRILLS_FOLDER and is_drill_name(rest):
        return OwnerKind.HISTORY, _owned("the job's drills")
    if top == SHARED_FOLDER and rest:
        return OwnerKind.SHARED, _of_shared(evidence, rest, path, claims)
    if top == TASK_OWNED_FOLDER and rest:
        return OwnerKind.TASK_OWNED, _owned("the job's tasks")
    if top == SOURCES_FOLDER and rest.count("/") >= 2:
        return OwnerKind.SOURCES, _of_input(evidence, rest, path, claims)
    if top == SINKS_FOLDER and rest:
        return OwnerKind.SINKS, _owned("the sink")
    return OwnerKind.UNKNOWN, _owned("not known")


def _of_mark(evidence: JobEvidence, number: int) -> _Verdict:
    """The file that says that an id may have labels. Behind the id it stays until somebody gives the job its next label, as every
    drill does: it is known, and a byte."""
    if evidence.job is None:
        return _owned(f"not known: {evidence.damage}")
    checkpoint = evidence.job.checkpoints.get(number)
    if checkpoint is not None and (checkpoint.fact is not CheckpointFact.ORPHANED or number > counted_id(evidence.job)):
        return _owned(f"labels of checkpoint {number}")
    if number <= counted_id(evidence.job):
        return _owned(f"labels of checkpoint {number}, which was deleted: it goes with the job's next label or drill")
    return _orphaned(f"there was no checkpoint {number} that it could tell of")


def _of_checkpoint(evidence: JobEvidence, number: int, name: str, path: str, claims: Claims) -> _Verdict:
    if evidence.job is None:
        return _owned(f"not known: {evidence.damage}")
    checkpoint = evidence.job.checkpoints.get(number)
    if checkpoint is None:
        return _owned("it is being deleted")
    if path in claims.paths:
        return _owned(f"checkpoint {number}")
    match checkpoint.fact:
        case CheckpointFact.ORPHANED if number > counted_id(evidence.job):
            return _owned(f"checkpoint {number}, the highest id")  # the id counter rests on it
        case CheckpointFact.ORPHANED:
            return _orphaned(f"checkpoint {number} has no claim: its deletion had begun, or the id was never taken")
        case CheckpointFact.UNDECIDED:
            return _owned(f"checkpoint {number}, pending")
        case CheckpointFact.CLAIMED:
            return _owned(f"checkpoint {number}, which job {checkpoint.owner} claimed")
        case CheckpointFact.ABORTED | CheckpointFact.COMPLETED:
            return _of_decided(evidence, number, name, checkpoint.decision)
        case fact:
            assert_never(fact)


def _of_decided(evidence: JobEvidence, number: int, name: str, decision: Decision | None) -> _Verdict:
    if name in (CLAIM_NAME, METADATA_NAME) or parse_label_name(name) is not None:
        return _owned(f"checkpoint {number}")
    match decision:
        case Unreadable():
            return _owned(f"checkpoint {number}, which can't be read")
        case Completed() if number not in evidence.snapshots:
            return _owned(f"checkpoint {number}, which was not read")
        case Completed():
            return _orphaned(f"checkpoint {number} does not name it")
        case AbortRecord() | SavepointRecord() | None:
            return _orphaned(f"checkpoint {number} keeps no files here")
        case _:
            assert_never(decision)


def counted_id(job: RecordedJob) -> int:
    """Highest id that is taken by the records other than orphaned folders."""
    known = [checkpoint.checkpoint_id for checkpoint in job.checkpoints.values() if checkpoint.claim is not None]
    known.extend(result.last_checkpoint_id for result in job.results.values())
    known.extend(record.first_checkpoint_id - 1 for record in job.submissions.values())
    return max(known, default=0)


def _of_shared(evidence: JobEvidence, name: str, path: str, claims: Claims) -> _Verdict:
    if evidence.job is None:
        return _owned(f"not known: {evidence.damage}")
    if path in claims.paths:
        return _owned("checkpoints")
    if claims.has_unreadable:
        return _owned("not known: a snapshot can't be read, and may name it")
    undecided = evidence.job.with_fact(CheckpointFact.UNDECIDED)
    if undecided:
        return _owned(f"checkpoint {undecided[0].checkpoint_id}, pending, may name it")
    written_for = writer_of(name)
    if written_for is None or written_for > evidence.job.last_checkpoint_id:
        return _owned("a checkpoint that is not known yet")
    return _orphaned("no retained checkpoint names it")


def _of_input(evidence: JobEvidence, name: str, path: str, claims: Claims) -> _Verdict:
    """`name`: `<uid>/<submission>/<file>`; the file is the manifest, or lies in a folder of its writer, or in a streaming input."""
    uid, submission, rest = name.split("/", 2)
    folder = f"{evidence.job_id}/{SOURCES_FOLDER}/{uid}/{submission}"
    if evidence.job is None:
        return _owned(f"not known: {evidence.damage}")
    if path in claims.paths or not submission.isdecimal():
        return _owned(f"the input of source {uid}")
    if is_in_stream(rest):
        return _of_batch(evidence, uid, f"{folder}/{rest}")
    if folder in evidence.inputs:
        named = evidence.inputs[folder]
        if named is None:
            return _owned(f"the input of source {uid}, which can't be read")
        if path in named or path == f"{folder}/{INPUT_MANIFEST}":
            return _owned(f"the input of source {uid}")
        return _orphaned(f"the input of source {uid} does not name it")
    if int(submission) >= evidence.job.last_submission:
        return _owned(f"source {uid}, whose input is being written")
    return _orphaned(f"submission {int(submission)} never sealed its input of source {uid}")


def _of_batch(evidence: JobEvidence, uid: str, path: str) -> _Verdict:
    """`path`: of any file of a streaming input. What no snapshot needs is for the job's driver to drop."""
    folder = batch_folder(path)
    if folder is None:
        return _owned(f"the streaming input of source {uid}")
    named = evidence.inputs.get(folder)
    if folder in evidence.inputs and (named is None or path in named or path == f"{folder}/{INPUT_MANIFEST}"):
        return _owned(f"a batch of source {uid}")
    if folder in evidence.inputs:
        return _orphaned(f"the batch of source {uid} does not name it")
    above = folder.rpartition("/")[0]
    if any(other.rpartition("/")[0] == above and other > folder for other in evidence.inputs):
        return _orphaned(f"a batch of source {uid} that was dropped, or never sealed")
    return _owned(f"source {uid}, whose batch is being written")


def assign_directory(
    files: Sequence[FileFacts], savepoints: Mapping[str, SnapshotMetadata | None], targets: Iterable[str], ages: Ages
) -> list[OwnedFile]:
    """Files of the state directory outside of jobs' directories. `targets`: folders of savepoints, also of unfinished ones."""
    jobs = {folder: "" if metadata is None else metadata.job_id for folder, metadata in savepoints.items()}
    jobs = {**dict.fromkeys(targets, ""), **jobs}
    sinks = {match["root"] or "" for fact in files if (match := _SINK_FOLDER.match(fact.path))}
    found = []
    for fact in files:
        parent, _, name = fact.path.rpartition("/")
        folder = next((above for above in _parents(fact.path) if above in jobs), None)
        if parent == FSCK_FOLDER:
            found.append(OwnedFile(*fact, "", OwnerKind.RECORDS, ages.status(fact), "a repair that has ended"))
        elif is_directory_file(fact.path):
            found.append(OwnedFile(*fact, "", OwnerKind.RECORDS, FileStatus.OWNED, "the state directory"))
        elif folder is not None:
            found.append(OwnedFile(*fact, jobs[folder], OwnerKind.SAVEPOINTS, FileStatus.OWNED, f"savepoint {folder}"))
        elif _SINK_FOLDER.match(fact.path) or (_PARTITIONS.sub("", parent) in sinks and _SINK_FILE.fullmatch(name)):
            found.append(OwnedFile(*fact, "", OwnerKind.SINKS, FileStatus.OWNED, "a sink"))
        else:
            found.append(OwnedFile(*fact, "", OwnerKind.UNKNOWN, FileStatus.OWNED, "not known"))
    return found


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def refusal(evidence: JobEvidence, leader_may_live: str) -> str:
    """Why no file of this job may be deleted; empty: orphans may.

    `leader_may_live`: why a coordinator may be leading jobs of this directory; empty if none can. An ended job has no leader, and a
    new start of it begins from retained checkpoints."""
    if evidence.job is None:
        return f"its records can't be read: {evidence.damage}"
    if not evidence.is_settled:
        return "it changed while it was read"
    if leader_may_live and (evidence.job.is_live or not evidence.job.exists):
        return f"its leader may be alive: {leader_may_live}"
    return ""


@dataclass(frozen=True, slots=True)
class OwnerCost:
    """Number and size of the files of one kind of one job."""

    job_id: str
    """Empty: of no job."""
    kind: OwnerKind
    files: int
    small_files: int
    """Below SMALL_FILE_BYTES."""
    size: int
    """Bytes."""


def add_costs(files: Iterable[OwnedFile]) -> tuple[OwnerCost, ...]:
    """By job and kind, in this order."""
    sums: dict[tuple[str, OwnerKind], list[int]] = {}
    for file in files:
        total = sums.setdefault((file.job_id, file.kind), [0, 0, 0])
        total[0] += 1
        total[1] += file.size < SMALL_FILE_BYTES
        total[2] += file.size
    order = list(OwnerKind)
    return tuple(
        OwnerCost(job_id, kind, *sums[job_id, kind]) for job_id, kind in sorted(sums, key=lambda key: (key[0], order.index(key[1])))
    )
