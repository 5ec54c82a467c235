"""Nexmark on Holdfast: events, queries, the same queries in SQL, and how fast they are."""
