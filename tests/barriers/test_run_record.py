"""The record of where a coordinator listens, in a directory into which others may write anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.barriers.run_record import RUN_RECORD_BYTES_MAX, RunRecord, read_run_record, write_run_record
from holdfast.statebackends.layout import RUN_FILE

RECORD = RunRecord("http://127.0.0.1:1", 2, "host", 1)


def grown(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


DAMAGED: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path.write_bytes(b""),
    "half of it": lambda path: path.write_bytes(b'{"url": "http://127'),
    "not the type": lambda path: path.write_bytes(b'{"url": 7, "pid": 1, "host": "h", "port": 1}'),
    "not UTF-8": lambda path: path.write_bytes(b'{"url": "\xff", "pid": 1, "host": "h", "port": 1}'),
    "nested": lambda path: path.write_bytes(b"[" * RUN_RECORD_BYTES_MAX),
    "without end": grown,
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a circle of links": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("made", DAMAGED)
def test_what_is_no_record_is_none_at_once(tmp_path: Path, made: str) -> None:
    DAMAGED[made](tmp_path / RUN_FILE)
    assert read_run_record(tmp_path) is None


def test_one_byte_decides_whether_a_record_is_too_long(tmp_path: Path) -> None:
    write_run_record(tmp_path, RECORD)
    content = (tmp_path / RUN_FILE).read_bytes()
    (tmp_path / RUN_FILE).write_bytes(content.ljust(RUN_RECORD_BYTES_MAX))
    assert read_run_record(str(tmp_path)) == RECORD
    (tmp_path / RUN_FILE).write_bytes(content.ljust(RUN_RECORD_BYTES_MAX + 1))
    assert read_run_record(str(tmp_path)) is None


def test_a_directory_that_is_not_there_or_can_not_be_has_no_record(tmp_path: Path) -> None:
    for directory in (tmp_path / "missing", "a\0b"):
        assert read_run_record(directory) is None
