"""Another user of the machine at the data ports of a running job: it gets nothing done there, and the job does not notice.

The intruder is a process of another uid, so that this needs root; it has what any user of the machine can learn: the ports and
the sockets' paths are in /proc/net."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.test_two_processes import Cluster, committed, counting_plan, eventually, expected

NOBODY = 65_534

INTRUDER = """
import contextlib, json, os, pickle, socket, sys, time
import msgspec, zmq
from zmq.utils.monitor import parse_monitor_message

uid, marker, ports, sockets = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
os.setgroups([]); os.setgid(uid); os.setuid(uid)

class Bomb:
    def __reduce__(self):
        return os.mkdir, (marker,)

def frames():
    yield [b"hello", b"world"]
    for version in (1, 2):
        for attempt in (1, 2, 10**6):
            for edge, producer, consumer in ((0, 0, 1), (0, 1, 0), (1, 0, 1), (1, 1, 0)):
                header = [version, attempt, edge, producer, consumer, 1, 3, 64, False, False]
                yield [msgspec.msgpack.encode(header), pickle.dumps([Bomb()])]

def plain(push):
    push.plain_username, push.plain_password = b"0", b"secret"

def curve(push):
    push.curve_publickey, push.curve_secretkey = zmq.curve_keypair()
    push.curve_serverkey = zmq.curve_keypair()[0]

def attack(address, disguise):
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.RECONNECT_IVL, -1)
    if disguise:
        disguise(push)
    monitor = push.get_monitor_socket()
    push.connect(address)
    with contextlib.suppress(zmq.Again):  # it is turned away before it has sent all
        for frame in frames():
            push.send_multipart(frame, flags=zmq.NOBLOCK)
    ends = {
        zmq.EVENT_HANDSHAKE_SUCCEEDED: "let in",
        zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "refused",
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "refused",
        zmq.EVENT_DISCONNECTED: "refused",
        zmq.EVENT_CONNECT_RETRIED: "refused",
        zmq.EVENT_CLOSED: "refused",
    }
    outcome, deadline = "nothing happened", time.monotonic() + 20
    while outcome == "nothing happened" and time.monotonic() < deadline:
        if monitor.poll(100):
            outcome = ends.get(parse_monitor_message(monitor.recv_multipart())["event"], outcome)
    kept.append((push, monitor))
    return outcome

context, kept = zmq.Context(), []
told = {"uid": os.geteuid(), "ports": [attack(port, how) for port in ports for how in (None, plain, curve)], "sockets": []}
for path in sockets:
    for what in (lambda: os.listdir(os.path.dirname(path)), lambda: socket.socket(socket.AF_UNIX).connect(path)):
        try:
            what()
            told["sockets"].append("reached")
        except OSError as error:
            told["sockets"].append(type(error).__name__)
print(json.dumps(told), flush=True)
os._exit(0)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_runs_no_code_in_a_worker_and_fails_no_job(cluster: Cluster, tmp_path: Path) -> None:
    rows = 3_000
    job = cluster.submit(counting_plan(rows, 4.0, tmp_path / "out", "memory")).job_id
    eventually(lambda: cluster.completed(job) >= 1, "a checkpoint")
    ports = [worker["data_address"] for worker in cluster.client.workers(job)["workers"]]
    assert cluster.slots is not None
    sockets = {
        connection.laddr
        for slot in (0, 1)
        for connection in psutil.Process(cluster.slots.pid(slot)).net_connections("unix")
        if isinstance(connection.laddr, str) and connection.laddr.startswith("/")
    }
    assert len(sockets) == 2
    marker = tmp_path / "owned"
    arguments = [str(NOBODY), str(marker), json.dumps(ports), json.dumps(sorted(sockets))]
    done = subprocess.run(
        [sys.executable, "-c", INTRUDER, *arguments], check=False, capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == {"uid": NOBODY, "ports": ["refused"] * 6, "sockets": ["PermissionError"] * 4}
    cluster.wait_finished(job)
    assert not marker.exists()
    assert committed(tmp_path / "out") == expected(rows)
    workers = cluster.client.workers(job)
    assert (workers["attempt"], workers["restarts"], workers["last_failure"]) == (1, 0, None)
