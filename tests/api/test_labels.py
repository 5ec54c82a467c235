"""Labels over REST, by the client and on the command line, with and without a coordinator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.api.cli.main import app
from holdfast.api.client import RestClient
from holdfast.api.snapshots.snapshot import Snapshot
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.service import CoordinatorService
from holdfast.statebackends.errors import InvalidConfigError, NotFoundError
from tests.api.fakes import JOB, TOKEN, FakeCoordinator, Served, serving
from tests.coordinator.doubles import wait_until
from tests.coordinator.ownership.test_labels import ended, stored_job
from tests.coordinator.world import JOB as STORED

LABELS = f"/v1/jobs/{JOB}/labels"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(FakeCoordinator(), tmp_path) as running:
        yield running


def test_labels_are_given_listed_and_removed(served: Served) -> None:
    wanted = {"label": "x", "checkpoint_id": 7, "kind": "checkpoint", "location": f"/state/{JOB}/chk-7", "created_ms": 7_000}
    assert served.json("PUT", f"{LABELS}/x", {"checkpoint": 7}) == wanted
    found = served.json("GET", LABELS)
    assert {name: value for name, value in found.items() if name != "as_of_ms"} == {"labels": [wanted], "damage": []}
    assert served.json("DELETE", f"{LABELS}/x") == {"removed": [wanted]}
    assert served.request("DELETE", f"{LABELS}/x").status == 404


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("a%20b", {"checkpoint": 7}, 400),
        ("forgetting0123456789abcdef", {"checkpoint": 7}, 400),  # Holdfast's own, which it removes
        ("drilling0123456789abcdef", {"checkpoint": 7}, 400),
        ("%3Cb%3E", {"checkpoint": 7}, 400),
        ("..%2Fx", {"checkpoint": 7}, 404),  # two segments: no such path
        ("x" * 300, {"checkpoint": 7}, 400),
        ("x", {"checkpoint": 0}, 400),
        ("x", {"checkpoint": 2**63}, 400),
        ("x", {"checkpoint": "7"}, 400),
        ("x", {}, 400),
        ("x", {"checkpoint": 7, "more": 1}, 400),
        ("x", b"[", 400),
    ],
)
def test_bad_requests_are_named(served: Served, name: str, body: Any, status: int) -> None:
    answer = served.request("PUT", f"{LABELS}/{name}", body)
    assert answer.status == status
    assert answer.json()["errors"][0]


def test_the_client_speaks_of_labels(served: Served) -> None:
    client = RestClient(served.url, TOKEN, reconnect_timeout_s=0)
    assert client.add_label(JOB, 7, "x")["checkpoint_id"] == 7
    assert [each["label"] for each in client.labels(JOB)["labels"]] == ["x"]
    assert [each["label"] for each in client.remove_label(JOB, "x", 7)] == ["x"]
    with pytest.raises(NotFoundError, match="has no label"):
        client.remove_label(JOB, "x")
    for name in ("<b>", "<b>x</b>", "a/b"):
        with pytest.raises(InvalidConfigError, match="a label has"):
            client.add_label(JOB, 7, name)
        with pytest.raises(InvalidConfigError, match="a label has"):
            client.remove_label(JOB, name)


# ------------------------------------------------------------------------------------------------ a state directory on disk


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A job that has ended and kept nothing by its settings; 1, 2 and 4 are left to be deleted, and the savepoint 3."""
    for path, content in ended(stored_job()).files.items():
        if path.startswith(f"{STORED}/"):
            place = tmp_path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
    (tmp_path / "_holdfast").write_bytes(b"directory")
    return tmp_path


def offline(directory: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["label", STORED, *arguments, "--offline", "--state-dir", str(directory)])


def test_labels_without_a_coordinator(directory: Path) -> None:
    done = offline(directory, "2", "keep")
    assert done.exit_code == 0, done.output
    assert f"keep: checkpoint 2 {directory}/{STORED}/chk-2" in done.output
    listed = json.loads(offline(directory, "--json").output)
    assert [(each["label"], each["checkpoint_id"]) for each in listed["labels"]] == [("keep", 2)]
    assert offline(directory, "1", "keep").exit_code == 1, "it is that of 2"
    assert offline(directory, "9", "other").exit_code == 1
    assert offline(directory, "2", "a/b").exit_code == 2
    assert offline(directory, "2").exit_code == 2
    assert offline(directory, "2", "keep", "--remove").exit_code == 0
    assert "no labels" in offline(directory).output


def test_tools_open_a_snapshot_by_its_label(directory: Path) -> None:
    assert offline(directory, "2", "keep").exit_code == 0
    assert Snapshot(directory / STORED / "label:keep").location == str(directory / STORED / "chk-2")
    with pytest.raises(NotFoundError, match="has no label 'other'; it has keep"):
        Snapshot(f"{directory}/{STORED}/label:other")
    with pytest.raises(InvalidConfigError, match="a label has"):
        Snapshot(f"{directory}/{STORED}/label:<b>")


def test_an_ended_job_keeps_what_is_labelled_and_deletes_it_when_the_label_goes(directory: Path) -> None:
    assert offline(directory, "2", "keep").exit_code == 0
    service = CoordinatorService(ServiceConfig(str(directory)))
    try:
        service.lead()
        wait_until(lambda: service.ready, lambda: None, what="recovery")
        folder = directory / STORED / "chk-2"
        assert folder.is_dir()
        assert not (directory / STORED / "chk-4").exists()
        (found,) = service.labels(STORED).labels
        assert (found.label, found.checkpoint_id, found.folder) == ("keep", 2, str(folder))
        with pytest.raises(NotFoundError, match="no such checkpoint"):
            service.add_label(STORED, 4, "other")
        service.remove_label(STORED, "keep")
        assert not folder.exists()
    finally:
        service.close()
