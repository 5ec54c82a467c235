"""Holdfast: `import holdfast as hf`. The facade, the command line, and the guard of package names.

Importing it loads nothing else: every name is looked up when it is first used, so that a worker pays only for what its
functions touch. It is a package, not a module, because type checkers look for `py.typed` in packages alone (PEP 561)."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import chaos as chaos
    from api.errors import BodyTooLargeError as BodyTooLargeError
    from api.errors import BusyError as BusyError
    from api.errors import ConnectionLostError as ConnectionLostError
    from api.errors import RemoteError as RemoteError
    from api.launch import Environment as Environment
    from api.snapshots.fsck import fsck as fsck
    from api.snapshots.savepoints import Savepoint as Savepoint
    from api.snapshots.snapshot import Snapshot as Snapshot
    from barriers.elements import Batch as Batch
    from barriers.jobgraph import ClaimMode as ClaimMode
    from barriers.jobgraph import JobConfig as JobConfig
    from barriers.jobgraph import RestartStrategy as RestartStrategy
    from barriers.jobgraph import RocksDBConfig as RocksDBConfig
    from barriers.jobgraph import SinkMode as SinkMode
    from coordinator.preflight import PreflightReport as PreflightReport
    from operators.base import Counter as Counter
    from operators.functions.aggregates import Aggregate as Aggregate
    from operators.functions.aggregates import count as count
    from operators.functions.aggregates import max as max
    from operators.functions.aggregates import mean as mean
    from operators.functions.aggregates import min as min
    from operators.functions.aggregates import sum as sum
    from operators.functions.context import FunctionContext as FunctionContext
    from operators.functions.process import Collector as Collector
    from operators.functions.process import ProcessContext as ProcessContext
    from operators.functions.process import ProcessFunction as ProcessFunction
    from operators.functions.rich import RichFunction as RichFunction
    from operators.keyed import KeyedStream as KeyedStream
    from operators.keyed import WindowedStream as WindowedStream
    from operators.launcher import JobHandle as JobHandle
    from operators.launcher import OperatorProgress as OperatorProgress
    from operators.launcher import Progress as Progress
    from operators.sinks.parquet import ParquetSink as ParquetSink
    from operators.sinks.simple import Blackhole as Blackhole
    from operators.sinks.simple import CollectSink as CollectSink
    from operators.sinks.simple import PrintSink as PrintSink
    from operators.sources.dataframe import DataFrameSource as DataFrameSource
    from operators.sources.generator import GeneratorSource as GeneratorSource
    from operators.sources.parquet import ParquetSource as ParquetSource
    from operators.state_source import register_state_source as register_state_source
    from operators.stream import Stream as Stream
    from operators.time import Tumbling as Tumbling
    from statebackends.errors import AmbiguousWriteError as AmbiguousWriteError
    from statebackends.errors import AuthenticationError as AuthenticationError
    from statebackends.errors import BackendMismatchError as BackendMismatchError
    from statebackends.errors import CheckpointFailedError as CheckpointFailedError
    from statebackends.errors import CommittableLostError as CommittableLostError
    from statebackends.errors import CommittablesLeftError as CommittablesLeftError
    from statebackends.errors import CorruptStateError as CorruptStateError
    from statebackends.errors import FencedError as FencedError
    from statebackends.errors import GraphError as GraphError
    from statebackends.errors import HoldfastError as HoldfastError
    from statebackends.errors import IncompatibleStateError as IncompatibleStateError
    from statebackends.errors import InputOutputError as InputOutputError
    from statebackends.errors import InvalidConfigError as InvalidConfigError
    from statebackends.errors import InvalidKeyError as InvalidKeyError
    from statebackends.errors import InvariantError as InvariantError
    from statebackends.errors import JobExistsError as JobExistsError
    from statebackends.errors import JobFailedError as JobFailedError
    from statebackends.errors import MaxParallelismError as MaxParallelismError
    from statebackends.errors import NotEnoughSlotsError as NotEnoughSlotsError
    from statebackends.errors import NotFoundError as NotFoundError
    from statebackends.errors import NotLeaderError as NotLeaderError
    from statebackends.errors import OutOfSpaceError as OutOfSpaceError
    from statebackends.errors import OutputMayRepeatError as OutputMayRepeatError
    from statebackends.errors import PackageShadowedError as PackageShadowedError
    from statebackends.errors import PermissionDeniedError as PermissionDeniedError
    from statebackends.errors import RecoveringError as RecoveringError
    from statebackends.errors import RestoreError as RestoreError
    from statebackends.errors import SinkMovedError as SinkMovedError
    from statebackends.errors import SnapshotClaimedError as SnapshotClaimedError
    from statebackends.errors import StateBackendError as StateBackendError
    from statebackends.errors import StateDirectoryNotSharedError as StateDirectoryNotSharedError
    from statebackends.errors import StateOverflowError as StateOverflowError
    from statebackends.errors import StateValueError as StateValueError
    from statebackends.errors import StorageAccessError as StorageAccessError
    from statebackends.errors import StorageThrottledError as StorageThrottledError
    from statebackends.errors import StorageUnavailableError as StorageUnavailableError
    from statebackends.errors import TooManyFilesError as TooManyFilesError
    from statebackends.errors import TooManyRowsSkippedError as TooManyRowsSkippedError
    from statebackends.errors import UnclaimedStateError as UnclaimedStateError
    from statebackends.errors import UndeclaredStateError as UndeclaredStateError
    from statebackends.errors import UnknownColumnError as UnknownColumnError
    from statebackends.errors import UnsupportedVersionError as UnsupportedVersionError
    from statebackends.errors import UserFunctionError as UserFunctionError
    from statebackends.serializers import Pickled as Pickled
    from statebackends.state import AggregateFunction as AggregateFunction
    from statebackends.state import AggregatingStateDescriptor as AggregatingStateDescriptor
    from statebackends.state import AppendingState as AppendingState
    from statebackends.state import ColumnAggregate as ColumnAggregate
    from statebackends.state import ColumnarStateDescriptor as ColumnarStateDescriptor
    from statebackends.state import ListState as ListState
    from statebackends.state import ListStateDescriptor as ListStateDescriptor
    from statebackends.state import MapState as MapState
    from statebackends.state import MapStateDescriptor as MapStateDescriptor
    from statebackends.state import OperatorListStateDescriptor as OperatorListStateDescriptor
    from statebackends.state import Redistribution as Redistribution
    from statebackends.state import ReducingStateDescriptor as ReducingStateDescriptor
    from statebackends.state import ValueState as ValueState
    from statebackends.state import ValueStateDescriptor as ValueStateDescriptor
    from statebackends.ttl import Ttl as Ttl

    __version__: str

DISTRIBUTION = "holdfast"

PACKAGES = ("statebackends", "barriers", "operators", "coordinator", "api", "chaos")
WORKER_PACKAGES = ("statebackends", "barriers", "operators")
"""What a worker on an executor imports."""

_EXPORTS = {
    "api.errors": ("BodyTooLargeError", "BusyError", "ConnectionLostError", "RemoteError"),
    "api.launch": ("Environment",),
    "api.snapshots.fsck": ("fsck",),
    "api.snapshots.savepoints": ("Savepoint",),
    "api.snapshots.snapshot": ("Snapshot",),
    "api.version": ("VERSION",),
    "barriers.elements": ("Batch",),
    "barriers.jobgraph": ("ClaimMode", "JobConfig", "RestartStrategy", "RocksDBConfig", "SinkMode"),
    "coordinator.preflight": ("PreflightReport",),
    "operators.base": ("Counter",),
    "operators.functions.aggregates": ("Aggregate", "count", "max", "mean", "min", "sum"),
    "operators.functions.context": ("FunctionContext",),
    "operators.functions.process": ("Collector", "ProcessContext", "ProcessFunction"),
    "operators.functions.rich": ("RichFunction",),
    "operators.keyed": ("KeyedStream", "WindowedStream"),
    "operators.launcher": ("JobHandle", "OperatorProgress", "Progress"),
    "operators.sinks.parquet": ("ParquetSink",),
    "operators.sinks.simple": ("Blackhole", "CollectSink", "PrintSink"),
    "operators.sources.dataframe": ("DataFrameSource",),
    "operators.sources.generator": ("GeneratorSource",),
    "operators.sources.parquet": ("ParquetSource",),
    "operators.state_source": ("register_state_source",),
    "operators.stream": ("Stream",),
    "operators.time": ("Tumbling",),
    "statebackends.errors": (
        "AmbiguousWriteError",
        "AuthenticationError",
        "BackendMismatchError",
        "CheckpointFailedError",
        "CommittableLostError",
        "CommittablesLeftError",
        "CorruptStateError",
        "FencedError",
        "GraphError",
        "HoldfastError",
        "IncompatibleStateError",
        "InputOutputError",
        "InvalidConfigError",
        "InvalidKeyError",
        "InvariantError",
        "JobExistsError",
        "JobFailedError",
        "MaxParallelismError",
        "NotEnoughSlotsError",
        "NotFoundError",
        "NotLeaderError",
        "OutOfSpaceError",
        "OutputMayRepeatError",
        "PackageShadowedError",
        "PermissionDeniedError",
        "RecoveringError",
        "RestoreError",
        "SinkMovedError",
        "SnapshotClaimedError",
        "StateDirectoryNotSharedError",
        "StateBackendError",
        "StateOverflowError",
        "StateValueError",
        "StorageAccessError",
        "StorageThrottledError",
        "StorageUnavailableError",
        "TooManyFilesError",
        "UnclaimedStateError",
        "UndeclaredStateError",
        "UnknownColumnError",
        "UnsupportedVersionError",
        "TooManyRowsSkippedError",
        "UserFunctionError",
    ),
    "statebackends.serializers": ("Pickled",),
    "statebackends.state": (
        "AggregateFunction",
        "AggregatingStateDescriptor",
        "AppendingState",
        "ColumnAggregate",
        "ColumnarStateDescriptor",
        "ListState",
        "ListStateDescriptor",
        "MapState",
        "MapStateDescriptor",
        "OperatorListStateDescriptor",
        "Redistribution",
        "ReducingStateDescriptor",
        "ValueState",
        "ValueStateDescriptor",
    ),
    "statebackends.ttl": ("Ttl",),
}

_PACKAGES_SHOWN = ("chaos",)
"""Packages that are names of the facade: `hf.chaos.expect`."""

_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = ["chaos", "check_packages", "main", *sorted(set(_HOME) - {"VERSION"})]


if not TYPE_CHECKING:  # a type checker would take every name for one that is there

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES_SHOWN:
            check_packages((name,))
            globals()[name] = importlib.import_module(name)
            return globals()[name]
        module = _HOME.get("VERSION" if name == "__version__" else name)
        if module is None:
            raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
        value = getattr(importlib.import_module(module), "VERSION" if name == "__version__" else name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_PACKAGES_SHOWN, "__version__"})


def check_packages(packages: tuple[str, ...] = PACKAGES) -> None:
    """Raise PackageShadowedError if one of our generic package names resolves to somebody else's package.

    First in every process: a foreign `api` on the path would otherwise fail later, and strangely."""
    for name in packages:
        try:
            found = importlib.import_module(name)
        except ImportError as error:
            raise _shadowed(name, f"it can't be imported ({error})", "") from error
        if getattr(found, "DISTRIBUTION", None) != DISTRIBUTION:
            path = getattr(found, "__file__", None) or str(next(iter(getattr(found, "__path__", ("?",)))))
            raise _shadowed(name, f"it resolves to {path}", path)


def _shadowed(name: str, what: str, path: str) -> Exception:
    message = f"Holdfast's package {name!r} is shadowed: {what}; move or rename that one, or change the order of sys.path"
    try:
        from statebackends.errors import PackageShadowedError
    except ImportError:  # the package that holds the error class is itself the shadowed one
        return ImportError(message, name=name, path=path)
    return PackageShadowedError(message, package=name, path=path)


def main() -> None:
    """Entry point of the `holdfast` command."""
    try:
        _run()
    except KeyboardInterrupt as error:  # while modules were imported, or options parsed
        raise SystemExit(130) from error


def _run() -> None:
    try:
        check_packages()
    except Exception as error:
        sys.stderr.write(f"holdfast: {error}\n")
        raise SystemExit(2) from error
    command_line()(prog_name="holdfast")


def command_line() -> Any:
    """Every command, those of the packages above the CLI's own included."""
    from api.cli import app
    from chaos.cli import app as chaos

    if not any(group.name == "chaos" for group in app.registered_groups):
        app.add_typer(chaos, name="chaos")
    return app
