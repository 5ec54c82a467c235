"""Flows that label snapshots and begin their deletion: a labelled one is not deleted.

Labels are a register beside the snapshot: records `_label-<n>`, each created once, of which the highest holds. Who labels a
snapshot and who deletes it both create the next record, so that one of them comes second and reads the other's: a label beats a
deletion that has not begun, or is refused. That holds for any process on the storage, a leader that was replaced and a tool without
one included. Nothing else about labels is trusted: a file in `labels/` only tells where to look, and a job's history only what was
done."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from holdfast.barriers.messages import CheckpointKind, clip
from holdfast.coordinator.ha.recorded_job import Completed, RecordedCheckpoint, RecordedJob
from holdfast.coordinator.ha.records import (
    AbortRecord,
    ClaimRecord,
    LabelRecord,
    SavepointRecord,
    decode_record,
    encode_record,
)
from holdfast.coordinator.ha.store import put_once, read_checkpoint, read_optional
from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    CorruptStateError,
    HoldfastError,
    InvalidConfigError,
    NotFoundError,
    SnapshotLabelledError,
    StorageUnavailableError,
)
from holdfast.statebackends.layout import JobPaths, claim_path, label_path, metadata_path
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.flows import read_in_group
from holdfast.statebackends.storage.port import DeleteFile, Flow, ListFolder, PutIfAbsent, StatFile

LABELS_MAX = 100
"""Labels of one job. Labels that are given at the same moment may be a few more, and those that Holdfast gives itself for a while
have room beside them: no user's labels keep a key from being forgotten."""
LABELS_OF_ONE_MAX = 20
"""Labels of one snapshot."""
LABEL_CHARS_MAX = 64
RECORDS_MAX = 1_000
"""Records of one register, that of its deletion included: so often labels of a snapshot change."""
_RECORDS_KEPT = 100
"""Of these, how many are kept for removals and for the deletion."""
_IN_TURN = 4
"""The first records of a register are read one after the other: most have no more."""
RESTORE_PREFIX = "label:"
"""In front of a label where a snapshot is named."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Mark:
    """Who writes a record, and when (wall clock)."""

    nonce: str
    now_ms: int


class LabelView(msgspec.Struct, frozen=True):
    """A label, and the snapshot that it keeps."""

    label: str
    checkpoint_id: int
    kind: CheckpointKind
    folder: str
    """Of a checkpoint relative to the state directory, of a savepoint absolute."""
    created_ms: int
    """When it was given; of a label from before that was recorded, when the snapshot's labels were last changed before."""
    timestamp_ms: int = -1
    """When the snapshot was triggered; -1: not read."""


class LabelList(msgspec.Struct, frozen=True):
    """Labels of a job, by name."""

    labels: tuple[LabelView, ...]
    damage: tuple[str, ...] = ()
    """Registers that can't be read: their snapshots are not deleted, and their labels not known."""
    gone: tuple[int, ...] = ()
    """Ids that had labels, and were deleted since."""


FORGETTING_LABEL = re.compile(r"forgetting[0-9a-f]{16}")
"""What keeps a checkpoint while it is looked at for a key that was to be forgotten. One that is left over is removed by the next
call, so nobody else may give such a label."""

DRILLING_LABEL = re.compile(r"drilling[0-9a-f]{16}")
"""What keeps a checkpoint while it is drilled; likewise."""


def is_passing(label: str) -> bool:
    """Whether Holdfast gives it for a drill or a forgetting, and removes it itself."""
    return FORGETTING_LABEL.fullmatch(label) is not None or DRILLING_LABEL.fullmatch(label) is not None


def check_users_label(label: str) -> str:
    """The label. Raises InvalidConfigError for one that is none, or that Holdfast gives and removes itself."""
    if is_passing(label):
        text = f"the label {label!r} is of a form that Holdfast gives and removes itself: choose another one"
        raise InvalidConfigError(text, setting="label")
    return check_label(label)


def check_label(label: str) -> str:
    """The label. Raises InvalidConfigError for one that is none: it would be part of a path or a page."""
    if len(label) > LABEL_CHARS_MAX or _NAME.fullmatch(label) is None:
        raise InvalidConfigError(
            f"a label has 1 to {LABEL_CHARS_MAX} letters, digits, '.', '_' and '-', and begins with a letter or digit: "
            f"{clip(label, LABEL_CHARS_MAX)!r} does not",
            setting="label",
        )
    return label


# --------------------------------------------------------------------------------------------------------- the register


def read_register(folder: str, nonce: str = "") -> Flow[LabelRecord | None]:
    """The record that holds for the snapshot in a folder; None: it never had a label. `nonce`: for a file by which a folder of
    several names is known; without it the record of another name does not count.

    Raises CorruptStateError."""
    _, newest = yield from _read(folder, nonce)
    return newest


def _read(folder: str, nonce: str, first: bytes | None = None) -> Flow[tuple[int, LabelRecord | None]]:
    """How many records there are, and the last one if it counts. Who writes the next one builds on both, and on nothing else.

    `first`: the first record, if it has been read. Numbers have no gaps, so that the last one is found by halves where there are
    many: 900 changes cost some 20 reads. Whoever is wrong about it does not create the next record, but reads it."""
    found = first if first is not None else (yield from read_optional(label_path(folder, 1)))
    if found is None:
        return 0, None
    last, missing = 1, RECORDS_MAX + 1
    while missing - last > 1:
        number = _probe(last, missing)
        content = yield from read_optional(label_path(folder, number))
        if content is None:
            missing = number
        else:
            last, found = number, content
    newest = _decoded(found, label_path(folder, last), last)
    return last, newest if (yield from is_of_folder(newest.folder, folder, nonce)) else None


def _probe(last: int, missing: int) -> int:
    """The next number to look for, between one that is there and one that is not, or is beyond the bound."""
    if last < _IN_TURN:
        return last + 1
    return min(2 * last, RECORDS_MAX) if missing > RECORDS_MAX else (last + missing) // 2


def begin_deletion(folder: str, mark: Mark) -> Flow[tuple[str, ...]]:
    """Take the register of a snapshot for its deletion. Returns the labels that keep it; none: it may be deleted, now and later.

    Raises CorruptStateError for a register that can't be read, and as storage does: nothing may be deleted then."""
    count = 0
    for _ in range(RECORDS_MAX):
        number = count + 1
        mine = encode_record(LabelRecord(number, (), mark.nonce, folder, deleting=True, created_ms=mark.now_ms))
        content = yield from put_once(label_path(folder, number), mine)
        if content == mine:
            return ()
        count, newest = yield from _read(folder, mark.nonce, content if number == 1 else None)
        if newest is not None and newest.deleting:
            return ()
        if newest is not None and newest.labels:
            return newest.labels
        if count >= RECORDS_MAX:
            break
    raise _overfull(folder)


def _decoded(content: bytes, path: str, number: int) -> LabelRecord:
    record = decode_record(LabelRecord, content, path)
    is_odd = record.number != number or len(record.labels) > LABELS_OF_ONE_MAX or (record.deleting and record.labels)
    if is_odd or len(record.given_ms) not in (0, len(record.labels)):
        reason = "it is no record of labels"
        raise CorruptStateError(f"{path} can't be: {reason}", path=path, operator=None, reason=reason)
    try:
        for label in record.labels:
            check_label(label)
    except InvalidConfigError as error:
        raise CorruptStateError(f"{path}: {error.message}", path=path, operator=None, reason="a name that is no label") from error
    return record


def _overfull(folder: str) -> CorruptStateError:
    reason = f"more than {RECORDS_MAX} records"
    return CorruptStateError(f"{folder} has {reason} of its labels", path=label_path(folder, 1), operator=None, reason=reason)


def _change(folder: str, mark: Mark, *, add: str = "", remove: str = "") -> Flow[LabelRecord | None]:
    """Add or remove a label; the record that holds then, None if it is not this call that wrote it: the label was there, or was
    not. Raises SnapshotLabelledError if the snapshot's deletion has begun, InvalidConfigError beyond the bounds."""
    while True:
        count, newest = yield from _read(folder, mark.nonce)
        has = newest.times() if newest is not None else {}
        if newest is not None and newest.deleting:
            raise _being_deleted(folder)
        wanted = {name: has.get(name, mark.now_ms) for name in sorted({*has, add} - {remove, ""})}
        if wanted == has:
            return None
        number = count + 1
        if add and (len(wanted) > LABELS_OF_ONE_MAX or number > RECORDS_MAX - _RECORDS_KEPT):
            raise InvalidConfigError(f"{folder} has too many labels, or changed them too often: remove some", setting="label")
        if number > RECORDS_MAX:
            raise _overfull(folder)
        mine = LabelRecord(number, tuple(wanted), mark.nonce, folder, created_ms=mark.now_ms, given_ms=tuple(wanted.values()))
        content = encode_record(mine)
        if (yield from put_once(label_path(folder, number), content)) == content:
            return mine


def is_of_folder(recorded: str, folder: str, nonce: str) -> Flow[bool]:
    """Whether a record that names `recorded` is of this folder, by any name, and not of one that this is a copy of: a file that is
    made here is seen there.

    A location that this storage can't have is another folder. Raises StorageUnavailableError if storage can't tell: a copy would
    otherwise be assumed, and the snapshot taken from its owner."""
    if recorded in ("", folder):
        return True
    if not nonce or not (is_absolute_folder(recorded) and is_absolute_folder(folder)):
        return False
    probe = f"_probe-{nonce}"
    yield PutIfAbsent(f"{folder}/{probe}", b"")
    try:
        seen = (yield StatFile(f"{recorded}/{probe}")) is not None
    except InvalidConfigError:
        seen = False
    except HoldfastError:
        yield DeleteFile(f"{folder}/{probe}")
        raise
    yield DeleteFile(f"{folder}/{probe}")
    return seen


def _being_deleted(folder: str) -> SnapshotLabelledError:
    return SnapshotLabelledError(f"{folder} can't be labelled: its deletion has begun", path=folder, labels=[])


def kept_error(folder: str, labels: Sequence[str]) -> SnapshotLabelledError:
    """Error of a deletion that a label refuses."""
    named = ", ".join(map(repr, labels))
    text = f"{folder} is kept by its label {named}: `holdfast label JOB ID NAME --remove` removes one"
    return SnapshotLabelledError(text, path=folder, labels=list(labels))


# ------------------------------------------------------------------------------------------------------- labels of a job


@dataclass(frozen=True, slots=True)
class _Labelled:
    """The register of one id that may have labels."""

    checkpoint_id: int
    claim: ClaimRecord | None
    record: LabelRecord | None
    damage: str = ""


def read_labels(paths: JobPaths, ids: Iterable[int] | None = None) -> Flow[LabelList]:
    """Labels of a job, as the registers beside its snapshots have them. `ids`: those that may have any, if they are known.

    A register that can't be read is named."""
    if ids is None:
        names: list[str] = yield ListFolder(paths.labels)
        ids = sorted(int(name) for name in names if name.isdecimal())
    found = yield from read_in_group([partial(_read_labelled, paths, number) for number in ids])
    views = [
        LabelView(label, each.claim.checkpoint_id, each.claim.kind, each.claim.folder, given_ms)
        for each in found
        if each.claim is not None and each.record is not None
        for label, given_ms in each.record.times().items()
    ]
    views.sort(key=lambda view: (view.label, view.checkpoint_id))
    gone = tuple(each.checkpoint_id for each in found if each.claim is None and not each.damage)
    return LabelList(tuple(views), tuple(each.damage for each in found if each.damage), gone)


def _read_labelled(paths: JobPaths, checkpoint_id: int) -> Flow[_Labelled]:
    path = paths.claim(checkpoint_id)
    try:
        content = yield from read_optional(path)
        if content is None:
            return _Labelled(checkpoint_id, None, None)
        claim = decode_record(ClaimRecord, content, path)
        return _Labelled(checkpoint_id, claim, (yield from read_register(claim.folder)))
    except (CorruptStateError, StorageUnavailableError, InvalidConfigError) as error:
        return _Labelled(checkpoint_id, None, None, error.message)


def add_label(paths: JobPaths, checkpoint_id: int, label: str, mark: Mark) -> Flow[LabelView]:
    """Give a completed checkpoint or savepoint a label; idempotent. It is not deleted from then on, until its labels are removed.

    Raises InvalidConfigError for a name that is no label, and beyond the bounds, NotFoundError for an id without a snapshot,
    SnapshotLabelledError if its deletion has begun or another id has the label, CorruptStateError."""
    check_label(label)
    claim, timestamp_ms = yield from _find_snapshot(paths, checkpoint_id)
    known = yield from read_labels(paths)
    _refuse_taken(known, label, checkpoint_id)
    mine = [view for view in known.labels if view.checkpoint_id == checkpoint_id and view.label == label]
    if mine:
        return msgspec.structs.replace(mine[0], timestamp_ms=timestamp_ms)
    if not is_passing(label) and sum(not is_passing(view.label) for view in known.labels) >= LABELS_MAX:
        raise InvalidConfigError(f"job {paths.job_id} has {LABELS_MAX} labels, which is the limit: remove one", setting="label")
    for number in known.gone:  # ids are never taken again
        yield DeleteFile(paths.labelled(number))
    yield from put_once(paths.labelled(checkpoint_id), b"\n")  # first: no label is without it
    try:
        yield from _change(claim.folder, mark, add=label)
    except AmbiguousWriteError as error:
        if (yield from _is_there(claim)):
            raise
        raise _being_deleted(claim.folder) from error  # with the record that was in our way
    if not (yield from _is_there(claim)):
        # Its deletion had begun, and removed the record that we would have read: ours keeps nothing.
        yield from _withdraw(claim, mark, label)
        raise _being_deleted(claim.folder)
    try:
        _refuse_taken((yield from read_labels(paths)), label, checkpoint_id)
    except SnapshotLabelledError:
        yield from _change(claim.folder, mark, remove=label)
        raise
    return LabelView(label, checkpoint_id, claim.kind, claim.folder, mark.now_ms, timestamp_ms)


def _refuse_taken(known: LabelList, label: str, checkpoint_id: int) -> None:
    """Of two that give one label to two ids at once, at least one sees the other, since each looks behind its write."""
    taken = [view for view in known.labels if view.label == label and view.checkpoint_id != checkpoint_id]
    if taken:
        other = taken[0].checkpoint_id
        raise SnapshotLabelledError(
            f"label {label!r} is that of checkpoint {other}: remove it there first", path=taken[0].folder, labels=[label]
        )


def _find_snapshot(paths: JobPaths, checkpoint_id: int) -> Flow[tuple[ClaimRecord, int]]:
    """Claim and time of an id that is complete and whose files are there. Raises NotFoundError."""
    found: RecordedCheckpoint = yield from read_checkpoint(paths, checkpoint_id)
    why = "there is no such checkpoint, or it was deleted"
    if found.claim is not None:
        match found.decision:
            case Completed() | SavepointRecord():
                if (yield from _is_there(found.claim)):
                    return found.claim, found.decision.timestamp_ms
                why = f"{found.claim.folder} was deleted or moved"
            case AbortRecord():
                why = f"it is no snapshot: it was aborted ({found.decision.reason.value})"
            case None:
                why = "it is not complete yet"
            case _:
                why = "what decided it can't be read"
    raise NotFoundError(
        f"job {paths.job_id} has no checkpoint {checkpoint_id} to label: {why}", job=paths.job_id, checkpoint=checkpoint_id
    )


def _is_there(claim: ClaimRecord) -> Flow[bool]:
    """Whether no deletion has got beyond its first file: of a checkpoint its claim goes first, of a savepoint `_metadata`."""
    first = metadata_path(claim.folder) if claim.kind.is_savepoint else claim_path(claim.folder)
    return (yield StatFile(first)) is not None


def _withdraw(claim: ClaimRecord, mark: Mark, label: str) -> Flow[None]:
    """Delete a record of ours from a folder that was deleted, so that no folder is left."""
    newest = yield from read_register(claim.folder, mark.nonce)
    if newest is not None and newest.nonce == mark.nonce and label in newest.labels:
        yield DeleteFile(label_path(claim.folder, newest.number))


def remove_label(paths: JobPaths, label: str, mark: Mark, checkpoint_id: int | None = None) -> Flow[tuple[LabelView, ...]]:
    """Remove a label, of one id or of all that have it; returns what was removed. The snapshot may be deleted from then on.

    Raises NotFoundError if no snapshot has it, CorruptStateError."""
    check_label(label)
    known = yield from read_labels(paths)
    having = [view for view in known.labels if view.label == label and checkpoint_id in (None, view.checkpoint_id)]
    if not having:
        raise _unknown(paths.job_id, label, known, checkpoint_id)
    for view in having:
        yield from _change(view.folder, mark, remove=label)
    return tuple(having)


def remove_passing(paths: JobPaths, job: RecordedJob, mark: Mark) -> Flow[None]:
    """Remove labels that drills and forgettings have given, of a job that has ended: nobody has use for them any more. A drill
    that is still under way ends in an error, at most."""
    if not job.labelled:
        return
    known = yield from read_labels(paths)
    for view in known.labels:
        if is_passing(view.label):
            yield from _change(view.folder, mark, remove=view.label)


def find_label(job_id: str, known: LabelList, label: str) -> LabelView:
    """The snapshot that a label names. Raises NotFoundError, and InvalidConfigError if several have it."""
    check_label(label)
    having = [view for view in known.labels if view.label == label]
    if not having:
        raise _unknown(job_id, label, known)
    if len(having) > 1:
        ids = ", ".join(str(view.checkpoint_id) for view in having)
        raise InvalidConfigError(f"label {label!r} is that of checkpoints {ids}: remove it from all but one", setting="label")
    return having[0]


def _unknown(job_id: str, label: str, known: LabelList, checkpoint_id: int | None = None) -> NotFoundError:
    """`checkpoint_id`: of which the label was named, if of one alone."""
    others = [str(view.checkpoint_id) for view in known.labels if view.label == label]
    if others and checkpoint_id is not None:
        text = f"checkpoint {checkpoint_id} of job {job_id} has no label {label!r}: it is that of {', '.join(others)}"
        return NotFoundError(text, job=job_id, checkpoint=checkpoint_id)
    names = ", ".join(sorted({view.label for view in known.labels})[:20]) or "none"
    damage = f" ({'; '.join(known.damage[:3])})" if known.damage else ""
    return NotFoundError(f"job {job_id} has no label {label!r}; it has {names}{damage}", job=job_id)


def find_kept(job: RecordedJob) -> Flow[frozenset[int]]:
    """Ids of a job that labels keep, or may: the register can't be read. No operation for a job without labels."""
    return frozenset((yield from find_keeping(job)))


def find_keeping(job: RecordedJob) -> Flow[dict[int, tuple[str, ...]]]:
    """The ids of `find_kept`, each with the labels that keep it; none where the register can't be read."""
    if not job.labelled:
        return {}
    found = yield from read_in_group([partial(_read_labelled, JobPaths(job.job_id), number) for number in job.labelled])
    keeping: dict[int, tuple[str, ...]] = {}
    for number, each in zip(job.labelled, found, strict=True):
        labels = each.record.labels if each.record is not None else ()
        if each.damage or labels:
            keeping[number] = () if each.damage else labels
    return keeping


DRILLED = (
    "a drill reads it, whose own label keeps it: ask again when the drill has ended; what a drill of a coordinator that died has "
    "left goes when the job is led or drilled again"
)
"""Why a checkpoint is kept that has no label of a user's. It passes by itself."""


def derive_keeping(labels: Sequence[str]) -> str:
    """Why a checkpoint with these labels is kept, as `find_keeping` gives them. Names of labels are users' texts, and not in it."""
    if not labels:
        return "its labels can't be read, and may keep it"
    return DRILLED if all(map(DRILLING_LABEL.fullmatch, labels)) else "a label keeps it"
