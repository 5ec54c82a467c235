"""The state in a snapshot against the state deployed to the next attempt: I8, I26, I27 (docs/invariants.md).

Every keyed part goes to exactly the subtasks whose key groups it touches, every entry of list state to one subtask, all entries of
union state and one copy of broadcast state to each, and every subtask of the graph to one slot. Copies of broadcast state are equal
in every snapshot: the cut is the same for all subtasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

import msgspec

from holdfast.barriers.jobgraph import JobVertex
from holdfast.barriers.messages import Deploy, Deployment, Registered, SubtaskDeployment, SubtaskKey
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import Decided, JobLedger, Snapshot, join
from holdfast.chaos.checkers.observations import Answered, Commanded, Observation, Report, Stored, WorldView
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.statebackends.handles import InlineHandle, KeyGroupRange, OperatorListHandle, OperatorState, OperatorSubtaskState
from holdfast.statebackends.snapshot.metadata import FINISHED_PROPERTY

_ENTRIES = msgspec.msgpack.Decoder(list[bytes])


class DistributionChecker(Checker):
    """Collects the deployments of an attempt, and checks them once every slot has its own."""

    invariants: ClassVar[tuple[str, ...]] = ("I8", "I26", "I27")
    hears: ClassVar[tuple[type, ...]] = (Stored, Commanded, Answered)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._slots: dict[int, dict[int, Deployment]] = {}
        """Attempt -> slot -> its deployment."""
        self._judged: set[int] = set()

    def observe(self, observation: Observation) -> None:
        match observation:
            case Commanded(command=Deploy(deployment=deployment), slot=slot):
                self._deploy(slot, deployment)
            case Answered(answer=Registered(deployment=Deployment() as deployment)):
                slots = {each.subtask for each in deployment.subtasks}
                if len(slots) == 1:
                    self._deploy(slots.pop(), deployment)
            case Stored() if observation.added:
                for change in self.ledger.changes(observation):
                    if isinstance(change, Decided) and change.snapshot is not None:
                        for operator in change.snapshot.metadata.operators:
                            self._check_ranges(change.snapshot, operator)
                            self._check_copies(change.snapshot, operator)
            case _:
                pass

    # --------------------------------------------------------------------------------------------------------- snapshot

    def _check_ranges(self, snapshot: Snapshot, operator: OperatorState) -> None:
        """Keyed parts cover every key group once, and each subtask's parts lie in its own range."""
        if not any(subtask.keyed for subtask in operator.subtasks):
            return
        may_lack = bool(snapshot.metadata.properties.get(FINISHED_PROPERTY))  # a task that was FINISHED stored nothing
        for index, subtask in enumerate(operator.subtasks):
            own = _key_groups(operator.max_parallelism, operator.parallelism, index)
            found = {handle.key_groups for handle in subtask.keyed}
            if found != {own} and (found or not may_lack):
                shown = ", ".join(f"{each.start}..{each.stop - 1}" for each in sorted(found)) or "none"
                self.report(
                    "I26",
                    f"checkpoint {snapshot.checkpoint_id}: {operator.uid} ({index}) has the key groups {shown}, "
                    f"its own are {own.start}..{own.stop - 1}",
                )

    def _check_copies(self, snapshot: Snapshot, operator: OperatorState) -> None:
        """All subtasks stored equal broadcast state, except those that had finished, which stored none."""
        for name in _names(operator, "operator_broadcast"):
            lists = [[handle for handle in subtask.operator if handle.state.name == name] for subtask in operator.subtasks]
            copies = [self._entries(snapshot, handles, name) for handles in lists if handles]
            if None not in copies and any(copy != copies[0] for copy in copies):
                self.report("I27", f"checkpoint {snapshot.checkpoint_id}: copies of {operator.uid}'s broadcast state {name} differ")

    # -------------------------------------------------------------------------------------------------------- deployment

    def _deploy(self, slot: int, deployment: Deployment) -> None:
        attempt = deployment.attempt
        if attempt in self._judged:
            return
        slots = self._slots.setdefault(attempt, {})
        slots[slot] = deployment
        if len(slots) < deployment.graph.slots_required:
            return
        self._judged.add(attempt)
        del self._slots[attempt]
        self._judge(attempt, slots)

    def _judge(self, attempt: int, slots: dict[int, Deployment]) -> None:
        graph = slots[min(slots)].graph
        given: dict[SubtaskKey, SubtaskDeployment] = {}
        for slot in sorted(slots):
            for each in slots[slot].subtasks:
                key = SubtaskKey(each.vertex, each.subtask)
                if key in given or each.subtask != slot:
                    self.report("I26", f"attempt {attempt}: slot {slot} is given {each.vertex} ({each.subtask})")
                given[key] = each
        wanted = {SubtaskKey(vertex.vertex_id, index) for vertex in graph.vertices for index in range(vertex.parallelism)}
        if given.keys() != wanted:
            self.report("I26", f"attempt {attempt}: {len(given)} subtasks are deployed, the graph has {len(wanted)}")
            return
        ids = {deployment.restored_checkpoint_id for deployment in slots.values()}
        if len(ids) > 1:
            self.report("I8", f"attempt {attempt} begins at different checkpoints: {sorted(ids)}")
            return
        restored = ids.pop()
        if restored == 0:
            if any(each.restore for each in given.values()):
                self.report("I8", f"attempt {attempt} begins empty, and with state")
            return
        snapshot = self.ledger.completed.get(restored)
        if snapshot is None:
            self.report("I8", f"attempt {attempt} begins at checkpoint {restored}, which is not completed")
            return
        operators = {operator.uid: operator for operator in snapshot.metadata.operators}
        for vertex in graph.vertices:
            for description in vertex.operators:
                old = operators.get(description.uid)
                if old is not None:
                    parts = [
                        given[SubtaskKey(vertex.vertex_id, index)].restore.get(description.uid, OperatorSubtaskState())
                        for index in range(vertex.parallelism)
                    ]
                    self._check_operator(snapshot, old, vertex, parts)

    def _check_operator(self, snapshot: Snapshot, old: OperatorState, vertex: JobVertex, parts: list[OperatorSubtaskState]) -> None:
        where = f"restored from {snapshot.checkpoint_id}: operator {old.uid}"
        for index, part in enumerate(parts):
            own = _key_groups(vertex.max_parallelism, vertex.parallelism, index)
            wanted = Counter(
                handle for subtask in old.subtasks for handle in subtask.keyed if len(handle.key_groups.intersection(own))
            )
            if Counter(part.keyed) != wanted:
                self.report("I26", f"{where} ({index}) is given {len(part.keyed)} keyed parts, not the {wanted.total()} it owns")
        copied = [*_names(old, "operator_union"), *_names(old, "operator_broadcast")]
        self._check_split(snapshot, old, parts, copied, where)
        for name in copied:
            self._check_copied(snapshot, old, parts, name, where)

    def _check_split(
        self, snapshot: Snapshot, old: OperatorState, parts: list[OperatorSubtaskState], copied: list[str], where: str
    ) -> None:
        """Entries of all states but `copied`: each goes to one subtask, and to its former one when the parallelism is unchanged."""
        before = [[handle for handle in subtask.operator if handle.state.name not in copied] for subtask in old.subtasks]
        after = [[handle for handle in part.operator if handle.state.name not in copied] for part in parts]
        if len(before) == len(after):
            if before != after:
                self.report("I27", f"{where}: a subtask is given other lists than it had")
            return
        had, got = self._counted(snapshot, before), self._counted(snapshot, after)
        if had is not None and got is not None and had != got:
            lost, extra = (had - got).total(), (got - had).total()
            self.report("I27", f"{where}: of {had.total()} list entries {lost} are lost and {extra} too many")

    def _check_copied(
        self, snapshot: Snapshot, old: OperatorState, parts: list[OperatorSubtaskState], name: str, where: str
    ) -> None:
        """Union: all entries to every subtask, in their former order. Broadcast: subtask i gets the copy of i modulo the old
        parallelism."""
        had = [self._entries(snapshot, subtask.operator, name) for subtask in old.subtasks]
        union = name in _names(old, "operator_union")
        for index, part in enumerate(parts):
            sources = had if union else [had[index % len(had)]]
            got = self._entries(snapshot, part.operator, name)
            if got is None or None in sources:
                continue
            wanted = [entry for entries in sources for entry in entries or ()]
            if got != wanted:
                kind = "union" if union else "broadcast"
                self.report("I27", f"{where} ({index}) is given {len(got)} entries of {kind} state {name}, not its {len(wanted)}")

    def _counted(self, snapshot: Snapshot, lists: list[list[OperatorListHandle]]) -> Counter[tuple[str, bytes]] | None:
        """Counts of (state, entry) over all subtasks; None if a file has gone meanwhile."""
        found: Counter[tuple[str, bytes]] = Counter()
        for handles in lists:
            for name in {handle.state.name: None for handle in handles}:
                entries = self._entries(snapshot, handles, name)
                if entries is None:
                    return None
                found.update((name, entry) for entry in entries)
        return found

    def _entries(self, snapshot: Snapshot, handles: Iterable[OperatorListHandle], name: str) -> list[bytes] | None:
        """Entries of one state, in order; None if a file has gone meanwhile."""
        found: list[bytes] = []
        for handle in handles:
            if handle.state.name != name:
                continue
            part = handle.part
            content = part.data if isinstance(part, InlineHandle) else snapshot.view.peek(join(snapshot.folder, part.path))
            if content is None:
                return None
            found += _ENTRIES.decode(content)
        return found


def _names(operator: OperatorState, kind: str) -> list[str]:
    """Names of the states of this kind in the snapshot, sorted."""
    return sorted({handle.state.name for subtask in operator.subtasks for handle in subtask.operator if handle.state.kind == kind})


def _key_groups(max_parallelism: int, parallelism: int, index: int) -> KeyGroupRange:
    """Key groups of a subtask: those g with g * parallelism // max_parallelism == index."""
    start = -(-index * max_parallelism // parallelism)
    return KeyGroupRange(start, -(-(index + 1) * max_parallelism // parallelism))
