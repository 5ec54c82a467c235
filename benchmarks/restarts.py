"""Restarts of the sidecar under many live jobs: kill -9, start again on the same port, until every job is led and runs.

The sidecar is a real `holdfast serve`. Workers are real sessions (`operators.worker.session`) over HTTP, all on one event loop:
they take their deployment, report their tasks as running and acknowledge every checkpoint, but process nothing. Reported for each
restart: new attempts (a job that failed over although all its workers live: 0 is right), and seconds from the start of the new
process until every worker of every job is registered with it and every job is RUNNING.

    python -m benchmarks.restarts [--jobs 200] [--restarts 20] [--workers 1] [--quick]"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psutil
from urllib3 import HTTPHeaderDict

from holdfast.api.client import RestClient
from holdfast.barriers import codec
from holdfast.barriers.jobgraph import JobConfig, JobGraph, JobVertex, OperatorDescription, Submission
from holdfast.barriers.messages import (
    AckAnswers,
    AcknowledgeCheckpoint,
    CheckpointMetrics,
    Deploy,
    Heartbeat,
    NumberedCommand,
    Registered,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
    WorkerCommand,
)
from holdfast.operators.worker import session_events as on
from holdfast.operators.worker.gateway import RefusedError, RejectedError, check_answer
from holdfast.operators.worker.session import Session, SessionState
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.handles import OperatorSubtaskState

T = TypeVar("T")
Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
VERTEX = "0" * 31 + "1"
CHECKPOINT_INTERVAL_MS = 10_000
"""200 jobs: 20 checkpoints a second."""
START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 10.0
"""As in holdfast.operators.worker.gateway."""


def make_graph(name: str, workers: int) -> JobGraph:
    """One source, one subtask a worker."""
    operator = OperatorDescription("source", VERTEX, "source", "source")
    vertex = JobVertex(VERTEX, "source", workers, 128, (operator,))
    config = JobConfig(checkpoint_interval_ms=CHECKPOINT_INTERVAL_MS)
    return JobGraph(name, (vertex,), (), config)


class UnansweredError(Exception):
    """No answer, or an unreadable one."""


class Connection:
    """HTTP/1.1 on one kept connection: one request at a time."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._head = f"Host: {parts.netloc}\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        """Status, headers by name in small letters, and body. Raises UnansweredError."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                status, headers = await self.begin(method, path, body)
                assert self._streams is not None
                content = await self._streams[0].readexactly(int(headers.get("content-length", 0)))
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            self.close()
            raise UnansweredError(repr(error)) from error
        if headers.get("connection") == "close":
            self.close()
        return status, headers, content

    async def begin(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str]]:
        """Send a request and read the head of its answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        reader, writer = self._streams
        writer.write(f"{method} {path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.split(": ", 1) for line in head[1:] if line)
        return int(head[0].split(" ")[1]), {name.lower(): value for name, value in pairs}

    async def lines(self, path: str) -> AsyncIterator[bytes]:
        """Lines of a chunked answer without end. Raises UnansweredError when it breaks, and for another status than 200."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                status, headers = await self.begin("GET", path, b"")
                assert self._streams is not None
                reader = self._streams[0]
                if status != 200:
                    await reader.readexactly(int(headers.get("content-length", 0)))
                    raise UnansweredError(str(status))
            rest = b""
            while size := int(await reader.readline(), 16):
                *whole, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n")
                for line in whole:
                    yield line
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            raise UnansweredError(repr(error)) from error
        finally:
            self.close()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def refusal_of(request: str, error: HoldfastError, *, submission: int) -> on.Event:
    """The session's event for an error, as in `operators.worker.gateway`."""
    match error:
        case RefusedError() if error.fenced and request == "register":
            return on.refuse_registration(error.message, error.named, submission=submission)
        case RefusedError():
            return on.refuse_post(request, error.message, error.named if error.fenced else {})
        case RejectedError() if request == "register" or (error.content and request in ("acks", "states")):
            return on.RequestRefused(request, error.message, rejected=True)
        case _:
            return on.RequestFailed(request)


class Worker:
    """One worker process as its coordinator sees it: a session, and tasks that are RUNNING once deployed."""

    def __init__(self, url: str, token: str, identity: on.WorkerIdentity, rng: random.Random) -> None:
        self.session = Session(identity, rng)
        self.attempts: set[int] = set()
        """Attempts deployed to it."""
        self.requests = 0
        self._identity = identity
        self._base = f"/v1/jobs/{identity.job_id}/workers"
        self._posts, self._stream = Connection(url, token), Connection(url, token)
        self._inbox: asyncio.Queue[tuple[int, on.Event]] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None
        self._generation = 0
        self._changed = asyncio.Condition()

    async def registers_beyond(self, epoch: int) -> None:
        """Wait until it is registered with a leader of a higher epoch."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.session.state is SessionState.REGISTERED and self.session.epoch > epoch)

    async def run(self) -> None:
        """As the control thread of a worker: one request at a time."""
        events: list[on.Event] = [on.DeadlineReached()]
        while True:
            while events:
                for action in self.session.handle(events.pop(0), now_ms=_now_ms()):
                    answer = await self._perform(action)
                    if answer is not None:
                        events.append(answer)
            async with self._changed:
                self._changed.notify_all()
            due_ms = self.session.next_deadline_ms()
            timeout_s = None if due_ms is None else max(0, due_ms - _now_ms()) / 1000
            try:
                async with asyncio.timeout(timeout_s):
                    generation, event = await self._inbox.get()
                if generation in (0, self._generation):
                    events.append(event)
            except TimeoutError:
                events.append(on.DeadlineReached())

    async def _perform(self, action: on.Action) -> on.Event | None:
        slot = self._identity.slot
        match action:
            case on.Deliver(command=command):
                self._obey(command)
            case on.OpenStream():
                self._open(action)
            case on.SendRegister(body=body):
                return await self._ask("register", "/register", body, lambda data: on.RegistrationAnswered(_read(data, Registered)))
            case on.PostAcks(body=acks):
                return await self._ask("acks", f"/{slot}/acks", acks, lambda data: on.AcksAnswered(_read(data, AckAnswers)))
            case on.PostStates(body=states):
                return await self._ask("states", f"/{slot}/states", states, lambda data: on.StatesAnswered())
            case on.PostHeartbeat(session=session, attempt=attempt):
                beat = Heartbeat(slot, session, attempt, ())
                return await self._ask(
                    "heartbeat", f"/{slot}/heartbeat", beat, lambda data: on.HeartbeatAnswered(json.loads(data)["epoch"])
                )
        return None

    async def _ask(self, request: str, path: str, body: Any, made: Callable[[bytes], on.Event]) -> on.Event:
        self.requests += 1
        try:
            status, headers, data = await self._posts.ask("POST", self._base + path, codec.encode(body))
        except UnansweredError:
            return on.RequestFailed(request)
        try:
            check_answer(status, HTTPHeaderDict(headers), data)
        except HoldfastError as error:
            return refusal_of(request, error, submission=self._identity.submission)
        return made(data)

    def _open(self, action: on.OpenStream) -> None:
        self._generation += 1
        if self._reading is not None:
            self._reading.cancel()
        path = f"{self._base}/{self._identity.slot}/commands?epoch={action.epoch}&session={action.session}&after={action.after}"
        self._reading = asyncio.create_task(self._read(path, self._generation))

    async def _read(self, path: str, generation: int) -> None:
        self.requests += 1
        event: on.Event = on.RequestFailed("stream")
        try:
            async for line in self._stream.lines(path):
                self._inbox.put_nowait((generation, on.CommandReceived(codec.decode(line, NumberedCommand))))
        except UnansweredError as error:
            if str(error) in ("404", "409"):
                event = on.RequestRefused("stream", str(error))
        self._inbox.put_nowait((generation, event))

    def _obey(self, command: WorkerCommand) -> None:
        if isinstance(command, Deploy):
            attempt = command.deployment.attempt
            self.attempts.add(attempt)
            for subtask in command.deployment.subtasks:
                self._report(on.StatusChanged(SubtaskStatus(attempt, subtask.vertex, subtask.subtask, TaskState.RUNNING)))
        elif isinstance(command, TriggerCheckpoint):
            metrics = CheckpointMetrics(0.1, 0.1, 0.1, 0.1, 0, 0, 0)
            states = {"source": OperatorSubtaskState()}
            ack = AcknowledgeCheckpoint(command.attempt, command.checkpoint_id, VERTEX, self._identity.slot, states, metrics)
            self._report(on.AnswerReady(ack))

    def _report(self, event: on.Event) -> None:
        self._inbox.put_nowait((0, event))

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._posts.close()
        self._stream.close()


def _runs(job: dict[str, Any]) -> bool:
    """Whether GET /v1/jobs/overview shows the job and every task as RUNNING. A job with tasks that are only being deployed fails
    over."""
    return bool(job["state"] == "RUNNING" and job["tasks"]["running"] == job["tasks"]["total"])


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _read(data: bytes, kind: type[T]) -> T:
    return codec.decode(data, kind)


class Sidecar:
    """`holdfast serve` on one port, killed and started again. Its log goes to a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}"
        self.token = ""
        self.log = folder / "log"

    def start(self) -> None:
        """Start the process; returns long before it answers."""
        command = [sys.executable, "-m", "holdfast", "serve", "--json", "--port", str(self._port)]
        command += ["--state-dir", str(self._folder / "state")]
        with self.log.open("ab") as log, (self._folder / "announced").open("ab") as announced:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=announced, stderr=log)

    async def answers(self) -> None:
        """Wait until the process listens."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                assert self._process is not None
                if self._process.poll() is not None:
                    raise RuntimeError(f"the sidecar ended with {self._process.returncode}: {self.log.read_text()[-2000:]}")
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                    writer.close()
                    break
                await asyncio.sleep(0.02)
        self.token = (self._folder / "state" / "_token").read_text()

    def cpu_seconds(self) -> float:
        assert self._process is not None
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def kill(self) -> None:
        """kill -9, by its pid."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


class Restarts:
    """Live jobs, their workers, and the sidecar that is killed under them."""

    def __init__(self, sidecar: Sidecar, jobs: int, workers_per_job: int, seed: int) -> None:
        self._sidecar = sidecar
        self._jobs, self._workers_per_job = jobs, workers_per_job
        self._rng = random.Random(seed)
        self.workers: list[Worker] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Submit every job, start its workers, wait until all run."""
        self._sidecar.start()
        await self._sidecar.answers()
        with ThreadPoolExecutor(8) as pool:
            loop = asyncio.get_running_loop()
            numbers = range(self._jobs)
            accepted = await asyncio.gather(*(loop.run_in_executor(pool, self._submit, number) for number in numbers))
        for job_id, submission, directory_nonce in accepted:
            for slot in range(self._workers_per_job):
                nonce = f"{self._rng.getrandbits(64):016x}"
                identity = on.WorkerIdentity(
                    job_id, slot, submission, 1, nonce, 1, "127.0.0.1", f"tcp://127.0.0.1:{slot + 1}", directory_nonce
                )
                self.workers.append(Worker(self._sidecar.url, self._sidecar.token, identity, random.Random(self._rng.random())))
        self._tasks = [asyncio.create_task(worker.run()) for worker in self.workers]
        await self._all_run()

    def _submit(self, number: int) -> tuple[str, int, str]:
        client = RestClient(self._sidecar.url, self._sidecar.token)
        try:
            accepted = client.submit(Submission(make_graph(f"job {number}", self._workers_per_job)))
        finally:
            client.close()
        return accepted.job_id, accepted.submission, accepted.directory_nonce

    async def restart(self, lived_s: float) -> Row:
        """Let the jobs run for a while, kill the sidecar and start it again."""
        await asyncio.sleep(lived_s)
        before = self.new_attempts()
        requests = sum(worker.requests for worker in self.workers)
        epochs = {id(worker): worker.session.epoch for worker in self.workers}
        self._sidecar.kill()
        self._sidecar.start()
        began = time.monotonic()
        await self._sidecar.answers()
        listening_s = time.monotonic() - began
        async with asyncio.timeout(START_TIMEOUT_S):
            for worker in self.workers:
                await worker.registers_beyond(epochs[id(worker)])
        registered_s = time.monotonic() - began
        cpu_s = self._sidecar.cpu_seconds()
        requests = sum(worker.requests for worker in self.workers) - requests
        await self._all_run()
        return {
            "workload": "restarts",
            "jobs": self._jobs,
            "workers": len(self.workers),
            "listening_s": round(listening_s, 2),
            "registered_s": round(registered_s, 2),
            "all_running_s": round(time.monotonic() - began, 2),
            "sidecar_cpu_s": round(cpu_s, 2),
            "requests_of_workers": requests,
            "new_attempts": self.new_attempts() - before,
        }

    def new_attempts(self) -> int:
        """Attempts beyond the first, over all jobs."""
        return sum(max(worker.attempts, default=1) - 1 for worker in self.workers if worker._identity.slot == 0)

    async def _all_run(self) -> None:
        client = RestClient(self._sidecar.url, self._sidecar.token)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while True:
                    jobs = await asyncio.to_thread(client.jobs)
                    if len(jobs) == self._jobs and all(_runs(job) for job in jobs):
                        break
                    await asyncio.sleep(0.1)
        finally:
            client.close()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self.workers:
            worker.close()


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="holdfast-restarts-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


async def _measure(folder: Path, jobs: int, restarts: int, workers: int, lived_s: float, tell: Callable[[Row], None]) -> list[Row]:
    sidecar = Sidecar(folder)
    rig = Restarts(sidecar, jobs, workers, seed=1)
    rows = []
    try:
        await rig.begin()
        for _ in range(restarts):
            rows.append(await rig.restart(lived_s))
            tell(rows[-1])
    finally:
        await rig.end()
        sidecar.kill()
    return rows


def measure(
    jobs: int, restarts: int, *, workers: int = 1, lived_s: float = 2.0, tell: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """One row for each restart."""
    with scratch() as folder:
        return asyncio.run(_measure(folder, jobs, restarts, workers, lived_s, tell))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1, help="of each job")
    parser.add_argument("--quick", action="store_true", help="20 jobs, 2 restarts")
    options = parser.parse_args()
    jobs, restarts = (20, 2) if options.quick else (options.jobs, options.restarts)
    rows = measure(jobs, restarts, workers=options.workers, tell=lambda row: print(json.dumps(row), flush=True))
    attempts = sum(row["new_attempts"] for row in rows)
    seconds = [row["all_running_s"] for row in rows]
    print(json.dumps({"restarts": len(rows), "new_attempts": attempts, "seconds_min": min(seconds), "seconds_max": max(seconds)}))
    if attempts:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
