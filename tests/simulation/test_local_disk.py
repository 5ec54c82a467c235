"""Copies of state on a worker's own disk, damaged by the simulator: what it changes, and that nothing but copies is touched."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.world import RunRequest
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.faults.local_disk import damage_copies, limited_disk
from holdfast.statebackends.errors import OutOfSpaceError
from holdfast.statebackends.local_recovery import copies as localcopies
from holdfast.statebackends.local_recovery import storage as localrecovery
from holdfast.statebackends.rocksdb import database as rocksdb_store

OWNER = Path("recovery", "job", "1-vertex-0-n1")


def test_copies_are_damaged_and_other_names_of_them_are_not(tmp_path: Path) -> None:
    owner = tmp_path / OWNER
    owner.mkdir(parents=True)
    (owner / "lock").touch()
    contents = {f"{number:032x}": bytes([number]) * 50 for number in range(40)}
    (tmp_path / "database").mkdir()
    for name, content in contents.items():
        (tmp_path / "database" / name).write_bytes(content)
        os.link(tmp_path / "database" / name, owner / name)
    count = damage_copies(str(tmp_path), random.Random(1))
    found = {path.name: path.read_bytes() for path in owner.iterdir()}
    assert found.pop("lock") == b""
    assert 20 < count < 40
    assert 0 < len(contents) - len(found) < count
    assert sum(found.get(name) != content for name, content in contents.items()) > count // 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "database").iterdir()} == contents


def test_without_copies_there_is_nothing_to_damage(tmp_path: Path) -> None:
    assert damage_copies(str(tmp_path), random.Random(1)) == 0


def test_a_restore_takes_what_is_intact_from_the_disk_and_the_rest_from_storage() -> None:
    for backend in ("filesystem", "rocksdb"):
        plan = (Fault("damage_copies", "workers", at_ms=700), Fault("kill_worker", "workers", at_ms=1_000))
        run = run_seed(RunRequest(1, "counter", plan=plan, backend=backend))
        assert run.result.violations == ()
        assert run.result.faults_hit == (0, 1)
        assert run.result.sometimes["restored_from_disk"] > 0


def test_a_disk_without_room_says_so_in_the_words_of_each_and_is_as_before_afterwards(tmp_path: Path) -> None:
    places = [(rocksdb_store, "Rdict"), (localcopies, "bring"), (localcopies, "_write"), (localrecovery, "bring")]
    before = [getattr(module, name) for module, name in places]
    (tmp_path / "source").touch()
    room = iter([False, True, True, False])
    with limited_disk(lambda: next(room), str(tmp_path)):
        localcopies.bring(str(tmp_path / "source"), str(tmp_path / "copy"), link=True)
        with pytest.raises(OutOfSpaceError, match="No space left on device"):
            rocksdb_store.RocksStore(str(tmp_path / "db"), write_buffer_bytes=1 << 20)
        with pytest.raises(OSError, match="No space left on device"):
            localrecovery.bring(str(tmp_path / "source"), str(tmp_path / "other"), link=True)  # type: ignore[attr-defined]
        rocksdb_store.RocksStore(str(tmp_path / "db"), write_buffer_bytes=1 << 20).close()
    assert [getattr(module, name) for module, name in places] == before


@pytest.mark.parametrize(("backend", "refused"), [("rocksdb", True), ("filesystem", False)])
def test_a_job_waits_for_room_on_its_hosts_disk_where_its_state_needs_it(backend: str, refused: bool) -> None:
    plan = (Fault("local_disk_full", "workers", at_ms=600, duration_ms=800),)
    result = run_seed(RunRequest(1, "counter", plan=plan, backend=backend)).result
    assert result.violations == ()
    assert result.faults_hit == (0,)
    assert ("restore_refused" in result.sometimes) == refused
