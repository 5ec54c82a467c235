"""Holdfast as a user has it: built from a copy of the checkout, and installed where the checkout is not on the path."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("api", "barriers", "chaos", "coordinator", "operators", "statebackends")
"""Folders at the top of the repository that `holdfast/` links to."""


def copy_source(folder: Path) -> Path:
    """Copy the files that the build reads, links as links: setuptools writes where it builds."""
    for name in (*PACKAGES, "holdfast"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def build_wheel(source: Path, folder: Path) -> Path:
    """A wheel of a source tree or an sdist, by this interpreter's setuptools: nothing is fetched."""
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def build_sdist(source: Path, folder: Path) -> Path:
    """An sdist, as `build_wheel`."""
    program = f"import setuptools.build_meta as backend; backend.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True)
    return next(folder.glob("*.tar.gz"))


def install(distribution: Path, folder: Path, *options: str) -> Path:
    """The Python of a new environment with this wheel or source tree, and the dependencies from this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    packages = next((folder / "lib").glob("python*/site-packages"))
    # `.pth` files are not read in a folder that is itself named by one, so the checkout, which is installed there, is not found
    (packages / "needed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    command = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", "--no-compile", *options]
    subprocess.run([sys.executable, *command, str(distribution)], check=True, capture_output=True, env=clean_environment())
    return python


@dataclass(frozen=True)
class Installed:
    """The wheel, and the Python of an environment that has it."""

    wheel: Path
    python: Path


def installed_once(folders: pytest.TempPathFactory) -> Installed:
    """One for all processes of a run of tests: making it takes seconds, and its tests only read it."""
    base = folders.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "installed"
    folder.mkdir(exist_ok=True)
    python, done = folder / "venv" / "bin" / "python", folder / "done"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if not done.exists():
            install(build_wheel(copy_source(folder / "source"), folder), folder / "venv")
            done.touch()
    return Installed(next(folder.glob("*.whl")), python)


def clean_environment(**more: str) -> Mapping[str, str]:
    """The environment without variables that lead an interpreter to the checkout."""
    return {**{key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}, **more}
