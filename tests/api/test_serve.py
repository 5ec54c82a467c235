"""`holdfast serve` as a real process: start, a second one refused, kill -9 and restart, takeover, orderly stop."""

from __future__ import annotations

import contextlib
import json
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.api.client import RestClient
from holdfast.barriers.jobgraph import Submission
from holdfast.barriers.run_record import read_run_record
from tests.api.fakes import make_graph

pytestmark = pytest.mark.slow

ROOT = Path(hf.__file__).parent.parent
START_S = 30.0


class Process:
    """A `holdfast serve --json`; started when it printed where it is."""

    def __init__(self, state_dir: Path | str, *flags: str) -> None:
        command = [sys.executable, "-m", "holdfast", "serve", "--json", "--state-dir", str(state_dir), *flags]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        timer.cancel()
        self.facts: dict[str, Any] = json.loads(line) if line else {}

    @property
    def client(self) -> RestClient:
        return RestClient(self.facts["url"], Path(self.facts["token_file"]).read_text(), reconnect_timeout_s=START_S)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit code and stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=START_S)
        return self.process.returncode, errors


@pytest.fixture
def processes() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def serve(processes: contextlib.ExitStack, state_dir: Path, *flags: str) -> Process:
    started = Process(state_dir, *flags)
    processes.callback(started.end, signal.SIGKILL)
    return started


def test_a_life(processes: contextlib.ExitStack, tmp_path: Path) -> None:
    first = serve(processes, tmp_path)
    assert first.facts["pid"] == first.process.pid
    assert stat.S_IMODE(Path(first.facts["token_file"]).stat().st_mode) == 0o600
    token = Path(first.facts["token_file"]).read_text()
    job_id = first.client.submit(Submission(make_graph())).job_id

    second = serve(processes, tmp_path)
    code, errors = second.end()
    assert (code, second.facts) == (2, {})
    assert f"another coordinator runs on {tmp_path} (pid {first.process.pid}" in errors
    assert "--takeover" in errors
    assert "Traceback" not in errors

    first.end(signal.SIGKILL)
    again = serve(processes, tmp_path)
    assert again.facts["url"] == first.facts["url"]
    assert [job["jid"] for job in again.client.jobs()] == [job_id]

    taker = serve(processes, tmp_path, "--takeover")
    assert taker.facts["url"] != again.facts["url"]
    assert [job["jid"] for job in taker.client.jobs()] == [job_id]
    record = read_run_record(tmp_path)
    assert record is not None
    assert record.pid == taker.process.pid

    code, errors = taker.end(signal.SIGTERM)
    assert code == 0, errors
    assert token not in errors
    code, errors = again.end(signal.SIGINT)
    assert code == 0, errors


def test_it_refuses_to_be_open_to_all(tmp_path: Path) -> None:
    refused = Process(tmp_path, "--host", "0.0.0.0", "--no-token")
    code, errors = refused.end()
    assert (code, errors.count("\n")) == (2, 1)
    assert "without a token" in errors
