"""`python -m tests.scenarios FILE...`: run scenario tables against the real cores; without a file, the project's own."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.scenarios.runner import run_files

OWN_TABLES = Path(__file__).parent / "tables.md"


def main(arguments: list[str]) -> int:
    try:
        report = run_files([Path(argument) for argument in arguments] or [OWN_TABLES])
    except (OSError, UnicodeDecodeError) as error:
        print(f"can't read: {error}", file=sys.stderr)
        return 2
    for line in report.lines:
        print(line)
    print(f"{report.passed} passed, {report.failed} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
