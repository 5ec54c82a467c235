"""Makes the state backends of one subtask of one operator."""

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
    """A `backend.KeyedStateBackend` without rows; call `restore` at most once, before anything else.

    `local_dir` must be this deployment's own (its name contains attempt and nonce); rocksdb creates it, and deletes it when
    disposed of. With `allow_unclaimed_state`, state of undeclared names is dropped at restore instead of refused. `now_ms`: wall
    clock, needed if a state has a TTL; the runtime moves it on with `set_processing_time`.
    Raises InvalidConfigError."""
    settings = settings or StateBackendSettings()
    config = KeyedBackendConfig(
        tuple(descriptors), key_type, key_groups, max_parallelism, operator, subtask, allow_unclaimed_state, now_ms
    )
    match kind:
        case "memory":
            return MemoryKeyedBackend(config, snapshot_bytes_max=settings.memory_snapshot_bytes_max)
        case "filesystem":
            return FilesystemKeyedBackend(config, incremental=settings.incremental)
        case "rocksdb":
            # rocksdict is a large native library, and most processes of a job with another backend never need it
            from holdfast.statebackends.rocksdb.backend import RocksKeyedBackend

            return RocksKeyedBackend(config, local_dir=local_dir, settings=settings)
    raise InvalidConfigError(f"unknown state backend {kind!r}: say {', '.join(BACKEND_KINDS)}", setting="state_backend")


def create_operator_backend(descriptors: Sequence[StateDescriptor], *, operator: str) -> ListOperatorStateBackend:
    """A `backend.OperatorStateBackend` for the operator list states among `descriptors`."""
    return ListOperatorStateBackend(descriptors, operator=operator)
