"""Flink's dialect of REST: what its clients read beyond plain JSON."""
