"""A coordinator that was killed and begins again: it listens first, and no job fails over whose workers live."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import urllib3

from benchmarks.restarts import Connection, Restarts, Sidecar, Worker, make_graph
from holdfast.api.server.main import EmbeddedCoordinator
from holdfast.api.settings import ServerSettings, server_settings
from holdfast.barriers import codec
from holdfast.barriers.codec import FIELDS_HEADER
from holdfast.barriers.jobgraph import Submission
from holdfast.barriers.messages import AckBatch, Heartbeat, Registered, RegisterWorker
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.service import CoordinatorService
from holdfast.operators.worker import session_events as on
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import Operation, Storage, path_of
from tests.coordinator.doubles import wait_until

URL = "http://unused"


class HeldStorage:
    """Answers nothing about some jobs until it is told to go on."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.root = inner.root
        self.held: set[str] = set()
        self.go_on = threading.Event()
        self.reached: list[str] = []

    def at(self, location: str) -> Storage:
        return self._inner.at(location)

    def execute(self, operation: Operation) -> Any:
        job_id = path_of(operation).partition("/")[0]
        if job_id in self.held:
            self.reached.append(job_id)
            assert self.go_on.wait(60), "nobody let it go on"
        return self._inner.execute(operation)


class Caller:
    """Requests to a coordinator, as a worker or a user makes them."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._pool = urllib3.PoolManager(retries=False, headers={"Authorization": f"Bearer {token}"}, timeout=30)

    def ask(self, method: str, path: str, record: Any = None) -> urllib3.BaseHTTPResponse:
        body = None if record is None else codec.encode(record)
        return self._pool.request(method, f"{self._url}{path}", body=body)

    def close(self) -> None:
        self._pool.clear()


Begin = Callable[[], EmbeddedCoordinator]


class World:
    """A state directory with two live jobs of one worker each, whose coordinator has gone."""

    def __init__(self, folder: Path) -> None:
        self._settings = server_settings({}, state_dir=folder, port=0)
        self.storage = HeldStorage(open_storage(str(folder)))
        self.service: CoordinatorService | None = None
        first = CoordinatorService(ServiceConfig(str(folder)))
        first.lead()
        self.nonce = first.directory_nonce
        self.jobs = []
        for name in ("slow", "quick"):
            accepted = first.submit(Submission(make_graph(name, 1)))
            self.jobs.append(accepted.job_id)
            registered = first.register_async(self.worker(accepted.job_id, attempt=0)).result(60)
            wait_until(lambda job=accepted.job_id: first.job(job).attempt == 1, lambda: None)  # type: ignore[misc]
            wait_until(lambda job=accepted.job_id: first.job(job).overview.state == "RUNNING", lambda: None)  # type: ignore[misc]
            self.session = registered.session
        first.close()

    def worker(self, job_id: str, *, attempt: int = 1) -> RegisterWorker:
        return RegisterWorker(job_id, 0, 1, 1, "n", 1, "here", "tcp://127.0.0.1:1", self.nonce, attempt)

    def coordinator(self) -> EmbeddedCoordinator:
        return EmbeddedCoordinator(self._settings, open_service=self._open)

    def _open(self, settings: ServerSettings, url: str) -> Coordinator:
        self.service = CoordinatorService(ServiceConfig(settings.location, url=url, recovery_threads=1), self.storage)
        return self.service


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.storage.go_on.set()


def test_it_listens_before_it_leads_and_tells_nobody_that_a_job_is_gone(world: World) -> None:
    slow = world.jobs[0]
    world.storage.held.add(slow)
    with world.coordinator() as coordinator:
        caller = Caller(coordinator.url, coordinator.token)
        wait_until(lambda: slow in world.storage.reached, lambda: None, what="its recovery")
        assert caller.ask("GET", "/healthz").status == 200
        paths = ("/readyz", "/v1/jobs", "/v1/jobs/overview", "/v1/overview", f"/v1/jobs/{slow}", f"/v1/jobs/{slow}/checkpoints")
        for path in paths:
            answer = caller.ask("GET", path)
            assert (path, answer.status, answer.headers.get("Retry-After")) == (path, 503, "1")
        assert caller.ask("GET", f"/v1/jobs/{'0' * 32}").status == 404
        # What a worker says in a session of the old leader: it is to register, and takes along what is unanswered.
        base = f"/v1/jobs/{slow}/workers"
        assert caller.ask("POST", f"{base}/0/acks", AckBatch(1, 0, world.session, ())).status == 409
        assert caller.ask("POST", f"{base}/0/heartbeat", Heartbeat(0, world.session, 1)).status == 409
        assert caller.ask("GET", f"{base}/0/commands?session={world.session}").status == 409
        world.storage.go_on.set()
        wait_until(lambda: caller.ask("GET", "/readyz").status == 200, lambda: None, what="readiness")
        listed = json.loads(caller.ask("GET", "/v1/jobs").data)["jobs"]
        assert {job["id"] for job in listed} == set(world.jobs)
        caller.close()


def test_a_job_whose_worker_asks_goes_first_and_the_worker_waits_for_it(world: World) -> None:
    slow, quick = world.jobs
    world.storage.held = {slow, quick}
    with world.coordinator() as coordinator, ThreadPoolExecutor(1) as threads:
        caller = Caller(coordinator.url, coordinator.token)
        wait_until(lambda: bool(world.storage.reached), lambda: None, what="the first recovery")
        waiting = {slow, quick} - set(world.storage.reached)
        job_id = waiting.pop()
        answer = threads.submit(caller.ask, "POST", f"/v1/jobs/{job_id}/workers/register", world.worker(job_id))
        service = world.service
        assert service is not None
        wait_until(lambda: job_id in service._recovery._asked, lambda: None, what="the worker's asking")
        assert not answer.done()
        world.storage.go_on.set()
        registered = answer.result(30)
        assert registered.status == 200
        assert codec.decode(registered.data, Registered).epoch == 2
        state = json.loads(caller.ask("GET", f"/v1/jobs/{job_id}").data)["state"]
        assert state == "RUNNING"
        caller.close()


def test_a_registration_does_not_wait_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.api.routes.workers.REGISTRATION_TIMEOUT_S", 0.05)
    slow = world.jobs[0]
    world.storage.held.add(slow)
    with world.coordinator() as coordinator:
        caller = Caller(coordinator.url, coordinator.token)
        wait_until(lambda: slow in world.storage.reached, lambda: None, what="its recovery")
        answer = caller.ask("POST", f"/v1/jobs/{slow}/workers/register", world.worker(slow))
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        world.storage.go_on.set()
        caller.close()


def test_a_repeated_submission_finds_its_job_led(world: World) -> None:
    """Else the driver whose first answer was lost in the restart would start the job a second time, and supersede itself."""
    with world.coordinator():
        service = world.service
        assert service is not None
        first = service.submit(Submission(make_graph("third", 1), driver_nonce="d"))
    world.storage.held.add(first.job_id)
    with world.coordinator(), ThreadPoolExecutor(1) as threads:
        service = world.service
        assert service is not None
        again = threads.submit(service.submit, Submission(make_graph("third", 1), driver_nonce="d"))
        world.storage.go_on.set()
        assert again.result(30).submission == first.submission


@pytest.mark.slow
def test_kill_9_of_a_sidecar_with_live_jobs_begins_no_new_attempt(tmp_path: Path) -> None:
    async def run() -> int:
        sidecar = Sidecar(tmp_path)
        rig = Restarts(sidecar, jobs=6, workers_per_job=2, seed=7)
        try:
            await rig.begin()
            row = await rig.restart(0.0)
            return int(row["new_attempts"])
        finally:
            await rig.end()
            sidecar.kill()

    assert asyncio.run(run()) == 0
    assert "attempt_failed" not in (tmp_path / "log").read_text()


REFUSALS: list[tuple[str, int, dict[str, int], on.Event]] = [
    ("register", 409, {"held": 2, "newer": 2}, on.RequestRefused("register", "no", superseded=True)),
    ("register", 409, {"held": 3, "slot": 0}, on.RequestRefused("register", "no", displaced=True)),
    ("register", 409, {"state": 1}, on.RequestRefused("register", "no", over=True)),
    ("register", 404, {}, on.RequestRefused("register", "no")),
    ("register", 401, {}, on.RequestRefused("register", "no", rejected=True)),
    ("acks", 409, {"attempt": 2}, on.RequestRefused("acks", "no", discarded=True)),
    ("acks", 413, {}, on.RequestRefused("acks", "no", rejected=True)),
    ("acks", 403, {}, on.RequestFailed("acks")),
    ("acks", 503, {}, on.RequestFailed("acks")),
]


@pytest.mark.parametrize(("request_kind", "status", "fields", "told"), REFUSALS)
def test_the_workers_of_the_benchmark_read_a_refusal_as_real_ones_do(
    request_kind: str, status: int, fields: dict[str, int], told: on.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(self: Connection, method: str, path: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        return status, {FIELDS_HEADER.lower(): json.dumps(fields)}, b'{"errors": ["no"]}'

    monkeypatch.setattr(Connection, "ask", answer)
    identity = on.WorkerIdentity("5" * 32, 0, 1, 1, "n", 1, "here", "tcp://127.0.0.1:1", "d")

    async def ask() -> on.Event:
        worker = Worker(URL, "", identity, random.Random(1))
        return await worker._ask(request_kind, "/x", Heartbeat(0, "s", 1, ()), lambda data: on.StatesAnswered())

    assert asyncio.run(ask()) == told
