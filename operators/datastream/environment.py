"""The Environment, where a job begins: it holds the settings, makes streams from sources, and hands the plan to a launcher.

It builds a job and does not run one: the launcher comes from outside (launcher.py)."""

from __future__ import annotations

import difflib
import logging
import os
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

import msgspec
import pyarrow as pa

from holdfast.barriers.jobgraph import BRANCH_MARK, ClaimMode, JobConfig, RestartStrategy, SinkMode, check_job_name
from holdfast.operators.base import JobPlan, Source
from holdfast.operators.datastream.branches import muted, redirected
from holdfast.operators.datastream.explain import explain_graph, explained_json, explained_text
from holdfast.operators.datastream.graph import StreamEdge, StreamGraph, build_plan, links_with_reasons
from holdfast.operators.datastream.launcher import JobHandle, Launcher, LaunchOptions
from holdfast.operators.datastream.promises import check_uids, promises_not_kept
from holdfast.operators.datastream.settings import Settings
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions.event_time.timestamps import timestamps_operator
from holdfast.operators.functions.event_time.watermarks import WatermarkStrategy
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.side_outputs import declared_side_outputs
from holdfast.operators.sinks.connector import Sink
from holdfast.operators.sources.dead_letters import DEAD_LETTERS
from holdfast.operators.sources.split_source import SplitSource, split_source_of
from holdfast.operators.sources.splits import Source as SplitsSource
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError
from holdfast.statebackends.keygroups import MAX_PARALLELISM_LIMIT, check_parallelism
from holdfast.statebackends.state_processor.contents import Location, absolute_location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger("holdfast.environment")

ENVIRONMENT_SETTINGS = ("parallelism", "config", "coordinator", "token", "ca", "state_dir", "launcher", "chaining", "require_uids")
"""Arguments of an Environment that are not fields of its JobConfig."""


class Environment:
    """One job: settings, sources, and `execute`."""

    def __init__(
        self,
        name: str,
        *,
        parallelism: int = 1,
        config: JobConfig | None = None,
        coordinator: str | Sequence[str] | None = None,
        token: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        launcher: Launcher | None = None,
        chaining: bool = True,
        require_uids: bool = False,
        **settings: Unpack[Settings],
    ) -> None:
        """`settings`: any field of JobConfig, such as checkpoint_interval_ms=1000 or state_backend="rocksdb".

        `coordinator`: URL of a running `holdfast serve`, or those of its members; without one, a coordinator runs in the driver
        over `state_dir`. `ca`: file of the certificates that driver and workers trust, PEM, where that URL is `https://` and the
        system does not know who signed it: the `_ca.pem` of its state directory. Raises InvalidConfigError on a setting that is
        unknown or out of bounds."""
        check_job_name(name)
        check_parallelism(MAX_PARALLELISM_LIMIT, parallelism)
        self.name = name
        self.parallelism = parallelism
        self.config = _configured(config or JobConfig(), {**settings})
        self.coordinator = coordinator if coordinator is None or isinstance(coordinator, str) else ",".join(coordinator)
        self.token = token
        self.ca = ca
        self.state_dir = state_dir
        self.launcher = launcher or self._default_launcher()
        self.chaining = chaining
        self.require_uids = require_uids
        self.graph = StreamGraph()
        self._job: weakref.ref[JobHandle] | None = None
        """Handle of the newest execution. The reference is weak: a handle that the program dropped releases its coordinator."""

    def _default_launcher(self) -> Launcher | None:
        return None

    def __repr__(self) -> str:
        """Streams and settings of the job and, once it was executed, its state as last seen; sends no request."""
        kinds = Counter("sink" if node.sink else "source" if node.source else "operator" for node in self.graph.nodes)
        counted = ((kinds[kind], kind) for kind in ("source", "operator", "sink"))
        parts = ", ".join(f"{count} {kind}{'s' * (count != 1)}" for count, kind in counted if count)
        job = None if self._job is None else self._job()
        stands = "not executed" if self._job is None else "executed" if job is None else f"executed: {job!r}"
        return f"<Environment {self.name!r}: {parts or 'no streams'}; parallelism {self.parallelism}; {stands}>"

    # --------------------------------------------------------------------------------------------------------- sources

    def from_source(
        self, source: Source | SplitsSource[Any], name: str | None = None, *, watermark_strategy: WatermarkStrategy | None = None
    ) -> Stream:
        """The stream of a rewindable source: one of Holdfast's, or a connector's (a subclass of `hf.Source`).

        watermark_strategy: as `assign_timestamps_and_watermarks` right behind it, in one chain, under the source's settings (the
        operator's uid is `<uid>-watermarks`), for a connector by split, the least of those that are not idle; None: records have
        the event times that the source gives, if it does. Records of a connector that can't be read fail the job
        (`InvalidRecordError`), unless it reads them: `.side_output(hf.DEAD_LETTERS)`. Raises GraphError as that. Source: Flink,
        fromSource."""
        made: Source = split_source_of(source) or source  # type: ignore[assignment]
        schema: pa.Schema | None = made.schema
        return self._read(made, name, RowType(None if schema is None else schema.remove_metadata()), watermark_strategy)

    def _read(self, source: Source, name: str | None, row_type: RowType, strategy: WatermarkStrategy | None = None) -> Stream:
        is_timed = isinstance(source, SplitSource) and source.gives_event_times
        times = None if strategy is None else timestamps_operator(strategy, row_type, "from_source", is_timed=is_timed)
        node = self.graph.add(
            "source", name or source.name, source=source, output_type=row_type, watermarks=times, timestamped=times is not None
        )
        if isinstance(source, SplitSource):
            node.side_outputs.update(declared_side_outputs([DEAD_LETTERS], node.label))
        return Stream(self, (StreamEdge(node.index),), row_type, node)

    def from_dataframe(self, dataframe: DataFrame, *, rows_per_second: float | None = None, name: str = "dataframe") -> Stream:
        """Stream of the rows of a Spark DataFrame, in its order. They are written to the state directory once per job, then
        replayed."""
        from holdfast.operators.sources.dataframe import DataFrameSource

        return self.from_source(DataFrameSource(dataframe, rows_per_second=rows_per_second, name=name))

    def from_stream(
        self,
        dataframe: DataFrame,
        *,
        available_now: bool = False,
        trigger_interval: Any = None,
        output_mode: str = "append",
        checkpoint: str | None = None,
        backlog_batches_max: int = 64,
        backlog_bytes_max: int = 1 << 30,
        name: str = "stream",
    ) -> Stream:
        """Stream of the rows of a streaming DataFrame (`spark.readStream`), whose query runs in the driver. Each micro-batch is
        stored in the state directory once, whatever Spark makes of it a second time, until no snapshot needs it.

        available_now: the query ends with what is there, and the stream with it. trigger_interval: timedelta or ms between two
        micro-batches; None: as soon as there are rows. output_mode: append, update or complete, of the query. checkpoint: location
        of Spark's checkpoint of the query, beside the stored batches by default; on S3 it must be given. backlog_batches_max,
        backlog_bytes_max: the query waits while so much is stored and unread. Raises InvalidConfigError."""
        from holdfast.operators.sources.stream import StreamSource

        source = StreamSource(
            dataframe,
            available_now=available_now,
            trigger_interval=trigger_interval,
            output_mode=output_mode,
            checkpoint=checkpoint,
            backlog_batches_max=backlog_batches_max,
            backlog_bytes_max=backlog_bytes_max,
            name=name,
        )
        return self.from_source(source)

    def from_parquet(self, path: Any, *, rows_per_second: float | None = None, name: str = "parquet", **options: Any) -> Stream:
        """Stream of the rows of Parquet files: a file, a folder or a list of files. `options` are those of ParquetSource."""
        from holdfast.operators.sources.parquet import ParquetSource

        return self.from_source(ParquetSource(path, rows_per_second=rows_per_second, name=name, **options))

    def from_collection(
        self, rows: Iterable[Any], *, returns: Any = None, rows_per_second: float | None = None, name: str = "collection"
    ) -> Stream:
        """Stream of rows that the program has: dicts by column name, or records of one type. They travel with the job, 64 MiB at
        most.

        `returns`: pa.Schema, {column: type} or a record type; by default the records' class, or types derived from the values.
        Raises GraphError, and SchemaMismatchError for a row that does not fit the others."""
        from holdfast.operators.sources.collection import collection_source

        source, row_type = collection_source(rows, returns, name, rows_per_second)
        return self._read(source, None, row_type)

    # ------------------------------------------------------------------------------------------------------------- job

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """Sinks of the job, in the order of `sink_to`; their ids are known once the job was built."""
        return tuple(node.sink for node in self.graph.nodes if node.sink is not None)

    def build(self) -> JobPlan:
        """Build the plan of the job. Raises GraphError and other InvalidConfigErrors."""
        plan = build_plan(self.graph, self.name, self.config, self.parallelism, chaining=self.chaining)
        if self.require_uids:
            check_uids(plan.graph)
        return plan

    def explain(self, *, format: Literal["text", "json"] = "text") -> str:
        """Describe the stream graph (calls of the program), the job graph (vertices, and why each link is chained or not) and the
        execution plan (subtasks, slots, channels).

        Raises GraphError and other InvalidConfigErrors, as `build` does."""
        if format not in ("text", "json"):
            raise InvalidConfigError(f"format is {format!r}, must be one of text, json", setting="format")
        plan = self.build()
        links = links_with_reasons(self.graph, self.config, self.parallelism, chaining=self.chaining)
        explained = explain_graph(self.graph, plan, links)
        return explained_json(explained) if format == "json" else explained_text(explained, plan.graph)

    def execute(
        self,
        *,
        job_id: str | None = None,
        restore: Location | None = None,
        fresh: bool = False,
        claim_mode: ClaimMode | str = ClaimMode.NO_CLAIM,
        sinks: SinkMode | str = SinkMode.KEEP,
        allow_non_restored_state: bool = False,
        allow_output_repeat: bool = False,
        without_channel_state: int | None = None,
        branch: str | None = None,
        branch_output: str | os.PathLike[str] | None = None,
        mute: bool | str | Collection[str] = False,
        progress: bool = True,
    ) -> JobHandle:
        """Submit the job and return its handle; `handle.wait()` blocks until it ends. If this driver runs the job already with the
        same plan, its handle is returned; a different plan takes over from a checkpoint.

        `restore`: `latest`, `latest-readable`, the id of a checkpoint, `label:NAME` of one with a label, or the path of a snapshot
        (relative to the working directory); for a folder of such a name write `./latest`.
        `fresh`: forget the stored state of an earlier job with this name.
        `claim_mode`: NO_CLAIM never changes the restored snapshot; with CLAIM the job owns it and deletes it once it is subsumed.
        `sinks`: "keep" refuses a sink that writes elsewhere than before; "fork" begins a new log there; "abandon" does so, too,
        where this leaves staged rows that are never committed.
        `without_channel_state`: id of the snapshot whose in-flight records are lost, all of them; another snapshot is refused.
        `branch`: run as a job of its own beside this one, named `<name>@<branch>`, from a savepoint of this one (`restore`: its
        path, or its id, `label:NAME` or `latest` as of this job), or go on with the branch (without `restore`). Its file
        sinks write below `branch_output`; sinks elsewhere are refused unless muted.
        `mute`: uids of sinks that, in a branch, count their rows and write nothing; True: all. Their state in the savepoint is left
        to the job that took it, which alone commits what is staged there.
        Raises GraphError and other InvalidConfigErrors before anything is started."""
        try:
            is_kept = branch is not None and sink_mode_of(sinks) is SinkMode.KEEP and restore is not None
            job = self._launch(
                LaunchOptions(
                    job_id=job_id,
                    restore=_restored_from(restore),
                    fresh=fresh,
                    claim_mode=claim_mode_of(claim_mode),
                    sinks=SinkMode.FORK if is_kept else sink_mode_of(sinks),
                    allow_non_restored_state=allow_non_restored_state,
                    allow_output_repeat=allow_output_repeat,
                    without_channel_state=without_channel_state,
                    branch=branch,
                    coordinator_url=self.coordinator,
                    token=self.token,
                    ca=self.ca,
                    state_directory=self.state_dir,
                    progress=progress,
                ),
                branch_output,
                mute,
            )
            self._job = weakref.ref(job)
            return job
        except HoldfastError as error:
            # The traceback of the user's program then shows the user's own line, not thirty of ours; the message says what is
            # wrong.
            log.debug("job %r can't be started", self.name, exc_info=True)
            raise error.with_traceback(None) from error.__cause__

    def _launch(
        self,
        options: LaunchOptions,
        branch_output: str | os.PathLike[str] | None = None,
        mute: bool | str | Collection[str] = False,
    ) -> JobHandle:
        options.check()
        if options.branch is not None:
            plan = self._branch_plan(options.branch, branch_output, mute)
        else:
            plan = self.build()
            for setting, given in (("branch_output", branch_output is not None), ("mute", mute is not False)):
                if given:
                    raise InvalidConfigError(f"{setting}= is for branch=", setting=setting)
        if self.launcher is None:
            raise InvalidConfigError(
                "this environment has no launcher: make it with `import holdfast as hf; hf.Environment(...)`", setting="launcher"
            )
        for note in promises_not_kept(plan.graph):
            log.warning("%s: %s", self.name, note)
        return self.launcher.launch(plan, options)

    def _branch_plan(
        self, branch: str, output: str | os.PathLike[str] | None = None, mute: bool | str | Collection[str] = False
    ) -> JobPlan:
        """The plan of a branch of this job. Raises as `build`, and InvalidConfigError for output that a branch can't have."""
        with muted(self.graph, branch, mute, output):
            self.build()  # ids of sinks are known from here on
            with redirected(self.graph, branch, output):
                name = f"{self.name}{BRANCH_MARK}{branch}"
                return build_plan(self.graph, name, self.config, self.parallelism, chaining=self.chaining)


RESTORE_WORDS = ("latest", "latest-readable")
"""Values of `restore` besides a path, the id of a checkpoint and a label."""
RESTORE_LABEL = "label:"
"""In front of a label."""


def _restored_from(restore: Location | None) -> str | None:
    """Return the location in the form that the coordinator needs, whose working directory is a different one.

    A text is one of RESTORE_WORDS, the id of a checkpoint, a label, or else a path, whatever the working directory contains: write
    `./latest`, or pass a Path, for a folder with such a name. Raises InvalidConfigError for any other type."""
    if restore is None or (isinstance(restore, str) and _is_word(restore)):
        return restore
    if not isinstance(restore, str | os.PathLike) or not os.fspath(restore):
        raise InvalidConfigError(f"restore={restore!r} is neither a text nor a path", setting="restore")
    return absolute_location(restore)


def _is_word(restore: str) -> bool:
    return restore in RESTORE_WORDS or restore.isdecimal() or restore.startswith(RESTORE_LABEL)


def claim_mode_of(text: str) -> ClaimMode:
    """Raises InvalidConfigError naming the choices."""
    try:
        return ClaimMode(text)
    except ValueError as error:
        choices = ", ".join(ClaimMode)
        raise InvalidConfigError(f"claim_mode is {text!r}, must be one of {choices}", setting="claim_mode") from error


def sink_mode_of(text: str) -> SinkMode:
    """Raises InvalidConfigError naming the choices."""
    try:
        return SinkMode(text)
    except ValueError as error:
        choices = ", ".join(SinkMode)
        raise InvalidConfigError(f"sinks is {text!r}, must be one of {choices}", setting="sinks") from error


def _configured(config: JobConfig, settings: dict[str, Any]) -> JobConfig:
    """Return the config with some fields replaced, types and bounds checked. Raises InvalidConfigError naming the setting."""
    known = JobConfig.__struct_fields__
    for setting in settings:
        if setting not in known:
            raise unknown_setting(setting, known)
    values = {**msgspec.structs.asdict(config), **settings}
    values["restart"] = RestartStrategy.of(values["restart"])
    try:
        merged = msgspec.convert(values, JobConfig, strict=True, from_attributes=True)
    except msgspec.ValidationError as error:
        raise InvalidConfigError(f"a setting has the wrong type: {error}") from error
    merged.check()
    return merged


def unknown_setting(setting: str, known: Iterable[str]) -> InvalidConfigError:
    """Return an error that names the known settings spelled most like this one, or all of them."""
    names = sorted({*known, *ENVIRONMENT_SETTINGS})
    near = difflib.get_close_matches(setting.lower().replace("-", "_"), names, n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"settings are {', '.join(names)}"
    return InvalidConfigError(f"there is no setting {setting!r}; {hint}", setting=setting)
