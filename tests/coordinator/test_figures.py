"""Figures as people read them. The dashboard's own code is held to the same tables, in tests/browser."""

from __future__ import annotations

import pytest

from holdfast.coordinator.figures import duration_text, share_text, size_text

DURATIONS: list[tuple[float, str]] = [
    (0, "0 ms"),
    (12.7, "12 ms"),
    (999.9, "999 ms"),
    (1_000, "1.0 s"),
    (9_990, "9.9 s"),
    (59_999, "59.9 s"),
    (60_000, "1 min 00 s"),
    (67_000, "1 min 07 s"),
    (3_599_999, "59 min 59 s"),
    (3_600_000, "1 h 00 min"),
    (7_380_000, "2 h 03 min"),
    (86_399_999, "23 h 59 min"),
    (273_600_000, "3 d 04 h"),
]
SIZES: list[tuple[float, str]] = [
    (0, "0 B"),
    (1_023, "1023 B"),
    (1_023.4, "1023 B"),
    (1_023.9, "1.0 KiB"),
    (1_024, "1.0 KiB"),
    (1_536, "1.5 KiB"),
    (1_048_500, "1023.9 KiB"),
    (1_048_575, "1.0 MiB"),
    (1_258_291, "1.2 MiB"),
    (119_537_664, "114.0 MiB"),
    (3 << 30, "3.0 GiB"),
    (5 << 50, "5.0 PiB"),
    (5_000 << 50, "5000.0 PiB"),
]
SHARES: list[tuple[float, str]] = [(0.625, "63 %"), (0.615, "62 %"), (0.285, "28 %"), (0.0, "0 %"), (1.0, "100 %")]


@pytest.mark.parametrize(("duration_ms", "text"), [*DURATIONS, (-1, "-"), (float("nan"), "-"), (float("inf"), "-")])
def test_durations(duration_ms: float, text: str) -> None:
    assert duration_text(duration_ms) == text


@pytest.mark.parametrize(("size", "text"), [*SIZES, (-1, "-")])
def test_sizes(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(("share", "text"), SHARES)
def test_shares(share: float, text: str) -> None:
    assert share_text(share) == text
