"""Connections end below the limit of file descriptors, which a service of its own raises first."""

from __future__ import annotations

import resource

import pytest

from holdfast.barriers import descriptors
from holdfast.barriers.descriptors import DESCRIPTORS_MAX, raise_descriptor_limit, sockets_allowed


class Limits:
    """The process's limits, for the module under test alone."""

    RLIMIT_NOFILE = resource.RLIMIT_NOFILE
    RLIM_INFINITY = resource.RLIM_INFINITY

    def __init__(self, soft: int, hard: int) -> None:
        self.soft, self.hard = soft, hard

    def getrlimit(self, _: int) -> tuple[int, int]:
        return self.soft, self.hard

    def setrlimit(self, _: int, limits: tuple[int, int]) -> None:
        self.soft, self.hard = limits


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1_024, 4_096, 4_096),
        (1_024, 1 << 20, DESCRIPTORS_MAX),
        (1_024, resource.RLIM_INFINITY, DESCRIPTORS_MAX),
        (100_000, 1 << 20, 100_000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_soft_limit_rises_and_never_falls(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, expected: int) -> None:
    limits = Limits(soft, hard)
    monkeypatch.setattr(descriptors, "resource", limits)
    raise_descriptor_limit()
    assert (limits.soft, limits.hard) == (expected, hard)


@pytest.mark.parametrize(("soft", "expected"), [(1_024, 768), (64, 16), (20_000, 8_192), (resource.RLIM_INFINITY, 8_192)])
def test_connections_leave_descriptors_for_others(monkeypatch: pytest.MonkeyPatch, soft: int, expected: int) -> None:
    monkeypatch.setattr(descriptors, "resource", Limits(soft, resource.RLIM_INFINITY))
    assert sockets_allowed(8_192) == expected
