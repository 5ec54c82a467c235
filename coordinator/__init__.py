"""Leads jobs: checkpoints, attempts, restores, records, ownership of files.

A number in a comment here, such as I11 or K06, is a rule of docs/invariants.md."""
