"""`hf.testing`: a whole job in a test, with a clock that the test moves. See docs/testing.md."""

from holdfast.api.testing.feed import Feed
from holdfast.api.testing.job import Job
from holdfast.api.testing.output import Output

__all__ = ["Feed", "Job", "Output"]
