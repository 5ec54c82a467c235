"""Statistics over subtasks, workers and jobs, as Flink computes them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

from holdfast.api.flink.vertex_schemas import AggregatedMetric, Statistics

Aggregation: TypeAlias = Literal["min", "max", "avg", "sum", "skew"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def statistics(values: Iterable[float]) -> Statistics:
    """Of at least one number."""
    ordered = sorted(values)
    total = sum(ordered)
    return Statistics(
        min=int(ordered[0]),
        max=int(ordered[-1]),
        avg=int(total / len(ordered)),
        sum=int(total),
        median=int(percentile(ordered, 0.5)),
        p25=int(percentile(ordered, 0.25)),
        p75=int(percentile(ordered, 0.75)),
        p95=int(percentile(ordered, 0.95)),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of sorted numbers, interpolated at the place `share * (count + 1)`, counted from 1. Source: commons-math's Percentile, which
    Flink uses."""
    place = share * (len(ordered) + 1)
    below = int(place)
    if below < 1:
        return ordered[0]
    if below >= len(ordered):
        return ordered[-1]
    return ordered[below - 1] + (place - below) * (ordered[below] - ordered[below - 1])


def aggregate(found: Iterable[Mapping[str, str]], names: Iterable[str], wanted: Iterable[Aggregation]) -> list[AggregatedMetric]:
    """Numbers by name, over the things that have told them; names that nothing has told a number of are left out."""
    things, chosen = list(found), set(wanted)
    told = {name for each in things for name in each}  # thousands of names that nothing has told must not be looked for everywhere
    return [
        _aggregated(name, values, chosen)
        for name in dict.fromkeys(names)
        if name in told and (values := [number for each in things if name in each and (number := _number(each[name])) is not None])
    ]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # a path: there is no sum of such


def _aggregated(name: str, values: Sequence[float], chosen: set[Aggregation]) -> AggregatedMetric:
    total = sum(values)
    average = total / len(values)
    distance = sum(abs(value - average) for value in values) / len(values)
    numbers: dict[Aggregation, float] = {
        "min": min(values),
        "max": max(values),
        "avg": average,
        "sum": total,
        "skew": 100 * distance / abs(average) if average else 0.0,
    }
    return AggregatedMetric.model_validate({"id": name, **{key: value for key, value in numbers.items() if key in chosen}})
