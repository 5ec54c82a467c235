"""What the recipes share: run one on Spark, show rows of its output, and compare all of them with SQL over the same rows."""

import tempfile
from pathlib import Path

import holdfast as hf


def execute(spark, name, pipeline, tables, folder, **settings):
    """Run the pipeline over these tables to their end; its sink."""
    env = hf.Environment(name, parallelism=2, state_dir=str(folder / "state"), checkpoint_interval_ms=1_000)
    streams = {table: env.from_dataframe(spark.createDataFrame(rows)).uid(table) for table, rows in tables.items()}
    sink = hf.ParquetSink(str(folder / "out"))
    pipeline(**streams).sink_to(sink).uid("out")
    with env.execute(**settings) as job:
        state = job.wait()
    if state != "FINISHED":
        raise SystemExit(f"{name} ended {state}")
    return sink


def differences(sql, tables, found):
    """Rows that only one of SQL, as DuckDB answers it, and the Arrow table has: ("missing" or "too many", row ...)."""
    import duckdb

    with duckdb.connect() as database:
        for table, rows in tables.items():
            database.register(table, rows)
        database.register("found", found)
        database.execute("SET TimeZone = 'UTC'")
        names = ", ".join(found.schema.names)
        wanted = f"SELECT {names} FROM ({sql})"
        missing = database.execute(f"SELECT 'missing', * FROM ({wanted} EXCEPT ALL SELECT * FROM found)").fetchall()
        return missing + database.execute(f"SELECT 'too many', * FROM (SELECT * FROM found EXCEPT ALL {wanted})").fetchall()


def main(name, pipeline, tables, sql):
    """Run a recipe in a session of its own."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false").getOrCreate()
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    with tempfile.TemporaryDirectory(prefix=f"holdfast-{name}-") as folder:
        output = execute(spark, name, pipeline, tables, Path(folder)).dataframe(spark)
        output.show(5)
        different = differences(sql, tables, output.toArrow())
    spark.stop()
    if different:
        raise SystemExit(f"{name}: {len(different)} rows differ from SQL: {different[:3]}")
    print(f"{name} OK: the same rows as SQL gives")
