"""Each recipe of the cookbook on real workers in one process that crash, compared row for row with DuckDB over the same rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.barriers.messages import CheckpointKind
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.statebackends.storage.port import Storage
from tests.cookbook import COOKBOOK, RECIPES, load
from tests.examples import crossed
from tests.harness.mini import MiniCluster
from tests.operators.ports import DictStorage

CRASHES = 3
OUTPUTS: dict[str, DictStorage] = {}


def open_output(path: str) -> Storage:
    return OUTPUTS.setdefault(path, DictStorage(root=path))


def source(rows: pa.Table) -> GeneratorSource:
    batch = rows.combine_chunks().to_batches()[0]
    return GeneratorSource(lambda numbers: batch.take(pa.array(numbers)), batch.num_rows, batch.schema, batch_rows=50)


def plan(recipe: Any, tables: dict[str, pa.Table], parallelism: int) -> JobPlan:
    OUTPUTS.clear()
    env = Environment("recipe", parallelism=parallelism, channel_credit_batches=2, step_budget_ms=1)
    streams = {name: env.from_source(source(rows)).uid(name) for name, rows in tables.items()}
    recipe.pipeline(**streams).sink_to(ParquetSink("mem://out", open_storage=open_output)).uid("out")
    return env.build()


def run(plan: JobPlan, folder: Path, seed: int) -> int:
    """To the end, through crashes behind completed checkpoints; how many of those were restored."""
    cluster = MiniCluster(plan, DictStorage(), local_directory=str(folder), seed=seed, tick_s=0.0002)
    coordinator = cluster.coordinator
    moments = random.Random(seed)
    restored = 0
    for crash in range(CRASHES + 1):
        cluster.deploy()
        cluster.run_until(lambda: coordinator.all_running)
        if crash == CRASHES or coordinator.all_drained:
            break
        coordinator.trigger(CheckpointKind.CHECKPOINT, cluster.clock.now_ms)
        cluster.run_until(lambda: coordinator.pending is None)
        for _ in range(moments.randrange(10, 80)):
            assert not coordinator.failure, coordinator.failure
            if not cluster.step() and not cluster.settle_once():
                break
        restored += bool(coordinator.completed)
        cluster.crash()
    cluster.run_to_end()
    return restored


@pytest.mark.parametrize(("name", "parallelism"), crossed(list(RECIPES), [1, 2, 3]))
def test_a_recipe_gives_the_rows_of_sql_in_spite_of_crashes(name: str, parallelism: int, tmp_path: Path) -> None:
    recipe = load(name)
    tables = recipe.tables()
    assert run(plan(recipe, tables, parallelism), tmp_path, seed=parallelism) >= 1
    found = read_committed("mem://out", "out", open_storage=open_output)
    assert found.num_rows > 50, "nearly no output proves nearly nothing"
    assert load("running").differences(recipe.SQL, tables, found) == []


def test_what_differs_is_seen() -> None:
    recipe, differences = load("deduplicate"), load("running").differences
    tables = recipe.tables()
    messages = tables["messages"]
    once = pa.Table.from_pylist(list({row["number"] + 300 * row["ordered_at"].day: row for row in messages.to_pylist()}.values()))
    assert differences(recipe.SQL, tables, once) == []
    ((kind, number, *_),) = differences(recipe.SQL, tables, once.slice(1))
    assert (kind, number) == ("missing", once["number"][0].as_py())
    repeated = pa.concat_tables([once, once.slice(0, 1)])
    ((kind, number, *_),) = differences(recipe.SQL, tables, repeated)
    assert (kind, number) == ("too many", once["number"][0].as_py())


def test_every_file_of_the_cookbook_is_a_recipe_that_is_tested_and_described() -> None:
    files = {path.stem for path in COOKBOOK.glob("*.py")}
    assert files == {*RECIPES, "running"}
    page = (COOKBOOK.parents[1] / "docs" / "cookbook.md").read_text()
    assert {name for name in RECIPES if f"examples/cookbook/{name}.py" not in page} == set()
