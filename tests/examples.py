"""How much of what could be tried a run tries: a part of it with `make test`, all of it, and more examples, with `make chaos`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest

FACTOR = int(os.environ.get("HOLDFAST_EXAMPLES", "1"))
"""1 with `make test`; else so many times as many examples of a property."""
FEW = 5
"""So many examples are tried whatever happens."""


def examples(count: int) -> int:
    """How many examples a property test tries: a third of `count` with `make test`, and `count` as many times as another run was
    told."""
    return min(count, max(FEW, count // 3)) if FACTOR == 1 else count * FACTOR


def crossed(*axes: Sequence[Any], every: int = 3) -> list[Any]:
    """Every value of each axis with every one of the others, for `parametrize`. With `make test` each so-manieth combination, on
    diagonals, so that each value occurs; the others with `make chaos`."""
    return [
        pytest.param(*values, marks=pytest.mark.endurance if sum(places) % every else ())
        for places, values in zip(itertools.product(*(range(len(axis)) for axis in axes)), itertools.product(*axes), strict=True)
    ]


def seeds(count: int) -> list[Any]:
    """So many seeds, for `parametrize`: the first half of them with `make test`, the others with `make chaos`."""
    return [pytest.param(seed, marks=pytest.mark.endurance if 2 * seed >= count else ()) for seed in range(count)]
