"""Which golden snapshots there are, where they lie, and what is expected in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.golden.make_snapshots import GOLDEN, RECIPES, Recipe
from tests.golden.model import Contents

_SUFFIX = "-base"
_FILES = {path.parent.name + path.stem.removeprefix("expected"): path for path in sorted(GOLDEN.glob("*/expected*.json"))}
NAMES = sorted(_FILES)
"""`v1-savepoint`; `v1-rocksdb-incremental-base` is the checkpoint upon which `v1-rocksdb-incremental` is an increment."""


def described(name: str) -> Any:
    """The expected contents of a golden snapshot, and its folder."""
    return json.loads(_FILES[name].read_text("utf-8"))


def folder_of(name: str) -> Path:
    return _FILES[name].parent / str(described(name)["snapshot"])


def recipe_of(name: str) -> Recipe:
    return RECIPES[_FILES[name].parent.name]


def job_of(name: str) -> Sequence[Contents]:
    """The contents that were put in."""
    return recipe_of(name).earlier[-1] if name.endswith(_SUFFIX) else recipe_of(name).job
