"""A snapshot that somebody made to do harm: one line on stderr and an exit code, in bounded time and memory, and nothing runs."""

from __future__ import annotations

import base64
import errno
import json
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast.api.cli import console
from holdfast.api.cli.main import app
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ha.snapshots import check_files
from holdfast.coordinator.restore.compatibility import _state_finding
from holdfast.coordinator.restore.preflight import SchemaVerdict
from holdfast.statebackends.errors import CorruptStateError, IncompatibleStateError, InvalidConfigError, StorageUnavailableError
from holdfast.statebackends.handles import CHECKPOINT_ID_MAX, StateMeta
from holdfast.statebackends.serialization.state_serializer import check_compatible
from holdfast.statebackends.serialization.type_serializer import TypeSerializer
from holdfast.statebackends.snapshot.parts import read_metadata_file
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.filesystem import OsFileSystem
from holdfast.statebackends.storage.port import Buffer, DownloadFile, ReadFile, run_flow
from tests.golden.test_format_refusals import seal
from tests.statebackends.snapshot_harness import SOME, UID, write

runner = CliRunner()
Document = dict[str, Any]


@pytest.fixture
def savepoint(tmp_path: Path) -> Path:
    return Path(write(tmp_path, "savepoint-7", SOME, parallelism=2, canonical=True).location)


def tamper(folder: Path, change: Callable[[Document], Any]) -> None:
    """Change the records, and make the checksum right again."""
    document = json.loads(msgspec.json.encode(hf.Snapshot(folder).metadata))
    change(document)
    (folder / "_metadata").write_bytes(seal(json.dumps(document).encode()))


def run(*arguments: object, code: int) -> str:
    """What the CLI printed; an exception that is not ours would be in the result."""
    result = runner.invoke(app, ["snapshot", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    assert isinstance(result.exception, SystemExit | None)
    return result.stdout + result.stderr


def keyed(document: Document) -> Document:
    handle: Document = document["operators"][0]["subtasks"][0]["keyed"][0]
    return handle


def listed(document: Document) -> Document:
    handle: Document = document["operators"][0]["subtasks"][0]["operator"][0]
    return handle


def as_entry(document: Document, entry: bytes) -> None:
    data = base64.b64encode(msgspec.msgpack.encode([entry])).decode()
    listed(document).update(part={"type": "inline", "data": data}, count=1)


@pytest.mark.parametrize("timestamp_ms", [10**18, 253_402_300_800_000, -(10**18)])
def test_a_time_that_no_calendar_has(savepoint: Path, timestamp_ms: int) -> None:
    tamper(savepoint, lambda document: document.update(trigger_timestamp_ms=timestamp_ms))
    assert ", -, " in run("inspect", savepoint, code=0)


@pytest.mark.parametrize("checkpoint_id", [0, -5, CHECKPOINT_ID_MAX + 1, 10**25])
def test_an_id_behind_which_no_job_could_go_on(savepoint: Path, checkpoint_id: int) -> None:
    tamper(savepoint, lambda document: document.update(checkpoint_id=checkpoint_id))
    assert f"checkpoint id {checkpoint_id} is not in 1.." in run("inspect", savepoint, code=2)


def test_a_file_of_less_than_no_bytes(savepoint: Path) -> None:
    tamper(savepoint, lambda document: keyed(document)["parts"][0].update(length=-(2**60)))
    assert f"{-(2**60)} bytes" in run("inspect", savepoint, code=2)


def test_an_entry_that_is_nested_without_end_is_bytes(savepoint: Path, tmp_path: Path) -> None:
    entry = b"\x91" * 20_000 + b"\x01"
    tamper(savepoint, lambda document: as_entry(document, entry))
    run("export", savepoint, tmp_path / "exported", code=0)
    assert hf.Snapshot(savepoint).table(UID, listed_name(savepoint)).read_all()["value"][0].as_py() == entry


def listed_name(folder: Path) -> str:
    return next(name for name, state in hf.Snapshot(folder).states(UID).items() if state.kind == "operator_list")


def test_what_is_pickled_in_a_list_never_runs(savepoint: Path, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    tamper(savepoint, lambda document: as_entry(document, pickle.dumps(_Trap(str(trap)))))
    for command in ("inspect", "verify"):
        run(command, savepoint, code=0)
    run("export", savepoint, tmp_path / "exported", code=0)
    run("copy", savepoint, tmp_path / "copied", code=0)
    run("diff", savepoint, tmp_path / "copied", code=0)
    assert not trap.exists()


class _Trap:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


@pytest.mark.parametrize("name", ["a" * 256, "\u00e4" * 128, "a/" * 600 + "b"])
def test_a_name_longer_than_any_file_has(savepoint: Path, tmp_path: Path, name: str) -> None:
    tamper(savepoint, lambda document: keyed(document)["parts"][0].update(path=name))
    told = run("verify", savepoint, code=1)
    assert f"operator {UID!r} subtask 0: " in told
    assert "longer than the name of a file can be" in told
    assert f"operator {UID!r}: " in run("copy", savepoint, tmp_path / "copied", code=2)


def test_a_path_that_climbs_out_names_operator_and_file(savepoint: Path, tmp_path: Path) -> None:
    tamper(savepoint, lambda document: keyed(document)["parts"][0].update(path="../other/_metadata"))
    expected = f"operator {UID!r}: '../other/_metadata' leaves the folder"
    assert expected in run("copy", savepoint, tmp_path / "copied", code=2)
    assert run("verify", savepoint, code=1).count(f"operator {UID!r}") == 1


# ---------------------------------------------------------------------------------------------------------- not files


def first_file(folder: Path) -> Path:
    return next(path for path in sorted(folder.iterdir()) if path.name != "_metadata")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("what", ["a part", "_metadata"])
def test_a_pipe_is_refused_and_not_waited_for(savepoint: Path, tmp_path: Path, what: str) -> None:
    path = savepoint / "_metadata" if what == "_metadata" else first_file(savepoint)
    path.unlink()
    os.mkfifo(path)
    run("verify", savepoint, code=2 if what == "_metadata" else 1)
    assert "[" in run("copy", savepoint, tmp_path / "copied", code=2)
    assert not (tmp_path / "copied").exists()
    with pytest.raises(StorageUnavailableError, match="not a regular file"):
        LocalStorage(savepoint).execute(ReadFile(path.name))


@pytest.mark.timeout(10)
def test_a_device_without_end_is_refused(savepoint: Path) -> None:
    (savepoint / "_metadata").unlink()
    (savepoint / "_metadata").symlink_to("/dev/zero")
    assert "not a regular file" in run("inspect", savepoint, code=2)


@pytest.mark.timeout(20)
def test_a_part_that_grew_without_end_is_not_read_whole(savepoint: Path, tmp_path: Path) -> None:
    path = first_file(savepoint)
    os.truncate(path, 1 << 40)
    assert "1099511627776 bytes instead of" in run("copy", savepoint, tmp_path / "copied", code=2)
    assert "1099511627776 bytes instead of" in run("export", savepoint, tmp_path / "exported", code=2)
    with pytest.raises(CorruptStateError, match="bytes instead of"):
        hf.Snapshot(savepoint).diff(hf.Snapshot(savepoint))


@pytest.mark.timeout(10)
@pytest.mark.parametrize(("name", "told"), [("_owner", "[CorruptStateError]"), ("_metadata", "[NotFoundError]")])
def test_a_record_without_end_is_not_read_when_it_is_to_be_disposed_of(savepoint: Path, name: str, told: str) -> None:
    with (savepoint / name).open("ab") as file:
        file.truncate(1 << 40)
    assert told in run("dispose", savepoint, code=2)
    assert first_file(savepoint).exists()


@pytest.mark.timeout(20)
def test_a_piece_without_end_is_not_read(savepoint: Path, tmp_path: Path) -> None:
    path, length = first_file(savepoint), 1 << 40
    os.truncate(path, length)

    def as_segment(document: Document) -> None:
        part = next(part for part in keyed(document)["parts"] if part.get("path") == path.name)
        part.update(type="segment", offset=0, length=length, file_length=length)

    tamper(savepoint, as_segment)
    assert f"a segment of {length} bytes; none has more than" in run("inspect", savepoint, code=2)
    assert "none has more than" in run("verify", savepoint, code=1)
    assert "none has more than" in run("export", savepoint, tmp_path / "exported", code=2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_part_that_may_not_be_read_names_the_operator(savepoint: Path, tmp_path: Path) -> None:
    first_file(savepoint).chmod(stat.S_IWUSR)
    told = run("copy", savepoint, tmp_path / "copied", code=2)
    assert f"operator {UID!r} subtask 0: " in told
    assert "Permission denied" in told


# ---------------------------------------------------------------------------------------------------------- terminals


def test_names_do_nothing_to_a_terminal(savepoint: Path) -> None:
    def rename(document: Document) -> None:
        document["job_name"] = "flights\x1b[2J\r\x9b31m"
        document["operators"][0].update(uid="to\ntals\u202e")

    tamper(savepoint, rename)
    told = run("inspect", savepoint, code=0)
    assert "of flights\\x1b[2J\\r\\x9b31m (" in told
    assert "to\\ntals\\u202e" in told
    assert not set(told) & {"\x1b", "\r", "\x9b", "\u202e"}


def test_everything_else_is_shown_as_it_is() -> None:
    text = "Zürich 東京 🙂 a\u0301 \\x1b"
    assert console.printable(text) == text


def test_a_type_nested_without_end_is_incompatible_with_any() -> None:
    text = "list<" * 5_000 + "int" + ">" * 5_000
    with pytest.raises(InvalidConfigError, match="nested too deeply"):
        TypeSerializer.parse(text)
    stored = StateMeta("count", "value", text, "utf8")
    with pytest.raises(IncompatibleStateError, match="'totals': state 'count'"):
        check_compatible(stored, StateMeta("count", "value", "int", "utf8"), operator="totals")


def test_a_folder_whose_name_is_no_text(savepoint: Path, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/sp-\xff"))
    savepoint.rename(folder)
    assert json.loads(run("inspect", folder, "--json", code=0))["location"] == str(folder)
    assert run("verify", folder, code=0)
    assert "sp-\\udcff" in run("copy", folder, f"{folder}-copy", code=0)
    run("export", folder, tmp_path / "exported", code=0)
    assert json.loads((tmp_path / "exported/_export.json").read_text())["snapshot"]["location"].endswith("/sp-\\udcff")


@pytest.mark.timeout(10)
def test_a_metadata_that_grew_without_end_is_read_as_far_as_its_header_says(savepoint: Path, tmp_path: Path) -> None:
    path = savepoint / "_metadata"
    content = path.read_bytes()
    os.truncate(path, 1 << 40)
    assert "does not end where its header says" in run("inspect", savepoint, code=2)
    assert len(run_flow(read_metadata_file("savepoint-7/_metadata"), LocalStorage(savepoint.parent))) == len(content) + 1
    path.write_bytes(b"nothing of ours")
    os.truncate(path, 1 << 40)
    assert "no snapshot header" in run("inspect", savepoint, code=2)


def test_a_part_called_like_a_coordinators_record_gets_another_name_in_a_copy(savepoint: Path, tmp_path: Path) -> None:
    """Else whoever made the snapshot says who owns the copy: nobody could claim it, or dispose of it."""
    part = first_file(savepoint)
    part.rename(savepoint / "_owner")

    def rename(document: Document) -> None:
        for operator in document["operators"]:
            for subtask in operator["subtasks"]:
                for handle in subtask["keyed"]:
                    for each in handle["parts"]:
                        each.update(path=each["path"].replace(part.name, "_owner"))
                for handle in subtask["operator"]:
                    if handle["part"]["type"] == "file":
                        handle["part"].update(path=handle["part"]["path"].replace(part.name, "_owner"))

    document_before = hf.Snapshot(savepoint).metadata
    tamper(savepoint, rename)
    assert hf.Snapshot(savepoint).metadata != document_before
    run("copy", savepoint, tmp_path / "copied", code=0)
    assert not (tmp_path / "copied/_owner").exists()
    assert hf.Snapshot(tmp_path / "copied").diff(hf.Snapshot(savepoint)).is_same
    run("dispose", tmp_path / "copied", code=0)


@pytest.mark.parametrize(
    ("text", "pickled"),
    [("pickled", True), ("map<str,pickled>", True), ("ttl<pickled>", True), ("struct<x: pickled = default>", True),
     ("struct<pickled: int>", False), ("struct<unpickled: int, pickled_at: int>", False)],
)  # fmt: skip
def test_a_field_called_pickled_is_not_pickled(text: str, pickled: bool) -> None:
    finding = _state_finding(StateMeta("s", "value", text, "utf8"), None, SchemaVerdict.REMOVED)
    assert finding.pickled is pickled


def test_a_full_scratch_disk_is_named_and_not_the_storage(savepoint: Path, tmp_path: Path) -> None:
    part = first_file(savepoint)
    local = tmp_path / "local"
    storage = LocalStorage(savepoint, file_system=_FullFor(str(local)))
    with pytest.raises(StorageUnavailableError, match="No space left on device") as caught:
        storage.execute(DownloadFile(part.name, str(local)))
    assert caught.value.path == str(local)
    assert caught.value.errno == errno.ENOSPC


class _FullFor(OsFileSystem):
    """No space for one file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._full: set[int] = set()

    def create(self, path: str) -> int:
        descriptor = super().create(path)
        if path == self._path:
            self._full.add(descriptor)
        return descriptor

    def write(self, descriptor: int, data: Buffer) -> int:
        if descriptor in self._full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, data)


# ------------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("what", ["a file", "a folder"])
def test_a_link_in_a_savepoint_is_refused_by_every_tool_and_a_restore(savepoint: Path, tmp_path: Path, what: str) -> None:
    part = first_file(savepoint)
    if what == "a file":
        part.rename(tmp_path / "elsewhere")
        part.symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "elsewhere").mkdir()
        part.rename(tmp_path / "elsewhere" / part.name)
        (savepoint / "d").symlink_to(tmp_path / "elsewhere")

        def into_folder(document: Document) -> None:
            for operator in document["operators"]:
                for each in [handle for subtask in operator["subtasks"] for handle in subtask["keyed"]]:
                    for found in each["parts"]:
                        found.update(path=found["path"].replace(part.name, f"d/{part.name}"))

        tamper(savepoint, into_folder)
    assert "a symbolic link, or in one" in run("verify", savepoint, code=1)
    assert "a symbolic link, or in one" in run("copy", savepoint, tmp_path / "copied", code=2)
    assert "a symbolic link, or in one" in run("export", savepoint, tmp_path / "exported", code=2)
    assert "a symbolic link, or in one" in run("diff", savepoint, savepoint, code=2)
    metadata = hf.Snapshot(savepoint).metadata
    with pytest.raises(CorruptStateError, match="a symbolic link, or in one"):
        run_flow(check_files(metadata, str(savepoint), checksums=False), RoutedStorage(LocalStorage(tmp_path)))


def test_a_savepoint_behind_a_link_is_as_good_as_any(savepoint: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(savepoint)
    run("verify", tmp_path / "latest", code=0)
    run("copy", tmp_path / "latest", tmp_path / "copied", code=0)


def test_metadata_that_is_a_link_is_refused(savepoint: Path, tmp_path: Path) -> None:
    (savepoint / "_metadata").rename(tmp_path / "_elsewhere")
    (savepoint / "_metadata").symlink_to(tmp_path / "_elsewhere")
    assert "a symbolic link, or in one" in run("inspect", savepoint, code=2)
