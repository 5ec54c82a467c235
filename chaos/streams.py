"""One root seed; every other stream of random numbers is derived from it by name, so that they don't disturb each other.

Leaving one fault out of a plan, or asking one stream once more, changes nothing in any other stream: that is what lets a
failing seed be minimised."""

from __future__ import annotations

import hashlib
import random


class Streams:
    """Named random streams of one seed; the same (seed, name) always gives the same numbers, in every process."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[str, random.Random] = {}

    def of(self, name: str) -> random.Random:
        """The stream of a name; asked again it goes on where it was."""
        stream = self._streams.get(name)
        if stream is None:
            digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=16).digest()
            stream = self._streams[name] = random.Random(int.from_bytes(digest, "big"))
        return stream
