"""What a broker knows beside its logs: a file of JSON lines, one a fact, the last of a key holds.

A line is written with one call before its fact is acted on, so a process that is killed has lost nothing that it answered. Nothing
is synced to the disk: a machine that loses its power is not what these tests are about."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Fact = dict[str, Any]


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.facts: dict[tuple[str, ...], Fact] = {}
        """By key: the kind of fact, then its name."""
        if path.exists():
            for line in path.read_bytes().split(b"\n")[:-1]:  # the last is empty, or was cut off
                self._remember(json.loads(line))
        self._write_anew()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def put(self, kind: str, *name: str, **fields: Any) -> None:
        fact = {"kind": kind, "name": list(name), **fields}
        self._remember(fact)
        os.write(self._file, json.dumps(fact).encode() + b"\n")

    def remove(self, kind: str, *name: str) -> None:
        self.put(kind, *name, gone=True)

    def of_kind(self, kind: str) -> list[tuple[tuple[str, ...], Fact]]:
        return [(key[1:], fact) for key, fact in self.facts.items() if key[0] == kind]

    def close(self) -> None:
        os.close(self._file)

    def _remember(self, fact: Fact) -> None:
        key = (fact["kind"], *fact["name"])
        if fact.get("gone"):
            self.facts.pop(key, None)
        else:
            self.facts[key] = fact

    def _write_anew(self) -> None:
        """Only what holds: a file that a hundred starts wrote stays as short as that."""
        whole = self._path.with_suffix(".tmp")
        whole.write_bytes(b"".join(json.dumps(fact).encode() + b"\n" for fact in self.facts.values()))
        os.replace(whole, self._path)
