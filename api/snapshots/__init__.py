"""Snapshots as people and programs meet them: opened by path or URL, in Python and on the command line."""
