"""`Savepoint.from_snapshot`: operators and states taken out, renamed, added, in other key groups; what every backend restores."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.barriers.jobgraph import JobGraph, with_uids
from holdfast.barriers.sinks.log import LogPosition
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, InvalidKeyError, NotFoundError
from holdfast.statebackends.factory import BackendKind, create_keyed_backend
from holdfast.statebackends.heap.state_table import CopyOnWriteStateTable
from holdfast.statebackends.heap.timers import TimerRows
from holdfast.statebackends.keygroups import assign_key_groups, operator_id
from holdfast.statebackends.redistribute import keyed_redistribute
from holdfast.statebackends.snapshot.metadata import NATIVE_PROPERTY, encode_metadata
from holdfast.statebackends.state import OperatorListStateDescriptor, Redistribution
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from tests.examples import crossed
from tests.statebackends.snapshot_harness import (
    _SETTINGS,
    COUNT,
    KEY,
    KINDS,
    LABELS,
    SEEN,
    TAGS,
    UID,
    WINDOWS,
    Contents,
    files_below,
    write,
)

MANY = Contents(
    count={f"key-{number}": number for number in range(120)},
    labels={f"key-{number}": {"x": {str(number), "b"}} for number in range(0, 120, 9)},
    seen={f"key-{number}": [str(each) for each in range(number % 4)] for number in range(120) if number % 4},
    tags={f"key-{number}": {"a": number, "b": -number} for number in range(0, 120, 7)},
    windows={(f"key-{number}", 60 * (number % 3)): number for number in range(0, 120, 3)},
    timers={(f"key-{number}", number) for number in range(0, 120, 5)},
    positions=[[f"{number}.parquet", number] for number in range(9)],
    rules=["r"],
)
LIMITS = hf.ValueStateDescriptor("limits", float)
_numbers = itertools.count()


@dataclass
class Restored:
    """What backends have after a restore."""

    count: dict[str, int] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, list[str]] = field(default_factory=dict)
    tags: dict[str, dict[str, int]] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    windows: dict[tuple[str, int], int] = field(default_factory=dict)
    timers: set[tuple[str, int]] = field(default_factory=set)


def restored(
    snapshot: hf.Snapshot, kind: BackendKind, tmp_path: Path, *, uid: str = UID, count: Any = COUNT, parallelism: int = 2
) -> Restored:
    """All keys of an operator as the backends of so many subtasks see them, however they are asked for."""
    operator = next(each for each in snapshot.metadata.operators if each.uid == uid)
    maximum, found = operator.max_parallelism, Restored()
    for subtask, shares in enumerate(keyed_redistribute(operator.subtasks, maximum, parallelism)):
        groups = assign_key_groups(maximum, parallelism, subtask)
        backend = create_keyed_backend(
            kind,
            descriptors=(count, LABELS, SEEN, TAGS, WINDOWS, LIMITS),
            key_type=KEY,
            key_groups=groups,
            max_parallelism=maximum,
            operator=uid,
            subtask=subtask,
            local_dir=str(tmp_path / f"local-{next(_numbers)}"),
            settings=_SETTINGS,
        )
        timers: list[Any] = []
        backend.register_timers("_timers", TimerRows(CopyOnWriteStateTable(), timers.extend))
        storage = snapshot._stored.storage
        backend.restore([share.handle for share in shares], storage, snapshot._stored.folder)
        for key in MANY.count:
            if KEY.key_group(key, maximum) not in groups:
                continue
            backend.set_current_key(KEY.encode(key), KEY.key_group(key, maximum))
            for name, descriptor in (("count", count), ("labels", LABELS), ("limits", LIMITS)):
                if (value := backend.get_state(descriptor).value()) is not None:
                    getattr(found, name)[key] = value
            if seen := list(backend.get_state(SEEN).get() or []):
                found.seen[key] = seen
            if tags := dict(backend.get_state(TAGS).items()):
                found.tags[key] = tags
        windows = backend.columnar_state(WINDOWS, ["user"])
        for window in windows.namespaces():
            rows = windows.read(window).to_pylist()
            found.windows |= {(row["user"], window): row["sum_v"] for row in rows}
        found.timers |= {(KEY.decode(key), time) for time, key, *_ in timers}
        backend.dispose()
    return found


EXPECTED = Restored(MANY.count, MANY.labels, MANY.seen, MANY.tags, {}, MANY.windows, MANY.timers)


def taken(tmp_path: Path, kind: BackendKind = "memory", *, canonical: bool = True, parallelism: int = 3) -> hf.Snapshot:
    folder = "savepoint-7" if canonical else "job/chk-7"
    return hf.Snapshot(write(tmp_path, folder, MANY, kind=kind, canonical=canonical, parallelism=parallelism).location)


@pytest.mark.parametrize(("kind", "canonical", "maximum"), crossed(KINDS, [False, True], [3, 8, 16, 1_000], every=4))
def test_every_backend_restores_another_max_parallelism(tmp_path: Path, kind: Any, canonical: bool, maximum: int) -> None:
    source = taken(tmp_path, kind, canonical=canonical)
    before = files_below(Path(source.location))
    moved = hf.Savepoint.from_snapshot(source).with_max_parallelism(maximum).write(tmp_path / "moved")
    assert (moved.operators[UID].max_parallelism, moved.operators[UID].parallelism) == (maximum, 3)
    assert moved.verify().is_sound
    assert source.diff(moved).is_same
    assert all(row["key_group"] == KEY.key_group(row["key"], maximum) for row in moved.rows(UID, "count"))
    assert files_below(Path(source.location)) == before
    for parallelism in (1, 3):
        assert restored(moved, kind, tmp_path, parallelism=parallelism) == EXPECTED
    back = hf.Savepoint.from_snapshot(moved).with_max_parallelism(8).write(tmp_path / "back")
    assert restored(back, kind, tmp_path) == EXPECTED


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("canonical", [False, True])
def test_every_backend_restores_what_was_renamed_and_added(tmp_path: Path, kind: Any, canonical: bool) -> None:
    limits = pa.table({"key": ["key-1", "key-2"], "value": [1.5, 2.5]})
    other = pa.table({"key": ["key-3"], "value": [3]})
    written = (
        hf.Savepoint.from_snapshot(taken(tmp_path, kind, canonical=canonical))
        .with_state(UID, LIMITS, limits)
        .with_operator_renamed(UID, "sums")
        .with_state_renamed("sums", "count", "n")
        .without_state("sums", "tags")
        .without_state("sums", "positions")
        .with_state("other", COUNT, other)
        .write(tmp_path / "written")
    )
    snapshot = hf.Snapshot(tmp_path / "written")
    assert snapshot.metadata == written.metadata
    assert snapshot.verify().is_sound
    sums = next(operator for operator in snapshot.metadata.operators if operator.uid == "sums")
    assert (sums.operator_id, sums.name, sums.max_parallelism) == (operator_id("sums"), "Totals", 8)
    assert set(snapshot.states("sums")) == {"_timers", "labels", "limits", "n", "rules", "seen", "windows"}
    count = replace(COUNT, name="n")
    expected = replace(EXPECTED, tags={}, limits={"key-1": 1.5, "key-2": 2.5})
    for parallelism in (1, 3):
        assert restored(snapshot, kind, tmp_path, uid="sums", count=count, parallelism=parallelism) == expected
    assert restored(snapshot, kind, tmp_path, uid="other") == Restored(count={"key-3": 3})
    assert snapshot.metadata.properties["edited"].split("; ") == [
        "totals renamed to sums",
        "sums.count renamed to n",
        "sums.positions removed",
        "sums.tags removed",
        "sums.limits added",
        "other.count added",
    ]
    again = hf.Savepoint.from_snapshot(snapshot).with_max_parallelism(16).write(tmp_path / "again")
    assert restored(again, kind, tmp_path, uid="sums", count=count) == expected, "state in handles of its own moves, too"


def test_names_that_are_swapped(tmp_path: Path) -> None:
    first = pa.table({"key": ["a"], "value": [1]})
    second = pa.table({"key": ["a"], "value": [2]})
    source = (
        hf.Savepoint.create(max_parallelism=8)
        .with_state("one", COUNT, first)
        .with_state("one", replace(COUNT, name="other"), second)
        .with_state("two", COUNT, second)
        .write(tmp_path / "source")
    )
    swapped = (
        hf.Savepoint.from_snapshot(source)
        .with_operator_renamed("one", "x")
        .with_operator_renamed("two", "one")
        .with_operator_renamed("x", "two")
        .with_state_renamed("two", "count", "x")
        .with_state_renamed("two", "other", "count")
        .with_state_renamed("two", "x", "other")
        .write(tmp_path / "swapped")
    )
    rows = {
        (uid, name): [row["value"] for row in swapped.rows(uid, name)] for uid in ("one", "two") for name in swapped.states(uid)
    }
    assert rows == {("one", "count"): [2], ("two", "count"): [2], ("two", "other"): [1]}


def test_an_operator_that_is_taken_out_takes_its_files_along(tmp_path: Path) -> None:
    source = taken(tmp_path)
    metadata = source.metadata
    operator = metadata.operators[0]
    subtasks = [msgspec.structs.replace(operator.subtasks[0], external=("/in/a", "/in/both")), *operator.subtasks[1:]]
    other_subtask = msgspec.structs.replace(operator.subtasks[0], keyed=(), operator=(), external=("/in/both",))
    other = msgspec.structs.replace(operator, uid="other", name="other", parallelism=1, subtasks=(other_subtask,))
    stored = StoredSnapshot(
        msgspec.structs.replace(
            metadata,
            operators=(msgspec.structs.replace(operator, subtasks=tuple(subtasks)), other),
            external=("/in/a", "/in/both", "/in/nobody's"),
            properties={NATIVE_PROPERTY: "rocksdb", "finished_tasks": "v:1"},
        ),
        source._stored.storage,
        source._stored.folder,
    )
    Path(source.location, "_metadata").write_bytes(encode_metadata(stored.metadata))
    cut = hf.Savepoint.from_snapshot(source.location).without_operator(UID).write(tmp_path / "cut")
    assert set(cut.operators) == {"other"}
    assert cut.metadata.external == ("/in/both", "/in/nobody's")
    assert cut.metadata.properties == {"finished_tasks": "v:1", "edited": "totals removed"}
    assert set(files_below(tmp_path / "cut")) == {"_metadata"}


def test_operator_state_is_added_and_renamed(tmp_path: Path) -> None:
    extra = OperatorListStateDescriptor("extra", Redistribution.UNION)
    written = (
        hf.Savepoint.from_snapshot(taken(tmp_path))
        .with_operator_state(UID, extra, [b"1", b"2"])
        .with_state_renamed(UID, "positions", "places")
        .with_max_parallelism(16)
        .write(tmp_path / "written")
    )
    assert [row["value"] for row in written.rows(UID, "extra")] == [ord("1"), ord("2")], "as msgpack"
    assert sorted(row["value"] for row in written.rows(UID, "places")) == MANY.positions
    assert {state.kind for state in written.states(UID).values()} >= {"operator_union", "operator_list", "operator_broadcast"}


COMMITTED = OperatorListStateDescriptor("committables")
Step = Callable[[hf.Savepoint], hf.Savepoint]
NUMBERS = pa.table({"key": [1], "value": [1]})
ONE = pa.table({"key": ["a"], "value": [1]})
REFUSED: list[tuple[str, Step, type[HoldfastError], str]] = [
    ("no such operator", lambda s: s.without_operator("x"), NotFoundError, "has no operator 'x' from the snapshot; it has: totals"),
    ("gone already", lambda s: s.without_operator(UID).without_state(UID, "count"), NotFoundError, "it has: none"),
    ("no such state", lambda s: s.without_state(UID, "x"), NotFoundError, "has no state 'x' from the snapshot; it has: _timers"),
    ("name taken", lambda s: s.with_state_renamed(UID, "count", "tags"), InvalidConfigError, "there is one of that name"),
    ("no name", lambda s: s.with_state_renamed(UID, "count", ""), InvalidConfigError, "it is no name"),
    ("timers", lambda s: s.with_state_renamed(UID, "_timers", "x"), InvalidConfigError, "timers are found by this name alone"),
    (
        "to be timers",
        lambda s: s.with_state_renamed(UID, "count", "_event_time_timers"),
        InvalidConfigError,
        "is the name of its timers",
    ),
    (
        "a sink's output renamed",
        lambda s: s.with_operator_state("out", COMMITTED, [b"1"]).with_state_renamed("out", "committables", "x"),
        InvalidConfigError,
        "output that a sink has staged and not yet committed",
    ),
    ("a sink's output taken out", lambda s: s.without_state(UID, "committables"), InvalidConfigError, "only with its operator"),
    ("to be a sink's output", lambda s: s.with_state_renamed(UID, "positions", "committables"), InvalidConfigError, "by this name"),
    ("empty uid", lambda s: s.with_operator_renamed(UID, ""), InvalidConfigError, "must not be empty"),
    (
        "uid of added states",
        lambda s: s.with_state("new", COUNT, ONE).with_operator_renamed(UID, "new"),
        InvalidConfigError,
        "states were added to one of that uid",
    ),
    ("too few key groups", lambda s: s.with_max_parallelism(2), InvalidConfigError, "max parallelism 2 is less than 3"),
    ("too many key groups", lambda s: s.with_max_parallelism(40_000), InvalidConfigError, "must be 1..32768"),
    ("state is there", lambda s: s.with_state(UID, COUNT, ONE), InvalidConfigError, "state 'count' is in the snapshot already"),
    (
        "keys of another type",
        lambda s: s.with_state(UID, LIMITS, pa.table({"key": [1], "value": [1.0]})),
        InvalidConfigError,
        "its states have keys of int64 and utf8",
    ),
    (
        "a null key",
        lambda s: s.with_state(UID, LIMITS, pa.table({"key": ["a", None], "value": [1.0, 2.0]})),
        InvalidKeyError,
        "row 1",
    ),
]


@pytest.mark.parametrize(("what", "step", "error", "said"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_is_refused_leaves_no_target(tmp_path: Path, what: str, step: Step, error: type[HoldfastError], said: str) -> None:
    with pytest.raises(error, match=said):
        step(hf.Savepoint.from_snapshot(taken(tmp_path))).write(tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_the_max_parallelism_of_added_operators_has_to_be_known(tmp_path: Path) -> None:
    source = (
        hf.Savepoint.create(max_parallelism=8).with_state("one", COUNT, ONE).with_state("two", COUNT, ONE).write(tmp_path / "a")
    )
    mixed = hf.Savepoint.from_snapshot(source).with_max_parallelism(16, uid="two").write(tmp_path / "b")
    assert [operator.max_parallelism for operator in mixed.metadata.operators] == [8, 16]
    with pytest.raises(InvalidConfigError, match=r"'three': of which max parallelism\? those of the snapshot have 8, 16"):
        hf.Savepoint.from_snapshot(mixed).with_state("three", COUNT, ONE).write(tmp_path / "c")
    with_three = hf.Savepoint.from_snapshot(mixed, max_parallelism=32).with_state("three", COUNT, ONE).write(tmp_path / "c")
    assert with_three.operators["three"].max_parallelism == 32
    with pytest.raises(InvalidConfigError, match="lies in the snapshot itself"):
        hf.Savepoint.from_snapshot(mixed).write(tmp_path / "b" / "inner")
    with pytest.raises(InvalidConfigError, match="use Savepoint"):
        hf.Savepoint.create(max_parallelism=8).without_operator("one")


def test_the_job_that_declares_the_new_names_takes_it(tmp_path: Path) -> None:
    source = hf.Savepoint.create(max_parallelism=8).with_state("counts", COUNT, ONE).write(tmp_path / "source")
    env = hf.Environment("renamed")
    schema = pa.schema([("user", pa.string())])
    rows = env.from_source(hf.GeneratorSource(lambda numbers: pa.RecordBatch.from_pydict({}), 1, schema)).uid("rows")
    rows.key_by("user").process(lambda value, ctx, out: None, states=[replace(COUNT, name="n")]).uid("totals").sink_to(
        hf.Blackhole()
    ).uid("out")
    assert "counts" in str(env.preflight(tmp_path / "source").refusals)
    fitted = (
        hf.Savepoint.from_snapshot(source)
        .with_operator_renamed("counts", "totals")
        .with_state_renamed("totals", "count", "n")
        .with_max_parallelism(64)
        .write(tmp_path / "fitted")
    )
    assert fitted.operators["totals"].max_parallelism == 64
    report = env.preflight(tmp_path / "fitted")
    assert report.fits, report.refusals


def sink_job(path: Path, sink: str) -> hf.Environment:
    env = hf.Environment("sinks")
    schema = pa.schema([("user", pa.string())])
    rows = env.from_source(hf.GeneratorSource(lambda numbers: pa.RecordBatch.from_pydict({}), 1, schema)).uid("rows")
    rows.sink_to(hf.ParquetSink(str(path), sink_id="out")).uid(sink)
    return env


def of_sink_job(tmp_path: Path) -> hf.Snapshot:
    """A savepoint of an older Holdfast, whose committer did not say where its log is: that is in the graph alone."""
    graph = msgspec.to_builtins(sink_job(tmp_path / "old", "out").build().graph)
    entry = msgspec.msgpack.encode(LogPosition(1, 1, 1, "owner", "0" * 32))
    written = (
        hf.Savepoint.create(max_parallelism=1)
        .with_operator_state("out-committer", OperatorListStateDescriptor("committables"), [entry])
        .write(tmp_path / "source")
    )
    Path(written.location, "_metadata").write_bytes(encode_metadata(msgspec.structs.replace(written.metadata, graph=graph)))
    return hf.Snapshot(written.location)


def test_a_sink_that_is_renamed_is_judged_by_the_place_of_its_old_uid(tmp_path: Path) -> None:
    source = of_sink_job(tmp_path)
    savepoint = hf.Savepoint.from_snapshot(source).with_operator_renamed("out-committer", "rows-out-committer")
    renamed = savepoint.write(tmp_path / "new")
    for env, snapshot in ((sink_job(tmp_path / "x", "out"), source), (sink_job(tmp_path / "x", "rows-out"), renamed)):
        (refusal,) = env.preflight(snapshot.location).refusals
        assert refusal.kind == "SinkMovedError"
        assert str(tmp_path / "old") in refusal.message


def test_the_graph_calls_operators_as_the_savepoint_does(tmp_path: Path) -> None:
    source = of_sink_job(tmp_path)
    renamed = hf.Savepoint.from_snapshot(source).with_operator_renamed("out-committer", "rows").write(tmp_path / "renamed")
    assert source.metadata.graph is not None
    before, graph = (msgspec.convert(each.metadata.graph, JobGraph) for each in (source, renamed))
    (committer,) = [each for vertex in graph.vertices for each in vertex.operators if each.uid == "rows"]
    assert (committer.operator_id, committer.kind, committer.sink_id) == (operator_id("rows"), "sink_committer", "out")
    assert committer.operator_id == renamed.metadata.operators[0].operator_id
    ids = {vertex.vertex_id for vertex in graph.vertices}
    assert len(ids) == len(before.vertices), "the source, whose uid the committer has now, is called by its id"
    assert {end for edge in graph.edges for end in (edge.source, edge.target)} <= ids
    uids = {each.uid for vertex in graph.vertices for each in vertex.operators}
    assert {operator_id("rows"), "rows", "out"} == uids
    assert {edge.source_operator for edge in graph.edges} <= uids
    assert all(operator_id(each.uid) == each.operator_id for vertex in graph.vertices for each in vertex.operators)
    back = hf.Savepoint.from_snapshot(renamed).with_max_parallelism(2).write(tmp_path / "same")
    assert back.metadata.graph == renamed.metadata.graph


def test_a_graph_that_is_none_stays_as_it_is() -> None:
    for graph in (None, {}, {"vertices": 5}):
        assert with_uids(graph, {"a": "b"}) == graph
