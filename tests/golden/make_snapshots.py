"""Writes golden snapshots with the present code: `python -m tests.golden.make_snapshots`, once for each version.

Golden snapshots are kept for ever and read by all later versions, so nothing that is there is overwritten: what a later
version writes otherwise gets a new folder, and new contents get a new module beside contents_v1.py."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa

from barriers.jobgraph import JobConfig, JobGraph, JobVertex, OperatorDescription
from operators.timers import timer_metas
from statebackends.backend import SnapshotTarget, TimerRow
from statebackends.factory import BackendKind, create_keyed_backend, create_operator_backend
from statebackends.generations import GenerationRows, Generations
from statebackends.handles import KeyedStateHandle, OperatorState, OperatorSubtaskState
from statebackends.keyedbase import KeyedBackendBase
from statebackends.keygroups import assign_key_groups, operator_id
from statebackends.metadata import SnapshotMetadata, encode_metadata
from statebackends.snapshot import METADATA_NAME
from statebackends.statecodec import state_metas
from statebackends.storage.local import LocalStorage
from statebackends.storage.operations import PutIfAbsent, run_flow
from tests.golden.contents_v1 import JOB, MAX_PARALLELISM, Contents, entries_of
from tests.golden.plainjson import expected

GOLDEN = Path(__file__).parent / "snapshots"
EXPECTED_NAME = "expected.json"
JOB_ID = "9f0cde4a7b1e4d0c8a5b6f1e2d3c4b5a"


@dataclass(frozen=True)
class Recipe:
    """One golden snapshot."""

    folder: str
    """Below the golden snapshot's own: `chk-N`, or a savepoint's."""
    backend: BackendKind
    canonical: bool
    inline_threshold: int
    parallelism: Mapping[str, int]


RECIPES = {
    "v1-savepoint": Recipe("savepoint-9f0cde-5a1e", "filesystem", True, 20_480, {"flüge/1": 2, "pairs": 3, "source": 3}),
    "v1-filesystem": Recipe("chk-7", "filesystem", False, 2_048, {"flüge/1": 2, "pairs": 1, "source": 2}),
    "v1-memory": Recipe("chk-7", "memory", False, 2_048, {"flüge/1": 1, "pairs": 2, "source": 2}),
    "v1-rocksdb": Recipe("chk-7", "rocksdb", False, 1_024, {"flüge/1": 2, "pairs": 1, "source": 1}),
}


def make(name: str, root: Path = GOLDEN) -> Path:
    """Write one golden snapshot and what is expected in it. Raises FileExistsError."""
    recipe = RECIPES[name]
    folder = root / name
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        storage = LocalStorage(Path(scratch) / "state")
        operators = tuple(_operator(contents, recipe, storage, Path(scratch)) for contents in JOB)
        metadata = SnapshotMetadata(
            job_id=JOB_ID,
            job_name="golden flüge",
            checkpoint_id=7,
            kind="savepoint" if recipe.canonical else "checkpoint",
            attempt=2,
            epoch=3,
            trigger_timestamp_ms=1_780_000_000_000,
            completion_timestamp_ms=1_780_000_000_250,
            operators=operators,
            external=tuple(sorted({path for each in operators for state in each.subtasks for path in state.external})),
            graph=msgspec.to_builtins(graph(recipe.parallelism)),
        )
        storage.execute(PutIfAbsent(f"{recipe.folder}/{METADATA_NAME}", encode_metadata(metadata)))
        shutil.copytree(Path(scratch) / "state" / recipe.folder, folder / recipe.folder)
    document = {
        "snapshot": recipe.folder,
        "kind": metadata.kind,
        "job_name": metadata.job_name,
        "checkpoint_id": metadata.checkpoint_id,
        "operators": {contents.uid: expected(contents, recipe.parallelism.get(contents.uid, 1)) for contents in JOB},
    }
    (folder / EXPECTED_NAME).write_text(json.dumps(document, ensure_ascii=False, indent=1, sort_keys=True) + "\n", "utf-8")
    return folder


def graph(parallelism: Mapping[str, int], state_backend: str = "filesystem") -> JobGraph:
    """A job that declares all of it, a vertex for each operator."""
    vertices = []
    for contents in JOB:
        key = None if contents.key_type is None else contents.key
        states = state_metas(contents.descriptors, key)
        if contents.timers:
            states += timer_metas(str(contents.key_type))
        kind = {"source": "source", "sink": "sink_writer"}.get(contents.uid, "process")
        operator = OperatorDescription(contents.uid, operator_id(contents.uid), contents.uid, kind, states, contents.key_type)
        count = parallelism.get(contents.uid, 1)
        vertices.append(JobVertex(operator.operator_id, contents.uid, count, MAX_PARALLELISM, (operator,)))
    return JobGraph("golden flüge", tuple(vertices), (), JobConfig(state_backend=state_backend))


def _operator(contents: Contents, recipe: Recipe, storage: LocalStorage, scratch: Path) -> OperatorState:
    parallelism = recipe.parallelism.get(contents.uid, 1)
    subtasks = tuple(_subtask(contents, recipe, storage, scratch, subtask) for subtask in range(parallelism))
    return OperatorState(contents.uid, operator_id(contents.uid), contents.uid, parallelism, MAX_PARALLELISM, subtasks)


def _subtask(contents: Contents, recipe: Recipe, storage: LocalStorage, scratch: Path, subtask: int) -> OperatorSubtaskState:
    parallelism = recipe.parallelism.get(contents.uid, 1)
    prefix = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in contents.uid)
    target = SnapshotTarget(7, recipe.folder, f"{prefix}-{subtask}-2-4f3a90", recipe.canonical, recipe.inline_threshold)
    lists = create_operator_backend(contents.descriptors, operator=contents.uid)
    for descriptor, entries in contents.lists.items():
        lists.list_state(descriptor.name).update(entries_of(descriptor, entries, subtask, parallelism))
    operator = run_flow(lists.snapshot(7).flow(target), storage)
    keyed: tuple[KeyedStateHandle, ...] = ()
    if contents.key_type is not None:
        backend = create_keyed_backend(
            recipe.backend,
            descriptors=contents.descriptors,
            key_type=contents.key,
            key_groups=assign_key_groups(MAX_PARALLELISM, parallelism, subtask),
            max_parallelism=MAX_PARALLELISM,
            operator=contents.uid,
            subtask=subtask,
            local_dir=str(scratch / f"local-{operator_id(contents.uid)}-{subtask}"),
        )
        fill(backend, contents)
        pending = backend.snapshot(7)
        tables = SnapshotTarget(7, target.folder, target.file_prefix, target.canonical, 0) if target.canonical else target
        keyed = run_flow(pending.flow(tables), storage)
        pending.release()
        backend.dispose()
    external = contents.external if recipe.canonical else ()
    return OperatorSubtaskState(keyed, operator, external)


def fill(backend: KeyedBackendBase, contents: Contents) -> None:
    """Everything of the backend's key groups, through the interfaces that operators use."""
    key_type = contents.key

    def ours(key: object) -> bool:
        group = key_type.key_group(key, MAX_PARALLELISM)
        backend.set_current_key(key_type.encode(key), group)
        return group in backend.key_groups

    queues = {name: Generations() for name in contents.timers}
    for name, queue in queues.items():
        backend.register_timers(name, GenerationRows(queue, lambda rows: None))
    for held in contents.held:
        for key, namespace, value in held.rows:
            if ours(key):
                _put(backend.get_state(held.descriptor, namespace), held.descriptor.kind, value)
    if contents.columnar is not None:
        state = backend.columnar_state(contents.columnar, ["airline"])
        for window, rows in contents.updates:
            mine = [row for row in rows if ours(row[0])]
            if mine:
                keys = key_type.column([pa.array([key for key, _, _ in mine])], max_parallelism=MAX_PARALLELISM)
                inputs = {
                    "seats": pa.array([row[1] for row in mine], pa.int32()),
                    "delay": pa.array([row[2] for row in mine], pa.float64()),
                }
                state.update(keys, window, [inputs.get(each.column or "") for each in contents.columnar.aggregates])
    for name, timers in contents.timers.items():
        for key, namespace, moment in timers:
            if ours(key):
                row: TimerRow = (moment, *backend.current_key[:1], namespace, backend.current_key[1])
                queues[name].live[row] = True


def _put(state: object, kind: str, value: object) -> None:
    match kind:
        case "list":
            state.add_all(value)  # type: ignore[attr-defined]
        case "map":
            for key, member in value.items():  # type: ignore[attr-defined]
                state.put(key, member)  # type: ignore[attr-defined]
        case "reducing" | "aggregating":
            for each in value:  # type: ignore[attr-defined]
                state.add(each)  # type: ignore[attr-defined]
        case _:
            state.update(value)  # type: ignore[attr-defined]


if __name__ == "__main__":
    for wanted in sys.argv[1:] or sorted(name for name in RECIPES if not (GOLDEN / name).exists()):
        try:
            sys.stdout.write(f"{make(wanted)}\n")
        except FileExistsError as error:
            sys.exit(f"{error.filename} exists: golden snapshots are kept for ever")
