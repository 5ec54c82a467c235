"""What a driver has the Python daemons of its executors load before they fork workers, beside what every worker needs."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

from holdfast.statebackends.storage import is_s3

PRELOAD = "HOLDFAST_PRELOAD"
"""Environment variable of the executors' Python: names from below, with commas between."""
S3 = "s3"
"""boto3 and what comes with it."""


def ask_for(environment: MutableMapping[str, str], locations: Iterable[str]) -> None:
    """Have daemons load what storage at these locations needs.

    Spark starts another daemon when the environment changes, so that what was asked for once stays."""
    asked = {name for name in environment.get(PRELOAD, "").split(",") if name}
    asked.update(S3 for location in locations if is_s3(location))
    if asked:
        environment[PRELOAD] = ",".join(sorted(asked))
