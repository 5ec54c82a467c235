"""Precedence of flags and environment, bounds, and what a coordinator leaves for the next one and for the CLI."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.api import directory_guard
from holdfast.api.server.server import advertised_url, bind
from holdfast.api.settings import (
    BODY_BYTES_MAX,
    ServerSettings,
    check_url,
    client_settings,
    named_state_directory,
    server_settings,
)
from holdfast.barriers.run_record import RunRecord, read_run_record, write_run_record
from holdfast.coordinator.config import ServiceConfig
from holdfast.statebackends.errors import InvalidConfigError, StorageUnavailableError
from holdfast.statebackends.layout import RUN_FILE, TOKEN_FILE

TOKEN = "flag-token-0123456789"
RECORD = RunRecord("http://127.0.0.1:4321", 1, "here", 4321)


def test_defaults(tmp_path: Path) -> None:
    settings = server_settings({}, state_dir=tmp_path / "new" / "dir")
    assert settings.state_dir.is_dir()
    assert (settings.host, settings.port, settings.takeover) == ("127.0.0.1", None, False)
    assert settings.token == (settings.state_dir / TOKEN_FILE).read_text()
    assert settings.token_file == settings.state_dir / TOKEN_FILE
    assert settings.body_bytes_max == BODY_BYTES_MAX


def test_environment_is_read_and_flags_go_first(tmp_path: Path) -> None:
    environment = {
        "HOLDFAST_STATE_DIR": str(tmp_path),
        "HOLDFAST_HOST": "127.0.0.2",
        "HOLDFAST_PORT": "1234",
        "HOLDFAST_TOKEN": "environment-token-1",
        "HOLDFAST_BODY_BYTES_MAX": "1000",
    }
    settings = server_settings(environment)
    assert (settings.host, settings.port, settings.token) == ("127.0.0.2", 1234, "environment-token-1")
    assert (settings.body_bytes_max, settings.token_file) == (1_000, None)
    settings = server_settings(environment, host="127.0.0.3", port=0, token=TOKEN)
    assert (settings.host, settings.port, settings.token) == ("127.0.0.3", 0, TOKEN)
    assert not (tmp_path / TOKEN_FILE).exists()


@pytest.mark.parametrize(
    ("environment", "setting"),
    [
        ({"HOLDFAST_PORT": "many"}, "HOLDFAST_PORT"),
        ({"HOLDFAST_PORT": "70000"}, "port"),
        ({"HOLDFAST_BODY_BYTES_MAX": "0"}, "body_bytes_max"),
        ({"HOLDFAST_CONNECTIONS_MAX": "15"}, "connections_max"),
        ({"HOLDFAST_KEEP_ALIVE_INTERVAL_MS": "-1"}, "keep_alive_interval_ms"),
        ({"HOLDFAST_DRILL_TIMEOUT_MS": "999"}, "drill_timeout_ms"),
        ({"HOLDFAST_DRILL_TIMEOUT_MS": "604800001"}, "drill_timeout_ms"),
        ({"HOLDFAST_ADVERTISED_HOST": "a b"}, "advertised_host"),
    ],
)
def test_settings_out_of_bounds_are_named(tmp_path: Path, environment: dict[str, str], setting: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        server_settings(environment, state_dir=tmp_path)
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    "host",
    ["a b", "http://x", "x:80", "x/y", "a..b", "-a", "1.2.3.400", "[a]", "[::1", "é", "a" * 64, "u@h", "[10.0.0.7]", "fe80::%eth0"],
)
def test_what_is_no_host_is_not_told_to_drivers_and_workers(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidConfigError, match="must be the name or address of a host") as caught:
        server_settings({}, state_dir=tmp_path, advertised_host=host)
    assert caught.value.setting == "advertised_host"


@pytest.mark.parametrize("host", ["driver", "a.b-c.example.", "my_service", "10.0.0.7", "::1", "[fd00::1]", "3com.com"])
def test_names_and_addresses_of_hosts_are_told_as_they_are(tmp_path: Path, host: str) -> None:
    assert server_settings({}, state_dir=tmp_path, advertised_host=host).advertised_host == host


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_state_directory_is_refused_and_not_that_of_the_environment(tmp_path: Path, empty: str) -> None:
    environment = {"HOLDFAST_STATE_DIR": str(tmp_path)}
    with pytest.raises(InvalidConfigError, match="the state directory is empty"):
        server_settings(environment, state_dir=empty)
    with pytest.raises(InvalidConfigError, match="the state directory is empty"):
        client_settings(environment, state_dir=empty)
    with pytest.raises(InvalidConfigError, match="the state directory is empty"):
        named_state_directory(environment, url=None, state_dir=empty)


def test_a_state_directory_on_s3_has_a_folder_on_this_machine(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path / "xdg"), "HOLDFAST_STATE_DIR": "s3://bucket/a/b/"}
    settings = server_settings(environment)
    assert (settings.location, settings.state_url) == ("s3://bucket/a/b", "s3://bucket/a/b")
    assert settings.state_dir.parent == tmp_path / "xdg" / "holdfast"
    assert settings.state_dir.name.startswith("bucket-")
    assert settings.token_file == settings.state_dir / TOKEN_FILE
    assert server_settings(environment, state_dir="s3://bucket/a/b").state_dir == settings.state_dir
    other = server_settings({**environment, "HOLDFAST_LOCAL_DIR": str(tmp_path / "own")}, state_dir="s3://bucket/a/c")
    assert other.state_dir.parent == tmp_path / "own"
    assert other.state_dir.name != settings.state_dir.name

    with pytest.raises(InvalidConfigError, match=r"s3://bucket/a/b.* on this machine; .*--url"):
        client_settings(environment)
    write_run_record(settings.state_dir, RunRecord("http://127.0.0.1:4321", 1, "here", 4321, str(settings.token_file)))
    found = client_settings({"XDG_STATE_HOME": str(tmp_path / "xdg")}, state_dir="s3://bucket/a/b/")
    assert (found.url, found.token) == ("http://127.0.0.1:4321", settings.token)


@pytest.mark.parametrize("location", ["s3://", "s3://x", "s3://bucket/../y", "s3:///path"])
def test_a_wrong_location_on_s3_is_an_error_before_anything_is_made(tmp_path: Path, location: str) -> None:
    environment = {"HOLDFAST_LOCAL_DIR": str(tmp_path / "local")}
    with pytest.raises(InvalidConfigError, match="s3://"):
        server_settings(environment, state_dir=location)
    assert not (tmp_path / "local").exists()


def test_a_state_directory_by_its_url_is_that_folder_and_another_kind_of_url_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert server_settings({}, state_dir=f"file://{tmp_path}/a%20b").state_dir == tmp_path / "a b"
    assert server_settings({"HOLDFAST_STATE_DIR": f"file://{tmp_path}/c"}).state_dir == tmp_path / "c"
    with pytest.raises(InvalidConfigError, match="scheme 'gs' is not supported"):
        server_settings({}, state_dir="gs://bucket/state")
    with pytest.raises(InvalidConfigError, match="scheme 'gs' is not supported"):
        client_settings({}, state_dir="gs://bucket/state")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b", "c"]


def test_a_drill_may_take_as_long_as_the_service_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()

    def opened(config: ServiceConfig) -> None:
        seen.append(config.drill_timeout_ms)

    monkeypatch.setattr(directory_guard, "CoordinatorService", opened)
    environments: list[dict[str, str]] = [{}, {"HOLDFAST_DRILL_TIMEOUT_MS": "86400000"}]
    for environment in environments:
        directory_guard.open_coordinator(server_settings(environment, state_dir=tmp_path), "http://localhost")
    assert seen == [3_600_000, 86_400_000]


def test_no_state_directory_is_an_error() -> None:
    with pytest.raises(InvalidConfigError, match="--state-dir"):
        server_settings({})


def test_a_file_in_place_of_the_state_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfigError, match="can't use the state directory"):
        server_settings({}, state_dir=tmp_path / "file")


def test_no_token_beyond_loopback_is_refused(tmp_path: Path) -> None:
    assert server_settings({}, state_dir=tmp_path, no_token=True).token is None
    with pytest.raises(InvalidConfigError, match="without a token"):
        server_settings({}, state_dir=tmp_path, no_token=True, host="0.0.0.0")
    with pytest.raises(InvalidConfigError, match="exclude"):
        server_settings({}, state_dir=tmp_path, no_token=True, token=TOKEN)


def test_client_by_url_and_token(tmp_path: Path) -> None:
    settings = client_settings({"HOLDFAST_URL": "http://a:1/v1/", "HOLDFAST_TOKEN": TOKEN})
    assert (settings.url, settings.token) == ("http://a:1", TOKEN)
    assert client_settings({"HOLDFAST_URL": "http://a:1"}, url="http://b:2").url == "http://b:2"


def test_client_by_state_directory(tmp_path: Path) -> None:
    token = server_settings({}, state_dir=tmp_path).token
    record = RunRecord("http://127.0.0.1:4321", 1, "here", 4321, str(tmp_path / TOKEN_FILE))
    write_run_record(tmp_path, record)
    for environment, state_dir in (
        ({"HOLDFAST_STATE_DIR": str(tmp_path)}, None),
        ({"HOLDFAST_URL": "http://x:1"}, tmp_path),
    ):
        settings = client_settings(environment, state_dir=state_dir)
        assert (settings.url, settings.token) == ("http://127.0.0.1:4321", token)


def test_client_without_anything_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="--url or --state-dir"):
        client_settings({})
    with pytest.raises(InvalidConfigError, match="holdfast serve"):
        client_settings({}, state_dir=tmp_path)


@pytest.mark.parametrize("url", ["", "localhost:1", "ftp://a", "file:///x"])
def test_a_url_must_be_http(url: str) -> None:
    with pytest.raises(InvalidConfigError):
        check_url(url)


def test_run_record_is_replaced_whole(tmp_path: Path) -> None:
    assert read_run_record(tmp_path) is None
    write_run_record(tmp_path, RECORD)
    assert read_run_record(tmp_path) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == [RUN_FILE]
    (tmp_path / RUN_FILE).write_text("{")
    assert read_run_record(tmp_path) is None
    with pytest.raises(StorageUnavailableError):
        write_run_record(tmp_path / "missing", RECORD)


def test_the_last_port_is_kept(tmp_path: Path) -> None:
    with bind(ServerSettings(tmp_path)) as first:
        port = first.getsockname()[1]
    write_run_record(tmp_path, RunRecord("http://127.0.0.1", 1, "here", port))
    with bind(ServerSettings(tmp_path)) as again:
        assert again.getsockname()[1] == port


def test_a_taken_port_is_named_and_a_takeover_moves_on(tmp_path: Path) -> None:
    with bind(ServerSettings(tmp_path)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfigError, match=f"port {port} .* in use"):
            bind(ServerSettings(tmp_path, port=port))
        write_run_record(tmp_path, RunRecord("http://127.0.0.1", 1, "here", port))
        with pytest.raises(InvalidConfigError, match="in use"):
            bind(ServerSettings(tmp_path))
        with bind(ServerSettings(tmp_path, takeover=True)) as moved:
            assert moved.getsockname()[1] != port


def test_a_host_that_is_not_ours_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="can't listen"):
        bind(ServerSettings(tmp_path, host="192.0.2.1", token=TOKEN))


def test_advertised_url(tmp_path: Path) -> None:
    assert advertised_url(ServerSettings(tmp_path), 5) == "http://127.0.0.1:5"
    assert advertised_url(ServerSettings(tmp_path, host="::1"), 5) == "http://[::1]:5"
    assert advertised_url(ServerSettings(tmp_path, host="0.0.0.0", advertised_host="driver"), 5) == "http://driver:5"
    assert "0.0.0.0" not in advertised_url(ServerSettings(tmp_path, host="0.0.0.0"), 5)
