"""Mistakes with a worker's own disk: copies are not checked, a full disk is taken for damage, the wrong folders go or stay."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import holdfast.operators.worker.working_folders as working_folders_module
import holdfast.statebackends.local_recovery.storage as local_storage_module
import holdfast.statebackends.rocksdb.database as database_module
from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.layout import TABLE_SUFFIX
from holdfast.statebackends.local_recovery.copies import bring


def _is_what_is_there(original: Any) -> Any:
    return lambda copy, handle: Path(copy).read_bytes()


def _are_what_is_there(original: Any) -> Any:
    def pieces_content(copy: str, pieces: Any) -> bytes:
        start, stop = pieces[0].offset, max(piece.offset + piece.length for piece in pieces)
        return Path(copy).read_bytes()[start:stop]

    return pieces_content


def _places_what_is_there(original: Any) -> Any:
    def place(copy: str, local_path: str, handle: Any) -> bytes:
        Path(local_path).unlink(missing_ok=True)
        bring(copy, local_path, link=local_path.endswith(TABLE_SUFFIX))
        return b""

    return place


def _is_damage(original: Any) -> Any:
    def rocksdb_failure(error: BaseException, folder: str, *, opening: bool = False) -> CorruptStateError:
        return CorruptStateError(f"{folder} can't be opened by RocksDB: {error}", path=folder, reason="rocksdb")

    return rocksdb_failure


def _deletes_whole(original: Any) -> Any:
    def delete_dead(root: str, name: str) -> bool:
        shutil.rmtree(Path(root, name))
        return True

    return delete_dead


SABOTAGES = (
    Sabotage(
        "believed_copy",
        "a restore takes the copy of a file from its host's disk as it is there",
        ("I30", "I7", "I8", "I1", "I2"),
        (
            Mutant(local_storage_module, "_content", _is_what_is_there),
            Mutant(local_storage_module, "_segments_content", _are_what_is_there),
            Mutant(local_storage_module, "_place", _places_what_is_there),
        ),
        kinds=("damage_copies",),
    ),
    Sabotage(
        "full_is_corrupt",
        "a database that can't be opened is taken for a damaged one, whatever the disk says",
        ("I30",),
        (Mutant(database_module, "rocksdb_failure", _is_damage),),
        workloads=("counter",),
        kinds=("local_disk_full",),
        backend="rocksdb",
    ),
    Sabotage(
        "unswept_folders",
        "folders of killed workers stay on their host",
        ("I17",),
        (Mutant(working_folders_module, "_delete_dead", constant(False)),),
        workloads=("counter",),
        kinds=("kill_worker",),
        backend="rocksdb",
    ),
    Sabotage(
        "swept_living",
        "a worker deletes its neighbours' folders without asking who lives",
        ("I17",),
        (Mutant(working_folders_module, "_delete_dead", _deletes_whole),),
        workloads=("counter",),
        kinds=("kill_worker",),
        backend="rocksdb",
    ),
)
