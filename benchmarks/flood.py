"""Acknowledgements, heartbeats and `/healthz` of a real sidecar while another process floods it from the workers' own address.

A job whose workers process nothing (the real session and gateway, without Spark) checkpoints ten times a second, so that a
percentile is one of hundreds of acknowledgements: first undisturbed, then
while thousands of silent connections are held open, each replaced as soon as it is closed, and four bodies of 60 MiB at a time are
posted with the token; then while hundreds of connections send their heads a byte at a time, and viewers ask as fast as they can.
The lease is five seconds: one that runs out restarts the job. In clear text and with TLS; the aim beside slow heads and viewers is
an acknowledgement in 50 ms (p99), in each case beside the same job undisturbed, on the same machine a moment before.

A row is printed as soon as its phase is measured: 21 s each, 6 s with --quick, more on a machine with other work. Each step
has a deadline, and what misses it, or dies, is named: ProcessFailedError, TimeoutError.

    python -m benchmarks.flood [--quick] [--tls] [--root <checkout of the sidecar>]"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import math
import os
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import psutil
import urllib3

from benchmarks.acks import ROOT, Row, Sidecar, make_ack, make_graph, serving
from benchmarks.harness import ProcessFailedError, died, first_line, last_words, wait_until
from holdfast.api.client import RestClient
from holdfast.barriers import codec
from holdfast.barriers.jobgraph import Submission
from holdfast.barriers.messages import (
    AckBatch,
    AcknowledgeCheckpoint,
    Deploy,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
    WorkerCommand,
)
from holdfast.operators.task.pool import SystemClock
from holdfast.operators.worker.gateway import CoordinatorAddress, Gateway
from holdfast.operators.worker.session_events import Action, Event, PostAcks, PostHeartbeat, WorkerIdentity
from holdfast.operators.worker.trust import client_context
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.handles import InlineHandle, KeyedStateHandle, KeyGroupRange, OperatorSubtaskState

WORKERS, VERTICES = 4, 8
CONNECTIONS = 5_000
BODIES = 4
BODY_BYTES = 60 << 20
HEARTBEAT_MS, LEASE_MS = 500, 5_000
INTERVAL_MS = 100
AIM_MS = 50.0
"""Of an acknowledgement beside slow heads and viewers, p99."""
HEAD_S = 5.0
"""Longest that a head may take."""
BEGIN_SECONDS_MAX = 60.0
"""Until a flood has begun: it makes its bodies first, and opens its connections."""
TELL_SECONDS_MAX = 30.0
"""Until it has told how it fared."""
PROBE_S = 0.05
OPEN_SECONDS_MAX = 20.0
"""Of one slow connection."""
OPENED_AT_ONCE, OPENED_EVERY_S = 20, 0.01
"""2,000 a second: more would only measure how the system shares two cores with the flood."""


class TimedGateway(Gateway):
    """Records the duration of each request of the session."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.took_ms: dict[str, list[float]] = {"ack": [], "heartbeat": []}

    def _perform(self, action: Action) -> Event | None:
        began = time.perf_counter()
        answer = super()._perform(action)
        took_ms = (time.perf_counter() - began) * 1000
        if isinstance(action, PostAcks):
            self.took_ms["ack"].append(took_ms)
        elif isinstance(action, PostHeartbeat):
            self.took_ms["heartbeat"].append(took_ms)
        return answer


class SpeakingWorker:
    """Processes nothing: all subtasks are RUNNING, and triggers acknowledged, at once."""

    def __init__(self, sidecar: Sidecar, job_id: str, slot: int, submission: int, nonce: str, vertices: int) -> None:
        self._slot, self._vertices = slot, vertices
        identity = WorkerIdentity(job_id, slot, submission, 1, f"n{slot}", os.getpid(), "here", f"tcp://h:{slot + 1}", nonce)
        self.gateway = TimedGateway(
            identity,
            CoordinatorAddress(sidecar.url, sidecar.token, authorities=sidecar.authorities),
            SystemClock(),
            deliver=self._deliver,
            metrics=lambda attempt: (),
        )

    def _deliver(self, command: WorkerCommand) -> None:
        if isinstance(command, Deploy):
            for number in range(self._vertices):
                self.gateway.report(SubtaskStatus(command.deployment.attempt, f"{number:032x}", self._slot, TaskState.RUNNING))
        elif isinstance(command, TriggerCheckpoint):
            for number in range(self._vertices):
                self.gateway.report(make_ack(command, number, self._slot, WORKERS))


@contextmanager
def checkpointing(sidecar: Sidecar) -> Iterator[tuple[RestClient, str, list[SpeakingWorker]]]:
    """A job that runs and checkpoints every INTERVAL_MS."""
    graph = make_graph(WORKERS, VERTICES)
    pace = {"checkpoint_interval_ms": INTERVAL_MS, "heartbeat_interval_ms": HEARTBEAT_MS, "heartbeat_timeout_ms": LEASE_MS}
    config = msgspec.structs.replace(graph.config, **pace)
    client = RestClient(sidecar.url, sidecar.token, authorities=sidecar.authorities, reconnect_timeout_s=0)
    accepted = client.submit(Submission(msgspec.structs.replace(graph, config=config), fresh=True))
    facts = (accepted.submission, accepted.directory_nonce, len(graph.vertices))
    workers = [SpeakingWorker(sidecar, accepted.job_id, slot, *facts) for slot in range(WORKERS)]
    try:
        for worker in workers:
            worker.gateway.start()
        wait_until("a checkpoint", lambda: client.checkpoints(accepted.job_id)["counts"]["completed"], 60, every_s=0.05)
        yield client, accepted.job_id, workers
    finally:
        for worker in workers:
            worker.gateway.close()
        client.close()


class Probe:
    """Requests `/healthz` on a new connection each time, as monitoring would."""

    def __init__(self, url: str, authorities: str | None) -> None:
        self.took_ms: list[float] = []
        self.failed = 0
        self._url = url
        self._context = client_context(authorities)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stopping.wait(PROBE_S):
            began = time.perf_counter()
            try:
                with urllib3.PoolManager(ssl_context=self._context) as http:
                    answer = http.request("GET", f"{self._url}/healthz", timeout=10, retries=False)
                self.failed += answer.status != 200
            except urllib3.exceptions.HTTPError:
                self.failed += 1
            self.took_ms.append((time.perf_counter() - began) * 1000)

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values) or [-1.0]
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


def _watch(
    name: str, seconds: float, sidecar: Sidecar, client: RestClient, job_id: str, workers: list[SpeakingWorker], **facts: Any
) -> Row:
    """One phase: its requests and their durations."""
    if not sidecar.process.is_running():
        raise ProcessFailedError(f"the sidecar died before the phase {name!r}")
    for worker in workers:
        worker.gateway.took_ms = {"ack": [], "heartbeat": []}
    before, cpu = _shown(client, job_id), sidecar.cpu_seconds()
    with Probe(sidecar.url, sidecar.authorities) as probe:
        time.sleep(seconds)
    try:
        cpu = sidecar.cpu_seconds() - cpu
    except psutil.Error as error:
        raise ProcessFailedError(f"the sidecar died in the phase {name!r}") from error
    after = _shown(client, job_id)
    took = {kind: [each for worker in workers for each in worker.gateway.took_ms[kind]] for kind in ("ack", "heartbeat")}
    return {
        "workload": "flood",
        "phase": name,
        **facts,
        "checkpoints": f"{after['completed'] - before['completed']}/{int(seconds * 1_000 / INTERVAL_MS)}",
        "checkpoints_failed": after["failed"] - before["failed"],
        "acks": len(took["ack"]),
        "ack_ms_p50": _percentile(took["ack"], 0.5),
        "ack_ms_p99": _percentile(took["ack"], 0.99),
        "ack_ms_max": _percentile(took["ack"], 1.0),
        "heartbeat_ms_max": _percentile(took["heartbeat"], 1.0),
        "leases_lost": after["restarts"] - before["restarts"],
        "healthz_ms_p50": _percentile(probe.took_ms, 0.5),
        "healthz_ms_p99": _percentile(probe.took_ms, 0.99),
        "healthz_ms_max": _percentile(probe.took_ms, 1.0),
        "healthz_failed": f"{probe.failed}/{len(probe.took_ms)}",
        "sidecar_cpu": round(cpu / seconds, 2),
        "sidecar_rss_mb": sidecar.process.memory_info().rss >> 20,
    }


def _shown(client: RestClient, job_id: str) -> dict[str, Any]:
    """Counts; not a number where the service does not answer."""
    try:
        counts = client.checkpoints(job_id)["counts"]
        return {"completed": counts["completed"], "failed": counts["failed"], "restarts": client.workers(job_id)["restarts"]}
    except HoldfastError:
        return dict.fromkeys(("completed", "failed", "restarts"), math.nan)


class Phase(NamedTuple):
    """What a flood is made of; nothing: peace."""

    name: str
    connections: int = 0
    """Silent ones."""
    bodies: int = 0
    """Large ones, at a time."""
    slow: int = 0
    """Connections that send their heads, or their handshakes, a byte at a time."""
    viewers: int = 0
    """Viewers of one token who ask again as soon as they are answered."""


@contextmanager
def flooding(sidecar: Sidecar, job_id: str, phase: Phase) -> Iterator[Row]:
    """The flood, from a process of its own, once all of it has begun. What became of it is in the row, once it has ended.

    Raises ProcessFailedError if it does not begin or end in time, or died meanwhile: what was measured had no flood beside it."""
    found: Row = {}
    client = RestClient(sidecar.url, sidecar.token, authorities=sidecar.authorities, reconnect_timeout_s=0)
    viewer = str(client.issue_token("viewer", name="flood")["token"])
    client.close()
    what = f"the flood of the phase {phase.name!r}"
    command = [sys.executable, "-m", "benchmarks.flood", "--attack", sidecar.url, "--job", job_id, "--phase", json.dumps(phase)]
    secrets = {"HOLDFAST_TOKEN": sidecar.token, "HOLDFAST_VIEWER": viewer, "HOLDFAST_AUTHORITIES": sidecar.authorities or ""}
    with tempfile.NamedTemporaryFile(prefix="holdfast-flood-") as told:
        errors = Path(told.name)
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **secrets}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told
        )
        try:
            first_line(process, what, BEGIN_SECONDS_MAX, errors)
            yield found
            if process.poll() is not None:
                raise died(process, what, errors)
            found.update(json.loads(last_words(process, what, TELL_SECONDS_MAX, errors)))
        finally:
            process.kill()
            process.communicate()


PHASES = (
    Phase("peace"),
    Phase("connections", CONNECTIONS),
    Phase("bodies", bodies=BODIES),
    Phase("both", CONNECTIONS, BODIES),
    Phase("slow", slow=500),
    Phase("viewers", viewers=20),
    Phase("slow and viewers", slow=500, viewers=20),
)


def measure(
    *,
    quick: bool = False,
    root: Path = ROOT,
    phases: tuple[Phase, ...] = PHASES,
    seconds: float | None = None,
    tls: bool = False,
) -> Iterator[Row]:
    """Phases: undisturbed, each part of the flood, several. A row as soon as it is measured.

    Raises ProcessFailedError, TimeoutError for a step that failed or was not done in time."""
    seconds = seconds or (5.0 if quick else 20.0)
    with serving(root, tls=tls) as sidecar, checkpointing(sidecar) as (client, job_id, workers):
        for phase in phases:
            ended: Row = {}
            with contextlib.ExitStack() as attack:
                if any(phase[1:]):
                    ended = attack.enter_context(flooding(sidecar, job_id, phase))
                    time.sleep(1.0)
                facts = {"tls": tls, **dict(zip(Phase._fields[1:], phase[1:], strict=True))}
                row = _watch(phase.name, seconds, sidecar, client, job_id, workers, **facts)
            row.update(ended)
            if phase.slow or phase.viewers:
                row.update(aim_at_most_ms=AIM_MS, meets=row["ack_ms_p99"] <= AIM_MS)
            yield row


# ------------------------------------------------------------------------------------------------------------- attack


def attack(url: str, token: str, job_id: str, phase: Phase) -> None:
    """Hold silent and slow connections, post bodies and ask as viewers, until standard input ends; then tell how they fared."""
    threading.excepthook = _die
    outcome = Outcome()
    threading.Thread(target=outcome.tell_at_the_end, daemon=True).start()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    target = (address.hostname, address.port)
    begun = threading.Barrier(phase.bodies + 1)
    for number in range(phase.bodies):
        body = large_body(number)
        threading.Thread(target=_post_for_ever, args=(url, token, job_id, body, begun), daemon=True).start()
    for _ in range(phase.viewers):
        threading.Thread(target=_ask_for_ever, args=(url, job_id, outcome), daemon=True).start()
    begun.wait()
    if phase.slow:
        word = b"\x16\x03\x01\x02\x00" if address.scheme == "https" else b"GET / HTTP/1.1\r\nX-Padding: "
        threading.Thread(target=_drip_for_ever, args=(target, phase.slow, word, outcome), daemon=True).start()
    _hold_for_ever(target, phase.connections)


def _die(failed: threading.ExceptHookArgs) -> None:
    """A flood of which a part is missing is none: the process ends with it."""
    print(f"{type(failed.exc_value).__name__}: {failed.exc_value}", file=sys.stderr, flush=True)
    os._exit(1)


class Outcome:
    """What the attacker has seen."""

    def __init__(self) -> None:
        self.lives_s: list[float] = []
        """How long each slow connection was open that was closed."""
        self.opened_s: dict[socket.socket, float] = {}
        """Slow connections that are open, each with when it was opened."""
        self.answers: Counter[int] = Counter()

    def tell_at_the_end(self) -> None:
        sys.stdin.read()
        open_s = max((time.monotonic() - began for began in list(self.opened_s.values())), default=0.0)
        row = {
            "slow_closed": len(self.lives_s),
            "slow_open_s_max": round(max([*self.lives_s, open_s]), 2),
            "viewers_answered": self.answers[200] + self.answers[304],
            "viewers_refused": self.answers[429],
            "viewers_failed": self.answers.total() - self.answers[200] - self.answers[304] - self.answers[429],
        }
        print(json.dumps(row), flush=True)
        os._exit(0)


def large_body(number: int) -> bytes:
    """A body of 60 MiB: one acknowledgement with all the state, or very many without, in turn."""
    if number % 2:
        one = codec.encode(AcknowledgeCheckpoint(1, 1, "v", 0)) + b","
        return b'{"epoch":1,"slot":0,"session":"s","items":[' + (one * (BODY_BYTES // len(one)))[:-1] + b"]}"
    state = base64.b64decode(b"x" * (BODY_BYTES - 1_000 & ~3))
    keyed = KeyedStateHandle(KeyGroupRange(0, 128), "arrow", (), (InlineHandle(state),))
    ack = AcknowledgeCheckpoint(1, 1, "v", 0, {"u": OperatorSubtaskState((keyed,))})
    return codec.encode(AckBatch(1, 0, "s", (ack,)))


def _post_for_ever(url: str, token: str, job_id: str, body: bytes, begun: threading.Barrier) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    begun.wait()
    while True:
        with contextlib.suppress(urllib3.exceptions.HTTPError, OSError):
            urllib3.request("POST", f"{url}/v1/jobs/{job_id}/workers/0/acks", body=body, headers=headers, timeout=60, retries=False)


def _ask_for_ever(url: str, job_id: str, outcome: Outcome) -> None:
    """One viewer, on one connection."""
    headers = {"Authorization": f"Bearer {os.environ['HOLDFAST_VIEWER']}"}
    context = client_context(os.environ["HOLDFAST_AUTHORITIES"] or None)
    http = urllib3.PoolManager(headers=headers, ssl_context=context, timeout=60, retries=False)
    while True:
        try:
            outcome.answers[http.request("GET", f"{url}/v1/jobs/{job_id}/checkpoints").status] += 1
        except (urllib3.exceptions.HTTPError, OSError):
            outcome.answers[0] += 1


def _drip_for_ever(target: tuple[str, int], count: int, word: bytes, outcome: Outcome) -> None:
    """Connections that send `word`, then a byte every half second, and are opened again when they are closed."""
    opened = outcome.opened_s
    while True:
        while len(opened) < count:
            slow = socket.create_connection(target, timeout=OPEN_SECONDS_MAX)
            slow.setblocking(False)
            with contextlib.suppress(OSError):
                slow.send(word)
            opened[slow] = time.monotonic()
        time.sleep(0.5)
        for slow in list(opened):
            try:
                slow.send(b"x")
                if not slow.recv(1):
                    raise ConnectionResetError
            except BlockingIOError:
                continue
            except OSError:
                slow.close()
                outcome.lives_s.append(time.monotonic() - opened.pop(slow))


def _hold_for_ever(target: tuple[str, int], connections: int) -> None:
    """Silent connections; each that the server closes is opened again."""
    selector = selectors.DefaultSelector()
    opened = ever = 0
    said = False
    while True:
        for _ in range(min(connections - opened, OPENED_AT_ONCE)):
            silent = socket.socket()
            silent.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                silent.connect(target)
            selector.register(silent, selectors.EVENT_READ)
            opened += 1
            ever += 1
        if not said and ever >= connections:
            print("begun", flush=True)
            said = True
        for key, _ in selector.select(timeout=0):
            silent = key.fileobj  # type: ignore[assignment]
            selector.unregister(silent)
            silent.close()
            opened -= 1
        time.sleep(OPENED_EVERY_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--attack")
    parser.add_argument("--job")
    parser.add_argument("--phase", default="[]")
    parser.add_argument("--tls", action="store_true")
    arguments = parser.parse_args()
    if arguments.attack:
        attack(arguments.attack, os.environ["HOLDFAST_TOKEN"], arguments.job, Phase(*json.loads(arguments.phase)))
        return
    for row in measure(quick=arguments.quick, root=arguments.root, tls=arguments.tls):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
