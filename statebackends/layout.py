"""Names of files of state: `<uid>-<subtask>-<attempt>-<nonce>-<file>` in a snapshot's folder, and files that checkpoints of one
job share: `<job>/shared/<id>-<attempt>-<uid>-<subtask>-<nonce>-<file>`.

A name says who wrote the file, never what is in it. In `_metadata` of `chk-N` a shared one is the path `../shared/<name>`, the
only path that leads out of a snapshot's folder. Pure; who refers to which file is the coordinator's business."""

from __future__ import annotations

import re
from functools import lru_cache

KEY_GROUP, NAMESPACE, MAP_KEY, POSITION, VALUE = "key_group", "namespace", "map_key", "position", "value"
TTL_STAMP = "ttl_stamp_ms"
"""State with TTL: when the value was last written (or read), ms since the epoch; see ttl.py."""
STATE_METADATA = b"holdfast.state"
"""Key in the schema's metadata: the StateMeta as JSON."""

SHARED_FOLDER = "shared"
TASK_OWNED_FOLDER = "taskowned"
"""Beside `shared` in a job's directory: files there belong to tasks, and the coordinator deletes none of them (Flink's layout)."""
_PREFIX = f"../{SHARED_FOLDER}/"
_CHECKPOINT_FOLDER = re.compile(r"(?:.*/)?chk-[0-9]+")
_WRITER = re.compile(r"([1-9][0-9]{0,17})-")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")

UID_CHARS_MAX = 80
"""Characters of a uid that go into a file name; nonce and position in the chain make it unique."""


@lru_cache(4_096)
def uid_in_names(uid: str) -> str:
    """An operator's uid as it stands in the names of its files."""
    return _UNSAFE.sub("_", uid)[:UID_CHARS_MAX]


def exclusive_prefix(uid: str, subtask: int, attempt: int) -> str:
    """How the names of files begin that one subtask of an operator writes into the folder of a snapshot; a nonce follows."""
    return f"{uid_in_names(uid)}-{subtask}-{attempt}-"


def shared_prefix(checkpoint_id: int, uid: str, subtask: int, attempt: int) -> str:
    """As `exclusive_prefix`, of files that later checkpoints may share."""
    return f"{checkpoint_id}-{attempt}-{uid_in_names(uid)}-{subtask}-"


def shared_path(name: str) -> str:
    """Path of a shared file relative to a checkpoint's folder."""
    return _PREFIX + name


def shared_name(path: str) -> str | None:
    """The name in `../shared/<name>`; None for any other path."""
    name = path.removeprefix(_PREFIX)
    if name == path or "/" in name or "\0" in name or name in ("", ".", ".."):
        return None
    return name


def writer_of(name: str) -> int | None:
    """Id of the checkpoint that a shared file was written for; None for a name that no checkpoint made."""
    found = _WRITER.match(name)
    return int(found[1]) if found is not None else None


def is_checkpoint_folder(folder: str) -> bool:
    """Whether a folder is a checkpoint's within its job's directory: `<job>/chk-42`."""
    return _CHECKPOINT_FOLDER.fullmatch(folder) is not None
