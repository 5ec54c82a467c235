"""How a job finds its coordinator: by URL, or one embedded in the driver and shared by its jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.api import launch
from holdfast.api.client import RestClient
from holdfast.api.launch import Connector, Exposure, SessionLauncher
from holdfast.api.server import main
from holdfast.operators.datastream.launcher import LaunchOptions
from holdfast.statebackends.errors import InvalidConfigError
from tests.api.fakes import JOB, TOKEN, FakeCoordinator, Served

LOCAL = Connector(Exposure("127.0.0.1", None))


@pytest.fixture(autouse=True)
def embedded_fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeCoordinator]:
    """Embedded coordinators have canned answers."""
    made: list[FakeCoordinator] = []

    class Embedded(main.EmbeddedCoordinator):
        def __init__(self, settings: Any) -> None:
            made.append(FakeCoordinator())
            super().__init__(settings, open_service=lambda _settings, _url: made[-1])

    monkeypatch.setattr(main, "EmbeddedCoordinator", Embedded)
    for name in ("URL", "TOKEN", "TOKEN_FILE", "STATE_DIR"):
        monkeypatch.delenv(f"HOLDFAST_{name}", raising=False)
    return made


def test_a_url_and_token_are_used_as_given(served: Served) -> None:
    connection = LOCAL(LaunchOptions(coordinator_url=served.url, token=TOKEN))
    assert connection.client.job_state(JOB) == "RUNNING"
    assert (connection.client.url, connection.client.token) == (served.url, TOKEN)
    connection.close()


def test_neither_url_nor_directory_says_what_to_give() -> None:
    with pytest.raises(InvalidConfigError, match="state_dir="):
        LOCAL(LaunchOptions())


@pytest.mark.parametrize("options", [LaunchOptions(coordinator_url="nope"), LaunchOptions()])
def test_where_no_coordinator_can_be_is_refused_before_anything_is_said(
    monkeypatch: pytest.MonkeyPatch, options: LaunchOptions
) -> None:
    """The launcher on a session says first what it starts, and where."""
    for name in ("_session_of", "_launcher_of"):
        monkeypatch.setattr(launch, name, lambda _: None)
    with pytest.raises(InvalidConfigError, match=r"nope|a job needs a coordinator"):
        SessionLauncher().launch(cast(Any, None), options)


def test_a_file_to_trust_goes_with_a_url(tmp_path: Path) -> None:
    """A coordinator in this process has an authority of its own: a file that counted for nothing would be a mistake unseen."""
    with pytest.raises(InvalidConfigError, match="ca= is for a coordinator at a URL"):
        LOCAL(LaunchOptions(state_directory=tmp_path, ca=tmp_path / "ca.pem"))


@pytest.mark.parametrize("directory", ["", "gs://bucket/x", "file://other-host/x", "file:///a?b", "file://[x/y", "/a\0b"])
def test_a_directory_that_is_none_is_refused(directory: str) -> None:
    """An empty one is not where the driver happens to be."""
    with pytest.raises(InvalidConfigError, match=r"location of a folder is empty|file:///|is no path|%3F"):
        LOCAL(LaunchOptions(state_directory=directory))


def test_jobs_on_one_directory_share_an_embedded_coordinator(tmp_path: Path, embedded_fakes: list[FakeCoordinator]) -> None:
    first = LOCAL(LaunchOptions(state_directory=str(tmp_path / "a")))
    second = LOCAL(LaunchOptions(state_directory=f"file://{tmp_path}/a"))
    other = LOCAL(LaunchOptions(state_directory=str(tmp_path / "b")))
    assert first.client.url == second.client.url != other.client.url
    assert len(embedded_fakes) == 2
    first.close()
    first.close()
    assert second.client.job_state(JOB) == "RUNNING"
    second.close()
    assert (embedded_fakes[0].ready, embedded_fakes[1].ready) == (False, True)
    other.close()
    assert embedded_fakes[1].ready is False


def test_an_embedded_coordinator_answers_a_plain_client(tmp_path: Path) -> None:
    connection = LOCAL(LaunchOptions(state_directory=str(tmp_path)))
    client = RestClient(connection.client.url, connection.client.token)
    assert client.job_state(JOB) == "RUNNING"
    client.close()
    connection.close()
