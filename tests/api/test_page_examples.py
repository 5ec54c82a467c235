"""Python that README and docs show: all of it compiles, every `hf.` name exists, and what stands for itself runs."""

from __future__ import annotations

import ast
import functools
import logging
import re
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.base import JobPlan
from holdfast.operators.sources.generator import GeneratorSource
from tests.operators.test_cookbook import OUTPUTS, open_output, run

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    found = re.findall(r"^( *)```python\n(.*?)^\1```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for _, code in found]


def block(page: str, text: str) -> str:
    """The one that has this text."""
    (found,) = [code for code in blocks(ROOT / page) if text in code]
    return found


def executed(code: str, **names: Any) -> dict[str, Any]:
    """What a block defines, given the names that its page leaves to the reader."""
    space: dict[str, Any] = {"__name__": "page", "hf": hf, "pa": pa, "timedelta": timedelta, **names}
    exec(compile(code, "<page>", "exec"), space)
    return space


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_example_compiles_and_names_what_exists(page: Path) -> None:
    for code in blocks(page):
        ast.parse(code)
    names = set(re.findall(r"\bhf\.([A-Za-z_][\w.]*\w)", page.read_text()))
    for name in names:
        functools.reduce(getattr, name.split("."), hf)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_environment_that_is_shown_can_be_made(page: Path) -> None:
    for code in blocks(page):
        for call in [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]:
            if ast.unparse(call.func) == "hf.Environment":
                eval(ast.unparse(call), {"hf": hf, "os": Environ})


class Environ:
    """What `os` is asked for on these pages."""

    environ = {"HOLDFAST_TOKEN": "token"}  # noqa: RUF012


class Loaded:
    """A model that a reader would have."""

    def score(self, row: dict[str, Any]) -> float:
        return float(len(row["user"]))

    def close(self) -> None:
        logging.getLogger(__name__).debug("closed")


def committed(env: hf.Environment, stream: Any, folder: Path) -> list[dict[str, Any]]:
    """All rows of a stream, of a job on real workers in one process, with crashes."""
    OUTPUTS.clear()
    stream.sink_to(hf.ParquetSink("mem://out", open_storage=open_output)).uid("out")
    plan: JobPlan = env.build()
    assert run(plan, folder, seed=1) >= 0
    from holdfast.operators.sinks.files.parquet import read_committed

    return list(read_committed("mem://out", "out", open_storage=open_output).to_pylist())


def test_functions_with_a_beginning_and_an_end_score_made_up_rows(tmp_path: Path) -> None:
    env = hf.Environment("page", parallelism=2)
    made = block("docs/functions.md", "def make_batch").replace("60_000", "600").replace(", rows_per_second=2_000", "")
    stream = executed(made, env=env)["stream"]
    scored = executed(block("docs/functions.md", "class Score"), stream=stream, load_model=Loaded)["scored"]
    rows = committed(env, scored, tmp_path)
    assert sorted((row["user"], row["score"]) for row in rows) == sorted((f"u{n % 500}", len(f"u{n % 500}")) for n in range(600))


def test_every_kind_of_state_is_used_as_the_page_uses_it(tmp_path: Path) -> None:
    visits = executed(block("docs/functions.md", "class Visits"))["Visits"]
    schema = pa.schema(
        [(name, kind) for name, kind in (("id", pa.int64()), ("shop", pa.string()), ("page", pa.string()), ("price", pa.float64()))]
        + [("seconds", pa.int64()), ("at", pa.int64())]
    )

    def make_batch(numbers: Any) -> pa.RecordBatch:
        rows = [
            {"id": n, "shop": f"s{n % 3}", "page": f"p{n % 5}", "price": 0.5, "seconds": n % 60, "at": n * 60_000}
            for n in numbers.tolist()
        ]
        return pa.RecordBatch.from_pylist(rows, schema=schema)

    env = hf.Environment("page", parallelism=2)
    rows = env.from_source(GeneratorSource(make_batch, 180, schema)).uid("rows").set_parallelism(1)
    timed = rows.assign_timestamps("at", max_out_of_orderness_ms=0).uid("time").set_parallelism(1)
    found = committed(env, timed.key_by("shop").process(visits()).uid("visits"), tmp_path)
    last = {row["shop"]: (row["count"], row["total"]) for row in sorted(found, key=lambda row: row["count"])}
    assert last == {f"s{n}": (60, 30.0) for n in range(3)}
    assert len(found) == 9  # a timer for each shop and each of three hours


def test_the_connectors_that_are_shown_can_be_made() -> None:
    """Without a server: all but the one that looks at its tables at once."""
    env = hf.Environment("page")
    rows = env.from_collection([{"customer": "a", "item": "b", "pieces": 1}])
    shown = [code for code in blocks(ROOT / "docs/connectors.md") if "PostgresChanges" not in code]
    made = [executed(code, environment=env, orders=rows, stock=rows) for code in shown]
    assert len(made) >= 8
    assert sum(isinstance(space.get("sink"), hf.DeltaSink | hf.FileSink | hf.IcebergSink | hf.NatsSink) for space in made) == 5


def test_the_other_examples_of_functions_build_a_job() -> None:
    env = hf.Environment("page")
    executed(block("docs/functions.md", "from_collection"), env=env)
    rows = env.from_collection([{"id": 1, "price": 2.0}]).uid("more")
    executed(block("docs/functions.md", 'on_error="skip"'), stream=rows, parse=lambda row: row)
    executed(block("docs/functions.md", "hf.Ttl"))
    assert issubclass(executed(block("docs/functions.md", "class Refunds"), THRESHOLD=1)["Refunds"], hf.ProcessFunction)
    assert "uid print" in env.explain()
