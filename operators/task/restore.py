"""Restore of one subtask: from a deployment's handles to the backends. `load` blocks and runs on the pool; its result runs on the
loop.

It decides which state is read from where; the backends interpret the bytes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import cast

from holdfast.barriers.alignment.gate import InputGate
from holdfast.barriers.elements import Element
from holdfast.barriers.exchange.guarantee import behind_loose
from holdfast.barriers.jobgraph import JobConfig, JobVertex, OperatorDescription
from holdfast.barriers.messages import Deployment, SubtaskDeployment
from holdfast.operators.task.chain import ChainNode, OperatorChain
from holdfast.operators.task.restored_channels import ChannelLoader
from holdfast.operators.task.rollback import Claim, own_checkpoint
from holdfast.operators.task.timers import EVENT_TIMERS, PROCESSING_TIMERS, InternalTimerService
from holdfast.statebackends.backend import KeyedStateBackend, RestoredOperatorState
from holdfast.statebackends.backends.operator import ListOperatorStateBackend, read_entries
from holdfast.statebackends.factory import BackendKind, create_keyed_backend
from holdfast.statebackends.handles import OperatorListHandle, OperatorSubtaskState
from holdfast.statebackends.heap.timers import TimerRows
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.layout import file_name
from holdfast.statebackends.local_recovery.copies import LocalCopies
from holdfast.statebackends.local_recovery.storage import RecoveringStorage, RestoredBytes, stored_files
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.settings import StateBackendSettings
from holdfast.statebackends.state import OperatorListStateDescriptor, StateDescriptor
from holdfast.statebackends.storage import resolve_folder
from holdfast.statebackends.storage.port import Storage, run_flow

log = logging.getLogger("holdfast.restore")


@dataclass(frozen=True, slots=True)
class _Loaded:
    """State of one operator, ready for its context."""

    node: ChainNode
    description: OperatorDescription
    keyed: KeyedStateBackend | None
    lists: ListOperatorStateBackend


class StateLoader:
    """Opens and restores the state of every operator of one subtask."""

    def __init__(
        self,
        chain: OperatorChain,
        vertex: JobVertex,
        wanted: SubtaskDeployment,
        deployment: Deployment,
        *,
        storage: Storage,
        local_directory: str,
        settings: StateBackendSettings,
        copies: LocalCopies | None = None,
        claims: Mapping[str, Claim] = MappingProxyType({}),
        channels: ChannelLoader | None = None,
        gate: InputGate | None = None,
    ) -> None:
        """`copies`: kept on this host by this subtask or by an earlier attempt of it. `claims`: operator -> what it takes over of
        an earlier attempt in this process. `channels`: what stands in front of those of `gate`; None: a subtask without."""
        self._channels = channels
        self._gate = gate
        self.restored = RestoredBytes()
        """Counts bytes as the state is read."""
        self._copies = copies
        self._claims = claims
        self._chain = chain
        self._vertex = vertex
        self._subtask = wanted.subtask
        self._restore: Mapping[str, OperatorSubtaskState] = wanted.restore
        self._folder = deployment.restored_folder
        self._restored_id = own_checkpoint(deployment)
        """Restored checkpoint in the job's own directory, whose files the next ones may share; None for a foreign snapshot."""
        self._attempt = deployment.attempt
        self._config: JobConfig = deployment.graph.config
        self._keeps_event_time = vertex.vertex_id not in behind_loose(deployment.graph)
        self._restores_in_flight = deployment.restores_in_flight
        self._storage = storage
        self._local_directory = local_directory
        self._settings = replace(
            settings,
            memory_snapshot_bytes_max=self._config.memory_snapshot_bytes_max,
            row_table_bytes_max=self._config.row_table_bytes_max,
            rocksdb=settings.rocksdb if self._config.rocksdb is None else self._config.rocksdb,
            incremental=self._config.is_incremental,
        )

    def load(self) -> Callable[[], None]:
        """Pool thread: open and restore; the result hands everything to the contexts. Raises CorruptStateError and others."""
        loaded: list[_Loaded] = []
        began_s = time.perf_counter()
        if self._copies is not None:
            self._copies.open()
        try:
            for node, description in zip(self._chain.nodes, self._vertex.operators, strict=True):
                loaded.append(self._load(node, description))
            restored = self._load_channels()
        except BaseException:
            for each in loaded:
                if each.keyed is not None:
                    each.keyed.dispose()
            raise
        if self._restore:
            log.info(
                "subtask %d of %s restored %d bytes from this host, %d from storage in %.2f s",
                self._subtask, self._vertex.vertex_id, self.restored.local, self.restored.remote, time.perf_counter() - began_s,
            )  # fmt: skip

        def attach() -> None:
            _attach(loaded)
            for channel, elements in restored:
                assert self._gate is not None
                self._gate.restore(channel, elements)

        return attach

    def _load_channels(self) -> list[tuple[int, list[Element]]]:
        if self._channels is None:
            return []
        return self._channels.load(self._storage, self.restored, self._copies, self._restored_id)

    def _load(self, node: ChainNode, description: OperatorDescription) -> _Loaded:
        state = self._restore.get(description.uid, OperatorSubtaskState())
        storage, folder = resolve_folder(self._folder, self._storage) if self._folder else (self._storage, "")
        wanted = stored_files(state, folder, description.uid)
        if wanted:
            storage = RecoveringStorage(storage, wanted, self.restored, self._copies, keep_for=self._restored_id)
        declared = node.operator.declared_states()
        lists = ListOperatorStateBackend(declared, operator=description.uid, keeps_event_time=self._keeps_event_time)
        handles = state.operator if not self._restores_in_flight else self._with_own_event_time(state.operator, declared)
        lists.restore(_entries(handles, storage, folder, description.uid))
        keyed = None
        if description.key_type is not None:
            keyed = self._rolled_back(node, description, description.key_type)
            try:
                keyed.restore(state.keyed, storage, folder, checkpoint_id=self._restored_id)
            except BaseException:
                keyed.dispose()
                raise
        return _Loaded(node, description, keyed, lists)

    def _with_own_event_time(
        self, handles: Sequence[OperatorListHandle], declared: Sequence[StateDescriptor]
    ) -> list[OperatorListHandle]:
        """Where records are in flight each subtask goes on at its own event time: that of another one would make records late that
        wait in front of this one. At another parallelism all times are left, of which operators take the lowest."""
        timed = {each.name for each in declared if isinstance(each, OperatorListStateDescriptor) and each.of_event_time}
        by_name: dict[str, list[OperatorListHandle]] = {}
        for handle in handles:
            by_name.setdefault(handle.state.name, []).append(handle)
        for name in timed & set(by_name):
            if len(by_name[name]) == self._vertex.parallelism:  # one of each subtask, in their order
                by_name[name] = [by_name[name][self._subtask]]
        return [handle for found in by_name.values() for handle in found]

    def _rolled_back(self, node: ChainNode, description: OperatorDescription, key_type: str) -> KeyedStateBackend:
        """A backend with what it takes over in place. Any failure of that means storage."""
        keyed = self._keyed(node, description, key_type)
        claim = self._claims.get(description.uid)
        if claim is None:
            return keyed
        try:
            taken = keyed.take_over(claim.kept, claim.names)
        except Exception:
            log.warning("operator %r: its state in memory is not used", description.uid, exc_info=True)
            keyed.dispose()
            return self._keyed(node, description, key_type)
        self.restored.add(local=sum(size for name, size in claim.sizes.items() if name in taken))
        return keyed

    def _keyed(self, node: ChainNode, description: OperatorDescription, key_type: str) -> KeyedStateBackend:
        vertex, config = self._vertex, self._config
        name = f"{file_name(description.uid)}-{self._subtask}-{self._attempt}-{node.context.nonce}"
        return create_keyed_backend(
            cast(BackendKind, config.state_backend),
            descriptors=node.operator.declared_states(),
            key_type=KeyType.parse(key_type),
            key_groups=assign_key_groups(vertex.max_parallelism, vertex.parallelism, self._subtask),
            max_parallelism=vertex.max_parallelism,
            operator=description.uid,
            subtask=self._subtask,
            local_dir=os.path.join(self._local_directory, name),
            # the coordinator's compatibility check passed the snapshot; state that it let through is to be dropped
            allow_unclaimed_state=True,
            now_ms=node.context.now_ms(),
            settings=self._settings,
        )


def _entries(handles: Iterable[OperatorListHandle], storage: Storage, folder: str, operator: str) -> RestoredOperatorState:
    lists: dict[str, list[bytes]] = {}
    for handle in handles:
        entries = run_flow(read_entries(handle, folder, operator=operator), storage)
        lists.setdefault(handle.state.name, []).extend(entries)
    return RestoredOperatorState(lists)


def _attach(loaded: list[_Loaded]) -> None:
    """Loop thread. Timers are part of the state only where the graph declares them."""
    for each in loaded:
        context = each.node.context
        context.operator_backend = each.lists
        context.keyed_backend = each.keyed
        if each.keyed is None:
            continue
        timers = InternalTimerService(each.keyed, context.now_ms, operator=context.uid)
        declared = {state.name for state in each.description.states}
        for name, queue in ((EVENT_TIMERS, timers.event), (PROCESSING_TIMERS, timers.processing)):
            if name in declared:
                each.keyed.register_timers(name, TimerRows(queue.table, queue.load, queue.remove))
        context.timer_service = timers
