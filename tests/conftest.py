from __future__ import annotations

from itertools import zip_longest

import pytest
from hypothesis import settings

from tests.examples import FACTOR

# How long an example takes says how busy the machine is, not whether the code is right; two processes and Spark share it.
# `make test` tries the same examples at each run, so that a commit passes or it does not; `make chaos` looks for new ones.
settings.register_profile("holdfast", deadline=None, derandomize=FACTOR == 1)
settings.load_profile("holdfast")

_LONG = ("tests/spark/", "tests/integration/")
"""Files of few tests and much waiting. Begun last, one kept a process busy for three minutes that the other had nothing to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, one of each folder in turn, so that two processes seldom run two Spark sessions."""
    files = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
    queues = [[file for file in files if file.startswith(folder)] for folder in _LONG]
    first = [file for turn in zip_longest(*queues) for file in turn if file is not None]
    rank = {file: number for number, file in enumerate([*first, *(file for file in files if not file.startswith(_LONG))])}
    items.sort(key=lambda item: rank[item.nodeid.partition("::")[0]])
