"""Fetches the files of others that pages in a browser use, as `vendored.json` beside this script pins them: `make vendor`.

A package comes from the npm registry by its version, and its archive must have the recorded sha512 (npm's `integrity`); the files
that are named are taken out of it, and nothing of it is run. To renew one: change version and integrity (`npm view NAME dist`), run
this, and look at the pages. SHA-256 of every file is written beside the pins, so that a test without network sees a changed one."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "scripts" / "vendored.json"
SUMS = ROOT / "scripts" / "vendored.sha256"
REGISTRY = "https://registry.npmjs.org"
ARCHIVE_BYTES_MAX = 64 * 1024 * 1024
TIMEOUT_S = 60


def fetch(pin: dict[str, Any]) -> bytes:
    """The archive of a package. Ends the program unless it has the recorded checksum."""
    name = pin["package"]
    url = f"{REGISTRY}/{name}/-/{name.rpartition('/')[2]}-{pin['version']}.tgz"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        content: bytes = answer.read(ARCHIVE_BYTES_MAX)
    found = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
    if found != pin["integrity"]:
        sys.exit(f"vendor: {url} has {found}, and {pin['integrity']} is recorded: nothing was written")
    return content


def files_of(pin: dict[str, Any], archive: bytes) -> dict[Path, bytes]:
    """Path below the repository -> content, with the recorded replacements, each of which occurs once."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        for inside, name in pin["files"].items():
            member = packed.extractfile(f"package/{inside}")
            if member is None:
                sys.exit(f"vendor: {pin['package']} {pin['version']} has no file {inside}")
            content = member.read()
            if name in pin.get("replace", {}):
                old, new = (text.encode() for text in pin["replace"][name])
                if content.count(old) != 1:
                    sys.exit(f"vendor: {pin['package']}: {old!r} is not once in {inside}")
                content = content.replace(old, new)
            found[ROOT / pin["folder"] / name] = content
    return found


def main() -> None:
    wanted: dict[Path, bytes] = {}
    for pin in json.loads(PINS.read_text()):
        wanted |= files_of(pin, fetch(pin))
    for path, content in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    sums = sorted((path.relative_to(ROOT).as_posix(), hashlib.sha256(content).hexdigest()) for path, content in wanted.items())
    SUMS.write_text("".join(f"{digest}  {path}\n" for path, digest in sums))
    sys.stdout.write(f"vendor: {len(wanted)} files\n")


if __name__ == "__main__":
    main()
