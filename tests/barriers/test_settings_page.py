"""docs/settings.md: complete, current, and right about the bounds."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from holdfast.barriers import jobgraph
from holdfast.barriers.jobgraph import JobConfig, RestartStrategy, RocksDBConfig
from holdfast.operators.datastream.environment import ENVIRONMENT_SETTINGS
from holdfast.statebackends.errors import InvalidConfigError
from tests.harness.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
RECORDS = (JobConfig, RestartStrategy, RocksDBConfig)


def generator() -> ModuleType:
    return load_script("settings_page")


def rows() -> list[str]:
    """First cell of every row of a table."""
    return re.findall(r"^\| (`[^|]*`) \|", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE)


def test_the_page_is_what_the_records_say() -> None:
    page = generator()
    assert page.PAGE.read_text() == page.page(), "run .venv/bin/python scripts/settings_page.py"


@pytest.mark.parametrize("record", RECORDS)
def test_every_field_is_described(record: type[msgspec.Struct]) -> None:
    assert set(generator().meanings(record)) == set(record.__struct_fields__)


def test_every_setting_has_one_row() -> None:
    settings = [f"`{name}`" for record in RECORDS for name in record.__struct_fields__]
    arguments = [name for cell in rows() for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(cell for cell in rows() if cell in settings) == sorted(settings)
    assert set(ENVIRONMENT_SETTINGS) <= set(arguments)


def test_a_field_that_nobody_described_is_no_page() -> None:
    page = generator()
    page.meanings = lambda record: {name: text for name, text in _meanings(record).items() if name != "min_pause_ms"}  # type: ignore[attr-defined,has-type]
    _meanings = generator().meanings
    with pytest.raises(KeyError, match="min_pause_ms"):
        page.page()


def test_a_new_field_comes_under_a_heading_of_its_own() -> None:
    page = generator()
    page.SECTIONS = {heading: names for heading, names in page.SECTIONS.items() if heading != "Failures"}  # type: ignore[attr-defined]
    assert "\n## Other\n" in page.page()
    assert "| `skipped_rows_max` |" in page.page()


LOWEST = {name: int(text) for name, text in re.findall(r"^\| `(\w+)` \|[^\n]*?[Aa]t least (\d+)", generator().page(), re.MULTILINE)}
RANGES = {"max_parallelism": (1, 32_768), "inline_threshold": (0, 1 << 20), "memory_snapshot_bytes_max": (1 << 10, 2 << 30)}
RANGES |= {"pack_threshold": (0, 8 << 20), "cancellation_timeout_ms": (0, 24 * 3_600_000)}
RANGES |= {"row_table_bytes_max": (1 << 20, 1 << 40)}


@pytest.mark.parametrize("name", sorted(LOWEST))
def test_what_is_said_to_be_the_least_is(name: str) -> None:
    more = {"heartbeat_timeout_ms": 10**9} if name == "heartbeat_interval_ms" else {}
    if name in RestartStrategy.__struct_fields__:
        changed: JobConfig | RestartStrategy = RestartStrategy()
    else:
        changed = JobConfig()
    msgspec.structs.replace(changed, **{name: LOWEST[name]}, **more).check()
    with pytest.raises(InvalidConfigError, match=name):
        msgspec.structs.replace(changed, **{name: LOWEST[name] - 1}, **more).check()


@pytest.mark.parametrize("name", sorted(RANGES))
def test_what_is_said_to_be_the_range_is(name: str) -> None:
    lowest, highest = RANGES[name]
    for value in (lowest, highest):
        msgspec.structs.replace(JobConfig(), **{name: value}).check()
    for value in (lowest - 1, highest + 1):
        with pytest.raises(InvalidConfigError):
            msgspec.structs.replace(JobConfig(), **{name: value}).check()


def test_bounds_are_looked_for() -> None:
    assert len(LOWEST) >= 8
    assert {"checkpoint_interval_ms", "retained_checkpoints", "step_budget_ms"} <= set(LOWEST)
    assert RANGES["cancellation_timeout_ms"][1] == jobgraph.CANCELLATION_TIMEOUT_MS_MAX
