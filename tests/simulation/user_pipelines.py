"""Pipelines as a user writes them, right ones and wrong ones, for `FILE.py:function`. The comment of each wrong one says what is
wrong with it."""

from __future__ import annotations

PIPELINES = '''
import random
import time
from datetime import datetime, timezone

import helper_of_pipelines
import pyarrow as pa
import holdfast as hf

SCHEMA = pa.schema([("i", pa.int64()), ("key", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
COUNTED = {"key": int, "n": int}
ROWS = 240
LIMITS = {"small": 10}
TOTALS = {}


def make_batch(indices):
    times = pa.array(indices * 10_000 + 1_700_000_000_000_000, pa.timestamp("us", "UTC"))
    return pa.RecordBatch.from_arrays([pa.array(indices), pa.array(indices % 6), times], schema=SCHEMA)


def mixed_batch(indices):
    times = pa.array(indices * 10_000 + 1_700_000_000_000_000, pa.timestamp("us", "UTC"))
    return pa.RecordBatch.from_arrays([pa.array(indices), pa.array(indices // 2 % 5), times], schema=SCHEMA)


def numbers(env):
    """At parallelism 2 every key comes from one subtask of the source."""
    return env.from_source(hf.GeneratorSource(make_batch, ROWS, SCHEMA, 200)).uid("numbers")


def mixed(env):
    """Every key comes from both subtasks of the source."""
    return env.from_source(hf.GeneratorSource(mixed_batch, ROWS, SCHEMA, 200)).uid("numbers")


def written(stream):
    stream.sink_to(hf.ParquetSink("/out/rows")).uid("out")


# ------------------------------------------------------------------------------------------------------------------ right


class Count(hf.ProcessFunction):
    count = hf.ValueStateDescriptor("count", int)
    states = (count,)
    step = 1

    def open(self, ctx):
        self.limits = dict(LIMITS)

    def process_element(self, row, ctx, out):
        state = ctx.state(self.count)
        state.update((state.value() or 0) + self.step)
        out({"key": row["key"], "n": state.value()})


def declared(env):
    written(numbers(env).key_by("key").process(Count(), returns=COUNTED).uid("count"))


def doubled(row):
    return {"key": row["key"], "n": row["i"] * 2}


def mapped(env):
    written(mixed(env).map(doubled, returns=COUNTED).uid("double"))


def windowed(env):
    stream = mixed(env).assign_timestamps("at", max_out_of_orderness_ms=2_000).key_by("key")
    written(stream.window(hf.Tumbling(milliseconds=200)).aggregate(n=hf.count(), total=hf.sum("i")).uid("windows"))


# ------------------------------------------------------------------------------- right, but for the order of rows, or time


class Total(hf.ProcessFunction):
    total = hf.ValueStateDescriptor("total", int)
    states = (total,)

    def process_element(self, row, ctx, out):
        state = ctx.state(self.total)
        state.update((state.value() or 0) + row["i"])
        out({"key": row["key"], "n": state.value()})


def totals(env):
    written(mixed(env).key_by("key").process(Total(), returns=COUNTED).uid("totals"))


def parted(env):
    """Right at its own parallelism, and dependent on order at 4."""
    written(numbers(env).key_by("key").process(Total(), returns=COUNTED).uid("totals"))


def parted_said(env):
    parted(env)
    hf.chaos.expect(last_value_per_key="key")


def totals_said(env):
    totals(env)
    hf.chaos.expect(last_value_per_key="key")


def running(env):
    written(mixed(env).key_by("key").aggregate(n=hf.count(), total=hf.sum("i")).uid("running"))


@hf.chaos.expect(last_value_per_key="key", sink="out")
def running_said(env):
    running(env)


def sums(env):
    """How many rows a key has depends on where batches end; sums of floats are not combined before the exchange."""
    rows = env.from_collection([{"key": i % 5, "n": float(i)} for i in range(300)]).uid("numbers")
    written(rows.key_by("key").aggregate(total=hf.sum("n")).uid("sums"))


def pairs(env):
    """Most keys have one row or two, as the end of a batch falls between their records or not."""
    rows = env.from_collection([{"key": i // 2, "n": float(i)} for i in range(300)]).uid("numbers")
    written(rows.key_by("key").aggregate(total=hf.sum("n")).uid("sums"))


def sums_said(env):
    sums(env)
    hf.chaos.expect(last_value_per_key="key")


class First(hf.ProcessFunction):
    seen = hf.ValueStateDescriptor("seen", bool, ttl=hf.Ttl(300))
    states = (seen,)

    def process_element(self, row, ctx, out):
        if not ctx.state(self.seen).value():
            ctx.state(self.seen).update(True)
            out({"key": row["key"], "n": row["i"]})


def deduplicated(env):
    written(mixed(env).key_by("key").process(First(), returns=COUNTED).uid("first"))


def every_key(rows):
    assert {row["key"] for row in rows} == set(range(5)), f"keys are {sorted({row['key'] for row in rows})}"


def deduplicated_said(env):
    deduplicated(env)
    hf.chaos.expect(invariant=every_key)


def stamped(row):
    return {"key": row["key"], "n": row["i"], "loaded": datetime.now(timezone.utc)}


STAMPED = pa.schema([("key", pa.int64()), ("n", pa.int64()), ("loaded", pa.timestamp("us", "UTC"))])


def wall_clock(env):
    written(mixed(env).map(stamped, returns=STAMPED).uid("stamp"))


def wall_clock_said(env):
    wall_clock(env)
    hf.chaos.expect(ignore_columns="loaded")


# ------------------------------------------------------------------------------------------------------------------ wrong


class InClass(hf.ProcessFunction):
    """State in a class attribute."""

    counts = {}

    def process_element(self, row, ctx, out):
        self.counts[row["key"]] = self.counts.get(row["key"], 0) + 1
        out({"key": row["key"], "n": self.counts[row["key"]]})


class InClassLater(hf.ProcessFunction):
    """State in an attribute that the class has from its first record on: what is pickled doesn't have it."""

    def process_element(self, row, ctx, out):
        kind = type(self)
        if not hasattr(kind, "counts"):
            kind.counts = {}
        kind.counts[row["key"]] = kind.counts.get(row["key"], 0) + 1
        out({"key": row["key"], "n": kind.counts[row["key"]]})


class InGlobal(hf.ProcessFunction):
    """State in a global of the pipeline's module."""

    def process_element(self, row, ctx, out):
        TOTALS[row["key"]] = TOTALS.get(row["key"], 0) + 1
        out({"key": row["key"], "n": TOTALS[row["key"]]})


class InHelper(hf.ProcessFunction):
    """State in another module, imported at the top."""

    def process_element(self, row, ctx, out):
        out({"key": row["key"], "n": helper_of_pipelines.count(row["key"])})


class InImport(hf.ProcessFunction):
    """State in another module, imported in the function."""

    def process_element(self, row, ctx, out):
        import helper_of_pipelines as helper

        out({"key": row["key"], "n": helper.count(row["key"])})


class InInstance(hf.ProcessFunction):
    """State in an attribute."""

    def open(self, ctx):
        self.counts = {}

    def process_element(self, row, ctx, out):
        self.counts[row["key"]] = self.counts.get(row["key"], 0) + 1
        out({"key": row["key"], "n": self.counts[row["key"]]})


def in_class(env):
    written(numbers(env).key_by("key").process(InClass(), returns=COUNTED).uid("count"))


def in_class_later(env):
    written(numbers(env).key_by("key").process(InClassLater(), returns=COUNTED).uid("count"))


def in_class_of_function(env):
    """A class that each submission makes anew: nothing is left of an earlier run, and what it is given later outlives a crash."""

    class Local(hf.ProcessFunction):
        def process_element(self, row, ctx, out):
            kind = type(self)
            counts = vars(kind).get("counts") or {}
            counts[row["key"]] = counts.get(row["key"], 0) + 1
            kind.counts = counts
            out({"key": row["key"], "n": counts[row["key"]]})

    written(numbers(env).key_by("key").process(Local(), returns=COUNTED).uid("count"))


class FirstInClass(hf.ProcessFunction):
    """The first record of each key, in a class attribute: what outlives a crash there is what would be found again."""

    firsts = {}

    def process_element(self, row, ctx, out):
        out({"key": row["key"], "n": row["i"] - self.firsts.setdefault(row["key"], row["i"])})


class FirstInClassLater(hf.ProcessFunction):
    def process_element(self, row, ctx, out):
        kind = type(self)
        kind.firsts = getattr(kind, "firsts", None) or {}
        out({"key": row["key"], "n": row["i"] - kind.firsts.setdefault(row["key"], row["i"])})


class FirstInImport(hf.ProcessFunction):
    def process_element(self, row, ctx, out):
        import helper_of_pipelines as helper

        out({"key": row["key"], "n": row["i"] - helper.FIRSTS.setdefault(row["key"], row["i"])})


def first_in_class(env):
    written(numbers(env).key_by("key").process(FirstInClass(), returns=COUNTED).uid("count"))


def first_in_class_later(env):
    written(numbers(env).key_by("key").process(FirstInClassLater(), returns=COUNTED).uid("count"))


def first_in_import(env):
    written(numbers(env).key_by("key").process(FirstInImport(), returns=COUNTED).uid("count"))


def in_global(env):
    written(numbers(env).key_by("key").process(InGlobal(), returns=COUNTED).uid("count"))


def in_helper(env):
    written(numbers(env).key_by("key").process(InHelper(), returns=COUNTED).uid("count"))


def in_import(env):
    written(numbers(env).key_by("key").process(InImport(), returns=COUNTED).uid("count"))


def in_instance(env):
    written(numbers(env).key_by("key").process(InInstance(), returns=COUNTED).uid("count"))


def in_closure(env):
    counts = {}

    def counted(row):
        counts[row["key"]] = counts.get(row["key"], 0) + 1
        return {"key": row["key"], "n": counts[row["key"]]}

    written(numbers(env).key_by("key").map(counted, returns=COUNTED).uid("count"))


class MixedInClass(hf.ProcessFunction):
    """State in a class attribute, and output that depends on the order of arrival."""

    totals = {}

    def process_element(self, row, ctx, out):
        self.totals[row["key"]] = self.totals.get(row["key"], 0) + row["i"]
        out({"key": row["key"], "n": self.totals[row["key"]]})


def mixed_in_class(env):
    written(mixed(env).key_by("key").process(MixedInClass(), returns=COUNTED).uid("totals"))
    hf.chaos.expect(last_value_per_key="key")


def drawn(row):
    return {"key": row["key"], "n": random.randrange(10**9)}


def by_chance(env):
    """Random numbers that nobody can draw again."""
    written(mixed(env).map(drawn, returns=COUNTED).uid("draw"))


def few(rows):
    return len(rows) < 100


def never_true(env):
    declared(env)
    hf.chaos.expect(invariant=few)


def mistaken(rows):
    return rows[0]["nothing"]


def raises(env):
    declared(env)
    hf.chaos.expect(invariant=mistaken)


# -------------------------------------------------------------------------------------------------------------- refused


def no_such_sink(env):
    declared(env)
    hf.chaos.expect(last_value_per_key="key", sink="elsewhere")


def no_such_column(env):
    declared(env)
    hf.chaos.expect(ignore_columns="kee")


def says_nothing(env):
    declared(env)
    hf.chaos.expect()
'''

HELPER = '''
COUNTS = {}
FIRSTS = {}


def count(key):
    COUNTS[key] = COUNTS.get(key, 0) + 1
    return COUNTS[key]
'''
