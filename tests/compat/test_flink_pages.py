"""The UI of a real Flink 2.3 in Chromium, over a coordinator: its pages show the job, and ask nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from selenium.webdriver.common.keys import Keys

from tests.api.fakes import JOB, TOKEN, Served, serving
from tests.browser.browser import Browser, chromium
from tests.browser.staged import MARKUP, NAMES, VERTICES, StagedCoordinator, write_snapshots
from tests.compat.flink import FLINK

pytestmark = pytest.mark.compat

REFUSED = ("/rescales/", "/profiler", "/flamegraph", "/datasets", "/jars")
"""Parts of paths that there is no counterpart for, or that workers of tests can't answer; the UI shows their refusals."""


REFUSED_MARKUP = "Executing inline event handler violates the following Content Security Policy directive"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    (jar,) = (FLINK / "lib").glob("flink-dist-*.jar")
    state = tmp_path_factory.mktemp("flink") / "state"
    checkpoint, savepoint = write_snapshots(state, state)
    coordinator = StagedCoordinator(checkpoint_path=str(checkpoint), savepoint_path=str(savepoint))
    with serving(coordinator, state, flink_ui=jar) as running:
        yield running


@pytest.fixture(scope="module")
def flink(served: Served) -> Iterator[Browser]:
    """Logged in for a session, which Flink's UI sends along."""
    with chromium() as browser:
        browser.open(f"{served.url}/ui/")
        browser.find("input[name=token]").send_keys(TOKEN, Keys.ENTER)
        browser.find("header.top")
        browser.complaints()
        browser.asked()
        yield browser


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("overview", ("Running Application List", "orders")),
        ("job/running", ("orders", "RUNNING")),
        ("job/completed", ("FAILED", MARKUP)),
        (f"job/running/{JOB}/overview", ("orders", NAMES[2])),
        (f"job/running/{JOB}/overview/{VERTICES[2]}/subtasks", (NAMES[2], "Parallelism: 4")),
        (f"job/running/{JOB}/exceptions", ("Root Exception", "Exception History")),
        (f"job/running/{JOB}/timeline", ("orders",)),
        (f"job/running/{JOB}/checkpoints", ("Checkpoint Counts",)),
        (f"job/running/{JOB}/configuration", ("Execution Configuration",)),
        ("task-manager", ("slot-0",)),
        ("job-manager/config", ("state_dir",)),
    ],
)
def test_a_page_of_flink_shows_what_there_is(
    flink: Browser, served: Served, tmp_path: Path, path: str, words: tuple[str, ...]
) -> None:
    flink.open(f"{served.url}/flink/#/{path}")
    flink.driver.refresh()
    for each in words:
        flink.until(f"no {each!r}", lambda each=each: each in flink.text)  # type: ignore[misc]
    flink.screenshot(tmp_path / "flink.png")
    asked = flink.asked()
    assert {urlsplit(url).netloc for url, _ in asked if not url.startswith(("data:", "blob:"))} == {urlsplit(served.url).netloc}
    failed = [(url, status) for url, status in asked if status >= 400 and not any(part in url for part in REFUSED)]
    assert [each for each in failed if not each[0].endswith("/flink/x")] == []
    # The graph of Flink's UI takes a vertex's name for markup; the policy of its pages refuses to run it.
    # What was refused is judged above, and hints about its forms are Flink's.
    said = [each for each in flink.complaints() if " network: " not in each and not each.startswith("DEBUG ")]
    assert [each for each in said if REFUSED_MARKUP not in each] == []
    assert flink.driver.title != "owned"
