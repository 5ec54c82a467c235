"""`<state-dir>/_coordinator.json`: where the coordinator of a state directory listens, for restarts and for the CLI.

A hint for people and programs, written atomically. It decides nothing: leadership rests on the store's epochs."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.layout import RUN_FILE
from holdfast.statebackends.storage.permissions import permissions_of


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


def read_run_record(state_dir: Path) -> RunRecord | None:
    """Read the last coordinator's record; None if there is none or it can't be parsed."""
    try:
        return decode_json((state_dir / RUN_FILE).read_bytes(), RunRecord)
    except (OSError, *UNDECODABLE):
        return None


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
