"""The exactly-once sink of any target: its public class, and the writer that stages its rows below the job's state directory."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.base import Operator, OperatorContext
from holdfast.operators.sinks.files.formats import check_parquet
from holdfast.operators.sinks.files.log import SinkSettings
from holdfast.operators.sinks.files.parquet import FILE_SIZE_MAX
from holdfast.operators.sinks.files.writer import ParquetSinkWriter, StagedFolder
from holdfast.operators.sinks.targets.committer import TargetCommitter
from holdfast.operators.sinks.targets.staging import StagingPaths
from holdfast.operators.sinks.targets.target import CommitTarget
from holdfast.statebackends.errors import GraphError, InvalidConfigError, InvalidKeyError, InvalidRowError
from holdfast.statebackends.storage.port import Storage


class StagedSink:
    """Writes rows to a `CommitTarget`, exactly once: those of a checkpoint when it is complete, with its position in one step.

    Rows wait below the job's state directory until then. Nothing is held open outside between two checkpoints, so that a downtime
    of any length loses nothing and blocks nobody.

    sink_id: identity of the output over restarts, restores and renamed jobs, and of its position at the target; "" takes the
    operator's uid.
    rows_per_commit: rows of one step, at most; readers then see a checkpoint with more rows in several steps. None: no limit.
    commit_interval_ms: least time between two commits, ms of the wall clock; the checkpoints that complete meanwhile are committed
    in one step. 0: each is committed when it is complete.
    file_size_max: bytes of rows in memory at which a writer closes a file between two checkpoints.

    The rows must have a declared schema without nanoseconds. Raises InvalidConfigError on a setting out of bounds."""

    needs_columns = True

    def __init__(
        self,
        target: CommitTarget,
        sink_id: str = "",
        *,
        rows_per_commit: int | None = None,
        commit_interval_ms: int = 0,
        file_size_max: int = FILE_SIZE_MAX,
        name: str = "",
    ) -> None:
        if not isinstance(target, CommitTarget):
            raise InvalidConfigError(f"a StagedSink writes to a CommitTarget, not to a {type(target).__name__}", setting="target")
        limits = {"rows_per_commit": (rows_per_commit, 1), "commit_interval_ms": (commit_interval_ms, 0)}
        for setting, (value, least) in {**limits, "file_size_max": (file_size_max, 1)}.items():
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if not (is_number and value is not None and value >= least) and not (value is None and setting == "rows_per_commit"):
                raise InvalidConfigError(f"{setting} must be a whole number, at least {least}, not {value!r}", setting=setting)
        self.name = name or type(target).__name__
        # What readers have to know: `explain()` says it.
        most = f"{rows_per_commit} rows"
        self.note = "" if rows_per_commit is None else f"readers see a checkpoint of more than {most} in steps, at most {most} each"
        self._target = target
        self._rows_per_commit = rows_per_commit
        self._commit_interval_ms = commit_interval_ms
        self._settings = SinkSettings("", sink_id, file_size_max)

    def __repr__(self) -> str:
        place = f" at {self._target.place}" if self._target.place else ""
        steps = "" if self._rows_per_commit is None else f", a checkpoint in steps of {self._rows_per_commit} rows"
        return f"StagedSink({type(self._target).__name__}{place}, sink_id={self.sink_id!r}{steps})"

    @property
    def sink_id(self) -> str:
        """Identity of the output; "" until its job was built, if none was given."""
        return self._settings.sink_id

    @sink_id.setter
    def sink_id(self, value: str) -> None:
        self._settings.sink_id = value

    @property
    def target(self) -> CommitTarget:
        """Where it writes."""
        return self._target

    @property
    def log_path(self) -> str | None:
        """The identity of its target, recorded in the job graph: a restore compares it."""
        return self._target.identity or None

    @property
    def rows_per_commit(self) -> int | None:
        """Rows of one step, at most; None: no limit."""
        return self._rows_per_commit

    @property
    def commit_interval_ms(self) -> int:
        """Least time between two commits, ms of the wall clock."""
        return self._commit_interval_ms

    def renamed(self, sink_id: str) -> StagedSink:
        """The same sink under another id, with settings of its own."""
        sink = copy.copy(self)
        sink._settings = copy.copy(self._settings)
        sink.sink_id = sink_id
        return sink

    def watched(self, wrap: Callable[[CommitTarget], CommitTarget], rows_per_commit: int | None = None) -> StagedSink:
        """The same sink, its target wrapped: for tests. rows_per_commit: other than its own, if given."""
        sink = copy.copy(self)
        sink._target = wrap(self._target)
        sink._settings = copy.copy(self._settings)
        sink._rows_per_commit = rows_per_commit or self._rows_per_commit
        return sink

    def create_writer(self, schema: pa.Schema | None) -> Operator:
        """Raises GraphError without a schema, or with one that a staged file does not preserve, and what `check` does."""
        if schema is None:
            raise GraphError(f"sink {self.name} needs columns: declare returns= on the function before it")
        for field in schema:
            if pa.types.is_timestamp(field.type) and field.type.unit == "ns":
                raise GraphError(f"sink {self.name}: column {field.name} holds nanoseconds, use microseconds", column=field.name)
        columns = schema.remove_metadata()
        self._target.check(columns)
        for field in self._target.staged_schema(columns):
            check_parquet(field, self.name)
        return StagedWriter(self._settings, self._target, columns)

    def create_committer(self) -> Operator:
        return TargetCommitter(
            self._target,
            self._settings,
            rows_per_commit=self._rows_per_commit,
            commit_interval_ms=self._commit_interval_ms,
        )


class StagedWriter(ParquetSinkWriter):
    """Stages what the target makes of rows below the job's state directory."""

    def __init__(self, settings: SinkSettings, target: CommitTarget, schema: pa.Schema) -> None:
        super().__init__(settings, target.staged_schema(schema))
        self._target = target
        self._given = schema

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if batch.num_rows == 0:
            return
        columns = batch.columns()
        try:
            staged = self._target.stage(columns if columns.schema.equals(self._given) else columns.cast(self._given))
        except (InvalidRowError, InvalidKeyError) as error:
            error.operator = error.operator or self.context.uid
            raise
        if staged.num_rows != batch.num_rows or not staged.schema.equals(self._schema):
            raise InvalidConfigError(
                f"sink {self._settings.sink_id}: its target made {staged.num_rows} rows of {batch.num_rows}, of columns "
                f"{staged.schema.names}; stage() keeps their number, and gives the columns of staged_schema()",
                operator=self.context.uid,
            )
        super().process_batch(Batch(columns=staged), input_index)

    def _staging(self, context: OperatorContext) -> tuple[StagedFolder, Storage]:
        return StagingPaths(context.job_id, self._settings.sink_id), context.storage
