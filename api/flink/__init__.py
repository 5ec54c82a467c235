"""Flink's dialect of REST: the forms that its clients need beyond plain JSON."""
