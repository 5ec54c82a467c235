"""A user's job as it should be: a type checker has nothing to say of it, and knows what each state gives."""

from datetime import timedelta
from decimal import Decimal
from typing import Any, TypedDict, assert_type

import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

import holdfast as hf


class Payment(TypedDict):
    card: str
    amount: float


class Longest:
    def create_accumulator(self) -> int:
        return 0

    def add(self, value: str, accumulator: int) -> int:
        return max(len(value), accumulator)

    def get_result(self, accumulator: int) -> float:
        return float(accumulator)

    def merge(self, left: int, right: int) -> int:
        return max(left, right)


class Rule(hf.ProcessFunction):
    count = hf.ValueStateDescriptor("count", int, ttl=hf.Ttl(timedelta(days=1)))
    seen = hf.ListStateDescriptor("seen", str)
    pages = hf.MapStateDescriptor("pages", str, int)
    total = hf.ReducingStateDescriptor("total", float, lambda left, right: left + right)
    longest = hf.AggregatingStateDescriptor("longest", int, Longest())
    pickled = hf.ValueStateDescriptor("pickled", hf.Pickled[Decimal])
    anything = hf.ValueStateDescriptor("anything", hf.Pickled)
    perhaps: hf.ValueStateDescriptor[int | None] = hf.ValueStateDescriptor("perhaps", int | None)
    states = (count, seen, pages, total, longest, pickled, anything, perhaps)
    returns = pa.schema({"card": pa.string(), "count": pa.int64()})

    def process_element(self, value: Payment, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        count = ctx.state(self.count)
        assert_type(count, hf.ValueState[int])
        assert_type(count.value(), int | None)
        count.update(count.value(0) + 1)
        assert_type(ctx.state(self.seen).get(), list[str])
        assert_type(ctx.state(self.pages).get("home", 0), int)
        assert_type(ctx.state(self.pages).get("home"), int | None)
        assert_type(ctx.state(self.total).get(), float | None)
        assert_type(ctx.state(self.longest).get(), float | None)
        assert_type(ctx.state(self.pickled).value(Decimal(0)), Decimal)
        assert_type(ctx.state(self.anything).value(), Any | None)
        assert_type(ctx.state(self.perhaps).value(), int | None)
        ctx.state(self.perhaps).update(None)
        assert_type(ctx.state("count"), Any)
        add_one(ctx.state(self.pages))
        out({"card": ctx.key, "count": count.value()})

    def on_timer(self, timestamp_ms: int, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        ctx.timers.register_event_time_timer(timestamp_ms + 1)


class Pay(hf.KeyedCoProcessFunction):
    item = hf.ValueStateDescriptor("item", str)
    late = hf.OutputTag("late", {"card": str})
    states = (item,)
    side_outputs = (late,)

    def process_element1(self, value: Payment, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        ctx.state(self.item).update(value["card"])
        ctx.output(self.late, {"card": value["card"]})

    def process_element2(self, value: Payment, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        ctx.output("late", {"card": ctx.state(self.item).value("")})


LIMITS = hf.MapStateDescriptor("limits", str, int)


class Limit(hf.KeyedBroadcastProcessFunction):
    spent = hf.ValueStateDescriptor("spent", int)
    states = (spent,)

    def process_element(self, value: Payment, ctx: hf.ReadOnlyBroadcastContext, out: hf.Collector) -> None:
        assert_type(ctx.broadcast_state(LIMITS).get("x", 5), int)
        ctx.state(self.spent).update(ctx.broadcast_state(LIMITS).get(value["card"]) or 0)

    def process_broadcast_element(self, value: Payment, ctx: hf.BroadcastContext, out: hf.Collector) -> None:
        ctx.broadcast_state(LIMITS).put(value["card"], 5)
        ctx.apply_to_keyed_state(self.spent, lambda key, spent: spent.update(spent.value(0) - 1))


class Buffer(hf.ProcessFunction):
    rows = hf.OperatorListStateDescriptor("rows", hf.Redistribution.SPLIT, str)
    states = (rows,)

    def process_element(self, value: Payment, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        ctx.operator_list_state(self.rows).add(value["card"])


def add_one(pages: hf.MapState[str, int]) -> None:
    pages.put("home", pages.get("home", 0) + 1)


def build() -> hf.JobHandle:
    env = hf.Environment(
        "payments", parallelism=2, state_dir="/state", state_backend="rocksdb", checkpoint_interval_ms=None, restart="none"
    )
    stream = env.from_parquet("/payments").uid("payments")
    assert_type(stream, hf.Stream)
    stream.key_by("card").process(Rule()).uid("rule").sink_to(hf.ParquetSink("/out"), uid="out")
    assert_type(stream.connect(stream), hf.ConnectedStreams)
    paid = stream.connect(stream).key_by("card", "card").process(Pay(), side_outputs={"late": {"card": str}}).uid("paid")
    assert_type(paid, hf.Stream)
    assert_type(paid.side_output(Pay.late), hf.Stream)
    paid.side_output("late").key_by("card").process(Rule(), side_outputs=[hf.OutputTag("odd")]).uid("again")
    stream.connect(stream).map(str, str, returns={"card": str}).print()
    assert_type(stream.select("card", on_error="skip", euro="amount * 0.908").filter("euro > 1"), hf.Stream)
    assert_type(stream.rescale().shuffle(7).global_().partition_custom(lambda key, count: 0, ("card", "day")), hf.Stream)
    limited = stream.key_by("card").connect(stream.broadcast(LIMITS)).process(Limit()).uid("limited")
    assert_type(limited, hf.Stream)
    assert_type(stream.broadcast(), hf.Stream)
    stream.process(Buffer(), returns={"card": str}).uid("buffer")
    job = env.execute(restore="latest")
    try:
        assert_type(job.wait(timeout_s=10), str)
    except hf.CorruptStateError as error:
        assert_type(error.path, str | None)
    except hf.JobExistsError as error:
        assert_type(error.job_id, str)
    assert_type(job.progress().records_in, int)
    return job
