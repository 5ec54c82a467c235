"""docs/architecture.md and docs/invariants.md against the code: what they name exists, every room and every rule that code cites
is there, and diagrams and table are those of the code."""

from __future__ import annotations

import importlib
import io
import re
import tokenize
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.harness.scripts import load_script

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
RULES = ROOT / "docs" / "invariants.md"
SCENARIOS = ROOT / "tests" / "scenarios" / "tables.md"
PACKAGES = ("statebackends", "barriers", "operators", "coordinator", "api", "chaos")
QUOTED = re.compile(r"`([^`\n]+)`")
CITED = re.compile(r"(?<![\w`\"])(I[1-9][0-9]?|[A-HJ-NO-T][0-9]{2})(?![\w`\"])")
NAME = re.compile(r"(?:[A-Z]\w*(?:\.\w+)?|[a-z_]\w*\(\))")


def named(text: str) -> Iterator[tuple[str, str]]:
    """(module, name) of all that a text quotes as `path.py`: `Class.method` or `function()`; ("", name) without one.

    A path holds for the names that follow it, up to the next path or the end of the line; its own pair has no name."""
    for line in text.splitlines():
        module = ""
        for quoted in QUOTED.findall(line):
            if quoted.endswith((".py", "/")):
                module = quoted
                yield module, ""
            elif NAME.fullmatch(quoted):
                yield module, quoted


def missing(text: str) -> list[str]:
    """What a text names and the code does not have."""
    found = []
    for module, name in named(text):
        if module and not (ROOT / module).exists():
            found.append(module)
        elif name and module.endswith(".py"):
            owner: Any = importlib.import_module("holdfast." + module.removesuffix(".py").replace("/", "."))
            for part in name.removesuffix("()").split("."):
                owner = getattr(owner, part, None)
            if owner is None:
                found.append(f"{module}: {name}")
    return found


def test_all_that_the_page_names_exists() -> None:
    assert missing(PAGE.read_text()) == []


def test_a_name_that_is_gone_is_found() -> None:
    line = "`barriers/alignment/gate.py`: `InputGate.offer`, `InputGate.sing`, `hum()`, then `barriers/gates.py`, and `chaos/sin/`."
    gate = "barriers/alignment/gate.py"
    assert missing(line) == [f"{gate}: InputGate.sing", f"{gate}: hum()", "barriers/gates.py", "chaos/sin/"]


def test_every_name_of_the_walks_stands_behind_a_path() -> None:
    walks = PAGE.read_text().partition("## The way of an acknowledgement")[2].partition("## States")[0]
    names = [name for module, name in named(walks) if name and not module]
    assert names == []
    assert len([name for _, name in named(walks) if name]) > 30


def test_every_room_is_on_the_page() -> None:
    rooms = {f"{path.parent.relative_to(ROOT)}/" for package in PACKAGES for path in (ROOT / package).glob("**/__init__.py")}
    assert sorted(rooms - {module for module, _ in named(PAGE.read_text())}) == []


def generator() -> ModuleType:
    return load_script("architecture_page")


def test_the_diagrams_are_those_of_the_tables() -> None:
    assert PAGE.read_text() == generator().page(PAGE.read_text()), "run .venv/bin/python scripts/architecture_page.py"


def test_the_invariants_are_those_of_the_checkers() -> None:
    text = RULES.read_text()
    assert text == generator().invariants_page(text), "run .venv/bin/python scripts/architecture_page.py"
    assert "|  |" not in text, "an invariant without a checker"
    assert missing(text) == []


def cited(source: str) -> set[str]:
    """Numbers of rules in comments and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = [token.string for token in tokens if token.type == tokenize.COMMENT or token.string.startswith('"""')]
    return {number for text in texts for number in CITED.findall(text)}


def test_every_rule_that_the_code_cites_is_told() -> None:
    pages = (RULES.read_text(), SCENARIOS.read_text())
    told = {number for page in pages for number in re.findall(r"^\| ([A-Z][0-9]+) \|", page, re.MULTILINE)}
    found = {
        number: str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for number in cited(path.read_text())
    }
    assert {number: path for number, path in found.items() if number not in told} == {}
    assert found.keys() >= {"I11", "K06", "N09"}


class Door(StrEnum):
    OPEN = "open"
    SHUT = "shut"
    GONE = "gone"


def test_a_diagram_is_in_the_order_of_the_states() -> None:
    drawn = generator().diagram({Door.GONE: (), Door.SHUT: {Door.GONE, Door.OPEN}, Door.OPEN: {Door.SHUT}})
    assert drawn.splitlines()[2:-1] == [
        "    [*] --> OPEN",
        "    OPEN --> SHUT",
        "    SHUT --> OPEN",
        "    SHUT --> GONE",
        "    GONE --> [*]",
    ]


def test_a_table_without_a_state_of_its_enum_is_refused() -> None:
    with pytest.raises(KeyError):
        generator().diagram({Door.OPEN: {Door.SHUT}, Door.SHUT: ()})
