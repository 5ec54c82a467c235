"""A whole job under a test's hand: inputs, outputs, clock, checkpoints, restarts, in the process of the test and on its thread.

Coordinator, workers, exchange of data, state backends, stores and sinks are the product's own. What is replaced: Spark (workers are
objects), sockets (batches are encoded and decoded, and handed on), threads (a turn after the other), and time, which stands still
unless the test moves it. So every call runs until nothing moves, and the same calls give the same run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Unpack

import msgspec

from holdfast.api.snapshots.rows import Row
from holdfast.api.snapshots.snapshot import Snapshot
from holdfast.api.testing.clock import ManualClock
from holdfast.api.testing.coordinator import LocalCoordinator, WorkQueue
from holdfast.api.testing.feed import Feed, FeedLog, FeedSource
from holdfast.api.testing.files import JobFolder
from holdfast.api.testing.output import Output, OutputSink, OutputWriter, least_watermark
from holdfast.api.testing.workers import Failure, Limits, LocalWorkers
from holdfast.barriers.jobgraph import JobGraph, RestartStrategy, SinkMode, Submission
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.jobmaster.events import SnapshotRequested
from holdfast.coordinator.jobmaster.job import JobState
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.coordinator.totals import OperatorTotals
from holdfast.coordinator.views import TriggerView
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment, sink_mode_of
from holdfast.operators.datastream.graph import WATERMARKS_SUFFIX
from holdfast.operators.datastream.launcher import OperatorProgress, check_snapshot_id
from holdfast.operators.datastream.settings import Settings
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.datastream.unpicklable import check_picklable, check_pickled_states
from holdfast.operators.functions.event_time.timestamps import TIME_MS_MAX
from holdfast.operators.functions.schema import UNDECLARED, RowType, declared_type
from holdfast.operators.sinks.committing import TwoPhaseCommitter
from holdfast.operators.sources.dataframe import SparkSource
from holdfast.operators.task.chain import ChainNode
from holdfast.operators.worker.main import pickle_plan
from holdfast.statebackends.errors import (
    CheckpointFailedError,
    GraphError,
    HoldfastError,
    InvalidConfigError,
    JobFailedError,
    NotFoundError,
    PeerLostError,
)
from holdfast.statebackends.keygroups import MAX_PARALLELISM_LIMIT, check_parallelism
from holdfast.statebackends.state_processor.contents import Location, absolute_location

T = TypeVar("T")

ROUNDS_MAX = 1_000_000
ROWS_MAX = 2_000_000

_SILENT_MS = 1 << 52
"""Heartbeats are for workers that may hang: none is due in any test."""

RESTART_SOON = RestartStrategy("fixed_delay", delay_ms=0)
"""Of jobs whose test says nothing of it: `fail` recovers at once. What fails by itself is raised instead."""


class _Environment(Environment):
    """Makes streams of feeds, too."""

    def from_feed(self, source: FeedSource, row_type: RowType) -> Stream:
        """Rows come with their event times, where the test gives them any."""
        stream = self._read(source, None, row_type)
        self.graph.nodes[-1].timestamped = True
        return stream


@dataclass(slots=True)
class _Run:
    """What there is once the job was started."""

    workers: LocalWorkers
    graph: JobGraph
    job_id: str


class Job:
    """One job, from its inputs to its outputs. Use it in a `with` block, or call `close`: its folder goes with it.

    name, parallelism, chaining, settings: as of `hf.Environment`. There are no periodic checkpoints unless
    `checkpoint_interval_ms` is given. With `restart=` a failure takes the course that the strategy says; without, whatever a
    function raises is raised by the call during which it happened, and the job waits for `restart`.
    at_ms: wall clock at the start, ms since the epoch.
    batch_rows: rows that are read, and handled, at once. No result may depend on it: try 1, 7 and 65,536.
    seed: of the order in which subtasks have their turns. None may matter to a result but for the order of rows.
    rounds_max, rows_max: rounds of the workers, and rows that sources read, in one call; a job that still moves then raises
    StillMovingError. So does one that fails 1,000 times in one call.

    Raises InvalidConfigError on a setting that is unknown, of a wrong type or out of bounds."""

    def __init__(
        self,
        name: str = "test",
        *,
        parallelism: int = 1,
        at_ms: int = 0,
        batch_rows: int = 65_536,
        seed: int = 0,
        rounds_max: int = ROUNDS_MAX,
        rows_max: int = ROWS_MAX,
        chaining: bool = True,
        **settings: Unpack[Settings],
    ) -> None:
        defaults: Settings = {
            "checkpoint_interval_ms": None,
            "heartbeat_interval_ms": _SILENT_MS,
            "heartbeat_timeout_ms": 2 * _SILENT_MS,
            "retain_on_finish": True,
            "restart": RESTART_SOON,
            "batch_rows_max": batch_rows,
        }
        _check_clock(at_ms, "at_ms")
        if at_ms < 0:
            raise InvalidConfigError(f"at_ms is a wall clock, ms since the epoch: {at_ms} is before it", setting="at_ms")
        for setting, limit in (("rounds_max", rounds_max), ("rows_max", rows_max)):
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise InvalidConfigError(f"{setting} must be a whole number, at least 1, not {limit!r}", setting=setting)
        merged: Settings = {**defaults, **settings}
        self.environment = _Environment(name, parallelism=parallelism, chaining=chaining, **merged)
        """What streams are made with; sources of other kinds, such as `from_collection`, are added to it."""
        self._rides_out_failures = "restart" in settings
        self._seed = seed
        self._random = random.Random(seed)
        self._limits = Limits(rounds_max, rows_max)
        self._clock = ManualClock(at_ms)
        self._folder = JobFolder()
        self._storage = self._folder.storage()
        self._coordinator = LocalCoordinator(self._storage, self._clock, WorkQueue(self._random), self._random)
        self._feeds: dict[str, FeedSource] = {}
        self._outputs: dict[str, Output] = {}
        self._run: _Run | None = None
        self._failure: HoldfastError | None = None
        """Of a job that has failed, until it is restarted."""
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "not started" if self._run is None else self.status
        return f"<Job {self.environment.name!r}: {state}; {len(self._feeds)} inputs, {len(self._outputs)} outputs>"

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the job and its files, whatever it is about. Idempotent; nothing more can be asked of it."""
        self._closed = True
        if self._run is not None:
            self._run.workers.kill()
        self._folder.delete()

    # ---------------------------------------------------------------------------------------------- inputs and outputs

    def input(self, name: str, types: Any = None) -> Feed:
        """An input whose rows the test gives. `name` is its uid.

        types: pa.Schema, {column: type} or a record type, as `returns=` of a map; None: rows of any, undeclared type."""
        self._check_not_started("make its inputs before start()")
        if name in self._feeds:
            raise GraphError(f"job {self.environment.name!r} has an input {name!r} already", operator=name)
        row_type = UNDECLARED if types is None else declared_type(types, name)
        source = FeedSource(name, row_type.schema, FeedLog(name, self.environment.parallelism))
        stream = self.environment.from_feed(source, row_type).uid(name)
        self._feeds[name] = source
        return Feed(source, stream, row_type, check=self._check_takes, changed=self._changed)

    def output(self, stream: Stream, uid: str | None = None) -> Output:
        """What comes out of a stream. uid: of its sink; None: `output`, then `output-2` ..."""
        self._check_not_started("make its outputs before start()")
        if stream.environment is not self.environment:
            raise GraphError("the stream is of another job: build it from an input of this one, or from job.environment")
        count = len(self._outputs) + 1
        name = uid or ("output" if count == 1 else f"output-{count}")
        sink = OutputSink(self._folder.below("output"), name)
        stream.sink_to(sink, name=name, uid=name)
        sink.record = self.environment.graph.nodes[-1].input_type.record
        self._outputs[name] = Output(sink, self._storage, check=self._check_open, nodes=self._nodes)
        return self._outputs[name]

    def _bind(self, plan: JobPlan) -> None:
        """As `Bind` of the workers."""
        for source in plan.sources.values():
            if isinstance(source, FeedSource):
                source.log = self._feeds[source.name].log
        for operator in plan.operators.values():
            if isinstance(operator, OutputWriter):
                operator.emitted = self._outputs[operator.sink_id].emitted

    def _check_not_started(self, why_not: str) -> None:
        self._check_open()
        if self._run is not None:
            raise InvalidConfigError(f"job {self.environment.name!r} has started: {why_not}", job=self.environment.name)

    # ------------------------------------------------------------------------------------------------------------ life

    @property
    def status(self) -> str:
        """RUNNING, RESTARTING, FINISHED, FAILED ..., as REST says it; FAILED, too, while it waits for the test's `restart`."""
        return "FAILED" if self._failure is not None else self._ask(lambda master: master.state.value)

    @property
    def now_ms(self) -> int:
        """Wall clock: the processing time of the job."""
        return self._clock.wall_ms()

    def start(
        self,
        *,
        from_: Location | None = None,
        sinks: SinkMode | str = "keep",
        allow_non_restored_state: bool = False,
        without_channel_state: int | None = None,
    ) -> Job:
        """Deploy the job and run it until nothing moves; gives the job itself.

        from_: a snapshot to start from, also one of another job. the other settings: as of `Environment.execute`; the
        outputs of another test's job lay elsewhere, so its savepoint needs sinks="fork", and a checkpoint right before it: its
        output must not wait for a commit. Raises GraphError, RestoreError and their kinds, and what the functions raise when they
        are opened."""
        self._check_not_started("restart() starts it again")
        if not self._outputs and not self.environment.sinks:
            raise GraphError(f"job {self.environment.name!r} has no output: call job.output(stream) first")
        coordinator, storage = self._coordinator, self._storage
        workers = LocalWorkers(
            storage, self._folder.below("local"), self._clock, coordinator, self._random, self._limits, self._bind, self._seed
        )
        workers.rides_out_failures = self._rides_out_failures
        self._submit(
            workers,
            restore=_location(from_),
            sinks=sink_mode_of(sinks),
            allow_non_restored_state=allow_non_restored_state,
            without_channel_state=without_channel_state,
        )
        return self

    def _submit(self, workers: LocalWorkers, *, at_ms: int | None = None, allow_output_repeat: bool = False, **how: Any) -> None:
        """As a driver does; the job's older workers are gone once it is accepted."""
        check_snapshot_id(how["without_channel_state"])
        plan = self._plan(allow_output_repeat=allow_output_repeat)
        pickled = _pickled(plan)
        nonce = f"{self._random.getrandbits(128):032x}"
        submission = Submission(plan.graph, driver_nonce=nonce, allow_output_repeat=allow_output_repeat, **how)
        accepted = self._coordinator.perform(self._coordinator.dispatcher.submit(submission))
        workers.kill()
        self._failure = None
        if at_ms is not None:
            self._clock.set(at_ms)
        self._run = _Run(workers, plan.graph, accepted.job_id)
        workers.start(pickled, accepted)
        self._settle()

    def _plan(self, *, allow_output_repeat: bool) -> JobPlan:
        plan = self.environment.build()
        for uid, source in plan.sources.items():
            if isinstance(source, SparkSource):
                raise GraphError(f"source {uid!r} reads a Spark DataFrame, and there is no Spark here: feed it", operator=uid)
        for operator in plan.operators.values():
            if isinstance(operator, TwoPhaseCommitter):
                operator.allow_output_repeat = allow_output_repeat
        return plan

    def advance(self, *, to_ms: int | None = None, by_ms: int | None = None) -> None:
        """Move the clock, from one moment at which something is due to the next: each timer fires as soon as its time has passed,
        1 ms behind it, and not at the end of the way.

        Raises InvalidConfigError for a time before now."""
        if (to_ms is None) == (by_ms is None):
            raise InvalidConfigError("advance needs to_ms= or by_ms=, one of them", setting="to_ms")
        run = self._running("advance")
        if by_ms is not None:
            _check_clock(by_ms, "by_ms")
        target_ms = self._later(self.now_ms + (by_ms or 0) if to_ms is None else to_ms, "to_ms")
        while (due_ms := run.workers.next_due_ms(target_ms)) is not None:
            self._move_clock(run, due_ms)
        self._move_clock(run, target_ms)

    def _move_clock(self, run: _Run, to_ms: int) -> None:
        self._clock.set(to_ms)
        run.workers.wake()
        self._settle()

    def _later(self, at_ms: int, setting: str) -> int:
        _check_clock(at_ms, setting)
        if at_ms < self.now_ms:
            message = f"{setting} is {at_ms}, and the clock is at {self.now_ms}: it never goes back"
            raise InvalidConfigError(message, setting=setting)
        return at_ms

    def checkpoint(self) -> int:
        """Take a checkpoint, which sinks then commit; its id. Raises CheckpointFailedError."""
        view = self._request("checkpoint", CheckpointKind.CHECKPOINT)
        assert view.checkpoint_id is not None
        return view.checkpoint_id

    def savepoint(self, path: Location | None = None, *, native: bool = False) -> str:
        """Take a savepoint, in a folder of its own below `path` or in the job's temporary folder; its location.

        It commits nothing, and `restart` goes on from it only when told to. native: in the state backend's own files. Raises
        CheckpointFailedError."""
        return self._snapshot_at("savepoint", CheckpointKind.SAVEPOINT, path, native=native)

    def stop(self, path: Location | None = None, *, drain: bool = False) -> str:
        """Stop with a savepoint, as `savepoint`; the job is FINISHED. drain: event time ends first, and open windows fire."""
        return self._snapshot_at("stop", CheckpointKind.STOP_SAVEPOINT, path, drain=drain)

    def restart(
        self,
        *,
        parallelism: int | None = None,
        state_backend: Literal["memory", "filesystem", "rocksdb"] | None = None,
        at_ms: int | None = None,
        from_: Location | int | None = None,
        sinks: SinkMode | str = "keep",
        allow_non_restored_state: bool = False,
        allow_output_repeat: bool = False,
        without_channel_state: int | None = None,
    ) -> None:
        """Every process dies, and the job is submitted again: from its last checkpoint, or from the beginning when there is none.

        parallelism, state_backend: of the job from now on; None: as before. RocksDB's own checkpoints restore on RocksDB alone, a
        savepoint anywhere. at_ms: wall clock when the job comes back. from_: another checkpoint, by its id, or the location of a
        snapshot; the other settings as of `Environment.execute`. A job that has failed, or ended, is taken up again, too. Raises
        RestoreError and its kinds; then the job goes on as it was."""
        run = self._started("restart")
        environment = self.environment
        before = environment.parallelism, environment.config
        if at_ms is not None:
            self._later(at_ms, "at_ms")
        has_ended, completed = self._ask(lambda master: (master.state.is_terminal, master.coordinator.newest is not None))
        restore = _location(from_) or ("latest" if has_ended and completed else None)
        try:
            environment.parallelism = before[0] if parallelism is None else parallelism
            check_parallelism(MAX_PARALLELISM_LIMIT, environment.parallelism)
            environment.config = msgspec.structs.replace(before[1], state_backend=state_backend or before[1].state_backend)
            self._submit(
                run.workers,
                at_ms=at_ms,
                restore=restore,
                fresh=has_ended and restore is None,
                sinks=sink_mode_of(sinks),
                allow_non_restored_state=allow_non_restored_state,
                allow_output_repeat=allow_output_repeat,
                without_channel_state=without_channel_state,
            )
        except HoldfastError:
            if self._run is run:  # it was not accepted
                environment.parallelism, environment.config = before
            raise

    def fail(self, error: BaseException | None = None) -> None:
        """A subtask fails with this error (None: its connection to a peer breaks), and the job recovers in place: the same
        processes, the next attempt, from the last checkpoint.

        Raises the error if it is one that no restart can mend."""
        run = self._running("fail")
        if (status := self.status) != JobState.RUNNING:
            raise InvalidConfigError(f"job {self.environment.name!r} is {status}: nothing runs that could fail", setting="fail")
        run.workers.fail(PeerLostError("the test broke the connection", slot=0, reason="Job.fail") if error is None else error)
        self._settle()

    # --------------------------------------------------------------------------------------------------------- queries

    def snapshot(self) -> Snapshot:
        """The last completed checkpoint. Raises NotFoundError when there is none."""
        self._started("snapshot")
        newest = self._ask(lambda master: master.lifecycle.restore_point)
        if newest is None:
            raise NotFoundError(f"job {self.environment.name!r} has no completed checkpoint", job=self.environment.name)
        return Snapshot(newest.folder if newest.folder.startswith("/") else f"{self._storage.root}/{newest.folder}")

    def state(self, uid: str) -> dict[str, list[Row]]:
        """The state of an operator, by the name of each of its states: rows as `hf.Snapshot.rows` gives them.

        It is read from a savepoint taken now, which changes nothing; of a job that has failed or ended, from its last checkpoint.
        Raises NotFoundError for an operator that the job does not have."""
        self._check_known(uid, "state")
        is_running = self._failure is None and self.status == JobState.RUNNING
        snapshot = Snapshot(self.savepoint()) if is_running else self.snapshot()
        if uid not in snapshot.operators:
            return {}
        return {name: list(snapshot.rows(uid, name)) for name in snapshot.states(uid)}

    def watermark(self, uid: str) -> int | None:
        """Event time that an operator has passed on: the least over its subtasks, in ms. None before there is any.

        Raises NotFoundError for an operator that the job does not have."""
        _, kind = self._check_known(uid, "watermark")
        behind = self._nodes(uid + WATERMARKS_SUFFIX) if kind == "source" else ()
        return least_watermark(behind or self._nodes(uid))

    def progress(self, uid: str) -> OperatorProgress:
        """What an operator has counted since `start` or the last `restart`: records, late and skipped ones, the function's own
        counters; each record once, however often it was read. Raises NotFoundError for an operator that the job does not have."""
        run, kind = self._check_known(uid, "progress")
        if self._failure is None:
            run.workers.beat()
            run.workers.settle()
        totals = self._ask(lambda master: master.lifecycle.totals()).get(uid, OperatorTotals())
        return OperatorProgress(uid, kind, **msgspec.structs.asdict(totals))

    # -------------------------------------------------------------------------------------------------------- internal

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidConfigError(f"job {self.environment.name!r} is closed", job=self.environment.name)

    def _started(self, call: str) -> _Run:
        self._check_open()
        if self._run is None:
            raise InvalidConfigError(
                f"job {self.environment.name!r} was not started: call start() before {call}", job=self.environment.name
            )
        return self._run

    def _running(self, call: str) -> _Run:
        """Raises JobFailedError when it has failed, InvalidConfigError when it has ended."""
        run = self._started(call)
        if self._failure is not None:
            raise self._failed(str(self._failure)) from self._failure
        state = self._ask(lambda master: master.state)
        if state.is_terminal:
            raise InvalidConfigError(
                f"job {self.environment.name!r} is {state.value}: {call} is for one that runs; restart() takes it up again",
                job=self.environment.name,
            )
        return run

    def _check_known(self, uid: str, call: str) -> tuple[_Run, str]:
        """Of an operator its kind."""
        run = self._started(call)
        kinds = {operator.uid: operator.kind for vertex in run.graph.vertices for operator in vertex.operators}
        if uid not in kinds:
            raise NotFoundError(
                f"job {self.environment.name!r} has no operator {uid!r}; its operators are {', '.join(kinds)}", operator=uid
            )
        return run, kinds[uid]

    def _nodes(self, uid: str) -> Sequence[ChainNode]:
        return self._run.workers.nodes(uid) if self._run is not None else ()

    def _ask(self, read: Callable[[JobMaster], T]) -> T:
        run = self._started("that")
        return self._coordinator.answer(self._coordinator.led(run.job_id).query(read))

    def _check_takes(self) -> None:
        """A feed may be given something: the job runs, or is yet to start."""
        self._check_open()
        if self._run is not None:
            self._running("a feed's call")

    def _changed(self) -> None:
        if self._run is not None:
            self._run.workers.wake()
            self._settle()

    def _settle(self) -> None:
        """Run until nothing moves. Raises StillMovingError, and what made the job fail."""
        run = self._started("this")
        run.workers.settle()
        state = self._ask(lambda master: master.state)
        failures = run.workers.failures
        if state is not JobState.FAILED and (self._rides_out_failures or all(failure.is_ordered for failure in failures)):
            del failures[:-1]
            return
        if failures:
            error = self._typed(failures[-1])
        else:
            error = self._failed(self._ask(lambda master: master.lifecycle.failure) or "see its exceptions")
        run.workers.kill()
        self._failure = error
        raise error

    def _typed(self, failure: Failure) -> HoldfastError:
        """The error that the job's failure carries; one that is none of ours is told in words, and is its cause."""
        if isinstance(failure.error, HoldfastError):
            return failure.error
        error = self._failed(failure.text)
        error.__cause__ = failure.error
        return error

    def _failed(self, cause: str) -> JobFailedError:
        run = self._started("this")
        return JobFailedError(f"job {self.environment.name!r} failed: {cause}", job_id=run.job_id, cause=cause)

    def _snapshot_at(self, call: str, kind: CheckpointKind, path: Location | None, **how: bool) -> str:
        target = self._folder.below("savepoints") if path is None else absolute_location(path)
        view = self._request(call, kind, target=target, **how)
        assert view.location is not None
        return view.location

    def _request(self, call: str, kind: CheckpointKind, **how: Any) -> TriggerView:
        """What became of a checkpoint, a savepoint or a stop."""
        run = self._running(call)
        trigger_id = f"{self._random.getrandbits(128):032x}"
        service = self._coordinator.led(run.job_id)
        self._coordinator.answer(service.call(lambda ticket: SnapshotRequested(ticket, kind, trigger_id, **how)))
        self._settle()
        view = self._ask(lambda master: master.triggers.get(trigger_id))
        if view is None or view.in_progress:
            message = f"the {call} waits for something that only time can bring: advance() moves the clock"
            raise CheckpointFailedError(message, job_id=run.job_id, reason="in_progress")
        if view.failure is not None:
            raise CheckpointFailedError(view.failure, job_id=run.job_id, reason=view.failure_reason or "")
        return view


def _check_clock(at_ms: int, setting: str) -> None:
    """Raises InvalidConfigError for what is no time in ms, or is out of bounds: it would be in the job's records."""
    if isinstance(at_ms, bool) or not isinstance(at_ms, int) or abs(at_ms) > TIME_MS_MAX:
        raise InvalidConfigError(f"{setting} must be a whole number of ms, at most {TIME_MS_MAX}, not {at_ms!r}", setting=setting)


def _pickled(plan: JobPlan) -> bytes:
    """As workers get it. Raises GraphError naming what can't travel."""
    check_pickled_states(plan)
    try:
        return pickle_plan(plan)
    except Exception:
        check_picklable(plan)  # explains, which takes as long as the pickling
        raise


def _location(from_: Location | int | None) -> str | None:
    """A snapshot as a submission names it."""
    if from_ is None or isinstance(from_, int):
        return None if from_ is None else str(from_)
    return absolute_location(from_)
