"""SHELL: what starting workers asks of a Spark session, of either kind: a classic one, which has a SparkContext in this process,
and one of Spark Connect, which has a server elsewhere and no access to its JVM.

It decides nothing about workers (supervisor.py). ADR 79 says what Connect can't do, and what is done in its place."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from holdfast.operators.base import Source
from holdfast.operators.sources.stream import StreamSource
from holdfast.operators.spark.interrupts import spare_workers
from holdfast.operators.spark.settings import (
    apply_settings,
    await_slots,
    await_slots_of,
    check_settings,
    hide_progress_bar,
    is_local,
)
from holdfast.operators.spark.shipping import package_path, ship_package
from holdfast.operators.spark.slots import (
    Ended,
    RddBackend,
    SparkStoppedError,
    WorkerBackend,
    WorkerReport,
    WorkerTemplate,
    outcome_of,
    run_in_task,
    why,
)
from holdfast.statebackends.errors import InvalidConfigError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

Take = Callable[[int], int]
"""Takes slots out of so many: see settings.await_slots."""

CORES_MAX = 1 << 16
"""Most cores that are counted by Connect."""


class SparkAccess(Protocol):
    """One session, as the launcher uses it."""

    @property
    def master(self) -> str:
        """Where the session runs, for messages."""

    def prepare(self, sources: dict[str, Source]) -> list[str]:
        """Check settings, make those that workers need, and return warnings. Raises InvalidConfigError, also for a source of the
        job that this kind of session can't serve."""

    def await_slots(self, workers: int, take: Take) -> None:
        """Wait until there is a slot for each worker. Raises NotEnoughSlotsError."""

    def ship_package(self, locations: Iterable[str]) -> None:
        """Give the executors our packages. `locations`: of storage that workers will use. Idempotent."""

    def backend(self, template: WorkerTemplate, job_name: str, *, launch_key: str) -> WorkerBackend:
        """What starts the workers of one submission."""

    @property
    def coordinator_host(self) -> tuple[str, str | None]:
        """Address for a coordinator in this process to listen on, and the one that workers reach it at; None: the same."""

    @property
    def hosts(self) -> int:
        """Hosts that run executors now, at least 1."""

    @property
    def identity(self) -> Any:
        """Object that lives as long as the application: one launcher counts its slots."""


def is_connect(session: Any) -> bool:
    """Whether a session, or a DataFrame, is one of Spark Connect."""
    return type(session).__module__.startswith("pyspark.sql.connect.")


def need_classic(session: Any, what: str) -> None:
    """Raise InvalidConfigError where `what` was given a session, or a DataFrame, of Spark Connect."""
    if is_connect(session):
        raise InvalidConfigError(
            f"{what} needs a classic session: Python of the driver does not run in Spark Connect", setting="spark"
        )


def access_of(session: SparkSession) -> SparkAccess:
    return ConnectAccess(session) if is_connect(session) else ClassicAccess(session)


def count_hosts(known: Sequence[str], driver: str) -> int:
    """Hosts that run executors, at least 1. `known`: the host of each executor, and once, among them, the driver's own."""
    hosts = Counter(known)
    hosts[driver] -= 1
    return max(1, sum(count > 0 for count in hosts.values()))


class ClassicAccess:
    """Implements SparkAccess by the session's SparkContext."""

    def __init__(self, session: SparkSession) -> None:
        self._context = session.sparkContext

    @property
    def master(self) -> str:
        return str(self._context.master)

    def prepare(self, sources: dict[str, Source]) -> list[str]:
        hide_progress_bar(self._context)
        warnings = apply_settings(self._context)
        spare_workers(self._context)
        return warnings

    def await_slots(self, workers: int, take: Take) -> None:
        await_slots(self._context, workers, take)

    def ship_package(self, locations: Iterable[str]) -> None:
        ship_package(self._context, locations)

    def backend(self, template: WorkerTemplate, job_name: str, *, launch_key: str) -> WorkerBackend:
        return RddBackend(self._context, template, job_name, launch_key=launch_key)

    @property
    def coordinator_host(self) -> tuple[str, str | None]:
        if is_local(self.master):  # executors are on this machine
            return "127.0.0.1", None
        return "0.0.0.0", self._context.getConf().get("spark.driver.host")  # others reach it under the name that Spark gave it

    @property
    def hosts(self) -> int:
        if is_local(self.master):
            return 1
        known = self._context._jsc.sc().statusTracker().getExecutorInfos()
        return count_hosts([str(each.host()) for each in known], str(self._context.getConf().get("spark.driver.host")))

    @property
    def identity(self) -> Any:
        return self._context


class ConnectAccess:
    """Implements SparkAccess by what a client of Spark Connect may do."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    @property
    def master(self) -> str:
        return f"Spark Connect at {self._host}"

    @property
    def _host(self) -> str:
        return str(self._session.client.host)

    def prepare(self, sources: dict[str, Source]) -> list[str]:
        for uid, source in sources.items():
            if isinstance(source, StreamSource):
                raise InvalidConfigError(
                    f"source {uid}: from_stream needs a classic session, since its query runs in the driver: Spark Connect has no "
                    "driver of ours",
                    setting="spark",
                )
        return check_settings(self._setting)

    def _setting(self, name: str, default: str) -> str:
        found = self._session.conf.get(name, None)  # the server checks a default against the type
        return default if found is None else str(found)

    def await_slots(self, workers: int, take: Take) -> None:
        if self._concurrent_tasks() is None:
            take(2 * CORES_MAX)
            return
        local = is_local(self._setting("spark.master", ""))
        await_slots_of(lambda: self._concurrent_tasks() or 0, self.master, workers, take, is_fixed=local)

    def _concurrent_tasks(self) -> int | None:
        """Tasks that the executors registered now can run at once; None: the server's settings say another number in its place.

        Spark divides a range into as many parts as there are cores, and shows the number in the plan; no task runs for that."""
        for name in ("spark.default.parallelism", "spark.sql.leafNodeDefaultParallelism"):
            if self._setting(name, ""):
                return None
        (row,) = self._session.sql(f"EXPLAIN SELECT id FROM range({CORES_MAX})").collect()
        found = re.search(r"splits=(?:Some\()?(\d+)", str(row[0]))
        return None if found is None else int(found[1]) // int(self._setting("spark.task.cpus", "1"))

    def ship_package(self, locations: Iterable[str]) -> None:
        """As an artifact of the session; the server keeps one of a name, which has the hash of its content. The daemon is the
        server's own."""
        self._session.addArtifacts(str(package_path()), pyfile=True)

    def backend(self, template: WorkerTemplate, job_name: str, *, launch_key: str) -> WorkerBackend:
        return ConnectBackend(self._session, template, job_name, launch_key=launch_key)

    @property
    def coordinator_host(self) -> tuple[str, str | None]:
        from holdfast.operators.worker.main import route_address

        here = route_address(f"//{self._host}")
        if not here.startswith("127."):
            return "0.0.0.0", here
        if is_local(self._setting("spark.master", "")):  # executors are in the server, on this machine
            return "127.0.0.1", None
        return "0.0.0.0", self._setting("spark.driver.host", "") or None  # the server is here: what executors call it, they call us

    @property
    def hosts(self) -> int:
        return 1  # the server does not tell

    @property
    def identity(self) -> Any:
        return self._session


REPORT = "reason string, respawn boolean, superseded boolean"


def worker_function(template: WorkerTemplate, slot: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function of a worker's `mapInArrow`: one task, whose one row says how the worker left."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow

        for _ in batches:  # its one row; Spark writes it before it reads
            pass
        report = run_in_task(template, slot)
        row = {"reason": report.reason, "respawn": report.respawn, "superseded": report.superseded}
        yield pyarrow.RecordBatch.from_pylist([row])

    return run


class ConnectBackend:
    """Implements WorkerBackend: each worker is a query of one task, sent from a thread of its own, and found again by its tag."""

    def __init__(self, session: SparkSession, template: WorkerTemplate, job_name: str, *, launch_key: str = "") -> None:
        """`launch_key`: key of the submission; it never leaves this process."""
        self._session = session
        self._template = template
        self._job_name = job_name
        self._launch_key = launch_key
        self._run_id = uuid4().hex[:8]

    def start(self, slot: int, spawn: int, ended: Ended) -> None:
        if self._session.is_stopped:
            raise SparkStoppedError("the session of Spark Connect has ended")
        template = self._template.launched(self._launch_key, slot, spawn)

        def run() -> None:
            try:
                self._session.addTag(self._tag(slot, spawn))  # of this thread
                frame = self._session.range(slot, slot + 1, 1, 1)
                (row,) = frame.mapInArrow(worker_function(template, slot), REPORT).collect()
            except BaseException as error:
                ended(*why(error))
            else:
                ended(*outcome_of(WorkerReport(row.reason, row.respawn, row.superseded)))

        threading.Thread(target=run, name=f"holdfast-worker-{slot}-{spawn}", daemon=True).start()

    def cancel(self, slot: int, spawn: int) -> None:
        self._session.interruptTag(self._tag(slot, spawn))

    def _tag(self, slot: int, spawn: int) -> str:
        return f"holdfast-{self._template.job_id}-{self._template.submission}-{self._run_id}-{slot}-{spawn}"
