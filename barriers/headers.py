"""HTTP headers in which coordinator, workers and drivers say what a body does not: which error it is, and who leads."""

from __future__ import annotations

import json
from typing import Any

ERROR_HEADER = "X-Holdfast-Error"
"""Name of the error's class."""

FIELDS_HEADER = "X-Holdfast-Fields"
"""The error's fields as one JSON object in ASCII."""

UNREACHABLE_HEADER = "X-Holdfast-Unreachable"
"""On a request: epoch of a leader that the client was sent to, and that does not lead as far as it can tell."""


def decode_fields(text: str | None) -> dict[str, Any]:
    """An error's fields by name; none of them in what is no JSON object."""
    try:
        fields = json.loads(text or "{}")
    except ValueError:
        return {}
    return {str(name): value for name, value in fields.items() if name != "message"} if isinstance(fields, dict) else {}
