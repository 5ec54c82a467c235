"""Factory of the state backends of one subtask of one operator: the only module that knows all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from holdfast.statebackends.backends.heap import FilesystemKeyedBackend, MemoryKeyedBackend
from holdfast.statebackends.backends.keyed import KeyedBackendBase, KeyedBackendConfig
from holdfast.statebackends.backends.operator import ListOperatorStateBackend
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import state_metas
from holdfast.statebackends.settings import StateBackendSettings
from holdfast.statebackends.state import StateDescriptor

BackendKind = Literal["memory", "filesystem", "rocksdb"]
BACKEND_KINDS: tuple[BackendKind, ...] = get_args(BackendKind)

__all__ = ["BACKEND_KINDS", "BackendKind", "create_keyed_backend", "create_operator_backend", "state_metas"]


def create_keyed_backend(
    kind: BackendKind,
    *,
    descriptors: Sequence[StateDescriptor],
    key_type: KeyType,
    key_groups: KeyGroupRange,
    max_parallelism: int,
    operator: str,
    subtask: int,
    local_dir: str,
    settings: StateBackendSettings | None = None,
    allow_unclaimed_state: bool = False,
    now_ms: int | None = None,
) -> KeyedBackendBase:
    """An empty `backend.KeyedStateBackend`; call `restore` at most once, before anything else.

    `local_dir`: a folder of this deployment alone (its name contains attempt and nonce); rocksdb and large row tables create it,
    `dispose` deletes it. `allow_unclaimed_state`: a restore drops stored states that are not declared, instead of refusing them.
    `now_ms`: the wall clock, ms since the epoch; required if a state has a TTL, and moved on with `set_processing_time`.
    Raises InvalidConfigError."""
    settings = settings or StateBackendSettings()
    config = KeyedBackendConfig(
        tuple(descriptors),
        key_type,
        key_groups,
        max_parallelism,
        operator,
        subtask,
        allow_unclaimed_state,
        now_ms,
        local_dir,
        settings.row_table_bytes_max,
    )
    match kind:
        case "memory":
            inline_bytes, limit = settings.memory_inline_bytes, settings.memory_snapshot_bytes_max
            return MemoryKeyedBackend(config, inline_bytes=inline_bytes, snapshot_bytes_max=limit)
        case "filesystem":
            return FilesystemKeyedBackend(config, incremental=settings.incremental)
        case "rocksdb":
            # rocksdict is a large native library: it is loaded by processes that use this backend alone
            from holdfast.statebackends.rocksdb.backend import RocksKeyedBackend

            return RocksKeyedBackend(config, settings=settings)
    raise InvalidConfigError(f"unknown state backend {kind!r}: say {', '.join(BACKEND_KINDS)}", setting="state_backend")


def create_operator_backend(descriptors: Sequence[StateDescriptor], *, operator: str) -> ListOperatorStateBackend:
    """A `backend.OperatorStateBackend` for the operator list states among `descriptors`."""
    return ListOperatorStateBackend(descriptors, operator=operator)
