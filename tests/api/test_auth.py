"""Tokens: who gets in, where a token is kept, what listens where."""

from __future__ import annotations

import logging
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.api.settings import ServerSettings
from holdfast.api.tokens import check_exposure, is_loopback, load_or_create_token, read_token
from holdfast.statebackends.errors import InvalidConfigError, StorageUnavailableError
from holdfast.statebackends.layout import TOKEN_FILE
from tests.api.fakes import JOB, TOKEN, FakeCoordinator, Served, serving


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer ü",
    ],
)
@pytest.mark.parametrize("path", [f"/v1/jobs/{JOB}", "/metrics", "/nothing", f"/v1/jobs/{JOB}/workers/0/commands?session=s"])
def test_no_or_wrong_token_is_401(served: Served, coordinator: FakeCoordinator, header: str | None, path: str) -> None:
    headers = {} if header is None else {"Authorization": header.encode("utf-8").decode("latin-1")}
    response = served.http.request("GET", served.url + path, headers=headers)
    assert response.status == 401
    assert set(response.json()) == {"errors"}
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert response.headers["X-Holdfast-Error"] == "AuthenticationError"
    assert coordinator.calls == []


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/docs", "/openapi.json"])
def test_open_paths_need_no_token(served: Served, path: str) -> None:
    assert served.http.request("GET", served.url + path).status == 200


def test_scheme_is_case_insensitive(served: Served) -> None:
    assert served.http.request("GET", f"{served.url}/jobs", headers={"Authorization": f"bearer {TOKEN}"}).status == 200


@pytest.mark.parametrize("path", ["/v1/jobs/", f"/v1/jobs/{JOB}/", "/jobs/overview/", "/docs/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_nobody_is_sent_elsewhere_with_a_token_by_a_slash_too_many(served: Served, method: str, path: str) -> None:
    """A redirection would name the scheme and the host as the request does: behind a proxy that speaks TLS, clear text."""
    answer = served.request(method, path, headers={"Host": "elsewhere.example"}, redirect=False)
    assert (answer.status, answer.headers.get("location")) == (404, None)
    assert answer.headers["X-Holdfast-Error"] == "NotFoundError"


def test_tokens_are_never_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        served.request("GET", "/jobs")
        served.request("GET", "/jobs", token="some-wrong-token-here")
    assert TOKEN not in caplog.text
    assert "some-wrong-token-here" not in caplog.text


def test_without_a_token_only_loopback_names_get_in(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    with serving(coordinator, tmp_path, token=None) as served:
        assert served.request("GET", "/jobs").status == 200
        port = served.url.rpartition(":")[2]
        for host in (f"localhost:{port}", f"[::1]:{port}", "127.0.0.1"):
            assert served.request("GET", "/jobs", headers={"Host": host}).status == 200
        for host in (f"rebound.example:{port}", "127.0.0.1.example", "10.0.0.1"):
            assert served.request("GET", "/jobs", headers={"Host": host}).status == 401


def test_without_a_token_no_web_page_gets_in(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    """A page may post text to any address without asking; a browser says whose page it is."""
    with serving(coordinator, tmp_path, token=None) as served:
        path, port = f"/jobs/{JOB}/stop", served.url.rpartition(":")[2]
        for origin in ("http://evil.example", "null", "https://127.0.0.1.evil.example", "file://", f"http://evil.example:{port}"):
            assert served.request("POST", path, body=b"{}", headers={"Origin": origin}).status == 401
        assert coordinator.calls == []
        for origin in (served.url, f"http://localhost:{port}", "http://[::1]:3000"):
            assert served.request("POST", path, body=b"{}", headers={"Origin": origin}).status == 202


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_nothing_listens_beyond_loopback_without_a_token(host: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="without a token"):
        check_exposure(host, None)
    check_exposure(host, TOKEN)
    with pytest.raises(InvalidConfigError):
        ServerSettings(state_dir=tmp_path, host=host).check()


def test_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.1", "localhost.example", ""))


def test_token_is_drawn_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    token = load_or_create_token(tmp_path)
    assert load_or_create_token(tmp_path) == token
    assert len(token) >= 40
    assert stat.S_IMODE((tmp_path / TOKEN_FILE).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [TOKEN_FILE]


def test_starters_at_the_same_time_agree_on_one_token(tmp_path: Path) -> None:
    tokens: list[str] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        tokens.append(load_or_create_token(tmp_path))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tokens) == 8
    assert len(set(tokens)) == 1


@pytest.mark.parametrize(
    "text", ["", "short", "with a space in the middle", "ümlaut-in-the-token", "a" * 5_000, "two\nlines-of-token"]
)
def test_a_token_file_with_no_token_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(InvalidConfigError) as caught:
        read_token(path)
    assert str(path) in str(caught.value)
    assert not text or text not in str(caught.value)


def test_a_missing_token_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="can't read the token file"):
        read_token(tmp_path / "none")


def test_a_state_directory_that_takes_no_token_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailableError):
        load_or_create_token(tmp_path / "missing")


def test_a_readable_token_file_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o644)
    assert read_token(path) == TOKEN
    assert "chmod 600" in caplog.text


def test_clients_load_no_web_framework() -> None:
    """A command or a driver starts a third of a second sooner."""
    code = "import sys, holdfast.api.client, holdfast.api.cli.main; print({'fastapi', 'uvicorn', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n", done.stdout
