"""SHELL: runs plans on Spark: checks the session, submits, materialises DataFrames, ships code, starts one Spark job per worker.

It decides nothing about checkpoints or failover; supervisor.py decides about workers. It reaches the coordinator through a client
that holdfast.api.launch makes, since operators may not import api."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from msgspec import UNSET

from holdfast.barriers.jobgraph import Submission, SubmissionAccepted
from holdfast.barriers.launches import draw_secret
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.launcher import CoordinatorClient, JobHandle, LaunchOptions
from holdfast.operators.datastream.unpicklable import check_picklable
from holdfast.operators.sinks.committing import TwoPhaseCommitter
from holdfast.operators.sources.dataframe import DataFrameSource
from holdfast.operators.sources.stream import StreamSource
from holdfast.operators.sources.stream_query import StreamQuery
from holdfast.operators.sources.stream_savepoint import begin_stream, check_saved_queries
from holdfast.operators.spark.access import access_of
from holdfast.operators.spark.handle import SparkJobHandle
from holdfast.operators.spark.messages import describe_replaced
from holdfast.operators.spark.packaging import modules_by_value, user_modules
from holdfast.operators.spark.progress import ProgressLine
from holdfast.operators.spark.running_jobs import Execution, RunningJob, RunningJobs, checkpoint_before_takeover
from holdfast.operators.spark.shipping import ship_package as ship_package
from holdfast.operators.spark.slots import SlotRunner, WorkerTemplate
from holdfast.operators.spark.supervisor import SlotSupervisor
from holdfast.operators.worker.main import pickle_plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("holdfast.spark")

WORKERS_START_S = 120.0
"""Time that `launch` waits until every slot's worker is registered."""


STANDBYS_MISSING = (
    "%s: %d of %d standby workers have a free Spark slot; a worker that dies has a successor when Spark has started one, some "
    "tenths of a second later (standby_workers_per_host)"
)

_shipping = threading.Lock()
"""Held while `sys.path`, which the whole process shares, is changed for a moment."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A coordinator, and how to release it: an embedded one ends, a remote one is left alone."""

    client: CoordinatorClient
    close: Callable[[], None]


Connect = Callable[[LaunchOptions], Connection]


class _SlotCount:
    """Counts the Spark slots of one session's jobs: those that threads are starting, and those of running handles. Thread-safe;
    never waits with the lock held.

    Workers that stand by make room for those of another job that has to start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starting = 0
        self._starting_standbys = 0
        """Beside `_starting`: of jobs that have no handle yet."""
        self._are_claimed = False
        """A job counts on slots of these: they are released as soon as their jobs have handles."""
        self._handles: weakref.WeakSet[SparkJobHandle] = weakref.WeakSet()

    def take(self, slots: int, room: int, *, leaving: SparkJobHandle | None = None) -> int:
        """Slots that other jobs hold; takes `slots` more for ours if all fit in `room`. The slots of `leaving` don't count."""
        released: list[SparkJobHandle] = []
        with self._lock:
            others = [handle for handle in self._handles if handle is not leaving]
            occupied = self._starting + sum(handle.slots_held - handle.standbys_held for handle in others)
            if occupied + slots <= room:
                self._starting += slots
                standing = self._starting_standbys + sum(handle.standbys_held for handle in others)
                if occupied + slots + standing > room:
                    released = [handle for handle in others if handle.standbys_held]
                    self._are_claimed = self._starting_standbys > 0
        for handle in released:
            handle.release_standbys()
        return occupied

    def take_to_stand_by(self, wanted: int, room: int, *, leaving: SparkJobHandle | None = None) -> int:
        """Take up to so many slots beside those that are taken, if they are free; returns how many."""
        with self._lock:
            held = self._starting + sum(handle.slots_held for handle in self._handles if handle is not leaving)
            count = max(0, min(wanted, room - held - self._starting_standbys))
            self._starting_standbys += count
            return count

    def give_back(self, slots: int, standbys: int) -> None:
        """Release slots of a job that did not start."""
        with self._lock:
            self._starting -= slots
            self._starting_standbys -= standbys

    def pass_on(self, slots: int, standbys: int, handle: SparkJobHandle) -> None:
        """Replace taken slots by those of the job's handle."""
        with self._lock:
            self._starting -= slots
            self._starting_standbys -= standbys
            self._handles.add(handle)
            is_claimed, self._are_claimed = self._are_claimed, self._are_claimed and self._starting_standbys > 0
        if is_claimed and standbys:
            handle.release_standbys()


class _WatchedJob:
    """Implements JobView on a handle, which the program may drop."""

    def __init__(self, handle: SparkJobHandle) -> None:
        self._handle = weakref.ref(handle)

    @property
    def is_running(self) -> bool:
        handle = self._handle()
        return handle is not None and handle.is_running

    def rows_read(self, uid: str) -> int:
        handle = self._handle()
        operators = () if handle is None else handle.progress().operators
        return sum(operator.records_out for operator in operators if operator.uid == uid)

    def give_up(self, error: str) -> None:
        handle = self._handle()
        if handle is not None:
            handle.fail(error)


class SparkLauncher:
    """Implements Launcher on a SparkSession, classic or of Spark Connect. `advertised_host`: address of the workers' data ports,
    where the address of the route to the coordinator is wrong."""

    def __init__(self, spark: SparkSession, connect: Connect, *, advertised_host: str | None = None) -> None:
        self._spark = spark
        self._access = access_of(spark)
        self._connect = connect
        self._advertised_host = advertised_host
        self._jobs = RunningJobs()
        self._slots = _SlotCount()

    def launch(self, plan: JobPlan, options: LaunchOptions) -> JobHandle:
        """Submit and start; returns when every worker is registered. A job that this driver runs already is not started twice: its
        handle is returned, or, if the plan is a different one, the new plan takes over (running_jobs.py).

        Raises InvalidConfigError, NotEnoughSlotsError, JobExistsError, RestoreError, JobFailedError, TimeoutError."""
        for warning in self._access.prepare(plan.sources):
            log.warning("%s", warning)
        execution = Execution.of(plan, options)
        with self._jobs.turn(execution.name):
            running = self._jobs.find(execution, lambda: self._connect(options))
            difference = None if running is None else running.difference(execution)
            if running is None or difference is not None:
                return self._launch(plan, options, execution, running, difference)
            running.handle.attach()
            return running.handle

    def _launch(
        self, plan: JobPlan, options: LaunchOptions, execution: Execution, running: RunningJob | None, difference: str | None
    ) -> SparkJobHandle:
        """`running`: the same job in this driver, which ends when the new plan is submitted; `difference`: how the new plan
        differs."""
        _say_start(plan, options, self._access.master)
        with modules_by_value(user_modules()):
            check_picklable(plan)
        _prepare_sinks(plan, options)
        check_saved_queries(plan.sources, options.restore)
        slots = plan.graph.slots_required
        leaving = None if running is None else running.handle
        room = self._take_slots(slots, leaving)
        standbys = self._take_standbys(plan, room, leaving)
        try:
            if running is not None:
                running.handle.say(describe_replaced(execution.name, difference or ""))
                checkpoint_before_takeover(running, execution)
            handle = self._submit(plan, options, standbys)
        except BaseException:
            self._slots.give_back(slots, standbys)
            raise
        self._slots.pass_on(slots, standbys, handle)
        self._jobs.add(execution, handle)
        try:
            handle.wait_for_workers(WORKERS_START_S)
        except BaseException:
            handle.close()
            raise
        return handle

    def _take_slots(self, slots: int, leaving: SparkJobHandle | None) -> int:
        """Wait until there is a slot for each worker, and take them; returns how many workers have room in all."""
        room = 0

        def take(found: int) -> int:
            nonlocal room
            room = found
            return self._slots.take(slots, found, leaving=leaving)

        self._access.await_slots(slots, take)
        return room

    def _take_standbys(self, plan: JobPlan, room: int, leaving: SparkJobHandle | None) -> int:
        """Take slots for workers that stand by, as many as are wanted and free; says so where they are not. Nothing waits for
        them."""
        per_host = plan.graph.config.standby_workers_per_host
        if per_host == 0:
            return 0
        wanted = min(per_host * self._access.hosts, plan.graph.slots_required)
        count = self._slots.take_to_stand_by(wanted, room, leaving=leaving)
        if count < wanted:
            log.info(STANDBYS_MISSING, plan.graph.name, count, wanted)
        return count

    def _submit(self, plan: JobPlan, options: LaunchOptions, standbys: int) -> SparkJobHandle:
        """Submit and start the workers; returns the job's handle."""
        connection = self._connect(options)
        try:
            submission = _submission(plan, options)
            accepted = connection.client.submit(submission)
        except BaseException:
            connection.close()
            raise
        for note in accepted.notes:
            log.warning("%s: %s", plan.graph.name, note)
        handle = SparkJobHandle(
            accepted.job_id,
            connection.client,
            plan.graph,
            accepted.slots,
            submission=accepted.submission,
            standbys=standbys,
            progress=options.progress,
            release=connection.close,
        )
        if accepted.restored_checkpoint_id:
            handle.say(_restored_text(plan.graph.name, accepted.restored_checkpoint_id, options.restore))
        try:
            self._start(plan, options, accepted, handle, submission.launch_key, standbys)
        except BaseException:
            # The job is not cancelled, as that could delete its checkpoints: it waits for a driver that brings workers.
            handle.close()
            raise
        return handle

    def _start(
        self,
        plan: JobPlan,
        options: LaunchOptions,
        accepted: SubmissionAccepted,
        handle: SparkJobHandle,
        launch_key: str,
        standbys: int,
    ) -> None:
        with _shipping:
            self._access.ship_package([accepted.directory])
        for uid, source in plan.sources.items():
            if isinstance(source, DataFrameSource):
                source.materialise(
                    self._spark, accepted.directory, accepted.job_id, uid, submission=accepted.submission, fresh=options.fresh
                )
            elif isinstance(source, StreamSource):
                begin_stream(
                    source,
                    accepted.directory,
                    accepted.job_id,
                    uid,
                    accepted.submission,
                    fresh=options.fresh,
                    restore=options.restore,
                    goes_on_from=accepted.restored_savepoint,
                )
                handle.add_input(StreamQuery(source, accepted.directory, accepted.job_id, uid, _WatchedJob(handle)))
        with modules_by_value(user_modules()):
            pickled = pickle_plan(plan)
        template = WorkerTemplate(
            job_id=accepted.job_id,
            submission=accepted.submission,
            coordinator_url=handle.client.url,
            token=accepted.worker_token or handle.client.token,
            state_directory=accepted.directory,
            plan=pickled,
            cancellation_timeout_ms=plan.graph.config.cancellation_timeout_ms,
            advertised_host=self._advertised_host,
            directory_nonce=accepted.directory_nonce,
            authorities=handle.client.authorities,
            slots=accepted.slots if standbys else 0,
        )
        backend = self._access.backend(template, plan.graph.name, launch_key=launch_key)
        handle.start(SlotRunner(SlotSupervisor.of(accepted.slots, plan.graph.config, standbys), backend, handle.give_up))
        _at_exit(functools.partial(_leave_at_exit, weakref.ref(handle)))


def _prepare_sinks(plan: JobPlan, options: LaunchOptions) -> None:
    """Raise OutputMayRepeatError before a fresh start drops the old job's checkpoints."""
    for operator in plan.operators.values():
        if isinstance(operator, TwoPhaseCommitter):
            operator.allow_output_repeat = options.allow_output_repeat
            if options.fresh:
                operator.check_fresh_start()


def _submission(plan: JobPlan, options: LaunchOptions) -> Submission:
    return Submission(
        graph=plan.graph,
        job_id=options.job_id,
        restore=options.restore,
        allow_non_restored_state=options.allow_non_restored_state,
        allow_output_repeat=options.allow_output_repeat,
        without_channel_state=options.without_channel_state,
        fresh=options.fresh,
        claim_mode=options.claim_mode,
        sinks=options.sinks,
        branch=UNSET if options.branch is None else options.branch,
        driver_nonce=uuid4().hex,
        launch_key=draw_secret(),
    )


def _say_start(plan: JobPlan, options: LaunchOptions, master: str) -> None:
    """Written first, since materialising a DataFrame and waiting for executors may take a while."""
    slots, where = plan.graph.slots_required, options.coordinator_url or options.state_directory
    workers = f"{slots} worker" + ("" if slots == 1 else "s")
    place = "" if where is None else f", {'coordinator' if options.coordinator_url else 'state'} {where}"
    ProgressLine(enabled=options.progress).say(f"{plan.graph.name} starts {workers} on {master}{place}")


def _restored_text(name: str, checkpoint_id: int, restore: str | None) -> str:
    """`restore`: the argument as given; a location is named."""
    where = f" in {restore}" if restore is not None and "/" in restore else ""
    return f"{name} restored from checkpoint {checkpoint_id}{where}"


def _at_exit(action: Callable[[], None]) -> None:
    """Register an action that runs at exit while thread pools still accept work, which an embedded coordinator needs to end in
    order: `atexit` is too late. concurrent.futures uses the same hook and registered before; the last one registered runs first."""
    getattr(threading, "_register_atexit", atexit.register)(action)


def _leave_at_exit(handle: weakref.ref[SparkJobHandle]) -> None:
    """End the workers of a driver that exits without closing its job, while Spark still takes commands. A kill ends them, too."""
    alive = handle()
    if alive is not None:
        # pressed again: the workers were asked to leave, and the exit does not wait for them
        with contextlib.suppress(KeyboardInterrupt):
            alive.close()
