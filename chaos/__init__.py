"""The simulator. A user's program calls `hf.chaos.expect` alone."""

from holdfast.chaos.expectations import expect

__all__ = ["expect"]
