"""No secret leaves the service: secrets drawn for this test are sought in all that a real coordinator says, shows and stores."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import urllib3
from typer.testing import CliRunner

import holdfast as hf
from holdfast.api.cli.main import app
from holdfast.api.client import RestClient
from holdfast.barriers.jobgraph import Submission
from holdfast.barriers.run_record import read_run_record
from holdfast.operators.worker.trust import client_context, read_authorities
from holdfast.statebackends.layout import AUTHORITY_FILE, TOKEN_FILE, WORKER_KEY_FILE
from tests.api.fakes import make_graph

pytestmark = pytest.mark.slow

ROOT = Path(hf.__file__).parent.parent
START_S = 30.0
ENDLESS = ("/commands", "/events")
"""Ends of paths whose answers have no end."""
HEX = {"jobid": "", "applicationid": "", "vertexid": "a" * 32, "triggerid": "c" * 32, "checkpointid": "7", "slot": "0"}


@dataclass
class Canaries:
    """Secrets by what they are."""

    secrets: dict[str, str] = field(default_factory=dict)

    def found_in(self, content: bytes, *, but: frozenset[str] = frozenset()) -> list[str]:
        """Names of the secrets in a text: as they are, and as Basic sends them."""
        return [
            name
            for name, secret in self.secrets.items()
            if name not in but and (secret.encode() in content or base64.b64encode(f":{secret}".encode())[2:-3] in content)
        ]


class Service:
    """`holdfast serve` with TLS at its most talkative."""

    def __init__(self, folder: Path, canaries: Canaries) -> None:
        self.folder, self.canaries = folder, canaries
        own = secrets.token_urlsafe(32)
        canaries.secrets["own token"] = own
        canaries.secrets["credential of S3"] = secrets.token_urlsafe(24)
        environment = {**os.environ, "HOLDFAST_TOKEN": own, "AWS_SECRET_ACCESS_KEY": canaries.secrets["credential of S3"]}
        command = [sys.executable, "-m", "holdfast", "serve", "--json", "--state-dir", str(folder), "--tls", "auto"]
        command += ["--log-level", "debug"]
        self.errors = folder.parent / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, env=environment)
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        assert self.process.stdout is not None
        self.announced = self.process.stdout.readline()
        timer.cancel()
        record = read_run_record(folder)
        assert record is not None, self.errors.read_text()
        assert record.ca_file is not None
        self.url, self.authorities = record.url, read_authorities(record.ca_file)
        self.http = urllib3.PoolManager(ssl_context=client_context(self.authorities), retries=False, timeout=START_S)
        self.client = RestClient(self.url, own, authorities=self.authorities)

    def said(self) -> bytes:
        """Standard output and error, once it has ended."""
        self.process.send_signal(signal.SIGTERM)
        rest, _ = self.process.communicate(timeout=START_S)
        return self.announced + rest + self.errors.read_bytes()


@pytest.fixture
def canaries() -> Canaries:
    return Canaries()


@pytest.fixture
def service(tmp_path: Path, canaries: Canaries) -> Iterator[Service]:
    (tmp_path / "state").mkdir()
    running = Service(tmp_path / "state", canaries)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()
        running.http.clear()


def draw(service: Service) -> str:
    """Have the service make all the secrets that it makes; returns a job's id."""
    found = service.canaries.secrets
    found["launch key"] = secrets.token_urlsafe(32)
    accepted = service.client.submit(Submission(make_graph(), launch_key=found["launch key"]))
    found["worker's token"] = accepted.worker_token
    for role in ("viewer", "operator", "admin"):
        found[f"{role}'s token"] = str(service.client.issue_token(role, name=role)["token"])
    found["revoked token"] = str(service.client.issue_token("viewer")["token"])
    service.client.revoke_token(found["revoked token"].split("_")[1])
    login = service.http.request("POST", f"{service.url}/ui/login", body=json.dumps({"token": found["viewer's token"]}))
    found["session"] = login.headers["Set-Cookie"].split(";")[0].partition("=")[2]
    found["key of workers' tokens"] = (service.folder / WORKER_KEY_FILE).read_text()
    key = (service.folder / AUTHORITY_FILE).read_text()
    found["key of the authority"] = key.splitlines()[1]
    assert all(len(secret) >= 24 for secret in found.values())
    return accepted.job_id


def answers(service: Service, job_id: str) -> Iterator[tuple[str, urllib3.BaseHTTPResponse]]:
    """Every GET, and requests that go wrong in ways that tempt a service to repeat what it was sent."""
    found, http = service.canaries.secrets, service.http
    own = {"Authorization": f"Bearer {found['own token']}"}
    paths = json.loads(http.request("GET", f"{service.url}/openapi.json").data)["paths"]
    known = {**HEX, "jobid": job_id, "applicationid": job_id}
    for path in (path for path, methods in paths.items() if "get" in methods and not path.endswith(ENDLESS)):
        filled = re.sub(r"{(\w+)}", lambda match: known.get(match[1], "x"), path)
        for name in ("own token", "viewer's token"):
            yield f"GET {filled}", http.request("GET", service.url + filled, headers={"Authorization": f"Bearer {found[name]}"})
    for name, secret in found.items():
        bearer = {"Authorization": f"Bearer {secret}"}
        basic = {"Authorization": "Basic " + base64.b64encode(f":{secret}".encode()).decode()}
        for headers in (bearer, basic, {"Authorization": secret}, {"Cookie": f"holdfast={secret}; x={secret}"}):
            yield name, http.request("POST", f"{service.url}/v1/tokens", body=b"{", headers=headers)
            yield name, http.request("DELETE", f"{service.url}/v1/tokens/{'0' * 16}", headers=headers)
        for body in ({"token": secret[:-1]}, {"token": [secret]}, {"tokens": secret}, {"token": secret * 100}, secret):
            yield name, http.request("POST", f"{service.url}/ui/login", body=json.dumps(body).encode())
    yield "preflight", http.request("POST", f"{service.url}/v1/preflight", body=b"{}", headers=own)


def test_no_secret_is_said_shown_or_stored(service: Service, canaries: Canaries) -> None:
    job_id = draw(service)
    leaks, statuses = [], set[int]()
    for what, answer in answers(service, job_id):
        statuses.add(answer.status)
        told = answer.data + json.dumps(dict(answer.headers)).encode()
        own = frozenset({"session"}) if "Set-Cookie" in answer.headers else frozenset[str]()
        leaks += [f"{name} in the answer to {what}" for name in canaries.found_in(told, but=own)]
    assert {200, 400, 401, 403, 404} <= statuses, "the requests went as far as they were meant to"

    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            leaks += [f"{name} in the command line of {entry.name}" for name in canaries.found_in((entry / "cmdline").read_bytes())]
    leaks += [f"{name} on the output" for name in canaries.found_in(service.said())]

    its_place = {
        TOKEN_FILE: frozenset({"own token"}),
        WORKER_KEY_FILE: frozenset({"key of workers' tokens"}),
        AUTHORITY_FILE: frozenset({"key of the authority"}),
    }
    files = [path for path in service.folder.rglob("*") if path.is_file()]
    assert any("/audit/" in str(path) for path in files), "who was refused is on record"
    for path in files:
        name_in_directory = str(path.relative_to(service.folder))
        but = its_place.get(name_in_directory, frozenset())
        if "/submissions/" in name_in_directory:
            but = frozenset({"launch key"})  # by which the next leader knows the launcher's workers
        leaks += [f"{name} in {name_in_directory}" for name in canaries.found_in(path.read_bytes(), but=but)]
    assert leaks == []


def test_the_command_line_repeats_no_token(canaries: Canaries, tmp_path: Path) -> None:
    canaries.secrets["token"] = secrets.token_urlsafe(32)
    trusted = tmp_path / "ca.pem"
    trusted.write_text("none")
    for arguments in (
        ["jobs", "--url", "http://127.0.0.1:1"],
        ["jobs", "--url", "https://127.0.0.1:1", "--ca", str(trusted)],
        ["jobs", "--url", "ftp://127.0.0.1"],
        ["stop", "x", "--url", "http://127.0.0.1:1"],
        ["serve", "--state-dir", str(tmp_path), "--host", "0.0.0.0", "--tls", "off"],
        ["serve", "--state-dir", str(tmp_path), "--tls-cert", str(trusted), "--tls-key", str(trusted)],
    ):
        result = CliRunner(env={"HOLDFAST_TOKEN": canaries.secrets["token"]}).invoke(app, arguments)
        assert result.exit_code != 0, arguments
        assert canaries.found_in(result.output.encode()) == [], arguments


def test_a_leak_is_found(canaries: Canaries) -> None:
    canaries.secrets["it"] = "s" * 32
    shown: Any = {"x": "a" + "s" * 32}
    assert canaries.found_in(json.dumps(shown).encode()) == ["it"]
    assert canaries.found_in(base64.b64encode(b":" + b"s" * 32)) == ["it"]
    assert canaries.found_in(b"s" * 31) == []
