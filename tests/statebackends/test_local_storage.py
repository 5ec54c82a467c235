"""Directory storage: whole or absent after a stop between any two system calls, durable once it said so, typed errors."""

import contextlib
import errno
import itertools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.statebackends.errors import AmbiguousWriteError, InvalidConfigError, InvariantError, StorageUnavailableError
from holdfast.statebackends.storage import filesystem
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.directory import TEMPORARY_AGE_MS, DurableFolders, LocalStorage, storage_from_url
from holdfast.statebackends.storage.filesystem import OsFileSystem
from holdfast.statebackends.storage.port import Buffer
from tests.statebackends.crash_filesystem import CrashFileSystem, PowerCut
from tests.statebackends.storage_contract import DATA, PATH, StorageContract, read

NONCES = itertools.count()


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "state")


class TestContract(StorageContract):
    """On a real directory."""


def crash_storage(file_system: CrashFileSystem) -> LocalStorage:
    return LocalStorage("/disk/state", file_system=file_system, new_nonce=lambda: str(next(NONCES)))


def made(prepare: Callable[[LocalStorage], Any] | None = None) -> CrashFileSystem:
    file_system = CrashFileSystem()
    file_system.mkdir("/disk")
    file_system.fsync_folder("/")
    if prepare is not None:
        prepare(crash_storage(file_system))
    return file_system


def put_source(storage: LocalStorage) -> None:
    storage.execute(ops.WriteFile("job/staged", [DATA]))


CREATING: list[tuple[ops.Operation, Callable[[LocalStorage], Any] | None]] = [
    (ops.PutIfAbsent(PATH, DATA), None),
    (ops.WriteFile(PATH, [DATA[:7], memoryview(DATA)[7:]]), None),
    (ops.LinkFile("job/staged", PATH), put_source),
]


@pytest.mark.parametrize(("operation", "prepare"), CREATING, ids=["put", "write", "link"])
def test_a_power_cut_between_any_two_calls_leaves_the_file_whole_or_absent(operation: Any, prepare: Any) -> None:
    calls_before = -1
    for calls_left in range(200):
        for seed in range(4):
            file_system = made(prepare)
            file_system.calls_left = calls_left
            finished = False
            try:
                crash_storage(file_system).execute(operation)
                finished = True
            except PowerCut:
                pass
            file_system.lose_power(seed)
            survivor = crash_storage(file_system)
            assert read(survivor) in ((DATA,) if finished else (None, DATA))

            survivor.execute(operation)
            file_system.lose_power(seed + 100)
            assert read(crash_storage(file_system)) == DATA
        if finished and calls_before >= 0:
            return
        calls_before = calls_left
    raise AssertionError("never finished")


@pytest.mark.parametrize("calls_left", range(40))
def test_a_crash_of_the_process_alone_shows_no_torn_file(calls_left: int) -> None:
    file_system = made()
    file_system.calls_left = calls_left
    with contextlib.suppress(PowerCut):
        crash_storage(file_system).execute(ops.PutIfAbsent(PATH, DATA))
    file_system.calls_left = None
    other = crash_storage(file_system)
    before = read(other)
    assert before in (None, DATA)
    assert other.execute(ops.PutIfAbsent(PATH, b"another leader")) is (before is None)
    assert read(other) == (DATA if before else b"another leader")


def test_existence_is_durable_before_it_is_reported() -> None:
    linked_only = 0
    for calls_left in range(40):
        for seed in range(8):
            file_system = made()
            file_system.calls_left = calls_left
            with contextlib.suppress(PowerCut):
                crash_storage(file_system).execute(ops.PutIfAbsent(PATH, DATA))
            file_system.calls_left = None
            if read(crash_storage(file_system)) is None:
                continue
            # perhaps linked and not yet synced by its writer: the loser must sync it before it obeys
            linked_only += 1
            assert crash_storage(file_system).execute(ops.PutIfAbsent(PATH, b"loser")) is False
            file_system.lose_power(seed)
            assert read(crash_storage(file_system)) == DATA
    assert linked_only


def test_deletions_are_durable_in_order() -> None:
    for calls_left in range(30):
        for seed in range(6):
            file_system = made(lambda s: [s.execute(ops.PutIfAbsent(f"chk-1/{name}", DATA)) for name in ("_claim", "_metadata")])
            file_system.calls_left = calls_left
            storage = crash_storage(file_system)
            try:
                storage.execute(ops.DeleteFile("chk-1/_claim"))
                storage.execute(ops.DeleteFolder("chk-1"))
            except PowerCut:
                pass
            file_system.lose_power(seed)
            left = crash_storage(file_system).execute(ops.ListFiles("chk-1"))
            assert left in ([], ["chk-1/_metadata"], ["chk-1/_claim", "chk-1/_metadata"])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["mkdir", "create", "write", "fsync", "link"])
def test_io_errors_name_the_path_and_leave_nothing_visible(call: str, code: int) -> None:
    file_system = made()
    storage = crash_storage(file_system)
    file_system.fail = {call: code}
    for operation in (ops.PutIfAbsent(PATH, DATA), ops.WriteFile(PATH, [DATA])):
        with pytest.raises(StorageUnavailableError, match=os.strerror(code)) as caught:
            storage.execute(operation)
        assert str(caught.value.path).endswith(PATH)
    file_system.fail = {}
    assert storage.execute(ops.ListFiles("")) == []
    assert storage.execute(ops.PutIfAbsent(PATH, DATA)) is True


@pytest.mark.parametrize("call", ["open", "read", "stat", "list_folder", "unlink", "rmdir", "fsync_folder"])
def test_io_errors_of_other_operations(call: str) -> None:
    file_system = made(lambda s: s.execute(ops.PutIfAbsent(PATH, DATA)))
    storage = crash_storage(file_system)
    file_system.fail = {call: errno.EIO}
    operations: dict[str, ops.Operation] = {
        "open": ops.ReadFile(PATH),
        "read": ops.ReadFile(PATH),
        "stat": ops.StatFile(PATH),
        "list_folder": ops.ListFiles("job"),
        "unlink": ops.DeleteFile(PATH),
        "rmdir": ops.DeleteFolder("job"),
        "fsync_folder": ops.DeleteFile(PATH),
    }
    with pytest.raises(StorageUnavailableError, match="Input/output error"):
        storage.execute(operations[call])


@pytest.mark.parametrize("failing", [{"link": errno.EIO}, {"link": errno.ETIMEDOUT}])
def test_unclear_outcome_of_the_link_is_ambiguous(failing: dict[str, int]) -> None:
    file_system = made()
    file_system.fail = failing
    with pytest.raises(AmbiguousWriteError):
        crash_storage(file_system).execute(ops.PutIfAbsent(PATH, DATA))


def test_unsynced_name_is_ambiguous_and_the_file_stays() -> None:
    file_system = made()
    storage = crash_storage(file_system)
    storage.execute(ops.PutIfAbsent("job/chk-1/_claim", b""))
    file_system.fail = {"fsync_folder": errno.EIO}
    with pytest.raises(AmbiguousWriteError):
        storage.execute(ops.PutIfAbsent(PATH, DATA))
    with pytest.raises(StorageUnavailableError):
        storage.execute(ops.PutIfAbsent(PATH, DATA))
    file_system.fail = {}
    assert storage.execute(ops.PutIfAbsent(PATH, DATA)) is False
    assert read(storage) == DATA


def test_file_system_without_hard_links_is_refused_by_name() -> None:
    file_system = made()
    file_system.fail = {"link": errno.EPERM}
    with pytest.raises(InvalidConfigError, match="hard links"):
        crash_storage(file_system).execute(ops.PutIfAbsent(PATH, DATA))


def test_repeated_link_answer_counts_as_ours() -> None:
    class Repeating(CrashFileSystem):
        def link(self, source: str, target: str) -> None:
            super().link(source, target)
            raise FileExistsError(errno.EEXIST, "the first answer was lost", target)

    file_system = Repeating()
    assert crash_storage(file_system).execute(ops.PutIfAbsent(PATH, DATA)) is True


def test_root_and_its_ancestors_are_made(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "a" / "b" / "state")
    assert storage.execute(ops.PutIfAbsent("x", b"1")) is True
    assert (tmp_path / "a" / "b" / "state" / "x").read_bytes() == b"1"


def test_put_if_absent_has_one_winner(storage: LocalStorage) -> None:
    barrier, won = threading.Barrier(8), []

    def contend(index: int) -> None:
        barrier.wait()
        if LocalStorage(storage.root).execute(ops.PutIfAbsent(PATH, str(index).encode())):
            won.append(index)

    threads = [threading.Thread(target=contend, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert read(storage) == str(won[0]).encode()
    assert os.listdir(os.path.join(storage.root, ".tmp")) == []


def test_folder_that_fills_while_it_is_deleted_is_deleted_again() -> None:
    class Zombie(CrashFileSystem):
        wrote = False

        def rmdir(self, path: str) -> None:
            if not self.wrote:
                self.wrote = True
                self.close(self.create(path + "/late"))
            super().rmdir(path)

    file_system = Zombie()
    storage = crash_storage(file_system)
    storage.execute(ops.WriteFile("job/a", [b"x"]))
    assert storage.execute(ops.DeleteFolder("job")) == 2


def test_unwritable_root_is_the_systems_own_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    storage = LocalStorage(tmp_path / "file" / "state")
    with pytest.raises(StorageUnavailableError, match="Not a directory"):
        storage.execute(ops.PutIfAbsent(PATH, DATA))
    assert read(storage) is None


def test_first_write_of_a_process_deletes_what_others_left_long_ago(storage: LocalStorage) -> None:
    storage.execute(ops.WriteFile("a", [b"x"]))
    old, young = (Path(storage.root, ".tmp", name) for name in ("old", "young"))
    for left in (old, young):
        left.write_bytes(b"torn")
    stamp = old.stat().st_mtime - TEMPORARY_AGE_MS / 1000 - 10
    os.utime(old, (stamp, stamp))
    storage.execute(ops.WriteFile("b", [b"x"]))
    assert old.exists(), "one look a process is enough"
    LocalStorage(storage.root).execute(ops.WriteFile("c", [b"x"]))
    assert (old.exists(), young.exists()) == (False, True)


def test_left_over_temporary_files_are_swept_by_age(storage: LocalStorage) -> None:
    storage.execute(ops.WriteFile("a", [b"x"]))
    left = Path(storage.root, ".tmp", "crashed")
    left.write_bytes(b"torn")
    now_ms = OsFileSystem().stat(str(left)).modified_ms
    assert storage.sweep_temporary(now_ms=now_ms + 500, age_ms=1000) == 0
    assert storage.sweep_temporary(now_ms=now_ms + 1500, age_ms=1000) == 1
    assert not left.exists()
    assert read(storage, "a") == b"x"


def test_room_for_what_is_read_is_asked_for_as_far_as_somebody_said_how_much_it_is(tmp_path: Path) -> None:
    class Sizes(OsFileSystem):
        asked: list[int] = []  # noqa: RUF012

        def read(self, descriptor: int, size: int, offset: int) -> bytes:
            self.asked.append(size)
            return super().read(descriptor, size, offset)

    large = os.urandom(3_000_000)
    (tmp_path / "record").write_bytes(b"{}")
    (tmp_path / "large").write_bytes(large)
    storage, asked = LocalStorage(tmp_path, file_system=Sizes()), Sizes.asked
    assert read(storage, "record") == b"{}"
    assert max(asked) <= 1 << 20, "a small record must not cost room for a large table"
    assert read(storage, "large") == large
    del asked[:]
    assert storage.execute(ops.ReadFile("large", 0, len(large) + 1)) == large
    assert asked == [len(large) + 1, 1], "in one piece"


def test_a_large_file_is_written_in_pieces(tmp_path: Path) -> None:
    class Short(OsFileSystem):
        """Takes a part of what it is given now and then, as a system may."""

        given: list[int] = []  # noqa: RUF012

        def write(self, descriptor: int, data: bytes | bytearray | memoryview) -> int:
            self.given.append(len(data))
            return super().write(descriptor, data[: 300_000 if len(self.given) % 2 else None])

    large = os.urandom(3_000_001)
    storage = LocalStorage(tmp_path, file_system=Short())
    storage.execute(ops.WriteFile("large", [large[:7], memoryview(large)[7:]]))
    assert read(storage, "large") == large
    assert max(Short.given) == 1 << 20


class Copying(OsFileSystem):
    """Copies at most so many bytes at one time, and none at all after so many calls."""

    def __init__(self, at_once: int, calls_max: int) -> None:
        self.at_once = at_once
        self.calls_left = calls_max
        self.written = 0

    def copy(self, source: int, target: int, size: int, offset: int) -> int:
        self.calls_left -= 1
        return super().copy(source, target, min(size, self.at_once), offset) if self.calls_left >= 0 else 0

    def write(self, descriptor: int, data: Buffer) -> int:
        written = super().write(descriptor, data)
        self.written += written
        return written


MIB = 1 << 20


@pytest.mark.parametrize(
    ("release", "copies"), [("4.18.0-553.el8", False), ("5.2.9", False), ("5.3.0", True), ("6.1", True), ("?", False)]
)
def test_old_systems_are_not_asked_to_copy(release: str, copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", release, "", "x86_64")))
    assert filesystem._copies.__wrapped__() is copies


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, MIB + 1, 9 * MIB - 1, 9 * MIB, 9 * MIB + 1, 20 * MIB + 7])
@pytest.mark.parametrize(("at_once", "calls_max"), [(1 << 30, 1 << 30), (3_000_001, 1 << 30), (1 << 30, 0), (3_000_001, 2)])
def test_an_upload_is_copied_as_far_as_the_system_does_it(tmp_path: Path, size: int, at_once: int, calls_max: int) -> None:
    content = os.urandom(size)
    (tmp_path / "local").write_bytes(content)
    file_system = Copying(at_once, calls_max)
    storage = LocalStorage(tmp_path / "root", file_system=file_system)
    for _ in range(2):  # the second time it is there already, and found to be the same
        assert storage.execute(ops.UploadFile(str(tmp_path / "local"), "a")) == (size, checksum_of(content))
        assert (tmp_path / "root" / "a").read_bytes() == content
    by_hand = min(size, MIB) if calls_max == 1 << 30 and sys.platform == "linux" else file_system.written // 2
    assert file_system.written == 2 * by_hand <= 2 * size
    (tmp_path / "local").write_bytes(content + b"x")
    with pytest.raises(InvariantError, match="exists with other content"):
        storage.execute(ops.UploadFile(str(tmp_path / "local"), "a"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_upload_that_can_not_be_copied_leaves_nothing(tmp_path: Path, code: int) -> None:
    class Failing(OsFileSystem):
        def copy(self, source: int, target: int, size: int, offset: int) -> int:
            raise OSError(code, os.strerror(code))

    (tmp_path / "local").write_bytes(b"x" * (2 * MIB))
    storage = LocalStorage(tmp_path / "root", file_system=Failing())
    with pytest.raises(StorageUnavailableError, match=os.strerror(code)):
        storage.execute(ops.UploadFile(str(tmp_path / "local"), "a"))
    assert storage.execute(ops.ListFiles("")) == []
    assert list((tmp_path / "root" / ".tmp").iterdir()) == []


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EIO, errno.EINTR, errno.EOPNOTSUPP, errno.EACCES, errno.EOVERFLOW])
def test_what_the_system_does_not_copy_is_written(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    content = os.urandom(3 * MIB)
    (tmp_path / "local").write_bytes(content)
    storage = LocalStorage(tmp_path / "root")
    assert storage.execute(ops.UploadFile(str(tmp_path / "local"), "a")) == (len(content), checksum_of(content))
    assert read(storage, "a") == content


def test_another_root_is_on_the_same_file_system() -> None:
    file_system = made()
    storage = crash_storage(file_system).at("file:///disk/sink")
    assert storage.root == "/disk/sink"
    storage.execute(ops.WriteFile("a", [DATA]))
    assert dict(file_system.list_folder("/disk/sink")) == {"a": False, ".tmp": True}
    with pytest.raises(InvalidConfigError, match="'gs'"):
        storage.at("gs://bucket/state")


def test_storage_urls(tmp_path: Path) -> None:
    assert storage_from_url(str(tmp_path)).root == str(tmp_path)
    assert storage_from_url(f"file://{tmp_path}/with%20space").root == f"{tmp_path}/with space"
    assert storage_from_url("file://localhost/state").root == "/state"
    assert storage_from_url("relative/dir").root == os.path.abspath("relative/dir")
    with pytest.raises(InvalidConfigError, match="'gs'"):
        storage_from_url("gs://bucket/state")
    assert storage_from_url("/with?and#in[it").root == "/with?and#in[it"
    for bad in (
        "",
        "file://host/state",
        "file://",
        "file://[x/y",
        "file:///a%00b",
        "/a\0b",
        "/\ud800",
        "file:///a?b",
        "file:///a#b",
    ):
        with pytest.raises(InvalidConfigError):
            storage_from_url(bad)


_FOLDERS = st.lists(st.sampled_from(("a", "b", "chk-1", "chk-10")), max_size=3).map(lambda names: "/".join(("/root", *names)))


@given(st.lists(st.tuples(st.booleans(), _FOLDERS | st.just(""))))
def test_folders_that_were_deleted_are_synced_again_and_no_others(steps: list[tuple[bool, str]]) -> None:
    """What is known of folders is what the names say: a deleted one goes with all below it, and takes no other one along."""
    synced: list[str] = []

    class Files:
        def mkdir(self, folder: str) -> None:
            raise FileExistsError

        def fsync_folder(self, folder: str) -> None:
            synced.append(folder)

    folders = DurableFolders(Files(), "/root")  # type: ignore[arg-type]
    known = set[str]()
    for is_made, folder in steps:
        if is_made and folder:
            synced.clear()
            folders.ensure(folder)
            above = [folder]
            while above[-1] != "/root":
                above.append(above[-1].rpartition("/")[0])
            new = []
            for each in above:
                if each in known:
                    break
                new.append(each)
            assert synced == [each.rpartition("/")[0] or "/" for each in reversed(new)]
            known |= {*new}
        elif not is_made:
            folders.forget(folder)
            known = {each for each in known if folder and each != folder and not each.startswith(folder + "/")}
