"""Flows over a job's directory: claim, decide, discard, drop, write records, and read the whole job.

Every flow may be killed between any two operations; `recovery.recover_job` then completes or undoes it. After an ambiguous or lost
write a flow reads the stored record, which decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from holdfast.coordinator.ha.recorded_job import (
    Decision,
    RecordedCheckpoint,
    RecordedJob,
    decode_decision,
    derive_checkpoint,
    is_late,
)
from holdfast.coordinator.ha.records import (
    AbortRecord,
    AttemptRecord,
    ClaimRecord,
    ConfigRecord,
    OwnerRecord,
    R,
    ResultRecord,
    SavepointRecord,
    SubmissionRecord,
    VoidRecord,
    decode_record,
    encode_record,
    is_job_id,
    is_void,
)
from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    FencedError,
    InvalidConfigError,
    ObjectMissingError,
    StorageUnavailableError,
)
from holdfast.statebackends.layout import (
    CONFIG_FOLDER,
    LABELS_FOLDER,
    SHARED_FOLDER,
    JobPaths,
    claim_path,
    metadata_path,
    parse_checkpoint_name,
    writer_of,
)
from holdfast.statebackends.snapshot.parts import read_metadata_file
from holdfast.statebackends.storage.flows import delete_files, read_in_group, read_whole
from holdfast.statebackends.storage.port import DeleteFile, DeleteFolder, Flow, InParallel, ListFiles, ListFolder, PutIfAbsent

SUBMISSION_BYTES_MAX = 256 << 20
"""Bytes of the record of a submission, with its job graph and the user's functions: the limit of one request, too."""


def put_once(path: str, content: bytes, read: Callable[[str], Flow[bytes]] = read_whole) -> Flow[bytes]:
    """Create `path` unless it exists; returns its durable content, ours or another's, read by `read`.

    An ambiguous write is repeated: only a definite answer proves that the content is durable. Raises AmbiguousWriteError if the
    second one is ambiguous or fails, too: the write may still take effect."""
    try:
        created: bool = yield PutIfAbsent(path, content)
    except AmbiguousWriteError:
        try:
            return (yield from _write_again(path, content, read))
        except AmbiguousWriteError:
            raise
        except StorageUnavailableError as error:
            raise AmbiguousWriteError(f"{path} may or may not have been written: {error}", path=path) from error
    return content if created else (yield from _read_existing(path, read))


def _write_again(path: str, content: bytes, read: Callable[[str], Flow[bytes]]) -> Flow[bytes]:
    created: bool = yield PutIfAbsent(path, content)
    return content if created else (yield from _read_existing(path, read))


def _read_existing(path: str, read: Callable[[str], Flow[bytes]]) -> Flow[bytes]:
    try:
        return (yield from read(path))
    except ObjectMissingError as error:
        raise AmbiguousWriteError(f"{path} may or may not have been written", path=path) from error


def read_optional(path: str, read: Callable[[str], Flow[bytes]] = read_whole) -> Flow[bytes | None]:
    """Content of a file, None if it is missing. Raises CorruptStateError for a file beyond the size of records."""
    try:
        return (yield from read(path))
    except ObjectMissingError:
        return None


def claim_checkpoint(paths: JobPaths, claim: ClaimRecord) -> Flow[ClaimRecord]:
    """Claim an id, its first record; returns the stored claim, ours if its nonce is."""
    path = paths.claim(claim.checkpoint_id)
    existing = yield from put_once(path, encode_record(claim))
    return decode_record(ClaimRecord, existing, path)


def decide_checkpoint(paths: JobPaths, checkpoint_id: int, content: bytes) -> Flow[Decision | None]:
    """Decide an id by one put-if-absent; returns None if these bytes are stored, else the stored decision."""
    existing = yield from put_once(paths.decision(checkpoint_id), content, read_metadata_file)
    return None if existing == content else decode_decision(existing)


def complete_savepoint(paths: JobPaths, record: SavepointRecord, snapshot: bytes) -> Flow[Decision | None]:
    """Write the savepoint's own `_metadata` into its folder, then decide the id: the pointer is the commit point."""
    path = metadata_path(record.folder)
    existing = yield from put_once(path, snapshot, read_metadata_file)
    if existing != snapshot:
        raise FencedError(f"{path} was written by another process", path=path)
    return (yield from decide_checkpoint(paths, record.checkpoint_id, encode_record(record)))


def abort_checkpoint(paths: JobPaths, record: AbortRecord) -> Flow[Decision | None]:
    """Decide an id as ABORTED; returns None if this record is stored, else the stored decision."""
    return (yield from decide_checkpoint(paths, record.checkpoint_id, encode_record(record)))


def probe_folder(folder: str, nonce: str) -> Flow[None]:
    """Raise the storage's error unless a savepoint's folder can be written. Runs before an id is claimed for it."""
    path = f"{folder}/_probe-{nonce}"
    yield PutIfAbsent(path, b"")
    yield DeleteFile(path)


def discard_folder(folder: str) -> Flow[int]:
    """Delete the files of an aborted id, all but its claim and its decision; returns how many."""
    return (yield from delete_files((yield from _list_discarded(folder))))


def _list_discarded(folder: str) -> Flow[list[str]]:
    files: list[str] = yield ListFiles(folder)
    kept = {claim_path(folder), metadata_path(folder)}
    return [path for path in files if path not in kept]


def drop_checkpoint(paths: JobPaths, checkpoint_id: int, shared: Sequence[str] = (), after: Sequence[int] = ()) -> Flow[None]:
    """Delete an id: its claim first, so that a crash leaves an orphan and no checkpoint.

    `shared`: names of shared files to delete with it; besides it, only the ids of `after` refer to them, which are being deleted,
    too. The claims of all of these are deleted before the shared files."""
    yield DeleteFile(paths.claim(checkpoint_id))
    yield DeleteFolder(paths.checkpoint(checkpoint_id))
    for other in after:
        yield DeleteFile(paths.claim(other))
    yield from discard_shared(paths, shared)


def discard_shared(paths: JobPaths, names: Sequence[str]) -> Flow[None]:
    """Delete shared files in any order. No checkpoint refers to them."""
    yield from delete_files(f"{paths.shared}/{name}" for name in names)


def sweep_shared(paths: JobPaths, checkpoint_id: int) -> Flow[None]:
    """Delete the shared files that an aborted id wrote, found by the id in their names: no checkpoint refers to them."""
    names: list[str] = yield ListFolder(paths.shared)
    yield from discard_shared(paths, [name for name in names if writer_of(name) == checkpoint_id])


def sweep_checkpoints(paths: JobPaths, checkpoints: Sequence[RecordedCheckpoint]) -> Flow[None]:
    """Delete the state of aborted ids, a savepoint's whole folder included. Files are deleted in any order: after a crash the next
    sweep finds the rest."""
    found: list[list[str]] = yield InParallel([_sweep(paths, each) for each in checkpoints], [0] * len(checkpoints))
    yield from delete_files(path for files in found for path in files)


def _sweep(paths: JobPaths, checkpoint: RecordedCheckpoint) -> Flow[list[str]]:
    """Delete an aborted savepoint's folder; returns the files to delete in the job's directory. If the savepoint's storage can't be
    reached, its files stay: garbage is no reason to refuse a recovery."""
    claim = checkpoint.claim
    if claim is not None and claim.kind.is_savepoint:
        try:
            yield DeleteFolder(claim.folder)
        except (StorageUnavailableError, InvalidConfigError):
            return []
    return (yield from _list_discarded(paths.checkpoint(checkpoint.checkpoint_id)))


def write_submission(paths: JobPaths, record: SubmissionRecord) -> Flow[SubmissionRecord]:
    """Record a submission; returns the stored record of the number, ours if its nonce is. Raises FencedError if the number is void:
    another leader leads the job now; InvalidConfigError beyond SUBMISSION_BYTES_MAX."""
    path, content = paths.submission(record.number), encode_record(record)
    if len(content) > SUBMISSION_BYTES_MAX:
        raise InvalidConfigError(
            f"the submission of job {paths.job_id} has {len(content)} bytes with the functions of its graph; "
            f"at most {SUBMISSION_BYTES_MAX} are stored",
            job=paths.job_id,
        )
    existing = yield from put_once(path, content, read_submission)
    if is_void(existing):
        raise FencedError(f"another coordinator leads job {paths.job_id} on, not epoch {record.epoch}", job=paths.job_id)
    return decode_record(SubmissionRecord, existing, path)


def void_submission(paths: JobPaths, record: VoidRecord) -> Flow[bool]:
    """Take a number so that no stale leader records a submission under it; False if a submission has it."""
    return is_void((yield from put_once(paths.submission(record.number), encode_record(record), read_submission)))


def write_attempt(paths: JobPaths, record: AttemptRecord) -> Flow[AttemptRecord]:
    """Record an attempt; returns the stored record of the number, ours if its nonce is."""
    path = paths.attempt(record.attempt)
    return decode_record(AttemptRecord, (yield from put_once(path, encode_record(record))), path)


def write_result(paths: JobPaths, record: ResultRecord) -> Flow[ResultRecord]:
    """Record the end of a submission; returns the stored record: the first one wins."""
    path = paths.result(record.submission)
    return decode_record(ResultRecord, (yield from put_once(path, encode_record(record))), path)


def write_config(paths: JobPaths, record: ConfigRecord) -> Flow[ConfigRecord]:
    """Record changed settings; returns the stored record of the number."""
    path = paths.config(record.number)
    return decode_record(ConfigRecord, (yield from put_once(path, encode_record(record))), path)


def list_jobs() -> Flow[list[str]]:
    """Ids of all jobs in the state directory."""
    names: list[str] = yield ListFolder("")
    jobs = [name.rstrip("/") for name in names if name.endswith("/")]
    return [name for name in jobs if is_job_id(name)]


def read_job(paths: JobPaths, known: RecordedJob | None = None) -> Flow[RecordedJob]:
    """Everything that the job's directory holds. Raises CorruptStateError that names a damaged record.

    `known`: an earlier reading of the job. Records that never change are not read again: submissions, which may be megabytes with
    the functions of their graphs, results, and aborted ids, which can only be deleted. Each leader adds one number and one id."""
    listed = yield from _list_job(paths)
    known = known if known is not None else RecordedJob(paths.job_id, (), {}, {}, {}, {})
    unread = [number for number in listed.numbers if number not in known.submissions and number not in known.voids]
    ended = [number for number in listed.results if number not in known.results]
    aborted = {number: each for number, each in known.checkpoints.items() if each.is_aborted}
    # Listed records are written once, so they can be read in any order, and in parallel.
    readers: list[Callable[[], Flow[Any]]] = [partial(_read_number, paths.submission(number)) for number in unread]
    readers += [partial(_read_record, AttemptRecord, paths.attempt(number)) for number in listed.attempts]
    readers += [partial(_read_record, ResultRecord, paths.result(number)) for number in ended]
    readers += [partial(read_checkpoint, paths, number) for number in listed.ids if number not in aborted]
    read = iter((yield from read_in_group(readers)))  # in the order of the readers
    job = _with_numbers(known, listed.numbers, {number: next(read) for number in unread})
    attempts = {number: next(read) for number in listed.attempts}
    results = {number: known.results[number] for number in listed.results if number in known.results}
    results |= {number: next(read) for number in ended}
    found = {number: aborted[number] if number in aborted else next(read) for number in listed.ids}
    checkpoints = {number: _owned(each, job.given.get(number)) for number, each in found.items()}
    job = replace(
        job,
        epochs=listed.epochs,
        attempts=attempts,
        results=results,
        checkpoints=checkpoints,
        shared=listed.shared,
        labelled=listed.labelled,
    )
    return (yield from _with_configs(paths, job, listed.configs))


@dataclass(frozen=True, slots=True)
class _Listed:
    """Listing of a job's directory."""

    epochs: tuple[int, ...]
    numbers: list[int]
    """Of submissions and of VoidRecords."""
    attempts: list[int]
    """The last two."""
    results: list[int]
    ids: list[int]
    """Of checkpoints."""
    shared: tuple[str, ...]
    configs: list[int]
    labelled: tuple[int, ...]


def _list_job(paths: JobPaths) -> Flow[_Listed]:
    epochs: list[str] = yield ListFolder(paths.leaders)
    numbers: list[int] = yield from _numbers(paths.submissions)
    attempts: list[int] = yield from _numbers(paths.attempts)
    results: list[int] = yield from _numbers(paths.results)
    folders: list[str] = yield ListFolder(paths.job_id)
    shared: list[str] = []
    if f"{SHARED_FOLDER}/" in folders:
        shared = yield ListFolder(paths.shared)
    configs: list[int] = []
    if f"{CONFIG_FOLDER}/" in folders:
        configs = yield from _numbers(paths.configs)
    labelled: list[int] = []
    if f"{LABELS_FOLDER}/" in folders:
        labelled = yield from _numbers(paths.labels)
    return _Listed(
        epochs=tuple(sorted(int(name) for name in epochs if name.isdecimal())),
        numbers=numbers,
        attempts=attempts[-2:],
        results=results,
        ids=[number for number in map(parse_checkpoint_name, folders) if number is not None],
        shared=tuple(shared),
        configs=configs,
        labelled=tuple(labelled),
    )


def _with_numbers(known: RecordedJob, numbers: list[int], read: Mapping[int, SubmissionRecord | VoidRecord]) -> RecordedJob:
    """A job with its submissions, and with the checkpoints and claims of its VoidRecords."""
    voids = {number: record for number, record in read.items() if isinstance(record, VoidRecord)}
    submissions = {number: known.submissions[number] for number in numbers if number in known.submissions}
    return replace(
        known,
        submissions=submissions | {number: record for number, record in read.items() if isinstance(record, SubmissionRecord)},
        last_submission=max(numbers, default=0),
        given={**known.given, **{void.given: void.owner for void in voids.values() if void.given and void.owner is not None}},
        returned=known.returned | {void.returned for void in voids.values() if void.returned},
        voids=known.voids.union(voids),
        seals={**known.seals, **{void.epoch: void.config for void in voids.values() if void.config is not None}},
    )


def _with_configs(paths: JobPaths, job: RecordedJob, numbers: list[int]) -> Flow[RecordedJob]:
    """A job with its changed settings: records are read from the newest on, back to the one that holds. As a rule that is one."""
    newest = job.newest_submission
    configs: dict[int, ConfigRecord] = {}
    for number in reversed(numbers):
        known = job.configs.get(number)
        configs[number] = known if known is not None else (yield from _read_record(ConfigRecord, paths.config(number)))
        is_older = newest is not None and configs[number].submission < newest.number
        if newest is None or is_older or not is_late(configs[number], job.seals):
            break
    return replace(job, configs=configs, last_config=max(numbers, default=0))


def _owned(checkpoint: RecordedCheckpoint, owner: OwnerRecord | None) -> RecordedCheckpoint:
    """`owner`: the job that claimed it; a record without job id is its user's, who deletes it."""
    if owner is None:
        return checkpoint
    return msgspec.structs.replace(checkpoint, owner=owner.job_id, is_disposed=not owner.job_id)


def _read_number(path: str) -> Flow[SubmissionRecord | VoidRecord]:
    content = yield from read_submission(path)
    return decode_record(VoidRecord, content, path) if is_void(content) else decode_record(SubmissionRecord, content, path)


def _read_record(kind: type[R], path: str) -> Flow[R]:
    return decode_record(kind, (yield from read_whole(path)), path)


def read_submission(path: str) -> Flow[bytes]:
    """Bytes of a SubmissionRecord or VoidRecord."""
    return read_whole(path, SUBMISSION_BYTES_MAX)


def read_checkpoint(paths: JobPaths, checkpoint_id: int) -> Flow[RecordedCheckpoint]:
    """The register of one id. The decision is read after the claim: if it is deleted meanwhile, the id looks undecided at worst."""
    claim = yield from read_optional(paths.claim(checkpoint_id))
    metadata = yield from read_optional(paths.decision(checkpoint_id), read_metadata_file)
    record = None if claim is None else decode_record(ClaimRecord, claim, paths.claim(checkpoint_id))
    return derive_checkpoint(checkpoint_id, record, metadata)


def _numbers(folder: str) -> Flow[list[int]]:
    names: list[str] = yield ListFolder(folder)
    stems = (name.removesuffix(".json") for name in names)
    return sorted(int(stem) for stem in stems if stem.isdecimal())
