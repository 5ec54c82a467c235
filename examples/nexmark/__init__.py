"""Nexmark on Holdfast: events, queries, and the same queries in SQL."""
