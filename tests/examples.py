"""How many examples a property test tries: a few with `make test`, more of them with `make chaos`."""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("HOLDFAST_EXAMPLES", "1"))
"""Times as many as `make test` tries."""


def examples(count: int) -> int:
    """`count`, as many times as this run was told."""
    return count * FACTOR
