"""Names that lead out of a savepoint's folder are refused, whoever made them up."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.coordinator.checkpoints import actions
from holdfast.coordinator.dispatcher.storage_effects import Identity, StorageEffects
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import DeleteFile, DeleteFolder, ListFiles, ReadFile, run_flow
from tests.coordinator.doubles import word_count
from tests.coordinator.world import JOB


@pytest.fixture
def storage(tmp_path: Path) -> RoutedStorage:
    (tmp_path / "savepoints" / "savepoint-1").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_text("mine")
    return RoutedStorage(LocalStorage(tmp_path / "state"))


def test_late_acknowledgement_can_not_delete_outside_its_savepoint(storage: RoutedStorage, tmp_path: Path) -> None:
    effects = StorageEffects(Identity(JOB, 1, "n", 1, word_count()), lambda: 0)
    folder = f"{tmp_path}/savepoints/savepoint-1"
    run_flow(effects.flow(actions.DiscardState(1, folder, ("../../home/precious",))), storage)
    assert (tmp_path / "home" / "precious").read_text() == "mine"


def test_one_root_has_one_storage_by_whichever_way_it_is_reached(storage: RoutedStorage, tmp_path: Path) -> None:
    near = storage.at(f"{tmp_path}/savepoints")
    assert near.root == f"{tmp_path}/savepoints"
    assert storage.resolve(f"{tmp_path}/savepoints/savepoint-1") == (near, "savepoint-1")
    assert storage.at(f"file://{tmp_path}/savepoints") is near


@pytest.mark.parametrize("path", ["/savepoints/savepoint-1/../../home/precious", "file://{}/savepoints/../home/precious"])
def test_absolute_paths_are_not_normalised_away(storage: RoutedStorage, tmp_path: Path, path: str) -> None:
    location = path.format(tmp_path) if "{}" in path else f"{tmp_path}{path}"
    for operation in (ReadFile(location), DeleteFile(location), ListFiles(location), DeleteFolder(location)):
        with pytest.raises(InvalidConfigError):
            storage.execute(operation)
    assert (tmp_path / "home" / "precious").exists()
