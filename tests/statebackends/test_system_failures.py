"""What a disk, a limit or a right refuses, told by its name; and nothing but damage called damage."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.statebackends import errors
from holdfast.statebackends.errors import (
    CorruptStateError,
    HoldfastError,
    InputOutputError,
    OutOfSpaceError,
    PermissionDeniedError,
    StateBackendError,
    StorageUnavailableError,
    TooManyFilesError,
)
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.local_recovery.copies import LocalRecovery
from holdfast.statebackends.local_recovery.storage import KeepingStorage
from holdfast.statebackends.rocksdb.backend import RocksSnapshot
from holdfast.statebackends.rocksdb.database import RocksStore
from holdfast.statebackends.rocksdb.write_buffer import WriteBuffer, WriteBufferLimits
from holdfast.statebackends.snapshot.table_file import decode_keyed_table
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.failures import errno_of, refusal, rocksdb_failure, unavailable
from tests.harness.disks import NOBODY, SmallDisk, needs_root, small_disk, told_by

SMALL: dict[str, Any] = {"write_buffer_bytes": 1 << 20, "block_cache_bytes": 1 << 20}
GROUPS = KeyGroupRange(0, 8)
PLAIN, CORRUPT = StorageUnavailableError, CorruptStateError
SST = "/d/000011.sst"
MAYBE = "  The file /d/MANIFEST-000005 may be corrupted."


def rows(count: int = 300) -> list[tuple[bytes, bytes]]:
    return [(b"\0\0\0\0%08d" % number, os.urandom(900)) for number in range(count)]


def store_at(folder: Path, **options: Any) -> RocksStore:
    return RocksStore(str(folder), **SMALL, **options)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


# ----------------------------------------------------------------------------------------------------------- the tables


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ENOSPC", OutOfSpaceError),
        ("EDQUOT", OutOfSpaceError),
        ("EFBIG", OutOfSpaceError),
        ("EMFILE", TooManyFilesError),
        ("ENFILE", TooManyFilesError),
        ("EACCES", PermissionDeniedError),
        ("EPERM", PermissionDeniedError),
        ("EROFS", PermissionDeniedError),
        ("EIO", InputOutputError),
        ("ENODEV", InputOutputError),
        ("ENXIO", InputOutputError),
        ("ESTALE", InputOutputError),
        ("EREMOTEIO", InputOutputError),
        ("ENOTCONN", InputOutputError),
        ("EUCLEAN", InputOutputError),
        ("EBADMSG", InputOutputError),
        ("ENOMEM", PLAIN),
        ("ENOENT", PLAIN),
        ("EISDIR", PLAIN),
        ("EBUSY", PLAIN),
        ("ENOLCK", PLAIN),
        ("ETIMEDOUT", PLAIN),
    ],
)
def test_each_error_of_the_system_has_its_name_however_it_is_told(name: str, kind: type[StorageUnavailableError]) -> None:
    code = getattr(errno, name)
    words = os.strerror(code)
    told = (
        OSError(code, words, "/x"),
        OSError(f"{words} (os error {code})"),  # as pyo3 raises it: without a number
        Exception(f"{words} (os error {code})"),
        Exception(f"IO error: While appending to file: /d/000008.sst: {words}"),
        OSError(f"Error writing bytes to file. Detail: [errno {code}] {words}"),
    )
    for error in told:
        failure = rocksdb_failure(error, "/d", opening=True)
        assert type(failure) is kind, error
        assert (errno_of(error), failure.fields["errno"], failure.fields["path"]) == (code, code, "/d")
        assert words in str(failure)
    if kind is not PLAIN:  # RocksDB calls a table corrupt that it could not open
        hidden = Exception(f"Corruption: IO error: While open a file for random read: {SST}: {words}{MAYBE}")
        assert type(rocksdb_failure(hidden, "/d", opening=True)) is kind
    assert type(unavailable(told[0], "reading /x", path="/x")) is kind


def test_a_system_without_linux_own_error_numbers_has_storage_all_the_same() -> None:
    program = (
        "import errno\n"
        "linux = {name: vars(errno).pop(name) for name in ('EREMOTEIO', 'EUCLEAN')}\n"
        "import holdfast.statebackends.storage.directory\n"
        "from holdfast.statebackends.storage.failures import KINDS\n"
        "assert errno.EIO in KINDS and not KINDS.keys() & set(linux.values())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "opening", "running"),
    [
        (f"IO error: No space left on device: While appending to file: {SST}: No space left on device", OutOfSpaceError, None),
        ("IO error: Space limit reached", OutOfSpaceError, None),
        (f"IO error: While open a file for random read: {SST}: Too many open files", TooManyFilesError, None),
        ("IO error: While opendir: /d: Too many open files in system", TooManyFilesError, None),
        ("IO error: While lock file: /d/LOCK: Permission denied", PermissionDeniedError, None),
        (f"IO error: While pread offset 0 len 53: {SST}: Input/output error", InputOutputError, None),
        (f"IO error: Stale file handle: While pread offset 0 len 53: {SST}: Stale file handle", InputOutputError, None),
        ("IO error: IO fenced off", InputOutputError, None),
        ("IO error: lock hold by current process, acquire time 1 acquiring thread 2: /d/LOCK: No locks available", PLAIN, None),
        (f"IO error: While pread offset 277482 len 53: {SST}: Is a directory", PLAIN, None),
        ("IO error: Memory limit reached", PLAIN, None),
        ("Busy: ", PLAIN, None),
        ("Operation timed out: Timeout Acquiring Mutex", PLAIN, None),
        ("Shutdown in progress: ", PLAIN, None),
        ("Result incomplete: Write stall", PLAIN, None),
        ("words that no RocksDB has said yet", PLAIN, None),
        ("Corruption: checksum mismatch" + MAYBE, CORRUPT, CORRUPT),
        (f"Corruption: block checksum mismatch: stored = 3, computed = 1, type = 4  in {SST} offset 1 size 4", CORRUPT, CORRUPT),
        (f"Corruption: Bad table magic number: expected 9, found 6 in {SST}" + MAYBE, CORRUPT, CORRUPT),
        (f"Corruption: Sst file size mismatch: {SST}. Expected 277535, actual size 0\n" + MAYBE, CORRUPT, CORRUPT),
        (f"Corruption: Corruption: IO error: No such file or directory: While open a file for random read: {SST}: "
         "No such file or directory" + MAYBE, CORRUPT, CORRUPT),
        ("Corruption: CURRENT file does not end with newline", CORRUPT, CORRUPT),
        ("Corruption: unknown checksum type 77", CORRUPT, CORRUPT),
        ("Invalid argument: Column families not opened: other", CORRUPT, PLAIN),
        ("Invalid argument: comparator name mismatch", CORRUPT, PLAIN),
        ("Not implemented: newer than this version", CORRUPT, PLAIN),
    ],
)  # fmt: skip
def test_what_rocksdb_says(text: str, opening: type[HoldfastError], running: type[HoldfastError] | None) -> None:
    """With the texts of RocksDB 10 as rocksdict hands them on."""
    assert type(rocksdb_failure(Exception(text), "/d", opening=True)) is opening
    assert type(rocksdb_failure(Exception(text), "/d")) is (running or opening)


def test_a_path_says_nothing_about_an_error() -> None:
    path = "/IO error: No space left on device/db: Too many open files/000008.sst"
    assert type(rocksdb_failure(Exception(f"IO error: While opendir: {path}: Is a directory"), "/d")) is PLAIN


def test_what_arrow_says(tmp_path: Path) -> None:
    def told(call: Callable[[], Any]) -> StorageUnavailableError | None:
        with pytest.raises((OSError, MemoryError, pa.ArrowException)) as caught:
            call()
        return refusal(caught.value, "table x", path="x")

    assert type(told(lambda: pa.OSFile("/dev/full", "wb").write(b"x"))) is OutOfSpaceError
    assert type(told(lambda: pa.OSFile(str(tmp_path / "no" / "x"), "wb"))) is PLAIN
    assert type(told(lambda: pa.allocate_buffer(1 << 60))) is PLAIN
    stream = pa.py_buffer(b"\xff\xff\xff\xff\x10\0\0\0" + b"x" * 20)
    assert told(lambda: pa.ipc.open_stream(stream).read_all()) is None, "the same class, of bytes that are no table"
    assert told(lambda: pa.ipc.open_file(pa.py_buffer(b"ARROW1" + b"x" * 200 + b"ARROW1"))) is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (pa.ArrowMemoryError("malloc of size 1152921504606846976 failed"), PLAIN),
        (OSError(errno.EMFILE, "Too many open files"), TooManyFilesError),
        (OSError("Invalid flatbuffers message."), CORRUPT),
        (pa.ArrowInvalid("not an Arrow file"), CORRUPT),
    ],
)
def test_a_table_is_not_damaged_because_there_was_no_memory_for_it(
    error: Exception, kind: type[HoldfastError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr("holdfast.statebackends.snapshot.table_file.TableFile.open", read)
    with pytest.raises(HoldfastError, match="chk-1/f") as caught:
        decode_keyed_table(b"", "arrow", GROUPS, path="chk-1/f", operator="op")
    assert type(caught.value) is kind


def test_every_name_is_one_that_a_job_is_restarted_for() -> None:
    from holdfast.statebackends.storage.failures import KINDS

    for kind in {*KINDS.values()}:
        assert issubclass(kind, StorageUnavailableError)
        assert errors.ERROR_CLASSES[kind.__name__] is kind


# ----------------------------------------------------------------------------------------------------- RocksDB, for real


def test_opening_on_a_full_disk(disk: SmallDisk) -> None:
    disk.fill()
    with pytest.raises(OutOfSpaceError, match="No space left on device") as caught:
        store_at(disk.folder / "db")
    assert caught.value.fields == {"path": str(disk.folder / "db"), "errno": errno.ENOSPC}


def test_a_database_that_the_full_disk_stopped_is_not_written_on_and_leaves_nothing_behind(disk: SmallDisk) -> None:
    store = store_at(disk.folder / "db")
    store.write(rows())
    disk.fill()
    with pytest.raises(OutOfSpaceError, match="No space left on device"):
        store.link_copy(str(disk.folder / "copy"))
    disk.free()
    for call in (store.check, lambda: store.write(rows(1)), lambda: store.link_copy(str(disk.folder / "other"))):
        with pytest.raises(OutOfSpaceError, match="No space left on device"):
            call()
    assert not (disk.folder / "other").exists()
    store.close()  # says nothing: who closes it wants to be rid of it
    store.close()
    shutil.rmtree(disk.folder / "db")
    assert shutil.disk_usage(disk.folder).used < 1 << 20, "no file that is still open takes room"


def test_a_background_flush_on_a_full_disk_ends_the_writes(disk: SmallDisk) -> None:
    store = store_at(disk.folder / "db")
    disk.fill()
    with pytest.raises(OutOfSpaceError):
        store.write(rows(15_000))
    with pytest.raises(OutOfSpaceError):
        store.check()
    assert store.get(rows(1)[0][0]) is not None, "what is there can be read"
    store.close()


def test_background_work_that_has_failed_ends_the_writes_though_a_flush_goes_through(tmp_path: Path) -> None:
    """Else a write behind the loop's back would be tried again, and nobody would learn of it."""
    store = store_at(tmp_path / "db")
    real = store._db

    class Stalled:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def write(self, *_: Any) -> None:
            raise Exception("Result incomplete: Write stall")

        def property_int_value(self, name: str) -> int:
            return 1

    store._db = Stalled()
    with pytest.raises(StorageUnavailableError, match="its background work has failed"):
        store.write(rows(1))
    store._db = real
    with pytest.raises(StorageUnavailableError, match="its background work has failed"):
        store.write(rows(1))
    store.close()


def test_the_time_that_writes_wait_for_room_is_counted_and_no_other(tmp_path: Path) -> None:
    store = RocksStore(str(tmp_path / "db"), write_buffer_bytes=1 << 16, block_cache_bytes=1 << 20)
    store.write(rows(10))
    store.link_copy(str(tmp_path / "first"))
    assert store.stalled_s == 0
    deadline = time.monotonic() + 30
    while store.stalled_s == 0 and time.monotonic() < deadline:
        store.write(rows(4_000))  # a memtable has room for seventy
    assert 0 < store.stalled_s < 30
    store.close()


def test_a_snapshot_tells_the_waits_of_its_own_flush(tmp_path: Path) -> None:
    store = store_at(tmp_path / "db")
    store.stalled_s = 1.0
    buffer = WriteBuffer(store, lambda keys: [], WriteBufferLimits(1, 1, 0))  # type: ignore[arg-type, return-value]
    real, store.link_copy = store.link_copy, lambda folder: waited(folder)  # type: ignore[method-assign]

    def waited(folder: str) -> list[str]:
        store.stalled_s += 0.5
        return real(folder)

    frozen = buffer.freeze(str(tmp_path / "copy"))
    snapshot = RocksSnapshot(None, [], KeyGroupRange(0, 1), buffer, frozen, [], None, None)  # type: ignore[arg-type]
    assert snapshot.stalled_s == 0
    snapshot._flush()
    assert (snapshot.stalled_s, frozen.done) == (0.5, True)
    store.close()


@pytest.mark.parametrize("name", ["is-write-stopped", "actual-delayed-write-rate"])
def test_a_flush_counts_as_a_wait_while_writes_are_slowed_down_or_stopped(tmp_path: Path, name: str) -> None:
    store = store_at(tmp_path / "db")
    store.write(rows(10))
    real = store._db

    class Slowed:
        def __getattr__(self, called: str) -> Any:
            return getattr(real, called)

        def flush(self) -> None:
            time.sleep(0.002)
            real.flush()

        def property_int_value(self, asked: str) -> int:
            return int(asked == f"rocksdb.{name}") or int(real.property_int_value(asked))

    store._db = Slowed()
    store._flush()
    assert store.stalled_s >= 0.002
    store._db = real
    before = store.stalled_s
    store._flush()
    assert store.stalled_s == before
    store.close()


def test_a_copy_that_can_not_be_linked_stops_nothing(tmp_path: Path) -> None:
    store = store_at(tmp_path / "db")
    store.write(rows())
    (tmp_path / "copy").mkdir()
    with pytest.raises(StorageUnavailableError):
        store.link_copy(str(tmp_path / "copy"))
    store.check()
    store.write(rows(1))
    assert store.link_copy(str(tmp_path / "other"))
    store.close()


def test_tables_that_a_full_disk_does_not_take(disk: SmallDisk) -> None:
    store = store_at(disk.folder / "db")
    (disk.folder / "scratch").mkdir()
    disk.fill()
    with pytest.raises(OutOfSpaceError, match="ingest-0"):
        store.ingest(iter(rows(3_000)), str(disk.folder / "scratch"))
    store.close()


@needs_root
def test_a_read_only_disk_refuses_by_right(disk: SmallDisk) -> None:
    store = store_at(disk.folder / "db")
    store.write(rows())
    store.close()
    disk.make_read_only()
    for name in ("db", "new"):
        with pytest.raises(PermissionDeniedError, match="Read-only file system"):
            store_at(disk.folder / name)


_OPEN = """
import os, resource, signal, sys
from holdfast.statebackends.rocksdb.database import RocksStore
def attempt(call):
    try:
        call()
    except Exception as error:
        print(type(error).__name__)
    else:
        print("done")
open_store = lambda **more: RocksStore(sys.argv[1], write_buffer_bytes=1 << 20, block_cache_bytes=1 << 20, **more)
"""


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A database with several tables, closed."""
    tmp_path.chmod(0o755)
    store = store_at(tmp_path / "db")
    for number in range(4):
        store.write(rows())
        store.link_copy(str(tmp_path / f"copy-{number}"))
    store.close()
    return tmp_path / "db"


def test_a_process_without_descriptors(stored: Path) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + {more},) * 2)\n"
    assert told_by(_OPEN + limit.format(more=4) + "attempt(open_store)", str(stored)) == ["TooManyFilesError"]
    code = _OPEN + "store = open_store()\nstore.write([(b'x' * 8, bytes(9000))])\n" + limit.format(more=-2)
    assert told_by(code + "attempt(lambda: store.link_copy(sys.argv[1] + '-copy'))", str(stored)) == ["TooManyFilesError"]


def test_a_process_whose_files_may_not_grow(stored: Path) -> None:
    code = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = open_store()
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
store.write([(b"%08d" % number, os.urandom(900)) for number in range(300)])
attempt(lambda: store.link_copy(sys.argv[1] + "-copy"))
attempt(store.check)
"""
    assert told_by(_OPEN + code, str(stored)) == ["OutOfSpaceError", "OutOfSpaceError"]


@needs_root
def test_files_of_somebody_else(stored: Path) -> None:
    folders = [folder for folder in stored.parents if len(folder.parts) > 2]
    modes = {folder: folder.stat().st_mode for folder in folders}
    somebody = f"os.setgroups([])\nos.setgid({NOBODY})\nos.setuid({NOBODY})\n"
    for folder in folders:
        folder.chmod(0o755)
    try:
        assert told_by(_OPEN + somebody + "attempt(open_store)", str(stored)) == ["PermissionDeniedError"]
        stored.chmod(0o777)
        for file in stored.iterdir():
            file.chmod(0o600 if file.suffix == ".sst" else 0o666)
        code = "attempt(open_store)\nattempt(lambda: open_store(read_only=True))"
        assert told_by(_OPEN + somebody + code, str(stored)) == ["PermissionDeniedError"] * 2
    finally:
        for folder, mode in modes.items():
            folder.chmod(mode)


def test_a_database_that_is_open_elsewhere_is_no_damage(stored: Path) -> None:
    store = store_at(stored)
    with pytest.raises(StorageUnavailableError, match="lock hold by current process"):
        store_at(stored)
    store.close()


def test_a_folder_that_is_taken_away_is_no_damage(stored: Path) -> None:
    store = store_at(stored)
    store.write(rows())
    shutil.rmtree(stored)
    with pytest.raises(StorageUnavailableError, match="No such file or directory"):
        store.link_copy(f"{stored}-copy")
    store.close()


def test_a_file_or_a_folder_in_the_wrong_place_is_no_damage(stored: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageUnavailableError, match="File exists"):
        store_at(tmp_path / "file")
    table = next(stored.glob("*.sst"))
    table.unlink()
    table.mkdir()
    with pytest.raises(StorageUnavailableError, match="Is a directory"):
        store_at(stored)


@pytest.mark.parametrize("pattern", ["CURRENT", "MANIFEST-*", "*.sst"])
@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: os.urandom(len(content))])
def test_damaged_files_are_damage(stored: Path, pattern: str, damage: Callable[[bytes], bytes]) -> None:
    file = next(stored.glob(pattern))
    content = file.read_bytes()
    file.unlink()  # the copies have it under other names
    file.write_bytes(damage(content))
    with pytest.raises(CorruptStateError, match="can't be opened by RocksDB: Corruption"):
        store_at(stored)


@pytest.mark.parametrize(
    "content", [b"no JSON", b"[]", b"{\"a\": \"x\"}", b"{\"a\": 65536}", b"{\"a\": -1}", b"{\"a\": 1, \"b\": 1}", b"[" * 10_000]
)
def test_ids_that_can_not_be_read_are_damage(stored: Path, content: bytes) -> None:
    store = store_at(stored)
    store.write([(b"\xff\xffstates", content)])
    store.link_copy(f"{stored}-copy")
    store.close()
    with pytest.raises(CorruptStateError, match="no ids of states"):
        store_at(Path(f"{stored}-copy"))


def test_a_table_that_rots_under_a_running_job_is_the_disks_fault_and_not_the_snapshots(stored: Path) -> None:
    table = max(stored.glob("*.sst"), key=lambda path: path.stat().st_size)
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 0x20
    table.unlink()
    table.write_bytes(content)
    store = store_at(stored, operator="count")
    with pytest.raises(CorruptStateError, match="block checksum mismatch"):
        list(store.group_rows(GROUPS))
    store.restored()
    with pytest.raises(StateBackendError, match=r"operator 'count': .*block checksum mismatch"):
        list(store.group_rows(GROUPS))
    store.close()


def test_a_table_that_rots_under_a_new_database_is_the_disks_fault(tmp_path: Path) -> None:
    store = store_at(tmp_path / "db", is_new=True, operator="count")
    written = rows()
    store.write(written)
    store.link_copy(str(tmp_path / "copy"))
    table = max((tmp_path / "db").glob("*.sst"), key=lambda path: path.stat().st_size)
    with table.open("r+b") as file:  # the very file that the database has open
        file.write(os.urandom(table.stat().st_size // 2))
    for read in (lambda: store.get(written[0][0]), lambda: list(store.group_rows(GROUPS))):
        with pytest.raises(StateBackendError, match=r"operator 'count': .*Corruption"):
            read()
    store.close()


def test_a_copy_that_can_not_be_opened_any_more_is_the_disks_fault(stored: Path) -> None:
    table = next(stored.glob("*.sst"))
    table.unlink()
    table.write_bytes(b"")
    with pytest.raises(StateBackendError, match=r"operator 'count': .*Corruption"):
        store_at(stored, is_whole=True, read_only=True, operator="count")


# ------------------------------------------------------------------------------------------------------ storage, for real


def test_every_write_to_a_full_disk_says_so(disk: SmallDisk, tmp_path: Path) -> None:
    storage = LocalStorage(disk.folder / "state")
    storage.execute(ops.WriteFile("there", [b"x"]))
    (tmp_path / "local").write_bytes(bytes(1 << 20))
    LocalStorage(tmp_path / "other").execute(ops.WriteFile("big", [bytes(1 << 20)]))
    disk.fill()
    content = bytes(1 << 16)
    for operation in (
        ops.PutIfAbsent("a", content),
        ops.WriteFile("b", [content]),
        ops.UploadFile(str(tmp_path / "local"), "c"),
    ):
        with pytest.raises(OutOfSpaceError, match="No space left on device"):
            storage.execute(operation)
    with pytest.raises(OutOfSpaceError, match="No space left on device") as caught:
        LocalStorage(tmp_path / "other").execute(ops.DownloadFile("big", str(disk.folder / "down")))
    assert caught.value.fields["path"] == str(disk.folder / "down"), "it is the local disk that is full"
    assert storage.execute(ops.ReadFile("there")) == b"x"


def test_copies_that_a_full_disk_does_not_take_fail_no_checkpoint(disk: SmallDisk, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "state")
    recovery = LocalRecovery(str(disk.folder), job_id="job", state_directory="d", storage=storage)
    copies = recovery.copies("v", 0, 1, "n")
    copies.open()
    disk.fill()
    (tmp_path / "local").write_bytes(bytes(1 << 20))
    keeping = KeepingStorage(storage, copies, 1)
    keeping.execute(ops.WriteFile("chk-1/a", [bytes(1 << 20)]))
    keeping.execute(ops.UploadFile(str(tmp_path / "local"), "chk-1/b"))
    assert copies.held == ()
    assert os.listdir(copies.folder) == ["lock"], "half of a copy is none"
    assert storage.execute(ops.StatFile("chk-1/a")) == storage.execute(ops.StatFile("chk-1/b")) == 1 << 20
    later = recovery.copies("v", 0, 2, "n")
    later.open()  # if at all, without a copy
    later.close()
    copies.close()


def test_copies_of_a_process_without_descriptors_fail_no_checkpoint(tmp_path: Path) -> None:
    code = """
import os, resource, sys
from holdfast.statebackends.local_recovery.copies import LocalRecovery
from holdfast.statebackends.storage.directory import LocalStorage
recovery = LocalRecovery(sys.argv[1], job_id="job", state_directory="d", storage=LocalStorage(sys.argv[1]))
copies = recovery.copies("v", 0, 1, "n")
spare = [os.open("/dev/null", os.O_RDONLY) for _ in range(4)]
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1,) * 2)
copies.open()
copies.keep_bytes(1, "chk-1/a", [b"x"])
print(copies.is_open, copies.held)
"""
    assert told_by(code, str(tmp_path)) == ["False ()"]
