"""SHELL: one worker process: the function that a Spark task or a local process executes.

It ties the process to its parent, joins loop, gateway and pool, and ends the process when the loop does not react or no coordinator
answers for too long. All state is crash-only: correctness needs no cleanup here."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TextIO
from urllib.parse import urlsplit

from holdfast.barriers.children import die_with_parent
from holdfast.barriers.descriptors import raise_descriptor_limit
from holdfast.barriers.messages import ShutdownWorker, StandbyOrder
from holdfast.barriers.processes import sight
from holdfast.barriers.transport.port import Transport
from holdfast.barriers.transport.socketfolder import make_socket_folder
from holdfast.barriers.transport.zmq_transport import CurveKeys, ZmqTransport
from holdfast.operators.base import JobPlan
from holdfast.operators.functions.context import LOGGER
from holdfast.operators.pickling import dumps_by_value
from holdfast.operators.task.context import Pool
from holdfast.operators.task.pool import RunQueueDelay, SystemClock, ThreadPool
from holdfast.operators.task.subtask import Report
from holdfast.operators.worker.answers import QUESTIONS, Answering
from holdfast.operators.worker.deploy import SubtaskBuilder, WorkerPorts
from holdfast.operators.worker.gateway import CoordinatorAddress, Gateway
from holdfast.operators.worker.kept_log import keeping_log
from holdfast.operators.worker.kept_output import keeping_output
from holdfast.operators.worker.leader_retrieval import split_urls
from holdfast.operators.worker.loop import Worker
from holdfast.operators.worker.session_events import WorkerIdentity
from holdfast.operators.worker.stacks import StackSampler
from holdfast.operators.worker.standby import await_order, message_of
from holdfast.operators.worker.working_folders import WORKER_FOLDER, FolderSweep, OwnedFolder, fingerprint_of
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.layout import DIRECTORY_FILE
from holdfast.statebackends.local_recovery.copies import LocalRecovery
from holdfast.statebackends.storage.flows import FIRST_BYTES
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import ReadFile, Storage

log = logging.getLogger("holdfast.worker")

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
WATCH_INTERVAL_S = 0.5
FLUSH_TIMEOUT_S = 5.0
"""Seconds that a leaving worker waits for its last states to be sent."""

ADVERTISED_HOST = "HOLDFAST_ADVERTISED_HOST"
"""Environment variable of the process that has the coordinator: the host under which workers reach it."""
EXIT_ORPHANED = 70
EXIT_CANCELLATION_TIMEOUT = 71
EXIT_RESPAWN = 75
"""The process leaves, and its slot needs a successor."""


@dataclass(frozen=True)
class WorkerSpec:
    """Arguments of a worker process; picklable. `plan` is the JobPlan, pickled by value."""

    job_id: str
    slot: int
    submission: int
    task_attempt: int
    coordinator_url: str
    """One URL, or those of several members with commas between."""
    token: str | None
    state_directory: str
    plan: bytes
    local_directory: str
    """Local disk, shared by the workers of a host: each makes a folder of its own below it, and deletes those of dead workers.
    Local recovery keeps copies there."""
    lease_timeout_ms: int = 600_000
    """Time that a worker lives on without coordinator, whose restart may take a while. One whose parent is gone ends at once."""
    cancellation_timeout_ms: int = 30_000
    advertised_host: str | None = None
    """None: the address of the route to the coordinator."""
    watch_parent: bool = True
    directory_nonce: str = ""
    """Nonce of the coordinator's state directory: a different directory at the same path must not be searched for its address.
    Empty: unknown."""
    spawn: int = 0
    """1, 2, 3 ... per slot: number of this start of the slot's worker."""
    launch_token: str = ""
    """Proof of the spawn for the coordinator: see barriers/launches.py."""
    authorities: str | None = None
    """Certificates that it trusts, PEM; None: what the coordinator's directory has, or those of the system."""
    stands_by: bool = False
    """It waits until the coordinator gives it a slot; `slot` is then the seat in which it was started."""
    has_slot: bool = True
    """The seat is that of a slot of the job, not one beyond them."""
    seat: int = -1
    """Seat of a worker that has been given another slot: see barriers/messages.py, StandBy. -1: it is in its own."""
    seat_spawn: int = 0
    """`spawn` of the seat."""
    unix_sockets: bool = True
    """False: peers on the same host use the port, and encryption, too."""


class _UntilConfigured(logging.StreamHandler[TextIO]):
    """Silent once the user's program has configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            super().emit(record)


def show_user_log() -> None:
    """Write the log of functions (`ctx.logger`) to stderr, from INFO on, unless logging is configured: Python's default shows only
    warnings, without the logger's name."""
    logger = logging.getLogger(LOGGER)
    if logger.handlers or logging.root.handlers:
        return
    handler = _UntilConfigured(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def pickle_plan(plan: JobPlan) -> bytes:
    """Pickle a plan for a WorkerSpec: functions of the user's program by value."""
    return dumps_by_value(plan)


def run_worker(spec: WorkerSpec) -> ShutdownWorker:
    """Run one worker until it is ordered to leave, and return the order. Ends the process itself in an emergency.

    Raises AuthenticationError or StateDirectoryNotSharedError when the coordinator does not accept this worker, so that its driver
    learns why."""
    parent = _tie_to_parent(spec)
    keep_freed_memory()
    show_user_log()
    raise_descriptor_limit()
    if spec.stands_by:
        given = _stand_by(spec, parent)
        if isinstance(given, ShutdownWorker):
            return given
        spec = given
    with contextlib.ExitStack() as opened:
        return _run(spec, parent, opened)


def _stand_by(spec: WorkerSpec, parent: int) -> WorkerSpec | ShutdownWorker:
    """Wait for a slot; returns the spec of the worker that this process becomes, or the order to leave. Ends the process as `Watch`
    does when it is an orphan."""
    host = spec.advertised_host or route_address(split_urls(spec.coordinator_url)[0])
    message = message_of(spec.job_id, spec.slot, spec.submission, spec.task_attempt, host, spec.spawn, spec.launch_token)
    address = _address(spec, _directory_nonce(open_storage(spec.state_directory)))
    warm_imports()
    read_ahead(spec.plan)
    order = await_order(
        message,
        address,
        has_slot=spec.has_slot,
        lease_timeout_ms=spec.lease_timeout_ms,
        is_orphan=lambda: spec.watch_parent and os.getppid() != parent,
    )
    match order:
        case ShutdownWorker():
            return order
        case StandbyOrder():
            return ordered(spec, order)
        case None:
            log.error("no answer of a coordinator at %s: a worker that stood by leaves", spec.coordinator_url)
            os._exit(EXIT_ORPHANED)


def ordered(spec: WorkerSpec, order: StandbyOrder) -> WorkerSpec:
    """What a worker that stood by becomes. In its own slot it is as any other worker there."""
    if order.slot == spec.slot and order.spawn == spec.spawn:
        return replace(spec, stands_by=False)
    return replace(
        spec,
        stands_by=False,
        slot=order.slot,
        spawn=order.spawn,
        task_attempt=order.task_attempt,
        launch_token=order.launch_token,
        seat=spec.slot,
        seat_spawn=spec.spawn,
    )


def read_ahead(plan: bytes) -> None:
    """Load the modules that a plan needs. What is wrong with it, the deployment of it reports."""
    try:
        pickle.loads(plan)
    except Exception:
        log.debug("the plan can't be read", exc_info=True)


def _run(spec: WorkerSpec, parent: int, opened: contextlib.ExitStack) -> ShutdownWorker:
    """As run_worker. Everything it opens is closed however it ends: Spark may reuse the process, and no sweep deletes a folder that
    a live process holds."""
    nonce = uuid.uuid4().hex[:16]
    folder = OwnedFolder(spec.local_directory, f"{spec.job_id}-{spec.slot}-{spec.task_attempt}-{nonce}")
    opened.callback(folder.delete)
    clock = SystemClock()
    storage = open_storage(spec.state_directory)
    host = spec.advertised_host or route_address(split_urls(spec.coordinator_url)[0])
    pool = ThreadPool()
    opened.callback(pool.close, 1.0)
    transport = opened.enter_context(_transport(spec, host, folder.path))
    pool.run(warm_imports, lambda result, error: None)
    sweep_behind(pool, FolderSweep(spec.local_directory, WORKER_FOLDER))
    gateway: Gateway | None = None

    def report(item: Any) -> None:
        assert gateway is not None
        gateway.report(item)

    directory_nonce = _directory_nonce(storage)
    recovery = _recovery(spec, storage, directory_nonce)
    delay = RunQueueDelay()
    opened.callback(delay.close)
    worker = _worker(spec, transport, clock, storage, pool, report, folder.path, recovery, delay)
    address, identity = _address(spec, directory_nonce), _identity(spec, nonce, host, directory_nonce, transport)
    gateway = _gateway(identity, address, clock, worker, opened)
    watch = Watch(spec, parent, worker, gateway, clock)
    opened.callback(watch.stop)
    watch.start()
    gateway.start()
    reason = worker.run()
    gateway.flush(FLUSH_TIMEOUT_S)
    if reason.job_over:
        recovery.end()
    if gateway.rejection is not None:
        raise gateway.rejection
    return reason


def _gateway(
    identity: WorkerIdentity, address: CoordinatorAddress, clock: SystemClock, worker: Worker, opened: contextlib.ExitStack
) -> Gateway:
    """The way to the coordinator, also for its questions about this thread, which is the loop's, and about the log and the standard
    output from here on."""
    secrets = (address.token or "", identity.launch_token)
    log, output = opened.enter_context(keeping_log(secrets)), opened.enter_context(keeping_output(secrets))
    native_id = threading.get_native_id()
    sampler = StackSampler(threading.get_ident(), lambda: worker.working_for, loop_native_id=native_id)
    gateway = Gateway(
        identity,
        address,
        clock,
        deliver=worker.post,
        metrics=worker.metrics_of,
        frames_refused=lambda: worker.frames_refused,
        answering=Answering(identity.slot, sampler, log, output),
    )
    opened.callback(gateway.close)
    return gateway


def _recovery(spec: WorkerSpec, storage: Storage, directory_nonce: str) -> LocalRecovery:
    """Local copies of the job's state on this host, under the state directory's path and nonce: another directory may get the same
    path."""
    state_directory = f"{spec.state_directory} {directory_nonce}"
    return LocalRecovery(spec.local_directory, job_id=spec.job_id, state_directory=state_directory, storage=storage)


def _address(spec: WorkerSpec, directory_nonce: str) -> CoordinatorAddress:
    """Address of the coordinator; a different state directory at the same path says nothing about it."""
    is_shared = spec.directory_nonce in ("", directory_nonce)
    directory = spec.state_directory if is_shared else None
    return CoordinatorAddress(spec.coordinator_url, spec.token, directory, spec.authorities)


def _identity(spec: WorkerSpec, nonce: str, host: str, directory_nonce: str, transport: ZmqTransport) -> WorkerIdentity:
    return WorkerIdentity(
        spec.job_id,
        spec.slot,
        spec.submission,
        spec.task_attempt,
        nonce,
        os.getpid(),
        host,
        transport.address,
        directory_nonce,
        transport.key,
        transport.socket_path,
        spawn=spec.spawn,
        launch_token=spec.launch_token,
        fingerprint=fingerprint_of(os.getpid()),
        questions=QUESTIONS,
        seat=spec.seat,
        seat_spawn=spec.seat_spawn,
        sight=sight(),
    )


@contextlib.contextmanager
def _transport(spec: WorkerSpec, host: str, folder: str) -> Iterator[ZmqTransport]:
    """The worker's data port, and the unix socket beside it in a folder of its own, closed at the end."""
    with contextlib.ExitStack() as opened:
        socket_folder = make_socket_folder(folder) if spec.unix_sockets else None
        if socket_folder is not None:
            opened.callback(socket_folder.delete)
        socket_path = socket_folder.socket if socket_folder is not None else ""
        transport = ZmqTransport(
            spec.slot,
            CurveKeys.generate(),
            bind=host,
            socket_path=socket_path,
            cancellation_timeout_ms=spec.cancellation_timeout_ms,
        )
        opened.callback(transport.close)
        yield transport


def sweep_behind(pool: Pool, sweep: FolderSweep) -> None:
    """Delete what dead workers of this host left, a folder at a turn of the pool, so that a restore waits for at most one."""

    def turn(more: Any, error: BaseException | None) -> None:
        if more:
            pool.run(sweep.step, turn)

    turn(True, None)


def _worker(
    spec: WorkerSpec,
    transport: Transport,
    clock: SystemClock,
    storage: Storage,
    pool: ThreadPool,
    report: Report,
    local_directory: str,
    recovery: LocalRecovery,
    delay: RunQueueDelay,
) -> Worker:
    ports = WorkerPorts(
        job_id=spec.job_id,
        storage=storage,
        clock=clock,
        pool=pool,
        wake=transport.wake,
        report=report,
        new_nonce=lambda: uuid.uuid4().hex[:12],
        local_directory=local_directory,
        recovery=recovery,
        delayed_s=delay,
    )
    return Worker(spec.slot, transport, clock, SubtaskBuilder(spec.plan, ports), report)


# ------------------------------------------------------------------------------------------------------------ process


def keep_freed_memory() -> None:
    """Let the C allocator reuse large blocks instead of mapping new ones: every 64 k-row temporary of numpy is one.

    Without it a batch pays a page fault per 4 KiB of every intermediate array; measured: 37 against 128 M rows/s in a generator of
    five columns. Linux with glibc only; elsewhere it does nothing."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        if not libc.mallopt(M_MMAP_THRESHOLD, 1 << 30):
            libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most that older versions take
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)


def warm_imports() -> None:
    """Load what Arrow loads for its first array (pandas, where it is installed), while the worker registers.

    Otherwise the loop would stand still at its first batch. Parquet is for canonical savepoints, and loaded on the pool with the
    first one; sources and sinks of it load it with the plan."""
    import numpy as np
    import pyarrow as pa

    pa.array(np.zeros(1))


def _tie_to_parent(spec: WorkerSpec) -> int:
    """Die with the parent: SIGHUP with its default action, and the kernel's death signal. Returns the parent's pid."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    parent = os.getppid()
    if spec.watch_parent and not die_with_parent(parent):
        os._exit(EXIT_ORPHANED)
    return parent


def route_address(url: str) -> str:
    """This machine's address on the route to the coordinator; never a name, which may mean loopback."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def _directory_nonce(storage: Storage) -> str:
    """Nonce that this process reads in the state directory; empty if it can't, and the coordinator will report that."""
    try:
        return bytes(storage.execute(ReadFile(DIRECTORY_FILE, 0, FIRST_BYTES))).decode("utf-8").strip()
    except (HoldfastError, UnicodeDecodeError):
        return ""


class Watch:
    """Ends the process when it must not live on: an orphan without coordinator, or subtasks that can't be cancelled.

    It is a separate thread, since the loop may hang in user code and the control thread in a request."""

    def __init__(
        self,
        spec: WorkerSpec,
        parent: int,
        worker: Worker,
        gateway: Gateway,
        clock: SystemClock,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._spec = spec
        self._parent = parent
        self._worker = worker
        self._gateway = gateway
        self._clock = clock
        self._leave = leave
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(WATCH_INTERVAL_S):
            code = self.verdict(self._clock.monotonic_ms())
            if code is not None:
                self._leave(code)

    def verdict(self, now_ms: int) -> int | None:
        """Exit code if the process must end now, else None."""
        cancelling_since_ms = self._worker.cancelling_since_ms
        if cancelling_since_ms is not None and now_ms - cancelling_since_ms > self._spec.cancellation_timeout_ms:
            log.error("subtasks were not cancelled within %d ms", self._spec.cancellation_timeout_ms)
            return EXIT_CANCELLATION_TIMEOUT
        if self._spec.watch_parent and os.getppid() != self._parent:
            return EXIT_ORPHANED
        unreachable_since_ms = self._gateway.unreachable_since_ms
        if unreachable_since_ms is not None and now_ms - unreachable_since_ms > self._spec.lease_timeout_ms:
            log.error(
                "no answer of a coordinator at %s for %d ms; if workers can't reach an embedded one at that address, set %s to "
                "one that they reach, where the job is started",
                self._spec.coordinator_url,
                now_ms - unreachable_since_ms,
                ADVERTISED_HOST,
            )
            return EXIT_ORPHANED
        return None


def main(arguments: list[str]) -> int:
    """`python -m holdfast.operators.worker.main SPECFILE`: the file holds a pickled WorkerSpec."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m holdfast.operators.worker.main SPECFILE\n")
        return 2
    with open(arguments[0], "rb") as file:
        spec = pickle.load(file)
    began = time.monotonic()
    reason = run_worker(spec)
    log.info("left after %.1f s: %s", time.monotonic() - began, reason.reason)
    return EXIT_RESPAWN if reason.respawn else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
