"""Snapshots for users: opened by path or URL, in Python and on the command line."""
