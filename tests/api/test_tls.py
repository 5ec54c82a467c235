"""TLS of a coordinator: its own authority, files that change, and clients that don't trust it, or speak none."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509

from holdfast.api.client import RestClient
from holdfast.api.http.connection_budget import BodyBudget, ConnectionLimits
from holdfast.api.http.protocol import ConnectionGuard
from holdfast.api.launch import Connector, Exposure
from holdfast.api.server.main import EmbeddedCoordinator
from holdfast.api.server.tls import hosts_of
from holdfast.api.settings import ServerSettings, Tls, client_settings, server_settings
from holdfast.api.tls.authority import Authority, Pair, draw_authority, issue_pair, read_authority
from holdfast.api.tls.files import check_pair, expires_at, hosts_in
from holdfast.api.tls.live import FilePair, LiveContext, OwnPair
from holdfast.api.tls.stored import open_authority
from holdfast.barriers.jobgraph import Submission
from holdfast.barriers.run_record import read_run_record
from holdfast.operators.datastream.launcher import LaunchOptions
from holdfast.operators.worker.gateway import CoordinatorAddress, CoordinatorHttp, UntrustedError
from holdfast.operators.worker.trust import client_context, transport_failure
from holdfast.statebackends.errors import (
    CorruptStateError,
    HoldfastError,
    InvalidConfigError,
    StorageUnavailableError,
    TransportSecurityError,
)
from holdfast.statebackends.layout import AUTHORITY_FILE, CA_FILE, is_directory_file
from tests.api.fakes import FakeCoordinator, make_graph, serving
from tests.s3_server import bucket as bucket
from tests.s3_server import connection as connection
from tests.s3_server import server as server

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
HOSTS = ("127.0.0.1", "localhost")
WAIT_S = 20.0


@pytest.fixture(scope="module")
def authority() -> Authority:
    return draw_authority(NOW)


def write_pair(folder: Path, pair: Pair) -> tuple[Path, Path]:
    certificate, key = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(pair.certificate_pem)
    key.touch(0o600)
    key.write_bytes(pair.key_pem)
    return certificate, key


# ------------------------------------------------------------------------------------------------------- certificates


def test_members_of_one_directory_have_one_authority(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: open_authority(str(tmp_path)).certificate_pem, range(8)))
    assert len(set(found)) == 1
    path = tmp_path / AUTHORITY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["authority.pem"], "no half-written one is left"
    assert is_directory_file(AUTHORITY_FILE)
    assert is_directory_file(CA_FILE)


def test_the_key_is_its_owners_in_a_shared_directory_too(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o2770)
    open_authority(str(tmp_path))
    assert stat.S_IMODE((tmp_path / AUTHORITY_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"nonsense", b"-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n"])
def test_a_damaged_authority_is_named(content: bytes) -> None:
    with pytest.raises(CorruptStateError, match=r"authority\.pem holds no authority"):
        read_authority(content)


def test_an_authority_with_anothers_certificate_is_named(authority: Authority) -> None:
    other = draw_authority(NOW)
    with pytest.raises(CorruptStateError, match="don't belong to each other"):
        read_authority(Authority(authority.key, other.certificate).stored())


def test_a_member_is_known_by_each_of_its_hosts(authority: Authority) -> None:
    pair = issue_pair(authority, ("node-1", "10.0.0.1", "::1", "node-1"), NOW)
    assert hosts_in(pair) == {"node-1", "10.0.0.1", "::1"}
    assert repr(pair) == "Pair(...)", "a key in no log"
    check_pair(pair, NOW, certificate="c", key="k")
    check_pair(pair, NOW - DAY, certificate="c", key="k")


def test_a_member_is_not_valid_longer_than_its_authority() -> None:
    old = draw_authority(NOW - datetime.timedelta(days=3_640))
    assert expires_at(issue_pair(old, HOSTS, NOW)) == old.certificate.not_valid_after_utc


def test_hosts_of_a_server_begin_with_the_one_that_it_tells(tmp_path: Path) -> None:
    found = hosts_of(ServerSettings(tmp_path, host="0.0.0.0", tls=Tls.AUTO), "https://driver:80")
    assert found[0] == "driver"
    assert {"localhost", "127.0.0.1", "::1"} <= set(found)
    assert "0.0.0.0" not in found


# ------------------------------------------------------------------------------------------------------------ settings


def test_beyond_loopback_tls_is_the_default(tmp_path: Path) -> None:
    assert server_settings({}, state_dir=tmp_path, host="0.0.0.0").tls is Tls.AUTO
    assert server_settings({}, state_dir=tmp_path).tls is Tls.OFF
    assert server_settings({}, state_dir=tmp_path, tls="auto").tls is Tls.AUTO
    assert server_settings({"HOLDFAST_INSECURE_HTTP": "1"}, state_dir=tmp_path, host="0.0.0.0").tls is Tls.OFF
    files = {"HOLDFAST_TLS_CERT": "/c", "HOLDFAST_TLS_KEY": "/k"}
    assert server_settings(files, state_dir=tmp_path).tls is Tls.FILES


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"tls": "off", "host": "0.0.0.0"}, "refusing to listen on 0.0.0.0 in clear text"),
        ({"tls": "on"}, "auto or off"),
        ({"tls_cert": "/c"}, "belong together"),
        ({"tls_key": "/k"}, "belong together"),
        ({"tls": "auto", "tls_cert": "/c", "tls_key": "/k"}, "exclude each other"),
        ({"tls_ca": "/a"}, "is for --tls-cert"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(tmp_path: Path, named: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidConfigError, match=text):
        server_settings({}, state_dir=tmp_path, **named)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [None, b"", b"no certificate", b"\xff"])
def test_a_file_to_trust_without_certificates_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidConfigError, match=r"ca\.pem"):
        client_settings({}, url="https://127.0.0.1:1", ca=path)


# --------------------------------------------------------------------------------------------------------- own files


def test_files_that_no_client_would_take_are_refused(tmp_path: Path, authority: Authority) -> None:
    good, other = issue_pair(authority, HOSTS, NOW), issue_pair(authority, HOSTS, NOW)
    cases = {
        "not that of the certificate": Pair(good.certificate_pem, other.key_pem),
        "holds no private key": Pair(good.certificate_pem, b"nothing"),
        "holds no certificate": Pair(b"nothing", good.key_pem),
        "expired at": issue_pair(authority, HOSTS, NOW - 40 * DAY),
        "by the clock of this machine": issue_pair(authority, HOSTS, NOW + 5 * DAY),
    }
    for text, pair in cases.items():
        certificate, key = write_pair(tmp_path, pair)
        with pytest.raises(InvalidConfigError, match=text):
            LiveContext(FilePair(certificate, key))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"can't read .*nowhere\.pem"):
        LiveContext(FilePair(tmp_path / "nowhere.pem", tmp_path / "key.pem"))


def test_changed_files_are_taken_and_broken_ones_are_not(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = write_pair(tmp_path, issue_pair(authority, HOSTS, NOW))
    live = LiveContext(FilePair(certificate, key))
    first, context = live.pair, live.context
    assert not live.refresh(), "nothing changed"

    second = issue_pair(authority, ("localhost", "new"), NOW)
    certificate.write_bytes(second.certificate_pem)  # the key of the first one is still there
    assert not live.refresh()
    assert not live.refresh()
    assert (live.pair, live.context) == (first, context), "the old pair stays"
    assert [record.levelname for record in caplog.records] == ["ERROR"], "it is said once"

    key.write_bytes(second.key_pem)
    assert live.refresh()
    assert live.pair == second
    assert live.context is not context

    key.unlink()
    assert not live.refresh()
    assert live.pair == second


def test_a_pair_that_becomes_good_without_a_change_of_its_files_is_taken(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tool renews the files as root, and makes them readable to this user a moment later: neither time nor size changes. Or the
    certificate begins a moment from now, or the folder of temporary files is full."""
    certificate, key = write_pair(tmp_path, issue_pair(authority, HOSTS, NOW))
    time = [NOW]
    live = LiveContext(FilePair(certificate, key), now=lambda: time[0])
    second = issue_pair(authority, ("localhost", "new"), NOW + 2 * DAY + datetime.timedelta(minutes=1))
    write_pair(tmp_path, second)
    assert not live.refresh()
    time[0] += datetime.timedelta(minutes=2)
    assert live.refresh()
    assert live.pair == second

    third = issue_pair(authority, ("localhost", "newer"), NOW)
    write_pair(tmp_path, third)

    def refuse(*_arguments: object) -> Pair:
        raise PermissionError("not yet")

    with monkeypatch.context() as patch:
        patch.setattr("holdfast.api.tls.live.read_pair", refuse)
        assert not live.refresh()
        assert not live.refresh()
    assert live.pair == second
    assert live.refresh()
    assert live.pair == third
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"], "each is said once"


def test_an_own_certificate_is_made_anew_before_its_end(authority: Authority) -> None:
    time = [NOW]
    live = LiveContext(OwnPair(authority, HOSTS), now=lambda: time[0])
    for _ in range(40):
        time[0] += DAY
        live.refresh()
        assert expires_at(live.pair) - time[0] >= 14 * DAY


@pytest.mark.parametrize("ahead_days", [3, 20])
def test_an_own_certificate_is_made_anew_when_a_clock_that_was_ahead_is_set_back(authority: Authority, ahead_days: int) -> None:
    """As of a machine that gets the time from the network only after its services have begun."""
    time = [NOW + ahead_days * DAY]
    live = LiveContext(OwnPair(authority, HOSTS), now=lambda: time[0])
    begins = x509.load_pem_x509_certificates(live.pair.certificate_pem)[0].not_valid_before_utc
    assert begins > NOW
    time[0] = NOW
    assert live.refresh()
    begins = x509.load_pem_x509_certificates(live.pair.certificate_pem)[0].not_valid_before_utc
    assert begins <= NOW - DAY
    assert not live.refresh(), "once"
    time[0] -= DAY / 48
    assert not live.refresh(), "an ordinary correction"


# ------------------------------------------------------------------------------------------------------------- servers


@pytest.fixture
def running(tmp_path: Path) -> Iterator[EmbeddedCoordinator]:
    """A coordinator with an authority of its own."""
    settings = server_settings({}, state_dir=tmp_path, tls="auto", port=0)
    with EmbeddedCoordinator(settings, open_service=lambda _s, _u: FakeCoordinator()) as coordinator:
        yield coordinator


def test_clients_of_the_state_directory_trust_its_authority(running: EmbeddedCoordinator, tmp_path: Path) -> None:
    assert running.url.startswith("https://")
    found = client_settings({}, state_dir=tmp_path)
    client = RestClient(found.url, found.token, authorities=found.authorities, reconnect_timeout_s=0)
    assert "slots-total" in client.overview()
    record = read_run_record(tmp_path)
    assert record is not None
    assert record.ca_file == str(tmp_path / CA_FILE)
    assert "PRIVATE" not in (tmp_path / CA_FILE).read_text()


def test_a_driver_elsewhere_names_what_it_trusts(
    running: EmbeddedCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the state directory, and whatever the environment says: what is written in the program counts."""
    named = tmp_path / "elsewhere.pem"
    named.write_text(running.authorities or "")
    connect = Connector(Exposure("127.0.0.1", None))
    options = LaunchOptions(coordinator_url=running.url, token=running.token)
    for name in ("STATE_DIR", "URL", "CA"):
        monkeypatch.delenv(f"HOLDFAST_{name}", raising=False)
    stranger = connect(options)
    with pytest.raises(TransportSecurityError, match="ca= of the Environment"):
        stranger.client.job_state("a" * 32)
    stranger.close()
    monkeypatch.setenv("HOLDFAST_CA", str(tmp_path / "none.pem"))
    made = connect(replace(options, ca=named))
    assert made.client.authorities == running.authorities, "its workers are given them"
    accepted = made.client.submit(Submission(make_graph()))
    assert made.client.job_state(accepted.job_id)
    made.close()
    with pytest.raises(InvalidConfigError, match=r"missing\.pem"):
        connect(replace(options, ca=tmp_path / "missing.pem"))


def test_a_stranger_does_not_trust_it_and_sends_nothing(running: EmbeddedCoordinator) -> None:
    for authorities in (None, draw_authority(NOW).certificate_pem.decode()):
        client = RestClient(running.url, running.token, authorities=authorities)  # not repeated: it would stay so
        with pytest.raises(TransportSecurityError, match="not trusted") as caught:
            client.overview()
        assert caught.value.reason == "untrusted"
        assert str(running.token) not in str(caught.value)


def test_a_certificate_for_another_host_is_named(tmp_path: Path, authority: Authority) -> None:
    certificate, key = write_pair(tmp_path, issue_pair(authority, ("elsewhere",), NOW))
    settings = server_settings({}, state_dir=tmp_path, tls_cert=certificate, tls_key=key, port=0)
    with EmbeddedCoordinator(settings, open_service=lambda _s, _u: FakeCoordinator()) as coordinator:
        client = RestClient(coordinator.url, coordinator.token, authorities=authority.certificate_pem.decode())
        with pytest.raises(TransportSecurityError, match="another host") as caught:
            client.overview()
    assert caught.value.reason == "wrong_name"


@pytest.mark.parametrize(("begins", "reason"), [(-40 * DAY, "expired"), (40 * DAY, "not_yet_valid")])
def test_a_clock_that_is_off_is_named(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, begins: datetime.timedelta, reason: str
) -> None:
    certificate, key = write_pair(tmp_path, issue_pair(draw_authority(NOW + 2 * begins), HOSTS, NOW + begins))
    monkeypatch.setattr("holdfast.api.tls.files.check_pair", lambda *_a, **_n: None)  # the server's clock is off as much
    settings = server_settings({}, state_dir=tmp_path, tls_cert=certificate, tls_key=key, port=0)
    with EmbeddedCoordinator(settings, open_service=lambda _s, _u: FakeCoordinator()) as coordinator:
        trusted = certificate.read_text()
        client = RestClient(coordinator.url, coordinator.token, authorities=trusted)
        client._pool.connection_pool_kw["ssl_context"].verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        with pytest.raises(TransportSecurityError, match="by the clock of this machine") as caught:
            client.overview()
    assert caught.value.reason == reason


def test_plain_http_to_a_port_with_tls_is_told_so(running: EmbeddedCoordinator) -> None:
    client = RestClient(running.url.replace("https:", "http:"), running.token)
    with pytest.raises(TransportSecurityError, match=r"begins with https://") as caught:
        client.overview()
    assert caught.value.reason == "plain_http"


def test_tls_to_a_port_without_it_is_told_so(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path) as served:
        client = RestClient(served.url.replace("http:", "https:"), served.token)
        with pytest.raises(TransportSecurityError, match=r"begins with http://") as caught:
            client.overview()
    assert caught.value.reason == "no_tls"


def test_new_connections_get_the_new_certificate_and_old_ones_go_on(tmp_path: Path, authority: Authority) -> None:
    certificate, key = write_pair(tmp_path, issue_pair(authority, HOSTS, NOW))
    settings = server_settings({}, state_dir=tmp_path, tls_cert=certificate, tls_key=key, port=0)
    trusted = authority.certificate_pem.decode()
    with EmbeddedCoordinator(settings, open_service=lambda _s, _u: FakeCoordinator()) as coordinator:
        before = RestClient(coordinator.url, coordinator.token, authorities=trusted, reconnect_timeout_s=0)
        before.overview()
        other = draw_authority(NOW)
        write_pair(tmp_path, issue_pair(other, HOSTS, NOW))
        live = coordinator._tls
        assert live is not None
        live.live.refresh()  # what its thread does every two seconds
        before.overview()  # on its open connection
        after = RestClient(coordinator.url, coordinator.token, authorities=other.certificate_pem.decode(), reconnect_timeout_s=0)
        after.overview()


# ------------------------------------------------------------------------------------------------------------- workers


def test_a_worker_trusts_what_its_driver_gave_it_or_the_directory_has(running: EmbeddedCoordinator, tmp_path: Path) -> None:
    for address in (
        CoordinatorAddress(running.url, running.token, None, running.authorities),
        CoordinatorAddress(running.url, running.token, str(tmp_path)),
    ):
        http = CoordinatorHttp(address, "0" * 32, 0)
        with pytest.raises(HoldfastError) as caught:
            http.post("/0/heartbeat", {}, None)
        assert not isinstance(caught.value, UntrustedError), "it was asked, and refused what was sent"
        http.close()


def test_a_worker_goes_on_when_its_coordinator_has_tls_since_a_restart(running: EmbeddedCoordinator, tmp_path: Path) -> None:
    plain = CoordinatorAddress(running.url.replace("https:", "http:"), running.token, str(tmp_path))
    (published := tmp_path / CA_FILE).rename(tmp_path / "kept")
    http = CoordinatorHttp(CoordinatorAddress(plain.url, plain.token, None), "0" * 32, 0)
    with pytest.raises(StorageUnavailableError, match="speaks TLS") as refused:
        http.post("/0/heartbeat", {}, None)
    assert not isinstance(refused.value, UntrustedError)
    http = CoordinatorHttp(plain, "0" * 32, 0)
    http.failed(refused.value)
    assert http.target.url == running.url, "the directory names it"
    with pytest.raises(UntrustedError, match="not trusted") as untrusted:
        http.post("/0/heartbeat", {}, None)
    (tmp_path / "kept").rename(published)
    http.failed(untrusted.value)
    with pytest.raises(HoldfastError) as caught:
        http.post("/0/heartbeat", {}, None)
    assert not isinstance(caught.value, UntrustedError)
    http.close()


def test_a_workers_address_shows_no_token() -> None:
    assert "secret" not in repr(CoordinatorAddress("https://a", "secret", "/d", "pem"))


# ------------------------------------------------------------------------------------------------- handshakes as heads


def _guard(head_timeout_ms: int, unknown_max: int) -> ConnectionGuard:
    limits = ConnectionLimits(100, unknown_max, unknown_max, head_timeout_ms=head_timeout_ms)
    return ConnectionGuard(limits, BodyBudget(1 << 20, kept_for_workers=1 << 19))


def test_handshakes_that_never_end_are_ended_and_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = _guard(head_timeout_ms=500, unknown_max=24)
    monkeypatch.setattr("holdfast.api.server.server.connection_guard", lambda _settings: guard)
    settings = server_settings({}, state_dir=tmp_path, tls="auto", port=0)
    with EmbeddedCoordinator(settings, open_service=lambda _s, _u: FakeCoordinator()) as coordinator:
        port = int(coordinator.url.rpartition(":")[2])
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        for each in silent:
            each.sendall(b"\x16\x03\x01")  # the beginning of a handshake
        client = RestClient(coordinator.url, coordinator.token, authorities=coordinator.authorities, reconnect_timeout_s=0)
        client.overview()
        assert guard.budget.count(0) <= 24  # type: ignore[arg-type]
        for each in silent:
            each.settimeout(WAIT_S)
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b"", "closed by the server"
            each.close()
        client.overview()
        client.close()
    assert len(guard.budget) == 0, "no connection is counted for ever"
    assert sum(guard.budget.closed.values()) >= 40


def test_a_broken_handshake_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = _guard(head_timeout_ms=20_000, unknown_max=24)
    monkeypatch.setattr("holdfast.api.server.server.connection_guard", lambda _settings: guard)
    settings = server_settings({}, state_dir=tmp_path, tls="auto", port=0)
    with EmbeddedCoordinator(settings, open_service=lambda _s, _u: FakeCoordinator()) as coordinator:
        port = int(coordinator.url.rpartition(":")[2])
        for broken in (b"\x16", b"\x16\x03\x01\x00\x05nope!", b"\x16" + b"\xff" * 300_000, b"GET / HTTP/1.1\r\n\r\n", b""):
            with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
                connection.sendall(broken)
                with contextlib.suppress(OSError):  # it was refused already
                    connection.shutdown(socket.SHUT_WR)
                try:
                    while connection.recv(4_096):
                        pass
                except ConnectionResetError:
                    pass
        context = client_context(coordinator.authorities)
        with (
            socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection,
            context.wrap_socket(connection, server_hostname="127.0.0.1") as encrypted,
        ):
            encrypted.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert encrypted.recv(4_096).startswith(b"HTTP/1.1 200")
            assert encrypted.version() == "TLSv1.3"
    assert len(guard.budget) == 0


def test_only_what_is_about_tls_is_called_so() -> None:
    assert transport_failure(ConnectionResetError("gone"), "https://a") is None
    assert transport_failure(OSError(ssl.SSLEOFError(8, "eof")), "https://a") is None
    refused = ssl.SSLError(1, "refused")
    assert transport_failure(OSError(refused), "https://a") is None
    refused.reason = "TLSV1_ALERT_PROTOCOL_VERSION"
    found = transport_failure(OSError(refused), "https://a")
    assert found is not None
    assert found.reason == "handshake"


def test_a_coordinator_inside_a_driver_that_others_reach_speaks_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its driver's client has what the workers are to trust."""
    monkeypatch.delenv("HOLDFAST_TLS", raising=False)
    made = Connector(Exposure("0.0.0.0", "127.0.0.1"))(LaunchOptions(state_directory=tmp_path))
    try:
        assert made.client.url.startswith("https://127.0.0.1:")
        assert made.client.authorities == (tmp_path / CA_FILE).read_text()
        accepted = made.client.submit(Submission(make_graph()))
        assert made.client.job_state(accepted.job_id)
    finally:
        made.close()


def test_members_of_a_directory_on_s3_have_one_authority(bucket: str) -> None:
    assert open_authority(bucket).stored() == open_authority(bucket).stored()
