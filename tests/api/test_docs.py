"""The description of the service: complete, open to all, and without any other host."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.api.docs.page import OPEN_PATHS, OPENAPI_PATH
from tests.api.fakes import FakeCoordinator, Served, serving


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_everything_it_needs_is_here_and_open(served: Served, path: str) -> None:
    answer = served.http.request("GET", served.url + path)
    assert (answer.status, int(answer.headers["Content-Length"])) == (200, len(answer.data))
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {source for sources in policy.values() for source in sources.split()} <= {"'none'", "'self'", "'unsafe-inline'", "data:"}
    assert "'unsafe-inline'" not in policy["script-src"]
    again = served.http.request("GET", served.url + path, headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status, again.data) == (304, b"")


def test_the_page_names_no_other_host_and_only_what_is_served(served: Served) -> None:
    text = served.http.request("GET", f"{served.url}/docs").data.decode()
    named = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert {f"/{name}" for name in named if name != "data:,"} <= OPEN_PATHS
    assert "://" not in text


@pytest.mark.parametrize("path", ["/docs/LICENSE", "/docs/..%2fpage.py", "/docs/nothing.js"])
def test_nothing_else_of_the_folder_is_shown(served: Served, path: str) -> None:
    assert served.http.request("GET", served.url + path).status == 401
    assert served.request("GET", path).status == 404


def test_the_description_is_built_once_and_nobody_gets_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callers, built = 16, []
    components = msgspec.json.schema_components

    def watched(*arguments: Any, **options: Any) -> Any:
        built.append(threading.current_thread().name)
        return components(*arguments, **options)

    monkeypatch.setattr(msgspec.json, "schema_components", watched)
    at_once = threading.Barrier(callers)
    with serving(FakeCoordinator(), tmp_path) as fresh, ThreadPoolExecutor(callers) as pool:

        def ask(_: int) -> bytes:
            at_once.wait()
            return fresh.http.request("GET", fresh.url + OPENAPI_PATH).data

        answers = set(pool.map(ask, range(callers)))
    assert len(built) == 1
    (whole,) = map(json.loads, answers)
    assert whole["security"] == [{"bearer": []}]
    assert "RegisterWorker" in whole["components"]["schemas"]
