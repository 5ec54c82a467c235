"""The dashboard in Chromium: each page in both themes and on a narrow screen, by keyboard, clean by axe-core. No other host is
asked, no name is markup, nothing is changed that nobody confirmed, and old figures say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

import msgspec
import pytest
from msgspec.structs import replace
from selenium.webdriver.common.keys import Keys

from holdfast.chaos.campaign.campaign import Finding
from holdfast.chaos.campaign.summary import Failure, Tally
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.page import render_finding
from holdfast.coordinator.views import SavepointPlaces
from holdfast.statebackends.errors import NotFoundError
from tests.api.fakes import JOB, TOKEN, Served, serving
from tests.browser.browser import NARROW, Browser, chromium
from tests.browser.staged import MARKUP, MARKUP_JOB, NAMES, UNREADABLE_JOB, VERTICES, StagedCoordinator, write_snapshots
from tests.coordinator.test_figures import DURATIONS, SHARES, SIZES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> StagedCoordinator:
    folder = tmp_path_factory.mktemp("state")
    checkpoint, savepoint = write_snapshots(folder / "state", folder / "savepoints")
    places = SavepointPlaces(directories=frozenset({str(savepoint.parent)}))
    return StagedCoordinator(checkpoint_path=str(checkpoint), savepoint_path=str(savepoint), places=places)


@pytest.fixture(scope="module")
def served(coordinator: StagedCoordinator) -> Iterator[Served]:
    with serving(coordinator, Path(coordinator.checkpoint_path).parents[1]) as running:
        yield running


@pytest.fixture(scope="module")
def _browser() -> Iterator[Browser]:
    """One process for the whole file."""
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def anywhere(_browser: Browser, served: Served) -> Browser:
    _browser.open(f"{served.url}/ui/")
    _browser.find("input[name=token]")
    assert _browser.complaints() == [], "of the first visit"
    log_in(_browser, TOKEN)
    return _browser


def log_in(browser: Browser, token: str) -> None:
    browser.find("input[name=token]").send_keys(token, Keys.ENTER)
    browser.find("header.top")


@pytest.fixture
def browser(anywhere: Browser, coordinator: StagedCoordinator) -> Iterator[Browser]:
    """Wide and light, at the list of jobs; nobody complained and no other host was asked, whatever the test did."""
    coordinator.is_stale = False
    coordinator.calls.clear()
    anywhere.provoked.clear()
    anywhere.show()
    anywhere.go("")
    yield anywhere
    assert anywhere.complaints() == []
    host = urlsplit(anywhere.driver.current_url).netloc
    assert {urlsplit(url).netloc for url, _ in anywhere.asked() if not url.startswith("data:")} <= {host}


def path_of(location: str) -> str:
    return f"jobs/{JOB}/snapshots/{quote(location, safe='')}"


PAGES = {
    "jobs": ("", "Jobs", "orders"),
    "job": (f"jobs/{JOB}", "orders", "Is my data safe?"),
    "operator": (f"jobs/{JOB}/vertices/{VERTICES[2]}", NAMES[2], "Subtasks"),
    "checkpoints": (f"jobs/{JOB}/checkpoints", "Checkpoints", "1 failed"),
    "checkpoint": (f"jobs/{JOB}/checkpoints/17", "Checkpoint 17", "expired"),
    "snapshots": (f"jobs/{JOB}/snapshots", "Snapshots", "savepoint 20"),
    "snapshot": ("{savepoint}", "Snapshot", "dict<str,set<str>>"),
    "difference": ("{checkpoint}/diff/{other}", "Difference", "customer-0"),
    "failures": (f"jobs/{JOB}/failures", "Failures", f"{NAMES[2]} subtask 1 in slot 1"),
    "care": (f"jobs/{JOB}/care", "Drills and cost", ""),
    "members": ("members", "Members", "Workers"),
    "tokens": ("tokens", "Tokens", "Issue a token"),
    "audit": ("audit", "Audit log", "issue a token"),
    "lost": ("no/such/page", "No such page", "All jobs"),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_in_both_themes_and_on_a_narrow_screen(
    browser: Browser, served: Served, coordinator: StagedCoordinator, tmp_path: Path, name: str
) -> None:
    if name == "audit":
        served.json("POST", "/v1/tokens", {"role": "viewer", "name": "night shift"}, status=201)
        browser.until("nothing is recorded", lambda: "issue a token" in str(served.json("GET", "/v1/audit")))
    template, title, words = PAGES[name]
    other = quote(coordinator.savepoint_path, safe="")
    path = template.format(
        savepoint=path_of(coordinator.savepoint_path), checkpoint=path_of(coordinator.checkpoint_path), other=other
    )
    browser.go(path)
    browser.settled(title)
    browser.until(f"no {words!r}", lambda: words in browser.text)
    found = {}
    for theme in ("light", "dark"):
        browser.show(dark=theme == "dark")
        browser.screenshot(tmp_path / f"{name}-{theme}.png")
        found[theme] = browser.violations()
    browser.show(width=NARROW)
    browser.screenshot(tmp_path / f"{name}-narrow.png")
    assert browser.run("return document.documentElement.scrollWidth") <= NARROW
    assert found == {"light": [], "dark": []}
    grounds = {theme: (tmp_path / f"{name}-{theme}.png").read_bytes() for theme in found}
    assert grounds["light"] != grounds["dark"]
    assert "Holdfast" in browser.driver.title


def test_a_name_of_markup_is_text(browser: Browser) -> None:
    browser.settled("Jobs")
    assert MARKUP in browser.text
    browser.go(f"jobs/{MARKUP_JOB}")
    browser.settled(MARKUP)
    browser.go(f"jobs/{MARKUP_JOB}/failures")
    browser.until("no failure", lambda: f"ValueError: {MARKUP}" in browser.text)
    assert browser.run("return document.querySelectorAll('img[src=x]').length") == 0
    assert browser.driver.title.startswith("Failures")


def test_a_job_whose_records_cant_be_read_is_told_of(browser: Browser) -> None:
    browser.settled("Jobs")
    assert f"{UNREADABLE_JOB}: record claims/7 is damaged: {MARKUP}" in browser.run("return document.body.innerText")


def test_pages_and_command_line_show_the_same_figures(browser: Browser) -> None:
    browser.settled("Jobs")
    for function, cases in (("duration", DURATIONS), ("bytes", SIZES), ("percent", SHARES)):
        script = f"return import('/ui/format.js').then(module => arguments[0].map(module.{function}))"
        assert browser.run(script, [value for value, _ in cases]) == [text for _, text in cases]


def test_a_subtask_of_which_nothing_is_known_has_no_share(browser: Browser) -> None:
    """The staged worker was not heard of for long."""
    browser.go(f"jobs/{JOB}")
    browser.settled("orders")
    shown = browser.run("return document.body.innerText")
    assert f"{NAMES[0]} subtask 0 on host-0: how busy it is, is not known." in shown


def test_the_keyboard_reaches_everything_and_comes_back(browser: Browser) -> None:
    browser.go(f"jobs/{JOB}")
    browser.settled("orders")
    browser.run("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
    seen: list[str] = []
    for _ in range(60):
        browser.press(Keys.TAB)
        outlined = "const at = document.activeElement; return at === document.body || at.matches(':focus-visible')"
        assert browser.run(outlined), browser.focused()
        seen.append(browser.focused())
        if seen[-1] == "As a table":
            break
    assert seen[0] == "Skip to content"
    assert any(each.startswith(f"{NAMES[2]} ×4") and "busy 95 %" in each for each in seen), "the graph, as the verdict"
    assert {"Jobs", "Snapshots", "Log out"} <= set(seen)
    browser.press(Keys.ENTER)
    assert browser.run("return document.querySelector('details').open")


def test_the_skip_link_leads_to_the_content(browser: Browser) -> None:
    browser.settled("Jobs")
    browser.run("document.querySelector('.skip').focus()")
    browser.press(Keys.ENTER)
    assert browser.run("return document.activeElement.tagName") == "H1"
    assert browser.run("return location.hash") == "#/"


def test_a_job_is_stopped_only_by_whoever_types_its_name(browser: Browser, coordinator: StagedCoordinator) -> None:
    browser.go(f"jobs/{JOB}/snapshots")
    browser.settled("Snapshots")
    opener = browser.button("Stop with a savepoint")
    opener.click()
    confirm = browser.find("dialog[open] input[name=confirm]")
    assert browser.violations() == []
    confirm.send_keys("order", Keys.ENTER)
    assert not browser.button("Stop with a savepoint").is_enabled()
    assert "stop" not in {call[0] for call in coordinator.calls}
    browser.press(Keys.ESCAPE)
    browser.until("the dialog stays", lambda: not browser.run("return document.querySelector('dialog[open]')"))
    assert browser.focused() == "Stop with a savepoint", "the focus is back where it was"
    browser.press(Keys.ENTER)
    browser.find("dialog[open] input[name=confirm]").send_keys("orders", Keys.ENTER)
    browser.until("it was not stopped", lambda: "Taken:" in browser.text)
    assert ("stop", JOB, None, False, "CANONICAL", None) in coordinator.calls
    browser.button("Close").click()


def test_a_savepoint_is_taken_and_shown(browser: Browser, coordinator: StagedCoordinator) -> None:
    browser.go(f"jobs/{JOB}/snapshots")
    browser.button("Take a savepoint").click()
    browser.find("dialog[open] input").send_keys("/elsewhere")
    browser.button("Take a savepoint").click()
    browser.until("it was not taken", lambda: coordinator.savepoint_path in browser.find("dialog[open]").text)
    assert ("request_savepoint", JOB, "/elsewhere", "CANONICAL", False, None) in coordinator.calls
    browser.button("Close").click()


def test_a_savepoint_is_disposed_of_only_by_whoever_types_its_name(browser: Browser, coordinator: StagedCoordinator) -> None:
    disposed = Path(coordinator.savepoint_path).parent / "disposed"
    _, victim = write_snapshots(disposed / "state", disposed)
    browser.go(path_of(str(victim)))
    browser.button("Dispose of it").click()
    browser.find("dialog[open] input[name=confirm]").send_keys(Keys.ENTER)
    assert (victim / "_metadata").exists()
    browser.find("dialog[open] input[name=confirm]").send_keys("savepoint-20", Keys.ENTER)
    browser.until("it is still there", lambda: "It is deleted." in browser.text)
    assert not (victim / "_metadata").exists()
    browser.button("Close").click()


def test_a_failure_tells_what_came_of_it(browser: Browser, served: Served) -> None:
    browser.go(f"jobs/{JOB}/failures")
    (failure,) = served.json("GET", f"/v1/jobs/{JOB}/failures")["failures"]
    told = ("attempt 1 failed", "restored from checkpoint 16", "1,234 records are read again", "1.4 s after the failure")
    for words in (*told, "another coordinator took over", "Records 6 to 8 of epoch 1 are lost."):
        browser.until(f"no {words}", lambda words=words: words in browser.text)  # type: ignore[misc]
    assert failure["restart"]["gap_ms"] == 1_400


def test_rows_are_paged(browser: Browser, coordinator: StagedCoordinator) -> None:
    browser.go(path_of(coordinator.checkpoint_path))
    browser.settled("Snapshot")
    browser.button("Rows of count").click()
    shown = "return [...document.querySelectorAll('[aria-label=\"Rows of count\"] tbody tr')].map(row => row.innerText)"
    pages = [browser.until("no rows", lambda: browser.run(shown))]
    for page in (2, 3):
        browser.button("Next 50").click()
        browser.until(f"no page {page}", lambda page=page: f"page {page}" in browser.text)  # type: ignore[misc]
        browser.until("no other rows", lambda: browser.run(shown) not in ([], pages[-1]))
        pages.append(browser.run(shown))
    assert [len(page) for page in pages] == [50, 50, 20]
    assert len({row for page in pages for row in page}) == 120
    assert not browser.button("Next 50").is_enabled()


def test_a_snapshot_is_verified_and_held_against_the_job(browser: Browser, coordinator: StagedCoordinator) -> None:
    browser.go(path_of(coordinator.savepoint_path))
    browser.button("Verify every file").click()
    browser.until("not verified", lambda: "sound" in browser.text)
    browser.button("Could orders start from it?").click()
    browser.until("no preflight", lambda: "can start from it" in browser.text)
    assert ("preflight",) in coordinator.calls


def test_subtasks_of_a_checkpoint_are_asked_for_when_they_are_opened(browser: Browser, coordinator: StagedCoordinator) -> None:
    browser.go(f"jobs/{JOB}/checkpoints/17")
    browser.settled("Checkpoint 17")
    wanted = f"/subtasks/{VERTICES[2]}"
    assert not any(url.endswith(wanted) for url, _ in browser.asked())
    browser.button(f"Subtasks of {NAMES[2]}").click()
    browser.until("no subtasks", lambda: "start 5 ms" in browser.run("return document.body.innerHTML"))
    assert "at most" in browser.text
    assert browser.violations() == []


PLACE = "/data/holdfast/chk-41"
LABEL = {"label": MARKUP, "checkpoint_id": 41, "kind": "stop_savepoint", "location": PLACE, "created_ms": 1_795_000_000_000}
DRILL = {"checkpoint_id": 41, "location": PLACE, "by": "schedule", "started_ms": 1_795_000_000_000, "duration_ms": 900}
DRILL |= {"operators": 1, "states": 2, "rows": 12_345, "size": 99, "problem_count": 0, "problems": [], "error": ""}
PRICE = {"currency": "USD", "storage_per_month": 1.5, "requests_per_month": 0.25, "total_per_month": 1.75, "prices": "list"}
COST = {"job_id": JOB, "as_of_ms": 1, "total_size": 12, "exclusive_size": 5, "shared_size": 6, "savepoint_size": 0, "other_size": 1}
KEPT = {"checkpoint_id": 41, "kind": "checkpoint", "labels": [MARKUP], "exclusive_size": 5, "shared_size": 6, "files": 7}
MEMBER = {"url": "http://a:1", "epoch": 3, "host": "a", "pid": 7, "seen_ms_ago": 12, "leaving": False, "holds_lock": True}
CERTIFICATE = {
    "format": "holdfast-forget-certificate",
    "result": "/elsewhere/forgotten-1",
    "erased_rows": {"totals/*": 12_345},
    "deleted": ["/chk-7"],
    "verified": {"/elsewhere/forgotten-1": 9},
    "kept": {"a bucket": MARKUP},
    "remaining": [],
    "not_covered": {"sources": "what the job reads"},
}
FORGOTTEN = {"forget_id": "a1", "started_ms": 1, "state": "incomplete", "certificate": CERTIFICATE, "error": "", "error_kind": ""}
REFUSED = {"error": "the job has no such key", "error_kind": "NotFoundError"}
CANNED = {
    "labels": {"labels": [LABEL], "damage": []},
    "drills": {
        "drills": [
            {**DRILL, "drill_id": "a", "state": "passed"},
            {**DRILL, "drill_id": "b", "state": "failed", "problem_count": 1, "problems": ["rows of counts: 5, not 6"]},
            {**DRILL, "drill_id": "c", "state": "error", "error": MARKUP},
        ]
    },
    "cost": {**COST, "files": 9, "small_files": 4, "checkpoints": [{**KEPT, "small_files": 3}], "requests": None, "money": PRICE},
    "forget": {"forgettings": [FORGOTTEN, {**FORGOTTEN, "forget_id": "a2", "state": "error", "certificate": None, **REFUSED}]},
    "members": {"members": [{**MEMBER, "id": "m1", "role": "active", "this": True, "lock_problem": ""}]},
}
"""Answers in the shapes that routes have; a coordinator of tests has not all of them."""


@pytest.fixture
def canned(browser: Browser) -> Iterator[Browser]:
    """Answers of CANNED; what else is sent there is kept in `window.sent`."""
    browser.run(
        "window.real = window.fetch; window.sent = []; const canned = arguments[0];"
        "window.fetch = (url, options) => {"
        "  const name = Object.keys(canned).find(each => new URL(url).pathname.split('/').includes(each));"
        "  if (!name) return window.real(url, options);"
        "  if (options.method !== 'GET') window.sent.push([options.method, new URL(url).pathname, options.body ?? '']);"
        "  return Promise.resolve(new Response(JSON.stringify(canned[name]), {status: 200}));"
        "}",
        CANNED,
    )
    yield browser
    browser.run("window.fetch = window.real")


def test_labels_drills_and_cost_where_a_service_has_them(canned: Browser) -> None:
    canned.go(f"jobs/{JOB}/care")
    canned.settled("Drills and cost")
    for words in ("12,345", "sound", "damaged", f"could not be told: {MARKUP}", "1.75 USD", "1 problem"):
        canned.until(f"no {words}", lambda words=words: words in canned.text)  # type: ignore[misc]
    assert canned.violations() == []
    canned.button("Drill now").click()
    canned.find("dialog[open]")
    canned.button("Drill now").click()
    canned.until("no drill", lambda: "It runs" in canned.text)
    canned.button("Close").click()
    canned.go(f"jobs/{JOB}/snapshots")
    canned.until("no label", lambda: "stop savepoint 41" in canned.text)
    canned.button("Label a snapshot").click()
    canned.find("dialog[open] input").send_keys("before/upgrade")
    canned.button("Label a snapshot").click()
    canned.button("Close").click()
    assert canned.run("return window.sent") == [
        ["POST", f"/v1/jobs/{JOB}/drills", "{}"],
        ["PUT", f"/v1/jobs/{JOB}/labels/before%2Fupgrade", '{"checkpoint":19}'],
    ]


def test_a_key_is_forgotten_by_whoever_types_the_job_s_name(canned: Browser, tmp_path: Path) -> None:
    canned.run(  # the policy of the page lets no script fetch what it downloads
        "const real = URL.createObjectURL; window.blobs = {};"
        "URL.createObjectURL = blob => { const url = real.call(URL, blob); window.blobs[url] = blob; return url }"
    )
    canned.go(f"jobs/{JOB}/snapshots")
    for words in ("incomplete", "NotFoundError"):
        canned.until(f"no {words}", lambda words=words: words in canned.text)  # type: ignore[misc]
    canned.button("Forget a key").click()
    for label, text in (("Operator", "totals"), ("Key", "c-7"), ("Directory", "/elsewhere")):
        field = canned.driver.find_element("xpath", f"//dialog//label[starts-with(., '{label}')]/input")
        field.send_keys(text)
    submit = canned.find("dialog[open] button.main")
    assert not submit.is_enabled()
    canned.find("dialog[open] input[name=confirm]").send_keys("orders")
    canned.until("can't be confirmed", submit.is_enabled)
    assert canned.violations() == []
    submit.click()
    canned.until("it did not begin", lambda: "It runs" in canned.text)
    canned.button("Close").click()
    assert canned.run("return window.sent") == [
        ["POST", f"/v1/jobs/{JOB}/forget", '{"states":[{"operator":"totals","state":"*"}],"key":"c-7","to":"/elsewhere"}']
    ]
    canned.find("main details summary").click()
    canned.until("no certificate", lambda: f"a bucket: {MARKUP}" in canned.text)
    link = canned.find("a[download]")
    assert link.get_attribute("download") == "forgotten-a1.json"
    read = "return window.blobs[arguments[0]].text().then(JSON.parse)"
    assert canned.run(read, link.get_attribute("href")) == CERTIFICATE
    for theme in ("light", "dark"):
        canned.show(dark=theme == "dark")
        canned.screenshot(tmp_path / f"forget-{theme}.png")
        assert canned.violations() == []
    canned.show(width=NARROW)
    canned.screenshot(tmp_path / "forget-narrow.png")
    assert canned.run("return document.documentElement.scrollWidth") <= NARROW


def test_members_where_a_service_has_several(canned: Browser) -> None:
    canned.go("members")
    canned.until("no member", lambda: "answers this page" in canned.text and "active" in canned.text)
    assert canned.violations() == []


def test_stale_figures_say_so(browser: Browser, coordinator: StagedCoordinator) -> None:
    browser.settled("Jobs")
    assert "stale" not in browser.text
    coordinator.is_stale = True
    browser.until("nothing says so", lambda: "stale: these figures are as of" in browser.text and "1 min" in browser.text)
    assert browser.violations() == []
    coordinator.is_stale = False
    browser.until("still stale", lambda: "stale" not in browser.text)


HIDE = """
window.waiting = 0
const listen = document.addEventListener.bind(document)
document.addEventListener = (kind, ...more) => { window.waiting += kind === "visibilitychange"; listen(kind, ...more) }
Object.defineProperty(document, "hidden", { configurable: true, get: () => window.waiting >= 0 })
"""
SHOW = "window.waiting = -1; document.dispatchEvent(new Event('visibilitychange'))"


def test_a_hidden_page_asks_nothing_and_a_shown_one_asks_at_once(browser: Browser) -> None:
    browser.settled("Jobs")
    browser.run(HIDE)
    browser.until("it does not wait to be seen", lambda: browser.run("return window.waiting"))
    browser.asked()
    browser.run("fetch('session').then(() => { window.answered = true })")
    browser.until("no answer", lambda: browser.run("return window.answered"))
    assert [path_only(url) for url, _ in browser.asked()] == ["/ui/session"]
    browser.run(SHOW)
    browser.until("it does not ask", lambda: "/v1/views" in [path_only(url) for url, _ in browser.asked()])


OF_JOB = f"/v1/jobs/{JOB}"
OF_VERTEX = f"{OF_JOB}/vertices/{VERTICES[2]}"
PAGES_OF_VIEWS = {
    "": ["/v1/jobs/overview", "/v1/totals", "/v1/overview"],
    f"jobs/{JOB}": [OF_JOB, f"{OF_JOB}/health"],
    f"jobs/{JOB}/checkpoints": [f"{OF_JOB}/checkpoints", f"{OF_JOB}/checkpoints/config"],
    f"jobs/{JOB}/checkpoints/17": [f"{OF_JOB}/checkpoints/details/17", f"{OF_JOB}/plan"],
    f"jobs/{JOB}/vertices/{VERTICES[2]}": [OF_VERTEX, f"{OF_VERTEX}/watermarks"],
}
"""Pages, and the answers of what jobs publish that each shows."""


@pytest.mark.parametrize("path", PAGES_OF_VIEWS)
def test_a_page_asks_once_for_what_jobs_publish(browser: Browser, path: str) -> None:
    wanted, asked = PAGES_OF_VIEWS[path], list[str]()
    browser.asked()
    browser.go(path)

    def seen() -> bool:
        asked.extend(url for url, _ in browser.asked())
        return any(parse_qs(urlsplit(url).query).get("path") == wanted for url in asked if path_only(url) == "/v1/views")

    browser.until("it does not ask", seen)
    assert not {path_only(url) for url in asked} & set(wanted), "by itself, too"


def path_only(url: str) -> str:
    return urlsplit(url).path


def test_a_page_asks_once_for_all_its_series(browser: Browser) -> None:
    for path in (f"jobs/{JOB}", f"jobs/{JOB}/vertices/{VERTICES[2]}"):
        browser.asked()
        browser.go(path)
        browser.until("no line is drawn", lambda: browser.run("return document.querySelectorAll('.charts canvas').length >= 4"))
        asked = {url for url, _ in browser.asked() if path_only(url).endswith("/series")}
        assert len(asked) == 1
        assert "busy_ratio" in asked.pop()


def test_no_token_is_kept_where_scripts_find_it(browser: Browser) -> None:
    kept = "return [JSON.stringify([{...localStorage}, {...sessionStorage}]), document.cookie]"
    assert browser.run(kept) == ["[{},{}]", ""]
    (cookie,) = browser.driver.get_cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert TOKEN not in cookie["value"]


def test_a_job_or_checkpoint_that_is_not_there_is_said_to_be_so(browser: Browser) -> None:
    browser.provoked.append(("/checkpoints/details/99999/explain", 404))  # the history is asked, too
    browser.go(f"jobs/{JOB}/checkpoints/99999")
    browser.until("nothing said", lambda: "shows no checkpoint 99999" in browser.text)
    browser.go(f"jobs/{'9' * 32}")
    browser.until("nothing said", lambda: "No such job" in browser.text)


def test_a_checkpoint_that_the_history_alone_has_is_told_as_it_has_it(
    browser: Browser, coordinator: StagedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier leader took it: its details are asked for once, and not found, which is no error of the page."""
    explained = replace(coordinator.explain(JOB, 17), explained_ms=1_700_000_000_000)
    monkeypatch.setattr(coordinator, "explain", lambda *_: explained)
    monkeypatch.setattr(coordinator, "checkpoint", lambda *_: (_ for _ in ()).throw(NotFoundError("no checkpoint 17")))
    browser.asked()
    browser.go(f"jobs/{JOB}/checkpoints/17")
    browser.until("nothing said", lambda: "what the job's history has of it" in browser.text and "expired" in browser.text)
    assert "Explained when it ended, from what was seen" in browser.text
    assert browser.violations() == []
    browser.run("window.before = performance.now()")
    browser.until("time stands still", lambda: browser.run("return performance.now() - window.before > 3000"))
    asked = [unquote(url) for url, _ in browser.asked()]
    assert len([url for url in asked if "/details/17&" in f"{url}&"]) == 1


@pytest.mark.parametrize(
    "link",
    [
        f"jobs/{JOB}%2Fyarn-cancel%3F",
        f"jobs/x%2F..%2F{JOB}%2Fyarn-cancel%23/checkpoints",
        f"jobs/{JOB}/vertices/..%2Fyarn-cancel%3F",
        f"jobs/{JOB}/checkpoints/..%2F..%2Fyarn-cancel%3F",
    ],
)
def test_a_link_changes_nothing_whatever_ids_it_names(browser: Browser, coordinator: StagedCoordinator, link: str) -> None:
    """A link from a mail, opened by whoever is logged in: an id in it that is a path would be asked for, and a job is cancelled by
    a GET of a page of this service."""
    browser.asked()
    browser.go(link)
    browser.settled("No such page")
    assert [url for url, _ in browser.asked() if "yarn-cancel" in urlsplit(url).path] == []
    assert ("cancel", JOB) not in coordinator.calls


@pytest.mark.parametrize("dark", [False, True])
def test_a_report_of_the_simulator(anywhere: Browser, served: Served, tmp_path: Path, dark: bool) -> None:
    """A page of a file, which asks nobody for anything."""
    failure = Failure(
        3, "windows", "I5", f"after 6 faults {MARKUP}", "holdfast chaos replay 3", 420, {4: Fault("drop", "acks")}, 6, True
    )
    summary = Tally(("crash_in_commit",)).summary(start=0, seconds=1.0, cores=1)
    found = Finding(msgspec.structs.replace(summary, violations=1, workloads={"windows": 1}), (failure,))
    file = tmp_path / "report.html"
    file.write_text(render_finding(found, None, {"I5": "rows count once"}, command="holdfast chaos sim", made="now", version="1"))
    anywhere.show(dark=dark, width=NARROW)
    anywhere.asked()
    anywhere.open(file.as_uri())
    anywhere.screenshot(tmp_path / "report.png")
    assert MARKUP in anywhere.text
    assert anywhere.violations() == []
    assert anywhere.run("return document.documentElement.scrollWidth") <= NARROW
    assert anywhere.complaints() == []
    assert {url for url, _ in anywhere.asked() if not url.startswith(served.url)} == {file.as_uri()}
    anywhere.open(f"{served.url}/ui/")
    anywhere.find("header.top")  # the session goes on


def test_a_viewer_sees_no_rows_and_changes_nothing_until_its_token_is_revoked(
    browser: Browser, served: Served, coordinator: StagedCoordinator
) -> None:
    issued = served.json("POST", "/v1/tokens", {"role": "viewer", "name": "night shift"}, status=201)
    browser.button("Log out").click()
    log_in(browser, issued["token"])
    assert "night shift · viewer" in browser.text
    browser.go(f"jobs/{JOB}/snapshots")
    browser.settled("Snapshots")
    browser.until("no snapshots", lambda: "savepoint 20" in browser.text)
    assert browser.run("return [...document.querySelectorAll('main button')].map(each => each.textContent)") == ["Open"]
    browser.go(path_of(coordinator.checkpoint_path))
    browser.until("rows?", lambda: "Rows are for operators." in browser.text)
    assert "Rows of" not in browser.text
    browser.provoked += [("/v1/tokens", 403), ("/v1/audit?limit=100", 403)]
    for page in ("tokens", "audit"):
        browser.go(page)
        browser.until("nothing said", lambda: "Your token may not see this" in browser.text)
        assert browser.violations() == []
    browser.go("")
    browser.settled("Jobs")
    browser.provoked.append(("", 401))  # of whatever the page asks for next
    served.json("DELETE", f"/v1/tokens/{issued['id']}")
    log_in(browser, TOKEN)  # the form is there by itself


def test_who_may_see_one_job_alone_is_led_to_it(browser: Browser, served: Served) -> None:
    """Its token is refused lists of all jobs: no page may need one."""
    asked = {"role": "viewer", "name": "team orders", "job": JOB}
    issued = served.json("POST", "/v1/tokens", asked, status=201)
    browser.button("Log out").click()
    log_in(browser, issued["token"])
    browser.until("no link to the job", lambda: "orders" in browser.find("main table").text)
    assert "may not see" not in browser.text
    assert browser.violations() == []
    browser.find("main table a").click()
    browser.settled("orders")
    for part, title in (("", "orders"), ("/checkpoints", "Checkpoints"), ("/snapshots", "Snapshots"), ("/failures", "Failures")):
        browser.go(f"jobs/{JOB}{part}")
        browser.settled(title)
        browser.until("no name", lambda: browser.find(".jobname").text == "orders")
        assert "may not see" not in browser.text
    early = served.json("POST", "/v1/tokens", {**asked, "job": "not submitted"}, status=201)
    browser.go("")
    browser.button("Log out").click()
    log_in(browser, early["token"])
    browser.until("nothing said of it", lambda: f"{early['job']} alone, which has not been submitted yet" in browser.text)
    browser.button("Log out").click()
    log_in(browser, TOKEN)


def test_a_link_from_outside_leads_through_the_login_to_its_page(browser: Browser, served: Served) -> None:
    """Last: it logs out."""
    browser.button("Log out").click()
    browser.find("input[name=token]")
    assert browser.violations() == []
    browser.open(f"{served.url}/ui/#/jobs/{JOB}/checkpoints/17")
    browser.driver.refresh()
    browser.provoked.append(("/ui/login", 401))
    browser.find("input[name=token]").send_keys("wrong", Keys.ENTER)
    browser.until("no refusal", lambda: "token" in browser.find(".problem").text)
    log_in_again = browser.find("input[name=token]")
    log_in_again.clear()
    log_in(browser, TOKEN)
    browser.settled("Checkpoint 17")
    browser.driver.refresh()
    browser.settled("Checkpoint 17")
