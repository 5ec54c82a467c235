"""Every module has one name: `holdfast.<package>...`; no import in the repository says it without, none is ever loaded twice."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.installed import PACKAGES, ROOT, clean_environment

FOLDERS = (*PACKAGES, "holdfast", "tests", "benchmarks", "examples", "scripts")
USERS = ("tests/spark/test_installed_job.py", "tests/golden/test_old_pickles.py", "tests/integration/test_one_name.py")
"""Tests with programs of users who have packages of our folders' names."""

_NAMES = "|".join(PACKAGES)
IMPORT = re.compile(rf"^[ \t>.`]*(?:from|import)[ \t]+(?:{_NAMES})\b(?!\s*=)|-m (?:{_NAMES})\.", re.MULTILINE)
DOTTED = re.compile(rf"(?:{_NAMES})(?:\.[a-z_0-9]+)+(?::\w+)?")

SUSPECT = re.compile(rf"""(?:from|import|-m|,)[\s\\(]*(?:{_NAMES})\b|["'](?:{_NAMES})\b""")
"""Somewhere in each file with such an import or text, and in some others: parsing all files takes as long as a hundred tests."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    """The files with a name of a package where it might be an import."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):  # links are not followed: each file once
            text = path.read_text("utf-8")
            if SUSPECT.search(text):
                yield path.relative_to(ROOT).as_posix(), ast.parse(text)


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module)


def is_module(dotted: str) -> bool:
    """`operators.base` is a module of ours; `coordinator.send.trigger`, a moment of a fault, is none."""
    parts = dotted.partition(":")[0].split(".")
    return any((ROOT / Path(*parts[:count])).with_suffix(".py").is_file() for count in range(2, len(parts) + 1)) or (
        (ROOT / Path(*parts) / "__init__.py").is_file()
    )


def texts(tree: ast.Module) -> Iterator[str]:
    """Strings that are used: programs for other interpreters, names to be imported. Docstrings are prose."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


@pytest.fixture(scope="module")
def old_names() -> dict[str, list[tuple[str, str]]]:
    """Imports and texts that say a package without `holdfast`, by what they are. Each file is read once."""
    found: dict[str, list[tuple[str, str]]] = {"imports": [], "texts": []}
    for name, tree in sources():
        found["imports"] += [(name, each) for each in imported(tree) if each.partition(".")[0] in PACKAGES]
        for text in texts(tree):
            if name not in USERS and (IMPORT.search(text) or (DOTTED.fullmatch(text) and is_module(text))):
                found["texts"].append((name, text[:200]))
    return found


def test_no_import_of_the_repository_says_a_package_without_holdfast(old_names: dict[str, list[tuple[str, str]]]) -> None:
    assert old_names["imports"] == []


def test_no_program_or_name_in_a_string_does(old_names: dict[str, list[tuple[str, str]]]) -> None:
    assert old_names["texts"] == []


def test_no_page_script_or_setting_does() -> None:
    roots = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "Makefile"]
    pages = [*roots, *(ROOT / "docs").rglob("*.md"), *(ROOT / "scripts").iterdir()]
    assert len(pages) > 20
    assert [page.name for page in pages if page.is_file() and IMPORT.search(page.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    "text", ["from operators.base import Operator", "  import api", "python -m coordinator.main", "import barriers.codec as codec"]
)
def test_an_old_import_is_seen(text: str) -> None:
    assert IMPORT.search(text)
    assert not IMPORT.search(re.sub(rf"\b({_NAMES})\b", r"holdfast.\1", text, count=1))


PROGRAM = """
import contextlib, importlib, io, os, pkgutil, sys
from collections import defaultdict
from pathlib import Path
root, state = Path(sys.argv[1]), sys.argv[2]

import holdfast as hf
with contextlib.redirect_stdout(io.StringIO()):
    for arguments in (["--version"], ["inspect", sys.argv[3]], ["chaos", "list", "workloads"]):
        with contextlib.suppress(SystemExit):
            hf.command_line()(arguments, prog_name="holdfast")

from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.world import RunRequest
assert not run_seed(RunRequest(3, "counter")).result.violations

from tests.operators.worker.test_loop import test_bounded_job_drains_commits_and_finishes as run_job
run_job(Path(state), "filesystem")

for found in pkgutil.walk_packages(hf.__path__, "holdfast."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)

names = defaultdict(list)
for name, module in sorted(sys.modules.items()):
    path = getattr(module, "__file__", None)
    real = Path(path).resolve() if path is not None else None
    if real is not None and real.is_relative_to(root) and real.relative_to(root).parts[0] in sys.argv[4:]:
        names[os.path.realpath(path)].append(name)
assert len(names) > 300, len(names)
print([each for each in names.values() if len(each) > 1])
print([name for each in names.values() for name in each if name.partition(".")[0] not in ("holdfast", "tests", "__main__")])
"""


@pytest.mark.slow
def test_a_job_the_command_line_and_the_simulator_load_no_module_under_two_names(tmp_path: Path) -> None:
    """With the checkout on the path, where `coordinator` could be found as well as `holdfast.coordinator`."""
    (snapshot,) = (ROOT / "tests/golden/snapshots/v1-savepoint").glob("savepoint-*")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", str(ROOT), str(tmp_path), str(snapshot), *PACKAGES, "holdfast", "tests"]
    environment = clean_environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["[]", "[]"]
