"""The same cell executed twice is the same plan; any edit that does something is another one."""

from __future__ import annotations

import sys
import tracemalloc
import types
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.datastream.plan_digest import PlanDigest, describe_difference, digest_plan
from holdfast.operators.sources.dataframe import DataFrameSource
from holdfast.operators.spark.packaging import modules_by_value

CELL = """
import dataclasses, enum, functools
import msgspec
import pyarrow as pa
import holdfast as hf

FACTOR = 3
TABLE = {"a": [1, 2], "b": {"x", "y"}}

@dataclasses.dataclass
class Row:
    k: int
    n: int = 0
    tags: list[str] = dataclasses.field(default_factory=list)

class Record(msgspec.Struct, frozen=True):
    k: int
    n: int = 0

class Base:
    __slots__ = ("limit",)
    def __init__(self, limit):
        self.limit = limit
    @property
    def twice(self):
        return 2 * self.limit
    @staticmethod
    def one():
        return 1

def times(factor):
    def apply(row):
        return {"k": row["k"], "n": row["n"] * factor * FACTOR + len(TABLE) + Base(1).twice}
    return apply

@functools.lru_cache
def known(k):
    return k > 1

class Counted(hf.ProcessFunction):
    '''Counts.'''
    seen = hf.ValueStateDescriptor("seen", int)
    states = (seen,)

    def __init__(self, step):
        self.step = step
        self.record = Record(1)

    def process_element(self, value, ctx, out):
        state = ctx.state(self.seen)
        state.update((state.value() or 0) + self.step)
        if known(value["k"]) and value["k"] in {1, 2, 3}:
            out({"k": value["k"], "n": state.value()})

schema = pa.schema([("k", pa.int64()), ("n", pa.int64())])
def rows(indices):
    return pa.record_batch([indices % 5, indices], schema=schema)

env = hf.Environment("job", parallelism=2, checkpoint_interval_ms=1000, state_dir="/nowhere")
stream = env.from_source(hf.GeneratorSource(rows, 100, schema)).uid("numbers")
stream = stream.map(times(2), returns=schema).uid("times").filter(lambda row: row["n"] >= 0).uid("some")
stream.key_by("k").process(Counted(1), returns=schema).uid("counted").sink_to(hf.ParquetSink("/out")).uid("out")
"""


def digest(cell: str = CELL, name: str = "__main__") -> PlanDigest:
    """Of a cell that is executed in a module of this name."""
    module = types.ModuleType(name)
    if name != "__main__":
        sys.modules[name] = module
    before, sys.modules["__main__"] = sys.modules["__main__"], module if name == "__main__" else sys.modules["__main__"]
    try:
        exec(compile(cell, f"cell-{id(module)}", "exec"), module.__dict__)
        with modules_by_value([module] if name != "__main__" else []):
            return digest_plan(module.__dict__["env"].build())
    finally:
        sys.modules["__main__"] = before


def edited(old: str, new: str) -> str | None:
    assert CELL.count(old) >= 1
    return describe_difference(digest(), digest(CELL.replace(old, new)))


def test_the_same_cell_is_the_same_plan() -> None:
    first = digest()
    assert None not in first.code.values()
    assert describe_difference(first, digest()) is None


def test_a_cell_that_moved_and_has_more_comments_is_the_same_plan() -> None:
    assert edited("FACTOR = 3", "\n\n# a comment\nFACTOR = 3") is None


@pytest.mark.parametrize(
    ("old", "new", "uid"),
    [
        ("FACTOR = 3", "FACTOR = 4", "times"),
        ("times(2)", "times(5)", "times"),
        ('"a": [1, 2]', '"a": [1, 3]', "times"),
        ('{"x", "y"}', '{"x", "z"}', "times"),
        ("return 2 * self.limit", "return 3 * self.limit", "times"),
        ('row["n"] >= 0', 'row["n"] > 0', "some"),
        ("return k > 1", "return k > 2", "counted"),
        ("in {1, 2, 3}", "in {1, 2, 4}", "counted"),
        ("Counted(1)", "Counted(2)", "counted"),
        ("n: int = 0\n\nclass Base", "n: int = 1\n\nclass Base", "counted"),
        ("self.record = Record(1)", "self.record = Record(2)", "counted"),
        ("indices % 5", "indices % 6", "numbers"),
        ("rows, 100", "rows, 200", "numbers"),
        ('"/out"', '"/elsewhere"', "out"),
    ],
)
def test_an_edit_names_the_operator(old: str, new: str, uid: str) -> None:
    assert uid in str(edited(old, new))


def test_what_else_is_another_plan() -> None:
    assert edited("checkpoint_interval_ms=1000", "checkpoint_interval_ms=2000") == "setting checkpoint_interval_ms=2000"
    assert edited('uid("some")', 'uid("any")') == "operators added: any; operators left out: some"
    assert edited("parallelism=2", "parallelism=1") == "operators are connected, or run in parallel, otherwise"
    assert "counted" in str(edited('ValueStateDescriptor("seen", int)', 'ValueStateDescriptor("seen", float)'))


def test_a_dataclass_of_the_program_can_be_compared() -> None:
    made = "times(2), returns=schema"
    cell = CELL.replace(made, "functools.partial(lambda row, kind: row, kind=Row(1, 2)), returns=schema")
    assert describe_difference(digest(cell), digest(cell)) is None
    assert describe_difference(digest(cell), digest(cell.replace("n: int = 0\n    tags", "n: int = 9\n    tags")))


def test_modules_of_the_program_are_looked_into() -> None:
    """One that was edited and loaded again defines everything under the same names."""
    assert describe_difference(digest(name="rules"), digest(name="rules")) is None
    assert "some" in str(describe_difference(digest(name="rules"), digest(CELL.replace('row["n"] >= 0', "False"), name="rules")))


@pytest.mark.parametrize(
    ("made", "edit"),
    [
        ("functools.wraps(__import__('json').loads)(lambda row: {**row, 'n': 1})", ("'n': 1", "'n': 2")),
        ("functools.partial(lambda row, kind: row, kind=enum.IntEnum('Kind', {'A': 1})(1))", ("'A': 1", "'B': 1")),
    ],
)
def test_a_name_that_somebody_borrowed_does_not_say_what_it_stands_for(made: str, edit: tuple[str, str]) -> None:
    """The name of a library's function, or the value of a number."""
    cell = CELL.replace("times(2)", made)
    other = cell.replace(*edit)
    assert cell != other
    assert "times" in str(describe_difference(digest(cell), digest(other)))


def test_a_module_of_the_program_that_is_used_whole_is_another_plan() -> None:
    """It may have been edited and loaded again, and is sent along."""
    helper = types.ModuleType("helper_of_digests")
    sys.modules["helper_of_digests"] = helper
    cell = CELL.replace("FACTOR = 3", "import helper_of_digests\nFACTOR = 3")
    cell = cell.replace("times(2)", "lambda row: helper_of_digests.f(row)")
    assert describe_difference(digest(cell), digest(cell)) is None  # installed, as far as anybody knows
    with modules_by_value([helper]):
        assert "times" in str(describe_difference(digest(cell), digest(cell)))


def test_where_a_run_has_put_its_input_is_no_difference() -> None:
    source = DataFrameSource.__new__(DataFrameSource)
    source.__dict__ |= {"name": "rows", "rows_per_second": None, "manifest_path": "", "_schema": pa.schema([("k", pa.int64())])}
    source._dataframe = None
    env = hf.Environment("job", state_dir="/nowhere")
    env.from_source(source).uid("read").sink_to(hf.Blackhole()).uid("out")
    before = digest_plan(env.build())
    assert None not in before.code.values()
    source.manifest_path = "job/sources/read/1/_manifest"
    assert describe_difference(before, digest_plan(env.build())) is None
    assert source.manifest_path == "job/sources/read/1/_manifest", "workers read it there"
    source.rows_per_second = 5.0
    assert "read" in str(describe_difference(before, digest_plan(env.build())))


def test_what_travels_with_a_plan_is_taken_as_it_is() -> None:
    """The rows of a collection, say: their repr took many times their size."""
    env = hf.Environment("job", state_dir="/nowhere")
    table = {"content": bytes(1 << 24)}
    env.from_source(hf.GeneratorSource(lambda indices: table, 1, None)).uid("a").sink_to(hf.Blackhole()).uid("b")
    plan = env.build()
    tracemalloc.start()
    try:
        digest_plan(plan)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_bytes_and_a_text_of_the_same_content_differ() -> None:
    assert "times" in str(edited('"a": [1, 2]', 'b"a": [1, 2]'))
    assert "times" in str(edited('"a": [1, 2]', '"ab": [1, 2]'))


def test_what_can_not_be_compared_is_another_plan() -> None:
    class Secretive:
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("no")

    env = hf.Environment("job", state_dir="/nowhere")
    secret = Secretive()
    env.from_source(hf.GeneratorSource(lambda indices: secret, 1, None)).uid("a").sink_to(hf.Blackhole()).uid("b")
    found = digest_plan(env.build())
    assert "'a'" in str(describe_difference(found, found))
