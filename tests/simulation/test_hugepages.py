"""Memory of a seed's process is moved to huge pages where the kernel lets it, and holds what it held."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from holdfast.chaos.campaign.runner import interpreter

_PART = b"holdfast" * 512
_ENABLED = "/sys/kernel/mm/transparent_hugepage/enabled"


def hold_and_collapse() -> None:
    held = [bytes(_PART + number.to_bytes(8, "big")) for number in range(8_000)]  # 32 MB
    from holdfast.chaos.campaign.runner import collapse_memory

    before = _huge_kb()
    collapsed = collapse_memory()
    assert all(part == _PART + number.to_bytes(8, "big") for number, part in enumerate(held))
    sys.stdout.write(f"{collapsed} {_huge_kb() - before}")


def _huge_kb() -> int:
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


def _has_huge_pages() -> bool:
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if sys.platform != "linux" or release is None or tuple(map(int, release.groups())) < (6, 1):
        return False
    if not os.path.exists(_ENABLED) or not os.path.exists("/proc/self/smaps_rollup"):
        return False
    with open(_ENABLED, encoding="ascii") as chosen:
        return "[never]" not in chosen.read()


@pytest.mark.skipif(not _has_huge_pages(), reason="the kernel moves nothing to huge pages when asked")
def test_memory_is_moved_and_keeps_its_content() -> None:
    done = subprocess.run(interpreter(f"{__name__}:hold_and_collapse"), capture_output=True, text=True, check=True, timeout=60)
    collapsed, moved_kb = map(int, done.stdout.split())
    if not collapsed:
        pytest.skip("the machine has no huge page free")
    assert moved_kb > 0


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.chaos.campaign.runner import collapse_memory

    monkeypatch.setattr(sys, "platform", "darwin")
    assert collapse_memory() == 0
