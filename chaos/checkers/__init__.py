"""The invariants, each checked from outside the job."""
