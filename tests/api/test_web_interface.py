"""Flink's UI from a user's jar: what is served, and which jars are refused at start."""

from __future__ import annotations

import base64
import zipfile
from pathlib import Path
from typing import Any

import pytest

from holdfast.api.errors import FlinkUiError
from holdfast.api.flink import web_interface
from holdfast.api.flink.web_interface import WebInterface
from holdfast.api.server.main import serve
from holdfast.api.settings import ServerSettings, server_settings
from holdfast.statebackends.errors import InvalidConfigError, StorageUnavailableError
from tests.api.fakes import JOB, TOKEN, FakeCoordinator, serving

PAGE = b"<!doctype html><title>a page</title>"


def make_jar(folder: Path, files: dict[str, bytes] | None = None, method: int = zipfile.ZIP_DEFLATED) -> Path:
    jar = folder / "flink-dist.jar"
    found = (
        {"web/index.html": PAGE, "web/assets/a.js": b"1", "web/x.bin": b"\0", "META-INF/secret": b"no"} if files is None else files
    )
    with zipfile.ZipFile(jar, "w", method) as archive:
        for name, content in found.items():
            archive.writestr(name, content)
    return jar


def test_the_ui_and_the_dialect_are_below_flink(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path, flink_ui=make_jar(tmp_path)) as served:
        page = served.request("GET", "/flink/")
        assert (page.data, page.headers["content-type"]) == (PAGE, "text/html; charset=utf-8")
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        script = served.request("GET", "/flink/assets/a.js")
        assert (script.data, script.headers["content-type"]) == (b"1", "text/javascript; charset=utf-8")
        assert served.request("GET", "/flink/x.bin").headers["content-type"] == "application/octet-stream"
        again = served.request("GET", "/flink/assets/a.js", headers={"If-None-Match": script.headers["etag"]})
        assert (again.status, again.data) == (304, b"")
        moved = served.request("GET", "/flink", redirect=False)
        assert (moved.status, moved.headers["location"]) == (307, "/flink/")
        for path in ("overview", "jobs/overview", f"jobs/{JOB}", "jobmanager/config", "applications/overview"):
            assert (
                served.json("GET", f"/flink/{path}").keys() if path != "jobmanager/config" else served.json("GET", f"/flink/{path}")
            )
        paths = (
            "META-INF/secret",
            "../META-INF/secret",
            "..%2FMETA-INF%2Fsecret",
            "assets",
            "assets/",
            "%2Fetc%2Fpasswd",
            "web/index.html",
        )
        for path in paths:
            assert served.request("GET", f"/flink/{path}").status == 404


def test_the_ui_needs_the_token_and_a_browser_is_asked_for_it(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path, flink_ui=make_jar(tmp_path)) as served:

        def ask(path: str, **headers: str) -> Any:
            return served.http.request("GET", served.url + path, headers=headers)

        refused = ask("/flink/")
        assert refused.status == 401
        assert 'Basic realm="' in refused.headers["www-authenticate"]
        assert "Basic" not in ask("/v1/overview").headers["www-authenticate"], "a program needs no dialog"
        password = "Basic " + base64.b64encode(f"me:{TOKEN}".encode()).decode()
        assert ask("/flink/", Authorization=password).status == 200
        assert ask("/flink/assets/favicon/manifest.json").status == 404, "browsers ask for it without a password"
        cancel = f"/flink/jobs/{JOB}/yarn-cancel"
        assert ask(cancel, Authorization=password).status == 403
        assert ask(cancel, Authorization=password, **{"Sec-Fetch-Site": "same-origin"}).status == 202


def test_without_a_jar_there_is_no_ui(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path) as served:
        assert [served.request("GET", path).status for path in ("/flink/", "/flink/overview")] == [404, 404]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "has no web/index.html"),
        ({"index.html": PAGE, "web/other.html": PAGE}, "has no web/index.html"),
        ({"web/index.html/": b""}, "has no web/index.html"),
        ({"web/index.html": PAGE, "web/large": bytes(1_001)}, "has a file of 1001 bytes"),
        ({"web/index.html": PAGE, **{f"web/{number}": bytes(900) for number in range(4)}}, "has more below web/"),
        ({"web/index.html": PAGE, **{f"web/{number}": b"" for number in range(10)}}, "has more below web/"),
    ],
)
def test_a_jar_without_a_ui_is_refused(
    tmp_path: Path, files: dict[str, bytes], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_interface, "FILE_BYTES_MAX", 1_000)
    monkeypatch.setattr(web_interface, "FILES_BYTES_MAX", 3_000)
    monkeypatch.setattr(web_interface, "FILES_MAX", 10)
    jar = make_jar(tmp_path, files)
    with pytest.raises(FlinkUiError, match=words) as caught:
        WebInterface(jar)
    assert caught.value.path == str(jar)


def test_what_is_no_jar_is_refused_before_anything_starts(tmp_path: Path) -> None:
    text = tmp_path / "text.jar"
    text.write_text("no zip")
    for jar in (text, tmp_path / "missing.jar", tmp_path):
        settings = ServerSettings(state_dir=tmp_path / "state", token=TOKEN, flink_ui=jar)
        with pytest.raises(FlinkUiError, match="can't be read as a jar"):
            serve(settings, announce=lambda _: None)
    assert not (tmp_path / "state").exists()
    assert isinstance(caught_as_config(text), InvalidConfigError)


def caught_as_config(jar: Path) -> Exception:
    with pytest.raises(InvalidConfigError) as caught:
        WebInterface(jar)
    return caught.value


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_packings_are_refused(tmp_path: Path, method: int) -> None:
    with pytest.raises(FlinkUiError, match="packed in a way that jars are not"):
        WebInterface(make_jar(tmp_path, method=method))


def test_a_file_that_unpacks_to_more_than_it_says_is_not_unpacked(tmp_path: Path) -> None:
    jar = make_jar(tmp_path, {"web/index.html": bytes(40_000_000)})
    content = bytearray(jar.read_bytes())
    size = (40_000_000).to_bytes(4, "little")
    assert content.count(size) == 2
    jar.write_bytes(content.replace(size, (10).to_bytes(4, "little")))
    web = WebInterface(jar)
    found = web.find("")
    assert found is not None
    with pytest.raises(StorageUnavailableError, match="can't be read any more"):
        web.read(found)
    web.close()


def test_a_jar_that_was_overwritten_is_a_503(tmp_path: Path) -> None:
    jar = make_jar(tmp_path)
    with serving(FakeCoordinator(), tmp_path, flink_ui=jar) as served:
        with jar.open("r+b") as file:
            file.write(bytes(jar.stat().st_size))
        assert "can't be read any more" in served.json("GET", "/flink/", status=503)["errors"][0]


def test_the_jar_is_named_by_a_flag_or_the_environment(tmp_path: Path) -> None:
    environment = {"HOLDFAST_FLINK_UI": "~/a.jar"}
    assert server_settings(environment, state_dir=tmp_path, no_token=True).flink_ui == Path("~/a.jar").expanduser()
    assert server_settings(environment, state_dir=tmp_path, no_token=True, flink_ui="/b.jar").flink_ui == Path("/b.jar")
    assert server_settings({}, state_dir=tmp_path, no_token=True).flink_ui is None
