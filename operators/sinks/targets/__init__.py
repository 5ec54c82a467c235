"""The exactly-once sink of any target: staged rows, commit positions, and the committer that applies the ones by the others."""
