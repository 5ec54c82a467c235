"""The simulator. `hf.chaos.expect` is all of it that a user's program calls."""

from holdfast.chaos.expectations import expect

__all__ = ["expect"]
