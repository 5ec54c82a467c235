"""Requests that OpenAPI's description allows, and others near them, drawn by Schemathesis for each role against a real coordinator.

No answer is a failure of the service, each is one that the description has, and who may not ask is refused, whatever is sent."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
import urllib3
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from holdfast.api.access.roles import Access, Role, classify
from holdfast.api.client import RestClient
from holdfast.api.http.auth import OPEN_PATHS
from holdfast.api.server.main import EmbeddedCoordinator
from holdfast.api.settings import server_settings
from holdfast.barriers.jobgraph import Submission
from tests.api.fakes import TOKEN, make_graph
from tests.api.test_access import MATRIX

CHECKS = (not_a_server_error, status_code_conformance, response_schema_conformance)
CALLS, CALLS_LONG = 2_000, 100_000
EXAMPLES, EXAMPLES_LONG = 4, 210
"""Of each of about 140 requests, each sent by four roles; of some there are not as many different ones."""
ROLES = (Role.WORKER, Role.VIEWER, Role.OPERATOR, Role.ADMIN)
UNAVAILABLE = frozenset({503})
"""Answers that say that the caller should ask again: no failure of the service."""
TIMEOUT_S = 20.0


@dataclass
class Running:
    url: str
    job_id: str
    tokens: dict[Role, str]
    described: Any


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A coordinator with a job that waits for its workers."""
    environment = {"HOLDFAST_REQUESTS_PER_S_MAX": "1000000"}
    chosen = server_settings(environment, state_dir=tmp_path_factory.mktemp("described"), token=TOKEN, port=0)
    told = logging.getLogger("holdfast.requests")
    before, told.level = told.level, logging.CRITICAL  # a line for each would be most of a failed test's output
    with EmbeddedCoordinator(chosen) as coordinator:
        client = RestClient(coordinator.url, TOKEN)
        accepted = client.submit(Submission(make_graph()))
        issued = {role: str(client.issue_token(role)["token"]) for role in (Role.VIEWER, Role.OPERATOR, Role.ADMIN)}
        document = urllib3.request("GET", f"{coordinator.url}/openapi.json", timeout=TIMEOUT_S).json()
        tokens = {**issued, Role.WORKER: accepted.worker_token}
        yield Running(coordinator.url, accepted.job_id, tokens, schemathesis.openapi.from_dict(document))
        client.close()
    told.level = before


def judge(case: Any, answer: Any, role: Role) -> None:
    """What holds for every answer."""
    path = case.formatted_path
    found = classify(case.method, path)
    access = found.access if found is not None else Access.ADMINISTER
    if case.path not in OPEN_PATHS and access not in MATRIX[role] and answer.status_code != 404:  # 404: control characters
        assert answer.status_code == 403, (case.method, path, answer.status_code)
    if answer.status_code in UNAVAILABLE or answer.status_code == 405:
        return
    if answer.status_code >= 400 and case.path not in ("/healthz", "/readyz"):
        assert all(isinstance(each, str) for each in json.loads(answer.content)["errors"])
    case.validate_response(answer, checks=CHECKS)


def ask(running: Running, examples: int) -> dict[Role, Counter[int]]:
    """Statuses of the answers. Each request that is drawn is sent by every role, the one that may least first: to draw one costs
    several times as much as to send it, and what they are answered can be compared."""
    statuses: dict[Role, Counter[int]] = {role: Counter() for role in ROLES}
    with contextlib.ExitStack() as opened:
        sessions = {role: opened.enter_context(requests.Session()) for role in ROLES}
        for found in running.described.get_all_operations():
            operation = found.ok()
            if operation.path.endswith(("/commands", "/events")):
                continue  # an answer without end

            @settings(
                max_examples=examples,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                derandomize=examples == EXAMPLES,
                phases=[Phase.generate],
            )
            @given(case=operation.as_strategy())
            def one(case: Any) -> None:
                for name in {"jobid"} & set(case.path_parameters or {}):
                    case.path_parameters[name] = running.job_id  # a job that there is not is refused before anything is looked at
                for role in ROLES:
                    session = sessions[role]
                    session.cookies.clear()  # a login would speak for what follows it
                    headers = {"Authorization": f"Bearer {running.tokens[role]}"}
                    answer = case.call(base_url=running.url, headers=headers, timeout=TIMEOUT_S, session=session)
                    statuses[role][answer.status_code] += 1
                    judge(case, answer, role)

            one()
    return statuses


def check(statuses: dict[Role, Counter[int]], calls_min: int) -> None:
    """How many were asked, and that roles made a difference."""
    for role, found in statuses.items():
        assert found.total() >= calls_min // len(ROLES), (role, found)
        assert (found[403] > found.total() // 3) == (role not in (Role.ADMIN, Role.OPERATOR)), (role, found)
        if role is not Role.WORKER:
            assert found[200] > found.total() // 20, (role, found)


def test_described_requests(running: Running) -> None:
    check(ask(running, EXAMPLES), CALLS)


@pytest.mark.endurance
@pytest.mark.timeout(7_200)
def test_many_described_requests(running: Running) -> None:
    check(ask(running, EXAMPLES_LONG), CALLS_LONG)


def test_the_state_directory_is_whole_behind_it(running: Running, tmp_path: Path) -> None:
    """The job that all of them asked about can still be asked about."""
    client = RestClient(running.url, TOKEN)
    assert client.job_state(running.job_id) in ("CREATED", "RUNNING", "RESTARTING", "CANCELED", "CANCELLING", "FAILED", "SUSPENDED")
    client.close()
