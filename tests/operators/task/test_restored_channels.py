"""In-flight data in local copies: kept when it is stored, and restored from them, as files of state are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.barriers.elements import Batch, Element, Watermark
from holdfast.barriers.jobgraph import Partitioning
from holdfast.barriers.messages import Deployment, SubtaskDeployment, SubtaskKey
from holdfast.coordinator.restore.in_flight import assign_in_flight
from holdfast.operators.task.inflight import EdgeLog, InFlight, SubtaskEdges
from holdfast.operators.task.restored_channels import ChannelLoader
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.handles import ChannelState, FileHandle, SegmentHandle
from holdfast.statebackends.local_recovery.copies import LocalCopies, LocalRecovery
from holdfast.statebackends.local_recovery.storage import KeepingStorage, RestoredBytes, held_paths
from holdfast.statebackends.snapshot.parts import PartsWriter
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.restore.test_in_flight import batch, graph_of
from tests.statebackends.test_local_recovery import Remote

FOLDER = "job/chk-1"
STORED: tuple[Element, ...] = (batch([(1, 1), (2, 2)]), Watermark(7), batch([(3, 3)]))


class Flight:
    """Records that one subtask had in flight, in storage and on this host."""

    def __init__(self, root: Path) -> None:
        self.remote = Remote(root / "state")
        self.graph = graph_of(Partitioning.REBALANCE, 1, 1)
        self.vertex = self.graph.edges[0].target
        self._local = root / "workers"
        self._attempt = 0
        copies = self.life()
        self.channels = self._store(copies)
        copies.close()
        self.folder = Path(copies.folder)

    def life(self) -> LocalCopies:
        """Copies of the next attempt, in a worker process of its own."""
        self._attempt += 1
        recovery = LocalRecovery(str(self._local), job_id="job", state_directory="state", storage=self.remote)
        copies = recovery.copies(self.vertex, 0, self._attempt, "n")
        copies.open()
        return copies

    def _store(self, copies: LocalCopies) -> tuple[ChannelState, ...]:
        flight = InFlight(SubtaskEdges(self.graph, SubtaskKey(self.vertex, 0)), ())
        flight.take_inputs([(0, STORED)])
        target = SnapshotTarget(1, FOLDER, "out-0-1-n", False, 0)
        channels: tuple[ChannelState, ...] = run_flow(flight.flow(target), KeepingStorage(self.remote, copies, 1))
        copies.took(1, held_paths((), FOLDER, channels))
        copies.confirm(1)
        return channels

    def restore(self, copies: LocalCopies | None) -> tuple[list[Any], RestoredBytes]:
        """What stands in front of the channel, and where it came from."""
        restore = assign_in_flight(self.channels, msgspec.to_builtins(self.graph), self.graph)[SubtaskKey(self.vertex, 0)]
        wanted = SubtaskDeployment(self.vertex, 0, in_flight=restore)
        deployment = Deployment(2, self.graph, (wanted,), {}, restored_checkpoint_id=1, restored_folder=FOLDER)
        restored = RestoredBytes()
        self.remote.reads.clear()
        ((index, elements),) = ChannelLoader(wanted, deployment, {}).load(self.remote, restored, copies, 1)
        assert index == 0
        return [list(each.rows()) if isinstance(each, Batch) else each for each in elements], restored


@pytest.fixture
def flight(tmp_path: Path) -> Flight:
    return Flight(tmp_path)


EXPECTED = [list(each.rows()) if isinstance(each, Batch) else each for each in STORED]


def test_a_successor_on_the_same_host_reads_no_record_of_storage(flight: Flight) -> None:
    (part,) = [channel.part for channel in flight.channels]
    assert isinstance(part, FileHandle)
    found, restored = flight.restore(flight.life())
    assert (found, restored.local, restored.remote, flight.remote.reads) == (EXPECTED, part.length, 0, [])


@pytest.mark.parametrize(
    "damage",
    [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1]), lambda path: path.write_bytes(bytes(path.stat().st_size))],
    ids=["gone", "cut off", "other bytes"],
)
def test_storage_stands_in_for_a_damaged_copy_which_is_then_a_good_one(flight: Flight, damage: Callable[[Path], Any]) -> None:
    (copy,) = [each for each in flight.folder.iterdir() if each.name != "lock"]
    damage(copy)
    life = flight.life()
    found, restored = flight.restore(life)
    assert (found, restored.local, len(flight.remote.reads)) == (EXPECTED, 0, 1)
    life.close()
    assert flight.restore(flight.life())[1].remote == 0


def test_without_copies_all_of_it_comes_from_storage(flight: Flight) -> None:
    found, restored = flight.restore(None)
    assert (found, restored.local, len(flight.remote.reads)) == (EXPECTED, 0, 1)


def test_tables_and_records_in_flight_of_one_operator_are_merged_into_two_files(tmp_path: Path) -> None:
    """Both are in the folder of the checkpoint with `memory`, and with `filesystem` where it makes no increments."""
    storage, graph = Remote(tmp_path / "state"), graph_of(Partitioning.REBALANCE, 1, 1)
    target = SnapshotTarget(1, FOLDER, "out-0-1-n", False, 0, pack_threshold=1 << 20)
    flight = InFlight(SubtaskEdges(graph, SubtaskKey(graph.vertices[1].vertex_id, 0)), ())
    flight.take_inputs([(0, STORED)])
    flight.take_outputs([EdgeLog(0, "output", ((0, STORED),))])
    channels = run_flow(flight.flow(target), storage)
    writer = PartsWriter(target)
    parts = [writer.add(bytes([number]) * 20, f"table-{number}") for number in range(2)]
    run_flow(writer.store(), storage)
    packed = [{part.handle for part in parts}, {channel.part for channel in channels}]
    assert [{type(handle) for handle in handles} for handles in packed] == [{SegmentHandle}, {SegmentHandle}]
    assert packed[0].isdisjoint(packed[1])
    assert len({handle.path for handles in packed for handle in handles if isinstance(handle, SegmentHandle)}) == 2
