"""What every storage does, whatever it is made of: a class of tests, given a `storage` fixture."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.statebackends.errors import InvalidConfigError, InvariantError, ObjectMissingError
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.port import Storage

DATA = b"twelve bytes"
PATH = "job/chk-1/_metadata"


def read(storage: Storage, path: str = PATH) -> bytes | None:
    try:
        return storage.execute(ops.ReadFile(path))
    except ObjectMissingError:
        return None


class StorageContract:
    """Subclass it with a fixture `storage` that is empty."""

    def test_put_if_absent_keeps_the_first(self, storage: Storage) -> None:
        assert storage.execute(ops.PutIfAbsent(PATH, DATA)) is True
        assert storage.execute(ops.PutIfAbsent(PATH, DATA)) is False
        assert storage.execute(ops.PutIfAbsent(PATH, b"other")) is False
        assert read(storage) == DATA

    def test_sync_finds_a_file_and_creates_none(self, storage: Storage) -> None:
        assert storage.execute(ops.SyncFile(PATH)) is False
        assert storage.execute(ops.ListFolder("")) == []
        storage.execute(ops.PutIfAbsent(PATH, DATA))
        assert storage.execute(ops.SyncFile(PATH)) is True
        storage.execute(ops.DeleteFile(PATH))
        assert storage.execute(ops.SyncFile(PATH)) is False
        assert read(storage) is None

    def test_retried_write_is_fine_and_a_reused_name_is_a_bug(self, storage: Storage) -> None:
        assert storage.execute(ops.WriteFile(PATH, [b"ab", bytearray(b"c")])) == 3
        assert storage.execute(ops.WriteFile(PATH, [b"abc"])) == 3
        for other in (b"abd", b"abcd"):
            with pytest.raises(InvariantError, match="twice"):
                storage.execute(ops.WriteFile(PATH, [other]))
        assert read(storage) == b"abc"

    def test_reads(self, storage: Storage) -> None:
        storage.execute(ops.WriteFile(PATH, [DATA]))
        assert storage.execute(ops.ReadFile(PATH, 7)) == b"bytes"
        assert storage.execute(ops.ReadFile(PATH, 7, 2)) == b"by"
        assert storage.execute(ops.ReadFile(PATH, 7, 99)) == b"bytes"
        assert storage.execute(ops.ReadFile(PATH, 99)) == b""
        assert storage.execute(ops.ReadFile(PATH, 0, 0)) == b""
        assert storage.execute(ops.StatFile(PATH)) == len(DATA)
        assert storage.execute(ops.StatFile("job")) is None
        assert storage.execute(ops.StatFile(PATH + "/below")) is None
        with pytest.raises(ObjectMissingError) as caught:
            storage.execute(ops.ReadFile("job/none"))
        assert caught.value.path.endswith("job/none")

    def test_groups_of_transfers_up_and_down(self, storage: Storage, tmp_path: Path) -> None:
        contents = {f"{number}.sst": os.urandom(1_000 + number) for number in range(20)}
        for name, data in contents.items():
            (tmp_path / name).write_bytes(data)

        def move(operation: ops.UploadFile | ops.DownloadFile) -> ops.Flow[tuple[int, str]]:
            result: tuple[int, str] = yield operation
            return result

        expected = [(len(data), checksum_of(data)) for data in contents.values()]
        sizes = [length for length, _ in expected]
        ups = [move(ops.UploadFile(str(tmp_path / name), f"shared/{name}")) for name in contents]
        assert ops.perform(ops.InParallel(ups, sizes), storage) == expected
        downs = [move(ops.DownloadFile(f"shared/{name}", str(tmp_path / f"back-{name}"))) for name in contents]
        assert ops.perform(ops.InParallel(downs, sizes), storage) == expected
        assert [(tmp_path / f"back-{name}").read_bytes() for name in contents] == list(contents.values())
        names = [*contents, "none.sst"]
        downs = [move(ops.DownloadFile(f"shared/{name}", str(tmp_path / f"again-{name}"))) for name in names]
        with pytest.raises(ObjectMissingError, match=r"shared/none\.sst"):
            ops.perform(ops.InParallel(downs, [*sizes, 1]), storage)

    def test_upload_and_download_check_what_passes(self, storage: Storage, tmp_path: Path) -> None:
        data = os.urandom(3_000_000)
        local, back = tmp_path / "local.sst", tmp_path / "back.sst"
        local.write_bytes(data)
        back.write_bytes(b"left over by a crash")
        expected = (len(data), checksum_of(data))
        assert storage.execute(ops.UploadFile(str(local), "shared/1.sst")) == expected
        assert storage.execute(ops.UploadFile(str(local), "shared/1.sst")) == expected
        assert storage.execute(ops.DownloadFile("shared/1.sst", str(back))) == expected
        assert back.read_bytes() == data
        with pytest.raises(ObjectMissingError):
            storage.execute(ops.DownloadFile("shared/2.sst", str(tmp_path / "none")))
        assert not (tmp_path / "none").exists()
        with pytest.raises(ObjectMissingError):
            storage.execute(ops.DownloadFile("shared/2.sst", str(back)))
        assert back.read_bytes() == data
        with pytest.raises(ObjectMissingError):
            storage.execute(ops.UploadFile(str(tmp_path / "none"), "shared/3.sst"))
        assert storage.execute(ops.ListFiles("shared")) == ["shared/1.sst"]
        local.write_bytes(b"")
        assert storage.execute(ops.UploadFile(str(local), "shared/0.sst"))[0] == 0
        assert storage.execute(ops.DownloadFile("shared/0.sst", str(back))) == (0, checksum_of(b""))
        assert back.read_bytes() == b""

    def test_links(self, storage: Storage) -> None:
        storage.execute(ops.WriteFile("sinks/s/staged", [DATA]))
        link = ops.LinkFile("sinks/s/staged", "out/part-0")
        assert storage.execute(link) is True
        assert storage.execute(link) is False
        assert read(storage, "out/part-0") == DATA
        storage.execute(ops.WriteFile("sinks/s/copy", [DATA]))
        assert storage.execute(ops.LinkFile("sinks/s/copy", "out/part-0")) is False
        storage.execute(ops.WriteFile("sinks/s/other", [b"other"]))
        with pytest.raises(InvariantError):
            storage.execute(ops.LinkFile("sinks/s/other", "out/part-0"))
        storage.execute(ops.DeleteFile("sinks/s/staged"))
        assert storage.execute(link) is False
        with pytest.raises(ObjectMissingError):
            storage.execute(ops.LinkFile("sinks/s/staged", "out/part-1"))
        assert read(storage, "out/part-0") == DATA

    def test_lists_and_deletions(self, storage: Storage) -> None:
        assert storage.execute(ops.ListFiles("")) == []
        assert storage.execute(ops.ListFolder("nothing")) == []
        for path in ("job/b", "job/a/2", "job/a/1", "top"):
            storage.execute(ops.WriteFile(path, [b"x"]))
        assert storage.execute(ops.ListFiles("")) == ["job/a/1", "job/a/2", "job/b", "top"]
        assert storage.execute(ops.ListFiles("job/a/")) == ["job/a/1", "job/a/2"]
        assert storage.execute(ops.ListFolder("job")) == ["a/", "b"]
        assert storage.execute(ops.ListFolder("")) == ["job/", "top"]
        assert storage.execute(ops.ListFiles("top")) == []
        facts = storage.execute(ops.DescribeFiles(""))
        assert [(fact.path, fact.size) for fact in facts] == [(path, 1) for path in storage.execute(ops.ListFiles(""))]
        assert storage.execute(ops.DescribeFiles("job/a")) == facts[:2]
        assert storage.execute(ops.DescribeFiles("nothing")) == []
        assert len({fact.modified_ms // 3_600_000 for fact in facts}) <= 2
        assert storage.execute(ops.DeleteFile("job/b")) is True
        assert storage.execute(ops.DeleteFile("job/b")) is False
        assert storage.execute(ops.DeleteFile("no/such/folder")) is False
        assert storage.execute(ops.DeleteFolder("job")) == 2
        assert storage.execute(ops.DeleteFolder("job")) == 0
        assert storage.execute(ops.ListFiles("")) == ["top"]
        assert storage.execute(ops.PutIfAbsent("job/a/1", b"again")) is True

    def test_folder_removed_by_somebody_else_is_made_again(self, storage: Storage) -> None:
        storage.execute(ops.PutIfAbsent("job/a/1", b"x"))
        storage.at(storage.root).execute(ops.DeleteFolder("job"))
        assert storage.execute(ops.PutIfAbsent("job/a/2", b"x")) is True
        storage.at(storage.root).execute(ops.DeleteFolder("job"))
        assert storage.execute(ops.PutIfAbsent("job/b/1", b"x")) is True

    @pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/.", "a\0b", ".tmp/x", "a/.."])
    def test_paths_that_leave_the_root_are_refused(self, storage: Storage, tmp_path: Path, path: str) -> None:
        local = tmp_path / "local"
        local.write_bytes(DATA)
        operations: list[ops.Operation] = [
            ops.PutIfAbsent(path, b""),
            ops.WriteFile(path, [b""]),
            ops.UploadFile(str(local), path),
            ops.DownloadFile(path, str(local)),
            ops.ReadFile(path),
            ops.StatFile(path),
            ops.LinkFile("a", path),
            ops.LinkFile(path, "a"),
            ops.DeleteFile(path),
            ops.DeleteFolder(path),
        ]
        for operation in operations + ([ops.ListFiles(path), ops.ListFolder(path)] if path else []):
            with pytest.raises(InvalidConfigError):
                storage.execute(operation)
        assert local.read_bytes() == DATA, "a refused download touches nothing"
