"""Each recipe of the cookbook as a user runs it, in one Spark session, compared row for row with DuckDB."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cookbook import RECIPES, load

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_on_spark_gives_the_rows_of_sql(spark: SparkSession, name: str, tmp_path: Path) -> None:
    recipe, running = load(name), load("running")
    tables = recipe.tables()
    sink = running.execute(spark, name, recipe.pipeline, tables, tmp_path, progress=False)
    found = sink.dataframe(spark).toArrow()
    assert found.num_rows > 50, "nearly no output proves nearly nothing"
    assert running.differences(recipe.SQL, tables, found) == []
