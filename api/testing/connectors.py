"""`check_sink`: whether a connector keeps what an exactly-once sink promises, seen on a whole job in the real worker loop.

Each scenario has an output of its own, and one mishap. A failure ends with the name of the scenario, which runs it alone."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

import pyarrow as pa

from holdfast.api.testing.committing_process import CommittingProcess, Order
from holdfast.api.testing.feed import Feed
from holdfast.api.testing.job import Job
from holdfast.api.testing.mishaps import MISHAPS, RESTARTS, SCRIPTS, Died, LostAnswer, Script, watched
from holdfast.api.testing.proxy import Break, Cut, Direction, Proxy
from holdfast.operators.sinks.connector import Sink
from holdfast.operators.sinks.files.parquet import FileSink
from holdfast.operators.sinks.targets.positions import CommitMark, CommitOwner, CommitPosition
from holdfast.operators.sinks.targets.staged import StagedSink
from holdfast.operators.sinks.targets.target import CommitTarget
from holdfast.statebackends.errors import (
    CheckpointFailedError,
    FencedError,
    HoldfastError,
    InvalidConfigError,
    JobFailedError,
    OutputMayRepeatError,
    StorageUnavailableError,
)

CHECKED_COLUMNS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])
"""Columns of the rows that a sink under check gets: `id` is 0, 1, 2 ..., `text` may be null."""

EPOCHS = (3, 0, 4, 1)
"""Rows between two checkpoints of a run."""
SHORT_EPOCHS = (3, 1)
"""Of a run that is cut."""
CUTS_SOME = 6
"""Chunks that are cut, of all, when some points are tried."""
SILENCE_S = 0.2
"""How long a connection that is swallowed is silent; at the server's side twice as long."""
CUT_WAYS = (Cut(0), Cut(0, delivered=True), Cut(0, how=Break.SWALLOW, silence_s=SILENCE_S))
OPEN_WAITS_S = 0.3
"""How long `open` may wait for what is in flight before that goes on."""
CALL_TIMEOUT_S = 60.0
QUIET_TIMEOUT_S = 10.0
"""In which a server closes what its clients have left."""

_TEXTS: tuple[str | None, ...] = ("plain", None, "", "quote ' \" \\ \n\t;--", "größer 漢字 🙂", " ", "NULL")

Row = tuple[int, str | None]
Sinks = Callable[..., Sink]
Read = Callable[[str], Iterable[Sequence[Any]]]
Points = Literal["some", "all"]


class Server(Protocol):
    """A server that runs."""

    @property
    def port(self) -> int:
        """At 127.0.0.1; the same behind a restart."""

    def restart(self) -> None:
        """Kill it, start it again with its data, and return when it answers."""


def check_sink(
    make_sink: Sinks,
    read_rows: Read,
    *,
    server: Server | Callable[[], AbstractContextManager[Server]] | None = None,
    nothing_open: Callable[[str], object] | None = None,
    overwrites: bool = False,
    points: Points = "some",
    only: str | None = None,
) -> list[str]:
    """Raise AssertionError where a sink does not hold what exactly-once promises; else the names of the scenarios that it passed.

    make_sink(name): a new sink whose output is that name's alone (a table, a topic, a file): a StagedSink, a FileSink, or a sink of
    a SinkWriter with a Committer. It gets the columns `hf.testing.CHECKED_COLUMNS`. With a server: make_sink(name, port), and the
    sink connects to that port, behind which connections are cut.
    read_rows(name): (id, text) of each row that others see there, in the order of the output; none if there is no output yet.
    server: a server that runs (`port`, `restart()`), or what starts one: a class of a context manager. It is restarted at calls.
    nothing_open(name): what is open at the server for this output: transactions, locks, sessions in one. It is asked between
    checkpoints and at the end, and has to become empty in 10 s.
    overwrites: the sink writes rows by their key (`id`), so that rows which are sent again (a restore with `allow_output_repeat`)
    change nothing; False: they come once more.
    points: "all": each mishap at each call, and each chunk of the connections cut in each way; "some": a part of them.
    only: the one scenario to run, by its name in an earlier failure."""
    if points not in ("some", "all"):
        raise InvalidConfigError(f"points must be some or all, not {points!r}", setting="points")
    with started(server) as running, contextlib.ExitStack() as stack:
        proxy = None if running is None else stack.enter_context(Proxy(running.port))
        make = make_sink if proxy is None else lambda name: make_sink(name, proxy.port)
        check = _Check(make, read_rows, nothing_open, points, only, overwrites=overwrites)
        check.all_scenarios(running, proxy)
    if only is not None and only not in check.passed:
        raise InvalidConfigError(f"check_sink has no scenario {only!r} for this sink", setting="only")
    return check.passed


@contextlib.contextmanager
def started(server: Server | Callable[[], AbstractContextManager[Server]] | None) -> Iterator[Server | None]:
    """A server that runs, as it is; one that is started here is ended behind it."""
    if server is None or (hasattr(server, "port") and not isinstance(server, type)):
        yield server  # type: ignore[misc]
    else:
        assert callable(server)
        with server() as running:
            yield running


class _Check:
    def __init__(
        self,
        make_sink: Callable[[str], Sink],
        read_rows: Read,
        nothing_open: Callable[[str], object] | None,
        points: str,
        only: str | None,
        *,
        overwrites: bool,
    ) -> None:
        self._make_sink = make_sink
        self._read_rows = read_rows
        self._nothing_open = nothing_open
        self._points = points
        self._only = only
        self._overwrites = overwrites
        self._numbers = itertools.count(1)
        self._sink_id = ""
        """Of the output that owners are tried on."""
        self.is_staged = False
        """It has a target."""
        self.has_owner = False
        """Its output says how far it got, and whose it is."""
        self.calls: list[str] = []
        """Of the run in which nothing fails."""
        self.passed: list[str] = []

    # ------------------------------------------------------------------------------------------------------- scenarios

    def all_scenarios(self, server: Server | None, proxy: Proxy | None) -> None:
        self.run("nothing fails", Script())
        if self.is_staged:
            self.ownership()
            self.overlaps()
            self.processes()
        if self.has_owner:
            self.two_stores()
            self.heirs()
        self.restores()
        self.stopped()
        self.mishaps(MISHAPS)
        if server is not None and proxy is not None:
            self.mishaps(RESTARTS, server.restart)
            self.cuts(proxy)
        if self.is_staged:
            self.in_steps()
        self.run("rescaled", Script(), parallelisms=(1, 2, 1))

    def mishaps(self, mishaps: Sequence[str], restart: Callable[[], None] | None = None) -> None:
        """Each at each call; of some points at the first call of each name, a restart of the server at what commits."""
        calls = self.calls
        for call, mishap in itertools.product(range(len(calls)), mishaps):
            is_first = calls.index(calls[call]) == call and (restart is None or calls[call] in ("apply", "commit"))
            is_part = self._points == "all" or is_first
            if (mishap.endswith("within") and calls[call] != "apply") or not (is_part or self._only):
                continue
            self.run(f"{mishap} call {call}, {calls[call]}", Script(call, mishap, restart))

    def in_steps(self) -> None:
        self.run("in steps", Script(), rows_per_commit=2)
        calls = range(1, len(self.calls) + 1) if self._points == "all" or self._only else (2,)
        for call, mishap in itertools.product(calls, MISHAPS):
            self.run(f"in steps, {mishap} call {call}", Script(call, mishap), rows_per_commit=2, may_miss=True)

    def cuts(self, proxy: Proxy) -> None:
        """Connections break, or are swallowed, at a chunk; of a chunk that still arrives the answer is lost."""
        chunks = {Direction.TO_SERVER: 0, Direction.TO_CLIENT: 0}
        with self._unless_only():
            proxy.cut(None)
            self.run("through a proxy", Script(), epochs=SHORT_EPOCHS)
            chunks = {direction: proxy.chunks(direction) for direction in chunks}
        everything = [
            replace(way, chunk=chunk, direction=direction)
            for direction, count in chunks.items()
            for chunk in range(1, count + 1)
            for way in CUT_WAYS
        ]
        step = 1 if self._points == "all" or self._only else max(1, len(everything) // CUTS_SOME)
        step += 1 if step > 1 and step % len(CUT_WAYS) == 0 else 0  # not all of one way
        for cut in everything[::step]:
            self._cut(proxy, cut)

    def _cut(self, proxy: Proxy, cut: Cut) -> None:
        how, when = cut_words(cut)
        scenario = f"connection {how} {when} chunk {cut.chunk} {cut.direction.value}"
        if not self._skips(scenario):
            proxy.cut(cut)
            try:
                self.run(scenario, Script(), epochs=SHORT_EPOCHS, is_cut=True)
            finally:
                proxy.heal()

    @contextlib.contextmanager
    def _unless_only(self) -> Iterator[None]:
        """What has to be learnt also for a single scenario."""
        only, self._only = self._only, None
        try:
            yield
        finally:
            self._only = only

    # ----------------------------------------------------------------------------------------------------------- frame

    @contextlib.contextmanager
    def _scenario(self, name: str, script: Script | None = None) -> Iterator[str]:
        """The name of its output. What it meets becomes a failure that says how to run it again."""
        output = f"check{next(self._numbers)}"
        SCRIPTS[output] = script or Script()
        try:
            yield output
            self._is_quiet(output)
        except InvalidConfigError as error:
            if error.fields.get("setting") == "make_sink":
                raise
            raise self._failure(name, f"{type(error).__name__}: {error}") from error
        except Exception as error:
            what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            raise self._failure(name, what) from error
        finally:
            del SCRIPTS[output]
        self.passed.append(name)

    def _failure(self, name: str, what: str) -> AssertionError:
        return AssertionError(f"{what}\nscenario: {name!r}; again: check_sink(..., points={self._points!r}, only={name!r})")

    def _skips(self, name: str) -> bool:
        return self._only is not None and self._only != name and name != "nothing fails"

    def _is_quiet(self, name: str) -> None:
        """Nothing is open at the server."""
        if self._nothing_open is None:
            return
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        while left := self._nothing_open(name):
            assert time.monotonic() < deadline, f"something is open at the server between two checkpoints: {left}"
            time.sleep(0.01)

    def _sink(self, name: str, rows_per_commit: int | None = None) -> Sink:
        sink = self._make_sink(name)
        self.is_staged = isinstance(sink, StagedSink)
        self.has_owner = isinstance(sink, StagedSink | FileSink)
        return watched(sink, name, rows_per_commit)

    def _owner(self, attempt: int, known: CommitPosition | None, restored: int, *, job: str = "check") -> CommitOwner:
        return CommitOwner(self._sink_id, job, attempt, f"{job}{attempt}", known, (), restored)

    def _successor(self, known: CommitPosition, attempt: int = 2) -> CommitOwner:
        """Restored from a snapshot that has the rows of checkpoint 2: whether they are committed it has to find out."""
        return CommitOwner(self._sink_id, "check", attempt, f"check{attempt}", known, (CommitMark(2),), 2)

    def _targets(self, name: str, count: int) -> list[CommitTarget]:
        """Targets of one output, each as a worker gets it."""
        sink = self._make_sink(name)
        assert isinstance(sink, StagedSink)
        self._sink_id = sink.sink_id or "checked"  # some keep the positions of all outputs in one place
        sink.target.check(CHECKED_COLUMNS)
        return [pickle.loads(pickle.dumps(sink.target)) for _ in range(count)]

    def _read(self, name: str) -> list[Row]:
        return [(int(row[0]), row[1]) for row in self._read_rows(name)]

    def _run_of(self, job: Job, feed: Feed, name: str, *, ordered: bool = True, is_cut: bool = False) -> _Run:
        quiet = partial(self._is_quiet, name)
        return _Run(job, feed, lambda: self._read(name), quiet, ordered=ordered, retries=self.is_staged, is_cut=is_cut)

    def run(
        self,
        scenario: str,
        script: Script,
        *,
        parallelisms: Sequence[int] = (1,),
        rows_per_commit: int | None = None,
        epochs: Sequence[int] = EPOCHS,
        may_miss: bool = False,
        is_cut: bool = False,
    ) -> None:
        """A whole job, a checkpoint behind each epoch, restarted and stopped at the end. may_miss: the mishap's call may not
        come. is_cut: a connection is, once, wherever it is."""
        if self._skips(scenario):
            return
        with self._scenario(scenario, script) as name, Job("check", parallelism=parallelisms[0]) as job:
            feed = job.input("rows", CHECKED_COLUMNS)
            feed.stream.sink_to(self._sink(name, rows_per_commit), uid="checked")
            run = self._run_of(job, feed, name, ordered=len(parallelisms) == 1, is_cut=is_cut)
            run.survive(job.start)
            for turn, rows in enumerate(epochs):
                run.epoch(rows)
                if len(parallelisms) > 1:
                    job.restart(parallelism=parallelisms[turn % len(parallelisms)])
            run.survive(job.restart)
            run.epoch(0)
            if run.survive(job.stop) is None:
                job.stop()
            run.covered("behind a stop")
            assert script.call is None or may_miss, f"the mishap was never reached: {script.calls} calls"
        if scenario == "nothing fails":
            self.calls = script.names

    # ------------------------------------------------------------------------------------------------ owners of a target

    def ownership(self) -> None:
        """What `open` and `apply` do, with several owners; without a job."""
        scenario = "owners that wake late"
        if self._skips(scenario):
            return
        rows = _rows(0, 5)
        with self._scenario(scenario) as name, _closing(*self._targets(name, 3)) as (old, new, foreign):
            first = old.open(self._owner(1, None, 0))
            batches = partial(_batches, old)
            old.apply(batches(rows[:2]), first, first.moved(1))
            expected = first.moved(1)
            second = new.open(self._owner(2, expected, 1))
            assert second.owner > expected.owner, "open() returned a position that owner.take() has not"
            assert (second.checkpoint_id, second.row) == (1, -1), f"open() forgot the position: {second}"
            late = "apply() of an owner that was replaced"
            _refused(FencedError, late, old.apply, batches(rows[2:]), expected, expected.moved(2))
            _refused(FencedError, "open() of an older attempt", old.open, self._owner(1, expected, 2))
            _refused(FencedError, "open() of another job", foreign.open, self._owner(1, None, 0, job="other"))
            _refused(OutputMayRepeatError, "open() from before the output", foreign.open, self._owner(3, None, 0))
            assert self._read(name) == rows[:2], "what was refused left rows behind"
            new.apply(batches(rows[2:4]), second, second.moved(2, 2))
            _refused(FencedError, "apply() repeated", new.apply, batches(rows[2:4]), second, second.moved(2, 2))
            new.apply(batches(rows[4:]), second.moved(2, 2), second.moved(2))
            assert self._read(name) == rows
            third = new.open(self._owner(2, second.moved(2), 2))
            assert (third.checkpoint_id, third.row) == (2, -1), f"open() by the same owner forgot the position: {third}"
            _refused(FencedError, "apply() behind a second open()", new.apply, batches(rows), second.moved(2), second.moved(3))
            assert self._read(name) == rows

    def overlaps(self) -> None:
        """A successor opens while its predecessor is in the middle of its rows, on another thread."""
        for point in (0, 1, 3) if self._points == "all" or self._only else (1,):
            scenario = f"an owner opens behind row {point} of its predecessor"
            if not self._skips(scenario):
                self._overlap(scenario, point)

    def _overlap(self, scenario: str, point: int) -> None:
        rows = _rows(0, 4)
        with self._scenario(scenario) as name, _closing(*self._targets(name, 2)) as (old, new):
            first = old.open(self._owner(1, None, 0))
            old.apply(_batches(old, rows[:1]), first, first.moved(1))
            expected = first.moved(1)
            reached, goes_on = threading.Event(), threading.Event()

            def held() -> Iterator[pa.RecordBatch]:
                for number, batch in enumerate([*_batches(old, rows[1:]), None]):
                    if number == point:
                        reached.set()
                        assert goes_on.wait(CALL_TIMEOUT_S)
                    if batch is not None:
                        yield batch

            late = _Call(lambda: old.apply(held(), expected, expected.moved(2)))
            while not reached.wait(0.01):
                assert late.is_running, f"apply() ended before it took its rows: {late.error!r}"
            opened = _Call(lambda: new.open(self._successor(expected)))
            opened.wait(OPEN_WAITS_S)
            goes_on.set()
            late.wait(CALL_TIMEOUT_S)
            self._succeed(name, new, opened.result(), rows, refused=late.error is not None)

    def _succeed(self, name: str, new: CommitTarget, taken: CommitPosition, rows: list[Row], *, refused: bool) -> None:
        """The successor goes on from what its `open` said of the rows behind the first one. refused: its predecessor's `apply`."""
        if taken.has_all_of(2):
            assert self._read(name) == rows, "open() returned the position of rows that are not there"
            return
        found = "apply() of an owner was not refused, though its successor had opened the target, and was told of no such rows"
        assert refused, found
        new.apply(_batches(new, rows[1:]), taken, taken.moved(2))
        seen = self._read(name)
        assert seen == rows, f"behind a takeover: {len(seen)} rows {seen}, expected {len(rows)}: {rows}"

    def processes(self) -> None:
        """A process that commits is killed, or stopped and wakes behind its successor."""
        points = (0, 1, 3, 4) if self._points == "all" or self._only else (1,)
        for number, point in itertools.product((signal.SIGKILL, signal.SIGSTOP), points):
            scenario = f"{number.name} behind row {point} of a process that commits"
            if not self._skips(scenario) and not (number == signal.SIGSTOP and point > 3):
                self._process(scenario, number, point)

    def _process(self, scenario: str, number: signal.Signals, point: int) -> None:
        rows = _rows(0, 4)
        with self._scenario(scenario) as name, _closing(*self._targets(name, 3)) as (before, child, new):
            first = before.open(self._owner(1, None, 0))
            before.apply(_batches(before, rows[:1]), first, first.moved(1))
            order = Order(child, self._successor(first.moved(1)), tuple(_batches(before, rows[1:])), 2, point, number)
            with CommittingProcess(order) as process:
                process.wait_for_signal()
                opened = _Call(lambda: new.open(self._successor(first.moved(1), attempt=3)))
                opened.wait(OPEN_WAITS_S)
                refused = True
                if number == signal.SIGSTOP and opened.is_running:  # it waits for what is in flight
                    process.resume()
                    refused = process.was_refused()
                    self._succeed(name, new, opened.result(), rows, refused=refused)
                    return
                self._succeed(name, new, opened.result(), rows, refused=refused)
                if number == signal.SIGSTOP:
                    process.resume()
                    refused = process.was_refused()
                    assert refused, "apply() of a process that woke behind its successor was not refused"
                    assert self._read(name) == rows, "a process that woke behind its successor has changed the rows"

    def two_stores(self) -> None:
        """Two jobs of one name, in two state directories."""
        scenario = "two state directories, one name"
        if self._skips(scenario):
            return
        with self._scenario(scenario) as name, Job("check") as job, Job("check", seed=1) as other:
            feed = job.input("rows", CHECKED_COLUMNS)
            sink = self._sink(name)
            feed.stream.sink_to(sink, uid="checked")
            job.start()
            run = self._run_of(job, feed, name)
            run.epoch(2)
            other.input("rows", CHECKED_COLUMNS).stream.sink_to(copy.copy(sink), uid="checked")
            # The log of a file sink has the names of files, not state directories: it says what would come twice.
            error = FencedError if self.is_staged else OutputMayRepeatError
            _refused(error, "a job of the same name in another state directory", other.start)
            run.epoch(2)

    def heirs(self) -> None:
        """Another job, in another state directory, starts from a savepoint with rows that are staged: the owner ends there."""
        scenario = "a savepoint of another job"
        if self._skips(scenario):
            return
        with self._scenario(scenario) as name, Job("check") as job, Job("heir", seed=1) as heir:
            feed, more = (each.input("rows", CHECKED_COLUMNS) for each in (job, heir))
            sink = self._sink(name)
            for given in (feed, more):
                given.stream.sink_to(copy.copy(sink), uid="checked")
            job.start()
            run = self._run_of(job, feed, name)
            run.epoch(2)
            run.give(3)
            location = job.savepoint()
            heir.start(from_=location)
            going_on = self._run_of(heir, more, name)
            going_on.take_over(run)
            _refused(FencedError, "a commit of a job from whose savepoint another one has started", job.checkpoint)
            going_on.epoch(2)

    def restores(self) -> None:
        """The same snapshot again, and an older one."""
        scenario = "older and foreign snapshots"
        if self._skips(scenario):
            return
        with self._scenario(scenario) as name, Job("check", retained_checkpoints=10) as job:
            feed = job.input("rows", CHECKED_COLUMNS)
            feed.stream.sink_to(self._sink(name), uid="checked")
            job.start()
            run = self._run_of(job, feed, name)
            older = run.epoch(2)
            newest = run.epoch(2)
            for _ in range(2):
                job.restart(from_=newest)
                run.covered("behind a restore of the newest snapshot")
            before = self._read(name)
            if not self.has_owner:
                return  # what it has committed, such a sink has to find out by itself
            _refused(OutputMayRepeatError, "a restore from before the output", job.restart, from_=older)
            job.restart(from_=older, allow_output_repeat=True)
            job.checkpoint()
            repeated = self._read(name)
            again = [] if self._overwrites else before[2:]
            told = "the rows behind the snapshot are overwritten" if self._overwrites else "they come once more, and only they"
            assert sorted(repeated, key=_by_id) == sorted(before + again, key=_by_id), (
                f"with allow_output_repeat {told}: {repeated}"
            )

    def stopped(self) -> None:
        """A job that is stopped with a savepoint, and goes on from it."""
        scenario = "stopped with a savepoint"
        if self._skips(scenario):
            return
        with self._scenario(scenario) as name, Job("check") as job:
            feed = job.input("rows", CHECKED_COLUMNS)
            feed.stream.sink_to(self._sink(name), uid="checked")
            job.start()
            run = self._run_of(job, feed, name)
            run.epoch(2)
            run.give(3)
            location = job.stop()
            run.covered("behind a stop with a savepoint")
            job.restart(from_=location)
            run.covered("behind its restore")
            run.epoch(1)


def cut_words(cut: Cut) -> tuple[str, str]:
    """What happens to the connection, and where."""
    return "swallowed" if cut.how is Break.SWALLOW else "broken", "behind" if cut.delivered else "at"


class _Call:
    """A call on a thread of its own."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act
        self._result: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._act()
        except BaseException as error:
            self.error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)

    def result(self) -> Any:
        self.wait(CALL_TIMEOUT_S)
        assert not self.is_running, f"a call has not returned in {CALL_TIMEOUT_S:g} s"
        if self.error is not None:
            raise self.error
        return self._result


class _Run:
    """One job, what was given to it, and what may be visible."""

    def __init__(
        self,
        job: Job,
        feed: Feed,
        read: Callable[[], list[Row]],
        is_quiet: Callable[[], None],
        *,
        ordered: bool = True,
        retries: bool = True,
        is_cut: bool = False,
    ) -> None:
        """retries: calls without an answer are tried again, and don't fail the job. is_cut: a connection is, once."""
        self._job = job
        self._feed = feed
        self._read = read
        self._is_quiet = is_quiet
        self._ordered = ordered
        self._retries = retries
        self._is_cut = is_cut
        self._given: list[Row] = []
        self._covered = 0

    def survive(self, act: Callable[[], Any]) -> Any:
        """Do something; if the process dies of it, or the job fails where it may, start it again, and return None."""
        try:
            return act()
        except Died:
            pass
        except CheckpointFailedError:
            if self._retries:
                raise
            self._check()
            return None
        except (JobFailedError, StorageUnavailableError) as error:
            if self._is_cut and isinstance(error, StorageUnavailableError):
                self._is_cut = False  # it fell into check(), before a job was submitted: who submits it tries again
                self._check()
                return act()
            if self._retries or not isinstance(error.__cause__, LostAnswer | OSError | StorageUnavailableError):
                raise
        self._check()
        self._job.restart()
        return None

    def epoch(self, rows: int) -> int | None:
        """Some rows, a savepoint, and a checkpoint; its id, None if the process died."""
        self.give(rows)
        self._check()
        if self.survive(self._job.savepoint) is None:
            self._job.savepoint()
        self._check()
        self._covered = len(self._given)
        number: int | None = self.survive(self._job.checkpoint)
        if number is None:
            number = self._job.checkpoint()
        self.covered("behind a checkpoint")
        return number

    def take_over(self, before: _Run) -> None:
        """This job has started from a savepoint of another one, which has all that was given to that one."""
        self._given = list(before._given)
        self.covered("behind a start from another job's savepoint")

    def give(self, rows: int) -> None:
        new = _rows(len(self._given), rows)
        if new:
            self._given += new
            self.survive(lambda: self._feed.add([{"id": number, "text": text} for number, text in new]))

    def covered(self, when: str) -> None:
        """All rows so far are there."""
        self._covered = len(self._given)
        self._same(self._read(), self._given, when)
        self._is_quiet()

    def _check(self) -> None:
        """Between checkpoints: nothing that is not covered, nothing twice."""
        found = self._read()
        ids = [number for number, _ in found]
        assert len(set(ids)) == len(ids), f"rows are there twice: {found}"
        early = set(found) - set(self._given[: self._covered])
        assert not early, f"rows are visible before their checkpoint is complete, or were never given: {sorted(early, key=_by_id)}"
        if self._ordered:
            assert found == self._given[: len(found)], f"rows are not in order: {found}"

    def _same(self, found: list[Row], expected: list[Row], when: str) -> None:
        wanted = expected if self._ordered else sorted(expected, key=_by_id)
        seen = found if self._ordered else sorted(found, key=_by_id)
        assert seen == wanted, f"{when}: {len(seen)} rows {seen}, expected {len(wanted)}: {wanted}"


def _rows(first: int, count: int) -> list[Row]:
    return [(number, _TEXTS[number % len(_TEXTS)]) for number in range(first, first + count)]


def _by_id(row: Row) -> int:
    return row[0]


def _batches(target: CommitTarget, rows: Sequence[Row]) -> Iterator[pa.RecordBatch]:
    """As its writers stage them."""
    for number, text in rows:
        yield target.stage(pa.RecordBatch.from_pydict({"id": [number], "text": [text]}, schema=CHECKED_COLUMNS))


@contextlib.contextmanager
def _closing(*targets: CommitTarget) -> Iterator[tuple[CommitTarget, ...]]:
    try:
        yield targets
    finally:
        for target in targets:
            target.close()


def _refused(error: type[HoldfastError], what: str, act: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    try:
        act(*arguments, **named)
    except error:
        return
    except InvalidConfigError as other:
        raise AssertionError(f"{what} raised {type(other).__name__}: {other}, expected {error.__name__}") from other
    raise AssertionError(f"{what} was not refused: expected {error.__name__}")
