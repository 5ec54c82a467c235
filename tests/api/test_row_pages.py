"""Pages of rows, differences and preflight over REST: bounded, for operators alone, and all rows once over all pages."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyarrow as pa
import pytest

from holdfast.api.routes import jobs
from holdfast.api.routes.lifecycle import snapshots
from holdfast.api.snapshots import row_pages
from holdfast.api.snapshots.row_pages import RowPosition, cell_text, clip_text
from holdfast.api.snapshots.snapshot import Snapshot
from holdfast.barriers.codec import ERROR_HEADER
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.storage.directory import LocalStorage
from tests.api.fakes import JOB, FakeCoordinator, Served, serving
from tests.statebackends.snapshot_harness import KINDS, SOME, UID, Contents, write


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Served]:
    with serving(FakeCoordinator(), tmp_path / "state") as running:
        yield running


def written(tmp_path: Path, contents: Contents = SOME, name: str = "job/chk-7", **options: Any) -> Path:
    return Path(write(tmp_path, name, contents, storage=LocalStorage(tmp_path / "state"), **options).location)


def pages(snapshot: Snapshot, state: str, limit: int) -> list[row_pages.RowPage]:
    found = [snapshot.row_page(UID, state, limit=limit)]
    while found[-1].next:
        found.append(snapshot.row_page(UID, state, after=found[-1].next, limit=limit))
        assert len(found) < 1_000
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [1, 2, 3, 500])
def test_pages_have_every_row_once_in_order(tmp_path: Path, kind: Any, limit: int) -> None:
    snapshot = Snapshot(written(tmp_path, kind=kind, parallelism=3))
    for state in snapshot.states(UID):
        whole = [[cell_text(value) for value in row.values()] for row in snapshot.rows(UID, state)]
        found = pages(snapshot, state, limit)
        assert [list(row) for page in found for row in page.rows] == whole, state
        assert all(len(page.rows) <= limit for page in found)


def test_many_keys_in_one_key_group_are_paged(tmp_path: Path) -> None:
    many = Contents(count={f"k{number}": number for number in range(3_000)})
    snapshot = Snapshot(written(tmp_path, many, kind="filesystem", parallelism=1))
    found = pages(snapshot, "count", 500)
    assert len({row[1] for page in found for row in page.rows}) == sum(len(page.rows) for page in found) == 3_000
    assert found[0].columns[:2] == ("key_group", "key")


def test_a_page_opens_a_bounded_number_of_files_and_ends_without_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_pages, "PARTS_MAX", 1)
    snapshot = Snapshot(written(tmp_path, Contents(count={"AA": 1}), kind="filesystem", parallelism=4))
    found = pages(snapshot, "count", 10)
    assert sorted(len(page.rows) for page in found)[-1] == 1
    assert 1 < len(found) <= 4


def test_a_large_value_is_cut_and_a_large_file_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot(written(tmp_path, Contents(seen={"AA": ["x" * 5_000]}), kind="filesystem"))
    (page,) = pages(snapshot, "seen", 10)
    assert page.clipped == 1
    assert max(len(text) for text in page.rows[0]) == row_pages.CELL_CHARACTERS_MAX
    monkeypatch.setattr(row_pages, "PART_BYTES_MAX", 10)
    with pytest.raises(InvalidConfigError, match="a page reads 10 at most") as caught:
        snapshot.row_page(UID, "seen")
    assert (caught.value.operator, caught.value.state) == (UID, "seen")


@pytest.mark.parametrize("text", ["x", "1", "1.", "1.2.3", "-1.0", "1.99999999", "٣.٤"])
def test_a_position_that_no_page_gave_is_refused(text: str) -> None:
    if text == "٣.٤":
        assert RowPosition.parse(text) == RowPosition(3, 4)  # digits are digits
        return
    with pytest.raises(InvalidConfigError, match="position"):
        RowPosition.parse(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [(b"\x00\xff", '"00ff"'), ({1: {"a"}}, "[[1, \"{'a'}\"]]"), ({"k": (1, None)}, '{"k": [1, null]}'), ("\ud800", '"\\ud800"')],
)
def test_any_value_has_a_text(value: Any, text: str) -> None:
    assert cell_text(value) == text


LARGE = 50_000


@pytest.mark.parametrize(
    "value",
    [
        list(range(LARGE)),
        [[] for _ in range(LARGE)],
        [[0] * 300 for _ in range(LARGE // 100)],
        {f"k{number}": number for number in range(LARGE)},
        dict.fromkeys(range(LARGE)),
        set(range(LARGE)),
        "x" * LARGE * 10,
        b"x" * LARGE * 10,
        {"a": "x" * LARGE, "b": list(range(LARGE))},
        {"x" * LARGE: 1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_of_a_large_value_no_more_becomes_text_than_is_shown(value: Any) -> None:
    """Objects and JSON of a large value are made without letting the interpreter lock go: of 256 MiB that takes minutes, in which
    no worker of any job is heard."""
    text = cell_text(value)
    assert row_pages.CELL_CHARACTERS_MAX < len(text) < 20 * row_pages.CELL_CHARACTERS_MAX
    assert clip_text(text)[:900] == clip_text(json.dumps(whole_of(value), default=str))[:900]


def whole_of(value: Any) -> Any:
    match value:
        case bytes():
            return value.hex()
        case dict() if not all(isinstance(key, str) for key in value):
            return list(value.items())
        case set():
            return str(value)
    return value


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (list(range(LARGE)), pa.list_(pa.int64())),
        ([[0] * 300 for _ in range(LARGE // 100)], pa.large_list(pa.list_(pa.int64()))),
        ([{"a": [number], "b": "é"} for number in range(LARGE)], pa.list_(pa.struct({"a": pa.list_(pa.int64()), "b": pa.utf8()}))),
        ([(number, None) for number in range(LARGE)], pa.map_(pa.int64(), pa.utf8())),
        ("x" * LARGE * 10, pa.utf8()),
    ],
    ids=["list", "nested", "structs", "map", "text"],
)
def test_of_a_large_row_no_more_becomes_objects_than_is_shown(value: Any, kind: Any) -> None:
    batch = pa.record_batch({"key": ["k", "l", "m"], "value": pa.array([value, None, value], kind)})
    found = row_pages.plain_rows(batch)
    assert [row["key"] for row in found] == ["k", "l", "m"]
    assert found[1]["value"] is None
    for row in (found[0], found[2]):
        assert len(row["value"]) <= row_pages.CELL_CHARACTERS_MAX + 1
        assert clip_text(cell_text(row["value"])) == clip_text(cell_text(value))
    small = batch.slice(1, 1)
    assert row_pages.plain_rows(small) == small.to_pylist()


# ------------------------------------------------------------------------------------------------------------ over REST


def ask(shown: Served, what: str, status: int = 200, **query: Any) -> Any:
    return shown.json("GET", f"/v1/snapshots/{what}?{urlencode(query)}", status=status)


def test_rows_by_rest(shown: Served, tmp_path: Path) -> None:
    path = written(tmp_path, kind="filesystem")
    first = ask(shown, "rows", path=path, uid=UID, state="count", limit=2)
    rest = ask(shown, "rows", path=path, uid=UID, state="count", after=first["next"])
    column = first["columns"].index("key")
    assert sorted(json.loads(row[column]) for row in first["rows"] + rest["rows"]) == ["AA", "UA", "WN"]
    assert (rest["next"], rest["clipped"]) == ("", 0)
    for query, status in (({"uid": "none"}, 404), ({"state": "none"}, 404), ({"after": "x"}, 400), ({"limit": 501}, 400)):
        ask(shown, "rows", status, **{"path": path, "uid": UID, "state": "count", **query})
    assert "in none of the directories" in ask(shown, "rows", 400, path="/etc", uid=UID, state="count")["errors"][0]


def test_differences_by_rest(shown: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = written(tmp_path, Contents(count={"AA": 1, "UA": 2}), "job/chk-1", kind="filesystem")
    new = written(tmp_path, Contents(count={"AA": 5, "WN": 3}), "job/chk-2", kind="filesystem")
    found = ask(shown, "diff", path=old, other=new, uid=UID, state="count")
    (state,) = found["states"]
    assert (found["same"], state["added"], state["removed"], state["changed"]) == (False, 1, 1, 1)
    changed = {json.loads(key["key"]): (key["change"], key["before"], key["after"]) for key in state["keys"]}
    assert changed == {"AA": ("changed", "1", "5"), "UA": ("removed", "2", "null"), "WN": ("added", "null", "3")}
    assert ask(shown, "diff", path=old, other=old)["same"]
    monkeypatch.setattr(snapshots, "DIFFERENCE_BYTES_MAX", 1)
    assert "name an operator and a state" in ask(shown, "diff", 400, path=old, other=new)["errors"][0]


@pytest.mark.parametrize(("what", "place"), [("rows", "_paging"), ("diff", "_comparing")])
def test_others_wait_for_their_turn(shown: Served, tmp_path: Path, what: str, place: str) -> None:
    path = written(tmp_path, kind="filesystem")
    allowed = getattr(snapshots, place)
    taken = list(itertools.takewhile(lambda _: allowed.acquire(blocking=False), itertools.count()))
    try:
        response = shown.request(
            "GET", f"/v1/snapshots/{what}?{urlencode({'path': path, 'other': path, 'uid': UID, 'state': 'count'})}"
        )
        assert (response.status, response.headers[ERROR_HEADER]) == (503, "StorageUnavailableError")
    finally:
        for _ in taken:
            allowed.release()
    ask(shown, what, path=path, other=path, uid=UID, state="count")


def test_the_graph_of_a_job_is_checked_against_a_snapshot(coordinator: FakeCoordinator, served: Served) -> None:
    report = served.json("GET", f"/v1/jobs/{JOB}/preflight?restore=7")
    assert report["job_id"] == JOB
    assert ("preflight",) in coordinator.calls
    served.json("GET", f"/v1/jobs/{'9' * 32}/preflight", status=404)
    taken = list(itertools.takewhile(lambda _: jobs._checking.acquire(blocking=False), itertools.count()))
    try:
        assert len(taken) == jobs.CHECKS_MAX
        assert "being checked" in served.json("GET", f"/v1/jobs/{JOB}/preflight", status=503)["errors"][0]
    finally:
        for _ in taken:
            jobs._checking.release()


@pytest.mark.endurance
def test_a_million_keys_don_t_hurt_a_page(tmp_path: Path) -> None:
    many = Contents(count={f"key-{number}": number for number in range(1_000_000)})
    snapshot = Snapshot(written(tmp_path, many, kind="filesystem"))
    page = snapshot.row_page(UID, "count", limit=500)
    for _ in range(20):
        began = time.monotonic()
        page = snapshot.row_page(UID, "count", after=page.next, limit=500)
        assert len(page.rows) == 500
        assert time.monotonic() - began < 5
