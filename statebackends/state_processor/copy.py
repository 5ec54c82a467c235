"""Copy of a snapshot to another folder, as a self-contained savepoint: each file is checked on the way, `_metadata` comes last.

Several files are copied at one time, and only these lie in the scratch folder. A copy that fails deletes its files; one that dies
leaves a folder without `_metadata`, which is no snapshot. How the folder is claimed is for writing.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import msgspec

from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import FileHandle, SegmentHandle, StateHandle
from holdfast.statebackends.layout import CLAIM_NAME, METADATA_NAME, OWNER_NAME, UNFINISHED_NAME
from holdfast.statebackends.snapshot.in_flight import storing_uid
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.snapshot.parts import snapshot_files
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.writing import claimed_folder
from holdfast.statebackends.storage.port import Storage, transfers_between

RESERVED_NAMES = (OWNER_NAME, CLAIM_NAME)
"""Names of a coordinator's records in a snapshot's folder: no copied file may have them."""


@dataclass(frozen=True, slots=True)
class _File:
    operator: str
    subtask: int
    path: str
    """Path in the source's storage."""
    handle: FileHandle


def copy_snapshot(source: StoredSnapshot, storage: Storage, folder: str, *, nonce: str = "") -> StoredSnapshot:
    """Copy a snapshot into a folder of a storage, which must be new or empty. Files keep their formats; a segment becomes a file of
    its own, and a checkpoint a savepoint. Records in flight are copied with it.

    External files keep their names, and are not copied. `nonce`: unique to this writer; drawn unless given. Raises
    CorruptStateError for a damaged source, InvalidConfigError for a folder in use, StorageUnavailableError; the folder is then as
    it was."""
    files = _files(source)
    names = _new_names(source, files)
    metadata = _renamed(source, names)
    with claimed_folder(storage, folder, "copy", nonce) as target, source.reader() as reader:

        def carry(file: _File, name: str, local: str) -> None:
            reader.copy(file.handle, operator=file.operator, subtask=file.subtask, target=local)
            target.upload(local, name, expected=(file.handle.length, file.handle.checksum))
            reader.discard(local)

        calls = [partial(carry, file, names[place], reader.new_path("part")) for place, file in files.items()]
        transfers_between(source.storage, storage).run(calls, [file.handle.length for file in files.values()])
        target.finish(METADATA_NAME, encode_metadata(metadata))
    return StoredSnapshot(metadata, storage, folder)


_Place: TypeAlias = tuple[str, int | None]
"""(path in the source's storage, offset of a segment; None: the whole file)."""


def _place_of(source: StoredSnapshot, handle: FileHandle, operator: str) -> _Place:
    return source.path_of(handle.path, operator=operator), handle.offset if isinstance(handle, SegmentHandle) else None


def _files(source: StoredSnapshot) -> dict[_Place, _File]:
    """Each file or segment of the source, once. Raises CorruptStateError."""
    files: dict[_Place, _File] = {}
    for handle, uid, subtask in snapshot_files(source.metadata):
        place = _place_of(source, handle, uid)
        file = files.setdefault(place, _File(uid, subtask, place[0], handle))
        if (file.handle.length, file.handle.checksum) != (handle.length, handle.checksum):
            raise CorruptStateError(
                f"operator {uid!r} subtask {subtask}: {place[0]} is named with two checksums",
                path=place[0],
                operator=uid,
                reason="contents",
            )
    return files


def _new_names(source: StoredSnapshot, files: dict[_Place, _File]) -> dict[_Place, str]:
    """Names in the copy: unchanged for files of the source's folder; new ones for files outside of it, and for segments."""
    inside = f"{source.folder}/"
    taken = {METADATA_NAME, UNFINISHED_NAME, *RESERVED_NAMES}
    names: dict[_Place, str] = {}
    for place in sorted(files, key=lambda place: (not place[0].startswith(inside), place[0], place[1] or 0)):
        path, offset = place
        name = path.removeprefix(inside) if path.startswith(inside) else path.rpartition("/")[2]
        if offset is not None:
            name = f"{name}-{offset}"
        candidate, number = name, 1
        while candidate in taken:
            number += 1
            candidate = f"{number}-{name.replace('/', '-')}"
        taken.add(candidate)
        names[place] = candidate
    return names


def _renamed(source: StoredSnapshot, names: dict[_Place, str]) -> SnapshotMetadata:
    def part(handle: StateHandle, uid: str) -> StateHandle:
        if not isinstance(handle, FileHandle):
            return handle
        return FileHandle(names[_place_of(source, handle, uid)], handle.length, handle.checksum)

    operators = []
    for operator in source.metadata.operators:
        subtasks = [
            msgspec.structs.replace(
                state,
                keyed=tuple(
                    msgspec.structs.replace(keyed, parts=tuple(part(each, operator.uid) for each in keyed.parts))
                    for keyed in state.keyed
                ),
                operator=tuple(msgspec.structs.replace(listed, part=part(listed.part, operator.uid)) for listed in state.operator),
            )
            for state in operator.subtasks
        ]
        operators.append(msgspec.structs.replace(operator, subtasks=tuple(subtasks)))
    kind = "savepoint" if source.metadata.kind == "checkpoint" else source.metadata.kind
    copied = msgspec.structs.replace(source.metadata, kind=kind, operators=tuple(operators))
    channels = tuple(msgspec.structs.replace(each, part=part(each.part, storing_uid(each))) for each in source.metadata.in_flight)
    return msgspec.structs.replace(copied, channels=channels) if channels else copied
