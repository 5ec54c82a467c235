"""One root seed; every other stream of random numbers is derived from it by name, so that they don't disturb each other.

Leaving one fault out of a plan, or asking one stream once more, changes nothing in any other stream: that is what lets a
failing seed be minimised."""

from __future__ import annotations

import hashlib
import random


class Stream(random.Random):
    """One stream of random numbers."""

    def between(self, low: int, high: int) -> int:
        """As randrange(low, high), low < high, number for number, in half the time: most events draw one."""
        width = high - low
        bits = width.bit_length()
        drawn = self.getrandbits(bits)
        while drawn >= width:
            drawn = self.getrandbits(bits)
        return low + drawn


class Streams:
    """Named random streams of one seed; the same (seed, name) always gives the same numbers, in every process."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[str, Stream] = {}

    def of(self, name: str) -> Stream:
        """The stream of a name; asked again it goes on where it was."""
        stream = self._streams.get(name)
        if stream is None:
            digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=16).digest()
            stream = self._streams[name] = Stream(int.from_bytes(digest, "big"))
        return stream
