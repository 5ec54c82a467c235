"""Random job graphs as descriptions: drawn from a seed, built into a job with the DSL, and evaluated in plain Python.

Evaluator and job share nothing but the description. Only steps whose output is the same multiset in any order of arrival are drawn;
windows only where each record still has its own event time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

from holdfast.chaos.workloads.feeds import Feed
from holdfast.chaos.workloads.settings import draw_pace

Event = tuple[int, int, int, int]
"""(i, key, value, event time) of a record."""

MODULUS = 10_007
"""Values stay below it, whatever multiplies them."""

ROWS_MAX = 600
"""A stream of more records is not multiplied further."""

STEPS_MAX = 7
SINKS_MAX = 3


@dataclass(frozen=True, slots=True)
class SourceNode:
    """A feed at its pace (rows per second, rows per step)."""

    feed: Feed
    pace: tuple[float, int]
    parallelism: int | None


@dataclass(frozen=True, slots=True)
class MapNode:
    """value * factor + offset, and another key."""

    factor: int
    offset: int
    keys: int


@dataclass(frozen=True, slots=True)
class FilterNode:
    """Keeps values with some of the remainders."""

    modulus: int
    below: int


@dataclass(frozen=True, slots=True)
class FlatMapNode:
    """0 .. copies_max copies of each record, by its value."""

    copies_max: int


@dataclass(frozen=True, slots=True)
class BatchNode:
    """value + offset, over columns."""

    offset: int


@dataclass(frozen=True, slots=True)
class NumberNode:
    """Numbers the records of each key 1, 2, 3 ..."""


@dataclass(frozen=True, slots=True)
class DistinctNode:
    """One record for each key and remainder of a value."""

    modulus: int


@dataclass(frozen=True, slots=True)
class WindowNode:
    """Count and sum of each key in tumbling windows."""

    size_ms: int


@dataclass(frozen=True, slots=True)
class UnionNode:
    """All records of several streams."""


@dataclass(frozen=True, slots=True)
class CoMapNode:
    """Two streams for one operator: value + an offset for each."""

    first: int
    second: int


@dataclass(frozen=True, slots=True)
class CoNumberNode:
    """Two streams for one operator with state of the key: the records of each stream and key become numbers 1, 2, 3 ..."""


@dataclass(frozen=True, slots=True)
class SplitNode:
    """Values that the modulus divides, to the main output; the others go aside. Counts the records of each key."""

    modulus: int


@dataclass(frozen=True, slots=True)
class AsideNode:
    """The side output of a SplitNode, which is its first input; the second is that one's."""

    modulus: int


Step: TypeAlias = (
    MapNode
    | FilterNode
    | FlatMapNode
    | BatchNode
    | NumberNode
    | DistinctNode
    | WindowNode
    | UnionNode
    | CoMapNode
    | CoNumberNode
    | SplitNode
    | AsideNode
)


@dataclass(frozen=True, slots=True)
class StepNode:
    """An operator behind others, given by their indexes among the nodes."""

    step: Step
    inputs: tuple[int, ...]
    exchange: str = ""
    """rebalance | broadcast | forward | rescale | shuffle | global | custom; empty: the DSL's choice. A broadcast has a
    parallelism of its own."""
    parallelism: int | None = None
    chaining: str = ""
    """head | never; empty: always."""


Node: TypeAlias = SourceNode | StepNode


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in the order of their construction, and those with a sink: together these use every node."""

    nodes: tuple[Node, ...]
    sinks: tuple[int, ...]

    @property
    def feeds(self) -> tuple[Feed, ...]:
        return tuple(node.feed for node in self.nodes if isinstance(node, SourceNode))

    def feeds_behind(self, index: int) -> tuple[Feed, ...]:
        """Feeds whose records reach a node."""
        node = self.nodes[index]
        if isinstance(node, SourceNode):
            return (node.feed,)
        return tuple(dict.fromkeys(feed for each in node.inputs for feed in self.feeds_behind(each)))

    def waits(self, index: int) -> bool:
        """Whether a node's records wait in windows: its output at a cut then depends on more than positions."""
        node = self.nodes[index]
        if isinstance(node, SourceNode):
            return False
        return isinstance(node.step, WindowNode) or any(self.waits(each) for each in node.inputs)


# -------------------------------------------------------------------------------------------------------------- evaluate


def feed_events(feed: Feed, indices: Iterable[int]) -> list[Event]:
    """Records of a feed at these indices."""
    return [(feed.first + index, feed.key(index), feed.value(index), feed.at(index)) for index in indices]


def evaluate(graph: Graph, events: Mapping[str, list[Event]]) -> list[list[Event]]:
    """Output of each node, given that of each feed (by uid); in no particular order."""
    given: list[list[Event]] = []
    for node in graph.nodes:
        given.append(_evaluate_node(node, events, given))
    return given


def _evaluate_node(node: Node, events: Mapping[str, list[Event]], given: Sequence[list[Event]]) -> list[Event]:
    if isinstance(node, SourceNode):
        return events[node.feed.uid]
    inputs = [given[index] for index in node.inputs]
    if node.exchange == "broadcast":
        inputs = [each * (node.parallelism or 1) for each in inputs]
    return _evaluate_step(node.step, inputs)


def _evaluate_step(step: Step, inputs: Sequence[list[Event]]) -> list[Event]:
    taken = [event for each in inputs for event in each]
    match step:
        case MapNode(factor, offset, keys):
            return [(i, (key + value) % keys, (value * factor + offset) % MODULUS, at) for i, key, value, at in taken]
        case FilterNode(modulus, below):
            return [event for event in taken if event[2] % modulus < below]
        case FlatMapNode(copies_max):
            return [
                (i, key, (value + copy) % MODULUS, at)
                for i, key, value, at in taken
                for copy in range(value % (copies_max + 1))
            ]
        case BatchNode(offset):
            return [(i, key, (value + offset) % MODULUS, at) for i, key, value, at in taken]
        case NumberNode():
            return _numbered(taken)
        case DistinctNode(modulus):
            return [(-1, key, rest, 0) for key, rest in sorted({(key, value % modulus) for _, key, value, _ in taken})]
        case WindowNode(size_ms):
            return _windowed(taken, size_ms)
        case UnionNode():
            return taken
        case CoMapNode(first, second):
            pairs = zip(inputs, (first, second), strict=True)
            return [(i, key, (value + offset) % MODULUS, at) for each, offset in pairs for i, key, value, at in each]
        case CoNumberNode():
            return [
                (seq, key, seq * 2 + side, 0)
                for side, each in enumerate(inputs)
                for key, count in count_keys(each).items()
                for seq in range(1, count + 1)
            ]
        case SplitNode(modulus):
            return [event for event in taken if event[2] % modulus == 0]
        case AsideNode(modulus):
            return [event for event in inputs[1] if event[2] % modulus]
        case _:
            assert_never(step)


def _numbered(taken: list[Event]) -> list[Event]:
    counts = count_keys(taken)
    return [(seq, key, seq * 2, 0) for key, count in counts.items() for seq in range(1, count + 1)]


def count_keys(taken: Iterable[Event]) -> dict[int, int]:
    """key -> number of its records."""
    counts: dict[int, int] = {}
    for _, key, _, _ in taken:
        counts[key] = counts.get(key, 0) + 1
    return counts


def _windowed(taken: list[Event], size_ms: int) -> list[Event]:
    windows = add_windows(taken, size_ms)
    return [(start, key, (total * 3 + count) % MODULUS, start) for (key, start), (count, total) in windows.items()]


def add_windows(taken: Iterable[Event], size_ms: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(key, start of a window) -> count and sum of its records."""
    windows: dict[tuple[int, int], tuple[int, int]] = {}
    for _, key, value, at in taken:
        count, total = windows.get((key, at - at % size_ms), (0, 0))
        windows[(key, at - at % size_ms)] = (count + 1, total + value)
    return windows


# ------------------------------------------------------------------------------------------------------------------ draw


def draw_graph(rng: random.Random) -> Graph:
    """One to three feeds, up to seven steps and up to three sinks; then what draw_additions adds."""
    return draw_additions(_Drawing(rng).draw())


def draw_additions(graph: Graph) -> Graph:
    """The graph with other partitionings here and there, and with an operator of two inputs or one with a side output, each with
    sinks of its own.

    Drawn by the graph's own text, so that a seed of before they were known still draws the same feeds, steps and settings."""
    rng = random.Random(repr(graph))
    nodes = [_dealt(rng, node) for node in graph.nodes]
    sinks, present = list(graph.sinks), range(len(nodes))
    if rng.random() < 0.4:
        step: Step = CoNumberNode() if rng.random() < 0.6 else CoMapNode(rng.randint(1, 99), rng.randint(1, 99))
        nodes.append(StepNode(step, (rng.choice(present), rng.choice(present)), parallelism=_draw_parallelism(rng)))
        sinks.append(len(nodes) - 1)
    if rng.random() < 0.4:
        source, modulus, split = rng.choice(present), rng.randint(2, 4), len(nodes)
        nodes.append(StepNode(SplitNode(modulus), (source,), parallelism=_draw_parallelism(rng)))
        nodes.append(StepNode(AsideNode(modulus), (split, source)))
        behind = StepNode(MapNode(rng.randint(1, 9), 1, 4), (split + 1,), parallelism=_draw_parallelism(rng))
        nodes.append(_dealt(rng, behind))
        sinks += [split, split + 2]
    return Graph(tuple(nodes), tuple(sinks))


def _dealt(rng: random.Random, node: Node) -> Node:
    """The node, perhaps with another partitioning in front, if it may have one and nothing depends on the one it has."""
    if not isinstance(node, StepNode) or not isinstance(node.step, MapNode | FilterNode | FlatMapNode | BatchNode):
        return node
    if node.exchange not in ("", "rebalance") or rng.random() < 0.6:
        return node
    return replace(node, exchange=rng.choice(("rescale", "rescale", "shuffle", "global", "custom")))


def _draw_parallelism(rng: random.Random) -> int | None:
    return rng.choice((None, None, None, 1, 2, 4))


class _Drawing:
    """A graph under construction. It evaluates as it grows, so that no stream exceeds its bound."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._nodes: list[Node] = []
        self._given: list[list[Event]] = []
        self._timed: list[bool] = []
        """Per node: whether each record still has its own event time."""
        self._open: list[int] = []
        """Nodes without a reader yet."""

    def draw(self) -> Graph:
        rng = self._rng
        keys = rng.choice((1, 3, 10))
        disorder_ms = rng.choice((0, 30))
        for number in range(rng.choice((1, 1, 2, 2, 3))):
            rows = rng.choice((0, 30, 150, 300, 400)) if number else rng.randint(100, 400)
            start_ms = 10_000 + rng.choice((0, 0, 500))
            feed = Feed(f"feed-{number}", rows, keys, number * 100_000, start_ms, rng.randint(1, 5), disorder_ms)
            self._add(SourceNode(feed, draw_pace(rng, rows), self._parallelism()), timed=True)
        for _ in range(rng.randint(1, STEPS_MAX)):
            self._draw_step()
        while len(self._open) > SINKS_MAX:
            self._unite()
        return Graph(tuple(self._nodes), tuple(sorted(self._open)))

    def _parallelism(self) -> int | None:
        return _draw_parallelism(self._rng)

    def _add(self, node: Node, *, timed: bool) -> None:
        events = {node.feed.uid: feed_events(node.feed, range(node.feed.rows))} if isinstance(node, SourceNode) else {}
        self._given.append(_evaluate_node(node, events, self._given))
        self._timed.append(timed)
        self._nodes.append(node)
        self._open.append(len(self._nodes) - 1)

    def _draw_step(self) -> None:
        rng = self._rng
        if len(self._open) > 1 and rng.random() < 0.3:
            self._unite()
            return
        source = rng.choice(self._open)
        step = self._step(source)
        parallelism = self._parallelism()
        exchange = rng.choice(("", "", "", "rebalance", "rebalance", "forward", "broadcast"))
        upstream = self._nodes[source]
        keyed = isinstance(step, NumberNode | DistinctNode | WindowNode)
        if exchange == "broadcast":
            parallelism = rng.randint(1, 3)
            if len(self._given[source]) * parallelism > ROWS_MAX:
                exchange = "rebalance"
        united = isinstance(upstream, StepNode) and isinstance(upstream.step, UnionNode)
        if keyed or (exchange == "forward" and (united or upstream.parallelism is not None or parallelism is not None)):
            exchange = ""
        if rng.random() < 0.75 or len(self._open) >= SINKS_MAX:
            self._open.remove(source)
        chaining = rng.choice(("", "", "", "head", "never"))
        timed = self._timed[source] and not keyed
        self._add(StepNode(step, (source,), exchange, parallelism, chaining), timed=timed)

    def _step(self, source: int) -> Step:
        rng = self._rng
        kinds = ["map", "map", "filter", "batches", "number", "distinct"]
        if len(self._given[source]) < ROWS_MAX:
            kinds.append("flat_map")
        if self._timed[source]:
            kinds += ["window", "window"]
        match rng.choice(kinds):
            case "map":
                return MapNode(rng.randint(1, 9), rng.randint(0, 99), rng.choice((1, 4, 16)))
            case "filter":
                modulus = rng.randint(2, 5)
                return FilterNode(modulus, rng.randint(1, modulus - 1))
            case "batches":
                return BatchNode(rng.randint(1, 99))
            case "number":
                return NumberNode()
            case "distinct":
                return DistinctNode(rng.choice((2, 7, 30)))
            case "flat_map":
                return FlatMapNode(rng.randint(1, 3))
            case _:
                return WindowNode(rng.choice((30, 100, 400)))

    def _unite(self) -> None:
        chosen = tuple(sorted(self._rng.sample(self._open, 2)))
        self._open = [index for index in self._open if index not in chosen]
        self._add(StepNode(UnionNode(), chosen), timed=all(self._timed[index] for index in chosen))
