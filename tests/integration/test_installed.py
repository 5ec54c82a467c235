"""The wheel, the sdist and an editable install: one package, every module once, beside a user's packages of our folders' names."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.api.ui import files as dashboard
from tests.harness.installed import (
    PACKAGES,
    ROOT,
    build_sdist,
    build_wheel,
    clean_environment,
    copy_source,
    install,
    installed_once,
)

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Built:
    folder: Path
    source: Path
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    source = copy_source(folder / "source")
    sdist = build_sdist(source, folder)
    return Built(folder, source, sdist, installed_once(tmp_path_factory).wheel)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the wheel."""
    return installed_once(tmp_path_factory).python


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder with packages of its own that are called as our folders are; importing one says so."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    return tmp_path


def run(project: Path, *command: str | Path) -> str:
    done = subprocess.run(command, cwd=project, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def modules_of_the_checkout() -> list[str]:
    """Files below `holdfast/` by the names that they are imported by."""
    own = [f"holdfast/{path.name}" for path in (ROOT / "holdfast").glob("*.py")]
    rooms = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(own + [f"holdfast/{path.relative_to(ROOT).as_posix()}" for path in rooms])


def contents(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        assert len(archive.namelist()) == len(set(archive.namelist()))
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def test_the_wheel_holds_holdfast_alone_and_every_module_once(built: Built) -> None:
    found = contents(built.wheel)
    top = {name.split("/")[0] for name in found}
    assert {name for name in top if not name.endswith(".dist-info")} == {"holdfast"}
    assert len(top) == 2
    assert sorted(name for name in found if name.endswith(".py")) == modules_of_the_checkout()
    assert "holdfast/py.typed" in found
    assert any(name.startswith("holdfast/api/docs/vendor/swagger-ui/") for name in found)
    pages = {f"holdfast/api/ui/{'' if name.startswith('vendor/') else 'static/'}{name}" for name in dashboard.NAMES}
    licences = {f"holdfast/api/ui/vendor/{each}/LICENSE" for each in ("preact", "htm", "uplot", "dagre")}
    assert pages | licences <= set(found)
    modes = [entry.external_attr >> 16 for entry in zipfile.ZipFile(built.wheel).infolist()]
    assert not [mode for mode in modes if mode & 0o170000 == 0o120000], "a link"


def test_the_sdist_holds_files_and_builds_the_same_wheel(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    modules = [member.name.partition("/")[2] for member in members if member.name.endswith(".py")]
    assert sorted(modules) == modules_of_the_checkout()
    assert contents(build_wheel(built.sdist, built.folder / "again")) == contents(built.wheel)


def test_the_command_runs_from_the_wheel_beside_packages_of_the_same_names(installed: Path, project: Path) -> None:
    version = run(project, installed.with_name("holdfast"), "--version")
    assert re.fullmatch(r"holdfast \S+\n", version)
    assert run(project, installed, "-m", "holdfast", "--version") == version


@pytest.mark.endurance
def test_the_simulator_of_the_wheel_measures_what_its_runs_touched(installed: Path, project: Path) -> None:
    told = run(project, installed, "-m", "holdfast", "chaos", "sim", "--seeds", "1", "--jobs", "1")
    assert re.search(r"^violations +0$", told, re.MULTILINE)
    assert re.search(r"^coverage +\d+\.\d % of branches", told, re.MULTILINE), told


def test_every_module_of_the_wheel_is_the_wheels_own(installed: Path, project: Path) -> None:
    """The user's packages are found by their names, and Holdfast's modules by its own alone."""
    (project / "program.py").write_text(
        "import importlib, pkgutil, sys\n"
        f"for name in {PACKAGES!r}:\n"
        "    assert importlib.import_module(name).MINE, name\n"
        "import holdfast\n"
        "for found in pkgutil.walk_packages(holdfast.__path__, 'holdfast.'):\n"
        "    if not found.name.endswith('__main__'):\n"
        "        importlib.import_module(found.name)\n"
        "ours = [module for name, module in sys.modules.items() if name.partition('.')[0] == 'holdfast']\n"
        "print(len(ours), *sorted({module.__file__.partition('/holdfast/')[0] for module in ours}), sep='\\n')\n"
    )
    count, *folders = run(project, installed, "program.py").splitlines()
    assert int(count) == len(modules_of_the_checkout()) - 1  # holdfast/__main__.py
    assert len(folders) == 1
    assert Path(folders[0]).is_relative_to(installed.parents[1])


@pytest.mark.endurance
def test_an_editable_install_is_found_by_programs_and_by_type_checkers(built: Built, tmp_path: Path) -> None:
    """As `scripts/setup` makes it: the links are followed where the source tree lies. All other tests run from such a one."""
    options = ("--no-build-isolation", "--config-settings", "editable_mode=compat", "--editable")
    python = install(built.source, tmp_path / "venv", *options)
    (tmp_path / "job.py").write_text(
        "import holdfast as hf\nfrom holdfast.statebackends.keygroups import assign_key_groups\n\n"
        "settings: hf.JobConfig = hf.JobConfig()\nwrong: str = assign_key_groups(8, 2, 0)\nprint(hf.__file__)\n"
    )
    assert Path(run(tmp_path, python, "job.py").strip()) == built.source / "holdfast" / "__init__.py"
    flags = ["--strict", "--python-executable", str(python), "--cache-dir", str(tmp_path / "cache"), "--follow-imports", "silent"]
    command = [sys.executable, "-m", "mypy", *flags, "job.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = re.findall(r"^job\.py:(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE)
    assert errors == [("5", "assignment")], done.stdout + done.stderr
