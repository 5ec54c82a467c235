"""PostgreSQL: rows into a table, and a table's changes as rows. Its clients are imported where they connect."""
