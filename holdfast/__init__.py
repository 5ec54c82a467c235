"""Holdfast: `import holdfast as hf`. The facade and the command line.

Importing it loads nothing else: every name is imported when it is first used, so that a worker pays only for what its functions
use. It is a package, not a module, because type checkers look for `py.typed` in packages alone (PEP 561)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import chaos as chaos
    from holdfast.api import testing as testing
    from holdfast.api.directory_guard import CoordinatorRunningError as CoordinatorRunningError
    from holdfast.api.errors import BodyTooLargeError as BodyTooLargeError
    from holdfast.api.errors import BusyError as BusyError
    from holdfast.api.errors import ConnectionLostError as ConnectionLostError
    from holdfast.api.errors import FlinkUiError as FlinkUiError
    from holdfast.api.errors import ForeignOriginError as ForeignOriginError
    from holdfast.api.errors import HeadTooLargeError as HeadTooLargeError
    from holdfast.api.errors import MethodNotAllowedError as MethodNotAllowedError
    from holdfast.api.errors import NoCounterpartError as NoCounterpartError
    from holdfast.api.errors import RemoteError as RemoteError
    from holdfast.api.errors import UnsupportedMediaTypeError as UnsupportedMediaTypeError
    from holdfast.api.launch import Environment as Environment
    from holdfast.api.settings import NeverServedError as NeverServedError
    from holdfast.api.snapshots.maintenance import fsck as fsck
    from holdfast.api.snapshots.savepoint import Savepoint as Savepoint
    from holdfast.api.snapshots.snapshot import Snapshot as Snapshot
    from holdfast.barriers.elements import Batch as Batch
    from holdfast.barriers.jobgraph import ClaimMode as ClaimMode
    from holdfast.barriers.jobgraph import JobConfig as JobConfig
    from holdfast.barriers.jobgraph import RestartStrategy as RestartStrategy
    from holdfast.barriers.jobgraph import RocksDBConfig as RocksDBConfig
    from holdfast.barriers.jobgraph import SinkMode as SinkMode
    from holdfast.coordinator.hooks.hook import HookCheckpoint as HookCheckpoint
    from holdfast.coordinator.hooks.hook import MasterHook as MasterHook
    from holdfast.coordinator.restore.preflight import PreflightReport as PreflightReport
    from holdfast.operators.base import Counter as Counter
    from holdfast.operators.connectors.delta import DeltaSink as DeltaSink
    from holdfast.operators.connectors.iceberg import IcebergSink as IcebergSink
    from holdfast.operators.connectors.kafka.sink import KafkaSink as KafkaSink
    from holdfast.operators.connectors.kafka.source import KafkaSource as KafkaSource
    from holdfast.operators.connectors.nats.sink import NatsSink as NatsSink
    from holdfast.operators.connectors.nats.source import NatsSource as NatsSource
    from holdfast.operators.connectors.postgres.changes import PostgresChanges as PostgresChanges
    from holdfast.operators.connectors.postgres.sink import PostgresSink as PostgresSink
    from holdfast.operators.datastream.launcher import JobHandle as JobHandle
    from holdfast.operators.datastream.launcher import OperatorProgress as OperatorProgress
    from holdfast.operators.datastream.launcher import Progress as Progress
    from holdfast.operators.datastream.query_group import QueryGroup as QueryGroup
    from holdfast.operators.datastream.stream import BroadcastConnectedStream as BroadcastConnectedStream
    from holdfast.operators.datastream.stream import BroadcastStream as BroadcastStream
    from holdfast.operators.datastream.stream import ConnectedStreams as ConnectedStreams
    from holdfast.operators.datastream.stream import KeyedStream as KeyedStream
    from holdfast.operators.datastream.stream import Stream as Stream
    from holdfast.operators.datastream.stream import WindowedStream as WindowedStream
    from holdfast.operators.functions.aggregates import Aggregate as Aggregate
    from holdfast.operators.functions.aggregates import arg_max as arg_max
    from holdfast.operators.functions.aggregates import arg_min as arg_min
    from holdfast.operators.functions.aggregates import count as count
    from holdfast.operators.functions.aggregates import count_distinct as count_distinct
    from holdfast.operators.functions.aggregates import first as first
    from holdfast.operators.functions.aggregates import last as last
    from holdfast.operators.functions.aggregates import max as max
    from holdfast.operators.functions.aggregates import mean as mean
    from holdfast.operators.functions.aggregates import min as min
    from holdfast.operators.functions.aggregates import stddev as stddev
    from holdfast.operators.functions.aggregates import sum as sum
    from holdfast.operators.functions.async_map import RetryStrategy as RetryStrategy
    from holdfast.operators.functions.broadcast import BroadcastContext as BroadcastContext
    from holdfast.operators.functions.broadcast import BroadcastProcessFunction as BroadcastProcessFunction
    from holdfast.operators.functions.broadcast import KeyedBroadcastProcessFunction as KeyedBroadcastProcessFunction
    from holdfast.operators.functions.broadcast import ReadOnlyBroadcastContext as ReadOnlyBroadcastContext
    from holdfast.operators.functions.connected import CoProcessFunction as CoProcessFunction
    from holdfast.operators.functions.connected import KeyedCoProcessFunction as KeyedCoProcessFunction
    from holdfast.operators.functions.context import FunctionContext as FunctionContext
    from holdfast.operators.functions.context import RichFunction as RichFunction
    from holdfast.operators.functions.event_time.watermarks import WatermarkGenerator as WatermarkGenerator
    from holdfast.operators.functions.event_time.watermarks import WatermarkOutput as WatermarkOutput
    from holdfast.operators.functions.event_time.watermarks import WatermarkStrategy as WatermarkStrategy
    from holdfast.operators.functions.process import Collector as Collector
    from holdfast.operators.functions.process import ProcessContext as ProcessContext
    from holdfast.operators.functions.process import ProcessFunction as ProcessFunction
    from holdfast.operators.functions.side_outputs import OutputTag as OutputTag
    from holdfast.operators.functions.windows.assigners import Global as Global
    from holdfast.operators.functions.windows.assigners import Session as Session
    from holdfast.operators.functions.windows.assigners import Sliding as Sliding
    from holdfast.operators.functions.windows.assigners import Tumbling as Tumbling
    from holdfast.operators.functions.windows.bounds import TimeWindow as TimeWindow
    from holdfast.operators.functions.windows.evictors import CountEvictor as CountEvictor
    from holdfast.operators.functions.windows.evictors import DeltaEvictor as DeltaEvictor
    from holdfast.operators.functions.windows.evictors import Evictor as Evictor
    from holdfast.operators.functions.windows.evictors import TimeEvictor as TimeEvictor
    from holdfast.operators.functions.windows.evictors import TimestampedValue as TimestampedValue
    from holdfast.operators.functions.windows.row_functions import ProcessWindowFunction as ProcessWindowFunction
    from holdfast.operators.functions.windows.row_functions import WindowContext as WindowContext
    from holdfast.operators.functions.windows.triggers import ContinuousEventTimeTrigger as ContinuousEventTimeTrigger
    from holdfast.operators.functions.windows.triggers import ContinuousProcessingTimeTrigger as ContinuousProcessingTimeTrigger
    from holdfast.operators.functions.windows.triggers import CountTrigger as CountTrigger
    from holdfast.operators.functions.windows.triggers import DeltaTrigger as DeltaTrigger
    from holdfast.operators.functions.windows.triggers import EventTimeTrigger as EventTimeTrigger
    from holdfast.operators.functions.windows.triggers import ProcessingTimeTrigger as ProcessingTimeTrigger
    from holdfast.operators.functions.windows.triggers import PurgingTrigger as PurgingTrigger
    from holdfast.operators.functions.windows.triggers import Trigger as Trigger
    from holdfast.operators.functions.windows.triggers import TriggerContext as TriggerContext
    from holdfast.operators.functions.windows.triggers import TriggerResult as TriggerResult
    from holdfast.operators.sinks.connector import CommitRequest as CommitRequest
    from holdfast.operators.sinks.connector import Committer as Committer
    from holdfast.operators.sinks.connector import Sink as Sink
    from holdfast.operators.sinks.connector import SinkWriter as SinkWriter
    from holdfast.operators.sinks.files.parquet import FileSink as FileSink
    from holdfast.operators.sinks.files.parquet import ParquetSink as ParquetSink
    from holdfast.operators.sinks.simple import Blackhole as Blackhole
    from holdfast.operators.sinks.simple import CollectSink as CollectSink
    from holdfast.operators.sinks.simple import PrintSink as PrintSink
    from holdfast.operators.sinks.targets.positions import CommitOwner as CommitOwner
    from holdfast.operators.sinks.targets.positions import CommitPosition as CommitPosition
    from holdfast.operators.sinks.targets.staged import StagedSink as StagedSink
    from holdfast.operators.sinks.targets.target import CommitTarget as CommitTarget
    from holdfast.operators.sources.dataframe import DataFrameSource as DataFrameSource
    from holdfast.operators.sources.dead_letters import DEAD_LETTERS as DEAD_LETTERS
    from holdfast.operators.sources.files import FileSource as FileSource
    from holdfast.operators.sources.generator import GeneratorSource as GeneratorSource
    from holdfast.operators.sources.parquet import ParquetSource as ParquetSource
    from holdfast.operators.sources.splits import AssignedSplit as AssignedSplit
    from holdfast.operators.sources.splits import DeadLetter as DeadLetter
    from holdfast.operators.sources.splits import EnumeratorContext as EnumeratorContext
    from holdfast.operators.sources.splits import ReaderContext as ReaderContext
    from holdfast.operators.sources.splits import Source as Source
    from holdfast.operators.sources.splits import SourceReader as SourceReader
    from holdfast.operators.sources.splits import SourceSplit as SourceSplit
    from holdfast.operators.sources.splits import SplitEnumerator as SplitEnumerator
    from holdfast.operators.sources.splits import SplitReader as SplitReader
    from holdfast.operators.sources.splits import SplitRecords as SplitRecords
    from holdfast.operators.sources.stream import StreamSource as StreamSource
    from holdfast.operators.spark.datasource.registration import register_formats as register_formats
    from holdfast.operators.spark.datasource.state import register_state_source as register_state_source
    from holdfast.operators.spark.datasource.write_stream import write_stream as write_stream
    from holdfast.statebackends.errors import AccessDeniedError as AccessDeniedError
    from holdfast.statebackends.errors import AmbiguousWriteError as AmbiguousWriteError
    from holdfast.statebackends.errors import AsyncTimeoutError as AsyncTimeoutError
    from holdfast.statebackends.errors import AuthenticationError as AuthenticationError
    from holdfast.statebackends.errors import BackendMismatchError as BackendMismatchError
    from holdfast.statebackends.errors import CheckpointFailedError as CheckpointFailedError
    from holdfast.statebackends.errors import CommitPositionLostError as CommitPositionLostError
    from holdfast.statebackends.errors import CommittableLostError as CommittableLostError
    from holdfast.statebackends.errors import CommittablesLeftError as CommittablesLeftError
    from holdfast.statebackends.errors import CorruptStateError as CorruptStateError
    from holdfast.statebackends.errors import FencedError as FencedError
    from holdfast.statebackends.errors import ForgetError as ForgetError
    from holdfast.statebackends.errors import GraphError as GraphError
    from holdfast.statebackends.errors import HoldfastError as HoldfastError
    from holdfast.statebackends.errors import IncompatibleStateError as IncompatibleStateError
    from holdfast.statebackends.errors import InFlightStateError as InFlightStateError
    from holdfast.statebackends.errors import InputChangedError as InputChangedError
    from holdfast.statebackends.errors import InputOutputError as InputOutputError
    from holdfast.statebackends.errors import InvalidConfigError as InvalidConfigError
    from holdfast.statebackends.errors import InvalidKeyError as InvalidKeyError
    from holdfast.statebackends.errors import InvalidRecordError as InvalidRecordError
    from holdfast.statebackends.errors import InvalidRowError as InvalidRowError
    from holdfast.statebackends.errors import InvalidSplitError as InvalidSplitError
    from holdfast.statebackends.errors import InvalidTimestampError as InvalidTimestampError
    from holdfast.statebackends.errors import InvariantError as InvariantError
    from holdfast.statebackends.errors import JobExistsError as JobExistsError
    from holdfast.statebackends.errors import JobFailedError as JobFailedError
    from holdfast.statebackends.errors import MasterHookError as MasterHookError
    from holdfast.statebackends.errors import MaxParallelismError as MaxParallelismError
    from holdfast.statebackends.errors import NotEnoughSlotsError as NotEnoughSlotsError
    from holdfast.statebackends.errors import NotFoundError as NotFoundError
    from holdfast.statebackends.errors import NotLeaderError as NotLeaderError
    from holdfast.statebackends.errors import ObjectMissingError as ObjectMissingError
    from holdfast.statebackends.errors import OutOfSpaceError as OutOfSpaceError
    from holdfast.statebackends.errors import OutputMayRepeatError as OutputMayRepeatError
    from holdfast.statebackends.errors import PartitionOutOfRangeError as PartitionOutOfRangeError
    from holdfast.statebackends.errors import PermissionDeniedError as PermissionDeniedError
    from holdfast.statebackends.errors import ProtocolError as ProtocolError
    from holdfast.statebackends.errors import QueryStoppedError as QueryStoppedError
    from holdfast.statebackends.errors import QuestionNotKnownError as QuestionNotKnownError
    from holdfast.statebackends.errors import ReadOnlyStateError as ReadOnlyStateError
    from holdfast.statebackends.errors import RecoveringError as RecoveringError
    from holdfast.statebackends.errors import RestoreError as RestoreError
    from holdfast.statebackends.errors import SchemaMismatchError as SchemaMismatchError
    from holdfast.statebackends.errors import SinkMovedError as SinkMovedError
    from holdfast.statebackends.errors import SnapshotClaimedError as SnapshotClaimedError
    from holdfast.statebackends.errors import SnapshotLabelledError as SnapshotLabelledError
    from holdfast.statebackends.errors import SnapshotTooLargeError as SnapshotTooLargeError
    from holdfast.statebackends.errors import SourceDataLostError as SourceDataLostError
    from holdfast.statebackends.errors import StateBackendError as StateBackendError
    from holdfast.statebackends.errors import StateDirectoryNotSharedError as StateDirectoryNotSharedError
    from holdfast.statebackends.errors import StateOverflowError as StateOverflowError
    from holdfast.statebackends.errors import StateValueError as StateValueError
    from holdfast.statebackends.errors import StillMovingError as StillMovingError
    from holdfast.statebackends.errors import StorageAccessError as StorageAccessError
    from holdfast.statebackends.errors import StorageThrottledError as StorageThrottledError
    from holdfast.statebackends.errors import StorageUnavailableError as StorageUnavailableError
    from holdfast.statebackends.errors import TooManyFilesError as TooManyFilesError
    from holdfast.statebackends.errors import TooManyRequestsError as TooManyRequestsError
    from holdfast.statebackends.errors import TooManyRowsSkippedError as TooManyRowsSkippedError
    from holdfast.statebackends.errors import TransportSecurityError as TransportSecurityError
    from holdfast.statebackends.errors import UnclaimedStateError as UnclaimedStateError
    from holdfast.statebackends.errors import UndeclaredOutputError as UndeclaredOutputError
    from holdfast.statebackends.errors import UndeclaredStateError as UndeclaredStateError
    from holdfast.statebackends.errors import UnknownColumnError as UnknownColumnError
    from holdfast.statebackends.errors import UnsupportedVersionError as UnsupportedVersionError
    from holdfast.statebackends.errors import UserFunctionError as UserFunctionError
    from holdfast.statebackends.errors import WorkerBusyError as WorkerBusyError
    from holdfast.statebackends.errors import WorkerSilentError as WorkerSilentError
    from holdfast.statebackends.secrets import Secret as Secret
    from holdfast.statebackends.state import AggregateFunction as AggregateFunction
    from holdfast.statebackends.state import AggregatingStateDescriptor as AggregatingStateDescriptor
    from holdfast.statebackends.state import AppendingState as AppendingState
    from holdfast.statebackends.state import ColumnAggregate as ColumnAggregate
    from holdfast.statebackends.state import ColumnarStateDescriptor as ColumnarStateDescriptor
    from holdfast.statebackends.state import ListState as ListState
    from holdfast.statebackends.state import ListStateDescriptor as ListStateDescriptor
    from holdfast.statebackends.state import MapState as MapState
    from holdfast.statebackends.state import MapStateDescriptor as MapStateDescriptor
    from holdfast.statebackends.state import OperatorListStateDescriptor as OperatorListStateDescriptor
    from holdfast.statebackends.state import Pickled as Pickled
    from holdfast.statebackends.state import ReadOnlyMapState as ReadOnlyMapState
    from holdfast.statebackends.state import Redistribution as Redistribution
    from holdfast.statebackends.state import ReducingStateDescriptor as ReducingStateDescriptor
    from holdfast.statebackends.state import Ttl as Ttl
    from holdfast.statebackends.state import ValueState as ValueState
    from holdfast.statebackends.state import ValueStateDescriptor as ValueStateDescriptor

    __version__: str

_EXPORTS = {
    "holdfast.api.directory_guard": ("CoordinatorRunningError",),
    "holdfast.api.errors": (
        "BodyTooLargeError",
        "BusyError",
        "ConnectionLostError",
        "FlinkUiError",
        "ForeignOriginError",
        "HeadTooLargeError",
        "MethodNotAllowedError",
        "NoCounterpartError",
        "RemoteError",
        "UnsupportedMediaTypeError",
    ),
    "holdfast.api.launch": ("Environment",),
    "holdfast.api.settings": ("NeverServedError",),
    "holdfast.api.snapshots.maintenance": ("fsck",),
    "holdfast.api.snapshots.savepoint": ("Savepoint",),
    "holdfast.api.snapshots.snapshot": ("Snapshot",),
    "holdfast.api.version": ("VERSION",),
    "holdfast.barriers.elements": ("Batch",),
    "holdfast.barriers.jobgraph": ("ClaimMode", "JobConfig", "RestartStrategy", "RocksDBConfig", "SinkMode"),
    "holdfast.coordinator.hooks.hook": ("HookCheckpoint", "MasterHook"),
    "holdfast.coordinator.restore.preflight": ("PreflightReport",),
    "holdfast.operators.base": ("Counter",),
    "holdfast.operators.connectors.delta": ("DeltaSink",),
    "holdfast.operators.connectors.iceberg": ("IcebergSink",),
    "holdfast.operators.connectors.nats.sink": ("NatsSink",),
    "holdfast.operators.connectors.postgres.changes": ("PostgresChanges",),
    "holdfast.operators.connectors.nats.source": ("NatsSource",),
    "holdfast.operators.connectors.postgres.sink": ("PostgresSink",),
    "holdfast.operators.connectors.kafka.sink": ("KafkaSink",),
    "holdfast.operators.connectors.kafka.source": ("KafkaSource",),
    "holdfast.operators.datastream.launcher": ("JobHandle", "OperatorProgress", "Progress"),
    "holdfast.operators.datastream.query_group": ("QueryGroup",),
    "holdfast.operators.datastream.stream": (
        "BroadcastConnectedStream",
        "BroadcastStream",
        "ConnectedStreams",
        "KeyedStream",
        "Stream",
        "WindowedStream",
    ),
    "holdfast.operators.functions.aggregates": (
        "Aggregate",
        "arg_max",
        "arg_min",
        "count",
        "count_distinct",
        "first",
        "last",
        "max",
        "mean",
        "min",
        "stddev",
        "sum",
    ),
    "holdfast.operators.functions.async_map": ("RetryStrategy",),
    "holdfast.operators.functions.broadcast": (
        "BroadcastContext",
        "BroadcastProcessFunction",
        "KeyedBroadcastProcessFunction",
        "ReadOnlyBroadcastContext",
    ),
    "holdfast.operators.functions.connected": ("CoProcessFunction", "KeyedCoProcessFunction"),
    "holdfast.operators.functions.context": ("FunctionContext", "RichFunction"),
    "holdfast.operators.functions.windows.evictors": ("CountEvictor", "DeltaEvictor", "Evictor", "TimeEvictor", "TimestampedValue"),
    "holdfast.operators.functions.process": ("Collector", "ProcessContext", "ProcessFunction"),
    "holdfast.operators.functions.windows.row_functions": ("ProcessWindowFunction", "WindowContext"),
    "holdfast.operators.functions.side_outputs": ("OutputTag",),
    "holdfast.operators.functions.windows.assigners": ("Global", "Session", "Sliding", "Tumbling"),
    "holdfast.operators.functions.windows.bounds": ("TimeWindow",),
    "holdfast.operators.functions.windows.triggers": (
        "ContinuousEventTimeTrigger",
        "ContinuousProcessingTimeTrigger",
        "CountTrigger",
        "DeltaTrigger",
        "EventTimeTrigger",
        "ProcessingTimeTrigger",
        "PurgingTrigger",
        "Trigger",
        "TriggerContext",
        "TriggerResult",
    ),
    "holdfast.operators.functions.event_time.watermarks": ("WatermarkGenerator", "WatermarkOutput", "WatermarkStrategy"),
    "holdfast.operators.sinks.files.parquet": ("FileSink", "ParquetSink"),
    "holdfast.operators.sinks.targets.positions": ("CommitOwner", "CommitPosition"),
    "holdfast.operators.sinks.targets.staged": ("StagedSink",),
    "holdfast.operators.sinks.targets.target": ("CommitTarget",),
    "holdfast.operators.sinks.connector": ("CommitRequest", "Committer", "Sink", "SinkWriter"),
    "holdfast.operators.sinks.simple": ("Blackhole", "CollectSink", "PrintSink"),
    "holdfast.operators.sources.dataframe": ("DataFrameSource",),
    "holdfast.operators.sources.dead_letters": ("DEAD_LETTERS",),
    "holdfast.operators.sources.files": ("FileSource",),
    "holdfast.operators.sources.generator": ("GeneratorSource",),
    "holdfast.operators.sources.parquet": ("ParquetSource",),
    "holdfast.operators.sources.splits": (
        "AssignedSplit",
        "DeadLetter",
        "EnumeratorContext",
        "ReaderContext",
        "Source",
        "SourceReader",
        "SourceSplit",
        "SplitEnumerator",
        "SplitReader",
        "SplitRecords",
    ),
    "holdfast.operators.spark.datasource.registration": ("register_formats",),
    "holdfast.operators.sources.stream": ("StreamSource",),
    "holdfast.operators.spark.datasource.write_stream": ("write_stream",),
    "holdfast.operators.spark.datasource.state": ("register_state_source",),
    "holdfast.statebackends.errors": (
        "AccessDeniedError",
        "AmbiguousWriteError",
        "AsyncTimeoutError",
        "AuthenticationError",
        "BackendMismatchError",
        "CheckpointFailedError",
        "CommitPositionLostError",
        "CommittableLostError",
        "CommittablesLeftError",
        "CorruptStateError",
        "FencedError",
        "GraphError",
        "HoldfastError",
        "ForgetError",
        "InFlightStateError",
        "IncompatibleStateError",
        "InputChangedError",
        "InputOutputError",
        "InvalidConfigError",
        "InvalidKeyError",
        "InvalidRecordError",
        "InvalidRowError",
        "InvalidSplitError",
        "InvalidTimestampError",
        "InvariantError",
        "JobExistsError",
        "JobFailedError",
        "MasterHookError",
        "MaxParallelismError",
        "NotEnoughSlotsError",
        "NotFoundError",
        "NotLeaderError",
        "ObjectMissingError",
        "OutOfSpaceError",
        "OutputMayRepeatError",
        "PartitionOutOfRangeError",
        "PermissionDeniedError",
        "ProtocolError",
        "QueryStoppedError",
        "QuestionNotKnownError",
        "ReadOnlyStateError",
        "RecoveringError",
        "RestoreError",
        "SchemaMismatchError",
        "SinkMovedError",
        "SnapshotClaimedError",
        "SnapshotLabelledError",
        "SnapshotTooLargeError",
        "SourceDataLostError",
        "StateBackendError",
        "StateDirectoryNotSharedError",
        "StateOverflowError",
        "StateValueError",
        "StillMovingError",
        "StorageAccessError",
        "StorageThrottledError",
        "StorageUnavailableError",
        "TooManyFilesError",
        "TooManyRequestsError",
        "TooManyRowsSkippedError",
        "TransportSecurityError",
        "UnclaimedStateError",
        "UndeclaredOutputError",
        "UndeclaredStateError",
        "UnknownColumnError",
        "UnsupportedVersionError",
        "UserFunctionError",
        "WorkerBusyError",
        "WorkerSilentError",
    ),
    "holdfast.statebackends.secrets": ("Secret",),
    "holdfast.statebackends.state": (
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
        "Pickled",
        "ReadOnlyMapState",
        "Redistribution",
        "ReducingStateDescriptor",
        "Ttl",
        "ValueState",
        "ValueStateDescriptor",
    ),
}

_PACKAGES_SHOWN = {"chaos": "holdfast.chaos", "testing": "holdfast.api.testing"}
"""Packages that are names of the facade: `hf.chaos.expect`, `hf.testing.Job`."""

_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [*_PACKAGES_SHOWN, "main", *sorted(set(_HOME) - {"VERSION"})]


if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES_SHOWN:
            return importlib.import_module(_PACKAGES_SHOWN[name])
        module = _HOME.get("VERSION" if name == "__version__" else name)
        if module is None:
            raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
        value = getattr(importlib.import_module(module), "VERSION" if name == "__version__" else name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Public names, and what Python itself gives a module; not the packages below that happen to be loaded."""
    of_python = {name for name in globals() if name.startswith("__")}
    return sorted({*of_python, *__all__, "VERSION", "__version__", "command_line"})


def main() -> None:
    """Entry point of the `holdfast` command."""
    try:
        command_line()(prog_name="holdfast")
    except KeyboardInterrupt as error:  # while modules were imported, or options parsed
        raise SystemExit(130) from error


def command_line() -> Any:
    """Every command, including those of packages above the CLI."""
    from holdfast.api.cli.main import app, benchmarks
    from holdfast.api.nexmark.cli import nexmark
    from holdfast.chaos.cli import app as chaos

    if not any(command.callback is nexmark for command in benchmarks.registered_commands):
        benchmarks.command("nexmark")(nexmark)
    if not any(group.name == "chaos" for group in app.registered_groups):
        app.add_typer(chaos, name="chaos")
    return app
