"""Flows that check a whole state directory, and delete files without an owner.

A repair may be killed between any two operations, and repeated. It deletes files that no snapshot can name: names are never used
twice, and registers never go back, so that what holds at one moment, shown by two equal readings, holds from then on. `files.py`
decides which file has an owner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from holdfast.barriers.sinks.reading import find_replaced
from holdfast.coordinator.ha.leadership import check_leadership
from holdfast.coordinator.ha.recorded_job import CheckpointFact, Completed, RecordedJob
from holdfast.coordinator.ha.records import is_job_id
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.ownership.files import (
    Ages,
    Claims,
    FileStatus,
    JobEvidence,
    OwnedFile,
    OwnerCost,
    add_costs,
    assign_directory,
    assign_owners,
    completed_checkpoints,
    counted_id,
    derive_claims,
    refusal,
)
from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.errors import CorruptStateError, FencedError, ObjectMissingError
from holdfast.statebackends.layout import (
    FSCK_FOLDER,
    METADATA_NAME,
    JobPaths,
    is_input_manifest,
    metadata_path,
    parse_owner_name,
    part_path,
)
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, decode_metadata
from holdfast.statebackends.snapshot.parts import SnapshotProblem, read_metadata_file, snapshot_files, verify_file, verify_snapshot
from holdfast.statebackends.state_processor.external import (
    INPUT_VERSION,
    ExternalReport,
    UncheckedFile,
    check_external,
    decode_input,
)
from holdfast.statebackends.storage.flows import read_in_group, read_whole
from holdfast.statebackends.storage.port import (
    DeleteFile,
    DeleteFolder,
    DescribeFiles,
    FileFacts,
    Flow,
    InParallel,
    ListFolder,
    PutIfAbsent,
    StatFile,
)

T = TypeVar("T")

SETTLED_TRIES_MAX = 3
"""Readings of a job's registers until two in a row are equal."""


@dataclass(frozen=True, slots=True)
class Directory:
    """Content of a state directory, as far as it was read."""

    jobs: Mapping[str, JobEvidence]
    savepoints: Mapping[str, SnapshotMetadata | None]
    """By folder below the state directory; None: it can't be read."""
    files: tuple[FileFacts, ...]
    """Files outside of jobs' directories."""
    targets: frozenset[str]
    """Folders below the state directory in which savepoints are being written or deleted."""

    def claims(self) -> Claims:
        return derive_claims(self.jobs.values(), self.savepoints)


@dataclass(frozen=True, slots=True)
class FsckReport:
    """The files of a state directory by owner, problems of retained checkpoints, and the deletions of a repair."""

    location: str
    costs: tuple[OwnerCost, ...]
    orphans: tuple[OwnedFile, ...]
    """Files without an owner, older than the safety age; after a repair, those that it left."""
    young: tuple[OwnedFile, ...]
    """Files without an owner, younger than the safety age."""
    unknown: tuple[OwnedFile, ...]
    """Files that Holdfast does not write; never deleted."""
    problems: tuple[SnapshotProblem, ...]
    """Damaged and missing files of retained checkpoints."""
    damaged_jobs: Mapping[str, str] = field(default_factory=dict)
    """Job id -> damage of a record that can't be read: none of its files counts as an orphan."""
    deleted: tuple[OwnedFile, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Job id -> why a repair left its orphans alone."""
    unchecked: tuple[UncheckedFile, ...] = ()
    """Files outside the state directory that retained checkpoints need, and that could not be checked; only with checksums."""

    @property
    def is_clean(self) -> bool:
        """Every file has an owner, or is young, and every retained checkpoint has its files."""
        return not (self.orphans or self.problems or self.damaged_jobs)


@dataclass(frozen=True, slots=True)
class FsckRequest:
    """Scope and options of a check."""

    job_id: str | None = None
    """None: all jobs, and the files outside of jobs' directories."""
    safety_age_ms: int = 3_600_000
    checksums: bool = False
    """Read every file of the retained checkpoints."""
    repair: bool = False
    leader_may_live: str = ""
    """Why a coordinator may be leading jobs of this directory; empty if none can. Only for a repair."""
    nonce: str = ""
    """Name of the file by which a repair reads the storage's clock."""


def check_directory(request: FsckRequest, location: str, now_ms: int) -> Flow[FsckReport]:
    """Check a state directory, and repair it if requested. `now_ms`: wall clock of this process; a repair reads the storage's
    clock, too, and takes the earlier time."""
    directory = yield from look(location, request.job_id)
    if request.repair:
        now_ms = min(now_ms, (yield from _storage_clock(request.nonce)))
    ages = Ages(now_ms, request.safety_age_ms)
    claims = directory.claims()
    chosen = [evidence for job_id, evidence in directory.jobs.items() if request.job_id in (None, job_id)]
    files = {evidence.job_id: assign_owners(evidence, claims, ages) for evidence in chosen}
    if request.job_id is None:
        files[""] = assign_directory(directory.files, directory.savepoints, directory.targets, ages)
    problems: list[SnapshotProblem] = []
    unchecked: list[UncheckedFile] = []
    for evidence in chosen:
        problems += yield from _find_problems(evidence, checksums=request.checksums)
        if request.checksums:
            external = yield from _check_external(evidence)
            problems += external.problems
            unchecked += external.unchecked
    deleted: list[OwnedFile] = []
    refused = (yield from _repair(chosen, files, request.leader_may_live, deleted)) if request.repair else {}
    gone = {file.path for file in deleted}
    left = [file for found in files.values() for file in found if file.path not in gone]
    return FsckReport(
        location=location,
        costs=add_costs(left),
        orphans=tuple(file for file in left if file.status is FileStatus.ORPHAN),
        young=tuple(file for file in left if file.status is FileStatus.YOUNG),
        unknown=tuple(file for file in left if file.kind.value == "unknown"),
        problems=tuple(problems),
        damaged_jobs={evidence.job_id: evidence.damage for evidence in chosen if evidence.job is None},
        deleted=tuple(sorted(deleted, key=lambda file: file.path)),
        refused=refused,
        unchecked=tuple(unchecked),
    )


def _repair(
    chosen: Sequence[JobEvidence],
    files: Mapping[str, list[OwnedFile]],
    leader_may_live: str,
    deleted: list[OwnedFile],
) -> Flow[dict[str, str]]:
    """Delete the orphans of each job, and of the directory itself. Returns job id -> why a job was left alone."""
    refused: dict[str, str] = {}
    for evidence in chosen:
        reason = yield from _repair_job(evidence, files[evidence.job_id], leader_may_live, deleted)
        if reason:
            refused[evidence.job_id] = reason
    yield from _delete_all([file for file in files.get("", ()) if file.status is FileStatus.ORPHAN], None, deleted)
    return refused


def look(location: str, job_id: str | None = None) -> Flow[Directory]:
    """Content of the state directory at `location`; without the files of jobs other than `job_id`, unless that is None."""
    names: list[str] = yield ListFolder("")
    ids = [name.rstrip("/") for name in names if name.endswith("/") and is_job_id(name.rstrip("/"))]
    jobs: dict[str, JobEvidence] = {}
    for each in ids:  # one after the other: each reads its files in parallel, which flows within a group can't
        jobs[each] = yield from _read_evidence(each, with_files=job_id in (None, each))
    others = [name for name in names if name.rstrip("/") not in jobs]
    described: list[list[FileFacts]] = yield from _together([_describe(name) for name in others])
    files = [fact for facts in described for fact in facts]
    # After the jobs: files that a job names are looked up after its records.
    folders = [fact.path.rpartition("/")[0] for fact in files if fact.path.endswith(f"/{METADATA_NAME}")]
    read: list[SnapshotMetadata | None] = yield from _read_snapshots(folders)
    targets = set(_targets(jobs.values(), location))
    # A folder with `_owner` and without `_metadata` is being deleted by its owner.
    targets.update(fact.path.rpartition("/")[0] for fact in files if _is_owner(fact.path))
    return Directory(jobs, dict(zip(folders, read, strict=True)), tuple(files), frozenset(targets))


def _is_owner(path: str) -> bool:
    parent, _, name = path.rpartition("/")
    return bool(parent) and parse_owner_name(name) is not None


def _together(flows: Sequence[Flow[T]]) -> Flow[list[T]]:
    """Results of flows that run in parallel and read no file."""
    results: list[T] = yield InParallel(flows, [0] * len(flows))
    return results


def _read_each(paths: Sequence[str], decode: Callable[[bytes, str], T], read: Callable[[str], Flow[bytes]]) -> Flow[list[T | None]]:
    """Decoded content of each file; None for one that is missing or damaged."""

    def read_one(path: str) -> Flow[T | None]:
        try:
            return decode((yield from read(path)), path)
        except (CorruptStateError, ObjectMissingError):
            return None

    return (yield from read_in_group([partial(read_one, path) for path in paths]))


def _describe(name: str) -> Flow[list[FileFacts]]:
    """Files below a folder that is no job's, or a file beside the jobs' directories."""
    if name.endswith("/"):
        facts: list[FileFacts] = yield DescribeFiles(name.rstrip("/"))
        return facts
    size: int | None = yield StatFile(name)
    return [] if size is None else [FileFacts(name, size, 0)]


def _read_snapshots(folders: Sequence[str]) -> Flow[list[SnapshotMetadata | None]]:
    return (yield from _read_each([metadata_path(folder) for folder in folders], decode_metadata, read_metadata_file))


def _targets(jobs: Iterable[JobEvidence], location: str) -> Iterable[str]:
    """Folders of savepoints that lie below the state directory at `location`."""
    root = f"{location.rstrip('/')}/"
    for evidence in jobs:
        for checkpoint in evidence.job.checkpoints.values() if evidence.job is not None else ():
            folder = checkpoint.claim.folder.removeprefix("file://") if checkpoint.claim is not None else ""
            if folder.startswith(root):
                yield folder.removeprefix(root).rstrip("/")


def _read_evidence(job_id: str, *, with_files: bool) -> Flow[JobEvidence]:
    """List a job's files, then read its records: files that appear later are not in the list, and those that vanish are not
    missed."""
    files: list[FileFacts] = []
    if with_files:
        files = yield DescribeFiles(job_id)
    try:
        job, snapshots, is_settled = yield from _read_registers(JobPaths(job_id))
    except CorruptStateError as error:
        return JobEvidence(job_id, None, error.message, files=tuple(files))
    manifests = [fact.path for fact in files if is_input_manifest(fact.path)]
    inputs = yield from _read_each(manifests, _decode_input, read_whole)
    named = {path.rpartition("/")[0]: found for path, found in zip(manifests, inputs, strict=True)}
    return JobEvidence(job_id, job, "", snapshots, named, tuple(files), is_settled)


Registers = tuple[RecordedJob, dict[int, SnapshotMetadata], bool]


def _read_registers(paths: JobPaths) -> Flow[Registers]:
    """The job, its completed snapshots, and whether they were so at one moment. Raises CorruptStateError.

    A register goes from empty to claimed, decided and deleted, and never back: between two equal readings it did not change."""
    before = yield from _read_whole(paths)
    snapshots: dict[int, SnapshotMetadata] = {}
    for _ in range(SETTLED_TRIES_MAX):
        ids = [each.checkpoint_id for each in completed_checkpoints(before) if isinstance(each.decision, Completed)]
        read = yield from _read_snapshots([paths.checkpoint(number) for number in ids])
        # A snapshot that was dropped meanwhile is missing: the next reading differs.
        snapshots = {number: found for number, found in zip(ids, read, strict=True) if found is not None}
        after = yield from _read_whole(paths)
        if after == before:
            return before, snapshots, True
        before = after
    return before, snapshots, False


def _read_whole(paths: JobPaths) -> Flow[RecordedJob]:
    """As `read_job`, also while the records of an ended job are being deleted."""
    for _ in range(SETTLED_TRIES_MAX - 1):
        try:
            return (yield from read_job(paths))
        except ObjectMissingError:
            continue
    return (yield from read_job(paths))


def _decode_input(content: bytes, path: str) -> frozenset[str] | None:
    folder = path.rpartition("/")[0]
    try:
        manifest = decode_input(content)
    except UNDECODABLE:
        return None
    return frozenset(f"{folder}/{file.name}" for file in manifest.files) if manifest.version <= INPUT_VERSION else None


def _find_problems(evidence: JobEvidence, *, checksums: bool) -> Flow[list[SnapshotProblem]]:
    """Files of retained checkpoints that are missing or have a wrong length; with `checksums` also those with wrong content."""
    sizes = {fact.path: fact.size for fact in evidence.files}
    problems: list[SnapshotProblem] = []
    for number, metadata in sorted(evidence.snapshots.items()):
        folder = JobPaths(evidence.job_id).checkpoint(number)
        found: list[SnapshotProblem] = []
        if checksums:
            found = yield from verify_snapshot(metadata, folder)
        else:
            looked = yield from _together(
                [
                    verify_file(handle, folder, uid, subtask, checksums=False)
                    for handle, uid, subtask in snapshot_files(metadata)
                    if sizes.get(_path_of(folder, handle.path)) != handle.file_length
                ]
            )
            found = [problem for problem in looked if problem is not None]
        if found and (yield StatFile(JobPaths(evidence.job_id).claim(number))) is None:
            continue  # the checkpoint was dropped meanwhile
        problems += found
    return problems


def _check_external(evidence: JobEvidence) -> Flow[ExternalReport]:
    """Check the files that a job's retained checkpoints name outside their folders; each file once."""
    paths = JobPaths(evidence.job_id)
    named = {number: metadata.external for number, metadata in evidence.snapshots.items() if metadata.external}
    while True:
        entries = (entry for number in sorted(named) for entry in named[number])
        report = yield from check_external(entries, find_replaced=find_replaced)
        if not report.problems:
            return report
        claims: list[int | None] = yield from _together([_size(paths.claim(number)) for number in named])
        existing = {number: named[number] for number, size in zip(named, claims, strict=True) if size is not None}
        if len(existing) == len(named):
            return report
        named = existing  # the others were dropped meanwhile: their files are not needed any more


def _size(path: str) -> Flow[int | None]:
    size: int | None = yield StatFile(path)
    return size


def _path_of(folder: str, path: str) -> str:
    try:
        return part_path(folder, path)
    except CorruptStateError:
        return ""


def _storage_clock(nonce: str) -> Flow[int]:
    """Time of the storage's clock, which dates the files, in ms since the epoch."""
    path = f"{FSCK_FOLDER}/{nonce}"
    yield PutIfAbsent(path, b"")
    facts: list[FileFacts] = yield DescribeFiles(FSCK_FOLDER)
    yield DeleteFile(path)
    return next((fact.modified_ms for fact in facts if fact.path == path), 0)


def _repair_job(evidence: JobEvidence, files: list[OwnedFile], leader_may_live: str, deleted: list[OwnedFile]) -> Flow[str]:
    """Delete a job's orphans and add them to `deleted`; returns why they were left alone, empty if they were deleted."""
    orphans = [file for file in files if file.status is FileStatus.ORPHAN]
    folders = _empty_folders(evidence, files)
    if not orphans and not folders:
        return ""
    reason = refusal(evidence, leader_may_live)
    if reason:
        return reason
    assert evidence.job is not None
    paths = JobPaths(evidence.job_id)
    epoch = max(evidence.job.epochs, default=0)
    try:
        # Decisions come last: if the repair is cut off, as little as possible is left.
        decisions = [file for file in orphans if file.path.endswith(f"/{METADATA_NAME}")]
        yield from _delete_all([file for file in orphans if file not in decisions], (paths, epoch), deleted)
        yield from _delete_all(decisions, (paths, epoch), deleted)
        emptied = {*(file.path.rpartition("/")[0] for file in orphans), *folders} - {paths.shared}
        for depth in sorted({folder.count("/") for folder in emptied}, reverse=True):
            level = sorted(folder for folder in emptied if folder.count("/") == depth)
            yield from _together([_delete_empty(folder, paths, epoch) for folder in level])
    except FencedError as error:
        return f"a coordinator began to lead it: {error.message}"
    return ""


def _delete_all(files: Sequence[OwnedFile], lead: tuple[JobPaths, int] | None, deleted: list[OwnedFile]) -> Flow[None]:
    """Delete files in any order, and add each to `deleted`. `lead`: a job and its highest epoch; raises FencedError for a higher
    one."""

    def delete(file: OwnedFile) -> Flow[None]:
        if lead is not None:
            yield from check_leadership(*lead)
        yield DeleteFile(file.path)
        deleted.append(file)

    yield from _together([delete(file) for file in sorted(files, key=lambda file: file.path)])


def _delete_empty(folder: str, paths: JobPaths, epoch: int) -> Flow[None]:
    yield from check_leadership(paths, epoch)
    if not (yield ListFolder(folder)):
        yield DeleteFolder(folder)


def _empty_folders(evidence: JobEvidence, files: list[OwnedFile]) -> list[str]:
    """Folders of orphaned ids that hold no file; a file system keeps such folders."""
    if evidence.job is None:
        return []
    paths = JobPaths(evidence.job_id)
    used = {file.path.rpartition("/")[0] for file in files}
    orphaned = evidence.job.with_fact(CheckpointFact.ORPHANED)
    folders = [paths.checkpoint(each.checkpoint_id) for each in orphaned if each.checkpoint_id <= counted_id(evidence.job)]
    return [folder for folder in folders if folder not in used]
