"""One sidecar under its largest loads: 10,000 subtasks of one job, 200 jobs, and 20 people who look on.

The sidecar is a real `holdfast serve` on one core; workers that only speak have another. Each acknowledges every checkpoint as soon
as it is triggered and sends its heartbeats. What a checkpoint takes is read from the job's history.

    python -m benchmarks.service [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.acks import ROOT, Row, Sidecar, Speaker, acknowledging, make_graph, serving, speaking
from holdfast.api.client import RestClient
from holdfast.barriers.jobgraph import JobGraph, Submission
from holdfast.barriers.messages import CheckpointKind, TriggerCheckpoint
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import DeleteFile, DeleteFolder, PutIfAbsent

INTERVAL_MS = 1_000
BEAT_S = 2.0
ACKS_AT_ONCE = 256
ACKED_INTERVAL_MS = 10
"""Between the checkpoints that are acknowledged beside dashboards."""
RAW_CHECKPOINTS = 500
"""Whose file operations are measured by themselves."""
DASHBOARDS, LOOK_S = 20, 2.0
_ANY = 999_999_999

LOOKS_AT = ("", "/checkpoints", "/health", "/series?metric=records_in_per_second")
"""What pages of a job show, below `/v1/jobs/<id>`, and ask for in one request."""


class _Answer(msgspec.Struct):
    status: int


class _Answers(msgspec.Struct):
    answers: list[_Answer]


@dataclass(frozen=True)
class Load:
    """`jobs` of `workers` workers each with `vertices` subtasks, and what is asked of their sidecar."""

    name: str
    jobs: int
    workers: int
    vertices: int
    rss_mib_max: int
    p99_ms_max: int = 800
    completed_min: float = 0.99


LOADS = (Load("10,000 subtasks", 1, 250, 40, 400), Load("200 jobs", 200, 1, 16, 600))


def _packed(number: int) -> bytes:
    """As msgpack has large numbers: small ones may have as many bytes."""
    return b"\xce" + number.to_bytes(4, "big")


class SpokenJob:
    """A running job that checkpoints every second, a thread for each of its workers."""

    def __init__(self, sidecar: Sidecar, client: RestClient, graph: JobGraph, load: Load) -> None:
        accepted = client.submit(Submission(graph, fresh=True))
        self.job_id = accepted.job_id
        workers = range(load.workers)
        self._speakers = [Speaker(sidecar.url, sidecar.token, self.job_id, slot, load.workers, load.vertices) for slot in workers]
        self._ending = threading.Event()
        facts = (accepted.submission, accepted.directory_nonce)
        self._threads = [threading.Thread(target=self._speak, args=(speaker, *facts), daemon=True) for speaker in self._speakers]
        for thread in self._threads:
            thread.start()

    def _speak(self, speaker: Speaker, submission: int, nonce: str) -> None:
        speaker.start(self.job_id, submission, nonce)
        speaker.deploy()
        body = self._acknowledgements(speaker)
        last, count = time.monotonic(), 0
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            for command in speaker.commands():
                if self._ending.is_set():
                    return
                if isinstance(command, TriggerCheckpoint):
                    speaker.post_acks([body.replace(_packed(_ANY), _packed(command.checkpoint_id))])
                if time.monotonic() - last >= BEAT_S:
                    last, count = time.monotonic(), count + 1
                    speaker.beat(count)

    def _acknowledgements(self, speaker: Speaker) -> bytes:
        """Of all its subtasks, in one body as a worker posts it: encoded once, so that the sidecar is what is measured. Raises
        RuntimeError unless it has the number of the checkpoint once for each."""
        (body,) = speaker.encode_acks(TriggerCheckpoint(speaker.attempt, _ANY, 0, CheckpointKind.CHECKPOINT, ""), ACKS_AT_ONCE)
        if body.count(_packed(_ANY)) != speaker.vertices:
            raise RuntimeError("acknowledgements are not encoded as they are counted here")
        return body

    def close(self, client: RestClient) -> None:
        self._ending.set()
        client.cancel(self.job_id)
        for thread in self._threads:
            thread.join(30)
        for speaker in self._speakers:
            speaker.close()


def measure_load(load: Load, seconds: float) -> Row:
    """Checkpoints of all jobs in `seconds`, and the memory of the sidecar at a third of the time and at its end."""
    cores = sorted(os.sched_getaffinity(0))
    with serving() as sidecar, _pinned(sidecar, cores):
        client = RestClient(sidecar.url, sidecar.token)
        jobs = [SpokenJob(sidecar, client, _graph(load, number), load) for number in range(load.jobs)]
        try:
            _await_running(client, jobs)
            began_ms, cpu = time.time() * 1000, sidecar.cpu_seconds()
            time.sleep(seconds / 3)
            rss_early = sidecar.process.memory_info().rss
            time.sleep(seconds * 2 / 3)
            rss_late = sidecar.process.memory_info().rss
            cpu, ended_ms = sidecar.cpu_seconds() - cpu, time.time() * 1000
            completed, durations = _completed(client, jobs, began_ms, ended_ms)
            raw = _storage_cpu_s(sidecar.state, cores[:1]) * load.jobs * 1000 / INTERVAL_MS
        finally:
            for job in jobs:
                job.close(client)
            client.close()
    expected = int(load.jobs * (ended_ms - began_ms) / INTERVAL_MS)
    row = _judged(load, completed / expected, durations, (rss_early >> 20, rss_late >> 20), cpu / seconds)
    return {**row, "storage_cores": round(raw, 2)}


def _storage_cpu_s(state: Path, cores: list[int]) -> float:
    """What the file operations of one checkpoint take of a core by themselves, beside a sidecar that works: claim and metadata of
    its size are written, those of the one before deleted."""
    size = max((path.stat().st_size for path in state.glob("*/chk-*/_metadata")), default=0)
    paths, data = JobPaths("f" * 32), bytes(size)
    others = os.sched_getaffinity(0)
    os.sched_setaffinity(threading.get_native_id(), cores)
    try:
        with tempfile.TemporaryDirectory(dir=state.parent) as folder:
            storage = open_storage(folder)
            began = time.thread_time()
            for number in range(1, RAW_CHECKPOINTS + 1):
                storage.execute(PutIfAbsent(paths.claim(number), data[:200]))
                storage.execute(PutIfAbsent(paths.decision(number), data))
                storage.execute(DeleteFile(paths.claim(number - 1)))
                storage.execute(DeleteFolder(paths.checkpoint(number - 1)))
            return (time.thread_time() - began) / RAW_CHECKPOINTS
    finally:
        os.sched_setaffinity(threading.get_native_id(), others)


def _graph(load: Load, number: int) -> JobGraph:
    graph = make_graph(load.workers, load.vertices)
    config = msgspec.structs.replace(graph.config, checkpoint_interval_ms=INTERVAL_MS)
    return msgspec.structs.replace(graph, name=f"{load.name}-{number}", config=config)


@contextlib.contextmanager
def _pinned(sidecar: Sidecar, cores: list[int]) -> Iterator[None]:
    """The sidecar on the first core, and this process on the others, if there are any."""
    for thread in os.listdir(f"/proc/{sidecar.process.pid}/task"):
        os.sched_setaffinity(int(thread), cores[:1])
    os.sched_setaffinity(0, cores[1:] or cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _await_running(client: RestClient, jobs: list[SpokenJob]) -> None:
    deadline = time.monotonic() + 120
    while any(job["state"] != "RUNNING" for job in client.jobs()) or len(client.jobs()) < len(jobs):
        if time.monotonic() > deadline:
            raise TimeoutError("the jobs do not run")
        time.sleep(0.2)


def _completed(client: RestClient, jobs: list[SpokenJob], began_ms: float, ended_ms: float) -> tuple[int, list[float]]:
    """How many checkpoints completed that were triggered between two times, and how long each took. Triggers count: those that are
    due in this time are as many as are expected, while an end may fall behind it though nothing was late."""
    time.sleep(6)  # They end, and the history is written behind, every five seconds.
    durations = []
    for job in jobs:
        after, more = "", True
        while more:
            page = client.history(job.job_id, after=after, kinds=("checkpoint",), limit=1_000)
            after, more = page["next"], page["more"]
            ended = [record["facts"] for record in page["records"] if record["facts"]["status"] == "COMPLETED"]
            durations += [float(each["duration_ms"]) for each in ended if began_ms <= each["triggered_ms"] <= ended_ms]
    return len(durations), durations


def _judged(load: Load, share: float, durations: list[float], rss_mib: tuple[int, int], cores: float) -> Row:
    p99 = statistics.quantiles(durations, n=100)[98] if len(durations) > 1 else float("inf")
    met = share >= load.completed_min and p99 <= load.p99_ms_max and max(rss_mib) <= load.rss_mib_max
    return {
        "load": load.name,
        "completed_of_expected": round(share, 3),
        "p50_ms": round(statistics.median(durations), 1) if durations else None,
        "p99_ms": round(p99, 1),
        "p99_ms_max": load.p99_ms_max,
        "rss_mib": f"{rss_mib[0]} -> {rss_mib[1]}",
        "rss_mib_max": load.rss_mib_max,
        "sidecar_cores": round(cores, 2),
        "met": met,
    }


class Dashboard(threading.Thread):
    """Somebody who looks at a job: all that pages show of it every two seconds, with what was seen last as `If-None-Match`.

    Bytes on a kept connection and no HTTP library, which takes three times as much of the core that it shares with whoever
    acknowledges. Answers are read whole; a status but 200 and 304, of one of the paths, too, a 200 without a tag or
    a body that is no JSON of the length that its head tells ends the dashboard."""

    def __init__(self, url: str, token: str, job_id: str) -> None:
        super().__init__(daemon=True)
        host, port = url.removeprefix("http://").split(":")
        self._address = (host, int(port))
        fields = f"Host: {host}:{port}\r\nAccept-Encoding: identity\r\nAuthorization: Bearer {token}\r\nIf-None-Match: "
        query = urllib.parse.urlencode([("path", f"/v1/jobs/{job_id}{path}") for path in LOOKS_AT])
        self._head = f"GET /v1/views?{query} HTTP/1.1\r\n{fields}".encode()
        self.looks = 0

    def run(self) -> None:
        with socket.create_connection(self._address, timeout=60) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            seen, began = b'"none"', time.monotonic()
            while True:
                self._await_turn(began)
                connection.sendall(self._head + seen + b"\r\n\r\n")
                seen = _read_answer(connection)
                self.looks += 1

    def _await_turn(self, began: float) -> None:
        """Sleep until the next of its times. Behind a pause of the process the one that was missed is left out: else all dashboards
        would look at once."""
        late = LOOK_S
        while late > LOOK_S / 10:
            due = LOOK_S - (time.monotonic() - began) % LOOK_S
            asleep = time.monotonic()
            time.sleep(due)
            late = time.monotonic() - asleep - due


def _read_answer(connection: socket.socket) -> bytes:
    """Its ETag. Raises RuntimeError unless it is a whole answer with one."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += _receive(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    if status.split(b" ", 2)[1] == b"304" and not body:
        return headers[b"etag"]
    size = int(headers.get(b"content-length", b"-1"))
    while len(body) < size:
        body += _receive(connection)
    if status.split(b" ", 2)[1] != b"200" or len(body) != size or b"etag" not in headers:
        raise RuntimeError(f"{head!r} {body[:200]!r}")
    if any(each.status != 200 for each in msgspec.json.decode(body, type=_Answers).answers):
        raise RuntimeError(f"{body[:2_000]!r}")
    return headers[b"etag"]


def _receive(connection: socket.socket) -> bytes:
    piece = connection.recv(1 << 18)
    if not piece:
        raise RuntimeError("the sidecar closed the connection")
    return piece


def look_on(url: str, token: str, job_id: str, count: int) -> None:
    """Dashboards in this process until standard input ends; then how often they looked, and the seconds of CPU time that this took
    here. Raises RuntimeError if one ended early."""
    dashboards = [Dashboard(url, token, job_id) for _ in range(count)]
    for number, each in enumerate(dashboards):
        each.start()
        time.sleep(LOOK_S / count if number + 1 < count else 0)
    cpu, looks = time.process_time(), sum(each.looks for each in dashboards)
    print("looking", flush=True)
    sys.stdin.read()
    if not all(each.is_alive() for each in dashboards):
        raise RuntimeError("a dashboard ended early: its error is above")
    print(sum(each.looks for each in dashboards) - looks, time.process_time() - cpu, flush=True)


class Viewers:
    """Dashboards in a process of their own: what a browser takes is not the sidecar's."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.looks = 0
        self.cpu_s = 0.0
        """Of their process. Both are told at the end."""

    def look_away(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def look_again(self) -> None:
        """They go on, each at its own time."""
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        text, _ = self._process.communicate(timeout=30)
        looks, cpu_s = text.split()
        self.looks, self.cpu_s = int(looks), float(cpu_s)


@contextlib.contextmanager
def looking(sidecar: Sidecar, job_id: str, count: int) -> Iterator[Viewers]:
    """People who look on, until the block ends."""
    command = [sys.executable, "-m", "benchmarks.service", "--look", sidecar.url, "--job", job_id, "--count", str(count)]
    environment = {**os.environ, "HOLDFAST_TOKEN": sidecar.token}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        viewers = Viewers(process)
        yield viewers
        viewers.look_again()
        viewers.end()
    finally:
        process.kill()
        process.communicate()


def measure_dashboards(seconds: float, rounds: int) -> Row:
    """What 20 dashboards cost in acknowledgements a second, of the job that they look at: the median of `rounds` pairs of
    stretches, with them and without, one right behind the other, since a machine's speed changes by more than they cost. Before,
    the share of a core that the sidecar takes for the dashboards alone, which wake it from its sleep each time: beside
    acknowledgements a look costs less.

    What the viewers' own process takes of a core is told beside it (`viewers_cores`): it may share one with whoever acknowledges,
    and that is no cost of the sidecar."""
    alone: list[float] = []
    beside: list[float] = []
    with serving() as sidecar, speaking(sidecar, 4) as (_, watched, _speakers):
        idle = _cores(sidecar, seconds)
        with looking(sidecar, watched, DASHBOARDS) as watching:
            cores = _cores(sidecar, 2 * seconds) - idle
        with acknowledging(sidecar, 4, ACKS_AT_ONCE, ACKED_INTERVAL_MS) as load, looking(sidecar, watched, DASHBOARDS) as counted:
            load.run(seconds)
            for number in range(rounds):
                for looks_on in (number % 2 == 0, number % 2 == 1):
                    (counted.look_again if looks_on else counted.look_away)()
                    taken, clock = load.run(seconds)
                    (beside if looks_on else alone).append(taken / clock)
    costs = [1 - with_them / without for with_them, without in zip(beside, alone, strict=True)]
    cost = statistics.median(costs)
    low, _, high = statistics.quantiles(costs, n=4)
    facts = {
        "acks_per_second": round(statistics.median(alone)),
        "with_dashboards": round(statistics.median(beside)),
        "looks": counted.looks,
        "viewers_cores": round(watching.cpu_s / (2 * seconds), 3),
        "sidecar_cores": round(cores, 3),
    }
    verdict = {"cost": round(cost, 3), "quartiles": f"{low:.3f} to {high:.3f}", "cost_max": 0.05, "met": cost <= 0.05}
    return {"load": f"{DASHBOARDS} dashboards", **facts, **verdict}


def _cores(sidecar: Sidecar, seconds: float) -> float:
    """Share of a core that the sidecar takes for so long."""
    cpu, began = sidecar.cpu_seconds(), time.monotonic()
    time.sleep(seconds)
    return (sidecar.cpu_seconds() - cpu) / (time.monotonic() - began)


def measure(*, quick: bool = False) -> list[Row]:
    seconds = 15.0 if quick else 90.0
    return [*(measure_load(load, seconds) for load in LOADS), measure_dashboards(*((1.0, 2) if quick else (2.0, 20)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--look")
    parser.add_argument("--job")
    parser.add_argument("--count", type=int, default=DASHBOARDS)
    arguments = parser.parse_args()
    if arguments.look:
        look_on(arguments.look, os.environ["HOLDFAST_TOKEN"], arguments.job, arguments.count)
        return
    for row in measure(quick=arguments.quick):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
