"""What no task can have stored declines its checkpoint when it is acknowledged, and nothing but its writer's own files goes.

Real acknowledgements of real backends are made wrong in one or two places, and whatever is taken must be a snapshot that can
be verified and restored."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, Partitioning
from holdfast.barriers.messages import AckBatch, AcknowledgeCheckpoint, AckStatus, FailureReason, SubtaskKey
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.checkpoints.acknowledgements import AcknowledgementValidator, _check_external, _Refused
from holdfast.coordinator.ha.recorded_job import Completed, decode_decision
from holdfast.coordinator.ha.shared_state import SharedStateRegistry
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.restore.assign import assign_state
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.backends.operator import read_entries
from holdfast.statebackends.errors import FencedError, InvalidConfigError
from holdfast.statebackends.factory import create_keyed_backend, create_operator_backend
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorListHandle,
    OperatorSubtaskState,
    PlaceholderHandle,
    SegmentHandle,
    StateMeta,
)
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.layout import exclusive_prefix, shared_prefix
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import state_metas
from holdfast.statebackends.settings import StateBackendSettings
from holdfast.statebackends.snapshot.metadata import decode_metadata
from holdfast.statebackends.snapshot.parts import verify_snapshot
from holdfast.statebackends.state import ListStateDescriptor, OperatorListStateDescriptor, ValueStateDescriptor
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.port import DownloadFile, Operation, UploadFile, run_flow
from tests.coordinator.bench import ENTRIES, A, B, Bench, answers, of, path, state
from tests.coordinator.bench import JOB as BENCH_JOB
from tests.coordinator.doubles import operator, vertex
from tests.coordinator.rig import Rig
from tests.coordinator.world import JOB
from tests.examples import examples
from tests.operators.ports import DictStorage

CHECKSUM = "xxh3_128:" + "0" * 32
KEY_TYPE = KeyType.parse("utf8")
POSITIONS = OperatorListStateDescriptor("positions")
KEYED = (ValueStateDescriptor("total", int), ListStateDescriptor("seen", str))
THRESHOLD = 400
BACKENDS = ("memory", "filesystem", "rocksdb")

# ------------------------------------------------------------------------------------------------------------ real state


def graph_of(backend: str) -> JobGraph:
    source = vertex(operator("source", "source", *state_metas((POSITIONS,), None)), max_parallelism=8)
    count = vertex(operator("count", "process", *state_metas(KEYED, KEY_TYPE), key_type="utf8"), max_parallelism=8)
    edge = JobEdge(0, source.vertex_id, "source", count.vertex_id, 0, Partitioning.HASH, ("word",), "utf8")
    config = JobConfig(state_backend=backend, inline_threshold=THRESHOLD, pack_threshold=0, tolerable_failed_checkpoints=9)
    return JobGraph("words", (source, count), (edge,), config)


def new_backend(backend: str, graph: JobGraph, subtask: int, folder: str) -> Any:
    count = graph.vertices[1]
    return create_keyed_backend(
        backend,  # type: ignore[arg-type]
        descriptors=KEYED,
        key_type=KEY_TYPE,
        key_groups=assign_key_groups(count.max_parallelism, count.parallelism, subtask),
        max_parallelism=count.max_parallelism,
        operator="count",
        subtask=subtask,
        local_dir=folder,
        now_ms=0,
        settings=StateBackendSettings(incremental=graph.config.is_incremental, memory_inline_bytes=8_000),
    )


class Written(msgspec.Struct):
    """Two checkpoints, the second an increment where the backend makes them."""

    graph: JobGraph
    acks: dict[int, dict[int, list[AcknowledgeCheckpoint]]]
    """id -> slot -> one of each vertex."""
    files: dict[str, bytes]
    """As they are when everything was acknowledged."""


@cache
def written(backend: str) -> Written:
    graph, storage = graph_of(backend), Files()
    acks: dict[int, dict[int, list[AcknowledgeCheckpoint]]] = {1: {}, 2: {}}
    with tempfile.TemporaryDirectory() as folder:
        for slot in range(2):
            keyed = new_backend(backend, graph, slot, f"{folder}/{slot}")
            lists = create_operator_backend((POSITIONS,), operator="source")
            words = [f"word {number}" for number in range(400)]
            groups = keyed._rows.groups_of([KEY_TYPE.encode(word) for word in words]).tolist()
            own = [(word, group) for word, group in zip(words, groups, strict=True) if group in keyed.key_groups]
            for number, some in ((1, own), (2, own[:3])):
                for word, group in some:
                    keyed.set_current_key(KEY_TYPE.encode(word), group)
                    keyed.get_state(KEYED[0]).update(number * 1_000)
                    keyed.get_state(KEYED[1]).add(word * number)
                lists.list_state("positions").update([b"x" * 300 * slot, b"%d" % number])
                targets = [target_of(number, uid, slot) for uid in ("source", "count")]
                entries = run_flow(lists.snapshot(number).flow(targets[0]), storage)
                pending = keyed.snapshot(number)
                handles = run_flow(pending.flow(targets[1]), storage)
                pending.release()
                states = {"source": OperatorSubtaskState(operator=entries), "count": OperatorSubtaskState(keyed=handles)}
                acks[number][slot] = [
                    AcknowledgeCheckpoint(1, number, vertex.vertex_id, slot, {uid: states[uid]})
                    for vertex, uid in zip(graph.vertices, ("source", "count"), strict=True)
                ]
            keyed.dispose()
    return Written(graph, acks, dict(storage.files))


def target_of(number: int, uid: str, subtask: int) -> SnapshotTarget:
    return SnapshotTarget(
        number,
        f"{JOB}/chk-{number}",
        exclusive_prefix(uid, subtask, 1) + "0123456789ab0",
        canonical=False,
        inline_threshold=THRESHOLD,
        shared_prefix=shared_prefix(number, uid, subtask, 1) + "0123456789ab0",
        base=number - 1 or None,
    )


class Files(DictStorage):
    """With local files, too."""

    def execute(self, operation: Operation) -> Any:
        match operation:
            case UploadFile(local_path=local_path, path=name):
                data = Path(local_path).read_bytes()
                self.files[name] = data
                return len(data), checksum_of(data)
            case DownloadFile(path=name, local_path=local_path):
                self._need(name)
                Path(local_path).write_bytes(self.files[name])
                return len(self.files[name]), checksum_of(self.files[name])
            case _:
                return super().execute(operation)


class Job:
    """A job whose first checkpoint is complete, and whose second is under way."""

    def __init__(self, backend: str) -> None:
        self.written = written(backend)
        self.storage = Files()
        self.rig = Rig(self.written.graph, storage=self.storage).run()  # type: ignore[arg-type]
        self.storage.files.update(self.written.files)
        self.rig.feed_request()
        for slot in range(2):
            assert set(self.send(slot, *self.written.acks[1][slot])) == {AckStatus.SUCCESS}
        self.rig.feed_request()

    def send(self, slot: int, *items: AcknowledgeCheckpoint) -> tuple[AckStatus, ...]:
        batch = AckBatch(self.rig.setup.epoch, slot, self.rig.sessions[slot], items)
        try:
            answers: tuple[AckStatus, ...] = self.rig.call(lambda ticket: job_events.AckBatchReceived(ticket, batch)).answers
        except FencedError:  # all are of older attempts
            return ()
        return answers

    def decision(self, number: int) -> Any:
        content = self.storage.files.get(f"{JOB}/chk-{number}/_metadata")
        return None if content is None else decode_decision(content)

    def restore(self, number: int) -> None:
        """Every file is verified, and all state is read by the backend."""
        folder = f"{JOB}/chk-{number}"
        metadata = decode_metadata(self.storage.files[f"{folder}/_metadata"], folder)
        assert run_flow(verify_snapshot(metadata, folder), self.storage) == []
        graph = self.written.graph
        states = assign_state(metadata, graph, {})
        with tempfile.TemporaryDirectory() as local:
            for slot in range(2):
                source, count = (states[SubtaskKey(vertex.vertex_id, slot)] for vertex in graph.vertices)
                for listed in source["source"].operator:
                    run_flow(read_entries(listed, folder, operator="source"), self.storage)
                backend = new_backend(graph.config.state_backend, graph, slot, f"{local}/{slot}")
                backend.restore(count["count"].keyed, self.storage, folder)
                backend.dispose()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_real_tasks_acknowledge_is_taken(backend: str) -> None:
    given = Job(backend)
    for slot in range(2):
        assert set(given.send(slot, *given.written.acks[2][slot])) == {AckStatus.SUCCESS}
    assert isinstance(given.decision(2), Completed)
    given.restore(2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_garbage_collector_does_not_look_at_acknowledgements(backend: str) -> None:
    """A coordinator of 10,000 subtasks holds some 100,000 such records: looking at them was most of the time of decoding."""

    def records(value: Any) -> Iterator[msgspec.Struct]:
        if isinstance(value, msgspec.Struct):
            yield value
            yield from records([getattr(value, name) for name in value.__struct_fields__])
        elif isinstance(value, list | tuple | dict):
            for each in value.values() if isinstance(value, dict) else value:
                yield from records(each)

    for items in written(backend).acks[2].values():
        for ack in items:
            found = list(records(msgspec.json.decode(msgspec.json.encode(ack), type=AcknowledgeCheckpoint)))
            assert len(found) > 3
            assert not [type(each).__name__ for each in found if gc.is_tracked(each)]


# ----------------------------------------------------------------------------------------------------------------- fuzz

PATHS = ("../../../outside", "/etc/hostname", "", ".", "..", "a/b", "a\0b", "_claim", "_metadata", "x" * 300, "../shared/", "Ä")
NUMBERS = (-1, -(2**40), 2**60, 2**70)
NAMES = ("", "..", "a/b", "/etc/hostname", "a\0b", "CURRENT", "x" * 300)
TEXTS = {
    "checksum": ("", "xxh3_128:zz", "md5:" + "0" * 32, "xxh3_128:" + "0" * 33),
    "format": ("parquet", "rocksdb", "arrow-delta", "arrow-set-delta", "arrow", "pickle", ""),
    "path": PATHS,
    "name": ("", "other", "x\0"),
    "kind": ("map", "operator_union", ""),
    "value_type": ("str", ""),
    "key_type": ("int64", ""),
    "vertex": ("", "f" * 32),
}


def changes(ack: AcknowledgeCheckpoint, others: tuple[str, ...]) -> Iterator[tuple[list[Any], Any]]:
    """Places in an acknowledgement, each with something that is wrong there. `others`: paths of files that are not its writer's.

    What a writer says of its own bytes (another length, another checksum, other rows) only storage can contradict: not these."""

    def walk(place: list[Any], value: Any) -> Iterator[tuple[list[Any], Any]]:
        key = place[-1] if place else ""
        if isinstance(value, dict):
            for name in value:
                yield from walk([*place, name], value[name])
            if key == "states" and value:
                yield place, {}
                yield place, {**value, "another": next(iter(value.values()))}
        elif isinstance(value, list):
            for index, each in enumerate(value):
                yield from walk([*place, index], each)
                yield place, value[:index] + value[index + 1 :]
                yield place, [*value, each]
            if key == "external":
                yield from ((place, [text]) for text in ("", "../x", "a\0", "x" * 5_000, "|"))
        elif isinstance(value, bytes):
            wrong = (b"", b"\x91") if "operator" in place else (b"junk",) if value.startswith((b"ARROW1", b"MANIFEST-")) else ()
            yield from ((place, data) for data in (*wrong, b"x" * 6_000_000))
        elif isinstance(value, str):
            pool = TEXTS.get(str(key), NAMES if "names" in place else ())
            yield from ((place, text) for text in (*pool, *(others if key == "path" else ())) if text != value)
        elif isinstance(value, int) and not isinstance(value, bool) and "metrics" not in place:
            near = () if key in ("length", "offset", "file_length", "count") else (value + 1, value - 1, 0)
            yield from ((place, number) for number in (*NUMBERS, *near) if number != value)

    yield from walk([], to_plain(ack))


def to_plain(ack: AcknowledgeCheckpoint) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(ack))


def changed(ack: AcknowledgeCheckpoint, place: list[Any], value: Any) -> AcknowledgeCheckpoint | None:
    plain = to_plain(ack)
    target = plain
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    try:
        return msgspec.convert(plain, AcknowledgeCheckpoint)
    except msgspec.ValidationError:
        return None  # the route refuses it


@cache
def forgeries(backend: str) -> list[tuple[int, int, AcknowledgeCheckpoint]]:
    """(slot, vertex, one that is wrong in one place)."""
    data, found = written(backend), []
    for slot, items in data.acks[2].items():
        files = [name.replace(f"{JOB}/chk-2/", "").replace(f"{JOB}/", "../") for name in sorted(data.files)]
        for index, ack in enumerate(items):
            uid = ("source", "count")[index]
            own = (exclusive_prefix(uid, slot, 1), "../shared/" + shared_prefix(2, uid, slot, 1))
            others = tuple(name for name in files if not name.startswith(own))
            forged = (changed(ack, *change) for change in changes(ack, others))
            found += [(slot, index, each) for each in forged if each is not None]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_found_declared_at_once_is_judged_as_state_by_state(backend: str) -> None:
    """The usual list of states is compared as a whole. Without that, every acknowledgement has the same verdict and words."""
    given = Job(backend)
    coordinator = given.rig.master.coordinator
    (pending,) = coordinator.pending
    judge = coordinator._validator
    state_by_state = AcknowledgementValidator(given.written.graph, coordinator._completed.shared_state)
    for operators in state_by_state._operators.values():
        for uid, each in operators.items():
            operators[uid] = replace(each, tables=(ENTRIES,))  # which no keyed handle lists
    real = [ack for number in (1, 2) for items in given.written.acks[number].values() for ack in items]
    verdicts = set()
    for ack in (*real, *(forged for _, _, forged in forgeries(backend))):
        verdict = judge.problem(ack, pending)
        assert verdict == state_by_state.problem(ack, pending)
        verdicts.add(verdict)
    assert None in verdicts
    assert len(verdicts) > 50


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_whatever_is_taken_can_be_verified_and_restored(backend: str, data: st.DataObject) -> None:
    slot, index, forged = data.draw(st.sampled_from(forgeries(backend)))
    given = Job(backend)
    before = dict(given.storage.files)
    for other in range(2):
        items = list(given.written.acks[2][other])
        if other == slot:
            items[index] = forged
        given.send(other, *items)
    if isinstance(given.decision(2), Completed):
        given.restore(2)
        return
    given.restore(1)
    gone = before.keys() - given.storage.files.keys()
    allowed = (f"{JOB}/chk-2/", f"{JOB}/shared/2-1-")  # an id that was given up takes its own files with it
    assert all(name.startswith(allowed) for name in gone), gone
    if forged.checkpoint_id == 2 and forged.attempt == 1:
        assert given.decision(2) is None or given.decision(2).reason is FailureReason.DECLINED


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_what_belongs_to_no_checkpoint_deletes_no_file(backend: str, data: st.DataObject) -> None:
    """Of an attempt that is not, of an id that is not, for a vertex that is not."""
    slot, _, forged = data.draw(st.sampled_from(forgeries(backend)))
    strays: list[dict[str, Any]] = [{"attempt": 77}, {"checkpoint_id": 99}]
    strays += [{"vertex": "f" * 32}] if forged.subtask == slot else []
    stray = data.draw(st.sampled_from(strays))
    given = Job(backend)
    before = dict(given.storage.files)
    given.send(slot, msgspec.structs.replace(forged, **stray))
    assert given.storage.files.keys() >= before.keys()
    for other in range(2):
        given.send(other, *given.written.acks[2][other])
    assert isinstance(given.decision(2), Completed)
    given.restore(2)


# -------------------------------------------------------------------------------------------------------------- by name

GROUPS = KeyGroupRange(0, 8)
TOTAL = StateMeta("total", "value", "int", "utf8")
ARROW = InlineHandle(b"ARROW1\0\0ARROW1")


def keyed(part: Any = ARROW, groups: KeyGroupRange = GROUPS, table: str = "arrow", **fields: Any) -> OperatorSubtaskState:
    return OperatorSubtaskState(keyed=(KeyedStateHandle(groups, table, (TOTAL,), (part,), **fields),))


def file(name: str, length: int = 5, checksum: str = CHECKSUM) -> FileHandle:
    return FileHandle(name, length, checksum)


OWN = "op-0-1-n0-x"
WRONG: dict[str, tuple[OperatorSubtaskState, str]] = {
    "a path that leaves": (keyed(file("../../../outside")), "'../../../outside', which is not the name of a file that this task"),
    "an absolute path": (keyed(file("/etc/hostname")), "'/etc/hostname', which is not the name"),
    "a NUL": (keyed(file("op-0-1-n0-x\0")), "which is not the name"),
    "a folder": (keyed(file("op-0-1-n0-x/y")), "which is not the name"),
    "another subtask's": (keyed(file("op-1-1-n0-x")), "which is not the name"),
    "another attempt's": (keyed(file("op-0-2-n0-x")), "which is not the name"),
    "a record": (keyed(file("_claim")), "'_claim', which is not the name"),
    "a long name": (keyed(file("op-0-1-n0-" + "x" * 250)), "which is not the name"),
    "a negative length": (keyed(file(OWN, -5)), "with -5 bytes"),
    "an endless length": (keyed(file(OWN, 2**60)), f"with {2**60} bytes"),
    "a checksum": (keyed(file(OWN, 5, "sha1:0")), "with the checksum 'sha1:0'"),
    "a piece outside": (keyed(SegmentHandle(OWN, 5, CHECKSUM, 8, 10)), "is not in a file of 10"),
    "a negative offset": (keyed(SegmentHandle(OWN, 5, CHECKSUM, -1, 10)), "is not in a file of 10"),
    "foreign key groups": (keyed(groups=KeyGroupRange(4, 12)), "key groups 4..12; those of subtask 0 are 0..8"),
    "some key groups": (keyed(groups=KeyGroupRange(0, 7)), "key groups 0..7"),
    "another format": (keyed(table="pickle"), "keyed state in the format 'pickle'"),
    "a backend's files": (keyed(table="rocksdb", names=("CURRENT",)), "keyed state in the format 'rocksdb'"),
    "many bytes": (keyed(InlineHandle(b"ARROW1" + b"\0" * 6_000_000 + b"ARROW1")), "the acknowledgement"),
    "no table": (keyed(InlineHandle(b"junk")), "neither an Arrow nor a Parquet file"),
    "a shared file": (keyed(file("../shared/1-1-op-0-n0-x")), "a file that checkpoints share"),
    "a placeholder": (keyed(PlaceholderHandle("../shared/1-1-op-0-n0-x", 5)), "a file that checkpoints share"),
    "names": (keyed(names=("x",)), "1 tables of 1 states"),
    "no state": (OperatorSubtaskState(), "nothing of the keyed state total"),
    "an undeclared state": (
        OperatorSubtaskState(keyed=(KeyedStateHandle(GROUPS, "arrow", (StateMeta("x", "value", "int", "utf8"),), (ARROW,)),)),
        "the keyed state 'x', which is not declared so",
    ),
    "operator state": (
        OperatorSubtaskState(keyed().keyed, (OperatorListHandle(ENTRIES, InlineHandle(b"\x90"), 0),)),
        "the operator state 's', which is not declared so",
    ),
    "external files": (OperatorSubtaskState(keyed().keyed, (), ("x",)), "files outside the snapshot"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_and_declines(name: str) -> None:
    wrong, words = WRONG[name]
    bench = Bench(states=(TOTAL,), tolerable_failed_checkpoints=9)
    good = AcknowledgeCheckpoint(1, 1, "A", 0, {"op": keyed()})
    bench.trigger()
    for task in (A, B):
        bench.handle(events.AcksReceived((msgspec.structs.replace(good, vertex=task.vertex),), 0))
    assert bench.completed == [1]
    bench.trigger()
    bench.handle(events.AcksReceived((AcknowledgeCheckpoint(1, 2, "B", 0, {"op": keyed()}),), 0))
    out = bench.handle(events.AcksReceived((AcknowledgeCheckpoint(1, 2, "A", 0, {"op": wrong}),), 0))
    assert answers(out) == [AckStatus.DISCARDED]
    (write,) = of(out, actions.WriteAborted)
    assert (write.reason, bench.completed) == (FailureReason.DECLINED, [1])
    assert write.message.startswith("A (0) acknowledged what it can't have stored: operator 'op': ")
    assert words in write.message
    assert not of(out, actions.DropCheckpoint)
    assert [action.files for action in of(out, actions.DiscardState)] == [None], "with what the id wrote itself"


def test_a_worker_that_always_sends_junk_fails_the_job_over() -> None:
    bench = Bench(tolerable_failed_checkpoints=2)
    for number in (1, 2, 3):
        bench.trigger()
        assert not bench.all(actions.FailJob)
        bench.ack(A, number, "/../x")
    (fail,) = bench.all(actions.FailJob)
    assert (fail.reason, "can't have stored" in fail.message) == (FailureReason.DECLINED, True)


def test_a_worker_answers_for_its_own_slot_alone() -> None:
    bench = Bench(tolerable_failed_checkpoints=9)
    bench.trigger()
    out = bench.handle(events.AcksReceived((AcknowledgeCheckpoint(1, 1, "A", 0, state("x")),), 1))
    assert answers(out) == [AckStatus.UNKNOWN]
    assert bench.all(actions.WriteAborted)[0].message == (
        "the worker in slot 1 answered for subtask 0 of A, which runs in another slot"
    )
    assert [action.files for action in of(out, actions.DiscardState)] == [None]
    bench.trigger()
    stale = AcknowledgeCheckpoint(7, 2, "A", 0, state("x"))
    assert answers(bench.handle(events.AcksReceived((stale,), 1))) == [AckStatus.UNKNOWN]
    assert bench.pending == [2], "what is of no attempt of ours changes nothing"


def test_a_late_acknowledgement_takes_only_its_own_files_with_it() -> None:
    bench = Bench(tolerable_failed_checkpoints=9)
    bench.trigger()
    bench.decline(A, 1)
    meta = StateMeta("s", "operator_list", "bytes")
    others = (path("other", A, 2), "op-1-1-n0-x", "_claim", "_metadata", "../shared/9-1-op-0-n0-x", "/etc/x", "../../x")
    names = (path("mine"), *others, "../shared/1-1-op-0-n0-x")
    listed = tuple(OperatorListHandle(meta, file(name), 1) for name in names)
    states = {"op": OperatorSubtaskState(operator=listed), "else": keyed(file(path("mine too")))}
    ack = AcknowledgeCheckpoint(1, 1, "A", 0, states)
    (discard,) = of(bench.handle(events.AcksReceived((ack,), 0)), actions.DiscardState)
    assert discard == actions.DiscardState(1, f"{BENCH_JOB}/chk-1", (path("mine"), "../shared/1-1-op-0-n0-x"))


def test_each_attempt_is_held_against_its_own_names() -> None:
    bench = Bench(tolerable_failed_checkpoints=9)
    bench.trigger()
    bench.ack_all(1)
    bench.handle(events.JobFailing())
    bench.restart(2)
    bench.trigger()
    of_the_first = AcknowledgeCheckpoint(2, 2, A.vertex, A.subtask, state("s", A, attempt=1))
    assert answers(bench.handle(events.AcksReceived((of_the_first,), A.subtask))) == [AckStatus.DISCARDED]
    bench.trigger()
    bench.ack_all(3)
    assert bench.done == [1, 3]


def test_uids_that_look_like_writers_of_each_other_are_told_apart() -> None:
    """`a`, subtask 1 and attempt 2, and `a-1`, subtask 2 and attempt 2: `a-1-2-2-...` is one file of the latter."""
    a, longer = operator("a", "process"), operator("a-1", "process")
    graph = JobGraph("names", (vertex(a, parallelism=3), vertex(longer, parallelism=3)), (), JobConfig())
    judge = AcknowledgementValidator(graph, SharedStateRegistry())

    def owned(uid: str, subtask: int, name: str) -> bool:
        vertex_id = next(each.vertex_id for each in graph.vertices if each.operators[0].uid == uid)
        return list(judge.files_of_writer(AcknowledgeCheckpoint(2, 5, vertex_id, subtask, {uid: keyed(file(name))}))) == [name]

    assert owned("a-1", 2, "a-1-2-2-n0-x")
    assert not owned("a", 1, "a-1-2-2-n0-x")
    assert owned("a", 1, "a-1-2-0123456789ab0-x")
    assert owned("a", 1, "../shared/5-2-a-1-0123456789ab0-x")
    assert owned("a-1", 2, "../shared/5-2-a-1-2-n0-x")
    assert not owned("a", 1, "../shared/5-2-a-1-2-n0-x")
    assert not owned("a", 1, "a-1-2-5-0123456789ab0-x"), "or it is of `a-1`, subtask 2, in attempt 5: the sender alone says which"
    assert not owned("a", 1, "a-1-2-0123456789012-x"), "a nonce of digits alone waits for the sweep"


def test_a_placeholder_is_of_the_operator_and_of_the_named_base() -> None:
    given = Job("rocksdb")
    (_, ack) = given.written.acks[2][0]
    parts = ack.states["count"].keyed[0].parts
    assert any(isinstance(part, PlaceholderHandle) for part in parts), "the second checkpoint is an increment"
    pending = given.rig.master.coordinator.pending[0]
    shared: Mapping[str, Any] = given.rig.master.coordinator._completed.shared_state._files
    assert shared
    judge = given.rig.master.coordinator._validator
    assert judge.problem(ack, pending) is None
    pending.base = None
    assert "which its base None does not have of it" in str(judge.problem(ack, pending))


PLACES = ["/data/日本\u3000語", "/data/a\u00a0b", "/data/\u0646\u0645\u06cc\u200d", "/data/soft\u00adhyphen", "s3://bucket/a b"]


def external(entry: str) -> str | None:
    """What the judge says of a staged file."""
    try:
        _check_external(entry)
    except _Refused as refused:
        return str(refused)
    return None


@pytest.mark.parametrize("place", PLACES)
def test_whatever_path_a_sink_takes_an_acknowledgement_may_name(place: str) -> None:
    root = ParquetSink(place).path
    assert external(f"{root}/_staged/f|{root}/f") is None


@pytest.mark.parametrize("entry", ["", "a|", "../x", "a/../b|c", "a\0", "a\nb", "a\x85b", "x" * 4_097])
def test_what_is_no_place_is_refused(entry: str) -> None:
    assert "not the place of a file outside the snapshot" in (external(entry) or "")


@pytest.mark.parametrize("path", ["/data/a\nb", "/data/\x85", "s3://bucket/a/../b"])
def test_a_sink_refuses_a_path_that_no_acknowledgement_may_name(path: str) -> None:
    with pytest.raises(InvalidConfigError, match="a sink's path"):
        ParquetSink(path)
