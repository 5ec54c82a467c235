"""The simulator. `hf.chaos.expect` is all of it that a user's program calls."""

from chaos.expectations import expect

DISTRIBUTION = "holdfast"

__all__ = ["expect"]
