"""`<state-dir>/_coordinator.json`: where the coordinator of a state directory listens, for restarts, workers and the CLI.

A hint for people and programs, written atomically. It decides nothing: leadership rests on the store's epochs. Whoever writes into
the directory may put anything in its place, so a reader waits for nothing, and reads no more than a record has."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

import msgspec

from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.layout import RUN_FILE
from holdfast.statebackends.storage.permissions import permissions_of

RUN_RECORD_BYTES_MAX = 64 * 1024


class RunRecord(msgspec.Struct, frozen=True):
    """Address on which a coordinator listens, or listened last."""

    url: str
    pid: int
    host: str
    """The machine's name: a pid is meaningless elsewhere."""
    port: int
    token_file: str | None = None
    """None: no token is needed, or it was given by other means."""
    ca_file: str | None = None
    """Certificates that clients trust; None: those of their system, or there is no TLS."""


def read_run_record(state_dir: str | os.PathLike[str]) -> RunRecord | None:
    """Read the last coordinator's record; None if there is none, or what is there is no record."""
    try:
        return decode_json(read_small_file(os.path.join(state_dir, RUN_FILE)), RunRecord)
    except (OSError, ValueError, *UNDECODABLE):  # ValueError: a directory whose name no file can have
        return None


def read_small_file(path: str) -> bytes:
    """A file of at most RUN_RECORD_BYTES_MAX; nothing of one that is larger, or is none. Raises OSError, and ValueError for a name
    that no file can have."""
    with open(path, "rb", opener=_open_at_once) as file:
        is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        content = file.read(RUN_RECORD_BYTES_MAX + 1) if is_file else b""
    return content if len(content) <= RUN_RECORD_BYTES_MAX else b""


def _open_at_once(path: str, flags: int) -> int:
    """A pipe would be waited for until somebody writes into it."""
    return os.open(path, flags | os.O_NONBLOCK)


def write_run_record(state_dir: Path, record: RunRecord) -> None:
    """Replace the record. Raises StorageUnavailableError."""
    path = state_dir / RUN_FILE
    temporary = path.with_name(f"{RUN_FILE}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(permissions_of(state_dir).create_file(str(temporary)), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
        os.replace(temporary, path)
    except OSError as error:
        raise StorageUnavailableError(f"can't write {path}: {error}", path=str(path)) from error
