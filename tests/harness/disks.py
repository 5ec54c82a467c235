"""Disks that refuse: small file systems, which only root may mount, and processes with fewer permissions."""

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
        """Use up all free space."""
        with open(self.folder / "ballast", "ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    pass

    def free(self) -> None:
        """Free the space again."""
        (self.folder / "ballast").unlink()

    def make_read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(self.folder)], check=True, capture_output=True)


@contextmanager
def small_disk(folder: Path, size: str = "8m") -> Iterator[SmallDisk]:
    """A file system mounted at a new folder within the block. Skips the test where mounting is not allowed."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "holdfast", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def told_by(code: str, *arguments: str) -> list[str]:
    """Lines printed by a process of its own."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
