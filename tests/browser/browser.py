"""Debian's Chromium, by selenium: one process, without any network but loopback, with all that it asked and complained of."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

T = TypeVar("T")

AXE = Path(__file__).parent / "vendor" / "axe-core" / "axe.min.js"
LEVELS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
WAIT_S = 15.0
WIDE, NARROW = 1280, 390

ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, and the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    f"--window-size={WIDE},900",
)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; fails with what to do where there is none."""
    binary, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if binary is None or driver is None:
        missing = "chromium" if binary is None else "chromium-driver"
        pytest.fail(f"{missing} is not installed: scripts/setup --browser (as root), or: apt-get install chromium chromium-driver")
    options = Options()
    options.binary_location = binary
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    running = Chrome(options=options, service=Service(driver))
    try:
        yield Browser(running)
    finally:
        running.quit()


class Browser:
    """What tests do with it."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver
        self.provoked: list[tuple[str, int]] = []
        """(End of a path, status) of answers that a test asks for: the console has an error of each."""

    def open(self, url: str) -> None:
        self.driver.get(url)

    def go(self, path: str) -> None:
        """Another page of the dashboard, as a link leads there."""
        self.run("location.hash = arguments[0]", f"#/{path}")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, what: str, look: Callable[[], T | None]) -> T:
        """The first answer that is true."""
        end = time.monotonic() + WAIT_S
        while True:
            try:
                if found := look():
                    return found
            except StaleElementReferenceException:  # it was rendered anew meanwhile
                pass
            assert time.monotonic() < end, f"{what}; the page says: {self.text[:2_000]}"
            time.sleep(0.02)

    @property
    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def find(self, css: str) -> WebElement:
        return self.until(f"no {css}", lambda: next(iter(self.driver.find_elements(By.CSS_SELECTOR, css)), None))

    def button(self, label: str) -> WebElement:
        """The button with this text, in the open dialog if there is one."""
        script = (
            "const root = document.querySelector('dialog[open]') || document;"
            "return [...root.querySelectorAll('button, summary')].find(each => each.textContent.trim() === arguments[0])"
        )
        return self.until(f"no button {label!r}", lambda: self.run(script, label))

    def settled(self, title: str) -> None:
        """Wait until a page is there with its content."""
        script = (
            "return document.querySelector('h1')?.textContent === arguments[0] && !document.body.innerText.includes('Loading …')"
        )
        self.until(f"no page {title!r}", lambda: self.run(script, title))

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self) -> str:
        """Name of what has the focus, as a screen reader says it, roughly."""
        script = "const at = document.activeElement; return at.getAttribute('aria-label') || at.textContent.trim() || at.tagName"
        return str(self.run(script))

    def show(self, *, dark: bool = False, width: int = WIDE) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def screenshot(self, path: Path) -> None:
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))

    def violations(self) -> list[str]:
        """What axe finds against WCAG 2.1 AA."""
        if not self.run("return 'axe' in window"):
            self.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text()})
        found = self.driver.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            "axe.run(document, {runOnly: arguments[0], resultTypes: ['violations']})"
            ".then(found => done(found.violations), error => done([{id: String(error), nodes: []}]))",
            LEVELS,
        )
        return [
            f"{each['id']}: {node['html'][:200]} {node.get('failureSummary', '')}" for each in found for node in each["nodes"]
        ] or [each["id"] for each in found]

    def complaints(self) -> list[str]:
        """What the console says, whatever its level, but for answers that were provoked."""
        said = [f"{each['level']} {each['source']}: {each['message']}" for each in self.driver.get_log("browser")]
        expected = [(f"{path} - Failed to load resource", f"a status of {status} ") for path, status in self.provoked]
        return [text for text in said if not any(path in text and status in text for path, status in expected)]

    def asked(self) -> list[tuple[str, int]]:
        """(URL, status) of every request since the last call; 0: no answer."""
        statuses: dict[str, tuple[str, int]] = {}
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            parameters = message["params"]
            match message["method"]:
                case "Network.requestWillBeSent":
                    statuses[parameters["requestId"]] = parameters["request"]["url"], 0
                case "Network.responseReceived":
                    response = parameters["response"]
                    statuses[parameters["requestId"]] = response["url"], int(response["status"])
        return list(statuses.values())
