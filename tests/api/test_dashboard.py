"""Files of the dashboard: which are served and how, how large they are, and that those of others are what npm has."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from holdfast.api.ui import files
from tests.api.fakes import FakeCoordinator, Served, serving

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "api" / "ui"


@pytest.mark.parametrize("path", sorted(files.OPEN_PATHS - {files.PREFIX}))
def test_every_file_is_open_whole_and_under_a_strict_policy(served: Served, path: str) -> None:
    answer = served.http.request("GET", served.url + path)
    name = path.removeprefix(files.PREFIX).removeprefix("/")
    found = files.find(name)
    assert found is not None
    assert (answer.status, answer.data, answer.headers["content-type"]) == (200, found.content, found.media_type)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = served.http.request("GET", served.url + path, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status, again.data) == (304, b"")


@pytest.mark.parametrize(
    "name",
    [
        "nothing.js",
        "../files.py",
        "..%2ffiles.py",
        "static/app.js",
        "pages",
        "pages/",
        "pages/../app.js",
        "vendor/preact/LICENSE",
        "vendor/README.md",
        "%2Fetc%2Fpasswd",
        "app.js%00",
        "app.js/",
        "./app.js",
        "a" * 300,
    ],
)
def test_nothing_else_is_served_nor_shown_to_strangers(served: Served, name: str) -> None:
    stranger = served.http.request("GET", f"{served.url}/ui/{name}", redirect=False)
    allowed = served.request("GET", f"/ui/{name}", redirect=False)
    if stranger.status == 200:  # the client itself makes it a path of the table
        assert stranger.data == files.find("app.js").content  # type: ignore[union-attr]
    else:
        assert (stranger.status, allowed.status // 100) in ((401, 4), (404, 4))


def test_the_short_address_leads_to_the_page(served: Served) -> None:
    moved = served.http.request("GET", f"{served.url}/ui", redirect=False)
    assert (moved.status, moved.headers["location"]) == (307, "ui/")


def test_the_table_has_every_file_and_they_are_small() -> None:
    ours = {path.relative_to(FOLDER / "static").as_posix() for path in (FOLDER / "static").rglob("*") if path.is_file()}
    others = {path.relative_to(FOLDER).as_posix() for path in (FOLDER / "vendor").glob("*/*") if path.name != "LICENSE"}
    assert set(files.NAMES) == ours | others
    sizes = {name: len(found.content) for name in files.NAMES if (found := files.find(name)) is not None}
    assert sum(sizes.values()) <= files.BYTES_MAX, sizes
    assert all(size > 100 for size in sizes.values())


def test_a_page_has_no_script_or_style_in_it_and_names_no_other_host() -> None:
    for path in [FOLDER / "static" / name for name in files.NAMES if not name.startswith("vendor/")]:
        text = path.read_text()
        hosts = set(re.findall(r"https?://[^\s\"'`<>]+", text)) - {"http://www.w3.org/2000/svg"}
        assert hosts == set(), path
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=[\"']", text), path
        assert not re.search(
            r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage|sessionStorage", text
        ), path


def test_imports_are_files_of_the_table() -> None:
    for name in files.NAMES:
        if not name.endswith((".js", ".mjs")):
            continue
        found = files.find(name)
        assert found is not None
        for target in re.findall(r"""(?:from|import)\s*["'](\.[^"']+)["']""", found.content.decode()):
            folder = Path("/ui") / Path(name).parent
            assert (folder / target).resolve().as_posix().removeprefix("/ui/") in files.NAMES, (name, target)


def test_files_of_others_are_as_they_were_fetched() -> None:
    sums = dict(line.split("  ")[::-1] for line in (ROOT / "scripts" / "vendored.sha256").read_text().splitlines())
    pins = json.loads((ROOT / "scripts" / "vendored.json").read_text())
    assert {f"{pin['folder']}/{name}" for pin in pins for name in pin["files"].values()} == set(sums)
    for path, digest in sums.items():
        assert hashlib.sha256((ROOT / path).read_bytes()).hexdigest() == digest, f"{path} was changed: make vendor"
    for pin in pins:
        assert re.fullmatch(r"sha512-[A-Za-z0-9+/]{86}==", pin["integrity"])
        assert (ROOT / pin["folder"] / "LICENSE").stat().st_size > 500
        assert pin["version"] in (ROOT / pin["folder"]).parent.joinpath("README.md").read_text()


def test_a_service_without_a_token_shows_it_too(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path, token=None) as served:
        assert served.http.request("GET", f"{served.url}/ui/").status == 200
