"""`holdfast forget`: where the key comes from, and how the certificate is shown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from holdfast.api.cli import console
from holdfast.api.client import RestClient
from holdfast.api.snapshots.forgetting import Certificate, forget
from holdfast.statebackends.errors import InvalidConfigError, StorageUnavailableError

KEY_BYTES_MAX = 65_536

GivenKey: TypeAlias = tuple[str | None, Path | None, bool]
"""The key itself, its file, or that it is the empty text."""


def run_forget_at(
    client: RestClient,
    job_id: str,
    state: tuple[str, str],
    key: GivenKey,
    to: str,
    certificate: Path | None,
    *,
    keep_history: bool,
    as_json: bool,
) -> bool:
    """As `run_forget`, by the job's coordinator: of a running job, too."""
    _check_place(certificate)
    document = client.forget(job_id, [state], read_key(*key), to=to, keep_history=keep_history, empty_key=key[-1])
    return _shown(msgspec.convert(document, Certificate), certificate, as_json=as_json)


def run_forget(
    directory: str,
    job_id: str,
    state: tuple[str, str],
    key: GivenKey,
    to: str,
    others: tuple[Sequence[str], Sequence[str]],
    certificate: Path | None,
    *,
    keep_history: bool,
    as_json: bool,
) -> bool:
    """Forget, and show the certificate; returns whether it is complete. `others`: further savepoints, and local directories."""
    _check_place(certificate)
    found = forget(
        directory, job_id, [state], read_key(*key), to=to, snapshots=others[0], local=others[1], keep_history=keep_history
    )
    return _shown(found, certificate, as_json=as_json)


def _check_place(certificate: Path | None) -> None:
    """Raise InvalidConfigError for a file that can't be written: behind the erasure it would be too late to name another one."""
    if certificate is None:
        return
    try:
        is_new = not os.path.lexists(certificate)
        with certificate.open("ab"):
            pass
        if is_new:
            certificate.unlink()
    except OSError as error:
        message = f"the certificate can't be written to {certificate}: {error.strerror}; nothing was erased"
        raise InvalidConfigError(message, setting="certificate") from error


def _write(certificate: Path, content: bytes) -> None:
    """Raises StorageUnavailableError: the certificate was shown, and is on standard output alone."""
    try:
        certificate.write_bytes(content)
    except OSError as error:
        message = f"the key was forgotten, and the certificate could not be written to {certificate}: {error.strerror}"
        raise StorageUnavailableError(message, path=str(certificate)) from error


def _shown(found: Certificate, certificate: Path | None, *, as_json: bool) -> bool:
    """Shown first: what is deleted is deleted, and no file that can't be written must take away what says so."""
    document = msgspec.to_builtins(found)
    if as_json:
        console.show_json(document)
    else:
        _show(found)
    if certificate is not None:
        _write(certificate, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return found.is_complete


def read_key(key: str | None, file: Path | None, empty: bool) -> str:
    """The key: given, the text of a file, or the empty text, which must be asked for: a variable that is not set gives it, too.
    Raises InvalidConfigError, without the key."""
    if [key is not None, file is not None, empty].count(True) != 1:
        raise InvalidConfigError("say which key: give either --key or --key-file, or --empty-key", setting="key")
    found = _read(file) if file is not None else key or ""
    if not found and not empty:
        raise InvalidConfigError("the key is empty: give --empty-key for the key that is the empty text", setting="key")
    return found


def _read(file: Path) -> str:
    try:
        content = file.read_bytes()[:KEY_BYTES_MAX].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(f"the file of the key can't be read: {type(error).__name__}", setting="key_file") from error
    return content.removesuffix("\n").removesuffix("\r")


def _show(found: Certificate) -> None:
    if found.erased_at:
        _show_live(found)
    else:
        erased = ", ".join(f"{name} {rows:,}" for name, rows in sorted(found.erased_rows.items())) or "none"
        console.show_line(f"restore from   {found.result or '-'}")
        console.show_line(f"rows erased    {erased}")
    console.show_line(f"deleted        {len(found.deleted)} snapshots")
    records = ", ".join(f"{count:,} files of {folder.rpartition('/')[2]}" for folder, count in sorted(found.erased_records.items()))
    console.show_line(f"records        {records} deleted")
    console.show_line(f"read again     {sum(found.verified.values()):,} rows of {len(found.verified)} snapshots")
    for place, reason in sorted(found.kept.items()):
        console.show_line(f"KEPT           {place}: {reason}")
    for place in found.remaining:
        console.show_line(f"other state    {place} holds the key")
    for what, reason in found.not_covered.items():
        console.show_line(f"not covered    {what}: {reason}")


def _show_live(found: Certificate) -> None:
    """A running job's checkpoint may be gone before its path can be used: what comes behind it serves as well."""
    number = found.erased_at
    console.show_line(f"erased at      the barrier of checkpoint {number}")
    console.show_line(f"restore from   the job's newest checkpoint (restore='latest'), {number} or a later one")
    console.show_line(f"read back      {found.result}, which retention deletes as newer ones complete")
