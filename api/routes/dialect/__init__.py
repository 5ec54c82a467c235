"""Flink's monitoring dialect: a route each, in Flink 2.3's shapes; `routers` puts them in order."""
