"""Disks that refuse: small file systems of their own, which only root may mount, and processes that are allowed less."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65_534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk, or become somebody else")

_ROOT = Path(__file__).resolve().parents[2]


class SmallDisk:
    """A file system of a few megabytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> None:
        """Take all the room that there is."""
        with open(self.folder / "ballast", "ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    pass

    def free(self) -> None:
        """Give it back."""
        (self.folder / "ballast").unlink()

    def make_read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(self.folder)], check=True, capture_output=True)


@contextmanager
def small_disk(folder: Path, size: str = "8m") -> Iterator[SmallDisk]:
    """Mounted at a new folder as long as the block runs. Skips the test where that is not allowed."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "holdfast", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def told_by(code: str, *arguments: str) -> list[str]:
    """The lines that a process of its own prints."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
