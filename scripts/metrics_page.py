"""Writes docs/metrics.md from the collectors of `/metrics`.

    .venv/bin/python scripts/metrics_page.py             # a test fails while the page is out of date

Name, type, labels and meaning are those that a scrape of an empty coordinator gives."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from holdfast.api.events.stream import EventStreams  # noqa: E402
from holdfast.api.events.webhooks import Webhooks  # noqa: E402
from holdfast.api.http.connection_budget import BodyBudget, ConnectionLimits  # noqa: E402
from holdfast.api.http.protocol import ConnectionGuard  # noqa: E402
from holdfast.api.routes.service import metrics  # noqa: E402
from holdfast.coordinator.views import SUBTASKS_SHOWN_MAX  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
HEAD = """\
# Metrics

<!-- Written by scripts/metrics_page.py from api/routes/service/metrics.py: change the texts there. -->

`GET /metrics` is in Prometheus' text format, for callers with the role `viewer` or more. Counters of jobs restart with the
coordinator, as Prometheus expects; each job is told by the coordinator that leads it. A number that nobody has told is left out.

```yaml
scrape_configs:
  - job_name: holdfast
    scheme: https
    tls_config: {ca_file: /etc/prometheus/holdfast-ca.pem}                            # the state directory's _ca.pem
    authorization: {type: Bearer, credentials_file: /etc/prometheus/holdfast-token}   # holdfast token create --role viewer
    static_configs: [{targets: ["coordinator-0:8443", "coordinator-1:8443"]}]
```

[`deploy/prometheus/holdfast.rules.yml`](../deploy/prometheus/holdfast.rules.yml) has alert rules, each with a link into the
[runbook](runbook.md), and [`deploy/grafana/holdfast.json`](../deploy/grafana/holdfast.json) a dashboard.

## Bounds of labels

One scrape has at most JOBS jobs (live ones first, newest first), SUBTASKS subtasks, SPLITS splits, OPERATORS operators,
COUNTERS counters of users' functions and LATENCIES pairs of a source and a vertex over all jobs, and SHOWN subtasks of one job.
`holdfast_metrics_left_out` says how many more there are, by `kind`; REST has all of them. Routes of HTTP requests are templates.

## Table
"""


class Row(NamedTuple):
    """One metric."""

    name: str
    """As Prometheus stores it; of a histogram without its endings."""
    kind: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def samples(self) -> tuple[str, ...]:
        """Names that queries may use."""
        return tuple(f"{self.name}{end}" for end in ("_bucket", "_sum", "_count")) if self.kind == "histogram" else (self.name,)


class _Nobody:
    """A coordinator without jobs."""

    ready = True

    def broken_jobs(self) -> dict[str, str]:
        return {}

    def numbers(self) -> tuple[Any, ...]:
        return ()


class _Alone:
    """The only member."""

    is_active = True
    epoch = 1

    def active(self) -> _Alone:
        return self


def rows() -> list[Row]:
    """All metrics, sorted by name."""
    guard = ConnectionGuard(ConnectionLimits(64, 16, 8), BodyBudget(1, kept_for_workers=0))
    found = [*_families(metrics.CoordinatorCollector(_Nobody()).collect())]  # type: ignore[arg-type]
    found += _families(metrics.ConnectionCollector(guard).collect())
    found += _families(metrics.EventCollector(EventStreams(), Webhooks((), _Nobody(), "")).collect())
    found += _families(metrics.MemberCollector(_Alone()).collect())  # type: ignore[arg-type]
    found += _registered(metrics.HttpMetrics(CollectorRegistry()))
    return sorted(found, key=lambda row: row.name)


def _families(families: Any) -> Iterator[Row]:
    for family in families:
        assert isinstance(family, Metric)
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield Row(name, family.type, tuple(getattr(family, "_labelnames", ())), family.documentation)


def _registered(holder: object) -> Iterator[Row]:
    for metric in vars(holder).values():
        if isinstance(metric, Counter | Gauge | Histogram):
            yield from _labelled(metric)


def _labelled(metric: Counter | Gauge | Histogram) -> Iterator[Row]:
    for family in metric.describe():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield Row(name, family.type, tuple(metric._labelnames), family.documentation)


def page() -> str:
    """The whole page."""
    bounds = {
        "JOBS": metrics.JOBS_MAX,
        "SUBTASKS": metrics.SUBTASKS_MAX,
        "SPLITS": metrics.SPLITS_MAX,
        "OPERATORS": metrics.OPERATORS_MAX,
        "COUNTERS": metrics.USER_COUNTERS_MAX,
        "LATENCIES": metrics.LATENCIES_MAX,
        "SHOWN": SUBTASKS_SHOWN_MAX,
    }
    head = HEAD
    for name, bound in bounds.items():
        head = head.replace(name, f"{bound:,}")
    table = [f"| `{row.name}` | {row.kind} | {' '.join(f'`{each}`' for each in row.labels)} | {row.meaning} |" for row in rows()]
    tail = "\nOn Linux also those of the process, as every Prometheus client names them: `process_resident_memory_bytes`,\n"
    tail += "`process_cpu_seconds_total`, `process_open_fds`, `process_max_fds`, `process_start_time_seconds`.\n"
    return "\n".join([head, "| metric | type | labels | meaning |", "|---|---|---|---|", *table, tail])


if __name__ == "__main__":
    PAGE.write_text(page())
