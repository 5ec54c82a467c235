"""Every link inside README and docs leads to a file, and to a heading of it, that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.installed import PACKAGES, ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(page: Path) -> str:
    """Without blocks of code, where brackets mean something else."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    found = re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)", prose(page))
    return [link for link in found if "://" not in link and not link.startswith("mailto:")]


def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    texts = re.findall(r"^#+ +(.*?) *$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def dead(page: Path) -> list[str]:
    found = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page: Path) -> None:
    assert dead(page) == []


def test_every_page_can_be_found_from_the_readme() -> None:
    seen, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if link.partition("#")[0]]
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= {page.name for page in seen}


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[a](#a-heading) [b](#no-heading) [c](none.md)\n```\n[d](none.md)\n```\n")
    assert dead(page) == ["#no-heading", "none.md"]


GUIDES = [page for page in PAGES if page.parent.name != "adr"]
"""Pages of how things are now; records of decisions and the changelog speak of their own time."""
OURS = (*PACKAGES, "benchmarks", "examples", "holdfast", "scripts", "tests")
GENERATED = {"benchmarks/results/"}
LOGGERS = {"holdfast.coordinator.jobs"}


def named_paths(text: str) -> set[str]:
    """`coordinator/views.py`, `tests/golden/`: paths below a folder of the repository."""
    return set(re.findall(rf"(?<![\w./-])(?:{'|'.join(OURS)})/[\w./-]*\w(?:\.\w+|/)", text))


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_file_that_a_page_names_is_there(page: Path) -> None:
    text = re.sub(r"(?<=\]\()[^)]*", "", page.read_text())  # links are tested above
    assert [path for path in sorted(named_paths(text) - GENERATED) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_module_that_a_page_names_is_there(page: Path) -> None:
    named = set(re.findall(r"\bholdfast(?:\.[a-z_0-9]+)+", page.read_text()))
    paths = {name: ROOT / name.replace(".", "/") for name in named - LOGGERS if name.split(".")[1] in OURS}
    assert sorted(name for name, path in paths.items() if not (path.is_dir() or path.with_suffix(".py").exists())) == []


def test_a_path_that_moved_is_seen() -> None:
    text = "see `coordinator/machine.py`, (tests/golden/), and/or a/api/b.py"
    assert named_paths(text) == {"coordinator/machine.py", "tests/golden/"}
