"""A user's mistakes, each of which a type checker finds: in the line that ends with the code of its error."""

import holdfast as hf


class Shortest:  # no merge()
    def create_accumulator(self) -> int:
        return 0

    def add(self, value: str, accumulator: int) -> int:
        return min(len(value), accumulator)

    def get_result(self, accumulator: int) -> int:
        return accumulator


class Rule(hf.ProcessFunction):
    count = hf.ValueStateDescriptor("count", int)
    seen = hf.ListStateDescriptor("seen", str)
    pages = hf.MapStateDescriptor("pages", str, int)
    total = hf.ReducingStateDescriptor("total", float, lambda left, right: left + right)
    number = hf.ValueStateDescriptor("number", 5)  # E: call-overload
    unnamed = hf.ValueStateDescriptor(int)  # E: call-overload
    expiring = hf.ValueStateDescriptor("expiring", int, ttl=3600)  # E: call-overload
    shortest: hf.AggregatingStateDescriptor[str, int] = hf.AggregatingStateDescriptor("shortest", int, Shortest())  # E: arg-type
    states = (count, seen, pages, total, "name")  # E: assignment

    def process_element(self, value: dict[str, str], ctx: hf.ProcessContext, out: hf.Collector) -> None:
        ctx.state(self.count).update("one")  # E: arg-type
        ctx.state(self.count).value() + 1  # E: operator
        ctx.state(self.count).add(1)  # E: attr-defined
        ctx.state(self.seen).add(1)  # E: arg-type
        ctx.state(self.pages).put(1, 1)  # E: arg-type
        ctx.state(self.pages).put("home", "1")  # E: arg-type
        ctx.state(self.total).add("2.5")  # E: arg-type
        ctx.state(self.count, 0)  # E: call-overload
        ctx.state(3)  # E: call-overload
        ctx.timer.register_event_time_timer(5)  # E: attr-defined
        out("card", 3)  # E: call-arg
        ctx.output("late")  # E: call-arg

    def on_timer(self, ctx: hf.ProcessContext, out: hf.Collector) -> None:  # E: override
        pass


class Limit(hf.KeyedBroadcastProcessFunction):
    limits = hf.MapStateDescriptor("limits", str, int)
    count = hf.ValueStateDescriptor("count", int)
    states = (count,)

    def process_element(self, value: dict[str, str], ctx: hf.ReadOnlyBroadcastContext, out: hf.Collector) -> None:
        ctx.broadcast_state(self.limits).put("a", 1)  # E: attr-defined
        ctx.broadcast_state(self.limits).get("a", "b")  # E: call-overload
        ctx.apply_to_keyed_state(self.count, print)  # E: attr-defined

    def process_broadcast_element(self, value: dict[str, str], ctx: hf.BroadcastContext, out: hf.Collector) -> None:
        ctx.broadcast_state(self.limits).put("a", "b")  # E: arg-type
        ctx.timers.register_event_time_timer(5)  # E: attr-defined
        ctx.state(self.count)  # E: attr-defined


def build() -> None:
    hf.Environment("job", state_backend="rocks")  # E: arg-type
    hf.Environment("job", checkpoint_intervall_ms=1_000)  # E: call-arg
    hf.Environment("job", checkpoint_interval_ms="1s")  # E: arg-type
    hf.Environment("job", retention_on_cancel=True)  # E: arg-type
    hf.Environment("job", 4)  # E: call-arg
    hf.Environment("job", restart="never")  # E: arg-type
    env = hf.Environment("job")
    stream = env.from_parquet("/payments", rows_per_second="5")  # E: arg-type
    stream.assign_timestamp("at", 5)  # E: attr-defined
    stream.assign_timestamps("at", "5 s")  # E: arg-type
    stream.map("amount")  # E: arg-type
    stream.process("rule")  # E: arg-type
    stream.broadcast("rules")  # E: call-overload
    stream.connect(stream.broadcast(Limit.limits)).process(Rule())  # E: arg-type
    keyed = stream.key_by("card")
    keyed.aggregate(total="amount")  # E: arg-type
    keyed.window("1h")  # E: arg-type
    stream.select("card", euro=0.908)  # E: arg-type
    stream.filter(5)  # E: arg-type
    stream.connect("payments")  # E: call-overload
    stream.connect(stream).process(Rule())  # E: arg-type
    stream.connect(stream).key_by("card")  # E: call-arg
    stream.connect(stream).map(str)  # E: call-arg
    stream.side_output(5)  # E: arg-type
    stream.partition_custom("card", "card")  # E: arg-type
    stream.shuffle("7")  # E: arg-type
    stream.rescale(2)  # E: call-arg
    stream.slot_sharing_group(1)  # E: arg-type
    keyed.process(Rule(), side_outputs=["late"])  # E: list-item
    keyed.process(3)  # E: arg-type
    stream.sink_to("/out")  # E: arg-type
    env.explain(format="yaml")  # E: arg-type
    job = env.execute(latest=True)  # E: call-arg
    print(job.progress().rows)  # E: attr-defined
    job.wait("10 s")  # E: arg-type
    print(hf.nothing)  # E: attr-defined
    try:
        job.wait(10)
    except hf.CorruptStateError as error:
        print(error.pth)  # E: attr-defined
    raise hf.JobExistsError("it ended", job_id="a")  # E: call-arg
