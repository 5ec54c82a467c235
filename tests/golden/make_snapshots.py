"""Writes golden snapshots with the present code: `python -m tests.golden.make_snapshots`, once for each version.

Golden snapshots are kept for ever and read by all later versions, so nothing that is there is overwritten: what a later
version writes otherwise gets a new folder, and new contents get a new module beside contents_v1.py."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.barriers.jobgraph import JobConfig, JobGraph, JobVertex, OperatorDescription
from holdfast.barriers.messages import SubtaskKey
from holdfast.coordinator.ha.shared_state import SharedStateRegistry, shared_handles
from holdfast.operators.task.timers import timer_metas
from holdfast.statebackends.backend import KeyedStateBackend, SnapshotTarget, TimerRow
from holdfast.statebackends.factory import BackendKind, create_keyed_backend, create_operator_backend
from holdfast.statebackends.handles import KeyedStateHandle, OperatorState, OperatorSubtaskState
from holdfast.statebackends.heap.state_table import CopyOnWriteStateTable
from holdfast.statebackends.heap.timers import TimerRows
from holdfast.statebackends.keygroups import assign_key_groups, operator_id
from holdfast.statebackends.layout import METADATA_NAME
from holdfast.statebackends.serialization.state_serializer import state_metas
from holdfast.statebackends.snapshot.metadata import NATIVE_PROPERTY, SnapshotMetadata, encode_metadata
from holdfast.statebackends.state import NO_TIME
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import PutIfAbsent, run_flow
from tests.golden.contents_deltas_v1 import FIRST, SECOND, THIRD
from tests.golden.contents_rounds_v1 import AFTER, BEFORE
from tests.golden.contents_rows_v1 import FIRST as ROWS_FIRST
from tests.golden.contents_rows_v1 import SECOND as ROWS_SECOND
from tests.golden.contents_rows_v1 import THIRD as ROWS_THIRD
from tests.golden.contents_ttl_v1 import TTL_JOB
from tests.golden.contents_v1 import JOB
from tests.golden.contents_window_v1 import WINDOWED
from tests.golden.model import MAX_PARALLELISM, Contents, Held, entries_of
from tests.golden.plainjson import expected

GOLDEN = Path(__file__).parent / "snapshots"
JOB_ID = "9f0cde4a7b1e4d0c8a5b6f1e2d3c4b5a"
_ATTEMPT, _NONCE = 2, "4f3a90"


@dataclass(frozen=True)
class Recipe:
    """One golden snapshot."""

    folder: str
    """Below the golden snapshot's own: `chk-N`, `job/chk-N`, or a savepoint's."""
    backend: BackendKind
    canonical: bool
    inline_threshold: int
    parallelism: Mapping[str, int]
    """1 if it is not said."""
    job: tuple[Contents, ...] = JOB
    native: bool = False
    """A savepoint of the backend's own files."""
    pack_threshold: int = 0
    earlier: tuple[tuple[Contents, ...], ...] = ()
    """What the checkpoints before held, oldest first, upon which this one is an increment. The last is golden, too (`-base`)."""

    @property
    def checkpoint_id(self) -> int:
        return 7 if self.is_savepoint else int(self.folder.rpartition("chk-")[2])

    @property
    def is_savepoint(self) -> bool:
        return self.canonical or self.native

    def folder_before(self, steps: int) -> str:
        """Of the checkpoint so many ids before."""
        return f"{self.folder.rpartition('-')[0]}-{self.checkpoint_id - steps}" if steps else self.folder


RECIPES = {
    "v1-savepoint": Recipe("savepoint-9f0cde-5a1e", "filesystem", True, 20_480, {"flüge/1": 2, "pairs": 3, "source": 3}),
    "v1-filesystem": Recipe("chk-7", "filesystem", False, 2_048, {"flüge/1": 2, "pairs": 1, "source": 2}),
    "v1-memory": Recipe("chk-7", "memory", False, 2_048, {"flüge/1": 1, "pairs": 2, "source": 2}),
    "v1-rocksdb": Recipe("chk-7", "rocksdb", False, 1_024, {"flüge/1": 2, "pairs": 1, "source": 1}),
    "v1-ttl-savepoint": Recipe("savepoint-9f0cde-77aa", "memory", True, 20_480, {"sessions": 2}, TTL_JOB),
    "v1-ttl-rocksdb": Recipe("chk-8", "rocksdb", False, 1_024, {"sessions": 2}, TTL_JOB),
    "v1-rocksdb-incremental": Recipe("job/chk-42", "rocksdb", False, 1_024, {"totals": 2}, AFTER, earlier=(BEFORE,)),
    "v1-filesystem-incremental": Recipe("job/chk-42", "filesystem", False, 512, {"totals": 2}, AFTER, earlier=(BEFORE,)),
    "v1-filesystem-deltas": Recipe("job/chk-43", "filesystem", False, 512, {"totals": 2}, (THIRD,), earlier=((FIRST,), (SECOND,))),
    "v1-filesystem-packed": Recipe(
        "job/chk-43", "filesystem", False, 512, {"totals": 2}, (THIRD,), pack_threshold=1 << 20, earlier=((FIRST,), (SECOND,))
    ),
    "v1-window-savepoint": Recipe("savepoint-9f0cde-0da5", "memory", True, 20_480, {"days": 2}, (WINDOWED,)),
    "v1-rows-savepoint": Recipe("savepoint-9f0cde-0b1d", "memory", True, 20_480, {"bids": 2}, (ROWS_FIRST,)),
    "v1-rows-deltas": Recipe(
        "job/chk-43", "filesystem", False, 512, {"bids": 2}, (ROWS_THIRD,), earlier=((ROWS_FIRST,), (ROWS_SECOND,))
    ),
    "v1-native-savepoint": Recipe("savepoint-9f0cde-c0de", "rocksdb", False, 1_024, {"totals": 2}, BEFORE, native=True),
}


def make(name: str, root: Path = GOLDEN) -> Path:
    """Write one golden snapshot, with its base, and what is expected in it. Raises FileExistsError."""
    recipe = RECIPES[name]
    folder = root / name
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        storage = LocalStorage(Path(scratch) / "state")
        with Maker(recipe, storage, Path(scratch)) as maker:
            made = maker.make()
        for path in sorted((Path(scratch) / "state").rglob("*")):
            if path.is_file():
                target = folder / path.relative_to(Path(scratch) / "state")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    for number, (snapshot, job) in enumerate(made):
        document = {
            "snapshot": snapshot,
            "kind": "savepoint" if recipe.is_savepoint else "checkpoint",
            "job_name": "golden flüge",
            "checkpoint_id": recipe.checkpoint_id - number,
            "operators": {contents.uid: expected(contents, recipe.parallelism.get(contents.uid, 1)) for contents in job},
        }
        text = json.dumps(document, ensure_ascii=False, indent=1, sort_keys=True)
        (folder / ("expected-base.json" if number else "expected.json")).write_text(f"{text}\n", "utf-8")
    return folder


def graph(job: Sequence[Contents], parallelism: Mapping[str, int], state_backend: str = "filesystem") -> JobGraph:
    """A job that declares all of it, a vertex for each operator."""
    vertices = []
    for contents in job:
        key = None if contents.key_type is None else contents.key
        states = state_metas(contents.descriptors, key)
        if contents.timers:
            states += timer_metas(str(contents.key_type))
        kind = {"source": "source", "sink": "sink_writer"}.get(contents.uid, "process")
        operator = OperatorDescription(contents.uid, operator_id(contents.uid), contents.uid, kind, states, contents.key_type)
        count = parallelism.get(contents.uid, 1)
        vertices.append(JobVertex(operator.operator_id, contents.uid, count, MAX_PARALLELISM, (operator,)))
    return JobGraph("golden flüge", tuple(vertices), (), JobConfig(state_backend=state_backend))


class Maker:
    """Writes the checkpoints of one recipe: the tasks' part and the leader's."""

    def __init__(self, recipe: Recipe, storage: LocalStorage, scratch: Path) -> None:
        self._recipe = recipe
        self._storage = storage
        self._scratch = scratch
        self._backends: dict[tuple[str, int], tuple[KeyedStateBackend, dict[str, CopyOnWriteStateTable]]] = {}
        self._shared = SharedStateRegistry()

    def __enter__(self) -> Maker:
        return self

    def __exit__(self, *failure: object) -> None:
        for backend, _ in self._backends.values():
            backend.dispose()

    def make(self) -> list[tuple[str, tuple[Contents, ...]]]:
        """(folder, contents) of what was written, the golden snapshot first."""
        recipe = self._recipe
        rounds = [*recipe.earlier, recipe.job]
        for steps in reversed(range(len(rounds))):
            number = recipe.checkpoint_id - steps
            before = rounds[-steps - 2] if steps < len(recipe.earlier) else None
            self._checkpoint(rounds[-steps - 1], number, recipe.folder_before(steps), before)
        return [(recipe.folder_before(steps), rounds[-steps - 1]) for steps in range(min(len(rounds), 2))]

    def _checkpoint(self, job: Sequence[Contents], number: int, folder: str, before: Sequence[Contents] | None) -> None:
        recipe = self._recipe
        base = None if before is None else number - 1
        stored = {}
        for contents in job:
            for subtask in range(recipe.parallelism.get(contents.uid, 1)):
                key = SubtaskKey(operator_id(contents.uid), subtask)
                old = next((old for old in before or () if old.uid == contents.uid), None)
                stored[key] = {contents.uid: self._subtask(contents, subtask, number, folder, old)}
        resolved = self._shared.resolve(number, base, stored)
        self._shared.register(number, shared_handles(state for each in resolved.values() for state in each.values()))
        operators = []
        for contents in job:
            states = tuple(state[contents.uid] for key, state in sorted(resolved.items()) if contents.uid in state)
            operators.append(
                OperatorState(contents.uid, operator_id(contents.uid), contents.uid, len(states), MAX_PARALLELISM, states)
            )
        metadata = SnapshotMetadata(
            job_id=JOB_ID,
            job_name="golden flüge",
            checkpoint_id=number,
            kind="savepoint" if recipe.is_savepoint else "checkpoint",
            attempt=_ATTEMPT,
            epoch=3,
            trigger_timestamp_ms=1_780_000_000_000,
            completion_timestamp_ms=1_780_000_000_250,
            operators=tuple(operators),
            external=tuple(sorted({path for each in operators for state in each.subtasks for path in state.external})),
            properties={NATIVE_PROPERTY: recipe.backend} if recipe.native else {},
            graph=msgspec.to_builtins(graph(job, recipe.parallelism)),
        )
        self._storage.execute(PutIfAbsent(f"{folder}/{METADATA_NAME}", encode_metadata(metadata)))

    def _subtask(self, contents: Contents, subtask: int, number: int, folder: str, before: Contents | None) -> OperatorSubtaskState:
        recipe = self._recipe
        parallelism = recipe.parallelism.get(contents.uid, 1)
        prefix = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in contents.uid)
        shared = f"{number}-{_ATTEMPT}-{prefix}-{subtask}-{_NONCE}" if recipe.earlier else ""
        base = None if before is None else number - 1
        name = f"{prefix}-{subtask}-{_ATTEMPT}-{_NONCE}"
        inline_threshold, pack_threshold = recipe.inline_threshold, recipe.pack_threshold
        target = SnapshotTarget(number, folder, name, recipe.canonical, inline_threshold, shared, base, pack_threshold)
        lists = create_operator_backend(contents.descriptors, operator=contents.uid)
        for descriptor, entries in contents.lists.items():
            lists.list_state(descriptor.name).update(entries_of(descriptor, entries, subtask, parallelism))
        operator = run_flow(lists.snapshot(number).flow(target), self._storage)
        keyed: tuple[KeyedStateHandle, ...] = ()
        if contents.key_type is not None:
            backend, queues = self._backend(contents, subtask)
            fill(backend, contents, queues, before)
            pending = backend.snapshot(number)
            tables = msgspec.structs.replace(target, inline_threshold=0) if target.canonical else target
            keyed = run_flow(pending.flow(tables), self._storage)
            pending.release()
            backend.notify_checkpoint_complete(number)
        return OperatorSubtaskState(keyed, operator, contents.external if recipe.canonical else ())

    def _backend(self, contents: Contents, subtask: int) -> tuple[KeyedStateBackend, dict[str, CopyOnWriteStateTable]]:
        """The same for all checkpoints of the recipe."""
        place = (contents.uid, subtask)
        if place not in self._backends:
            parallelism = self._recipe.parallelism.get(contents.uid, 1)
            backend = create_keyed_backend(
                self._recipe.backend,
                descriptors=contents.descriptors,
                key_type=contents.key,
                key_groups=assign_key_groups(MAX_PARALLELISM, parallelism, subtask),
                max_parallelism=MAX_PARALLELISM,
                operator=contents.uid,
                subtask=subtask,
                local_dir=str(self._scratch / f"local-{operator_id(contents.uid)}-{subtask}"),
                now_ms=contents.now_ms,
            )
            queues = {name: CopyOnWriteStateTable() for name in contents.timers}
            for name, queue in queues.items():
                backend.register_timers(name, TimerRows(queue, lambda rows: None))
            self._backends[place] = backend, queues
        return self._backends[place]


def fill(
    backend: KeyedStateBackend, contents: Contents, queues: Mapping[str, CopyOnWriteStateTable], before: Contents | None = None
) -> None:
    """Everything of the backend's key groups, through the interfaces that operators use; only what changed since `before`."""
    key_type = contents.key

    def ours(key: object) -> bool:
        group = key_type.key_group(key, MAX_PARALLELISM)
        backend.set_current_key(key_type.encode(key), group)
        return group in backend.key_groups

    for held, old in zip(contents.held, before.held if before is not None else [Held(None)] * len(contents.held), strict=True):
        kept = {(key, namespace): value for key, namespace, value in old.rows}
        wanted = {(key, namespace): value for key, namespace, value in held.rows}
        for (key, namespace), value in kept.items():
            if ((key, namespace) not in wanted or wanted[key, namespace] != value) and ours(key):
                backend.get_state(held.descriptor, namespace).clear()
        for number, (key, namespace, value) in enumerate(held.rows):
            if ((key, namespace) not in kept or kept[key, namespace] != value) and ours(key):
                if held.stamps:
                    backend.set_processing_time(held.stamps[number])
                _put(backend.get_state(held.descriptor, namespace), held.descriptor.kind, value)
    if contents.now_ms is not None:
        backend.set_processing_time(contents.now_ms)
    if contents.columnar is not None:
        state = backend.columnar_state(contents.columnar, ["airline"])
        for window, rows in contents.updates[0 if before is None else len(before.updates) :]:
            mine = [row for row in rows if ours(row[0])]
            if mine:
                keys = key_type.column([pa.array([key for key, _, _ in mine])], max_parallelism=MAX_PARALLELISM)
                inputs = {
                    name: pa.array([row[1 if name == "seats" else 2] for row in mine], kind)
                    for name, kind in ((each.column, each.input_type) for each in contents.columnar.aggregates)
                    if name is not None
                }
                state.update(keys, window, [inputs.get(each.column or "") for each in contents.columnar.aggregates])
        for window in contents.dropped_windows:
            state.remove(window)
    if contents.row_table is not None:
        _fill_row_table(backend, contents, ours, before)
    for name, timers in contents.timers.items():
        old_timers = before.timers[name] if before is not None else ()
        for changed, added in ((set(old_timers) - set(timers), False), (set(timers) - set(old_timers), True)):
            for key, namespace, moment in changed:
                if ours(key):
                    row: TimerRow = (moment, backend.current_key[0], namespace, backend.current_key[1])
                    if added:
                        queues[name].active[row] = True
                    else:
                        queues[name].remove(row)


def _fill_row_table(
    backend: KeyedStateBackend, contents: Contents, ours: Callable[[object], bool], before: Contents | None
) -> None:
    """A namespace is dropped in the round that names it first; what comes later stays."""
    assert contents.row_table is not None
    table = backend.row_table(contents.row_table, ["airline"])
    mine = [row for row in contents.appended[0 if before is None else len(before.appended) :] if ours(row[0])]
    if mine:
        keys = contents.key.column_of_values([key for key, *_ in mine], max_parallelism=MAX_PARALLELISM)
        columns = [pa.array([row[field.name] for *_, row in mine], field.type) for field in contents.row_table.schema]
        times = np.array([NO_TIME if moment is None else moment for _, _, moment, _ in mine])
        table.append(keys, np.array([namespace for _, namespace, _, _ in mine]), columns, times)
    scan = table.scan()
    while (some := scan.next(50)) is not None:
        found = zip(some.take(["airline"]).column(0).to_pylist(), some.namespaces.tolist(), some.take().to_pylist(), strict=True)
        table.delete(some.select(np.array([contents.deleted(*each) for each in found], np.bool_)))
    for namespace in set(contents.dropped) - set(before.dropped if before is not None else ()):
        table.drop(namespace)


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
