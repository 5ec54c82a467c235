"""Writes docs/settings.md from the records of the settings: JobConfig, RestartStrategy and RocksDBConfig.

    .venv/bin/python scripts/settings_page.py            # a test fails while the page is out of date

Meaning and bounds are the docstrings below the fields; defaults are the fields' own."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from holdfast.barriers.jobgraph import JobConfig, RestartStrategy  # noqa: E402
from holdfast.barriers.tunable import TUNABLE  # noqa: E402
from holdfast.statebackends.settings import RocksDBConfig  # noqa: E402

PAGE = ROOT / "docs" / "settings.md"
HEAD = """\
# Settings

<!-- Written by scripts/settings_page.py from barriers/jobgraph.py and statebackends/settings.py: change the docstrings there. -->

Settings are keywords of `hf.Environment`, or fields of an `hf.JobConfig` for `config=`; a keyword overrides the config. All are
checked when the environment is made: `InvalidConfigError` names the setting that is unknown (with the nearest ones), of a wrong
type, or out of bounds. Times are in ms and sizes in bytes.

```python
env = hf.Environment(
    "spending",
    parallelism=4,
    state_dir="/data/holdfast",
    state_backend="rocksdb",
    checkpoint_interval_ms=5_000,
    restart=hf.RestartStrategy(attempts_max=10),
    rocksdb=hf.RocksDBConfig(block_cache_bytes=256 * 1024 * 1024),
)
```

A restored job takes its settings from the `Environment` that restores it; from the snapshot only the max parallelism.

These can be changed while a job runs, until its next submission ([rest](rest.md#settings-of-a-running-job)): TUNABLE.

## Arguments of the Environment alone

| argument | default | meaning |
|---|---|---|
"""
ARGUMENTS = (
    ("`name`", "", "Name of the job, by which a later submission finds it."),
    (
        "`parallelism`",
        "`1`",
        "Subtasks of each operator that has no `set_parallelism` of its own. A job takes as many slots as its widest operator has "
        "subtasks ([cluster](cluster.md#slots)).",
    ),
    (
        "`state_dir`",
        "`None`",
        "Folder or `s3://bucket/prefix` of checkpoints, shared by driver, coordinator and workers; a coordinator runs in the "
        "driver.",
    ),
    ("`coordinator`, `token`", "`None`", "URL and token of a running `holdfast serve`, in place of `state_dir`."),
    (
        "`ca`",
        "`None`",
        "File of the certificates that driver and workers trust, PEM: the `_ca.pem` of a coordinator's state directory, where that "
        "is not at hand. Else `HOLDFAST_CA`, the state directory's, the system's.",
    ),
    ("`config`", "`None`", "A `JobConfig`."),
    ("`require_uids`", "`False`", "Refuse a job with an operator without `uid`; False logs a warning that names such operators."),
    (
        "`chaining`",
        "`True`",
        "Let operators share a subtask where no exchange is needed between them ([operators](operators.md#chains)).",
    ),
    ("`launcher`", "Spark", "Where workers run."),
)
SECTIONS: dict[str, tuple[str, ...]] = {
    "Checkpoints": (
        "checkpoint_interval_ms",
        "checkpoint_interval_during_backlog_ms",
        "checkpoint_timeout_ms",
        "min_pause_ms",
        "max_concurrent_checkpoints",
        "tolerable_failed_checkpoints",
        "retained_checkpoints",
        "retained_hourly",
        "retained_daily",
        "retained_within_ms",
        "drill_interval_ms",
        "retention_on_cancel",
        "retain_on_finish",
        "savepoint_directory",
        "checkpointing_mode",
        "unaligned_checkpoints",
        "aligned_checkpoint_timeout_ms",
        "inflight_bytes_max",
        "master_hooks",
        "master_hook_timeout_ms",
    ),
    "State": (
        "state_backend",
        "incremental_checkpoints",
        "max_parallelism",
        "local_recovery",
        "local_recovery_directory",
        "inline_threshold",
        "pack_threshold",
        "memory_snapshot_bytes_max",
        "row_table_bytes_max",
        "rocksdb",
    ),
    "Failures": (
        "restart",
        "skipped_rows_max",
        "heartbeat_interval_ms",
        "heartbeat_timeout_ms",
        "reconcile_timeout_ms",
        "standby_workers_per_host",
        "cancellation_timeout_ms",
    ),
    "Flow of records": (
        "buffer_timeout_ms",
        "batch_rows_max",
        "channel_credit_bytes",
        "channel_credit_batches",
        "channel_credit_bytes_start",
        "buffer_debloat",
        "buffer_debloat_target_ms",
        "buffer_debloat_period_ms",
        "step_budget_ms",
        "auto_watermark_interval_ms",
        "combine_aggregates",
        "latency_tracking_interval_ms",
    ),
}
"""Heading -> fields of JobConfig; others come last, under "Other"."""
RECORDS: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("RestartStrategy: `restart=`", RestartStrategy),
    ("RocksDBConfig: `rocksdb=`", RocksDBConfig),
)


def meanings(record: type[msgspec.Struct]) -> dict[str, str]:
    """The docstring below each field that has one, on one line."""
    tree = ast.parse(inspect.getsource(sys.modules[record.__module__]))
    (definition,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == record.__name__)
    found = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
        if is_text and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            found[field.target.id] = " ".join(below.value.value.split())
    return found


def page() -> str:
    """The whole page."""
    placed = {name for names in SECTIONS.values() for name in names}
    others = tuple(name for name in JobConfig.__struct_fields__ if name not in placed)
    sections = {**SECTIONS, **({"Other": others} if others else {})}
    arguments = "".join(f"| {' | '.join(argument)} |\n" for argument in ARGUMENTS)
    tunable = ", ".join(f"`{name}`" for name in TUNABLE)
    head = HEAD.replace("TUNABLE", tunable)
    parts = [head, arguments, *(f"\n## {heading}\n\n{table(JobConfig, names)}" for heading, names in sections.items())]
    for heading, record in RECORDS:
        about = " ".join((inspect.getdoc(record) or "").split())
        parts.append(f"\n## {heading}\n\n{about}\n\n{table(record, record.__struct_fields__)}")
    return "".join(parts)


def table(record: type[msgspec.Struct], names: tuple[str, ...]) -> str:
    """Name, type, default and meaning of these fields. Raises KeyError for a field that does not exist or has no docstring."""
    fields = {field.name: field for field in msgspec.structs.fields(record)}
    described = meanings(record)
    rows = []
    for name in names:
        kind, default = type_text(fields[name].type), default_text(fields[name])
        rows.append(f"| `{name}` | {kind} | `{default}` | {cell(described[name])} |")
    return "\n".join(("| setting | type | default | meaning |", "|---|---|---|---|", *rows, ""))


def type_text(kind: Any) -> str:
    """A type as one writes it: `int`, `str or None`."""
    if getattr(kind, "__origin__", None) is tuple:
        return f"`{kind}`"
    members = getattr(kind, "__args__", (kind,))
    return " or ".join("None" if member is type(None) else f"`{member.__name__}`" for member in members)


def default_text(field: Any) -> str:
    """A default as one writes it in Python, with thousands and powers of two made readable."""
    value = field.default
    if isinstance(value, msgspec.Struct):
        return f"{type(value).__name__}()"
    if type(value) is not int:
        return f'"{value}"' if isinstance(value, str) else repr(value)
    return number_text(value)


def number_text(value: int) -> str:
    """A size in MiB as a product, other numbers with thousands separators."""
    mebibyte = 1 << 20
    if value >= mebibyte and value % mebibyte == 0:
        return f"{value // mebibyte} * 1024 * 1024"
    return "2**31 - 1" if value == 2**31 - 1 else f"{value:_}"


def cell(text: str) -> str:
    """A table cell, with bars escaped."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
