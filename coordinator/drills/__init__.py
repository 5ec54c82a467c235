"""Drills: every row of a snapshot is read as a restore would read it, in a process of its own, to know that it could be."""
