"""Output of `holdfast label`: the answers of REST as lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.api.cli import console


def show_labels(found: Mapping[str, Any], *, as_json: bool) -> None:
    """`found`: the answer of GET /v1/jobs/:jobid/labels."""
    if as_json:
        console.show_json(found)
        return
    rows = [
        (each["label"], each["checkpoint_id"], each["kind"], console.time_text(each["created_ms"]), each["location"])
        for each in found["labels"]
    ]
    console.show_table(("LABEL", "ID", "KIND", "SINCE", "WHERE"), rows, empty="no labels")
    for damage in found["damage"]:
        console.show_note(f"can't be read, and is left out: {damage}")
