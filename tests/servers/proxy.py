"""The proxy of the conformance kit, for tests of servers."""

from holdfast.api.testing.proxy import Break, Cut, Direction, Proxy

__all__ = ["Break", "Cut", "Direction", "Proxy"]
