"""Flows that look at a whole state directory, and delete what nothing owns.

A repair may be killed between any two operations, and repeated: it deletes only what no snapshot that stands can name, and
names are never used twice. That is so at one moment (registers that are the same before and after they were read, and never
turn back), hence for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

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
    INPUT_MANIFEST,
    METADATA_NAME,
    SOURCES_FOLDER,
    JobPaths,
    metadata_path,
    parse_owner_name,
    part_path,
)
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, decode_metadata
from holdfast.statebackends.snapshot.parts import SnapshotProblem, file_handles, read_metadata_file, verify_file, verify_snapshot
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
"""Reads of a job's registers until two in a row say the same."""


@dataclass(frozen=True, slots=True)
class Directory:
    """What was seen of a state directory."""

    jobs: Mapping[str, JobEvidence]
    savepoints: Mapping[str, SnapshotMetadata | None]
    """By folder below the state directory; None: can't be read."""
    files: tuple[FileFacts, ...]
    """Of no job."""
    targets: frozenset[str]
    """Folders below the state directory that savepoints are to be written to, or are being deleted from."""

    def claims(self) -> Claims:
        return derive_claims(self.jobs.values(), self.savepoints)


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What there is in a state directory, whose it is, and what was done about it."""

    location: str
    costs: tuple[OwnerCost, ...]
    orphans: tuple[OwnedFile, ...]
    """Older than the safety age; after a repair, what it left."""
    young: tuple[OwnedFile, ...]
    """Named by nothing, and younger than the safety age."""
    unknown: tuple[OwnedFile, ...]
    """Nothing that Holdfast writes; never deleted."""
    problems: tuple[SnapshotProblem, ...]
    """Of the files of retained checkpoints."""
    damaged_jobs: Mapping[str, str] = field(default_factory=dict)
    """Jobs with a record that can't be read, and what is wrong with it: nothing of theirs is called an orphan."""
    deleted: tuple[OwnedFile, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Jobs with orphans that a repair left alone, and why."""
    unchecked: tuple[UncheckedFile, ...] = ()
    """Files outside the state directory that retained checkpoints need, and that could not be asked for; only with checksums."""

    @property
    def is_clean(self) -> bool:
        """Every file has an owner, or is young, and every retained checkpoint has its files."""
        return not (self.orphans or self.problems or self.damaged_jobs)


@dataclass(frozen=True, slots=True)
class FsckRequest:
    """What to do."""

    job_id: str | None = None
    """None: all jobs, and what is of no job."""
    safety_age_ms: int = 3_600_000
    checksums: bool = False
    """Read every file of the retained checkpoints."""
    repair: bool = False
    leader_may_live: str = ""
    """Why a coordinator may be leading jobs of this directory; empty when none can. Only for a repair."""
    nonce: str = ""
    """Of a repair."""


def check_directory(request: FsckRequest, location: str, now_ms: int) -> Flow[FsckReport]:
    """`now_ms`: wall clock of this process; a repair asks the storage's, too, and believes the earlier one."""
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
    """Delete the orphans of each job, and those of the directory itself. Returns why a job was left alone, by its id."""
    refused: dict[str, str] = {}
    for evidence in chosen:
        reason = yield from _repair_job(evidence, files[evidence.job_id], leader_may_live, deleted)
        if reason:
            refused[evidence.job_id] = reason
    yield from _delete_all([file for file in files.get("", ()) if file.status is FileStatus.ORPHAN], None, deleted)
    return refused


def look(location: str, job_id: str | None = None) -> Flow[Directory]:
    """Everything there is at `location`; of other jobs than `job_id`, only what their snapshots may name elsewhere."""
    names: list[str] = yield ListFolder("")
    ids = [name.rstrip("/") for name in names if name.endswith("/") and is_job_id(name.rstrip("/"))]
    jobs: dict[str, JobEvidence] = {}
    for each in ids:  # in turn, each with its own reads several at one time: within a group they would not be
        jobs[each] = yield from _look_at_job(each, with_files=job_id in (None, each))
    others = [name for name in names if name.rstrip("/") not in jobs]
    described: list[list[FileFacts]] = yield from _together([_describe(name) for name in others])
    files = [fact for facts in described for fact in facts]
    # Last, as ever: what a job names is looked for behind the job.
    folders = [fact.path.rpartition("/")[0] for fact in files if fact.path.endswith(f"/{METADATA_NAME}")]
    read: list[SnapshotMetadata | None] = yield from _read_snapshots(folders)
    targets = set(_targets(jobs.values(), location))
    # Of an `_owner` without `_metadata` its owner is deleting the folder.
    targets.update(fact.path.rpartition("/")[0] for fact in files if _is_owner(fact.path))
    return Directory(jobs, dict(zip(folders, read, strict=True)), tuple(files), frozenset(targets))


def _is_owner(path: str) -> bool:
    parent, _, name = path.rpartition("/")
    return bool(parent) and parse_owner_name(name) is not None


def _together(flows: Sequence[Flow[T]]) -> Flow[list[T]]:
    """Of flows that read no file."""
    results: list[T] = yield InParallel(flows, [0] * len(flows))
    return results


def _read_each(paths: Sequence[str], decode: Callable[[bytes, str], T], read: Callable[[str], Flow[bytes]]) -> Flow[list[T | None]]:
    """What is in each file; None for one that is gone, or can't be read."""

    def read_one(path: str) -> Flow[T | None]:
        try:
            return decode((yield from read(path)), path)
        except (CorruptStateError, ObjectMissingError):
            return None

    return (yield from read_in_group([partial(read_one, path) for path in paths]))


def _describe(name: str) -> Flow[list[FileFacts]]:
    """What is below a folder of no job, or a file beside the jobs."""
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


def _look_at_job(job_id: str, *, with_files: bool) -> Flow[JobEvidence]:
    """The listing comes first: what appears later is not judged, and what vanishes meanwhile is found missing by nobody."""
    files: list[FileFacts] = []
    if with_files:
        files = yield DescribeFiles(job_id)
    try:
        job, snapshots, is_settled = yield from _read_registers(JobPaths(job_id))
    except CorruptStateError as error:
        return JobEvidence(job_id, None, error.message, files=tuple(files))
    manifests = [fact.path for fact in files if _is_manifest(fact.path)]
    inputs = yield from _read_each(manifests, _decode_input, read_whole)
    named = {path.rpartition("/")[0]: found for path, found in zip(manifests, inputs, strict=True)}
    return JobEvidence(job_id, job, "", snapshots, named, tuple(files), is_settled)


def _is_manifest(path: str) -> bool:
    parts = path.split("/")
    return len(parts) == 5 and parts[1] == SOURCES_FOLDER and parts[4] == INPUT_MANIFEST


Registers = tuple[RecordedJob, dict[int, SnapshotMetadata], bool]


def _read_registers(paths: JobPaths) -> Flow[Registers]:
    """The job, its completed snapshots, and whether all of it was so at one moment. Raises CorruptStateError.

    A register goes from empty to claimed, decided and deleted, and never back: two equal readings mean that nothing changed
    between them."""
    before = yield from _read_whole(paths)
    snapshots: dict[int, SnapshotMetadata] = {}
    for _ in range(SETTLED_TRIES_MAX):
        ids = [each.checkpoint_id for each in completed_checkpoints(before) if isinstance(each.decision, Completed)]
        read = yield from _read_snapshots([paths.checkpoint(number) for number in ids])
        # Of what was dropped meanwhile there is none: the next reading differs.
        snapshots = {number: found for number, found in zip(ids, read, strict=True) if found is not None}
        after = yield from _read_whole(paths)
        if after == before:
            return before, snapshots, True
        before = after
    return before, snapshots, False


def _read_whole(paths: JobPaths) -> Flow[RecordedJob]:
    """As `read_job`, also while an ended job's records are being dropped."""
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
    """Files of retained checkpoints that are missing or of a wrong length; with `checksums`, all that is wrong with them."""
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
                    verify_file(handle, folder, operator.uid, subtask, checksums=False)
                    for operator in metadata.operators
                    for subtask, state in enumerate(operator.subtasks)
                    for handle in file_handles(state)
                    if sizes.get(_path_of(folder, handle.path)) != handle.file_length
                ]
            )
            found = [problem for problem in looked if problem is not None]
        if found and (yield StatFile(JobPaths(evidence.job_id).claim(number))) is None:
            continue  # it was dropped meanwhile
        problems += found
    return problems


def _check_external(evidence: JobEvidence) -> Flow[ExternalReport]:
    """Files outside the folders of a job's retained checkpoints, each once however many checkpoints name it."""
    paths = JobPaths(evidence.job_id)
    named = {number: metadata.external for number, metadata in evidence.snapshots.items() if metadata.external}
    while True:
        report = yield from check_external(entry for number in sorted(named) for entry in named[number])
        if not report.problems:
            return report
        claims: list[int | None] = yield from _together([_size(paths.claim(number)) for number in named])
        standing = {number: named[number] for number, size in zip(named, claims, strict=True) if size is not None}
        if len(standing) == len(named):
            return report
        named = standing  # the others were dropped meanwhile, and with them the need for what they name


def _size(path: str) -> Flow[int | None]:
    size: int | None = yield StatFile(path)
    return size


def _path_of(folder: str, path: str) -> str:
    try:
        return part_path(folder, path)
    except CorruptStateError:
        return ""


def _storage_clock(nonce: str) -> Flow[int]:
    """What time it is for whoever dates the files."""
    path = f"{FSCK_FOLDER}/{nonce}"
    yield PutIfAbsent(path, b"")
    facts: list[FileFacts] = yield DescribeFiles(FSCK_FOLDER)
    yield DeleteFile(path)
    return next((fact.modified_ms for fact in facts if fact.path == path), 0)


def _repair_job(evidence: JobEvidence, files: list[OwnedFile], leader_may_live: str, deleted: list[OwnedFile]) -> Flow[str]:
    """Delete a job's orphans; returns why they were left alone, empty if they were not. Adds to `deleted` what is gone."""
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
        # Decisions come last: without the rest they are the smallest thing that can be left over.
        decisions = [file for file in orphans if file.path.endswith(f"/{METADATA_NAME}")]
        yield from _delete_all([file for file in orphans if file not in decisions], (paths, epoch), deleted)
        yield from _delete_all(decisions, (paths, epoch), deleted)
        emptied = {*(file.path.rpartition("/")[0] for file in orphans), *folders} - {paths.shared}
        for depth in sorted({folder.count("/") for folder in emptied}, reverse=True):
            level = sorted(folder for folder in emptied if folder.count("/") == depth)
            yield from _together([_delete_empty(folder, paths, epoch) for folder in level])
    except FencedError as error:
        return f"somebody began to lead it: {error.message}"
    return ""


def _delete_all(files: Sequence[OwnedFile], lead: tuple[JobPaths, int] | None, deleted: list[OwnedFile]) -> Flow[None]:
    """Delete files in any order. Adds to `deleted` each that is gone. `lead`: nobody may lead that job since that epoch."""

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
    """Folders of orphaned ids without any file, which a directory keeps."""
    if evidence.job is None:
        return []
    paths = JobPaths(evidence.job_id)
    used = {file.path.rpartition("/")[0] for file in files}
    orphaned = evidence.job.with_fact(CheckpointFact.ORPHANED)
    folders = [paths.checkpoint(each.checkpoint_id) for each in orphaned if each.checkpoint_id <= counted_id(evidence.job)]
    return [folder for folder in folders if folder not in used]
