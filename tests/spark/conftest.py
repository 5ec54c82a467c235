"""One small Spark session for all Spark tests."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session", autouse=True)
def _quick_jvms() -> Iterator[None]:
    """Java of these tests, executors and drivers in processes of their own too, lives too short for the second compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        yield


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    patch = pytest.MonkeyPatch()
    patch.setenv("PYSPARK_PYTHON", sys.executable)  # else Spark takes the first python3 of the PATH
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Spark's own, while it starts
        from pyspark.sql import SparkSession

        session = (
            SparkSession.builder.master("local[4]")
            .appName("holdfast-tests")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.memory", "1g")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.session.timeZone", "America/New_York")
            .config("spark.local.dir", str(tmp_path_factory.mktemp("spark-local")))
            .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("OFF")
    from holdfast.operators.spark.launcher import ship_package

    ship_package(session.sparkContext)
    yield session
    session.stop()
    patch.undo()
