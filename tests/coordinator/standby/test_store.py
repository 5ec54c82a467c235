"""Records of members: one is the active one of an epoch, whoever asks when; signs are read once, and damage hides nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.coordinator.standby.records import ActiveRecord, Observation, SignOfLife
from holdfast.coordinator.standby.store import MEMBERS_MAX, claim, forget, give_sign, observe
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.layout import MEMBERS_FOLDER, SERVICE_LEADERS_FOLDER, is_directory_file, service_leader_path, sign_path
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import ListFolder, Operation, ReadFile, Storage, run_flow

A, B = "a" * 32, "b" * 32


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


class Passing:
    """Storage that does something of its own on the way."""

    def __init__(self, storage: Storage) -> None:
        self.root = storage.root

    def at(self, location: str) -> Storage:
        raise AssertionError(location)


def sign(member: str, beat: int, **facts: Any) -> SignOfLife:
    return SignOfLife(member, beat, f"http://{member[:2]}", **facts)


def see(storage: Storage, known: Observation = Observation()) -> Observation:  # noqa: B008  # frozen
    return run_flow(observe(known), storage)


def test_one_member_is_active_in_an_epoch_and_all_are_told_which(storage: Storage) -> None:
    mine, theirs = ActiveRecord(1, A, "http://a", 1), ActiveRecord(1, B, "http://b", 2)
    assert run_flow(claim(mine), storage) == mine
    assert run_flow(claim(theirs), storage) == mine
    assert run_flow(claim(mine), storage) == mine, "a claim may be repeated"
    assert see(storage).active == mine


def test_highest_epoch_counts_and_is_found_behind_a_known_one(storage: Storage) -> None:
    records = [ActiveRecord(epoch, A if epoch % 2 else B, "u") for epoch in (1, 2, 3)]
    run_flow(claim(records[0]), storage)
    first = see(storage)
    for record in records[1:]:
        run_flow(claim(record), storage)
    assert see(storage, first).active == see(storage).active == records[2]


def test_the_newest_sign_of_each_member_counts_and_the_one_before_is_deleted(storage: Storage) -> None:
    for beat in (1, 2, 3):
        run_flow(give_sign(sign(A, beat)), storage)
    run_flow(give_sign(sign(B, 1)), storage)
    assert see(storage).signs == {A: sign(A, 3), B: sign(B, 1)}
    assert storage.execute(ListFolder(MEMBERS_FOLDER)) == [f"{A}-3.json", f"{B}-1.json"]


def test_sign_that_is_known_is_not_read_again(storage: Storage) -> None:
    run_flow(give_sign(sign(A, 1)), storage)
    known = see(storage)
    read: list[Operation] = []

    class Watched(Passing):
        def execute(self, operation: Operation) -> Any:
            read.append(operation)
            return storage.execute(operation)

    assert run_flow(observe(known), Watched(storage)) == known
    assert not [each for each in read if isinstance(each, ReadFile)]


def test_sign_that_is_replaced_while_it_is_read_leaves_the_one_before(storage: Storage) -> None:
    run_flow(give_sign(sign(A, 1)), storage)
    known = see(storage)
    run_flow(give_sign(sign(A, 2)), storage)

    class Replacing(Passing):
        def execute(self, operation: Operation) -> Any:
            if isinstance(operation, ReadFile):
                run_flow(give_sign(sign(A, 3)), storage)
            return storage.execute(operation)

    seen = run_flow(observe(known), Replacing(storage))
    assert (seen.signs, seen.beats) == (known.signs, {A: 2})


OF_ANOTHER = b'{"member": "' + B.encode() + b'", "beat": 1, "url": "u"}'


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", OF_ANOTHER, b"[" * 10_000])
def test_damaged_sign_is_none(storage: Storage, tmp_path: Path, content: bytes) -> None:
    run_flow(give_sign(sign(B, 7)), storage)
    (tmp_path / sign_path(A, 1)).write_bytes(content)
    assert set(see(storage).signs) == {B}


def test_damaged_record_of_the_active_member_is_named(storage: Storage, tmp_path: Path) -> None:
    run_flow(claim(ActiveRecord(1, A, "u")), storage)
    (tmp_path / service_leader_path(2)).write_bytes(b"not a record")
    with pytest.raises(CorruptStateError, match=f"{SERVICE_LEADERS_FOLDER}/2"):
        see(storage)


def test_so_many_members_are_read_and_the_active_one_is_among_them(storage: Storage) -> None:
    last = "f" * 32
    run_flow(claim(ActiveRecord(1, last, "u")), storage)
    for number in range(MEMBERS_MAX + 3):
        run_flow(give_sign(sign(f"{number:032x}", 1)), storage)
    run_flow(give_sign(sign(last, 1)), storage)
    signs = see(storage).signs
    assert len(signs) == MEMBERS_MAX + 1
    assert last in signs


def test_members_that_died_soon_hide_none_that_lives(storage: Storage) -> None:
    """One that is started again and again leaves a member behind each time, until it is forgotten ten minutes later."""
    living = "f" * 32
    for number in range(MEMBERS_MAX * 3):
        run_flow(give_sign(sign(f"{number:032x}", 1 + number % 3)), storage)
    run_flow(give_sign(sign(living, 9)), storage)
    seen = see(storage)
    assert living in seen.signs
    assert len(seen.signs) == MEMBERS_MAX
    assert len(seen.beats) == MEMBERS_MAX * 3 + 1  # all can be forgotten
    run_flow(forget([each for each in seen.beats if each != living]), storage)
    assert set(see(storage, seen).beats) == {living}


def test_forgotten_member_that_lives_is_known_again(storage: Storage) -> None:
    run_flow(give_sign(sign(A, 1)), storage)
    run_flow(give_sign(sign(B, 1)), storage)
    run_flow(forget([A]), storage)
    assert set(see(storage).signs) == {B}
    run_flow(give_sign(sign(A, 2)), storage)
    assert set(see(storage).signs) == {A, B}


def test_files_of_members_are_the_directorys_own() -> None:
    assert all(map(is_directory_file, (service_leader_path(12), sign_path(A, 3), "_lock.0a1b")))
    assert not any(map(is_directory_file, (f"{MEMBERS_FOLDER}/x.json", f"{SERVICE_LEADERS_FOLDER}/1/2", "_service/other")))
