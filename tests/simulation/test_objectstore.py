"""The simulated object store: the storage contract, the requests that S3 has, and the same answers as a directory gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.chaos.sim.disk import SimDisk
from holdfast.chaos.sim.objectstore import SimObjectStore
from holdfast.chaos.sim.wire import SimS3
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, ObjectMissingError, StorageUnavailableError
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.port import Operation, Storage
from tests.examples import seeds
from tests.statebackends.storage_contract import DATA, PATH, StorageContract


class TestContract(StorageContract):
    """On a path, as the jobs of a simulated world name their directories."""

    @pytest.fixture
    def storage(self) -> Storage:
        return SimObjectStore().storage("/bucket/state")


class TestContractOfUrl(StorageContract):
    """On a URL."""

    @pytest.fixture
    def storage(self) -> Storage:
        return SimObjectStore().storage("s3://bucket/state/")


FILES = ("f", "f.b", "f0", "d/f", "d/g", "d/d/f", "d/d-/f", "e/f", "top")
FOLDERS = ("", "d", "d/", "d/d", "d/d-", "e", "none", "f")


def some_operation(rng: random.Random, tmp_path: Path) -> Operation:
    path, other, folder = rng.choice(FILES), rng.choice(FILES), rng.choice(FOLDERS)
    content = bytes([rng.randrange(3)]) * rng.randrange(4)
    local = tmp_path / "local"
    local.write_bytes(content)
    makers: list[Callable[[], Operation]] = [
        lambda: ops.PutIfAbsent(path, content),
        lambda: ops.PutIfAbsent(path, content),
        lambda: ops.WriteFile(path, [content[:1], memoryview(content)[1:]]),
        lambda: ops.UploadFile(str(local), path),
        lambda: ops.DownloadFile(path, str(local)),
        lambda: ops.ReadFile(path, rng.randrange(3), rng.choice((None, 0, 1, 9))),
        lambda: ops.StatFile(path),
        lambda: ops.StatFile(folder or "d"),
        lambda: ops.ListFiles(folder),
        lambda: ops.ListFolder(folder),
        lambda: ops.LinkFile(other, path),
        lambda: ops.DeleteFile(path),
        lambda: ops.DeleteFolder(folder.removeprefix("f") or "e"),
        lambda: ops.DeleteFolder(""),
        lambda: ops.SyncFile(path),
    ]
    return rng.choice(makers)()


def answer(storage: Storage, operation: Operation) -> Any:
    try:
        found = storage.execute(operation)
    except HoldfastError as error:
        return type(error)
    if isinstance(operation, ops.ListFolder):  # an empty folder is a thing that only directories have
        below = f"{operation.prefix.rstrip('/')}/".lstrip("/")
        return [name for name in found if not name.endswith("/") or storage.execute(ops.ListFiles(below + name))]
    return found


def store_behind_a_wire() -> SimObjectStore:
    return SimS3(lambda: 0, random.Random(1))


@pytest.mark.parametrize("make", [SimObjectStore, store_behind_a_wire], ids=["alone", "through the S3 shell"])
@pytest.mark.parametrize("seed", seeds(10))
def test_object_store_and_directory_answer_alike(tmp_path: Path, seed: int, make: Callable[[], SimObjectStore]) -> None:
    rng = random.Random(seed)
    disk, store = SimDisk(), make()
    directory, objects = disk.storage("/state"), store.storage("/state")
    for _ in range(500):
        operation = some_operation(rng, tmp_path)
        assert answer(objects, operation) == answer(directory, operation), operation
        assert objects.execute(ops.ListFiles("")) == directory.execute(ops.ListFiles(""))
    one, other = disk.view("/state"), store.view("/state")
    assert one.paths() == other.paths()
    assert one.paths("d") == other.paths("d")
    assert [(one.peek(path), one.size(path)) for path in FILES] == [(other.peek(path), other.size(path)) for path in FILES]


def test_names_of_a_folder_are_found_between_others_that_begin_alike() -> None:
    store = SimObjectStore()
    storage = store.storage("s3://bucket")
    for path in ("a", "a/1", "a/2/3", "a-b", "a0", "b/1"):
        storage.execute(ops.PutIfAbsent(path, b""))
    assert storage.execute(ops.ListFolder("")) == ["a", "a-b", "a/", "a0", "b/"]
    assert storage.execute(ops.ListFolder("a")) == ["1", "2/"]
    assert store.names("s3://bucket/a") == ["", "-b", "/", "0"]
    assert storage.execute(ops.ListFiles("a")) == ["a/1", "a/2/3"]
    assert storage.execute(ops.DeleteFolder("a")) == 2
    assert storage.execute(ops.ListFolder("")) == ["a", "a-b", "a0", "b/"]


def test_roots_are_apart() -> None:
    store = SimObjectStore()
    state = store.storage("/bucket/state")
    sink = state.at("file:///bucket/sink")
    state.execute(ops.PutIfAbsent(PATH, DATA))
    sink.execute(ops.PutIfAbsent("a", DATA))
    store.storage("/bucket/state2").execute(ops.PutIfAbsent("b", DATA))
    assert [storage.execute(ops.ListFiles("")) for storage in (state, sink)] == [[PATH], ["a"]]
    assert (sink.root, store.view("s3://x/y/").root) == ("/bucket/sink", "s3://x/y")
    assert store.view("/bucket").paths() == ["sink/a", f"state/{PATH}", "state2/b"]
    with pytest.raises(InvalidConfigError):
        state.at("")


def test_an_acknowledged_object_survives_a_loss_of_power() -> None:
    store = SimObjectStore()
    store.storage("/state").execute(ops.PutIfAbsent(PATH, DATA))
    store.power_loss(random.Random(1))
    assert store.view("/state").peek(PATH) == DATA


def test_an_object_is_there_whole_or_not_at_all_and_requests_can_fail() -> None:
    store = SimObjectStore()
    storage = store.storage("/state")
    seen: list[str] = []

    def hook(name: str, path: str, size: int) -> int:
        seen.append(f"{name} {path} {size}")
        if len(seen) == 2:
            raise OSError(5, "Input/output error", path)
        return 1

    store.before_call = hook
    assert storage.execute(ops.WriteFile("a", [DATA])) == len(DATA)
    with pytest.raises(StorageUnavailableError, match="PutIfAbsent b in /state: Input/output error") as caught:
        storage.execute(ops.PutIfAbsent("b", DATA))
    assert (caught.value.path, caught.value.errno) == ("b", 5)
    assert seen == ["put /state/a 12", "put /state/b 12"]
    assert store.view("/state").paths() == ["a"]


def test_local_files_that_are_not_there_are_told_from_ones_that_fail(tmp_path: Path) -> None:
    storage = SimObjectStore().storage("/state")
    with pytest.raises(ObjectMissingError):
        storage.execute(ops.UploadFile(f"{tmp_path}/none", "a"))
    with pytest.raises(StorageUnavailableError, match="Is a directory"):
        storage.execute(ops.UploadFile(str(tmp_path), "a"))
    storage.execute(ops.PutIfAbsent("a", DATA))
    with pytest.raises(StorageUnavailableError, match="No such file"):
        storage.execute(ops.DownloadFile("a", f"{tmp_path}/none/local"))


def test_another_world_begins_with_what_is_there_and_neither_sees_the_other() -> None:
    store = SimObjectStore()
    store.put("/bucket/a", b"one", "maker")
    other = store.fork(lambda: 7)
    other.put("/bucket/b", b"its")
    store.delete("/bucket/a")
    assert (store.keys("/bucket/"), other.keys("/bucket/")) == ([], ["/bucket/a", "/bucket/b"])
    assert (other.peek("/bucket/a"), other.maker("/bucket/a")) == (b"one", "maker")
