"""Acknowledgements per second that the sidecar takes over HTTP: a real `holdfast serve`, workers that only speak.

Every acknowledgement is new and counts towards a checkpoint that completes. The clock runs while they are posted; requests
are encoded before. One connection is one worker.

    python -m benchmarks.acks [--quick]
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.harness import end, first_line
from holdfast.api.client import RestClient
from holdfast.barriers import codec
from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, JobVertex, OperatorDescription, Partitioning, Submission
from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    AcknowledgeCheckpoint,
    AckStatus,
    CheckpointMetrics,
    Deploy,
    Heartbeat,
    NotifyCheckpointComplete,
    NumberedCommand,
    OperatorMetrics,
    Registered,
    RegisterWorker,
    StatusBatch,
    SubtaskMetrics,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
    WorkerCommand,
)
from holdfast.statebackends.handles import FileHandle, KeyedStateHandle, OperatorSubtaskState, StateMeta
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.layout import CA_FILE

Row = dict[str, Any]

VERTICES = 256
"""Subtasks of each worker, and so its acknowledgements for one checkpoint."""

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS_MAX, END_SECONDS_MAX = 60.0, 30.0
"""Of a sidecar."""


TOTAL = StateMeta("total", "value", "int", "utf8")


def max_parallelism(workers: int) -> int:
    return max(128, 4 * workers)


def make_graph(workers: int, chain: int = VERTICES, interval_ms: int | None = JobConfig().checkpoint_interval_ms) -> JobGraph:
    """A line of vertices, not chained: many subtasks in few processes."""
    vertices, edges = [], []
    for number in range(chain):
        kind = "source" if number == 0 else "map"
        operator = OperatorDescription(f"v{number}", f"{number:032x}", f"v{number}", kind, (TOTAL,), "utf8")
        vertices.append(JobVertex(f"{number:032x}", f"v{number}", workers, max_parallelism(workers), (operator,)))
        if number:
            edges.append(JobEdge(number, f"{number - 1:032x}", f"v{number - 1}", f"{number:032x}", 0, Partitioning.REBALANCE))
    config = JobConfig(checkpoint_interval_ms=interval_ms, checkpoint_timeout_ms=60_000, state_backend="filesystem")
    return JobGraph(f"acks-{workers}", tuple(vertices), tuple(edges), config)


class Speaker:
    """A worker's side of the protocol on one keep-alive connection, and its command stream on another."""

    def __init__(self, url: str, token: str, job_id: str, slot: int, workers: int, vertices: int = VERTICES) -> None:
        self._address = urlsplit(url).netloc
        self._headers = {"Authorization": f"Bearer {token}"}
        self._base = f"/v1/jobs/{job_id}/workers"
        self._connection = http.client.HTTPConnection(self._address, timeout=60)
        self._stream: http.client.HTTPConnection | None = None
        self.slot = slot
        self.workers = workers
        self.vertices = vertices

    def post(self, path: str, body: bytes, content_type: str = codec.JSON_TYPE) -> bytes:
        self._connection.request("POST", self._base + path, body, {**self._headers, "Content-Type": content_type})
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {data!r}")
        return data

    def start(self, job_id: str, submission: int, nonce: str) -> None:
        """Register and open the command stream."""
        address = f"tcp://h:{9_000 + self.slot}"
        register = RegisterWorker(job_id, self.slot, submission, 1, f"n{self.slot}", 1, "here", address, nonce)
        self.registered = codec.decode(self.post("/register", codec.encode(register)), Registered)
        self._stream = http.client.HTTPConnection(self._address, timeout=60)
        path = f"{self._base}/{self.slot}/commands?session={self.registered.session}"
        self._stream.request("GET", path, headers=self._headers)
        self._lines = self._stream.getresponse()

    def deploy(self) -> None:
        """Take the deployment and report every subtask as running."""
        deployment = self.registered.deployment or self.command(Deploy).deployment
        self.attempt = deployment.attempt
        statuses = tuple(SubtaskStatus(self.attempt, f"{n:032x}", self.slot, TaskState.RUNNING) for n in range(self.vertices))
        batch = StatusBatch(self.registered.epoch, self.slot, self.registered.session, statuses)
        self.post(f"/{self.slot}/states", codec.encode(batch))

    def command(self, kind: type) -> Any:
        """The next command of a kind."""
        for command in self.commands():
            if isinstance(command, kind):
                return command
        raise RuntimeError("the command stream ended")

    def commands(self) -> Iterator[WorkerCommand | None]:
        """Commands as they come, until the stream ends. None: a line that only keeps the stream alive."""
        while line := self._lines.readline():
            yield codec.decode(line, NumberedCommand).command

    def beat(self, count: int) -> None:
        """A heartbeat with the counters of every subtask."""
        metrics = tuple(
            SubtaskMetrics(f"{n:032x}", self.slot, count, count, operators=(OperatorMetrics(f"v{n}", count, count),))
            for n in range(self.vertices)
        )
        beat = Heartbeat(self.slot, self.registered.session, self.attempt, metrics)
        self.post(f"/{self.slot}/heartbeat", codec.encode(beat))

    def encode_acks(self, trigger: TriggerCheckpoint, batch_size: int) -> list[bytes]:
        items = [make_ack(trigger, number, self.slot, self.workers) for number in range(self.vertices)]
        registered = self.registered
        batches = [
            AckBatch(registered.epoch, self.slot, registered.session, tuple(items[at : at + batch_size]))
            for at in range(0, self.vertices, batch_size)
        ]
        return [(codec.encode_msgpack(batch) if registered.msgpack else None) or codec.encode(batch) for batch in batches]

    def post_acks(self, bodies: list[bytes]) -> int:
        """Post bodies in turn; returns how many acknowledgements were accepted."""
        kind = codec.MSGPACK_TYPE if self.registered.msgpack else codec.JSON_TYPE
        answers = [codec.decode(self.post(f"/{self.slot}/acks", body, kind), AckAnswers).answers for body in bodies]
        return sum(answer is AckStatus.SUCCESS for each in answers for answer in each)

    def close(self) -> None:
        self._connection.close()
        if self._stream is not None:
            self._stream.close()


def make_ack(trigger: TriggerCheckpoint, number: int, slot: int, workers: int) -> AcknowledgeCheckpoint:
    """An acknowledgement with one keyed state in one file, the most usual form."""
    part = FileHandle(f"v{number}-{slot}-{trigger.attempt}-0123456789abcdef-total", 123_456, "xxh3_128:" + "0" * 32)
    handle = KeyedStateHandle(assign_key_groups(max_parallelism(workers), workers, slot), "arrow", (TOTAL,), (part,))
    metrics = CheckpointMetrics(1.5, 0.5, 0.2, 12.5, 1_000, 123_456, 123_456)
    states = {f"v{number}": OperatorSubtaskState(keyed=(handle,))}
    return AcknowledgeCheckpoint(trigger.attempt, trigger.checkpoint_id, f"{number:032x}", slot, states, metrics)


@dataclass
class Sidecar:
    """A `holdfast serve` process."""

    url: str
    token: str
    process: psutil.Process
    state: Path
    """The state directory."""
    authorities: str | None = None
    """Certificates that its clients trust; None: it has no TLS."""

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def serving(root: Path = ROOT, *, tls: bool = False) -> Iterator[Sidecar]:
    """A sidecar of the code at `root`, on a scratch directory; with TLS and an authority of its own, or in clear text.

    Raises ProcessFailedError if it does not start in time."""
    with tempfile.TemporaryDirectory(prefix="holdfast-acks-", ignore_cleanup_errors=True) as folder:
        state, errors = Path(folder) / "state", Path(folder) / "errors"
        command = [sys.executable, "-m", "holdfast", "serve", "--json", "--state-dir", str(state)]
        command += ["--tls", "auto"] if tls else []
        with errors.open("wb") as told:
            process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=told)
        try:
            facts = json.loads(first_line(process, "the sidecar", START_SECONDS_MAX, errors))
            trusted = (state / CA_FILE).read_text() if tls else None
            yield Sidecar(facts["url"], Path(facts["token_file"]).read_text(), psutil.Process(process.pid), state, trusted)
        finally:
            end(process, END_SECONDS_MAX)


@contextmanager
def speaking(
    sidecar: Sidecar, workers: int, graph: JobGraph | None = None
) -> Iterator[tuple[RestClient, str, list[Speaker]]]:
    """A running job with workers that process nothing."""
    client = RestClient(sidecar.url, sidecar.token)
    accepted = client.submit(Submission(graph or make_graph(workers), fresh=True))
    speakers = [Speaker(sidecar.url, sidecar.token, accepted.job_id, slot, workers) for slot in range(workers)]
    try:
        for speaker in speakers:
            speaker.start(accepted.job_id, accepted.submission, accepted.directory_nonce)
        for speaker in speakers:
            speaker.deploy()
        while client.job_state(accepted.job_id) != "RUNNING":
            time.sleep(0.01)
        yield client, accepted.job_id, speakers
    finally:
        for speaker in speakers:
            speaker.close()
        client.cancel(accepted.job_id)
        client.close()


class Acknowledging:
    """A job whose workers acknowledge checkpoint after checkpoint while `run` runs."""

    def __init__(
        self, client: RestClient | None, job_id: str, speakers: list[Speaker], pool: Executor, batch_size: int
    ) -> None:
        """`client` asks for each checkpoint; None: the job's interval does."""
        self._client = client
        self._job_id = job_id
        self._speakers = speakers
        self._pool = pool
        self._batch_size = batch_size
        self.checkpoints = 0

    def run(self, seconds: float) -> tuple[int, float]:
        """Acknowledgements taken, and for how long they were posted: at least `seconds`. Raises RuntimeError if one was refused."""
        clock, taken, checkpoints = 0.0, 0, 0
        while clock < seconds:
            if self._client is not None:
                self._client._call("POST", f"/v1/jobs/{self._job_id}/checkpoints", b"{}")
            bodies = [speaker.encode_acks(speaker.command(TriggerCheckpoint), self._batch_size) for speaker in self._speakers]
            began = time.perf_counter()
            taken += sum(self._pool.map(Speaker.post_acks, self._speakers, bodies))
            clock += time.perf_counter() - began
            checkpoints += 1
            for speaker in self._speakers:
                speaker.command(NotifyCheckpointComplete)
        wanted = checkpoints * len(self._speakers) * VERTICES
        if taken != wanted:
            raise RuntimeError(f"{taken} acknowledgements were taken, not {wanted}")
        self.checkpoints += checkpoints
        return taken, clock


@contextmanager
def acknowledging(sidecar: Sidecar, workers: int, batch_size: int, interval_ms: int | None = None) -> Iterator[Acknowledging]:
    """`interval_ms` between checkpoints; None: each is asked for by a user, which makes what viewers see too old at once."""
    graph = make_graph(workers) if interval_ms is None else make_graph(workers, interval_ms=interval_ms)
    with speaking(sidecar, workers, graph) as (client, job_id, speakers), ThreadPoolExecutor(workers) as pool:
        yield Acknowledging(client if interval_ms is None else None, job_id, speakers, pool, batch_size)


def measure_one(sidecar: Sidecar, workers: int, batch_size: int, seconds: float) -> Row:
    """One setting: checkpoint after checkpoint until the clock has run for `seconds`."""
    with acknowledging(sidecar, workers, batch_size) as load:
        cpu = sidecar.cpu_seconds()
        taken, clock = load.run(seconds)
        cpu = sidecar.cpu_seconds() - cpu
    return {
        "workload": "acks",
        "connections": workers,
        "batch": batch_size,
        "acks_per_second": round(taken / clock),
        "requests_per_second": round(taken / clock / batch_size),
        "sidecar_cpu_us_per_ack": round(cpu / taken * 1e6, 1),
        "checkpoints": load.checkpoints,
    }


def measure(*, quick: bool = False) -> list[Row]:
    """Connections and batch sizes, one row each. 256 is the largest batch that a worker posts."""
    seconds = 0.5 if quick else 2.0
    with serving() as sidecar:
        return [
            measure_one(sidecar, workers, batch_size, seconds)
            for workers, batch_size in ((1, 1), (1, 16), (1, 256), (4, 1), (4, 256))
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    for row in measure(quick=parser.parse_args().quick):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
