"""The Environment that users make: it finds its Spark session and its coordinator itself.

Without a coordinator's URL one is embedded in the driver's process; all jobs of a driver on one state directory share it.
holdfast.operators.spark.launcher starts the workers."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.api.client import RestClient
from holdfast.api.settings import check_urls, client_settings, server_settings, state_url
from holdfast.api.snapshots.preflight import named_snapshot, preflight_offline, preflight_online
from holdfast.barriers.jobgraph import ClaimMode, SinkMode, Submission
from holdfast.coordinator.restore.preflight import PreflightReport
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment as BaseEnvironment
from holdfast.operators.datastream.environment import claim_mode_of, sink_mode_of
from holdfast.operators.datastream.launcher import JobHandle, Launcher, LaunchOptions, check_snapshot_id
from holdfast.operators.datastream.settings import signature_with_settings
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.state_processor.contents import Location
from holdfast.statebackends.storage.directory import folder_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.api.server.main import EmbeddedCoordinator
    from holdfast.operators.spark.launcher import Connection, SparkLauncher


class Environment(BaseEnvironment):
    """One job: settings, sources, and `execute`. Runs on the active SparkSession unless a launcher is given.

    name: name of the job, by which a later submission finds it.
    parallelism (1): subtasks of each operator that has no parallelism of its own.
    state_dir: folder or s3:// URL of checkpoints, visible to all workers; a coordinator for it is embedded in this process.
    coordinator, token: URL and token of a running `holdfast serve`, instead of an embedded one; several URLs (a list, or with
        commas between) are those of its members.
    ca: file of the certificates that driver and workers trust of that coordinator, PEM (its `_ca.pem`); None: HOLDFAST_CA, else
        those of the state directory, else the system's.
    config: a JobConfig with the settings that are not given here.
    require_uids: True refuses a job with an operator without uid; False logs a warning.
    launcher, chaining: where workers run, if not on Spark; whether operators share subtasks (True).

    Settings, with their defaults; times in ms, sizes in bytes (hf.JobConfig):

    checkpoint_interval_ms (10000): time between checkpoints; None: only manual ones.
    checkpoint_interval_during_backlog_ms (None): the interval while a source processes a backlog; 0: no periodic ones.
    checkpoint_timeout_ms (600000): a checkpoint that takes longer is aborted.
    min_pause_ms (0): between the end of a checkpoint and the start of the next.
    max_concurrent_checkpoints (1): checkpoints under way at a time.
    tolerable_failed_checkpoints (0): failures in a row that the job survives without a restart.
    retained_checkpoints (1): completed checkpoints that are kept.
    retained_hourly (0): of so many of the newest hours, the newest checkpoint is kept, too.
    retained_daily (0): the same of days.
    retained_within_ms (0): checkpoints of this time are kept, too.
    drill_interval_ms (None): how often every row of the newest checkpoint is read as a restore would; None: when asked.
    retain_on_finish (False): whether a job that FINISHED keeps them, too, to be restored.
    retention_on_cancel ("delete"): whether a cancelled job deletes them; "retain" keeps them.
    checkpointing_mode ("exactly_once"): or "at_least_once", which waits for no channel and may repeat records behind a failure.
    unaligned_checkpoints (False): barriers overtake queued data, which the checkpoint stores.
    aligned_checkpoint_timeout_ms (0): how long such a checkpoint first tries to do without; 0: not at all.
    inflight_bytes_max (268435456): overtaken data of one subtask; more, and the checkpoint is declined.
    master_hooks (()): names of entry points `holdfast.master_hooks` that take part in each checkpoint.
    master_hook_timeout_ms (10000): how long one call of a master hook may take.
    state_backend ("memory"): "memory", "filesystem" or "rocksdb".
    incremental_checkpoints (True): store only changes since the checkpoint before, if the backend can.
    inline_threshold (20480): state smaller than this travels in the acknowledgement.
    pack_threshold (1048576): tables smaller than this share files; 0: each has its own.
    memory_snapshot_bytes_max (5242880): tables below 64 KiB of one operator's subtask on the memory backend; others are files.
    rocksdb (None): an hf.RocksDBConfig.
    local_recovery (True): workers restore from copies on their own disk, where those are undamaged.
    local_recovery_directory (None): folder of those copies; None: the worker's local disk, as configured in Spark.
    savepoint_directory (None): where savepoints without a target go.
    restart (RestartStrategy()): whether, how often and how soon a failed job is restarted: "none", "fixed_delay",
        "exponential_delay", "failure_rate" or an hf.RestartStrategy.
    skipped_rows_max (10000): rows that an operator with on_error="skip" may leave out in a subtask between two checkpoints.
    max_parallelism (None): key groups; None: derived from the parallelism, or adopted from the restored snapshot.
    buffer_timeout_ms (10): how long a record may wait for a batch to fill.
    batch_rows_max (65536): rows of one batch.
    channel_credit_bytes (4194304): bytes under way on one channel, at most.
    channel_credit_batches (16): batches under way on one channel, at most.
    buffer_debloat (True): under way is what the consumer has done in about the target time; False: always channel_credit_bytes.
    buffer_debloat_target_ms (200): time for what is under way on a channel and what waits at its sender.
    buffer_debloat_period_ms (200): time until a channel is looked at again.
    channel_credit_bytes_start (65536): bytes under way on a channel whose consumer's speed is not known yet.
    heartbeat_interval_ms (2000): time between two heartbeats of a worker.
    heartbeat_timeout_ms (50000): a worker without heartbeat for this time is replaced.
    standby_workers_per_host (1): workers that have imported and wait for the place of one that dies; at most the slots; 0: none.
    reconcile_timeout_ms (10000): how long a restarted coordinator waits for workers before it fails the job over.
    step_budget_ms (5): time of processing input before a subtask reads its mailbox.
    cancellation_timeout_ms (30000): a subtask that can't be cancelled in this time ends its worker.
    row_table_bytes_max (268435456): rows of a row table (joins, top-N, window buffers) in memory; more are in mapped files.
    auto_watermark_interval_ms (0): time between two watermarks of a strategy; 0: behind each batch that raises it.
    latency_tracking_interval_ms (0): time between two latency markers of a source's subtask; 0: none.
    combine_aggregates (True): combine records of columnar aggregates before an exchange, where it pays.

    Raises InvalidConfigError on a setting that is unknown, of a wrong type or out of bounds."""

    __signature__ = signature_with_settings(BaseEnvironment.__init__)

    def _default_launcher(self) -> Launcher:
        return SessionLauncher()

    def preflight(
        self,
        restore: Location,
        *,
        job_id: str | None = None,
        claim_mode: ClaimMode | str = ClaimMode.NO_CLAIM,
        sinks: SinkMode | str = SinkMode.KEEP,
        allow_non_restored_state: bool = False,
        allow_output_repeat: bool = False,
        without_channel_state: int | None = None,
    ) -> PreflightReport:
        """Check a snapshot as `execute` with the same arguments would; nothing is started and nothing changed.

        Asks the coordinator if there is one, else reads the state directory, else the snapshot alone. Raises GraphError and other
        InvalidConfigErrors, NotFoundError, StorageUnavailableError; reasons that would refuse the restore are in the report."""
        check_snapshot_id(without_channel_state)
        submission = Submission(
            self.build().graph,
            job_id=job_id,
            restore=named_snapshot(restore),
            claim_mode=claim_mode_of(claim_mode),
            sinks=sink_mode_of(sinks),
            allow_non_restored_state=allow_non_restored_state,
            allow_output_repeat=allow_output_repeat,
            without_channel_state=without_channel_state,
        )
        if self.coordinator is not None:
            return preflight_online(submission, os.environ, self.coordinator, self.token)
        directory = _local(self.state_dir)
        return preflight_offline(submission, None if directory is None else str(directory))


class SessionLauncher:
    """Implements Launcher on the SparkSession of the job's own DataFrames, else on the one that is active at launch."""

    def launch(self, plan: JobPlan, options: LaunchOptions) -> JobHandle:
        """Raises InvalidConfigError without a session; else as SparkLauncher.launch."""
        launcher = _launcher_of(_session_of(plan))
        check_address(options)
        return launcher.launch(plan, options)


def _session_of(plan: JobPlan) -> SparkSession:
    """Session of the plan's DataFrames, else the active one. A session is active only in the thread that made it and its children
    by Spark's own means; any other thread gets the process's default session. Raises InvalidConfigError."""
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    from holdfast.operators.sources.dataframe import SparkSource

    for source in plan.sources.values():
        if isinstance(source, SparkSource) and source.session is not None:
            return source.session
    try:
        return SparkSession.active()
    except PySparkRuntimeError as error:
        raise InvalidConfigError(
            "no SparkSession is active: make one first with SparkSession.builder.getOrCreate()", setting="spark"
        ) from error


_launchers: weakref.WeakKeyDictionary[Any, SparkLauncher] = weakref.WeakKeyDictionary()
"""One for each SparkContext, or session of Spark Connect: a launcher counts the slots of its own jobs."""
_making_launchers = threading.Lock()


def _launcher_of(session: SparkSession) -> SparkLauncher:
    from holdfast.operators.spark.access import access_of
    from holdfast.operators.spark.launcher import SparkLauncher

    access = access_of(session)
    with _making_launchers:
        if access.identity not in _launchers:
            _launchers[access.identity] = SparkLauncher(session, Connector(exposure_of(access.coordinator_host, os.environ)))
        return _launchers[access.identity]


# ------------------------------------------------------------------------------------------------------- coordinators


@dataclass(frozen=True, slots=True)
class Exposure:
    """Address on which an embedded coordinator listens, and the host sent to executors; None: the listening one."""

    host: str
    advertised_host: str | None


def exposure_of(found: tuple[str, str | None], environment: Mapping[str, str]) -> Exposure:
    """As the session has it, unless HOLDFAST_ADVERTISED_HOST names the host under which executors reach this process: then the
    coordinator listens on all addresses of this machine."""
    advertised = environment.get("HOLDFAST_ADVERTISED_HOST", "")
    return Exposure("0.0.0.0", advertised) if advertised else Exposure(*found)


def check_address(options: LaunchOptions) -> None:
    """Raise InvalidConfigError for options by which no coordinator can be found, before anything is said or started."""
    if options.coordinator_url is not None:
        check_urls(options.coordinator_url)
        return
    if options.ca is not None:
        text = "ca= is for a coordinator at a URL (coordinator='https://...'): one in this process has its own authority"
        raise InvalidConfigError(text, setting="ca")
    if _local(options.state_directory) is None:
        raise InvalidConfigError(
            "a job needs a coordinator: give the Environment coordinator='http://...' of a running `holdfast serve`, "
            "or state_dir='...' to run one in this process",
            setting="state_dir",
        )


@dataclass(frozen=True, slots=True)
class Connector:
    """Connects a launcher to its coordinator: the one at the URL, or an embedded one."""

    exposure: Exposure

    def __call__(self, options: LaunchOptions) -> Connection:
        """Raises InvalidConfigError if neither a URL nor a state directory is given, or another process serves it."""
        from holdfast.operators.spark.launcher import Connection

        check_address(options)
        if options.coordinator_url is not None:
            settings = client_settings(
                os.environ,
                url=options.coordinator_url,
                token=options.token,
                state_dir=_local(options.state_directory),
                ca=None if options.ca is None else os.path.expanduser(options.ca),
            )
            client = RestClient(settings.url, settings.token, authorities=settings.authorities)
            return Connection(client, client.close)
        directory = _local(options.state_directory)
        assert directory is not None  # check_address
        shared = _embed(directory, options.token, self.exposure)
        running = shared.coordinator
        client = RestClient(running.url, running.token, authorities=running.authorities)

        release = weakref.finalize(client, _release, shared)  # called once, at the latest when the client is collected

        def close() -> None:
            client.close()
            release()

        return Connection(client, close)


def _local(directory: str | os.PathLike[str] | None) -> Path | str | None:
    """A path for a path or a file:/// URL; an s3:// URL in normal form. Raises InvalidConfigError for any other location."""
    if directory is None:
        return None
    text = os.fspath(directory)
    return state_url(text) or Path(os.path.expanduser(folder_of(text))).absolute()


@dataclass(slots=True)
class _Shared:
    """An embedded coordinator and the number of this driver's jobs that use it."""

    directory: Path | str
    coordinator: EmbeddedCoordinator
    users: int = 0


_embedded: dict[Path | str, _Shared] = {}
_embedding = threading.Lock()


def _embed(directory: Path | str, token: str | None, exposure: Exposure) -> _Shared:
    from holdfast.api.server.main import EmbeddedCoordinator

    with _embedding:
        shared = _embedded.get(directory)
        if shared is None:
            settings = server_settings(
                os.environ, state_dir=directory, host=exposure.host, advertised_host=exposure.advertised_host, token=token
            )
            coordinator = EmbeddedCoordinator(settings)
            coordinator.start()
            shared = _embedded[directory] = _Shared(directory, coordinator)
        shared.users += 1
        return shared


def _release(shared: _Shared) -> None:
    """Release the coordinator for one job; the last job ends it."""
    with _embedding:
        shared.users -= 1
        if shared.users > 0 or _embedded.get(shared.directory) is not shared:
            return
        del _embedded[shared.directory]
    shared.coordinator.stop()
