"""SHELL: the authority in the state directory, and its certificate where clients of this machine find it.

On a local directory the key's file is its owner's alone (0600), also where the directory is shared with a group: members of one
directory run as one user. On S3 it is an object as all others: who can read the bucket holds the state of all jobs anyway."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
from pathlib import Path

from holdfast.api.tls.authority import Authority, draw_authority, read_authority
from holdfast.coordinator.ha.store import put_once
from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.layout import AUTHORITY_FILE, CA_FILE
from holdfast.statebackends.storage import is_s3
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.permissions import permissions_of
from holdfast.statebackends.storage.port import run_flow


def open_authority(location: str) -> Authority:
    """The authority of a state directory, drawn at its first use; concurrent starts agree on one. Raises CorruptStateError,
    StorageUnavailableError."""
    drawn = draw_authority(datetime.datetime.now(datetime.UTC)).stored()
    if is_s3(location):
        return read_authority(run_flow(put_once(AUTHORITY_FILE, drawn), open_storage(location)))
    path = Path(location) / AUTHORITY_FILE
    try:
        if not path.exists():
            _create(path, drawn, Path(location))
        return read_authority(path.read_bytes())
    except OSError as error:
        raise StorageUnavailableError(f"can't read or write the authority {path}: {error}", path=str(path)) from error


def _create(path: Path, content: bytes, directory: Path) -> None:
    permissions = permissions_of(directory)
    for folder in (path.parent.parent, path.parent):
        with contextlib.suppress(FileExistsError):
            permissions.make_folder(str(folder))
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another member was first: its authority counts
            os.link(temporary, path)
    finally:
        temporary.unlink()


def publish_certificate(authority: Authority, state_dir: Path) -> Path:
    """Write the authority's certificate where clients of the state directory on this machine look for it; returns its path. Raises
    StorageUnavailableError."""
    path = state_dir / CA_FILE
    temporary = path.with_name(f"{CA_FILE}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(permissions_of(state_dir).create_file(str(temporary)), "wb") as file:
            file.write(authority.certificate_pem)
        os.replace(temporary, path)
    except OSError as error:
        raise StorageUnavailableError(f"can't write {path}: {error}", path=str(path)) from error
    return path
