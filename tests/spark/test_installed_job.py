"""A job of a user who has installed the wheel, in a project with packages of our folders' names, on a cluster."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.harness.installed import PACKAGES, clean_environment, installed_once

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(280)]

FACTOR = 3
ROWS = 200

JOB = """
import json
import sys

import pyarrow as pa
from pyspark.sql import SparkSession

import holdfast as hf
from api.views import shown
from coordinator import priced
from operators.totals import Total

folder = sys.argv[1]
spark = (SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false")
    .config("spark.driver.memory", "600m").config("spark.executor.memory", "512m").config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1").config("spark.sql.shuffle.partitions", "2").getOrCreate())
spark.sparkContext.setLogLevel("OFF")
columns = [("k", pa.int64()), ("price", pa.int64())]
places = [(name, pa.string()) for name in ("holdfast", "loaded", "found")]
env = hf.Environment("shop", parallelism=1, checkpoint_interval_ms=300, state_dir=folder + "/state")
sink = hf.ParquetSink(folder + "/out")
orders = env.from_dataframe(spark.range(0, ROWS, 1, 2).selectExpr("id", "id % 5 as k")).uid("orders")
priced_orders = orders.map(priced, returns=pa.schema(columns)).uid("priced")
totals = priced_orders.key_by("k").process(Total(), returns=pa.schema([*columns, *places])).uid("total")
totals.sink_to(sink).uid("out")
print(env.execute(progress=False).wait(200))
rows = [row.asDict() for row in sink.dataframe(spark).collect()]
spark.stop()
print("FOUND", json.dumps([shown(row) for row in rows]))
"""

MODULES = {
    "api/views.py": "def shown(row):\n    return {**row, 'shown': True}\n",
    "coordinator/__init__.py": f"def priced(row):\n    return {{'k': row['k'], 'price': row['id'] * {FACTOR}}}\n",
    "operators/totals.py": '''
import importlib.util
import sys

import holdfast as hf


def importable(name):
    """Whether an executor could import it: the project's packages travel with the functions that use them."""
    return name not in sys.modules and importlib.util.find_spec(name) is not None


class Total(hf.ProcessFunction):
    total = hf.ValueStateDescriptor("total", int)
    states = (total,)

    def process_element(self, value, ctx, out):
        state = ctx.state(self.total)
        state.update((state.value() or 0) + value["price"])
        loaded = sorted({name.partition(".")[0] for name in sys.modules} & set(PACKAGES))
        found = [name for name in PACKAGES if importable(name)]
        place = {"holdfast": hf.__file__, "loaded": " ".join(loaded), "found": " ".join(found)}
        out({"k": value["k"], "price": state.value(), **place})


PACKAGES = '''
    + repr(PACKAGES)
    + "\n",
}


def project(folder: Path) -> Path:
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("MINE = True\n")
    for name, text in MODULES.items():
        (folder / name).write_text(text)
    (folder / "job.py").write_text(JOB.replace("ROWS", str(ROWS)))
    return folder


@pytest.mark.endurance
def test_a_job_of_a_project_with_packages_of_the_same_names_runs_on_a_cluster(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    python = installed_once(tmp_path_factory).python
    shop = project(tmp_path / "shop")
    (tmp_path / "data").mkdir()
    environment = clean_environment(PYSPARK_PYTHON=str(python), PYSPARK_DRIVER_PYTHON=str(python))
    done = subprocess.run(
        [str(python), str(shop / "job.py"), str(tmp_path / "data")],
        cwd=shop,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    state, told = done.stdout.splitlines()[-2:]
    assert state == "FINISHED"
    rows = json.loads(told.removeprefix("FOUND "))
    assert len(rows) == ROWS
    assert all(row["shown"] for row in rows)
    totals = {key: max(row["price"] for row in rows if row["k"] == key) for key in range(5)}
    assert totals == {key: FACTOR * sum(range(key, ROWS, 5)) for key in range(5)}
    (place,) = {row["holdfast"] for row in rows}
    assert place.endswith(".zip/holdfast/__init__.pyc"), "what the driver shipped"
    assert {(row["loaded"], row["found"]) for row in rows} == {("", "")}
