"""`import holdfast as hf`: cheap, complete, and the only name that Holdfast has."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from pyspark.errors import PySparkRuntimeError

import holdfast as hf
from holdfast.api.errors import decode_error, encode_error
from holdfast.statebackends.errors import InvalidConfigError

ROOT = Path(hf.__file__).parent.parent

NAMES = [
    "AccessDeniedError", "Aggregate", "AggregateFunction", "AggregatingStateDescriptor", "AmbiguousWriteError", "AppendingState",
    "AuthenticationError", "BackendMismatchError", "Batch", "Blackhole", "BodyTooLargeError", "BusyError",
    "CheckpointFailedError", "ClaimMode", "CollectSink", "Collector", "ColumnAggregate", "ColumnarStateDescriptor",
    "CommittableLostError", "CommittablesLeftError", "ConnectionLostError", "CorruptStateError", "Counter", "DataFrameSource",
    "Environment", "FencedError", "FunctionContext", "GeneratorSource", "GraphError", "HoldfastError", "IncompatibleStateError",
    "InputOutputError", "InvalidConfigError", "InvalidKeyError", "InvariantError", "JobConfig", "JobExistsError",
    "JobFailedError", "JobHandle", "KeyedStream", "ListState", "ListStateDescriptor", "MapState", "MapStateDescriptor",
    "MaxParallelismError", "NotEnoughSlotsError", "NotFoundError", "NotLeaderError", "OperatorListStateDescriptor",
    "OperatorProgress", "OutOfSpaceError", "OutputMayRepeatError", "ParquetSink", "ParquetSource", "PermissionDeniedError",
    "Pickled", "PreflightReport", "PrintSink", "ProcessContext", "ProcessFunction", "Progress", "RecoveringError",
    "Redistribution", "ReducingStateDescriptor", "RemoteError", "RestartStrategy", "RestoreError", "RichFunction",
    "RocksDBConfig", "Savepoint", "SinkMode", "SinkMovedError", "Snapshot", "SnapshotClaimedError", "StateBackendError",
    "StateDirectoryNotSharedError", "StateOverflowError", "StateValueError", "StorageAccessError", "StorageThrottledError",
    "StorageUnavailableError", "Stream", "TooManyFilesError", "TooManyRowsSkippedError", "Ttl", "Tumbling",
    "UnclaimedStateError", "UndeclaredStateError", "UnknownColumnError", "UnsupportedVersionError", "UserFunctionError",
    "VERSION", "ValueState", "ValueStateDescriptor", "WindowedStream", "chaos", "command_line", "count", "fsck", "main", "max",
    "mean", "min", "register_state_source", "sum",
]
"""Names that users had before packages of other names were no longer needed beside this one; none of them goes."""

ERRORS_SINCE = {
    "HeadTooLargeError",
    "MethodNotAllowedError",
    "UnsupportedMediaTypeError",
    "TooManyRequestsError",
    "QuestionNotKnownError",
    "TransportSecurityError",
    "WorkerBusyError",
    "WorkerSilentError",
    "SnapshotLabelledError",
    "InFlightStateError",
    "ForgetError",
    "MasterHookError",
    "InvalidRecordError",
    "InvalidRowError",
    "InvalidSplitError",
    "AsyncTimeoutError",
    "CommitPositionLostError",
    "CoordinatorRunningError",
    "FlinkUiError",
    "ForeignOriginError",
    "InputChangedError",
    "InvalidTimestampError",
    "NeverServedError",
    "NoCounterpartError",
    "ObjectMissingError",
    "PartitionOutOfRangeError",
    "ProtocolError",
    "QueryStoppedError",
    "ReadOnlyStateError",
    "SchemaMismatchError",
    "SnapshotTooLargeError",
    "SourceDataLostError",
    "StillMovingError",
    "UndeclaredOutputError",
}

NAMES_SINCE = {
    "HookCheckpoint",
    "MasterHook",
    "DeltaSink",
    "IcebergSink",
    "NatsSink",
    "NatsSource",
    "register_formats",
    "PostgresChanges",
    "write_stream",
    "PostgresSink",
    "KafkaSink",
    "KafkaSource",
    "Secret",
    "FileSink",
    "QueryGroup",
    "StreamSource",
    "FileSource",
    "AssignedSplit",
    "DEAD_LETTERS",
    "DeadLetter",
    "EnumeratorContext",
    "ReaderContext",
    "Source",
    "SourceReader",
    "SourceSplit",
    "SplitEnumerator",
    "SplitReader",
    "SplitRecords",
    "BroadcastConnectedStream",
    "BroadcastContext",
    "BroadcastProcessFunction",
    "BroadcastStream",
    "CoProcessFunction",
    "arg_max",
    "arg_min",
    "count_distinct",
    "first",
    "last",
    "stddev",
    "CommitOwner",
    "CommitRequest",
    "Committer",
    "CommitPosition",
    "CommitTarget",
    "ConnectedStreams",
    "ContinuousEventTimeTrigger",
    "ContinuousProcessingTimeTrigger",
    "CountEvictor",
    "CountTrigger",
    "DeltaEvictor",
    "DeltaTrigger",
    "EventTimeTrigger",
    "Evictor",
    "Global",
    "KeyedBroadcastProcessFunction",
    "KeyedCoProcessFunction",
    "OutputTag",
    "ProcessWindowFunction",
    "ProcessingTimeTrigger",
    "PurgingTrigger",
    "ReadOnlyBroadcastContext",
    "ReadOnlyMapState",
    "RetryStrategy",
    "Session",
    "Sink",
    "SinkWriter",
    "StagedSink",
    "Sliding",
    "TimeEvictor",
    "TimeWindow",
    "TimestampedValue",
    "Trigger",
    "TriggerContext",
    "TriggerResult",
    "WatermarkGenerator",
    "WatermarkOutput",
    "WatermarkStrategy",
    "WindowContext",
    "testing",
}

INTERNAL_ERRORS = {
    "ForbiddenAddressError": "a webhook's delivery fails with its text",
    "SilentError": "a coordinator took longer to answer than a worker waits: it is asked again, behind the others",
    "UntrustedError": "a worker logs what it says and asks again",
    "LocksUnusableError": "a member says so in its log and its sign of life, and does without a lock",
    "HookError": "ends the process of a master hook; the checkpoint's failure has its text",
    "FlowCancelledError": "ends a pool's work inside a worker; who cancelled it drops it",
    "PeerLostError": "fails the subtasks of a worker; a user reads of it in the cause of a JobFailedError",
    "RefusedError": "an answer between a worker and its coordinator, which the session acts on",
    "RejectedError": "wraps the error that a worker leaves with, and that one is told",
    "SparkStoppedError": "the driver stops the workers that are left; the job itself waits at its coordinator",
    "UnreachableError": "no answer between a worker and its coordinator: it is asked again",
}
"""Each with why no user meets it."""


def test_every_name_is_found() -> None:
    for name in hf.__all__:
        assert getattr(hf, name) is not None
    assert hf.__version__
    assert set(hf.__all__) <= set(dir(hf))


def test_dir_gives_the_names_that_users_had_and_new_errors() -> None:
    program = "import holdfast, holdfast.api.errors, holdfast.chaos.cli; print(*dir(holdfast))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = sorted({*NAMES, *NAMES_SINCE, *ERRORS_SINCE})
    assert [name for name in result.stdout.split() if not name.startswith("_")] == expected


def _error_classes() -> set[str]:
    """Names of all classes in the product that derive from HoldfastError, read from its text."""
    bases: dict[str, set[str]] = {}
    for package in sorted({module.split(".")[1] for module in hf._EXPORTS} | {"chaos"}):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    bases.setdefault(node.name, set()).update(ast.unparse(base).rpartition(".")[2] for base in node.bases)
    found = {"HoldfastError"}
    while grown := {name for name, above in bases.items() if above & found} - found:
        found |= grown
    return found


def test_every_error_is_given_to_users_or_is_internal_for_a_reason() -> None:
    assert _error_classes() - set(hf.__all__) == set(INTERNAL_ERRORS)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(hf.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    found = {(node.module, alias.name) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    seen = found - {(module.rpartition(".")[0], package) for package, module in hf._PACKAGES_SHOWN.items()}
    exported = {(module, name) for module, names in hf._EXPORTS.items() for name in names if name != "VERSION"}
    assert seen == exported


def test_what_the_documentation_names_is_there() -> None:
    """Errors to be caught, and descriptors to be given: by `hf.` alone."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    of_others = {"ArrowMemoryError", "AssertionError", "KeyError", "OSError", "TypeError", "ValueError"}
    named = set(re.findall(r"\b\w+(?:Error|StateDescriptor)\b", pages)) - of_others
    assert named <= set(hf.__all__)
    assert {"OperatorListStateDescriptor", "Redistribution", "ColumnarStateDescriptor", "ColumnAggregate"} <= set(hf.__all__)


@pytest.mark.parametrize(
    "name", ["BodyTooLargeError", "BusyError", "ConnectionLostError", "NotLeaderError", "RecoveringError", "RemoteError"]
)
def test_what_a_coordinator_answers_a_driver_with_is_caught_by_its_name(name: str) -> None:
    """Any call of JobHandle, and `execute()`, may raise it once its patience is over."""
    answer = encode_error(getattr(hf, name)("no"))
    with pytest.raises(getattr(hf, name)):
        raise decode_error(answer.status, answer.body, answer.headers)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hf.nothing  # type: ignore[attr-defined]


def test_importing_loads_nothing_else() -> None:
    program = "import sys, holdfast; print([name for name in sys.modules if name.startswith('holdfast.')])"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_what_workers_use_loads_neither_api_nor_coordinator() -> None:
    program = (
        "import sys, holdfast as hf\n"
        "hf.ProcessFunction, hf.ValueStateDescriptor, hf.Tumbling, hf.count, hf.HoldfastError\n"
        "others = ('holdfast.api', 'holdfast.coordinator', 'fastapi', 'pyspark')\n"
        "print([name for name in sys.modules if name.startswith(others)])"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_python_m_holdfast_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "holdfast", "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("holdfast ")


def test_an_environment_without_a_session_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_is_active() -> None:
        raise PySparkRuntimeError(errorClass="NO_ACTIVE_OR_DEFAULT_SESSION", messageParameters={})

    sql = importlib.import_module("pyspark.sql")
    monkeypatch.setattr(sql.SparkSession, "active", staticmethod(none_is_active))
    env = hf.Environment("job")
    assert env.launcher is not None
    with pytest.raises(InvalidConfigError, match="SparkSession"):
        env.launcher.launch(types.SimpleNamespace(sources={}), None)  # type: ignore[arg-type]
