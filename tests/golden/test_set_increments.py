"""The golden increment of sets has what was put in: for a restore at any parallelism on any backend, for tools, and for a reader
written from the document alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.statebackends.factory import BackendKind
from holdfast.statebackends.handles import SET_DELTA_FORMAT
from holdfast.statebackends.snapshot.metadata import decode_metadata
from holdfast.statebackends.state_processor.contents import StoredSnapshot, check_contents
from holdfast.statebackends.storage.directory import LocalStorage
from tests.golden.independent_reader import read_snapshot
from tests.golden.set_increments import CONTENTS, FOLDER, SETS
from tests.statebackends.backend_harness import Cluster


def test_the_independent_reader_adds_lists_up() -> None:
    state = read_snapshot(FOLDER / "job" / "chk-3")["operators"]["op"]["states"]["sets"]
    found = {(row["key"], row["window"]): row for row in state["rows"]}
    assert {place: tuple(row["parts"].values()) for place, row in found.items()} == CONTENTS
    assert found["b", 0]["result"] == {"rows": 2, "numbers": 2, "texts": 2}


@pytest.mark.parametrize(("kind", "parallelism"), [("filesystem", 1), ("memory", 3), ("rocksdb", 2)])
def test_a_restore_has_all_values(kind: BackendKind, parallelism: int, tmp_path: Path) -> None:
    metadata = decode_metadata((FOLDER / "job" / "chk-3" / "_metadata").read_bytes(), "golden")
    snapshot = StoredSnapshot(metadata, LocalStorage(FOLDER), "job/chk-3")
    check_contents(snapshot)
    (operator,) = snapshot.metadata.operators
    keyed = operator.subtasks[0].keyed
    assert [handle.format for handle in keyed] == ["arrow", SET_DELTA_FORMAT]
    cluster, found = Cluster(tmp_path, kind), dict[Any, Any]()
    for subtask in range(parallelism):
        backend = cluster.backend((SETS,), parallelism=parallelism, subtask=subtask)
        backend.restore(keyed, LocalStorage(FOLDER), "job/chk-3")
        frozen = backend.columnar_state(SETS, ["user"]).freeze()
        (keys,), namespaces, parts = frozen.columns()
        places = zip(keys.to_pylist(), namespaces.to_pylist(), strict=True)
        found |= dict(zip(places, zip(*(part.to_pylist() for part in parts), strict=True), strict=True))
    cluster.close()
    assert found == CONTENTS
