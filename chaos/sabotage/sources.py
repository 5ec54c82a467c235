"""Mistakes of a source: the position in a snapshot, and the position after a restore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from holdfast.chaos.sabotage.base import Mutant, Sabotage
from holdfast.operators.sources.enumerator import EnumeratorReader
from holdfast.operators.sources.fetching import FetchingReader
from holdfast.operators.sources.generator import GeneratorReader, StripeCursor
from holdfast.operators.sources.split_source import SplitSourceReader
from holdfast.operators.task.chain import ChainNode
from holdfast.operators.task.snapshots import SubtaskCheckpointCoordinator
from holdfast.operators.task.source_operator import SourceOperator
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.storage.port import Flow


@dataclass(frozen=True, slots=True)
class _LateLists:
    """The position of a source when it is written, not when the barrier left."""

    node: ChainNode
    checkpoint_id: int

    def flow(self, target: SnapshotTarget) -> Flow[Any]:
        """As FrozenLists."""
        backend = self.node.context.operator_backend
        assert backend is not None
        SourceOperator.snapshot_state(self.node.operator, self.checkpoint_id)  # type: ignore[arg-type]
        return (yield from backend.snapshot(self.checkpoint_id).flow(target))


def _freezes_late(original: Any) -> Any:
    def freeze(self: SubtaskCheckpointCoordinator, node: ChainNode, checkpoint_id: int) -> Any:
        part = original(self, node, checkpoint_id)
        return replace(part, lists=_LateLists(node, checkpoint_id)) if isinstance(node.operator, SourceOperator) else part

    return freeze


def _goes_on_at(offset: int) -> Any:
    """A restored reader begins so many records of each stripe behind its position."""

    def make(original: Any) -> Any:
        def opened(self: GeneratorReader, context: Any, entries: list[bytes] | None) -> None:
            original(self, context, entries)
            if entries is not None:
                count = self._stripe_count
                starts = {stripe: max(stripe, index + offset * count) for stripe, index in self._cursor.positions()}
                self._cursor = StripeCursor(count, starts, self._source.rows, next_indices=starts)

        return opened

    return make


def _remembers_last(original: Any) -> Any:
    def hand_out(self: EnumeratorReader[Any], splits_max: int) -> Any:
        given = original(self, splits_max)
        if given:
            self.__dict__["last_given"] = given[-1][1]
        return given

    return hand_out


def _keeps_last(original: Any) -> Any:
    def snapshot_of(self: EnumeratorReader[Any], checkpoint_id: int) -> list[bytes]:
        entries: list[bytes] = original(self, checkpoint_id)
        last = self.__dict__.get("last_given")
        return entries if last is None else [*entries, last]

    return snapshot_of


def _forgets_new(original: Any) -> Any:
    def snapshot_of(self: SplitSourceReader[Any], checkpoint_id: int) -> list[bytes]:
        entries: list[bytes] = original(self, checkpoint_id)
        return [entry for entry in entries if self._codec.decode(entry).position]

    return snapshot_of


def _goes_on(original: Any) -> Any:
    def unless_failed(self: FetchingReader[Any], call: Any) -> Any:
        return None if self._closed else call()

    return unless_failed


def _swallows_errors(original: Any) -> Any:
    def fetched(self: FetchingReader[Any], found: Any, error: BaseException | None, *, began_ms: int) -> None:
        original(self, () if error is not None else found, None, began_ms=began_ms)

    return fetched


def _tells_at_barrier(original: Any) -> Any:
    def snapshot_of(self: SplitSourceReader[Any], checkpoint_id: int) -> list[bytes]:
        entries: list[bytes] = original(self, checkpoint_id)
        self.notify_checkpoint_complete(checkpoint_id)
        return entries

    return snapshot_of


SABOTAGES = (
    Sabotage(
        "late_position",
        "the position of a source is read when its snapshot is written, not at the barrier",
        ("I7", "I8", "I1"),
        (Mutant(SubtaskCheckpointCoordinator, "_freeze", _freezes_late),),
        workloads=("windows", "ends", "fanout"),
        kinds=("store_slow",),
        seeds_max=80,
    ),
    Sabotage(
        "split_twice",
        "an enumerator keeps the last split that it has handed out in its checkpoints, too",
        ("I40", "I8", "I2", "I7"),
        (Mutant(EnumeratorReader, "_hand_out", _remembers_last), Mutant(EnumeratorReader, "snapshot_of", _keeps_last)),
        workloads=("splits",),
    ),
    Sabotage(
        "split_forgotten",
        "a reader leaves splits of which it has given no record out of its checkpoints",
        ("I7", "I8", "I1"),
        (Mutant(SplitSourceReader, "snapshot_of", _forgets_new),),
        workloads=("splits",),
        seeds_max=60,
    ),
    Sabotage(
        "fetched_behind_errors",
        "a reader goes on behind a fetch that failed: its client has passed what it did not give",
        ("I7", "I8", "I1", "I30"),
        (Mutant(FetchingReader, "_unless_failed", _goes_on), Mutant(FetchingReader, "_fetched", _swallows_errors)),
        workloads=("splits",),
    ),
    Sabotage(
        "told_before_complete",
        "positions of splits are told at the barrier, before their checkpoint is complete",
        ("I41",),
        (Mutant(SplitSourceReader, "snapshot_of", _tells_at_barrier),),
        workloads=("splits",),
    ),
    Sabotage(
        "replayed_record",
        "a restored source gives the last record in front of its position again",
        ("I7", "I8", "I2", "I5"),
        (Mutant(GeneratorReader, "open", _goes_on_at(-1)),),
    ),
    Sabotage(
        "skipped_record",
        "a restored source skips the first record behind its position",
        ("I7", "I8", "I1"),
        (Mutant(GeneratorReader, "open", _goes_on_at(1)),),
    ),
)
