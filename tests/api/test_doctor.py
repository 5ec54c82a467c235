"""`holdfast doctor`: each fault is found, is named with its fix, and decides the exit code; nothing is left behind."""

from __future__ import annotations

import contextlib
import datetime
import functools
import http.server
import ipaddress
import json
import os
import platform
import resource
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.testing
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from holdfast.api.cli.main import app
from holdfast.api.doctor import executors, host, network, storage
from holdfast.api.doctor.findings import Check, Finding, Verdict, exit_code, fault, ok, run_checks, skipped, warning
from holdfast.api.tls.authority import draw_authority, issue_pair
from holdfast.api.tls.live import server_context
from holdfast.api.tls.stored import publish_certificate
from holdfast.statebackends.errors import PermissionDeniedError
from holdfast.statebackends.layout import AUTHORITY_FILE, CA_FILE, DIRECTORY_FILE, doctor_folder, is_directory_file
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import DescribeFiles, FileFacts, ListFiles, PutIfAbsent
from holdfast.statebackends.storage.s3 import S3Storage
from holdfast.statebackends.storage.s3_connection import S3Connection
from tests.api.fakes import FakeCoordinator, Served
from tests.s3_server import bucket as bucket
from tests.s3_server import connection as connection
from tests.s3_server import server as server

DAY_MS = 86_400_000
NONCE = "0123456789abcdef"


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def worst(findings: list[Finding]) -> Verdict:
    return max((finding.verdict for finding in findings), key=list(Verdict).index)


# ---------------------------------------------------------------------------------------------------------------- running


def test_exit_codes() -> None:
    lines = [ok("a", ""), skipped("b", "")]
    assert exit_code(lines) == 0
    assert exit_code([*lines, warning("c", "", "")]) == 1
    assert exit_code([*lines, warning("c", "", ""), fault("d", "", "")]) == 2


def test_a_check_that_fails_or_hangs_is_a_fault_and_the_others_are_made() -> None:
    ended = threading.Event()

    def fails() -> list[Finding]:
        raise PermissionDeniedError("no", path="/x")

    def hangs() -> list[Finding]:
        ended.wait(20)
        return []

    checks = [Check("fails", fails, "fix 1"), Check("hangs", hangs, "fix 2"), Check("well", lambda: [ok("well", "")], "")]
    found = by_check(run_checks(checks, 0.2))
    ended.set()
    assert (found["fails"].verdict, found["fails"].fix) == (Verdict.FAULT, "fix 1")
    assert "PermissionDeniedError" in found["fails"].text
    assert (found["hangs"].verdict, found["hangs"].fix) == (Verdict.FAULT, "fix 2")
    assert found["well"].verdict is Verdict.OK


# ---------------------------------------------------------------------------------------------------------------- storage


class Broken:
    """A storage with one fault."""

    def __init__(self, folder: Path, **faults: Any) -> None:
        self._real = open_storage(str(folder))
        self._faults = faults

    @property
    def root(self) -> str:
        return self._real.root

    def execute(self, operation: Any) -> Any:
        broken = self._faults.get(type(operation).__name__)
        return broken(self._real, operation) if broken is not None else self._real.execute(operation)


def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **faults: Any) -> dict[str, Finding]:
    monkeypatch.setattr(storage, "open_storage", lambda location: Broken(tmp_path, **faults))
    return by_check(list(storage.storage_of(str(tmp_path), NONCE)))


def everything_in(folder: Path) -> list[str]:
    """Folders too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_sound_directory_and_nothing_is_left(tmp_path: Path) -> None:
    open_storage(str(tmp_path)).execute(PutIfAbsent(DIRECTORY_FILE, b"n"))
    before = everything_in(tmp_path)
    found = list(storage.storage_of(str(tmp_path), NONCE))
    checks = [finding.check for finding in found if finding.verdict is Verdict.OK]
    assert {"state directory", "conditional create", "hard links", "storage clock"} <= set(checks)
    assert everything_in(tmp_path) == before
    assert is_directory_file(f"{doctor_folder(NONCE)}/write-0"), "what a killed run leaves has an owner"


def test_a_path_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """It may be a typing error, a mount that is missing, or a first start."""
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    before = everything_in(tmp_path)
    first, *rest = storage.storage_of(str(tmp_path / "state"), NONCE)
    assert (first.check, first.verdict) == ("state directory", Verdict.WARNING)
    assert f"mkdir {tmp_path / 'state'}" in first.fix
    assert "findmnt" in first.fix
    assert {finding.check for finding in rest} <= {"space", "inodes"}, "of the folder that it would be in"
    for wrong in ("not/mounted/state", "file", "dangling", "file/state"):
        (found,) = storage.storage_of(f"file://{tmp_path / wrong}", NONCE)
        assert (found.check, found.verdict) == ("state directory", Verdict.FAULT), wrong
        assert "mount" in found.fix
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize(("name", "words"), [("lost+found", "is empty"), ("photos", "has other files")])
def test_a_folder_that_no_coordinator_has_served_is_a_warning_and_is_tried(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).mkdir()
    found = by_check(list(storage.storage_of(str(tmp_path), NONCE)))
    assert (found["state directory"].verdict, words in found["state directory"].text) == (Verdict.WARNING, True)
    assert found["conditional create"].verdict is Verdict.OK
    assert everything_in(tmp_path) == [name]


def test_folders_that_others_use_meanwhile_stay(tmp_path: Path) -> None:
    opened = open_storage(str(tmp_path))
    made = storage.folders_of_trials(opened)
    for path in (f"{doctor_folder(NONCE)}/a", f"{doctor_folder('f' * 16)}/another-run"):
        opened.execute(PutIfAbsent(path, b""))
    storage.remove_trials(opened, doctor_folder(NONCE), made)
    assert opened.execute(ListFiles("")) == [f"{doctor_folder('f' * 16)}/another-run"]


def test_a_sound_bucket_and_one_that_overwrites(bucket: str, connection: S3Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "open_storage", lambda location: S3Storage(location, connection))
    found = by_check(list(storage.storage_of(f"{bucket}/state", NONCE)))
    assert found.pop("state directory").verdict is Verdict.WARNING, "no coordinator has served it"
    assert {"conditional create", "copies in the store", "fsync", "storage clock"} == set(found)
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}
    assert S3Storage(f"{bucket}/state", connection).execute(ListFiles("")) == []
    S3Storage(f"{bucket}/state", connection).execute(PutIfAbsent(DIRECTORY_FILE, b"n"))
    assert by_check(list(storage.storage_of(f"{bucket}/state", NONCE)))["state directory"].verdict is Verdict.OK


def test_a_storage_that_overwrites_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(tmp_path, monkeypatch, PutIfAbsent=lambda real, operation: real.execute(operation) or True)
    assert found["conditional create"].verdict is Verdict.FAULT
    assert "8 of 8" in found["conditional create"].text


def test_a_storage_that_keeps_the_wrong_content_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(tmp_path, monkeypatch, ReadFile=lambda real, operation: b"another's")
    assert found["conditional create"].verdict is Verdict.FAULT


def test_a_link_that_is_none_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(real: Any, operation: Any) -> Any:
        return real.execute(PutIfAbsent(operation.target, b""))

    assert look(tmp_path, monkeypatch, LinkFile=empty)["hard links"].verdict is Verdict.FAULT


@pytest.mark.parametrize(
    ("off_ms", "verdict"),
    [(0, Verdict.OK), (5_000, Verdict.WARNING), (-5_000, Verdict.WARNING), (DAY_MS, Verdict.FAULT), (-DAY_MS, Verdict.FAULT)],
)
def test_a_clock_that_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off_ms: int, verdict: Verdict) -> None:
    def shifted(real: Any, operation: DescribeFiles) -> list[FileFacts]:
        return [FileFacts(fact.path, fact.size, fact.modified_ms + off_ms) for fact in real.execute(operation)]

    assert look(tmp_path, monkeypatch, DescribeFiles=shifted)["storage clock"].verdict is verdict


def test_a_storage_that_refuses_is_named_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(real: Any, operation: Any) -> Any:
        raise PermissionDeniedError("may not write", path="/x")

    found = look(tmp_path, monkeypatch, PutIfAbsent=refuse)
    assert found["storage"].verdict is Verdict.FAULT
    assert "right to write" in found["storage"].fix


@pytest.mark.parametrize(
    ("kind", "verdict"), [("ext4", Verdict.OK), ("tmpfs", Verdict.FAULT), ("overlay", Verdict.WARNING), ("", Verdict.OK)]
)
def test_a_file_system_that_does_not_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, verdict: Verdict) -> None:
    monkeypatch.setattr(storage, "file_system_of", lambda folder: kind)
    monkeypatch.setattr(storage, "WRITE_SLOW_MS", 60_000)
    assert look(tmp_path, monkeypatch)["fsync"].verdict is verdict


def test_a_slow_store_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "WRITE_SLOW_MS", 0)
    monkeypatch.setattr(storage, "file_system_of", lambda folder: "ext4")
    assert look(tmp_path, monkeypatch)["fsync"].verdict is Verdict.WARNING


@pytest.mark.parametrize(("free", "verdict"), [(1 << 40, Verdict.OK), (1 << 30, Verdict.WARNING), (1 << 20, Verdict.FAULT)])
def test_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, verdict: Verdict) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=1 << 41, free=free))
    assert by_check(list(storage.space(tmp_path)))["space"].verdict is verdict


def test_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=1 << 41, free=1 << 40))
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_files=1_000_000, f_favail=7))
    assert by_check(list(storage.space(tmp_path)))["inodes"].verdict is Verdict.WARNING


# ------------------------------------------------------------------------------------------------------------------- host


def test_this_host_has_its_libraries() -> None:
    assert worst(list(host.versions())) is Verdict.OK


def test_a_library_that_is_not_for_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_NATIVE", ("msgspec", "no_such_library"))
    found = by_check(list(host.versions()))["libraries"]
    assert (found.verdict, "no_such_library" in found.text) == (Verdict.FAULT, True)


def fake_java(folder: Path, version: str) -> dict[str, str]:
    command = folder / "bin" / "java"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    command.chmod(0o755)
    return {"JAVA_HOME": str(folder)}


@pytest.mark.parametrize(("version", "verdict"), [("17.0.9", Verdict.OK), ("1.8.0_392", Verdict.FAULT), ("11.0.1", Verdict.FAULT)])
def test_java(tmp_path: Path, version: str, verdict: Verdict) -> None:
    assert worst(list(host.java(fake_java(tmp_path, version)))) is verdict


def test_no_java_is_a_warning(tmp_path: Path) -> None:
    assert worst(list(host.java({"JAVA_HOME": str(tmp_path)}))) is Verdict.WARNING


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1_024))
    found = by_check(list(host.limits()))
    assert (found["open files"].verdict, found["processes"].verdict) == (Verdict.WARNING, Verdict.WARNING)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=32 << 20))
    assert worst(list(host.shared_memory(tmp_path))) is Verdict.WARNING
    assert worst(list(host.shared_memory(tmp_path / "none"))) is Verdict.SKIPPED


@pytest.mark.parametrize(
    ("text", "verdict", "named"),
    [
        ("spark.executor.memory 4g\n# spark.speculation true\n", Verdict.OK, ""),
        ("spark.speculation   true\n", Verdict.FAULT, "spark.speculation"),
        ("spark.speculation=true\n", Verdict.FAULT, "spark.speculation"),
        ("spark.dynamicAllocation.enabled: true\n", Verdict.WARNING, "dynamicAllocation"),
    ],
)
def test_spark_settings_of_a_file(tmp_path: Path, text: str, verdict: Verdict, named: str) -> None:
    file = tmp_path / "conf" / "spark-defaults.conf"
    file.parent.mkdir()
    file.write_text(text)
    for chosen, environment in ((file, {}), (None, {"SPARK_HOME": str(tmp_path)}), (None, {"SPARK_CONF_DIR": str(file.parent)})):
        found = list(host.spark_settings(chosen, environment))
        assert (worst(found), named in found[0].text) == (verdict, True)
    assert worst(list(host.spark_settings(None, {}))) is Verdict.SKIPPED
    assert worst(list(host.spark_settings(tmp_path / "none", {}))) is Verdict.FAULT


# ---------------------------------------------------------------------------------------------------------------- network


def test_a_coordinator_that_is_well(served: Served) -> None:
    found = by_check(list(network.coordinator(served.url, served.token)))
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}
    assert {"coordinator", "coordinator clock", "token"} <= set(found)


def test_a_wrong_token_a_start_that_is_not_over_and_nobody_there(served: Served, coordinator: FakeCoordinator) -> None:
    coordinator.ready = False
    found = by_check(list(network.coordinator(served.url, "x" * 20)))
    assert (found["token"].verdict, found["ready"].verdict) == (Verdict.FAULT, Verdict.WARNING)
    assert worst(list(network.coordinator("http://127.0.0.1:1", None))) is Verdict.FAULT


def make_certificate(folder: Path, *, days: float = 365, names: bool = True) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coordinator")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(days=400)).not_valid_after(now + datetime.timedelta(days=days))
    if names:
        shown = [x509.DNSName("coordinator"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        made = made.add_extension(x509.SubjectAlternativeName(shown), critical=False)
    folder.mkdir()
    (folder / "cert.pem").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(secret)
    return folder / "cert.pem", folder / "key.pem"


def test_certificates(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path / "a")
    other, other_key = make_certificate(tmp_path / "b")
    found = by_check(list(network.certificates(certificate, key, None)))
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}
    assert found["certificate names"].text == "coordinator, 127.0.0.1"
    assert worst(list(network.certificates(certificate, other_key, None))) is Verdict.FAULT
    assert worst(list(network.certificates(certificate, key, other))) is Verdict.FAULT, "of another authority"
    assert worst(list(network.certificates(certificate, tmp_path / "none", None))) is Verdict.FAULT
    expired = list(network.certificates(*make_certificate(tmp_path / "c", days=-1), None))
    assert (worst(expired), "expired" in expired[0].text) == (Verdict.FAULT, True)
    soon = list(network.certificates(*make_certificate(tmp_path / "d", days=7), None))
    assert (worst(soon), "expires on" in soon[0].text) == (Verdict.WARNING, True)
    nameless = by_check(list(network.certificates(*make_certificate(tmp_path / "e", names=False), None)))
    assert nameless["certificate names"].verdict is Verdict.FAULT


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def served_with(context: ssl.SSLContext) -> Iterator[str]:
    """URL of a coordinator that shows a certificate."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.mark.parametrize(("days", "verdict"), [(365, Verdict.OK), (7, Verdict.WARNING)])
def test_a_coordinator_with_a_certificate_of_its_own(tmp_path: Path, days: float, verdict: Verdict) -> None:
    certificate, key = make_certificate(tmp_path / "a", days=days)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with served_with(context) as url:
        trusted = by_check(list(network.coordinator(url, "t" * 20, certificate.read_text())))
        (refused,) = network.coordinator(url, "t" * 20)
    assert trusted.pop("certificate").verdict is verdict
    assert {finding.verdict for finding in trusted.values()} == {Verdict.OK}
    assert (refused.verdict, "--ca" in refused.fix) == (Verdict.FAULT, True)


@pytest.mark.parametrize(
    ("age_days", "check", "verdict"),
    [
        (0, "certificate", Verdict.OK),
        (15, "certificate", Verdict.OK),
        (25, "certificate", Verdict.WARNING),
        (40, "coordinator", Verdict.FAULT),
    ],
)
def test_the_certificate_of_tls_auto_is_judged_by_what_the_coordinator_shows(age_days: int, check: str, verdict: Verdict) -> None:
    """It holds for 30 days and is made anew at half of that: with less left it has not been."""
    today = datetime.datetime.now(datetime.UTC)
    own = draw_authority(today)
    pair = issue_pair(own, ["127.0.0.1"], today - datetime.timedelta(days=age_days))
    with served_with(server_context(pair)) as url:
        found = by_check(list(network.coordinator(url, "t" * 20, own.certificate_pem.decode())))
    assert found[check].verdict is verdict
    assert verdict is Verdict.OK or "--tls auto" in found[check].fix


@pytest.mark.parametrize(
    ("age_days", "verdict", "word"),
    [
        (0, Verdict.OK, "holds"),
        (3_630, Verdict.WARNING, "expires"),
        (3_651, Verdict.FAULT, "expired"),
        (-9, Verdict.FAULT, "before"),
    ],
)
def test_the_authority_of_a_state_directory(tmp_path: Path, age_days: int, verdict: Verdict, word: str) -> None:
    own = draw_authority(datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=age_days))
    open_storage(str(tmp_path)).execute(PutIfAbsent(AUTHORITY_FILE, own.stored()))
    (found,) = network.authority(None, str(tmp_path))
    assert (found.check, found.verdict, word in found.text) == ("authority", verdict, True)
    assert AUTHORITY_FILE in found.text
    publish_certificate(own, tmp_path)
    (published,) = network.authority(None, str(tmp_path))
    assert (published.verdict, CA_FILE in published.text) == (verdict, True)
    (trusted,) = network.authority(own.certificate_pem.decode(), None)
    assert trusted.verdict is verdict


def test_an_authority_that_is_none_is_a_fault_and_no_authority_is_told(tmp_path: Path) -> None:
    (none,) = network.authority(None, str(tmp_path))
    assert none.verdict is Verdict.SKIPPED
    (tmp_path / CA_FILE).write_text("not PEM")
    (broken,) = network.authority(None, str(tmp_path))
    assert (broken.verdict, "holds no certificate" in broken.text) == (Verdict.FAULT, True)


@pytest.mark.parametrize("name", [CA_FILE, AUTHORITY_FILE])
def test_an_authority_that_grew_without_end_is_not_read_whole(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    (found,) = network.authority(None, str(tmp_path))
    assert (found.verdict, found.text) == (Verdict.FAULT, f"{name}: longer than 1048576 bytes, which no such record is")


def test_of_several_trusted_certificates_the_last_to_end_counts() -> None:
    today = datetime.datetime.now(datetime.UTC)
    old, new = (draw_authority(today - datetime.timedelta(days=days)).certificate_pem.decode() for days in (3_655, 0))
    (found,) = network.authority(old + new, None)
    assert found.verdict is Verdict.OK


def test_what_an_executor_sees(served: Served, tmp_path: Path) -> None:
    with executors.shared_file(str(tmp_path)) as shared:
        seen = executors.probe(served.url, shared)
        lost = executors.probe("http://127.0.0.1:1", shared._replace(directory=str(tmp_path / "none")))
    found = by_check(list(executors.judge([seen], served.url, str(tmp_path), between_s=now())))
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}
    found = by_check(list(executors.judge([seen, {**lost, "host": "b"}], "http://127.0.0.1:1", "/data", between_s=now())))
    assert (found["executors"].verdict, found["shared directory"].verdict) == (Verdict.FAULT, Verdict.FAULT)
    odd = {**seen, "python": "3.9.1", "time_s": time.time() - 86_400}
    found = by_check(list(executors.judge([odd], served.url, None, between_s=now())))
    assert (found["executors' Python"].verdict, found["executors' clocks"].verdict) == (Verdict.FAULT, Verdict.FAULT)


def test_executors_are_asked_for_the_way_to_each_member(served: Served) -> None:
    """A member that stands by is of no use where workers can't reach it."""
    lost = "http://127.0.0.1:1"
    one, both = executors.probe(served.url, None), executors.probe(f"{served.url},{lost}", None)
    found = by_check(list(executors.judge([one], served.url, None, between_s=now())))["executors"]
    assert (found.verdict, found.text.endswith(f"reach {served.url}")) == (Verdict.OK, True)
    found = by_check(list(executors.judge([both], f"{served.url},{lost}", None, between_s=now())))["executors"]
    assert found.verdict is Verdict.FAULT
    assert f"can't reach {lost}" in found.text
    assert served.url not in found.text
    fine = {**both, "lost": {}}  # of one host: what one task could not reach is not mended by another that could
    found = by_check(list(executors.judge([both, fine], f"{served.url},{lost}", None, between_s=now())))["executors"]
    assert found.verdict is Verdict.FAULT


def test_all_members_are_handed_to_executors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[str | None]()

    def asked(url: str | None, where: str | None, settings: Mapping[str, str]) -> Iterator[Finding]:
        given.append(url)
        return iter(())

    monkeypatch.setattr(executors, "ask_spark", asked)
    run("--url", "http://127.0.0.1:1,http://127.0.0.1:2", "--spark", "--json")
    assert given == ["http://127.0.0.1:1,http://127.0.0.1:2"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "LOOKS_EVERY_S", 0.01)


def directory_of(seen: Sequence[dict[str, Any]], directory: Path) -> Finding:
    found = by_check(list(executors.judge(seen, None, str(directory), between_s=now())))
    return found["shared directory"]


@pytest.mark.usefixtures("impatient")
def test_another_directory_of_the_same_path_is_told_from_a_shared_one(tmp_path: Path) -> None:
    """As on a host where the mount is missing: the folder is there, and perhaps files of an earlier run are."""
    with executors.shared_file(str(tmp_path / "here")) as shared:
        good = executors.probe(None, shared)
        assert directory_of([good], tmp_path / "here").verdict is Verdict.OK
        there = shared._replace(directory=str(tmp_path / "there"))
        stale = tmp_path / "there" / shared.path
        (tmp_path / "there").mkdir()
        seen = [{**executors.probe(None, there), "host": "b"}]
        stale.parent.mkdir(parents=True)
        stale.write_text("of an earlier run")
        seen += [{**executors.probe(None, there), "host": "c"}]
    for bad in seen:
        found = directory_of([good, bad, good], tmp_path / "here")
        assert (found.verdict, found.text) == (Verdict.FAULT, f"{bad['host']} has another directory at {tmp_path / 'here'}")
        assert "mount the same file system" in found.fix
    assert directory_of([*seen, good], tmp_path / "here").text.endswith("; so it is with 1 more")
    assert list((tmp_path / "there").rglob("executor-*")) == [], "nothing is written where it is not shared"


@pytest.mark.usefixtures("impatient")
def test_a_directory_that_executors_may_not_read_or_write_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with executors.shared_file(str(tmp_path)) as shared:
        path = tmp_path / shared.path
        for mode, word in (("xb", "can't write to"), ("rb", "can't read")):

            def refuse(name: str, how: str, mode: str = mode) -> Any:
                if how == mode:
                    raise PermissionError(13, "Permission denied")
                return open(name, how)

            monkeypatch.setattr(executors, "open", refuse, raising=False)
            found = directory_of([executors.probe(None, shared)], tmp_path)
            assert (found.verdict, word in found.text, "Permission denied" in found.text) == (Verdict.FAULT, True, True)
            assert "user" in found.fix
        path.unlink()
        path.mkdir()  # nothing that can be read as a file
        monkeypatch.undo()
        assert directory_of([executors.probe(None, shared)], tmp_path).verdict is Verdict.FAULT


@pytest.mark.usefixtures("impatient")
def test_a_file_that_comes_a_moment_later_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with executors.shared_file(str(tmp_path)) as shared:
        path = tmp_path / shared.path
        content = path.read_bytes()
        path.unlink()
        waits: list[float] = []

        def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 2:
                path.write_bytes(content)

        monkeypatch.setattr("holdfast.api.doctor.executors.time.sleep", wait)
        assert directory_of([executors.probe(None, shared)], tmp_path).verdict is Verdict.OK
    assert len(waits) == 2


def test_an_executor_without_holdfast_can_be_asked(tmp_path: Path) -> None:
    from pyspark import cloudpickle

    with executors.shared_file(str(tmp_path)) as shared:
        cloudpickle.register_pickle_by_value(executors)
        try:
            sent = cloudpickle.dumps(functools.partial(executors.probe, None, shared))
        finally:
            cloudpickle.unregister_pickle_by_value(executors)
        code = (
            "import json, pickle, sys; sys.modules['holdfast'] = None; "
            "print(json.dumps(pickle.loads(sys.stdin.buffer.read())()))"
        )
        done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["directory"] == "same"


def test_nothing_is_left_of_what_executors_were_asked(tmp_path: Path) -> None:
    with executors.shared_file(str(tmp_path)) as shared:
        executors.probe(None, shared)
        left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
        assert len(left) == 2
        assert all(is_directory_file(path) for path in left), "no orphans for fsck, even if it is killed here"
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


# -------------------------------------------------------------------------------------------------------------- the command


def run(*arguments: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(app, ["doctor", *arguments])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_URL", "HOLDFAST_STATE_DIR", "SPARK_HOME", "SPARK_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    mistyped = run("--state-dir", "nowhere/state", "--json")
    assert (mistyped.exit_code, everything_in(tmp_path)) == (2, [])
    (tmp_path / "state").mkdir()
    done = run("--state-dir", "state", "--json")
    findings = json.loads(done.stdout)
    assert done.exit_code == exit_code([Finding(**{**each, "verdict": Verdict(each["verdict"])}) for each in findings])
    assert {"conditional create", "authority"} <= {each["check"] for each in findings}
    assert all(each["fix"] for each in findings if each["verdict"] in ("warning", "fault"))
    certificate, key = make_certificate(tmp_path / "tls", days=-1)
    expired = run("--tls-cert", str(certificate), "--tls-key", str(key))
    assert expired.exit_code == 2
    assert "FAULT    certificate" in expired.stdout
    assert "fix: renew it" in expired.stdout
    assert run("--tls-cert", str(certificate)).exit_code == 2, "a certificate without its key"


def now() -> tuple[float, float]:
    return time.time() - 1, time.time() + 1


@pytest.mark.parametrize(
    ("time_s", "verdict"),
    [(1_000, Verdict.OK), (1_002, Verdict.OK), (1_010, Verdict.WARNING), (990, Verdict.WARNING), (87_400, Verdict.FAULT)],
)
def test_executors_clocks_are_judged_by_when_they_were_asked(time_s: float, verdict: Verdict) -> None:
    seen = {"host": "a", "python": platform.python_version(), "time_s": time_s}
    found = by_check(list(executors.judge([seen], None, None, between_s=(1_000, 1_002))))
    assert found["executors' clocks"].verdict is verdict


def test_executors_are_asked_about_a_state_directory_if_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_URL", "HOLDFAST_STATE_DIR", "SPARK_HOME", "SPARK_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    directory = tmp_path / "state"

    def asked(url: str | None, where: str | None, settings: Mapping[str, str]) -> Iterator[Finding]:
        assert where is not None
        with executors.shared_file(where) as shared:
            yield from executors.judge([executors.probe(url, shared)], url, where, between_s=now())

    def asked_about_none(url: str | None, where: str | None, settings: Mapping[str, str]) -> Iterator[Finding]:
        assert where is None
        return iter(())

    monkeypatch.setattr(executors, "ask_spark", asked_about_none)
    missing = json.loads(run("--state-dir", str(directory), "--spark", "--json").stdout)
    assert [each["verdict"] for each in missing if each["check"] == "shared directory"] == ["skipped"]
    assert not directory.exists()
    directory.mkdir()
    monkeypatch.setattr(executors, "ask_spark", asked)
    found = json.loads(run("--state-dir", str(directory), "--spark", "--json").stdout)
    shared = [(each["verdict"], each["text"]) for each in found if each["check"] == "shared directory"]
    assert [verdict for verdict, _ in shared] == ["ok"]
    assert shared[0][1].endswith(f"read and write {directory}")
    assert "spark settings" not in {each["check"] for each in found}, "Spark says itself what it has read"


def test_spark_is_started_with_the_named_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, given = tmp_path / "spark.conf", list[dict[str, str]]()

    def asked(url: str | None, where: str | None, settings: Mapping[str, str]) -> Iterator[Finding]:
        given.append(dict(settings))
        return iter(())

    monkeypatch.setattr(executors, "ask_spark", asked)
    missing = json.loads(run("--spark", "--spark-conf", str(file), "--json").stdout)
    file.write_text("spark.master local[3]\n")
    run("--spark", "--spark-conf", str(file), "--json")
    assert given == [{"spark.master": "local[3]"}]
    (executor,) = [each for each in missing if each["check"] == "executors"]
    assert (executor["verdict"], executor["text"]) == ("skipped", f"Spark is not started: {file} can't be read")


def test_an_empty_state_directory_is_refused_and_nothing_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path / "state"))
    said = run("--state-dir", "")
    assert (said.exit_code, said.stdout) == (2, "")
    assert "the state directory is empty: leave --state-dir out, or name one" in said.stderr
    assert not list(tmp_path.iterdir())
