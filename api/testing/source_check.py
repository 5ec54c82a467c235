"""`hf.testing.check_source`: a connector's source in a whole job, stopped, failed and rescaled at many points, some of its fetches
without an answer: rows exact."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa

from holdfast.api.testing.connectors import CUT_WAYS, Server, cut_words, started
from holdfast.api.testing.job import RESTART_SOON, Job
from holdfast.api.testing.output import Output
from holdfast.api.testing.proxy import Cut, Direction, Proxy
from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.operators.datastream.settings import Settings
from holdfast.operators.sources.fetching import FetchingReader
from holdfast.operators.sources.splits import (
    AssignedSplit,
    Position,
    ReaderContext,
    Source,
    SourceReader,
    SplitEnumerator,
    SplitReader,
    SplitRecords,
)
from holdfast.statebackends.errors import CheckpointFailedError, HoldfastError, InvalidConfigError

SHUT_MS = 20
"""How long a reader whose gate is shut says that it has nothing."""
POINTS_MAX = 12
"""Points of a run at which something happens, at most; of more, evenly spread ones."""
STEP_MS = 100
WAIT_MS_MAX = 60_000
"""Time of the job's clock in which the rows of a source that does not end must come."""

RowOf: TypeAlias = Callable[[dict[str, Any]], Any]


class _Gate:
    """Lets so many reads through, over all readers, and has a fetch fail."""

    def __init__(self) -> None:
        self.left: float = float("inf")
        self.passed = 0
        self.next_fails = False

    def check_fetched(self) -> None:
        """Behind each fetch. Raises ConnectionError, once, where the next one is to fail."""
        if self.next_fails:
            self.next_fails = False
            raise ConnectionError("check_source: this fetch fails, once")


_gates: dict[int, _Gate] = {}
_keys = itertools.count()


class _FailingReader(SplitReader[Any]):
    """A client whose answer is lost at times: it has gone on behind records that nobody got."""

    def __init__(self, reader: SplitReader[Any], gate: _Gate) -> None:
        self._reader = reader
        self._gate = gate

    def open(self) -> None:
        self._reader.open()

    def add_splits(self, splits: Sequence[AssignedSplit[Any]]) -> None:
        self._reader.add_splits(splits)

    def fetch(self) -> Sequence[SplitRecords]:
        found = self._reader.fetch()
        if found:
            self._gate.check_fetched()
        return found

    def pause_or_resume_splits(self, to_pause: Sequence[str], to_resume: Sequence[str]) -> None:
        self._reader.pause_or_resume_splits(to_pause, to_resume)

    def notify_checkpoint_complete(self, positions: Mapping[str, Position]) -> None:
        self._reader.notify_checkpoint_complete(positions)

    def wake_up(self) -> None:
        self._reader.wake_up()

    def close(self) -> None:
        self._reader.close()


class _GatedReader(SourceReader[Any]):
    """A reader whose records pass a gate, each fetch in two halves: what is behind a cut may be the rest of a batch."""

    def __init__(self, reader: SourceReader[Any], gate: _Gate, *, fails_here: bool) -> None:
        """fails_here: it makes no fetches, which could fail: its polls do."""
        self._reader = reader
        self._gate = gate
        self._fails_here = fails_here
        self.splits_max = reader.splits_max
        self._rest: SplitRecords | None = None

    def open(self, context: ReaderContext) -> None:
        self._reader.open(context)

    def add_splits(self, splits: Sequence[AssignedSplit[Any]]) -> None:
        self._reader.add_splits(splits)

    def no_more_splits(self) -> None:
        self._reader.no_more_splits()

    def poll(self, rows_max: int) -> SplitRecords | int | None:
        if self._gate.left < 1:
            return SHUT_MS
        rest, self._rest = self._rest, None
        polled = self._reader.poll(rows_max) if rest is None else rest
        if not isinstance(polled, SplitRecords):
            return polled
        if self._fails_here and rest is None:
            self._gate.check_fetched()
        self._gate.left -= 1
        self._gate.passed += 1
        return polled if rest is not None else self._first_half(polled)

    def _first_half(self, records: SplitRecords) -> SplitRecords:
        positions, half = records.positions, records.num_rows // 2
        if positions is None or len(positions) != records.num_rows or not half:
            return records
        first, self._rest = records.cut(half)
        return first

    def snapshot_state(self, checkpoint_id: int, splits: Sequence[AssignedSplit[Any]]) -> Sequence[AssignedSplit[Any]]:
        return self._reader.snapshot_state(checkpoint_id, splits)

    def notify_checkpoint_complete(self, checkpoint_id: int, positions: Mapping[str, Position]) -> None:
        self._reader.notify_checkpoint_complete(checkpoint_id, positions)

    def pause_or_resume_splits(self, to_pause: Sequence[str], to_resume: Sequence[str]) -> None:
        self._reader.pause_or_resume_splits(to_pause, to_resume)

    def pending_records(self) -> int | None:
        return self._reader.pending_records()

    @property
    def is_processing_backlog(self) -> bool:
        return self._reader.is_processing_backlog

    def close(self) -> None:
        self._reader.close()


@dataclass
class _Gated(Source[Any]):
    """The source under test, behind a gate of this process."""

    source: Source[Any]
    key: int

    def __post_init__(self) -> None:
        self.name = self.source.name
        self.split_type = self.source.split_type  # type: ignore[misc]
        self.gives_event_times = self.source.gives_event_times
        self.reads_in_turn = self.source.reads_in_turn

    @property
    def schema(self) -> pa.Schema:
        return self.source.schema

    def create_enumerator(self) -> SplitEnumerator[Any]:
        return self.source.create_enumerator()

    def create_reader(self, context: ReaderContext) -> SourceReader[Any]:
        source, gate = self.source, _gates[self.key]
        polled = source.create_reader(context)
        if polled is not None:
            return _GatedReader(polled, gate, fails_here=True)
        fetched = _FailingReader(source.create_split_reader(context), gate)
        return _GatedReader(FetchingReader(fetched, splits_max=source.splits_per_reader), gate, fails_here=False)


@dataclass(frozen=True, slots=True)
class _Case:
    """One run."""

    event: str
    point: int
    parallelism: int
    then: int
    """Parallelism behind the event."""
    batch_rows: int
    server: Server | None = None
    proxy: Proxy | None = None
    cut: Cut | None = None

    def __str__(self) -> str:
        if self.cut is not None:
            how, when = cut_words(self.cut)
            where = f"connection {how} {when} chunk {self.cut.chunk} {self.cut.direction.value}"
            return f"{where}, parallelism {self.parallelism}, batch_rows {self.batch_rows}"
        where = f"{self.event} behind {self.point} reads" if self.event else "read without a failure"
        after = f", then at parallelism {self.then}" if self.then != self.parallelism else ""
        return f"{where}, parallelism {self.parallelism}{after}, batch_rows {self.batch_rows}"


RESTARTS = ("checkpoint and restart", "restart without a checkpoint", "savepoint and restart", "stop", "stop with a drain")
FAILURES = ("a failed fetch", "checkpoint and a failed fetch")
"""The job goes on by itself, at the same parallelism."""
ONCE = RestartStrategy("fixed_delay", delay_ms=0, attempts_max=1)
"""What fails beside the fetch is raised."""


RESTART, RESTART_BEHIND = "the server restarts", "the server restarts behind a checkpoint"
CUT = "a connection is cut"
SERVER_EVENTS = (RESTART, RESTART_BEHIND)
"""Behind these nobody restarts the job: it has to go on by itself."""


def check_source(
    make_source: Callable[..., Source[Any]],
    expected: Iterable[Any],
    *,
    row: RowOf | None = None,
    points_max: int = POINTS_MAX,
    server: Server | Callable[[], AbstractContextManager[Server]] | None = None,
    only: str | None = None,
) -> None:
    """Read a source in many ways, each time to its end, or until all rows have come: each row must come once.

    make_source: gives the source, with the same records every time. If it has to be given an argument, that is the port to
    connect to, of a proxy before the server: its connections are then cut, too. expected: all rows, in any order, as `row`
    gives them; they must be hashable. row: from a row, a dict by column name, to what is compared; None: a tuple of its values.
    points_max: reads behind which a fetch fails and the job is restarted, rescaled and stopped, at most; also chunks, each way,
    at which a connection breaks or is swallowed. server: a server that runs (`port`, `restart()`), or what starts one: a class
    of a context manager; it is also killed and started again at these reads, with its data. Behind that, and behind a cut, the
    job has to go on by itself. only: the one run to make behind those without an event, by its name in an earlier failure.
    Raises AssertionError, naming the run, or what the source raised, with a note that names it; InvalidConfigError where no run
    has the name of `only`."""
    wanted = Counter(expected)
    compared = row or _values
    with started(server) as running, contextlib.ExitStack() as stack:
        make, proxy = make_source, None
        if _takes_port(make_source):
            if running is None:
                raise InvalidConfigError("check_source: a make_source that takes a port needs server=", setting="server")
            proxy = stack.enter_context(Proxy(running.port))
            make = partial(make_source, proxy.port)
        reads, names = 0, set()
        for parallelism, batch_rows in ((1, 65_536), (3, 7), (2, 1)):  # always: they say how many reads, and chunks, there are
            case = _Case("", 0, parallelism, parallelism, batch_rows, proxy=proxy)
            reads = max(reads, _run(make, case, wanted, compared))
            names.add(str(case))
        cuts = [] if proxy is None else list(_cuts(proxy, points_max))  # before other runs add to the chunks
        for case in itertools.chain(_cases(reads, points_max, running), cuts):
            names.add(str(case))
            if only is None or only == str(case):
                _run(make, case, wanted, compared)
    if only is not None and only not in names:
        raise InvalidConfigError(f"check_source has no run {only!r} for this source", setting="only")


def _takes_port(make_source: Callable[..., object]) -> bool:
    """A class whose arguments all have defaults takes none."""
    return any(
        each.default is each.empty and each.kind <= each.POSITIONAL_OR_KEYWORD
        for each in inspect.signature(make_source).parameters.values()
    )


def _cases(reads: int, points_max: int, server: Server | None) -> Iterator[_Case]:
    for point in _points(reads, points_max):
        for number, event in enumerate((*RESTARTS, *FAILURES, *(() if server is None else SERVER_EVENTS))):
            parallelism = 1 + (point + number) % 3
            then = 1 + (parallelism % 3) if event in RESTARTS else parallelism
            yield _Case(event, point, parallelism, then, 7, server)


def _cuts(proxy: Proxy, points_max: int) -> Iterator[_Case]:
    """At the chunks of the run before, which was at parallelism 2."""
    chunks = {direction: proxy.chunks(direction) for direction in (Direction.TO_SERVER, Direction.TO_CLIENT)}
    if not any(chunks.values()):
        message = "check_source: nothing went through the proxy: the source connects to the port that make_source is given"
        raise InvalidConfigError(message, setting="make_source")
    for direction, count in chunks.items():
        for point, way in itertools.product(_points(max(0, count - 1), points_max), CUT_WAYS):
            cut = replace(way, chunk=1 + point, direction=direction)
            yield _Case(CUT, 0, 2, 2, 1, proxy=proxy, cut=cut)


def _values(row: dict[str, Any]) -> Any:
    return tuple(row.values())


def _points(reads: int, points_max: int) -> Iterator[int]:
    """0 and the last one, and others between them."""
    count = min(reads + 1, max(2, points_max))
    yield from sorted({round(index * reads / max(1, count - 1)) for index in range(count)})


def _run(make_source: Callable[[], Source[Any]], case: _Case, wanted: Counter[Any], row: RowOf) -> int:
    """The reads that it took. Raises AssertionError."""
    key, gate = next(_keys), _Gate()
    _gates[key] = gate
    try:
        settings: Settings = {}
        if case.event in (*FAILURES, *SERVER_EVENTS, CUT):
            settings = {"restart": ONCE if case.event in FAILURES else RESTART_SOON}
        with Job(parallelism=case.parallelism, batch_rows=case.batch_rows, **settings) as job:
            out = job.output(job.environment.from_source(_Gated(make_source(), key)).uid("source"))
            if case.proxy is not None:  # a source may look at its server when it is made, on the driver: that is not the job's
                case.proxy.cut(case.cut)
            happens = case.event not in ("", CUT)
            if happens:
                gate.left = case.point
            job.start()
            if happens:
                _happen(job, gate, case)
            _read_all(job, out, wanted.total(), CheckpointFailedError if settings else ())
            _compare(case, wanted, Counter(row(found) for found, _ in out.committed()))
    except HoldfastError as error:
        error.add_note(_again(case))
        raise
    finally:
        del _gates[key]
        if case.proxy is not None:
            case.proxy.heal()
    return gate.passed


def _happen(job: Job, gate: _Gate, case: _Case) -> None:
    """The event, and what the reader gave behind it, which a restart takes back. Afterwards nothing holds it up."""
    if case.event in SERVER_EVENTS:
        _restart_server(job, gate, case)
        return
    if job.status == "RUNNING":
        job.advance(by_ms=STEP_MS)
    if job.status == "RUNNING":
        _order(job, case.event)
    if case.event in FAILURES:
        gate.next_fails = True
        gate.left = float("inf")
        return
    gate.left = 1
    if job.status == "RUNNING":
        job.advance(by_ms=STEP_MS)
    gate.left = float("inf")
    job.restart(parallelism=case.then)


def _restart_server(job: Job, gate: _Gate, case: _Case) -> None:
    assert case.server is not None
    if job.status == "RUNNING":
        job.advance(by_ms=STEP_MS)
    if job.status == "RUNNING" and case.event == RESTART_BEHIND:
        job.checkpoint()
    case.server.restart()
    gate.left = float("inf")


def _order(job: Job, event: str) -> None:
    match event:
        case "checkpoint and restart" | "checkpoint and a failed fetch":
            job.checkpoint()
        case "savepoint and restart":
            job.savepoint()
        case "stop" | "stop with a drain":
            job.stop(drain=event != "stop")


def _read_all(job: Job, out: Output, rows: int, passing: type[Exception] | tuple[()]) -> None:
    """To the end, or to a checkpoint behind the last row. passing: what a checkpoint may raise, as the job recovers meanwhile."""
    waited_ms = 0
    while job.status == "RUNNING" and waited_ms < WAIT_MS_MAX:
        job.advance(by_ms=STEP_MS)
        waited_ms += STEP_MS
        if job.status == "RUNNING":
            with contextlib.suppress(passing):  # type: ignore[arg-type]
                job.checkpoint()
            if len(out.committed()) >= rows and waited_ms >= 5 * STEP_MS:
                return


def _compare(case: _Case, wanted: Counter[Any], found: Counter[Any]) -> None:
    missing, more = wanted - found, found - wanted
    wrong = {"missing": missing, "too many": more}
    told = [f"{rows.total()} rows {what}, such as {next(iter(rows))!r}" for what, rows in wrong.items() if rows]
    if told:
        raise AssertionError(f"{case}: {' and '.join(told)}\n{_again(case)}")


def _again(case: _Case) -> str:
    return f"again: check_source(..., only={str(case)!r})"
